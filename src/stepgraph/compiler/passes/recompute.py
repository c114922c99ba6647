"""Recomputation: drops results of the forward pass and recomputes them when the gradient needs them.

A result that the gradient pass reads stays alive until then. If it is dropped after its last use in the forward
pass and recomputed from live arrays just before the gradient needs it, it takes no memory in between.
The same operators on the same numbers give the same numbers: training is unchanged, only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from itertools import cycle, islice
from operator import getitem, itemgetter
from typing import Any

import torch
from torch import fx

from stepgraph.compiler import memory
from stepgraph.compiler.operators import operator
from stepgraph.compiler.passes.in_place import in_place
from stepgraph.compiler.program import Part, Phase, fake, inherit, mutates, notes, storage
from stepgraph.compiler.step import Step
from stepgraph.system import torch_private

aten = torch.ops.aten
SMALL = 1 << 12  # bytes not worth recomputing
PASSES = 4  # how often each cut between segments is considered


class Effort(IntEnum):
    """What may be recomputed."""

    CHEAP = 0  # no products
    PRODUCTS = 1  # products too, once
    EVERYTHING = 2  # everything, as often as it is read


def fit(step: Step, part: Part, limit: int) -> Part:
    """The part, recomputing enough to fit into `limit` bytes; if nothing fits, as close as possible.

    Recomputes cheap results first, largest first. If that is not enough, it splits the forward pass into segments:
    only what crosses from one to the next is kept, and a segment is rerun before its gradients; as a last resort,
    as often as its gradients read it.
    """
    best, least = _cheapest(step, part, limit)
    for effort in (Effort.PRODUCTS, Effort.EVERYTHING):
        if least > limit:
            best, least = min((best, least), _segmented(step, part, limit, effort), key=itemgetter(1))
    return best


def largest_batch(needed: Callable[[int], int | None], batch: int, of_batch: int, limit: int) -> int:
    """The largest batch size that fits, or 0, extrapolated linearly from two sizes and then verified."""
    one = needed(1) if batch > 1 else None
    if one is None or one > limit:
        return 0
    guess = min(batch - 1, 1 + (limit - one) * (batch - 1) // max(1, of_batch - one))
    while guess > 1 and ((found := needed(guess)) is None or found > limit):
        guess -= max(1, guess // 16)
    return guess


def _segmented(step: Step, part: Part, limit: int, effort: Effort) -> tuple[Part, int]:
    """Keeps what crosses between segments; then merges or splits segments, one at a time, while that helps."""
    everything = {one for node in _waiting(part) for one in memory.storages(node)}
    cuts = _cuts(part)

    def keeping(some: frozenset[int]) -> tuple[int, Part]:
        tried = _recomputing(part, everything - some, effort)
        return memory.plan(step, tried).total, tried

    kept = frozenset(cuts)
    least, best = keeping(kept)
    since = 0  # cuts considered since one of them helped
    for one in islice(cycle(cuts), PASSES * len(cuts)):
        if least <= limit or since >= len(cuts):
            break
        needed, tried = keeping(kept ^ {one})
        since += 1
        if needed < least:
            kept, least, best, since = kept ^ {one}, needed, tried, 0
    return best, least


def _cheapest(step: Step, part: Part, limit: int) -> tuple[Part, int]:
    """Drops one result after another, of those alive at the peak, until the plan fits."""
    best = in_place(part)
    least = memory.plan(step, best).total
    dropped: set[int] = set()
    refused: set[int] = set()
    while least > limit:
        candidates = _largest_at_peak(best, part, dropped | refused, least - limit)
        if not candidates:
            break
        tried = _recomputing(part, dropped | candidates, Effort.CHEAP)
        needed = memory.plan(step, tried).total
        if needed > least:
            refused |= candidates
            continue
        dropped |= candidates
        best, least = tried, needed
    return best, least


def _largest_at_peak(part: Part, original: Part, known: Collection[int], excess: int) -> set[int]:
    """The largest cheap results that wait for the gradient pass at the peak, up to `excess` bytes in total."""
    alive = memory.alive_at_peak(part)
    sizes = {
        one: _size(node)
        for node in _waiting(original)
        if (one := storage(node)) in alive and one not in known and not _is_costly(node)
    }
    chosen: set[int] = set()
    for one in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if excess <= 0:
            break
        chosen.add(one)
        excess -= sizes[one]
    return chosen


def _cuts(part: Part) -> list[int]:
    """Results that everything later in the forward pass depends on, in order."""
    calls = (node for node in part.module.graph.nodes if node.op == "call_function")
    nodes = [node for node in calls if notes(node).phase == Phase.FORWARD]
    waiting = {storage(node) for node in _waiting(part)}
    last: dict[int, int] = {}
    for time, node in enumerate(nodes):
        for source in node.all_input_nodes:
            if source.op == "call_function":
                for one in memory.storages(source):
                    last[one] = time
    found: list[int] = []
    live: set[int] = set()
    for time, node in enumerate(nodes):
        large = (one for one, size in memory.sizes(node).items() if size > SMALL)
        live = {one for one in (*live, *large) if last.get(one, -1) > time}
        if len(live) == 1 and (one := next(iter(live))) in waiting and one not in found:
            found.append(one)
    return found


def _waiting(part: Part) -> Iterator[fx.Node]:
    """Results of the forward pass that the gradient pass reads."""
    entering = {storage(node) for node in part.module.graph.nodes if node.op == "placeholder"}
    for node in part.nodes:
        crosses = notes(node).phase == Phase.FORWARD and any(_is_later(user) for user in node.users)
        own = isinstance(fake(node), torch.Tensor) and storage(node) not in entering
        if crosses and own and _size(node) > SMALL:
            yield node


def _size(node: fx.Node) -> int:
    return fake(node).untyped_storage().nbytes()


def _is_later(node: fx.Node) -> bool:
    return node.op != "output" and notes(node).phase != Phase.FORWARD


def _is_costly(node: fx.Node) -> bool:
    """Whether this operator is a product; our own implementations of products count too."""
    maker = node.args[0] if node.target is getitem else node
    target = maker.target if isinstance(maker, fx.Node) else None
    known = isinstance(maker, fx.Node) and operator(maker).is_costly
    return known or not isinstance(target, torch_private.OpOverload) or target.namespace != "aten"


def _recomputing(part: Part, dropped: set[int], effort: Effort) -> Part:
    """The part with these results recomputed for the gradient pass, except those that cannot be."""
    while True:
        new = part.copied()
        again = _Again(new.module.graph, dropped, effort)
        try:
            for node in list(new.module.graph.nodes):
                if node.op == "call_function" and _is_later(node):
                    again.prepare(node)
        except _Needed as needed:
            dropped = dropped - {needed.storage}
            continue
        return in_place(new)


class _Needed(Exception):
    """A result cannot be recomputed."""

    def __init__(self, storage: int | None) -> None:
        self.storage = storage


class _Again:
    """Second copies of operators, created when the gradient pass first needs them."""

    def __init__(self, graph: fx.Graph, dropped: set[int], effort: Effort) -> None:
        self.graph, self.dropped, self.effort = graph, dropped, effort
        self.copies: dict[fx.Node, fx.Node] = {}
        self.order = {node: time for time, node in enumerate(graph.nodes)}
        read = {storage(source) for node in graph.nodes if _is_later(node) for source in node.all_input_nodes}
        self.saved = read - dropped
        changing = [node for node in reversed(graph.nodes) if mutates(node)]
        self.changed = {storage(one): self.order[node] for node in changing for one in node.all_input_nodes}

    def prepare(self, user: fx.Node) -> None:
        """Makes an operator of the gradient pass read copies of what was dropped."""
        wanted = [one for one in user.all_input_nodes if storage(one) in self.dropped and not _is_later(one)]
        for node in wanted:
            self._copy(node, user)
        user.args = fx.map_arg(user.args, lambda one: self.copies[one] if one in wanted else one)
        # When memory is this short, cheap results are not kept for a second reader.
        if self.effort is Effort.PRODUCTS:
            self.copies = {node: twin for node, twin in self.copies.items() if _is_costly(node)}
        elif self.effort is Effort.EVERYTHING:
            self.copies = {}

    def _copy(self, node: fx.Node, user: fx.Node) -> None:
        """A second `node` just before `user`, from sources that are alive or are copied too."""
        stack = [node]
        while stack:
            current = stack[-1]
            missing = [one for one in current.all_input_nodes if not self._is_there(one)]
            if missing and self._may_repeat(current, user):
                stack += missing
                continue
            stack.pop()
            if current not in self.copies:
                if not self._may_repeat(current, user):
                    raise _Needed(storage(current) if storage(current) in self.dropped else storage(node))
                self._repeat(current, user)

    def _is_there(self, node: fx.Node) -> bool:
        if node.op == "placeholder" or node in self.copies:
            return True
        return storage(node) is not None and storage(node) in self.saved

    def _may_repeat(self, node: fx.Node, user: fx.Node) -> bool:
        """Excludes operators that change arrays, costly ones unless necessary, and those whose sources have changed."""
        if node.op != "call_function" or mutates(node) or (_is_costly(node) and self.effort is Effort.CHEAP):
            return False
        sources = [one for one in node.all_input_nodes if one not in self.copies]
        return all(self.changed.get(storage(one), len(self.order)) > self.order[user] for one in sources)

    def _repeat(self, node: fx.Node, user: fx.Node) -> None:
        with self.graph.inserting_before(user):
            twin = self.graph.node_copy(node, lambda one: self.copies.get(one, one))
        inherit(twin, node, _described(twin, node), phase=notes(user).phase, recomputed=True)
        self.copies[node] = twin


def _described(twin: fx.Node, node: fx.Node) -> Any:
    """The fake of the second result, in its own storage, or its sources' if it is a view: plans rely on it."""
    source = twin.args[0]
    if node.target is getitem and isinstance(source, fx.Node):
        return fake(source)[twin.args[1]]
    if isinstance(fake(node), torch.Tensor) and storage(node) in map(storage, node.all_input_nodes):
        arguments, settings = fx.map_arg((twin.args, twin.kwargs), fake)
        with fake(node).fake_mode:
            return node.target(*arguments, **settings)  # type: ignore[operator]
    return torch_private.tree_map_only(torch.Tensor, _same_layout, fake(node))


def _same_layout(array: Any) -> torch.Tensor:
    with array.fake_mode:
        return torch.empty_strided(array.shape, array.stride(), dtype=array.dtype, device=array.device)
