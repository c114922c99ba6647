"""The contents of an array: numbers, NaNs, infinities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Contents:
    """The contents of an array: counts of each kind, the first non-finite position, the range of the rest."""

    count: int
    nan: int = 0
    positive: int = 0
    negative: int = 0
    first: tuple[int, ...] = ()
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def of(cls, array: torch.Tensor) -> Contents:
        """Counts the contents; `array` can be on any device."""
        if not array.numel():
            return cls(0)
        plain = array.detach()
        if not plain.is_floating_point():
            return cls(plain.numel(), low=float(plain.min()), high=float(plain.max()))
        finite = plain.isfinite()
        rest = plain[finite]
        return cls(
            plain.numel(),
            int(plain.isnan().sum()),
            int((plain == torch.inf).sum()),
            int((plain == -torch.inf).sum()),
            () if bool(finite.all()) else tuple((~finite).nonzero()[0].tolist()),
            *((float(rest.min()) + 0.0, float(rest.max()) + 0.0) if rest.numel() else ()),  # never "-0"
        )

    @property
    def is_finite(self) -> bool:
        """Whether there is neither a NaN nor an infinity."""
        return not (self.nan or self.positive or self.negative)

    @property
    def kinds(self) -> str:
        """What is not finite, as `NaN and -inf`."""
        counts = {"NaN": self.nan, "+inf": self.positive, "-inf": self.negative}
        return " and ".join(name for name, count in counts.items() if count)

    def __str__(self) -> str:
        finite = self.count - self.nan - self.positive - self.negative
        within = f"{self.low:.4g} to {self.high:.4g}" if finite else ""
        if self.is_finite:
            return f"{self.count:,} elements, {within}" if self.count else "no elements"
        kinds = {"NaN": self.nan, "+inf": self.positive, "-inf": self.negative}
        bad = " and ".join(f"{count:,} {name}" for name, count in kinds.items() if count)
        place = f", first at {list(self.first)}" if self.first else ""
        return f"{bad} of {self.count:,} elements{place}" + (f"; the others {within}" if finite else "")


def all_finite(arrays: Iterable[torch.Tensor]) -> bool:
    """Whether no array holds a NaN or an infinity; synchronizes with the device once."""
    finite = [array.isfinite().all() for array in arrays if array.is_floating_point()]
    return bool(torch.stack(finite).all()) if finite else True
