"""Which inputs of products the gradient pass writes again by default, because that hardly takes time.

A product of the gradient pass reads some element-wise results of the forward pass: the gradient of a layer's weights
reads the activation before it. Such an array waits in memory for as long as anything does. Recomputing it takes one
more write, in a kernel that reads its sources anyway, or an additional kernel. The product runs behind that kernel.
Bytes that are moved so are limited to a share of what a step moves and computes; a step that keeps little recomputes
nothing of this kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from stepgraph.compiler.passes.absorbed import (
    computed_inside,
    is_absorbed,
    is_gradient,
    is_small,
    levels,
    made,
    may_repeat,
    sums_rows,
    users_of,
)
from stepgraph.compiler.passes.convolution_gradients import needing, separate
from stepgraph.compiler.program import call, fake, fakes, is_view
from stepgraph.system import torch_private

aten = torch.ops.aten
SHARE = 0.01  # of a step's time, at most
ENOUGH = 1 << 30  # bytes that wait for products; less is not worth any time
OPERATIONS = 200  # of a product in half precision, in the time that a GPU takes to read a byte


def kept_for_products(graph: fx.Graph) -> set[fx.Node]:
    """The results of the forward pass that operators outside of generated kernels read in the gradient pass."""
    inside = computed_inside(graph)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_gradient(node) and node not in inside and not is_view(node):
            found |= {made(source) for source in node.all_input_nodes}
    return {node for node in found if not is_gradient(node) and node.op == "call_function"}


def read_from_concatenations(graph: fx.Graph, kept: Set[fx.Node]) -> None:
    """Lets kernels of the gradient pass read a result from a concatenation that is kept, if it is not kept itself."""
    inside = computed_inside(graph)
    for node in [one for one in graph.find_nodes(op="call_function", target=aten.cat.default) if one in kept]:
        parts, axis = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if any(fake(part).ndim != fake(node).ndim for part in parts):
            continue  # empty parts may have another shape
        starts = [0, *accumulate(fake(part).shape[axis] for part in parts)]
        for part, bounds in zip(parts, pairwise(starts), strict=True):
            readers = [user for user in part.users if user in inside]
            alone = made(part) not in kept and part.op == "call_function"
            if readers and alone and fake(part).dtype == fake(node).dtype:
                _read_part(node, axis, bounds, part, readers)


def _read_part(whole: fx.Node, axis: Any, bounds: tuple[int, int], part: fx.Node, readers: Iterable[fx.Node]) -> None:
    first = min(readers)
    with whole.graph.inserting_before(first):
        found = call(first, aten.slice.Tensor, (whole, axis, *bounds))
    for reader in readers:
        reader.replace_input_with(part, found)


def affordable(graph: fx.Graph, kept: Set[fx.Node]) -> set[fx.Node]:
    """Those of the results kept for products that the gradient pass can write again within its share of the step.

    Those that cost least for their bytes are chosen; of equal ones the first, which are recomputed last, when the most
    memory has been freed.
    """
    if sum(fake(one).nbytes for one in kept) < ENOUGH:
        return set()
    order, kernels = levels(graph), _kernels(graph)
    budget, found = SHARE * _work(graph), set[fx.Node]()
    costs = dict[fx.Node, int]()
    for node in [one for one in order if one in kept and may_repeat(one) and _lowers_peak(one, order, kept)]:
        sources = _sources(node, order, kept)
        if sources is not None and all(_waits(one, node, kept, kernels) for one in sources):
            costs[node] = fake(node).nbytes + _read_for(node, sources, kernels)
    for node in sorted(costs, key=lambda one: costs[one] / fake(one).nbytes):
        if costs[node] <= budget:
            found.add(node)
            budget -= costs[node]
    return found


def write_late(graph: fx.Graph, written: Set[fx.Node], kept: Set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Moves products that read what is written again behind kernels that can write it, as they read its sources.

    In graph order, products come first. What they read would have to be written by a kernel of its own.

    Returns:
        what such kernels can write, by their first operator.
    """
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    order, kernels = levels(graph), _kernels(graph)  # moving and dividing products changes neither
    for node in [one for one in order if one in written]:
        sources = _sources(node, order, kept - written) or set()
        like = _alike(node, sources)
        if like is not None:
            separate(node, like)
        readers = set[fx.Node]().union(*(_readers(one, kernels) for one in sources))
        passed = [_postpone(product, readers) for product in sorted(_products(node), reverse=True)]
        first = min((one for one in passed if one is not None), default=None)
        if first is not None:
            found[first].append(node)
    graph.lint()
    return found


def read_beside(graph: fx.Graph, kept: Set[fx.Node]) -> set[fx.Node]:
    """Those of the results kept for products that kernels read only together with the array they are computed from.

    An example is a ReLU behind a normalization: the gradients of both read the normalization's source. So a kernel
    need not read the ReLU's result, too.
    """
    order, kernels = levels(graph), _kernels(graph)
    return {node for node in kept if may_repeat(node) and _meets_source(node, order, kernels)}


def _meets_source(node: fx.Node, order: dict[fx.Node, int], kernels: Set[fx.Node]) -> bool:
    """Whether all that is computed from a result in the gradient pass meets its only source before the next product."""
    sources = _sources(node, order, set())
    if sources is None or len(sources) != 1:
        return False
    (source,) = sources
    met, readers = _behind(_readers(source, kernels, without=node), kernels), _readers(node, kernels)
    return bool(readers) and not any(met.isdisjoint(_behind({one}, kernels)) for one in readers)


def _waits(source: fx.Node, node: fx.Node, kept: Set[fx.Node], kernels: Set[fx.Node]) -> bool:
    """Whether an array waits for the gradient pass anyway, not only for a result to be recomputed from it."""
    return source.op == "placeholder" or source in kept or bool(_readers(source, kernels, without=node))


def _alike(node: fx.Node, sources: Iterable[fx.Node]) -> fx.Node | None:
    """The first source of the same shape, type and layout as what is computed from it."""
    return min((one for one in sources if _form(one) == _form(node)), default=None)


def _form(node: fx.Node) -> Any:
    array = fake(node)
    return (array.shape, array.dtype, array.stride()) if isinstance(array, torch.Tensor) else None


def _postpone(product: fx.Node, readers: Set[fx.Node]) -> fx.Node | None:
    """Moves a product, with what is computed from it, behind the next readers, and behind the products after these.

    So it is the last product before the kernels that follow. What these recompute waits for it (`later`), which keeps
    it in its place: PyTorch's compiler moves operators to what reads their results, here to the update.

    Returns:
        the first of these readers; None if there is none.
    """
    passed, behind, last, left = list[fx.Node](), {product}, 0, False
    met: fx.Node | None = None
    node = product.next
    while node.op == "call_function" and (_is_product(node) or not left):
        passed.append(node)
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
        elif node in readers or (met is not None and _is_product(node)):
            met, left, last = met or node, _is_product(node), len(passed)
        node = node.next
    place = passed[last - 1] if last else product
    for one in [product, *(node for node in passed[:last] if node in behind)] if last else ():
        place.append(one)
        place = one
    return met


def _lowers_peak(node: fx.Node, order: dict[fx.Node, int], kept: Set[fx.Node]) -> bool:
    """Whether the gradient pass has freed as much as a result needs when it comes to recompute it.

    By then it has passed everything behind the product that reads the result.
    """
    freed = (fake(one).nbytes for one in kept if order[one] > order[node] + 1)
    return sum(freed) >= fake(node).nbytes


def _sources(node: fx.Node, order: dict[fx.Node, int], kept: Set[fx.Node]) -> set[fx.Node] | None:
    """The large arrays that a result is computed from element by element; None if one is from before the last product.

    Then it would have to be kept for longer, or be recomputed itself.
    """
    found, seen, pending = set[fx.Node](), {node}, [node]
    while pending:
        for source in map(made, pending.pop().all_input_nodes):
            if is_small(source) or source in seen:
                continue
            seen.add(source)
            if order[source] < order[node] and source.op != "placeholder":
                return None
            if source not in kept and may_repeat(source):
                pending.append(source)
            else:
                found.add(source)
    return found


def _kernels(graph: fx.Graph) -> set[fx.Node]:
    """The operators inside generated kernels that depend on a product of the gradient pass: they run at that time.

    Others become part of these.
    """
    inside, found, running = computed_inside(graph), set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        depends = any(source in running for source in node.all_input_nodes)
        if is_gradient(node) and (depends or not is_absorbed(node)):
            running.add(node)
            found |= {node} & inside
    return found


def _read_for(node: fx.Node, sources: Iterable[fx.Node], kernels: Set[fx.Node]) -> int:
    """Bytes that are read only to recompute a result: of sources that no kernel reads at that time anyway."""
    products = _products(node)
    if _alike(node, sources) is not None:
        products = set[fx.Node]().union(*(needing(user, node) for user in products))
    later = _behind(products)
    return sum(fake(one).nbytes for one in sources if not _readers(one, kernels) - later)


def _products(node: fx.Node) -> set[fx.Node]:
    """The operators of the gradient pass outside of generated kernels that read a result."""
    return set(filter(_is_product, users_of(node)))


def _is_product(node: fx.Node) -> bool:
    return is_gradient(node) and not is_absorbed(node)


def _readers(node: fx.Node, kernels: Set[fx.Node], without: fx.Node | None = None) -> set[fx.Node]:
    """The operators of the gradient pass in whose kernels an array is read, also through what is computed from it.

    With `without`, except through that.
    """
    found, seen, pending = set[fx.Node](), {node, without}, [node]
    while pending:
        for user in users_of(pending.pop()):
            if user in kernels:
                found.add(user)
            elif user not in seen and may_repeat(user):
                seen.add(user)
                pending.append(user)
    return found


def _behind(first: Set[fx.Node], among: Set[fx.Node] | None = None) -> set[fx.Node]:
    """What can only run after these operators, or those of them that can be reached through some operators only."""
    found, pending = set(first), list(first)
    while pending:
        for user in pending.pop().users:
            if user not in found and (among is None or user in among):
                found.add(user)
                pending.append(user)
    return found


def _work(graph: fx.Graph) -> float:
    """The time of a step, in bytes that could be moved meanwhile."""
    found = float(_moved_by_kernels(graph))
    for node in graph.nodes:
        if node.op == "call_function" and not is_absorbed(node):
            moved = {one: array.nbytes for one in (node, *node.all_input_nodes) for array in fakes(one)}
            found += sum(moved.values()) + _operations(node) / OPERATIONS
    return found


def _moved_by_kernels(graph: fx.Graph) -> int:
    """Bytes that generated kernels at least read of what is in memory for products, and write there."""
    absorbed = {node for node in graph.nodes if node.op == "call_function" and is_absorbed(node)}
    passes = {node for node in absorbed if is_gradient(node)}, {node for node in absorbed if not is_gradient(node)}
    found = 0
    for node in [one for one in graph.nodes if isinstance(fake(one), torch.Tensor) and not is_view(one)]:
        users = users_of(node)
        if node in absorbed and users <= absorbed:
            continue  # need not be in memory
        read = sum(_reads(users & kernels, kernels) for kernels in passes)
        found += fake(node).nbytes * (read + (node in absorbed))
    return found


def _reads(readers: Set[fx.Node], kernels: Set[fx.Node]) -> int:
    """How often a pass reads an array: whatever is computed with sums over its rows is in a second kernel."""
    return bool(readers) + any(map(sums_rows, _behind(readers, kernels)))


def _operations(node: fx.Node) -> int:
    """Arithmetic operations of a product or a convolution; 0 for what PyTorch cannot count."""
    target: Any = node.target
    if not isinstance(target, torch_private.OpOverload) or target.overloadpacket not in flop_registry:
        return 0
    arguments, settings = fx.map_arg((node.args, node.kwargs), fake)
    try:
        return int(flop_registry[target.overloadpacket](*arguments, **settings, out_val=fake(node)))
    except AssertionError:  # attention in which several queries share a key
        return 0
