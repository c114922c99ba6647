"""Ranks that train together in a run: what they must agree on, and what each has done."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from stepgraph.device import Device
from stepgraph.errors import ArgumentError
from stepgraph.fitting.progress import memory_used
from stepgraph.runtime.rank_calls import BETWEEN, RankCall
from stepgraph.runtime.world import World


def require_alike(world: World, what: str, facts: Mapping[str, Any], fix: str) -> None:
    """Rejects, on every rank, facts in which a rank differs from the first one; all have the same names."""
    if world.size == 1:
        return
    world.greet((RankCall.STEP_OF_FIT, BETWEEN, 0))  # one that has failed meanwhile says so
    digests = [hashlib.sha256(repr(one).encode()).digest()[:6] for one in facts.values()]
    found = world.gather_numbers([int.from_bytes(one, "big") for one in digests], what)  # 48 bits: exact as float64
    for rank, theirs in enumerate(found):
        names = [name for name, one, other in zip(facts, found[0], theirs, strict=True) if one != other]
        if names:
            mine = {f"{name} on rank {world.rank}": facts[name] for name in names}
            problem = f"rank 0 and rank {rank} have different {what}: {', '.join(names)}"
            raise ArgumentError("fit", problem, **mine, fix=fix)


def agreed(world: World, row: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of an epoch as the first rank has them: times differ, and epochs are judged by them on every rank.

    A rank whose metric has failed has told so instead.
    """
    if world.size == 1:
        return {**row}
    world.greet((RankCall.STEP_OF_FIT, BETWEEN, 0))
    names = [name for name, one in row.items() if isinstance(one, float)]
    first, *_ = world.gather_numbers([row[name] for name in names], "numbers of an epoch")
    return {**row, **dict(zip(names, first, strict=True))}


class Ranks:
    """Measures the updates of this rank, and collects what the others have measured.

    Args:
        world: the ranks that train together.
        device: where this one computes.
    """

    def __init__(self, world: World, device: Device) -> None:
        self.world, self.device = world, device
        self.updates, self.seconds, self.waited = 0, 0.0, 0.0
        self.is_compiled = False

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Measures one update. The first one, which also compiles, counts only as long as it is the only one."""
        place = self.world.place
        began, waited, place.is_updating = time.perf_counter(), place.waited, True
        try:
            yield
        finally:
            place.is_updating = False
        if self.updates == 1 and not self.is_compiled:
            self.updates, self.seconds, self.waited = 0, 0.0, 0.0
            self.is_compiled = True
        self.updates += 1
        self.seconds += time.perf_counter() - began
        self.waited += self.world.place.waited - waited

    def rows(self) -> list[dict[str, Any]]:
        """A line per rank, on each of them; none if there is only one.

        How long a GPU waits is known where it decides about updates, and not where this program does.
        """
        if self.world.size == 1:
            return []
        step = self.seconds / max(self.updates, 1)
        is_known = self.waited > 0 or not self.device.is_cuda
        waiting = self.waited / max(self.seconds, 1e-9) if is_known else math.nan
        mine = [step, waiting, memory_used(self.device) or 0]
        found = self.world.gather_numbers(mine, "times of ranks")
        return [
            {
                "rank": rank,
                "seconds": seconds,
                "waiting": None if math.isnan(waiting) else min(waiting, 1.0),
                "memory": int(memory),
            }
            for rank, (seconds, waiting, memory) in enumerate(found)
        ]
