"""Sliding windows over sequences, images and volumes: the settings, geometry and checks of convolution and pooling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Layer
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import PaddingPolicy

Pair = tuple[int, int]
Numbers = tuple[int, ...]
Size = int | Sequence[int]
AXES = {1: ("steps",), 2: ("height", "width"), 3: ("depth", "height", "width")}


def _of_axis(field: str, axis: int, missing: int, doc: str) -> Any:
    """A read-only attribute with the number of one axis, counted from the last."""
    return property(lambda self: (missing, missing, *getattr(self, field))[axis], doc=doc)


class WindowDescriptor:
    """The settings of a sliding window, per axis; every pair is `(height, width)`, that is, `(y, x)`."""

    kernel_sizes: Size
    strides: Size | None
    dilation_rates: Size
    padding_sizes: Size
    padding_policy: PaddingPolicy
    dimensions: int

    kernel_height = _of_axis("kernel_sizes", -2, 1, "Rows of the kernel.")
    kernel_width = _of_axis("kernel_sizes", -1, 1, "Columns of the kernel.")
    stride_in_y = _of_axis("strides", -2, 1, "Rows from one window to the next.")
    stride_in_x = _of_axis("strides", -1, 1, "Columns from one window to the next.")
    dilation_rate_in_y = _of_axis("dilation_rates", -2, 1, "Rows from one tap to the next.")
    dilation_rate_in_x = _of_axis("dilation_rates", -1, 1, "Columns from one tap to the next.")
    padding_size_in_y = _of_axis("padding_sizes", -2, 0, "Rows added above and below.")
    padding_size_in_x = _of_axis("padding_sizes", -1, 0, "Columns added left and right.")

    @property
    def axes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Kernel size, stride, dilation rate and padding size of every axis, x last."""
        settings = self.kernel_sizes, self.strides, self.dilation_rates, self.padding_sizes
        return tuple(zip(*settings, strict=True))  # type: ignore[arg-type]

    @property
    def extents(self) -> Numbers:
        """Pixels that a window spans along every axis, including dilation."""
        return tuple(extent(kernel, dilation) for kernel, _, dilation, _ in self.axes)

    def padding(self, *sizes: int) -> tuple[Pair, ...]:
        """Pixels added (before, after) to each axis of an image of this size."""
        return tuple(padding(self.padding_policy, size, *axis) for size, axis in zip(sizes, self.axes, strict=True))

    def _normalize(self) -> None:
        where = type(self).__name__
        if isinstance(self.dimensions, bool) or self.dimensions not in AXES:
            problem = f"dimensions is {self.dimensions!r}"
            raise ArgumentError(where, problem, fix="pass 1 (sequences), 2 (images) or 3 (volumes)")
        for name, least in (("kernel_sizes", 1), ("strides", 1), ("dilation_rates", 1), ("padding_sizes", 0)):
            found = numbers(where, name, getattr(self, name), least, self.dimensions)
            object.__setattr__(self, name, found)
        object.__setattr__(
            self, "padding_policy", PaddingPolicy.of_raw(self.__class__.__name__, "padding_policy", self.padding_policy)
        )


def numbers(where: str, name: str, value: Size, least: int = 1, count: int = 2) -> Numbers:
    """One number for all axes, or one for each: `(height, width)`, Apple's `[y, x]` order."""
    found = tuple(value) if isinstance(value, Iterable) else (value,)
    found = found * count if len(found) == 1 else found
    if len(found) != count or any(isinstance(n, bool) or not isinstance(n, Integral) or n < least for n in found):
        fix = f"pass one integer ≥ {least}" + (f", or ({', '.join(AXES[count])})" if count > 1 else "")
        fix += (
            f"; {len(found)} numbers need dimensions={len(found)}" if len(found) in AXES and len(found) != count else ""
        )
        raise ArgumentError(where, f"{name} is {value!r}", fix=fix)
    return tuple(int(n) for n in found)


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


def require_images(layer: Layer, source: TensorDescriptor, dimensions: int = 2) -> None:
    """Rejects sources that are not `[batch, channels, height, width]`, or have another number of axes after these."""
    if source.dimension_count != dimensions + 2:
        axes = ", ".join(("batch", "channels", *AXES[dimensions]))
        problem = f"the source has {source.dimension_count} dimensions, but [{axes}] has {dimensions + 2}"
        raise ShapeError(layer.where, problem, source=source, fix="reshape the source")


def require_window(layer: Layer, source: TensorDescriptor, descriptor: WindowDescriptor) -> None:
    """Rejects sources whose number of axes is not that of the window."""
    given, wanted = source.dimension_count - 2, descriptor.dimensions
    if given != wanted and given in AXES:
        axes = ", ".join(("batch", "channels", *AXES[wanted]))
        problem = f"the source has {given + 2} dimensions, but [{axes}] has {wanted + 2}"
        fix = f"pass dimensions={given} to the layer's factory or descriptor, or reshape the source"
        raise ShapeError(layer.where, problem, source=source, fix=fix)
    require_images(layer, source, wanted)


def require_room(layer: Layer, source: TensorDescriptor, descriptor: WindowDescriptor) -> None:
    """Rejects padded images that are smaller than one window."""
    sizes = source.shape[2:]
    padded = [size + sum(added) for size, added in zip(sizes, descriptor.padding(*sizes), strict=True)]
    if any(size < span for size, span in zip(padded, descriptor.extents, strict=True)):
        span, size = by(descriptor.extents), by(padded)
        problem = f"the window spans {span} pixels, but the image with its padding has {size}"
        raise ShapeError(layer.where, problem, source=source, fix="use a smaller kernel, more padding or SAME padding")


def by(sizes: Iterable[int]) -> str:
    """Sizes in words, as `3 × 5`."""
    return " × ".join(map(str, sizes))
