"""Sliding windows: the geometry that convolution and pooling share."""

from collections.abc import Iterable, Sequence
from numbers import Integral

from stepgraph.errors import ArgumentError
from stepgraph.types import PaddingPolicy

Pair = tuple[int, int]


def pair(where: str, name: str, value: int | Sequence[int], least: int = 1) -> Pair:
    """One number for both, or `(height, width)`: Apple's `[y, x]` order."""
    numbers = tuple(value) if isinstance(value, Iterable) else (value, value)
    numbers = numbers * 2 if len(numbers) == 1 else numbers
    if len(numbers) != 2 or any(isinstance(n, bool) or not isinstance(n, Integral) or n < least for n in numbers):
        raise ArgumentError(where, f"{name} is {value!r}", fix=f"give one whole number ≥ {least}, or (height, width)")
    return int(numbers[0]), int(numbers[1])


def extent(kernel: int, dilation: int) -> int:
    """How many pixels a dilated kernel spans: `(k - 1) d + 1`."""
    return (kernel - 1) * dilation + 1


def padding(policy: PaddingPolicy, size: int, kernel: int, stride: int, dilation: int, given: int) -> Pair:
    """Pixels added before and after one axis of `size` pixels.

    Same: the result has `ceil(size / stride)` pixels; an odd total puts the extra pixel after (bottom, right).
    """
    if policy is PaddingPolicy.VALID:
        return 0, 0
    if policy is PaddingPolicy.USE_PADDING_SIZE:
        return given, given
    total = max((-(-size // stride) - 1) * stride + extent(kernel, dilation) - size, 0)
    return total // 2, total - total // 2
