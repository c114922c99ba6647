"""An update of shards as one CUDA graph: shards, exchange, verdict, update, and what happens between them.

The first update with a batch size runs part by part. The second is captured as a whole, with the same operators in the
same order, and further ones are replayed: one launch, whatever the number of shards and parts. Like the capture of a
single part, it reads the caller's data in place as long as its memory stays the same, and copies it otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from operator import is_

import torch

from stepgraph.compiler.program import PartName
from stepgraph.compiler.step import Key
from stepgraph.errors import ExecutionError, reason
from stepgraph.graphs.compilation import Arrays
from stepgraph.graphs.division import Division
from stepgraph.graphs.session import Session
from stepgraph.runtime.exchange import Pieces
from stepgraph.runtime.executable import Binding, Executable
from stepgraph.runtime.execution import Found
from stepgraph.runtime.loss_slots import Loss, Losses
from stepgraph.runtime.results import Lending
from stepgraph.runtime.verdict import SentAgain
from stepgraph.system import captures, torch_private

logger = logging.getLogger("stepgraph")
CAPTURED = {"cuda"}  # where updates are captured
PartRows = tuple[PartName, int]


@dataclass(frozen=True)
class Outcome:
    """What an update leaves behind.

    Args:
        results: the losses, and results that are joined from the rows of all shards.
        totals: what this rank has of the gradients of all shards.
        counts: whether it counts as a step, if the device does not refuse it.
    """

    results: Arrays
    totals: Pieces
    counts: bool

    def loss(self, key: Key) -> torch.Tensor | Loss:
        """A loss."""
        return self.results[key]

    def result(self, key: Key) -> Found:
        """A result."""
        return self.results[key]


@dataclass
class UpdateGraph:
    """One update, captured.

    Args:
        used: what it runs, by part and rows.
        losses: where each replay writes those losses that are one number.
        sent: how the host learns what ranks tell; None if there are no others.
        device: where it runs.
    """

    used: Mapping[PartRows, Binding]
    losses: Mapping[Key, Losses]
    sent: SentAgain | None
    device: torch.device
    lending: Lending = field(default_factory=Lending)
    _copied: dict[Key, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.executables: list[Executable] = [one.executable for one in self.used.values()]
        self._fused = [one.is_fused for one in self.executables]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outcome = Outcome({}, {}, False)
        self._read: Arrays = {}
        self._places: dict[Key, tuple[int, tuple[int, ...]]] = {}

    def runs(self, bindings: Iterable[Binding]) -> bool:
        """Whether it runs these, with the same arrays and the same operators."""
        return all(map(is_, self.used.values(), bindings)) and not self.is_outdated

    @property
    def is_outdated(self) -> bool:
        """Whether operators have been fused since, or are no longer."""
        return self._fused != [one.is_fused for one in self.executables]

    @property
    def can_be_captured(self) -> bool:
        """Whether this thread has run all parts, and nothing will replace them."""
        return all(one.can_be_included for one in self.executables)

    def fits(self, feeds: Arrays) -> bool:
        """Whether it is captured, and reads data where this is."""
        return self._graph is not None and all(_place(feeds[key]) == place for key, place in self._places.items())

    def capture(self, run: Callable[[Arrays], Outcome], feeds: Arrays) -> None:
        """Captures an update with this data; what has moved since the last capture will be copied."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for key, place in self._places.items():
            if _place(feeds[key]) != place:
                self._copied[key] = feeds[key].clone()
        self._make_room()
        self._read = {**feeds, **self._copied}
        self._places = {key: _place(array) for key, array in feeds.items() if key not in self._copied}

        def captured() -> Outcome:
            outcome = run(self._read)
            for key, slots in self.losses.items():
                slots.capture(outcome.results[key])
            return outcome

        self._graph, self._outcome = captures.capture(captured, self.device)

    def _make_room(self) -> None:
        """Releases earlier captures and their memory."""
        self.lending.call_in()
        self._graph, self._outcome = None, Outcome({}, {}, False)
        for one in self.executables:
            one.discard_capture()

    def replay(self, feeds: Arrays) -> Outcome:
        """Makes one update; its results are valid until the next."""
        assert self._graph is not None
        for slots in self.losses.values():
            slots.expect()
        if self.sent is not None:
            self.sent.expect()
        self.lending.call_in()
        try:
            if self._copied:
                torch_private.foreach_copy_([*self._copied.values()], [feeds[key] for key in self._copied], True)
            self._graph.replay()
        except RuntimeError as error:
            problem = f"the device failed: {reason(error)}"
            raise ExecutionError("execute", problem, fix="check the data of this call") from error
        return self._outcome

    def loss(self, key: Key) -> torch.Tensor | Loss:
        """A loss of the last replay, unaffected by later ones."""
        slots = self.losses.get(key)
        return self._outcome.results[key].clone() if slots is None else slots.latest()

    def result(self, key: Key) -> Found:
        """A result of the last replay, unaffected by later ones."""
        return self.loss(key) if key in self.losses else self.lending.lend(self._outcome.results[key])


def _place(array: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return array.data_ptr(), array.stride()


class UpdateGraphs:
    """The captured updates of a session, by the rows of a batch.

    Args:
        session: the state between calls.
        is_alone: whether there are no other ranks.
    """

    def __init__(self, session: Session, is_alone: bool) -> None:
        self._session, self._is_alone = session, is_alone
        self._graphs: dict[int, UpdateGraph] = {}
        self._parts: dict[int, tuple[PartRows, ...]] = {}  # what an update has run, part by part
        self._refused: dict[int, float] = {}  # when to try again

    def note(self, division: Division, used: Iterable[PartRows]) -> None:
        """Notes what an update has run, part by part: further ones run the same."""
        self._parts[division.batch] = tuple(used)

    def of(self, division: Division) -> UpdateGraph | None:
        """The graph for batches of one size, captured or not yet; None if updates run part by part."""
        batch = division.batch
        if batch not in self._parts or time.monotonic() < self._refused.get(batch, 0):
            return None
        used = {one: self._session.bound(*one) for one in self._parts[batch]}
        graph = self._graphs.get(batch)
        if graph is not None and graph.runs(used.values()):
            return graph
        self._graphs.pop(batch, None)
        if not all(one.executable.can_be_included for one in used.values()):
            return None
        self._forget_evicted()
        graph = self._graphs[batch] = self._new(division, used)
        return graph

    def _new(self, division: Division, used: Mapping[PartRows, Binding]) -> UpdateGraph:
        device, size = self._session.device.torch, self._session.compilation.world.size
        losses = {key: Losses(like, device) for key, like in division.single.items()}
        sent = None if self._is_alone else SentAgain((size, division.news.head), device)
        return UpdateGraph(used, losses, sent, device)

    def _forget_evicted(self) -> None:
        """Releases graphs of parts that are no longer there, because there were too many batch sizes."""
        there = {*self._session.compilation.programs.executables.values()}
        self._graphs = {batch: one for batch, one in self._graphs.items() if there.issuperset(one.executables)}

    def refuse(self, division: Division, error: Exception) -> None:
        """Lets updates run part by part, because they could not be captured as a whole.

        What another thread has broken is tried again after a while.
        """
        rests = captures.RESTS if isinstance(error, captures.Broken) else inf
        again = f"; the next attempt is in {rests} s" if rests < inf else ""
        logger.warning("updates of %d rows are captured part by part: %s%s", division.batch, reason(error), again)
        self._graphs.pop(division.batch, None)
        self._refused[division.batch] = time.monotonic() + rests

    def release(self) -> None:
        """Releases all graphs; further updates would capture them again."""
        self._graphs.clear()
