"""Comparing numbers with what they should be, and with what rounding may make of them.

Where a result is off by more than a few roundings, the reference is evaluated again in float32, with noise of that size
on the result of every layer and on every gradient. What then moves as far as the result is off was not decided by the
numbers but by rounding: a kink, a tie, a difference of nearly equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

Found = Mapping[str, np.ndarray]
TRIES, SPREAD = 8, 12.0


class Mismatch(AssertionError):
    """A check failed.

    Args:
        check: its name.
        what: which of the compared things differs.
        detail: by how much.
    """

    def __init__(self, check: str, what: str, detail: str) -> None:
        self.check, self.what, self.detail = check, what, detail
        super().__init__(f"{check}: {what}: {detail}")


@dataclass(frozen=True)
class Precision:
    """How far a result may be off: relative to the largest number of its array, and how large noise is."""

    relative: float
    absolute: float
    noise: float


PRECISIONS = {
    None: Precision(2e-5, 2e-6, 2e-7),
    "bfloat16": Precision(3e-2, 1e-3, 2.0**-8),
    "float16": Precision(4e-3, 2e-4, 2.0**-11),
}

Noisy = Callable[[float, torch.Generator], Mapping[str, torch.Tensor]]


def same(check: str, got: Found, wanted: Found) -> None:
    """The same names and the same bits."""
    if got.keys() != wanted.keys():
        raise Mismatch(check, "names", f"{sorted(got.keys() ^ wanted.keys())} are on one side only")
    for name, array in got.items():
        if array.tobytes() != wanted[name].tobytes():
            raise Mismatch(check, name, _difference(array, wanted[name]))


def near(check: str, got: Found, wanted: Mapping[str, torch.Tensor], precision: Precision, noisy: Noisy) -> None:
    """The same numbers up to rounding; `wanted` may hold more than `got`."""
    far = {name for name, array in got.items() if not _is_near(array, _numpy(wanted[name]), precision)}
    if not far:
        return
    generator = torch.Generator().manual_seed(0)
    tries = [noisy(precision.noise, generator) for _ in range(TRIES)]
    for name in sorted(far, key=_order):
        exact = _numpy(wanted[name])
        moved = [np.abs(_numpy(one[name]).astype(np.float64) - exact) for one in tries]
        # A run that diverges ends beyond float32, whatever computes it.
        reach = max(float(one.max()) if np.isfinite(one).all() else np.inf for one in moved)
        off = float(np.abs(got[name].astype(np.float64) - exact).max()) if got[name].shape == exact.shape else np.inf
        if not (np.isinf(reach) or off <= SPREAD * reach + _room(exact, precision)):
            raise Mismatch(check, name, f"{_difference(got[name], exact)}; rounding explains {SPREAD * reach:.3g}")


def _order(name: str) -> tuple[int, int]:
    """Values before gradients before parameters, in the order they are computed: the first is nearest to the cause."""
    kind, _, number = name.rpartition(" ")
    return ["value", "loss", "input gradient", "gradient", "state", "parameter"].index(kind), int(number.split(".")[0])


def _is_near(got: np.ndarray, wanted: np.ndarray, precision: Precision) -> bool:
    if got.shape != wanted.shape:
        return False
    if got.dtype.kind in "biu":
        return bool((got == wanted).all())
    return bool((np.abs(got.astype(np.float64) - wanted) <= _room(wanted, precision)).all())


def _room(wanted: np.ndarray, precision: Precision) -> float:
    if wanted.dtype.kind in "biu":
        return 0.0
    return precision.absolute + precision.relative * float(np.abs(wanted).max(initial=0.0))


def _numpy(array: torch.Tensor) -> np.ndarray:
    return array.detach().cpu().numpy()


def _difference(got: np.ndarray, wanted: np.ndarray) -> str:
    if got.shape != wanted.shape:
        return f"shapes {got.shape} and {wanted.shape}"
    if not got.size:
        return "both are empty"
    off = np.abs(got.astype(np.float64) - wanted.astype(np.float64))
    worst = np.unravel_index(np.nanargmax(np.where(np.isnan(off), np.inf, off)), off.shape)
    place = tuple(int(i) for i in worst)
    return f"off by {off[worst]:.3g} at {place}: {got[worst]!r} instead of {wanted[worst]!r}, {off.size} elements"
