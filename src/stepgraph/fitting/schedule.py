"""Learning rate schedules. A schedule is any function from the update's number, from 0, to a learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from stepgraph.errors import ArgumentError

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warmup, then cosine decay.

    `peak * (n + 1) / warmup` for `n < warmup`, then
    `floor + (peak - floor) * (1 + cos(π t)) / 2` with `t = (n - warmup) / (steps - warmup)`,
    and `floor` from `steps` on.

    Args:
        peak: the highest learning rate.
        warmup: updates until the peak.
        steps: the total number of updates; `fit` fills it in if it is known.
        floor: the final learning rate.

    Example:
        >>> rate = WarmupCosine(peak=1.0, warmup=4, steps=12)
        >>> [round(rate(n), 2) for n in (0, 3, 4, 8, 12)]
        [0.25, 1.0, 1.0, 0.5, 0.0]
    """

    peak: float
    warmup: int = 0
    steps: int | None = None
    floor: float = 0.0

    def __post_init__(self) -> None:
        where = type(self).__name__
        if not math.inf > self.peak >= self.floor >= 0:
            raise ArgumentError(where, f"peak is {self.peak}, floor is {self.floor}", fix="use 0 ≤ floor ≤ peak")
        if self.warmup < 0 or (self.steps is not None and self.steps <= self.warmup):
            problem = f"warmup is {self.warmup}, steps is {self.steps}"
            raise ArgumentError(where, problem, fix="use 0 ≤ warmup < steps")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        if self.steps is None:
            raise ArgumentError(type(self).__name__, "the number of updates is unknown", fix="pass steps=")
        share = min((step - self.warmup) / (self.steps - self.warmup), 1.0)
        return self.floor + (self.peak - self.floor) * (1 + math.cos(math.pi * share)) / 2
