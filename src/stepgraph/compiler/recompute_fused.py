"""Recomputation inside a fused step: the gradient pass computes cheap results again instead of reading them.

PyTorch's compiler sees the whole step as one program, so everything that the gradient pass reads stays in memory from
the forward pass on. Much of that costs next to nothing to compute again inside the kernel that reads it: casts,
activations, normalized values, dropout masks. The fewest bytes from which all the rest can be recomputed are a minimum
cut of the forward pass.

Recomputed operators must not be merged with the originals again. So they read what was kept through `later`, which
makes it available only when the gradient pass has got that far.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from stepgraph.compiler.minimum_cut import UNLIMITED, Network
from stepgraph.compiler.program import Phase, fake, fakes, inherit, is_view, notes
from stepgraph.system import torch_private

aten, prims = torch.ops.aten, torch.ops.prims
SMALL = 1 << 20  # bytes that caches hold: reading them costs nothing
_CREATED = (aten.full.default, aten.scalar_tensor.default, prims.iota.default)
_REDUCTIONS = ("sum", "mean", "prod", "amax", "amin", "var", "var_mean", "std", "any", "all", "logsumexp")

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
            if not _is_gradient(source):
                node.replace_input_with(source, again.later(source, node))
    graph.lint()


def recompute_cheap(graph: fx.Graph) -> None:
    """Lets the gradient pass recompute results so that the fewest bytes wait for it."""
    repeated = _repeated(graph)
    again = _Again(graph)
    for node in list(graph.nodes):
        if _is_gradient(node):
            for source in node.all_input_nodes:
                if source in repeated:
                    node.replace_input_with(source, again.copy(source, node, repeated))
    graph.eliminate_dead_code()
    graph.lint()


def _repeated(graph: fx.Graph) -> set[fx.Node]:
    """The results of the forward pass that do not wait for the gradient pass; views of what does are not repeated."""
    levels = _levels(graph)
    behind = _network(levels).behind_cut()
    found: set[fx.Node] = set()
    for node in levels:
        if (node, "in") in behind and (not is_view(node) or any(source in found for source in node.all_input_nodes)):
            found.add(node)
    return found


def _network(levels: dict[fx.Node, int]) -> Network:
    """What can be computed from what in the forward pass; capacities are the cost of keeping a result."""
    network = Network("given", "gradients")
    for node in levels:
        if not isinstance(fake(node), torch.Tensor) and not is_view(node):
            continue
        if not _may_repeat(node) or any(_is_distant(source, node, levels) for source in node.all_input_nodes):
            network.connect("given", (node, "in"))
        network.connect((node, "in"), (node, "out"), UNLIMITED if is_view(node) else _cost(node))
        for user in node.users:
            if not _is_gradient(user):
                network.connect((node, "out"), (user, "in"))
            elif node.op != "placeholder":  # that an update reads a weight does not make its cast free
                network.connect((node, "out"), "gradients")
    return network


def _levels(graph: fx.Graph) -> dict[fx.Node, int]:
    """How many operators that no kernel can absorb, such as products, come before each result of the forward pass."""
    levels: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op == "output" or _is_gradient(node):
            continue
        before = max((levels[source] for source in node.all_input_nodes), default=0)
        levels[node] = before + (node.op == "call_function" and not _is_absorbed(node))
    return levels


def _is_distant(source: fx.Node, node: fx.Node, levels: dict[fx.Node, int]) -> bool:
    """Whether an operator reads something large from before the last product, such as a residual sum.

    Recomputing such results one from another would read ever more arrays, back to the start of the network.
    """
    return 0 < levels[source] < levels[node] and not _is_small(source) and source.op != "placeholder"


def _cost(node: fx.Node) -> int:
    """Bytes that are kept; arrays that are there anyway only need to be read."""
    stays = node.op == "placeholder" or any(user.op == "output" for user in node.users)
    return max(1, fake(node).nbytes // (2 if stays else 1))


def _is_gradient(node: fx.Node) -> bool:
    """Whether an operator runs after the forward pass."""
    return node.op == "call_function" and notes(node).phase != Phase.FORWARD


def _may_repeat(node: fx.Node) -> bool:
    """Whether an operator costs nothing inside the kernel that reads its result."""
    if node.op != "call_function" or not _is_absorbed(node) or _is_reduction(node):
        return False
    return is_view(node) or not _is_small(node)


def _is_absorbed(node: fx.Node) -> bool:
    """Whether the operator becomes part of a generated kernel."""
    if node.target is getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return _is_absorbed(source)
    target = node.target
    if not isinstance(target, torch_private.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    plain = torch.Tag.pointwise in target.tags or target in _CREATED
    return plain or is_view(node) or _is_reduction(node)


def _is_reduction(node: fx.Node) -> bool:
    maker = node.args[0] if node.target is getitem else node
    target = maker.target if isinstance(maker, fx.Node) else None
    return isinstance(target, torch_private.OpOverload) and target.name().split("::")[1].split(".")[0] in _REDUCTIONS


def _is_small(node: fx.Node) -> bool:
    return all(array.nbytes < SMALL for array in fakes(node))


class _Again:
    """Second copies of operators, where the gradient pass first needs them."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.copies: dict[fx.Node, fx.Node] = {}
        self.barriers: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
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

    def _source(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """What a copy reads; one large array that comes later is enough to hold a whole kernel back."""
        if node in self.copies:
            return self.copies[node]
        return node if _is_small(node) or _is_gradient(node) else self.later(node, user)

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
        computed = _is_gradient(node) and not notes(node).recomputed and not _is_absorbed(node)
        last = node if computed and isinstance(fake(node), torch.Tensor) else last
    return found
