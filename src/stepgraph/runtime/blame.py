"""Finds where a NaN or an infinity first appeared in a step.

Only what a step leaves behind counts: its loss and other results that no layer reads, trained gradients, and what
it changes (parameters, optimizer state, statistics). An intermediate infinity without effect, such as those of an
attention mask in a softmax, is not reported. The search follows non-finite values backward from what was left behind
to the earliest one that was computed from finite numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from stepgraph.compiler.program import Phase
from stepgraph.compiler.step import (
    NUMBERS,
    REFUSED,
    SCALE,
    SHARE,
    STREAM,
    Key,
    KeyKind,
    gradient,
    layer_tensors,
    source_gradient,
    state,
    user_gradient,
    value,
)
from stepgraph.layers.node import Node
from stepgraph.runtime.finite import all_finite
from stepgraph.runtime.trial import Trial
from stepgraph.tensors.tensor import Tensor

_Mark = tuple[Key, bool]  # an array of a trial, before or after the step changed it
_STATE = (KeyKind.STATE, KeyKind.AVERAGE)
_GRADIENTS = (KeyKind.GRADIENT, KeyKind.SOURCE_GRADIENT, KeyKind.USER_GRADIENT)


@dataclass(frozen=True)
class Origin:
    """The first array that is not finite.

    Args:
        key: which array it is; `after` shows whether an update or the end of a pass wrote it.
        node: the node that produced it, or read it first.
        phase: `"forward"`, `"gradient"` or `"update"`.
        given: whether it came from outside the step: input, label, parameter, state, user gradient.
    """

    key: Key
    after: bool
    node: Node | None
    phase: str
    given: bool


def unread(nodes: Sequence[Node]) -> list[Tensor]:
    """Results that no layer reads, including the loss."""
    read = {tensor for node in nodes for tensor in node.arguments}
    return [tensor for node in nodes for tensor in node.results if tensor not in read]


class Search:
    """Traces what a trial left behind to its first NaN or infinity."""

    def __init__(self, trial: Trial) -> None:
        self.trial, self.step = trial, trial.step
        self._known: dict[_Mark, bool] = {}

    @cached_property
    def origin(self) -> Origin | None:
        """The earliest origin, or None if everything that counts is finite."""
        stack = [mark for mark in self._ends() if self._is_bad(mark)]
        seen: set[_Mark] = set(stack)
        origins: list[_Mark] = []
        while stack:
            mark = stack.pop()
            causes = [cause for cause in self._causes(mark) if self._is_bad(cause)]
            if not causes:
                origins.append(mark)
            stack += [cause for cause in causes if cause not in seen]
            seen.update(causes)
        return self._described(min(origins, key=self._time)) if origins else None

    @cached_property
    def first_nan(self) -> Node | None:
        """The node that produced the first NaN, which can come after the first infinity."""
        for node in self.step.nodes:
            arrays = [self.trial.found[value(t)] for t in node.results if value(t) in self.trial.found]
            if any(array.is_floating_point() and bool(array.isnan().any()) for array in arrays):
                return node
        return None

    @property
    def overflowed(self) -> bool:
        """Whether a scaled loss overflowed the float16 gradients: the step was skipped, as intended."""
        step, found = self.step, self.trial.found
        trained = [found[gradient(t)] for t in step.trainable if gradient(t) in found]
        return step.scales_loss and not all_finite(trained)

    def array(self, key: Key, after: bool = False) -> torch.Tensor | None:
        """An array of the trial."""
        trial = self.trial
        return trial.after.get(key) if after else trial.found.get(key, trial.before.get(key))

    def _is_bad(self, mark: _Mark) -> bool:
        if mark not in self._known:
            array = self.array(*mark)
            self._known[mark] = array is not None and not all_finite([array])
        return self._known[mark]

    def _ends(self) -> Iterator[_Mark]:
        """What a step leaves behind."""
        step = self.step
        yield from ((value(t), False) for t in unread(step.nodes))
        if not step.scales_loss:
            yield from ((gradient(t), False) for t in step.trainable)
        own = (STREAM, NUMBERS, SHARE, SCALE, REFUSED)
        yield from ((key, True) for key in self.trial.after if key not in own and key.kind != KeyKind.ROUNDED)

    def _causes(self, mark: _Mark) -> Iterator[_Mark]:
        """The arrays that an array was computed from."""
        key, after = mark
        if after:
            yield from self._causes_of_change(key)
        elif key.kind == KeyKind.VALUE:
            node = self._made_by.get(key.owner)
            yield from self._read(node) if node is not None else ()
        elif key.kind == KeyKind.SOURCE_GRADIENT:
            yield from self._differentiated(key.owner)
        elif key.kind == KeyKind.GRADIENT:
            tensor = key.owner
            yield user_gradient(tensor), False
            for node in self._readers.get(tensor, ()):
                yield from ((source_gradient(node, i), False) for i, t in enumerate(node.arguments) if t is tensor)
                if tensor not in node.arguments:
                    yield from self._differentiated(node)

    def _causes_of_change(self, key: Key) -> Iterator[_Mark]:
        yield key, False
        if key.owner in self.step.trainable_set:
            optimizer = self.step.optimizer
            together = optimizer is not None and optimizer.needs_global_norm
            yield from ((gradient(t), False) for t in (self.step.trainable if together else [key.owner]))
            slots = len(self.step.slots_of(key.owner))
            yield from ((one, False) for one in (value(key.owner), *(state(key.owner, i) for i in range(slots))))
        else:
            for node in self._readers.get(key.owner, ()):
                yield from self._read(node)

    def _read(self, node: Node) -> Iterator[_Mark]:
        return ((value(t), False) for t in (*node.arguments, *layer_tensors(node)))

    def _differentiated(self, node: Node) -> Iterator[_Mark]:
        """A local derivative is computed from the gradients of the results and what the forward pass read."""
        yield from ((gradient(t), False) for t in node.results)
        yield from ((value(t), False) for t in node.results)
        yield from self._read(node)

    @cached_property
    def _made_by(self) -> dict[Tensor, Node]:
        return {tensor: node for node in self.step.nodes for tensor in node.results}

    @cached_property
    def _readers(self) -> dict[Tensor, list[Node]]:
        found: dict[Tensor, list[Node]] = {}
        for node in self.step.nodes:
            for tensor in dict.fromkeys((*node.arguments, *layer_tensors(node))):
                found.setdefault(tensor, []).append(node)
        return found

    @cached_property
    def _order(self) -> dict[Tensor, int]:
        return {tensor: order for order, tensor in enumerate(self.step.held)}

    @cached_property
    def _index(self) -> dict[Node, int]:
        return {node: index for index, node in enumerate(self.step.nodes)}

    def _node(self, mark: _Mark) -> Node | None:
        """The node that produced an array, or that reads it first if it came from outside."""
        key, _ = mark
        if key.kind == KeyKind.SOURCE_GRADIENT:
            return key.owner if isinstance(key.owner, Node) else None
        maker = self._made_by.get(key.owner)
        readers = self._readers.get(key.owner, [])
        # The gradient of a parameter is complete once its first reader has been differentiated.
        return maker or (readers[0] if readers else None)

    def _time(self, mark: _Mark) -> tuple[float, int, int]:
        """When an array appeared in the step; outside arrays are ordered as inputs, parameters, state."""
        (key, after), count = mark, len(self.step.nodes)
        node, order = self._node(mark), self._order.get(key.owner, 0)
        index = self._index[node] if node is not None else 0
        if after:
            when = 3 * count + index if key.owner in self.step.trainable_set else count
            return when, key.kind == KeyKind.VALUE, order
        if key.kind in _GRADIENTS:
            return 2 * count - index + (0.5 if key.kind == KeyKind.GRADIENT else 0), 0, order
        if key.owner in self._made_by:
            return index, 0, 0
        return index - 0.5, 0 if key.owner in self.step.fed else 2 if key.kind in _STATE else 1, order

    def _described(self, mark: _Mark) -> Origin:
        key, after = mark
        gradients = key.kind in _GRADIENTS
        written = after and key.owner in self.step.trainable_set
        phase = Phase.UPDATE if written or key.kind in _STATE else Phase.GRADIENT if gradients else Phase.FORWARD
        return Origin(key, after, self._node(mark), phase, given=not after and self._is_given(key))

    def _is_given(self, key: Key) -> bool:
        """Whether an array comes from outside the step."""
        if key.kind == KeyKind.VALUE:
            return key.owner not in self._made_by
        return key.kind in (*_STATE, KeyKind.USER_GRADIENT)
