"""Measures the implementations of an operator once, on the real shapes, and remembers which to use.

Each implementation is checked against the reference, which is PyTorch's own, and timed. The fastest is chosen if it
takes less than `GAIN` times the reference's time, otherwise the reference. `choices.py` keeps the choice, by processor
or GPU, thread count and PyTorch version, so that later runs compute the same numbers.

Other programs on the machine can make any run slower, never faster. So the fastest run of each implementation counts.
A choice is disturbed if it would be another one without the time that the losers lost to something else. It is used,
but the next process measures it again (`Choices.standing`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import Any, NamedTuple

import torch

from stepgraph.compiler.kernels.choices import CHOICES, Choice, Question

TOLERANCE = 1e-4  # largest difference from the reference, relative to its largest element; see `_agree`
ROUNDS, BUDGET = 5, 0.03  # additional runs of each implementation, and the seconds after which to stop
PATIENCE = 0.1  # seconds after which to stop if the choice is disturbed so far
LONG, SLOW = 0.01, 1.3  # an implementation whose first run took this long, and this many times another's, is dropped
LOST = 0.1  # share of a run that the thread may spend waiting before the run counts as disturbed
SPREAD, ENOUGH = 0.25, 3  # share by which the second fastest run may be slower, and the runs from which this counts
FEWEST = 8  # images
LARGEST = 1 << 28  # bytes
DRAWN = 65521  # numbers, repeated if necessary: drawing all would take as long as measuring; a prime, so that
# no two rows are equal
GAIN = 0.9  # share of the reference's time that an alternative must stay below
# How to compare, as `measure` takes it and a choice keeps it.
RULES = ("below", "gain", "tolerance", "deviation", "warm")
Implementation = Callable[..., Any]
Implementations = Mapping[str, Implementation]  # by name; the first is the reference
Pick = Callable[..., str]  # chooses one by its name, a function like `fastest`


class Run(NamedTuple):
    """How long an implementation took, and how much of that time its thread did not run."""

    seconds: float
    lost: float

    @property
    def own(self) -> float:
        """The time without a loss that is too large to be chance."""
        return self.seconds - self.lost if self.lost > LOST * self.seconds else self.seconds


Runs = Mapping[str, Sequence[Run]]  # by implementation; the first is the reference


@dataclass(frozen=True)
class Measurement:
    """What was measured.

    Args:
        chosen: the name of the implementation to use.
        seconds: the fastest run of each implementation whose results were right.
        spread: by which share the second fastest run of each was slower; 0 if there was only one.
        disturbed: whether something else that ran may have decided it.
    """

    chosen: str
    seconds: Mapping[str, float]
    spread: Mapping[str, float]
    disturbed: bool

    @classmethod
    def of(cls, runs: Runs, gain: float) -> Measurement:
        """What these runs show; `gain` is the share of the reference's time that an alternative must stay below."""
        seconds = {name: min(one.seconds for one in each) for name, each in runs.items()}
        chosen = winner(seconds, gain)
        hoped = {name: seconds[name] if name == chosen else _least(each) for name, each in runs.items()}
        spread = {name: _spread(each) for name, each in runs.items()}
        return cls(chosen, seconds, spread, winner(hoped, gain) != chosen)


def winner(seconds: Mapping[str, float], gain: float) -> str:
    """The fastest alternative if it is fast enough, otherwise the first, which is the reference."""
    reference, *others = seconds
    fastest = min(others, key=seconds.__getitem__, default=reference)
    return fastest if seconds[fastest] < gain * seconds[reference] else reference


def _least(runs: Sequence[Run]) -> float:
    """The seconds that an implementation may need if nothing disturbs it."""
    spread = _spread(runs) if len(runs) >= ENOUGH else 0.0
    return min(one.own for one in runs) / (1 + spread if spread > SPREAD else 1)


def _spread(runs: Sequence[Run]) -> float:
    fastest, *others = sorted(one.seconds for one in runs)
    return others[0] / fastest - 1 if others and fastest > 0 else 0.0


def fastest(operator: str, implementations: Implementations, arguments: Sequence[Any], **rules: Any) -> str:
    """The name of the fastest implementation for arguments like these; the first one is the reference.

    Args:
        operator: the name of the operator.
        implementations: functions of `arguments`, all with the same result.
        arguments: arrays, of which only shape, strides and type matter, and settings.
        rules: how to compare them, as for `measure`.
    """
    return choice(operator, implementations, arguments, **rules).chosen


def choice(operator: str, implementations: Implementations, arguments: Sequence[Any], **rules: Any) -> Choice:
    """The same with the times; only what is not known, or was disturbed in an earlier process, is measured."""
    implementations = {name: one for name, one in implementations.items() if name not in CHOICES.left_out}
    question = _question(operator, implementations, arguments)
    found = CHOICES.standing(question)
    return found or chosen_anew(question, implementations, arguments, **rules)


def chosen_anew(question: Question, implementations: Implementations, arguments: Sequence[Any], **rules: Any) -> Choice:
    """Measures and keeps the choice. A disturbed measurement adds to disturbed ones, and never replaces another."""
    found, earlier = measure(implementations, arguments, **rules), CHOICES.earlier(question)
    chosen, seconds, tries = found.chosen, found.seconds, 1
    if found.disturbed and earlier is not None:
        if not earlier.disturbed:
            return earlier
        seconds = {name: min(one, earlier.seconds.get(name, one)) for name, one in seconds.items()}
        chosen, tries = winner(seconds, rules.get("gain", GAIN)), earlier.tries + 1
    now = datetime.now(UTC).isoformat(timespec="seconds")
    kept = {name: value for name, value in rules.items() if name in RULES}
    made = Choice(question, chosen, seconds, found.spread, found.disturbed, tries, now, kept)
    CHOICES.keep(made)
    return made


def remembered(operator: str, implementations: Iterable[str], arguments: Sequence[Any]) -> str | None:
    """The previous choice, or None if it has to be measured."""
    found = CHOICES.standing(_question(operator, implementations, arguments))
    return None if found is None else found.chosen


def _question(operator: str, implementations: Iterable[str], arguments: Sequence[Any]) -> Question:
    described = [_described(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    plain = tuple(json.loads(json.dumps(described, default=str)))
    return Question(operator, tuple(implementations), plain, torch.get_num_threads())


def are_large(arguments: Sequence[Any]) -> bool:
    """Whether arrays are too large to be made for a measurement: a plan may be of a graph that does not fit here."""
    return sum(one.nbytes for one in arguments if isinstance(one, torch.Tensor)) > LARGEST


def fewer(arguments: Sequence[Any], enough: int = 1 << 18) -> tuple[Any, ...]:
    """The same arguments with fewer images, of `enough` numbers: the time is proportional, the choice is the same."""
    images = arguments[0]
    count = max(FEWEST, enough // images[0].numel())
    return tuple(one[:count] if isinstance(one, torch.Tensor) and one.ndim == images.ndim else one for one in arguments)


@torch.inference_mode()
def measure(
    implementations: Implementations,
    arguments: Sequence[Any],
    *,
    below: int = 1,
    gain: float = GAIN,
    tolerance: float | None = None,
    deviation: float = 1.0,
    warm: bool = False,
) -> Measurement:
    """Times all implementations in turn, so that interference affects them alike.

    Args:
        implementations: functions of `arguments`; the first is the reference.
        arguments: arrays, which are filled with random numbers, and settings.
        below: integers, which are indices, are drawn from 0 to here.
        gain: the share of the reference's time that an alternative must stay below; above 1 it may be slightly slower.
        tolerance: the largest difference from its results, relative to their largest element; default `TOLERANCE`.
        deviation: the standard deviation of the random numbers; large ones make recurrent layers amplify rounding.
        warm: run each implementation once before: its memory is large and new, or a library prepares something.
    """
    generator = torch.Generator().manual_seed(0)
    real = [_filled(a, generator, below, deviation) if isinstance(a, torch.Tensor) else a for a in arguments]
    reference, *others = implementations
    if not others:
        return Measurement(reference, {}, {}, disturbed=False)
    for function in implementations.values() if warm else ():
        function(*real)
    right, run = _timed(implementations[reference], real)
    runs = {reference: [run]}
    for name in others:
        try:
            found, run = _timed(implementations[name], real)
        except RuntimeError:  # not every library supports every shape
            continue
        if _agree(found, right, tolerance or TOLERANCE):
            runs[name] = [run]
    _repeat(implementations, real, runs, gain)
    return Measurement.of(runs, gain)


def _agree(found: Any, right: Any, tolerance: float) -> bool:
    """Whether two results, or all of several, are equal up to `tolerance` times the largest number.

    Types with coarser rounding may differ by a few units in the last place.
    """
    if right is None:
        return found is None
    if isinstance(right, tuple | list):
        return all(_agree(one, other, tolerance) for one, other in zip(found, right, strict=True))
    if not right.dtype.is_floating_point:
        return torch.equal(found, right)
    tolerance = max(tolerance, 4 * torch.finfo(right.dtype).eps)
    return bool((found - right).abs().max() <= tolerance * right.abs().max())


def _repeat(
    implementations: Implementations, arguments: Sequence[Any], runs: dict[str, list[Run]], gain: float
) -> None:
    """Reruns the candidates for the fastest: a first run may have had cold caches or interference."""
    quickest = min(one.seconds for (one,) in runs.values())
    quick = [name for name, (one,) in runs.items() if one.own <= max(LONG, SLOW * quickest)]
    began = elapsed()
    for done in count(1) if len(quick) > 1 else ():
        for name in quick:
            runs[name].append(_timed(implementations[name], arguments)[1])
        spent = elapsed() - began
        if (done >= ROUNDS or spent > BUDGET) and (spent > PATIENCE or not Measurement.of(runs, gain).disturbed):
            break


def _described(array: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(array.shape), "strides": list(array.stride()), "type": str(array.dtype)}


def _filled(array: torch.Tensor, generator: torch.Generator, below: int, deviation: float = 1.0) -> torch.Tensor:
    """Numbers in an array of this shape and layout: real ones around 0, or integers from 0 to `below`."""
    made = torch.empty_strided(array.shape, array.stride(), dtype=array.dtype)
    if not array.dtype.is_floating_point:
        return made.random_(0, below, generator=generator)
    count = made.untyped_storage().nbytes() // made.itemsize
    drawn = torch.empty(min(count, DRAWN), dtype=made.dtype).normal_(std=deviation, generator=generator)
    made.as_strided((count,), (1,)).copy_(drawn.repeat(-(-count // DRAWN))[:count])
    return made


def _timed(function: Implementation, arguments: Sequence[Any]) -> tuple[Any, Run]:
    ran_before = ran()
    began = elapsed()
    found = function(*arguments)
    seconds = elapsed() - began
    return found, Run(seconds, max(0.0, seconds - (ran() - ran_before)))


def elapsed() -> float:
    """The time in seconds."""
    return time.perf_counter()


def ran() -> float:
    """The time that this thread has been running, in seconds."""
    # Windows counts it in units of 15 ms, which is longer than most runs: there, only the spread shows disturbance.
    return elapsed() if os.name == "nt" else time.thread_time()
