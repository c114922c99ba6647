"""Recomputation inside a fused step: the gradient pass computes cheap results again instead of reading them.

PyTorch's compiler sees the whole step as one program, so everything that the gradient pass reads stays in memory from
the forward pass on. Much of that costs next to nothing to compute again inside the kernel that reads it: casts,
activations, normalized values, dropout masks. The fewest bytes from which all the rest can be recomputed are a minimum
cut of the forward pass.

What a kernel recomputes for itself stays in registers: that saves memory and traffic, so every step on a GPU does it.
What a product reads must be written again. That takes time, so by default only little is (`rewritten.py`), and as much
as the cut says only for a memory limit.

Recomputed operators must not be merged with the originals again. So they read what was kept through `later`, which
makes it available only when the gradient pass has got that far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import fx

from stepgraph.compiler.passes.absorbed import (
    are_apart,
    computed_inside,
    is_absorbed,
    is_combined,
    is_distant,
    is_gradient,
    is_small,
    levels,
    made,
    may_repeat,
    reads,
)
from stepgraph.compiler.passes.minimum_cut import UNLIMITED, Network
from stepgraph.compiler.passes.rewritten import (
    affordable,
    kept_for_products,
    read_beside,
    read_from_concatenations,
    write_late,
)
from stepgraph.compiler.passes.stored import store
from stepgraph.compiler.program import fake, inherit, is_view, notes, remove_dead

aten = torch.ops.aten
READS = 4  # arrays; what is computed from more, PyTorch's compiler writes if several kernels read it

torch.library.define(
    "stepgraph::later", "(Tensor(a) kept, Tensor after) -> Tensor(a)", tags=(torch.Tag.flexible_layout,)
)


@torch.library.impl("stepgraph::later", "CompositeExplicitAutograd")
def later(kept: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The same array, once `after` has been computed: a compiler can move nothing that reads it to an earlier place."""
    return kept.view_as(kept)


@torch.library.register_fake("stepgraph::later")
def _(kept: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return kept.view_as(kept)


def separate(graph: fx.Graph) -> None:
    """Keeps operators that were noted as recomputed apart from the originals; merged, they would save nothing."""
    again = _Again(graph)
    for node in [one for one in graph.nodes if notes(one).recomputed]:
        for source in node.all_input_nodes:
            if not is_gradient(source):
                node.replace_input_with(source, again.later(source, node))
    graph.lint()


def recompute_cheap(graph: fx.Graph) -> None:
    """Lets the gradient pass recompute results so that the fewest bytes wait for it."""
    if not are_apart(graph):
        return
    order = levels(graph)
    _recompute(graph, _Cut(order, computed_inside(graph), staying=_staying(order, set()), price=2))


def recompute_by_default(graph: fx.Graph) -> None:
    """Lets kernels of the gradient pass recompute what they read, and write again what hardly takes time.

    What is in memory for products is read, except by kernels that read what it is computed from.
    """
    if not are_apart(graph):
        return
    kept = kept_for_products(graph)
    read_from_concatenations(graph, kept)
    written = affordable(graph, kept)
    beside = write_late(graph, written, kept)
    order, inside = levels(graph), computed_inside(graph)
    many = {node for node, count in reads(order).items() if count > READS and not inside.isdisjoint(node.users)}
    read = read_beside(graph, kept - many)
    staying = _staying(order, kept - written)
    _recompute(graph, _Cut(order, inside, staying, many - written, read, written & read, beside=beside))


def _recompute(graph: fx.Graph, cut: _Cut) -> None:
    """Lets the gradient pass recompute what is behind a cut; the cut itself is in memory."""
    repeated = cut.repeated()
    store(graph, cut.inlined(repeated))
    again = _Again(graph)
    for node in [one for one in graph.nodes if is_gradient(one)]:
        for source in cut.beside.get(node, ()):
            if source in repeated:
                again.copy(source, node, repeated)
        for source in node.all_input_nodes:
            if source in repeated and cut.may_replace(source, node):
                copy = again.copy(source, node, repeated)
                alone = source in cut.apart and node in cut.inside
                node.replace_input_with(source, again.alone(source, node) if alone else copy)
            elif node in cut.inside:
                node.replace_input_with(source, again.read(source, node))
    remove_dead(graph)


def _staying(order: Iterable[fx.Node], kept: Set[fx.Node]) -> set[fx.Node]:
    """Arrays that are in memory anyway, and their views: those that a step is given or returns, and what is kept."""
    ends = {made(node) for node in order if any(user.op == "output" for user in node.users)}
    return {node for node in order if node.op == "placeholder" or made(node) in ends or made(node) in kept}


@dataclass(frozen=True)
class _Cut:
    """The cheapest arrays of the forward pass from which the gradient pass can compute the others that it reads.

    Args:
        order: the results of the forward pass, with their levels.
        inside: operators of the gradient pass that generated kernels compute.
        staying: arrays that are in memory anyway. Operators outside of generated kernels read these as they are.
        refused: results that are not recomputed.
        read: those that are in memory anyway, but cost their bytes: reading them costs more than computing them.
        apart: results that are recomputed twice: written for products, and inside kernels, which need not read that.
        price: how many times cheaper it is to keep what is in memory anyway.
        beside: for operators of the gradient pass, the results that their kernel can write for products.
    """

    order: Mapping[fx.Node, int]
    inside: Set[fx.Node]
    staying: Set[fx.Node]
    refused: Set[fx.Node] = frozenset()
    read: Set[fx.Node] = frozenset()
    apart: Set[fx.Node] = frozenset()
    price: int = UNLIMITED
    beside: Mapping[fx.Node, Sequence[fx.Node]] = field(default_factory=dict)

    def may_replace(self, source: fx.Node, user: fx.Node) -> bool:
        """Whether an operator of the gradient pass may read a recomputed result."""
        return user in self.inside or source not in self.staying

    def repeated(self) -> set[fx.Node]:
        """The results of the forward pass that are recomputed; views of what is kept are not repeated."""
        behind = self._network().behind_cut()
        found: set[fx.Node] = set()
        for node in self.order:
            viewed = not is_view(node) or any(source in found for source in node.all_input_nodes)
            if (node, "in") in behind and viewed:
                found.add(node)
        return found

    def inlined(self, repeated: Set[fx.Node]) -> set[fx.Node]:
        """Element-wise results, such as residual sums or factors, from which the gradient pass recomputes others.

        The compiler would compute them again in every kernel from arrays that wait instead. It would also take the bias
        out of a product, and add it in one more kernel for what is kept.
        """
        read = {made(source) for node in repeated for source in node.all_input_nodes}
        rest = (read - set(repeated) - set(self.staying)) & set(self.order)
        large = {node for node in rest if may_repeat(node) or node.target is aten.addmm.default}
        return {node for node in large if not is_small(node)} | set(filter(is_combined, rest))

    def _network(self) -> Network:
        """What can be computed from what in the forward pass; capacities are the cost of keeping a result."""
        network = Network("given", "gradients")
        for node in self.order:
            if not isinstance(fake(node), torch.Tensor) and not is_view(node):
                continue
            if self._is_given(node):
                network.connect("given", (node, "in"))
            network.connect((node, "in"), (node, "out"), UNLIMITED if is_view(node) else self._cost(node))
            for user in node.users:
                if not is_gradient(user):
                    network.connect((node, "out"), (user, "in"))
                # That an update reads a weight does not make its cast free.
                elif node.op != "placeholder" and self.may_replace(node, user):
                    network.connect((node, "out"), "gradients")
        return network

    def _is_given(self, node: fx.Node) -> bool:
        distant = any(is_distant(source, node, self.order) for source in node.all_input_nodes)
        return not may_repeat(node) or node in self.refused or distant

    def _cost(self, node: fx.Node) -> int:
        """Bytes that are kept; arrays that are there anyway only need to be read."""
        return max(1, fake(node).nbytes // (self.price if node in self.staying - self.read else 1))


class _Again:
    """Second copies of operators, where the gradient pass first needs them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inner: dict[fx.Node, fx.Node] = {}
        self.barriers: dict[tuple[fx.Node, fx.Node | None], fx.Node] = {}
        self.products = _products_before(graph)
        self.written = {one for node in graph.nodes if node.target is aten.copy_.default for one in node.args[:1]}

    def copy(self, node: fx.Node, user: fx.Node, repeated: set[fx.Node]) -> fx.Node:
        """A second `node` just before `user`."""
        stack = [node]
        while stack:
            current = stack[-1]
            missing = [one for one in current.all_input_nodes if one in repeated and one not in self.copies]
            stack += missing
            if missing:
                continue
            stack.pop()
            if current not in self.copies:
                sources = {one: self._source(one, user) for one in current.all_input_nodes}
                with self.graph.inserting_before(user):
                    twin = self.graph.node_copy(current, sources.__getitem__)
                self.copies[current] = inherit(twin, current, phase=notes(user).phase, recomputed=True)
        return self.copies[node]

    def alone(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """A third `node`, for kernels alone: PyTorch's compiler writes the second, because products read that."""
        if node not in self.inner:
            second = self.copies[node]
            with self.graph.inserting_before(user):
                self.inner[node] = inherit(self.graph.node_copy(second), second)
        return self.inner[node]

    def read(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """An array under the name that copies in the same kernel read it by, so that one read serves both."""
        return self.barriers.get((node, self.products[user]), node)

    def _source(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """What a copy reads; one large array that comes later is enough to hold a whole kernel back."""
        if node in self.copies:
            return self.copies[node]
        return node if is_small(node) or is_gradient(node) else self.later(node, user)

    def later(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """An array of the forward pass that cannot be read before the gradient pass has got to `user`."""
        after = self.products[user]
        if after is None or node in self.written or not isinstance(fake(node), torch.Tensor):
            return node
        if (node, after) not in self.barriers:
            with self.graph.inserting_before(user):
                found = self.graph.call_function(torch.ops.stepgraph.later.default, (node, after))
            inherit(found, node, layer=notes(user).layer, phase=notes(user).phase)
            self.barriers[node, after] = found
        return self.barriers[node, after]


def _products_before(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """For each operator, the last result of the gradient pass before it that is in memory anyway."""
    found: dict[fx.Node, fx.Node | None] = {}
    last = None
    for node in graph.nodes:
        found[node] = last
        computed = is_gradient(node) and not notes(node).recomputed and not is_absorbed(node)
        last = node if computed and isinstance(fake(node), torch.Tensor) else last
    return found
