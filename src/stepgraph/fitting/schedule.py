"""Learning rate schedules. A schedule is any function from the update's number, from 0, to a learning rate.

Those here are values: the rate depends on nothing but the number, so a resumed run continues exactly. `steps` is the
number of updates; `fit` fills it in if it is left out and the data has a length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, Self

from stepgraph.errors import ArgumentError, DataTypeError

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class ConstantSchedule:
    """Always the same learning rate.

    Example:
        >>> ConstantSchedule(0.1)(1000)
        0.1
    """

    rate: float

    def __post_init__(self) -> None:
        _require_rates(self, "rate")

    def __call__(self, step: int) -> float:
        return self.rate


@dataclass(frozen=True)
class StepSchedule:
    """`rate * factor**(n // every)`: multiplied by `factor` after every `every` updates.

    Example:
        >>> rate = StepSchedule(0.5, every=10, factor=0.5)
        >>> [rate(n) for n in (0, 9, 10, 25)]
        [0.5, 0.5, 0.25, 0.125]
    """

    rate: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _require_rates(self, "rate", "factor")
        _require_count(self, "every", 1)

    def __call__(self, step: int) -> float:
        return self.rate * self.factor ** (step // self.every)


class Timed:
    """A schedule over a number of updates, which may be filled in later."""

    steps: int | None

    def with_steps(self, steps: int) -> Self:
        """The same over `steps` updates, unless it knows their number."""
        return self if self.steps is not None else replace(self, steps=max(steps, 1))  # type: ignore[type-var]


@dataclass(frozen=True)
class LinearSchedule(Timed):
    """A straight line from `start` to `end`, reached after `steps` updates.

    Example:
        >>> rate = LinearSchedule(1.0, 0.0, steps=4)
        >>> [rate(n) for n in (0, 1, 4, 9)]
        [1.0, 0.75, 0.0, 0.0]
    """

    start: float
    end: float = 0.0
    steps: int | None = None

    def __post_init__(self) -> None:
        _require_rates(self, "start", "end")
        _require_count(self, "steps", 1)

    def __call__(self, step: int) -> float:
        return self.start + (self.end - self.start) * _share(self, step)


@dataclass(frozen=True)
class CosineSchedule(Timed):
    """`floor + (peak - floor) * (1 + cos(π n / steps)) / 2`, and `floor` from `steps` on.

    Example:
        >>> rate = CosineSchedule(1.0, steps=8)
        >>> [round(rate(n), 2) for n in (0, 4, 8)]
        [1.0, 0.5, 0.0]
    """

    peak: float
    floor: float = 0.0
    steps: int | None = None

    def __post_init__(self) -> None:
        _require_falling(self)
        _require_count(self, "steps", 1)

    def __call__(self, step: int) -> float:
        return _along_cosine(self.peak, self.floor, _share(self, step))


@dataclass(frozen=True)
class PolynomialSchedule(Timed):
    """`end + (start - end) * (1 - n / steps)**power`, and `end` from `steps` on.

    Example:
        >>> rate = PolynomialSchedule(1.0, power=2, steps=4)
        >>> [rate(n) for n in (0, 2, 4)]
        [1.0, 0.25, 0.0]
    """

    start: float
    end: float = 0.0
    power: float = 1.0
    steps: int | None = None

    def __post_init__(self) -> None:
        _require_rates(self, "start", "end", "power")
        _require_count(self, "steps", 1)

    def __call__(self, step: int) -> float:
        return self.end + (self.start - self.end) * (1 - _share(self, step)) ** self.power


@dataclass(frozen=True)
class OneCycleSchedule(Timed):
    """Up from `peak / first` and down to `peak / first / last`, both along a cosine, as `torch`'s `OneCycleLR`.

    Args:
        peak: the highest learning rate.
        steps: the number of updates; `fit` fills it in if it is known.
        rise: the share of the updates until the peak.
        first: the peak divided by the first learning rate.
        last: the first learning rate divided by the last one.

    Example:
        >>> rate = OneCycleSchedule(1.0, steps=12, rise=0.5)
        >>> [round(rate(n), 4) for n in (0, 5, 11)]
        [0.04, 1.0, 0.0]
    """

    peak: float
    steps: int | None = None
    rise: float = 0.3
    first: float = 25.0
    last: float = 1e4

    def __post_init__(self) -> None:
        _require_rates(self, "peak", "rise", "first", "last")
        _require_count(self, "steps", 1)
        if self.rise > 1 or not self.first or not self.last:
            problem = f"rise is {self.rise}, first is {self.first}, last is {self.last}"
            raise ArgumentError(type(self).__name__, problem, fix="use 0 ≤ rise ≤ 1, 0 < first, 0 < last")

    def __call__(self, step: int) -> float:
        steps = _known_steps(self)
        top, bottom = self.rise * steps - 1, steps - 1
        if step <= top:
            return _along_cosine(self.peak / self.first, self.peak, step / top if top else 1.0)
        return _along_cosine(self.peak, self.peak / self.first / self.last, min((step - top) / (bottom - top), 1.0))


@dataclass(frozen=True)
class Warmup:
    """A linear rise in front of any schedule.

    `then(0) * (n + 1) / updates` for `n < updates`, then `then(n - updates)`.

    Args:
        then: the schedule afterwards; it begins with its own update 0.
        updates: the length of the rise.

    Example:
        >>> rate = Warmup(StepSchedule(0.8, every=2, factor=0.5), updates=4)
        >>> [rate(n) for n in range(8)]
        [0.2, 0.4, 0.6000000000000001, 0.8, 0.8, 0.8, 0.4, 0.4]
    """

    then: Schedule
    updates: int

    def __post_init__(self) -> None:
        _require_count(self, "updates", 0)
        checked(self.then, "Warmup")

    def with_steps(self, steps: int) -> Warmup:
        """The same over `steps` updates, of which the schedule afterwards gets the rest."""
        return Warmup(completed(self.then, lambda: steps - self.updates), self.updates)

    def __call__(self, step: int) -> float:
        return self.then(0) * (step + 1) / self.updates if step < self.updates else self.then(step - self.updates)


@dataclass(frozen=True)
class WarmupCosine:
    """Linear warmup, then cosine decay: `Warmup(CosineSchedule(peak, floor, steps - warmup), warmup)`.

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
        _require_falling(self)
        _require_count(self, "warmup", 0)
        if self.steps is not None and self.steps <= self.warmup:
            problem = f"warmup is {self.warmup}, steps is {self.steps}"
            raise ArgumentError(type(self).__name__, problem, fix="use 0 ≤ warmup < steps")

    def with_steps(self, steps: int) -> WarmupCosine:
        """The same over `steps` updates, unless it knows their number."""
        return self if self.steps is not None else replace(self, steps=steps)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return CosineSchedule(self.peak, self.floor, _known_steps(self) - self.warmup)(step - self.warmup)


def checked(schedule: Any, where: str = "fit") -> Schedule:
    """A schedule, if it is one."""
    if not callable(schedule) or isinstance(schedule, type):
        problem = f"schedule is {schedule!r}, not a function of the update's number"
        raise DataTypeError(where, problem, fix="pass a function of the update's number, or ConstantSchedule(rate)")
    return schedule


def completed(schedule: Schedule, total: Callable[[], int]) -> Schedule:
    """A schedule with the number of updates filled in, if it needs one; `total` is asked only then."""
    if not _waits(schedule):
        return schedule
    return schedule.with_steps(total())  # type: ignore[attr-defined]


def _waits(schedule: Any) -> bool:
    """Whether a schedule needs a number of updates and has none."""
    if isinstance(schedule, Warmup):
        return _waits(schedule.then)
    return isinstance(schedule, Timed | WarmupCosine) and schedule.steps is None


def rate_at(schedule: Schedule, step: int) -> float:
    """The learning rate of an update; a schedule that returns none that is finite and ≥ 0 is refused."""
    found: Any = schedule(step)
    try:
        rate = float(found)
    except (TypeError, ValueError):
        rate = math.nan
    if not 0 <= rate < math.inf:
        problem = f"the schedule returned {found!r} for update {step}"
        raise ArgumentError("fit", problem, fix="return a finite learning rate ≥ 0 for every update")
    return rate


def _along_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * share)) / 2


def _share(schedule: Any, step: int) -> float:
    """The share of the updates that is done, from 0 to 1."""
    return min(step / _known_steps(schedule), 1.0)


def _known_steps(schedule: Any) -> int:
    if schedule.steps is None:
        raise ArgumentError(type(schedule).__name__, "the number of updates is unknown", fix="pass steps=")
    return int(schedule.steps)


def _require_rates(schedule: Any, *names: str) -> None:
    for name in names:
        value = getattr(schedule, name)
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
            raise ArgumentError(type(schedule).__name__, f"{name} is {value!r}", fix="pass a finite number ≥ 0")


def _require_falling(schedule: Any) -> None:
    _require_rates(schedule, "peak", "floor")
    if schedule.peak < schedule.floor:
        problem = f"peak is {schedule.peak}, floor is {schedule.floor}"
        raise ArgumentError(type(schedule).__name__, problem, fix="use 0 ≤ floor ≤ peak")


def _require_count(schedule: Any, name: str, least: int) -> None:
    value = getattr(schedule, name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < least):
        raise ArgumentError(type(schedule).__name__, f"{name} is {value!r}", fix=f"pass an integer ≥ {least}")
