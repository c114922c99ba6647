"""Upsampling: resizes images."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.shape import whole_number
from stepgraph.layers.window import Pair, require_images
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import RawEnum


class SampleMode(RawEnum):
    """How to interpolate between pixels."""

    NEAREST = 0, "Nearest"
    LINEAR = 1, "Linear"


class UpsampleLayer(Layer):
    """Resizes images; result pixel `p` of `m` reads source position `q` of `n` along each axis.

    | mode | position | value |
    |---|---|---|
    | `NEAREST` | `q = floor(p n / m)` | that pixel |
    | `LINEAR` | `q = (p + ½) n / m - ½`, within the image | linear between its neighbors, in both axes |
    | `LINEAR`, aligned | `q = p (n - 1) / (m - 1)`: corners meet corners | the same |

    Shapes: `[batch, channels, height, width] → [batch, channels, *shape]`; a shape of one number is the width and keeps
    the height. Sizes need not be multiples of the source's, and may be smaller.

    Same as `torch.nn.functional.interpolate`, whose nearest pixel is off by one for some sizes (14 → 46: it rounds
    `n / m` first); here it is exact.

    Args:
        shape: `[width]` or `[height, width]` of the result.
        sample_mode: nearest pixel, or linear between pixels.
        aligns_corners: only `LINEAR` uses it.

    Example:
        >>> UpsampleLayer([56, 56]).infer(TensorDescriptor((8, 3, 28, 28)))[0].shape
        (8, 3, 56, 56)
    """

    shape: tuple[int, ...]
    sample_mode: SampleMode = SampleMode.NEAREST
    aligns_corners: bool = False

    default_label = "Upsampling"

    def __post_init__(self) -> None:
        shape = tuple(whole_number(self, "an extent of the shape", extent, 1) for extent in self.shape)
        object.__setattr__(self, "shape", shape)
        if len(shape) not in (1, 2):
            problem = f"the shape {shape} has {len(shape)} dimensions"
            raise ArgumentError(self.where, problem, fix="pass [width] or [height, width]")
        if not isinstance(self.sample_mode, SampleMode):
            problem = f"sample_mode is {self.sample_mode!r}"
            raise ArgumentError(self.where, problem, fix="use a member of SampleMode")

    @classmethod
    def nearest(cls, shape: tuple[int, ...], *, label: str = "") -> UpsampleLayer:
        """Each pixel is the nearest one of the source."""
        return cls(shape, label=label)

    @classmethod
    def linear(cls, shape: tuple[int, ...], *, aligns_corners: bool = False, label: str = "") -> UpsampleLayer:
        """Each pixel is interpolated linearly between the four around it."""
        return cls(shape, SampleMode.LINEAR, aligns_corners, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source is a batch of images."""
        super().check(*sources)
        require_images(self, sources[0])

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """The images in the size of the shape."""
        height, width = x.shape[2], self.shape[-1]
        size = (height if len(self.shape) == 1 else self.shape[0], width)
        if self.sample_mode is SampleMode.LINEAR:
            return upsample_linear(x, size=size, aligns_corners=bool(self.aligns_corners))
        return upsample_nearest(x, size=size)


def upsample_linear(x: torch.Tensor, *, size: Pair, aligns_corners: bool) -> torch.Tensor:
    """`y[p] = x` at `(p + ½) n / m - ½`, or at `p (n - 1) / (m - 1)`, linear between pixels."""
    return F.interpolate(x, size, mode="bilinear", align_corners=aligns_corners)


def upsample_nearest(x: torch.Tensor, *, size: Pair) -> torch.Tensor:
    """`y[p] = x[floor(p n / m)]` along both axes."""
    if all(_is_native(n, m) for n, m in zip(x.shape[2:], size, strict=True)):
        return F.interpolate(x, size, mode="nearest")
    for axis, m in ((2, size[0]), (3, size[1])):
        x = x.index_select(axis, torch.arange(m, device=x.device) * x.shape[axis] // m)
    return x


@cache
def _is_native(n: int, m: int) -> bool:
    """Whether PyTorch's kernels, which first round `n / m` (`m / n` in gradients on a GPU), find the exact pixels."""
    p, q = np.arange(m), np.arange(n + 1)
    reads = np.array_equal(np.floor(_rounded(p, n, m)), p * n // m)
    return reads and np.array_equal(np.ceil(_rounded(q, m, n)), -(-q * m // n))


def _rounded(p: np.ndarray, n: int, m: int) -> np.ndarray:
    """`p (n / m)`, quotient and product rounded to float32, whatever the type of the image."""
    return p.astype(np.float32) * (np.float32(n) / np.float32(m))
