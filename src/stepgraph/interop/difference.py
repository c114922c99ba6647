"""How far two arrays are apart, relative to the largest number."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Difference:
    """The difference between two arrays.

    Args:
        largest: the largest number of the reference.
        absolute: the largest difference.
        share: that difference divided by the largest number of its scale.
    """

    largest: float
    absolute: float
    share: float

    @classmethod
    def between(cls, reference: torch.Tensor, other: torch.Tensor, scale: float | None = None) -> Difference:
        """The difference of `other` from `reference`; its scale is by default the reference's largest number.

        Example:
            >>> Difference.between(torch.tensor([1.0, -4.0]), torch.tensor([1.0, -3.0])).share
            0.25
        """
        largest = largest_of(reference)
        scale, absolute = largest if scale is None else scale, _apart(reference, other)
        share = 0.0 if absolute == 0 else absolute / scale if scale else math.inf
        return cls(largest, absolute, share)


def largest_of(array: torch.Tensor) -> float:
    """The largest finite number of an array, without its sign."""
    finite = array.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.max()) if array.numel() else 0.0


def _apart(reference: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference; non-finite values must be equal."""
    one, two = reference.double(), other.double()
    same = (one == two) | (one.isnan() & two.isnan())
    apart = torch.where(same, 0.0, (one - two).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    return float(apart.max()) if apart.numel() else 0.0
