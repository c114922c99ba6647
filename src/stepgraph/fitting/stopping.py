"""Why a run stops before its last epoch. Ranks that train together decide it together, and stop in the same step."""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.runtime.rank_calls import BETWEEN, RankCall
from stepgraph.runtime.world import World
from stepgraph.system.interrupts import SIGHUP, SIGINT, SIGTERM, StopSignals

NAN, INTERRUPTED, TERMINATED, FAILED, FINISHED = "nan", "interrupted", "terminated", "failed", "finished"
_ASKED, _CTRL_C, _SIGHUP, _SIGTERM = 1, 2, 3, 4  # by urgency
_SENT = {SIGINT: _CTRL_C, SIGHUP: _SIGHUP, SIGTERM: _SIGTERM}
_HOW = {_ASKED: "asked to stop", _CTRL_C: "received Ctrl-C", _SIGHUP: "received SIGHUP", _SIGTERM: "received SIGTERM"}
_WHY = {_CTRL_C: INTERRUPTED, _SIGHUP: TERMINATED, _SIGTERM: TERMINATED}


class Stopping:
    """Whether to stop, and why.

    Args:
        world: the ranks that train together.

    Attributes:
        why: why the run stops, or None; as soon as `is_due` says so, the same on all ranks.
        who: which ranks stop it, and how, if not all do for the same reason.
        is_terminated: whether a rank has received SIGTERM or SIGHUP, which ends the programs of all.
    """

    def __init__(self, world: World) -> None:
        self.world, self.signals = world, StopSignals()
        self.why: str | None = None
        self.who: str | None = None
        self.is_terminated = self._is_decided = False

    def ask(self, why: str) -> None:
        """Asks to stop; the first reason counts."""
        self.why = self.why or why

    @property
    def explains_failures(self) -> bool:
        """Whether a data loader may fail because of Ctrl-C, which also reaches its processes.

        With other ranks, this is an error all the same: they are already waiting for the update.
        """
        return self.signals.came is not None and self.world.size == 1

    def is_due(self, place: int = BETWEEN, *, heeds_signals: bool = True) -> bool:
        """Whether any rank stops; called by all of them, in the same places.

        Args:
            place: where in a run this is.
            heeds_signals: whether this rank stops because of a signal.
        """
        came = self.signals.came if heeds_signals else None
        mine = _ASKED if self.why is not None else 0
        if came is not None:
            mine = _SENT[came]
        found = [int(one) for one in self.world.greet((RankCall.STEP_OF_FIT, place, 0), mine)]
        most = max(found)
        if most in (_SIGHUP, _SIGTERM):
            self.is_terminated = True
        if most and not self._is_decided:
            self._decide(found, self.why or _WHY.get(mine, ""))
        return most > 0

    def _decide(self, found: Sequence[int], mine: str) -> None:
        """Takes the reason of the first rank with the most urgent one.

        Args:
            found: how urgent it is for each rank.
            mine: the reason of this one.
        """
        reasons = self.world.gather_texts(mine, "why to stop")
        self.why, self._is_decided = reasons[found.index(max(found))], True
        if len({*zip(found, reasons, strict=True)}) > 1:
            asking = [rank for rank, urgency in enumerate(found) if urgency]
            self.who = "; ".join(_told(rank, found[rank], reasons[rank]) for rank in asking)


def _told(rank: int, urgency: int, reason: str) -> str:
    """What a rank has done to stop a run, and its own words for it, if there are any."""
    how = f"rank {rank} {_HOW[urgency]}"
    return how if reason == _WHY.get(urgency) else f"{how}: {reason}"
