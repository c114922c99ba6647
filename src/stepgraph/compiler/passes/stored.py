"""Results that a fused step writes to memory once, where PyTorch's compiler would compute or copy them repeatedly.

The compiler computes elementwise results inside every kernel that reads them. Four kinds are cheaper to read:
constants such as tables of sines; what operators outside of its kernels read repeatedly, such as attention and its
gradient, because it makes a copy for each of their arguments; numbers that are looked up, such as whether all
indices are in range, because a kernel would wait for memory twice, for the place and for what is there; and numbers
per channel that come from sums over a batch, because a kernel would read those sums for every element, and combine
them for every element.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import fx

from stepgraph.compiler.passes.absorbed import (
    is_absorbed,
    is_combined,
    is_reduction,
    is_small,
    made,
    sums_rows,
    users_of,
)
from stepgraph.compiler.passes.constants import find
from stepgraph.compiler.program import fake, fakes, inherit, is_view
from stepgraph.system import torch_private

aten, prims = torch.ops.aten, torch.ops.prims
# Functions that take longer than reading their result from memory.
_COSTLY = {
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logit", "pow", "sigmoid"),
    *("sin", "cos", "tan", "sinc", "sinh", "cosh", "tanh"),
    *("asin", "acos", "atan", "atan2", "asinh", "acosh", "atanh"),
    *("erf", "erfc", "erfinv", "lgamma", "digamma", "polygamma"),
}
_SPREAD = 2  # how much larger than its costly operators a stored constant may be: it is not broadcast to a whole batch
# Operators that only move elements: kernels read the right element instead.
MOVES = {
    aten.cat.default,
    aten.constant_pad_nd.default,
    aten.flip.default,
    prims.rev.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
    aten.repeat.default,
    aten.select_scatter.default,
    aten.slice_scatter.default,
}


LOOKS_UP = {aten.gather.default, aten.index.Tensor, aten.index_select.default}

torch.library.define("stepgraph::written", "(Tensor x) -> Tensor")


@torch.library.impl("stepgraph::written", "CompositeExplicitAutograd")
def written(x: torch.Tensor) -> torch.Tensor:
    """A copy; in fused steps the kernel that computes `x` writes it there."""
    return x.clone()


@torch.library.register_fake("stepgraph::written")
def _(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def store_constants(graph: fx.Graph) -> None:
    """Stores constants that are costly to compute, if results that are not constant read them."""
    constants = dict[fx.Node, frozenset[fx.Node]]()  # each with the costly operators that it is computed with
    for node in find(graph):
        before = frozenset[fx.Node]().union(*(constants[source] for source in node.all_input_nodes))
        constants[node] = before | {node} if _name(node) in _COSTLY else before
    read = [node for node in constants if any(user not in constants for user in node.users)]
    store(graph, {one for node in read for one in _tables(node, constants)})


def store_sources(graph: fx.Graph) -> None:
    """Stores results of which operators outside of generated kernels would make several copies."""
    store(graph, {node for node in graph.nodes if is_inlined(node) and _copied(node) > size(node)})


def store_numbers(graph: fx.Graph) -> None:
    """Stores numbers that are looked up at a computed place, if several arrays are computed with them."""
    looked_up = dict[fx.Node, None]()
    for node in graph.nodes:
        if _is_number(node) and (node.target in LOOKS_UP or any(one in looked_up for one in node.all_input_nodes)):
            looked_up[node] = None
    for node in looked_up:
        if is_inlined(node) and sum(size(user) > 1 for user in node.users) > 1:
            write_once(node)
    graph.lint()


def store_factors(graph: fx.Graph) -> None:
    """Stores numbers per channel that combine sums over a batch with other numbers, if large results read them."""
    for node in list(graph.nodes):
        if is_inlined(node) and is_combined(node) and _scales(node) and _comes_from_sums(node):
            write_once(node)
    graph.lint()


def store(graph: fx.Graph, chosen: Set[fx.Node]) -> None:
    """Lets everything that reads these results read them from memory, where they are laid out as recorded."""
    for node in [one for one in graph.nodes if one in chosen]:
        with graph.inserting_after(node):
            stored = graph.call_function(torch_private.written_to_memory(), (node, fake(node).stride()))
        node.replace_all_uses_with(inherit(stored, node), lambda user, stored=stored: user is not stored)
    graph.lint()


def write_once(node: fx.Node) -> None:
    """Lets everything that reads a computed result read it from memory."""
    with node.graph.inserting_after(node):
        stored = write(node)
    node.replace_all_uses_with(stored, lambda user: user is not stored)


def write(node: fx.Node) -> fx.Node:
    """A result in memory, laid out as the compiler likes; at the graph's insertion point."""
    torch_private.lower_to_buffer(torch.ops.stepgraph.written.default)
    return inherit(node.graph.call_function(torch.ops.stepgraph.written.default, (node,)), node)


def arguments(node: fx.Node) -> list[fx.Node]:
    """What an operator reads, as often as it is passed."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def is_inlined(node: fx.Node) -> bool:
    """Whether the compiler computes a result inside the kernels that read it."""
    target = node.target
    return isinstance(target, torch_private.OpOverload) and (torch.Tag.pointwise in target.tags or target in MOVES)


def size(node: fx.Node) -> int:
    """The elements of all results of an operator."""
    return sum(array.numel() for array in fakes(node))


def _scales(node: fx.Node) -> bool:
    """Whether generated kernels compute large results with a small one."""
    return any(is_absorbed(user) and not is_small(user) for user in users_of(node))


def _comes_from_sums(node: fx.Node) -> bool:
    """Whether a small result is computed from sums of whole rows of memory, and not from sums along rows.

    What is computed from the latter stays in their kernel, which has the rows too.
    """
    sums, pending = False, [node]
    while pending:
        for source in map(made, pending.pop().all_input_nodes):
            if is_reduction(source):
                if not sums_rows(source):
                    return False
                sums = True
            elif is_inlined(source) and is_small(source):
                pending.append(source)
    return sums


def _is_number(node: fx.Node) -> bool:
    """Whether a result is one number that the compiler computes inside other kernels, or a view of one."""
    return size(node) == 1 and (is_inlined(node) or is_view(node))


def _tables(node: fx.Node, constants: Mapping[fx.Node, frozenset[fx.Node]]) -> set[fx.Node]:
    """What to store of a constant: itself, or what it is made of if it is much larger than that."""
    found, pending = set(), [node]
    while pending:
        one = pending.pop()
        is_table = isinstance(fake(one), torch.Tensor) and not is_view(one)
        if is_table and size(one) <= _SPREAD * sum(map(size, constants[one])):
            found.add(one)
        else:
            pending += [source for source in one.all_input_nodes if constants[source]]
    return found


def _copied(node: fx.Node) -> int:
    """How many elements the compiler would copy for operators outside of its kernels, directly or through views."""
    count, pending = 0, [node]
    while pending:
        one = pending.pop()
        for user in one.users:
            if is_view(user):
                pending.append(user)
            elif _is_called(user):
                count += size(one) * arguments(user).count(one)
    return count


def _is_called(node: fx.Node) -> bool:
    return isinstance(node.target, torch_private.OpOverload) and torch_private.is_called(node.target)


def _name(node: fx.Node) -> str:
    """An operator's name without namespace and overload."""
    target = node.target
    return target.name().split("::")[1].split(".")[0] if isinstance(target, torch_private.OpOverload) else ""
