"""What each rank does in a run: the time of an update, how much of it is waiting for other ranks, and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from stepgraph.device import Device
from stepgraph.fitting.progress import memory_used
from stepgraph.runtime.world import World


class Ranks:
    """Measures the updates of this rank, and collects what the others have measured.

    Args:
        world: the ranks that train together.
        device: where this one computes.
    """

    def __init__(self, world: World, device: Device) -> None:
        self.world, self.device = world, device
        self.updates, self.seconds, self.waited = 0, 0.0, 0.0

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Measures one update."""
        began, waited = time.perf_counter(), self.world.place.waited
        yield
        self.updates += 1
        self.seconds += time.perf_counter() - began
        self.waited += self.world.place.waited - waited

    def rows(self) -> list[dict[str, Any]]:
        """A line per rank, on each of them; none if there is only one."""
        if self.world.size == 1:
            return []
        step = self.seconds / max(self.updates, 1)
        mine = [step, self.waited / max(self.seconds, 1e-9), memory_used(self.device) or 0]
        found = self.world.gather_numbers(mine, "times of ranks")
        return [
            {"rank": rank, "seconds": seconds, "waiting": min(waiting, 1.0), "memory": int(memory)}
            for rank, (seconds, waiting, memory) in enumerate(found)
        ]
