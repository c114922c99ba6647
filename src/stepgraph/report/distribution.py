"""The distribution of an array's numbers, summarized in a few numbers."""

from __future__ import annotations

from math import gcd, isfinite
from typing import Any

import torch

BINS = 32
COUNTED = 1 << 16  # a histogram of more numbers looks the same
DECADES = 12.0  # smaller magnitudes, relative to the largest, count in the first bin


def distribution(array: torch.Tensor, by_magnitude: bool = False) -> dict[str, Any]:
    """A histogram with its bounds, mean, root mean square, zeros and non-finite counts.

    The histogram counts at most some 65,000 numbers, evenly spread over the array; all else counts every number.

    Args:
        array: any floating type, on any device.
        by_magnitude: bins of log₁₀ |x|, without zeros: for gradients, whose size matters more than their sign.

    Example:
        >>> distribution(torch.tensor([0.0, 1.0, 1.0, 2.0]))["zeros"]
        1
    """
    # Metal has no float64, which the sums use.
    values = (array.cpu() if array.device.type == "mps" else array).detach().flatten().float()
    count, finite = values.numel(), values
    low, high = _bounds(values) if count else (0.0, 0.0)
    if not (isfinite(low) and isfinite(high)):  # counted only then: it takes longer than all the rest
        finite = values[values.isfinite()]
        low, high = _bounds(finite) if finite.numel() else (0.0, 0.0)
    found: dict[str, Any] = {"count": count, "not_finite": count - finite.numel()}
    if not finite.numel():
        return found
    norm = torch.linalg.vector_norm(finite, dtype=torch.float64)
    mean, size, others = torch.stack([finite.mean(dtype=torch.float64), norm, finite.count_nonzero().double()]).tolist()
    rms, zeros = size / finite.numel() ** 0.5, finite.numel() - int(others)
    found |= {"mean": short(mean), "rms": short(rms), "low": short(low), "high": short(high), "zeros": zeros}
    return found | (_magnitudes(finite, zeros) if by_magnitude else _bins(_some(finite), low, high))


def _magnitudes(finite: torch.Tensor, zeros: int) -> dict[str, Any]:
    if zeros == finite.numel():
        return {}
    sizes = _some(finite[finite != 0] if zeros else finite).abs().log10()
    low, high = _bounds(sizes)
    if low < high - DECADES:
        sizes = sizes.clamp(min=high - DECADES)
        low, high = _bounds(sizes)
    return _bins(sizes, low, high)


def _bins(finite: torch.Tensor, low: float, high: float) -> dict[str, Any]:
    if low == high:  # all equal: one bin around the value
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    counts = [int(one) for one in torch.histc(finite, BINS, low, high).tolist()]
    # Rounded outward for the type: values on a bound must not fall out of the histogram.
    counts[-1] += finite.numel() - sum(counts)
    return {"from": short(low), "to": short(high), "bins": counts}


def _some(values: torch.Tensor) -> torch.Tensor:
    """Every n-th number, with a stride coprime to every dimension of the array.

    A stride of 9 would see one corner of all 3 × 3 kernels, and nothing else.
    """
    stride = -(-values.numel() // COUNTED)
    while gcd(stride, values.numel()) > 1:
        stride += 1
    return values[::stride]


def _bounds(values: torch.Tensor) -> tuple[float, float]:
    """Minimum and maximum; NaN if there is one."""
    low, high = torch.stack(values.aminmax()).tolist()
    return low, high


def short(number: float) -> float:
    """Rounds to six digits, which suffice for drawing and reading."""
    return float(f"{number:.6g}")
