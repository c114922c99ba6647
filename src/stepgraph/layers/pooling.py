"""Pooling: the maximum, the mean or the norm of every window of a sequence, an image or a volume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph.errors import ShapeError
from stepgraph.layers.convolution import convolve
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.window import Numbers, Pair, Size, WindowDescriptor, by, extent, require_room, require_window
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import PaddingPolicy, RawEnum


class PoolingType(RawEnum):
    """Kinds of pooling."""

    MAX = 1, "Max"
    AVERAGE = 2, "Average"
    L2_NORM = 3, "L2 Norm"


@dataclass(frozen=True)
class PoolingDescriptor(WindowDescriptor):
    """The settings of a pooling layer. One number applies to all axes; a pair is `(height, width)`.

    Args:
        type: maximum, average or norm.
        kernel_sizes: the size of a window in pixels.
        strides: pixels from one window to the next; None means the kernel sizes.
        dilation_rates: pixels from one tap of a window to the next.
        padding_policy: how windows treat the border; default `SAME`, as in the original.
        padding_sizes: pixels added on both sides; only `USE_PADDING_SIZE` uses them.
        count_includes_padding: whether an average divides by all taps or only by those inside the image.
        dimensions: 1 for sequences `[batch, channels, steps]`, 2 for images, 3 for volumes
            `[batch, channels, depth, height, width]`.

    Example:
        >>> PoolingDescriptor(PoolingType.MAX, (2, 3)).strides
        (2, 3)
    """

    type: PoolingType
    kernel_sizes: Size
    strides: Size | None = None
    _: KW_ONLY
    dilation_rates: Size = 1
    padding_policy: PaddingPolicy = PaddingPolicy.SAME
    padding_sizes: Size = 0
    count_includes_padding: bool = False
    dimensions: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "type", PoolingType.of_raw(self.__class__.__name__, "type", self.type))
        if self.strides is None:
            object.__setattr__(self, "strides", self.kernel_sizes)
        self._normalize()


class PoolingLayer(Layer):
    """`y[c, p] = pool over k of x[c, s p + d k - before]`: one number for every window of every channel.

    | type | pool | padding |
    |---|---|---|
    | `MAX` | the largest, the first of equal ones | ignored |
    | `AVERAGE` | `Σ x / count` | counted as zeros with `count_includes_padding`, else not counted |
    | `L2_NORM` | `sqrt(Σ x²)`, gradient `x / y`, zero where the window is zero | adds nothing |

    Shapes: `[batch, channels, height, width] → [batch, channels, height', width']`, sizes as in `ConvolutionLayer`,
    for sequences (`dimensions=1`) and volumes (`dimensions=3`) as well. A window without any pixel of the image is
    rejected. `GlobalPoolingLayer` pools whole images of any size.

    Unlike PyTorch's pooling, it supports `SAME` padding, padding of more than half a window, and any dilation;
    `torch.nn.LPPool2d` divides its gradient by zero on a zero window.

    The descriptor's default policy is the original's, `SAME`; the factories `max`, `average` and `l2_norm` default to
    `VALID`, like other Python frameworks, or to `padding_sizes` if passed.

    Example:
        >>> PoolingLayer.max(2).infer(TensorDescriptor((8, 3, 28, 28)))[0].shape
        (8, 3, 14, 14)
        >>> PoolingLayer.average(4, dimensions=1).infer(TensorDescriptor((8, 3, 100)))[0].shape
        (8, 3, 25)
    """

    descriptor: PoolingDescriptor

    default_label = "Pooling"

    @classmethod
    def max(
        cls,
        kernel_sizes: Size,
        strides: Size | None = None,
        *,
        dilation_rates: Size = 1,
        padding_policy: PaddingPolicy | None = None,
        padding_sizes: Size | None = None,
        dimensions: int = 2,
        label: str = "",
    ) -> PoolingLayer:
        """The largest of each window; `VALID`, or `padding_sizes` if passed."""
        padding = _padding(padding_policy, padding_sizes)
        settings = {"dilation_rates": dilation_rates, "dimensions": dimensions, **padding}
        return cls(PoolingDescriptor(PoolingType.MAX, kernel_sizes, strides, **settings), label=label)

    @classmethod
    def average(
        cls,
        kernel_sizes: Size,
        strides: Size | None = None,
        *,
        dilation_rates: Size = 1,
        padding_policy: PaddingPolicy | None = None,
        padding_sizes: Size | None = None,
        dimensions: int = 2,
        count_includes_padding: bool = False,
        label: str = "",
    ) -> PoolingLayer:
        """The mean of each window; `VALID`, or `padding_sizes` if passed."""
        settings = {
            "dilation_rates": dilation_rates,
            "dimensions": dimensions,
            "count_includes_padding": count_includes_padding,
            **_padding(padding_policy, padding_sizes),
        }
        return cls(PoolingDescriptor(PoolingType.AVERAGE, kernel_sizes, strides, **settings), label=label)

    @classmethod
    def l2_norm(
        cls,
        kernel_sizes: Size,
        strides: Size | None = None,
        *,
        dilation_rates: Size = 1,
        padding_policy: PaddingPolicy | None = None,
        padding_sizes: Size | None = None,
        dimensions: int = 2,
        label: str = "",
    ) -> PoolingLayer:
        """The Euclidean norm of each window; `VALID`, or `padding_sizes` if passed."""
        padding = _padding(padding_policy, padding_sizes)
        settings = {"dilation_rates": dilation_rates, "dimensions": dimensions, **padding}
        return cls(PoolingDescriptor(PoolingType.L2_NORM, kernel_sizes, strides, **settings), label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source is a batch of images in which every window contains a pixel."""
        super().check(*sources)
        source, descriptor = sources[0], self.descriptor
        require_window(self, source, descriptor)
        require_room(self, source, descriptor)
        sizes = source.shape[2:]
        padding, axes = descriptor.padding(*sizes), descriptor.axes
        if any(_has_empty_window(*one) for one in zip(sizes, padding, axes, strict=True)):
            problem = f"windows of {by(axis[0] for axis in axes)} taps are entirely in the padding"
            raise ShapeError(self.where, problem, source=source, padding=padding, fix="use less padding or dilation")

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """The pooling of the descriptor's type."""
        descriptor = self.descriptor
        return POOLINGS[descriptor.type](
            x,
            kernel=descriptor.kernel_sizes,
            stride=descriptor.strides,
            dilation=descriptor.dilation_rates,
            padding=descriptor.padding(*x.shape[2:]),
            count_includes_padding=descriptor.count_includes_padding,
        )


def pool_max(
    x: torch.Tensor, *, kernel: Numbers, stride: Numbers, dilation: Numbers, padding: Sequence[Pair], **_: bool
) -> torch.Tensor:
    """`y[p] = maxₖ x[s p + d k - before]`; `padding` is (before, after) of each axis."""
    return _by_planes(_max, x, kernel, stride, dilation, padding)


def pool_average(
    x: torch.Tensor,
    *,
    kernel: Numbers,
    stride: Numbers,
    dilation: Numbers,
    padding: Sequence[Pair],
    count_includes_padding: bool,
) -> torch.Tensor:
    """`y[p] = Σₖ x[s p + d k - before] / count`, where `count` is all taps or those inside the image."""
    return _by_planes(_mean if count_includes_padding else _mean_inside, x, kernel, stride, dilation, padding)


def pool_l2_norm(
    x: torch.Tensor, *, kernel: Numbers, stride: Numbers, dilation: Numbers, padding: Sequence[Pair], **_: bool
) -> torch.Tensor:
    """`y[p] = sqrt(Σₖ x[s p + d k - before]²)`; the gradient of an all-zero window is zero."""
    total = _by_planes(_sum, x * x, kernel, stride, dilation, padding)
    zero = total == 0
    return total.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


POOLINGS: dict[PoolingType, Callable[..., torch.Tensor]] = {
    PoolingType.MAX: pool_max,
    PoolingType.AVERAGE: pool_average,
    PoolingType.L2_NORM: pool_l2_norm,
}
STILL = (1,), (1,), (1,), ((0, 0),)  # a window of one pixel that moves by one: it changes nothing
Planar = Callable[[torch.Tensor, Pair, Pair, Pair, tuple[Pair, Pair]], torch.Tensor]


def _by_planes(
    pool: Planar, x: torch.Tensor, kernel: Numbers, stride: Numbers, dilation: Numbers, padding: Sequence[Pair]
) -> torch.Tensor:
    """Pools over one, two or three axes with a pooling of images.

    A sequence is an image of one row. A volume is pooled plane by plane, then along its depth: the maximum of maxima,
    the sum of sums and the mean of means are those of the whole window, whose taps inside the volume form a box.
    """
    window = kernel, stride, dilation, tuple(padding)
    if x.ndim == 4:
        return pool(x, *window)  # type: ignore[arg-type]
    if x.ndim == 3:
        return pool(x.unsqueeze(2), *_in_y(window, STILL)).squeeze(2)
    depth, plane = tuple(one[:1] for one in window), tuple(one[1:] for one in window)
    planes = pool(x.flatten(1, 2), *plane).unflatten(1, x.shape[1:3])  # type: ignore[arg-type]
    pooled = pool(planes.flatten(3), *_in_y(STILL, depth))
    return pooled.unflatten(3, planes.shape[3:])


def _in_y(x: tuple[Any, ...], y: tuple[Any, ...]) -> Any:
    """The settings of a window of two axes, from those of each."""
    return tuple((*of_y, *of_x) for of_y, of_x in zip(y, x, strict=True))


def _max(x: torch.Tensor, kernel: Pair, stride: Pair, dilation: Pair, padding: tuple[Pair, Pair]) -> torch.Tensor:
    x, before, hangs = _padded(x, kernel, stride, padding, -torch.inf)
    return F.max_pool2d(x, kernel, stride, before, dilation, hangs)


def _mean(x: torch.Tensor, kernel: Pair, stride: Pair, dilation: Pair, padding: tuple[Pair, Pair]) -> torch.Tensor:
    return _sum(x, kernel, stride, dilation, padding, divisor=kernel[0] * kernel[1])


def _mean_inside(
    x: torch.Tensor, kernel: Pair, stride: Pair, dilation: Pair, padding: tuple[Pair, Pair]
) -> torch.Tensor:
    if dilation == (1, 1) and _is_native(kernel, stride, padding):
        x, before, hangs = _padded(x, kernel, stride, padding, 0.0)
        return F.avg_pool2d(x, kernel, stride, before, hangs, count_include_pad=False)
    inside = torch.ones_like(x[:1, :1])
    return _sum(x, kernel, stride, dilation, padding) / _sum(inside, kernel, stride, dilation, padding)


def _sum(
    x: torch.Tensor, kernel: Pair, stride: Pair, dilation: Pair, padding: tuple[Pair, Pair], divisor: int = 1
) -> torch.Tensor:
    """`Σₖ x[s p + d k - before] / divisor`."""
    if dilation == (1, 1):
        x, before, hangs = _padded(x, kernel, stride, padding, 0.0)
        return F.avg_pool2d(x, kernel, stride, before, hangs, divisor_override=divisor)
    channels, taps = x.flatten(0, 1).unsqueeze(1), x.new_full((1, 1, *kernel), 1 / divisor)
    sums = convolve(channels, taps, None, stride=stride, dilation=dilation, padding=padding, groups=1)
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


def _padded(
    x: torch.Tensor, kernel: Pair, stride: Pair, padding: tuple[Pair, Pair], value: float
) -> tuple[torch.Tensor, Pair, bool]:
    """The image, the pixels torch's pooling adds on both sides, and whether its last window may pass the end.

    A window past the end (`ceil_mode`) reads the extra pixel that `SAME` padding with an odd total has at the end.
    The image is copied with its padding only if torch cannot add it.
    """
    (top, bottom), (left, right) = padding
    if _is_native(kernel, stride, padding):
        return x, (top, left), (top, left) != (bottom, right)
    return F.pad(x, (left, right, top, bottom), value=value), (0, 0), False


def _is_native(kernel: Pair, stride: Pair, padding: tuple[Pair, Pair]) -> bool:
    """Whether torch's pooling can pad like this: by at most half a kernel, unevenly only with a stride above 1."""
    axes = zip(kernel, stride, padding, strict=True)
    return all(2 * before <= size and (before == after or step > 1) for size, step, (before, after) in axes)


def _has_empty_window(size: int, padding: Pair, axis: tuple[int, int, int, int]) -> bool:
    (before, after), (kernel, stride, dilation, _) = padding, axis
    starts = range(-before, size + after - extent(kernel, dilation) + 1, stride)
    return any(not any(0 <= start + k * dilation < size for k in range(kernel)) for start in starts)


def _padding(policy: PaddingPolicy | None, sizes: Size | None) -> dict[str, Any]:
    default = PaddingPolicy.VALID if sizes is None else PaddingPolicy.USE_PADDING_SIZE
    return {"padding_policy": default if policy is None else policy, "padding_sizes": 0 if sizes is None else sizes}
