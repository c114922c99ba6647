"""A training step like the last one.

Before operators run, a call finds out what to run, what to check and what to keep. Training repeats one call, and for
a tiny network finding all this out takes longer than the operators. So the next call only compares what it depends on.
"""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Any, NamedTuple

from stepgraph.graphs.compilation import Arrays
from stepgraph.graphs.session import Answer, Session
from stepgraph.runtime.executable import Binding
from stepgraph.runtime.execution import Execution
from stepgraph.runtime.feeds import Passed
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import ExecutionOptions

_NONE = ExecutionOptions.NONE  # looking up a member of an enumeration takes longer
_current = attrgetter("current")
Read = tuple[Arrays, int]  # the arrays of a call, and its rows


class Before(NamedTuple):
    """What a step depends on, as it was before the step found out what to do: other threads may change it meanwhile."""

    session: Session
    switches: int
    memory: list[Any]

    @classmethod
    def of(cls, session: Session, switches: int) -> Before:
        """As it is now. `switches` counts how often a parameter was frozen or unfrozen before the session was found."""
        return cls(session, switches, [*map(_current, session.compilation.held)])


class Repetition:
    """What a training step without options, outputs and completion has found out, for the next one.

    Args:
        before: what it depends on.
        batch: the rows of the step.
        binding: what ran, with the arrays that persist between calls.
    """

    def __init__(self, before: Before, batch: int, binding: Binding) -> None:
        session, self._switches, self._memory = before
        assert session.state is not None
        self._session, self._batch, self._binding = session, batch, binding
        self._state, self._compilation = session.state, session.compilation
        self._programs = session.compilation.programs
        self._switch = self._programs.switches.get(batch)
        # A tiny step has nothing worth discarding before the next one.
        self._discard = None if binding.executable.runs_alone else session.discard_everything
        self._arrays, self._held = session.state.arrays, session.compilation.held

    def run(self, passed: Passed, asked: int | None) -> tuple[Execution | None, Read | None]:
        """Runs a step that reads data of as many rows, if nothing else has changed either.

        Otherwise there is no execution, but the data may have been read: it must not be read again.

        Args:
            passed: the data of the call.
            asked: the batch size, if the call names one.
        """
        session, state, binding, batch = self._session, self._state, self._binding, self._batch
        if session.compilation is not self._compilation or self._programs.last_batch != batch:
            return None, None
        if Tensor.switches != self._switches or state.is_averaged:
            return None, None
        state.refresh()
        if self._switch is not None and self._switch.at(state.next_update) is not binding.executable:
            return None, None
        if state.arrays is not self._arrays or not all(map(is_, self._memory, map(_current, self._held))):
            return None, None
        read = feeds, rows = session.read(passed, asked, _NONE)
        if rows != batch:
            return None, read
        if state.rounded:
            state.round()
        session.accept(feeds, batch, _NONE)
        return session.launch(binding, feeds, _NONE, None, self._keep, self._discard), None

    def _keep(self, found: Arrays) -> Answer:
        self._session.store(self._binding.executable, found)
        return self._session.answer(self._binding.executable, found)
