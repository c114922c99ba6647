"""How the numbers of an array are spread, in a few numbers that can be written down."""

from __future__ import annotations

from typing import Any

import torch

BINS = 32
DECADES = 12.0  # magnitudes further below the largest stand in the first bin


def distribution(array: torch.Tensor, by_magnitude: bool = False) -> dict[str, Any]:
    """A histogram with its bounds, and mean, root mean square, zeros and what is not finite.

    Args:
        array: any floating type, on any device.
        by_magnitude: bins of log₁₀ |x|, without zeros: for gradients, whose size matters more than their sign.

    Example:
        >>> distribution(torch.tensor([0.0, 1.0, 1.0, 2.0]))["zeros"]
        1
    """
    # Metal has no float64, in which the sums are taken.
    values = (array.cpu() if array.device.type == "mps" else array).detach().flatten().float()
    finite = values[values.isfinite()]
    found: dict[str, Any] = {"count": values.numel(), "not_finite": values.numel() - finite.numel()}
    if not finite.numel():
        return found
    squares = finite.double().square().mean().sqrt()
    facts = torch.stack([finite.double().mean(), squares, *map(torch.Tensor.double, finite.aminmax())])
    mean, rms, low, high = facts.tolist()
    zeros = int((finite == 0).sum())
    found |= {"mean": short(mean), "rms": short(rms), "low": short(low), "high": short(high), "zeros": zeros}
    return found | _bins(finite, low, high, zeros, by_magnitude)


def _bins(finite: torch.Tensor, low: float, high: float, zeros: int, by_magnitude: bool) -> dict[str, Any]:
    if by_magnitude:
        if zeros == finite.numel():
            return {}
        finite = finite[finite != 0].abs().log10()
        low, high = (float(one) for one in finite.aminmax())
        low = max(low, high - DECADES)
        finite = finite.clamp(min=low)
    if low == high:  # all the same: one bin around it
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    counts = torch.histc(finite, BINS, low, high)
    # Rounded outwards by the type: what lies on a bound must not fall out of the histogram.
    counts[0] += (finite < low).sum()
    counts[-1] += finite.numel() - counts.sum()
    return {"from": short(low), "to": short(high), "bins": [int(one) for one in counts.tolist()]}


def short(number: float) -> float:
    """Six digits are enough to draw, and to read."""
    return float(f"{number:.6g}")
