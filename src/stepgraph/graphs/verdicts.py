"""Whether all ranks make an update: each verdict, from what they tell in its first exchange.

On a CPU, the verdict comes before anything changes. A GPU decides by itself, and the host learns of it later
(`runtime/verdict.py`): in front of what the next update sends, or sooner if somebody waits for the call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stepgraph import draw
from stepgraph.compiler import guard
from stepgraph.compiler.ranks.news import HEADER, agreed, any_replays
from stepgraph.compiler.ranks.parallel import Parallel
from stepgraph.compiler.settings import fusion_of
from stepgraph.compiler.step import AGREED, REFUSED, Fusion
from stepgraph.errors import DataError, ExecutionError
from stepgraph.graphs import fused_together
from stepgraph.graphs.division import Division
from stepgraph.graphs.session import Session
from stepgraph.graphs.shard_update import Update
from stepgraph.graphs.update_graph import UpdateGraph
from stepgraph.runtime import exchange
from stepgraph.runtime.changes import Changes
from stepgraph.runtime.executable import Executable
from stepgraph.runtime.execution import Execution
from stepgraph.runtime.refusal import explanation
from stepgraph.runtime.verdict import Sent, Verdict, disagreement
from stepgraph.runtime.world import World


class Verdicts:
    """Reaches a verdict on each update of a session, and takes note of those that came late.

    Args:
        session: the state between calls.
        parallel: how updates are divided.
        world: the ranks that divide them among themselves.

    Attributes:
        changes: what a program has changed of what ranks have in common.
        batch: the rows of the last update, unless it was refused.
    """

    def __init__(self, session: Session, parallel: Parallel, world: World) -> None:
        self.session, self.world = session, world
        self.batch: int | None = None
        self._last: tuple[Verdict, list[Executable]] | None = None  # on the last update, if the device has decided
        compiled = session.compilation
        self._fuses = fusion_of(compiled.settings.options, compiled.device.torch, parallel) is not Fusion.NEVER
        self.changes = Changes([] if world.is_alone else [*compiled.held])

    def told(self, update: Update) -> torch.Tensor:
        """The sum of the small numbers of all shards, if all ranks can make the update, with the same batch.

        Otherwise, it raises an error; or the device refuses the update, and an error is raised later.
        """
        failure, world, division = update.failure, self.world, update.division
        if world.is_alone:  # nothing to compare, and reading a GPU's numbers would synchronize
            if failure is not None:
                raise failure
            update.agreed = None if update.notes is None else guard.accepts(update.notes).reshape(1)
            return update.numbers.total[0]
        heard = update.heard
        if heard is None:
            heard = exchange.gathered(update.numbers, update.header(self.readiness_of(update)), division.news, world)
        told = heard[:, 0, : division.news.head]
        if self.session.compilation.decides:
            self._let_device_decide(update, heard, told)
        else:
            verdict = self._verdict(lambda: told, failure, self._forget_refused)
            self._require_accepted(update, verdict)
            self._switch(verdict, self._fused_later(update.executables))
        return exchange.added(heard, division.news, world)

    def must_look(self, division: Division) -> bool:
        """Whether other ranks may join results in sizes that this rank learns of only if it looks.

        A replayed update cannot look. Therefore it has the size of the last one: others know which that was.
        """
        return bool(division.shapes) and division.batch != self.batch and not self.world.is_alone

    def expect(self, graph: UpdateGraph, execution: Execution) -> None:
        """Lets somebody learn of the verdict on an update that has been replayed."""
        if graph.sent is not None:
            self._await(graph.sent.read, None, execution, graph.executables)

    def accept(self, batch: int) -> None:
        """Takes note of an update that has been made, unless the device refuses it."""
        self.batch = batch
        self.changes.accept()

    def settle(self) -> None:
        """Takes note of the verdict on the last update, before this rank sends anything: all ranks do so here."""
        if self._last is not None:
            verdict, executables = self._last
            self._last = None
            verdict.require_known()
            if not verdict.is_refused:
                self.world.count_waits()  # the verdict came behind them
                self._switch(verdict, executables)

    def readiness(self, executables: list[Executable]) -> float:
        """Whether this rank can run fused operators."""
        return fused_together.readiness(executables) if self._fuses else 0.0

    def readiness_of(self, update: Update) -> float:
        """The same for an update; one that has failed need not know."""
        return self.readiness(update.executables) if self._fuses and update.failure is None else 0.0

    def name(self, number: int) -> str:
        """The name of a tensor that a rank has changed, or of its optimizer buffers."""
        which = number % len(self.changes.tensors)
        tensor, layers = self.changes.tensors[which], (node.layer for node in self.session.compilation.nodes)
        fields = ((f"{name}.{field}", one) for layer, name in draw.unique_names(layers).items()
                  for field, one in (layer.parameters | layer.statistics).items())  # fmt: skip
        found = next((name for name, one in fields if one is tensor), tensor.label)
        return f"'{found}'" if which == number else f"the optimizer buffers of '{found}'"

    def _verdict(
        self,
        read: Callable[[], torch.Tensor],
        failure: Exception | None,
        report: Callable[[], None],
        has_handler: bool = False,
    ) -> Verdict:
        """Whether an update counts, by what all ranks have told."""
        world = self.world  # an update has gradients, which must not be kept

        def explain(told: torch.Tensor) -> Exception | None:
            return failure or disagreement(told, world, self._explained, self.name)

        return Verdict(read, explain, report, has_handler)

    def _require_accepted(self, update: Update, verdict: Verdict) -> None:
        """Raises if a rank cannot make the update. Every rank has the whole batch, and can name an index in it."""
        try:
            verdict.require_none()
        except ExecutionError:
            self.session.require_indices(update.division.batch, update.feeds)
            raise

    def _explained(self, noted: list[int]) -> DataError:
        """The error for what a rank has noted about indices."""
        return explanation(self.session.compilation.guarded, self.session.feeds.titles)(noted)

    def _let_device_decide(self, update: Update, heard: torch.Tensor, told: torch.Tensor) -> None:
        state = self.session.state
        assert state is not None
        if update.agreed is None:
            update.agreed = agreed(heard)
        sent = Sent(told) if update.captured is None else None
        if sent is not None and update.division.shapes:
            self._look_before_joining(update, sent.read())
        state.arrays[AGREED].copy_(update.agreed)
        if sent is not None:
            self._await(sent.read, update.failure, update.execution, update.executables)
        elif update.captured is not None and update.captured.sent is not None:
            update.captured.sent.send(told)

    def _look_before_joining(self, update: Update, told: torch.Tensor) -> None:
        """Finds out in which sizes ranks join their results, which depend on the batch.

        If no rank replays its update, all of them look, and a refused update ends here. If one does, those that have
        other batches join what it joins.
        """
        assert update.agreed is not None
        if not any_replays(told):
            self._require_accepted(update, self._verdict(lambda: told, update.failure, self._forget_refused))
        elif not update.agreed:
            update.joins_as = self.batch

    def _await(
        self,
        read: Callable[[], torch.Tensor],
        failure: Exception | None,
        execution: Execution,
        executables: list[Executable],
    ) -> None:
        """Lets the next update learn of the verdict on this one, and whoever reads its loss."""
        verdict = self._verdict(read, failure, self._refused, execution.is_announced)
        execution.check(verdict)
        self.session.verdict, self._last = verdict, (verdict, self._fused_later(executables))

    def _fused_later(self, executables: list[Executable]) -> list[Executable]:
        """Those that may have to switch to fused operators with other ranks."""
        return executables if self._fuses else []

    @staticmethod
    def _switch(verdict: Verdict, executables: list[Executable]) -> None:
        """Lets this rank run fused operators as soon as all can."""
        if executables:
            readiness = verdict.told[:, HEADER.index("readiness")].tolist()
            fused_together.settle(executables, readiness)

    def _refused(self) -> None:
        """Continues from before an update that the device has refused."""
        state = self.session.state
        assert state is not None
        self.changes.refuse()
        state.arrays[AGREED].fill_(True)
        self._forget_refused()

    def _forget_refused(self) -> None:
        """Forgets what is known of an update that ranks have refused before it has changed anything."""
        self.batch, session, state = None, self.session, self.session.state
        if state is None or not session.compilation.decides:
            return
        if REFUSED in state.arrays:
            state.arrays[REFUSED].zero_()
        session.refused()
