"""Why a run stops before its last epoch. Ranks that train together decide it together, and stop in the same step."""

from __future__ import annotations

from stepgraph.runtime.world import World
from stepgraph.system.interrupts import SIGTERM, StopSignals

NAN, INTERRUPTED, TERMINATED, FAILED, FINISHED = "nan", "interrupted", "terminated", "failed", "finished"
_WHY = (None, INTERRUPTED, INTERRUPTED, TERMINATED)  # where another rank decides, by urgency
_ASKED, _CTRL_C, _SIGTERM = 1, 2, 3


class Stopping:
    """Whether to stop, and why.

    Args:
        world: the ranks that train together.

    Attributes:
        why: why this rank stops, or None.
        is_terminated: whether a rank has received SIGTERM, which ends the programs of all.
    """

    def __init__(self, world: World) -> None:
        self.world, self.signals = world, StopSignals()
        self.why: str | None = None
        self.is_terminated = False

    def ask(self, why: str) -> None:
        """Asks to stop; the first reason counts."""
        self.why = self.why or why

    @property
    def explains_failures(self) -> bool:
        """Whether a data loader may fail because of Ctrl-C, which also reaches its processes.

        With other ranks, this is an error all the same: they are already waiting for the update.
        """
        return self.signals.came is not None and self.world.size == 1

    def is_due(self, *, heeds_signals: bool = True) -> bool:
        """Whether any rank stops; called by all of them, in the same places."""
        came = self.signals.came if heeds_signals else None
        mine = _ASKED if self.why is not None else 0
        if came is not None:
            mine = _SIGTERM if came == SIGTERM else _CTRL_C
        most = self.world.most(mine, "whether to stop")
        if most == _SIGTERM:
            self.is_terminated = True
        self.why = self.why or _WHY[most]
        return most > 0
