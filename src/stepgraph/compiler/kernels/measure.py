"""Measures the implementations of an operator once, on the real shapes, and remembers the fastest.

Each implementation is checked against the reference and timed. `choices.py` keeps the choice, by processor or GPU,
thread count and PyTorch version, so that later runs compute the same numbers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from stepgraph.compiler.kernels.choices import CHOICES

TOLERANCE = 1e-4  # largest difference from the reference, relative to its largest element; see `_agree`
ROUNDS, BUDGET = 5, 0.03  # additional runs of each implementation, and the seconds after which to stop
LONG, SLOW = 0.01, 1.3  # an implementation whose first run took this long, and this many times another's, is dropped
FEWEST = 8  # images
DRAWN = 65521  # numbers, repeated if necessary: drawing all would take as long as measuring; a prime, so that
# no two rows are equal
GAIN = 0.9  # share of the reference's time that an alternative must stay below
Implementation = Callable[..., Any]
Implementations = Mapping[str, Implementation]  # by name; the first is the reference


def fastest(operator: str, implementations: Implementations, arguments: Sequence[Any], **rules: Any) -> str:
    """The name of the fastest implementation for arguments like these; the first one is the reference.

    Args:
        operator: the name of the operator.
        implementations: functions of `arguments`, all with the same result.
        arguments: arrays, of which only shape, strides and type matter, and settings.
        rules: how to compare them, as for `measure`.
    """
    implementations = {name: one for name, one in implementations.items() if name not in CHOICES.left_out}
    key = _key(operator, implementations, arguments)
    chosen = CHOICES.get(key)
    if chosen is None or chosen not in implementations:
        chosen = measure(implementations, arguments, **rules)
        CHOICES.remember(key, chosen)
    return chosen


def remembered(operator: str, implementations: Iterable[str], arguments: Sequence[Any]) -> str | None:
    """The previous choice, or None."""
    names = list(implementations)
    found = CHOICES.get(_key(operator, names, arguments))
    return found if found in names else None


def _key(operator: str, implementations: Iterable[str], arguments: Sequence[Any]) -> str:
    described = [_described(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    return json.dumps([operator, sorted(implementations), described, _machine()], default=str)


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
    warm: bool = False,
) -> str:
    """Times all implementations in turn, so that interference affects them alike; the minimum time counts.

    Args:
        implementations: functions of `arguments`; the first is the reference.
        arguments: arrays, which are filled with random numbers, and settings.
        below: integers, which are indices, are drawn from 0 to here.
        gain: the share of the reference's time that an alternative must stay below; above 1 it may be slightly slower.
        tolerance: the largest difference from its results, relative to their largest element; default `TOLERANCE`.
        warm: run each implementation once before, if its memory is large and new.
    """
    generator = torch.Generator().manual_seed(0)
    real = [_filled(a, generator, below) if isinstance(a, torch.Tensor) else a for a in arguments]
    reference, *others = implementations
    if not others:
        return reference
    for function in implementations.values() if warm else ():
        function(*real)
    right, seconds = _timed(implementations[reference], real)
    best = {reference: seconds}
    for name in others:
        try:
            found, seconds = _timed(implementations[name], real)
        except RuntimeError:  # not every library supports every shape
            continue
        if _agree(found, right, tolerance or TOLERANCE):
            best[name] = seconds
    _repeat(implementations, real, best)
    winner = min((name for name in best if name != reference), key=best.__getitem__, default=reference)
    return winner if best[winner] < gain * best[reference] else reference


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


def _repeat(implementations: Implementations, arguments: Sequence[Any], best: dict[str, float]) -> None:
    """Reruns the candidates for the fastest: a first run may have had cold caches or interference."""
    quick = [name for name in best if best[name] <= max(LONG, SLOW * min(best.values()))]
    began = time.perf_counter()
    for _ in range(ROUNDS if len(quick) > 1 else 0):
        for name in quick:
            best[name] = min(best[name], _timed(implementations[name], arguments)[1])
        if time.perf_counter() - began > BUDGET:
            break


def _described(array: torch.Tensor) -> list[Any]:
    return [list(array.shape), list(array.stride()), str(array.dtype)]


def _filled(array: torch.Tensor, generator: torch.Generator, below: int) -> torch.Tensor:
    """Numbers in an array of this shape and layout: real ones around 0, or integers from 0 to `below`."""
    made = torch.empty_strided(array.shape, array.stride(), dtype=array.dtype)
    if not array.dtype.is_floating_point:
        return made.random_(0, below, generator=generator)
    count = made.untyped_storage().nbytes() // made.itemsize
    drawn = torch.empty(min(count, DRAWN), dtype=made.dtype).normal_(generator=generator)
    made.as_strided((count,), (1,)).copy_(drawn.repeat(-(-count // DRAWN))[:count])
    return made


def _timed(function: Implementation, arguments: Sequence[Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    found = function(*arguments)
    return found, time.perf_counter() - start


def _machine() -> list[Any]:
    """What the choice depends on besides the arguments; the file of choices belongs to one processor."""
    return ["cpu", torch.get_num_threads()]
