"""Sliding windows over images: the settings, the geometry and the checks that convolution and pooling share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Layer
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import PaddingPolicy

Pair = tuple[int, int]
Size = int | Sequence[int]


class WindowDescriptor:
    """The settings of a sliding window, per axis; every pair is `(height, width)`, that is, `(y, x)`."""

    kernel_sizes: Size
    strides: Size | None
    dilation_rates: Size
    padding_sizes: Size
    padding_policy: PaddingPolicy

    kernel_height = property(lambda self: self.kernel_sizes[0], doc="Rows of the kernel.")
    kernel_width = property(lambda self: self.kernel_sizes[1], doc="Columns of the kernel.")
    stride_in_y = property(lambda self: self.strides[0], doc="Rows from one window to the next.")
    stride_in_x = property(lambda self: self.strides[1], doc="Columns from one window to the next.")
    dilation_rate_in_y = property(lambda self: self.dilation_rates[0], doc="Rows from one tap to the next.")
    dilation_rate_in_x = property(lambda self: self.dilation_rates[1], doc="Columns from one tap to the next.")
    padding_size_in_y = property(lambda self: self.padding_sizes[0], doc="Rows added above and below.")
    padding_size_in_x = property(lambda self: self.padding_sizes[1], doc="Columns added left and right.")

    @property
    def axes(self) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """Kernel size, stride, dilation rate and padding size, first for y, then for x."""
        y = (self.kernel_height, self.stride_in_y, self.dilation_rate_in_y, self.padding_size_in_y)
        return y, (self.kernel_width, self.stride_in_x, self.dilation_rate_in_x, self.padding_size_in_x)

    @property
    def extents(self) -> Pair:
        """Rows and columns that a window spans, including dilation."""
        y = extent(self.kernel_height, self.dilation_rate_in_y)
        return y, extent(self.kernel_width, self.dilation_rate_in_x)

    def padding(self, height: int, width: int) -> tuple[Pair, Pair]:
        """Pixels added (before, after) to each axis of an image of this size."""
        y, x = self.axes
        return padding(self.padding_policy, height, *y), padding(self.padding_policy, width, *x)

    def _normalize(self) -> None:
        for name, least in (("kernel_sizes", 1), ("strides", 1), ("dilation_rates", 1), ("padding_sizes", 0)):
            object.__setattr__(self, name, pair(type(self).__name__, name, getattr(self, name), least))
        object.__setattr__(
            self, "padding_policy", PaddingPolicy.of_raw(self.__class__.__name__, "padding_policy", self.padding_policy)
        )


def pair(where: str, name: str, value: int | Sequence[int], least: int = 1) -> Pair:
    """One number for both, or `(height, width)`: Apple's `[y, x]` order."""
    numbers = tuple(value) if isinstance(value, Iterable) else (value, value)
    numbers = numbers * 2 if len(numbers) == 1 else numbers
    if len(numbers) != 2 or any(isinstance(n, bool) or not isinstance(n, Integral) or n < least for n in numbers):
        raise ArgumentError(where, f"{name} is {value!r}", fix=f"pass one integer ≥ {least}, or (height, width)")
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


def require_images(layer: Layer, source: TensorDescriptor) -> None:
    """Rejects sources that are not `[batch, channels, height, width]`."""
    if source.dimension_count != 4:
        problem = f"the source has {source.dimension_count} dimensions, but [batch, channels, height, width] has 4"
        raise ShapeError(layer.where, problem, source=source, fix="reshape the source")


def require_room(layer: Layer, source: TensorDescriptor, descriptor: WindowDescriptor) -> None:
    """Rejects padded images that are smaller than one window."""
    height, width = (
        n + sum(added) for n, added in zip(source.shape[2:], descriptor.padding(*source.shape[2:]), strict=True)
    )
    tall, wide = descriptor.extents
    if height < tall or width < wide:
        problem = f"the window spans {tall} × {wide} pixels, but the image with its padding has {height} × {width}"
        raise ShapeError(layer.where, problem, source=source, fix="use a smaller kernel, more padding or SAME padding")
