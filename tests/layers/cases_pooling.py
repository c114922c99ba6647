"""Rows of the conformance table: pooling of every type, policy, stride and dilation."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.pooling import PoolingDescriptor, PoolingLayer, PoolingType
from stepgraph.types import PaddingPolicy
from tests.layers.case import Bad, Case, Source


@dataclass(frozen=True)
class Setting:
    """A pooling in plain numbers, every pair as (y, x)."""

    type: str
    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int] = (1, 1)
    policy: str = "SAME"
    sizes: tuple[int, int] = (0, 0)
    counts: bool = False

    def layer(self) -> PoolingLayer:
        descriptor = PoolingDescriptor(
            PoolingType[self.type],
            self.kernel,
            self.stride,
            dilation_rates=self.dilation,
            padding_policy=PaddingPolicy[self.policy],
            padding_sizes=self.sizes,
            count_includes_padding=self.counts,
        )
        return PoolingLayer(descriptor)

    def axis(self, size: int, axis: int) -> tuple[int, int]:
        """Extent of the result and pixels before the first one along y (0) or x (1), by the specification's table."""
        k, s, d, p = self.kernel[axis], self.stride[axis], self.dilation[axis], self.sizes[axis]
        e, same = (k - 1) * d + 1, -(-size // s)
        return {
            "VALID": ((size - e) // s + 1, 0),
            "USE_PADDING_SIZE": ((size + 2 * p - e) // s + 1, p),
            "SAME": (same, max((same - 1) * s + e - size, 0) // 2),
        }[self.policy]

    def windows(self, shape: tuple[int, ...]) -> list[list[list[tuple[int, int]]]]:
        """The pixels inside the image that each window reads."""
        (height, top), (width, left) = self.axis(shape[2], 0), self.axis(shape[3], 1)

        def taps(start: int, axis: int) -> list[int]:
            places = (start + k * self.dilation[axis] for k in range(self.kernel[axis]))
            return [place for place in places if 0 <= place < shape[2 + axis]]

        rows = [taps(i * self.stride[0] - top, 0) for i in range(height)]
        columns = [taps(j * self.stride[1] - left, 1) for j in range(width)]
        return [[[(i, j) for i in ys for j in xs] for xs in columns] for ys in rows]

    def reference(self, x: np.ndarray) -> np.ndarray:
        """Window by window, from the pixels it reads."""
        windows = self.windows(x.shape)
        y = np.empty((*x.shape[:2], len(windows), len(windows[0])))
        for i, row in enumerate(windows):
            for j, pixels in enumerate(row):
                taken = np.stack([x[:, :, a, b] for a, b in pixels])
                count = self.kernel[0] * self.kernel[1] if self.counts else len(pixels)
                results = {"MAX": taken.max(0), "AVERAGE": taken.sum(0) / count, "L2_NORM": np.sqrt((taken**2).sum(0))}
                y[:, :, i, j] = results[self.type]
        return y


def distinct(*shape: int) -> Source:
    """Values on both sides of zero, so far apart that the largest stays the largest under a small step."""
    count = int(np.prod(shape))
    return lambda generator: (generator.permutation(count).reshape(shape) - count / 2 + 0.25) / 20


Twin = Callable[[torch.Tensor], torch.Tensor]


def pooling(name: str, setting: Setting, *size: int, twin: Twin | None = None, bad: tuple[Bad, ...] = ()) -> Case:
    return Case(f"pooling-{name}", setting.layer, (distinct(2, 3, *size),), setting.reference, twin, bad=bad)


BAD = (
    Bad(((2, 3, 8),), ShapeError, "3 dimensions"),
    Bad((np.zeros((2, 3, 8, 8), np.int64),), DataTypeError, "int64"),
    Bad(((2, 3, 1, 8),), ShapeError, "2 × 2 pixels, but the image with its padding has 1 × 8"),
)
EMPTY = Bad(((1, 1, 1, 1),), ShapeError, "are entirely in the padding")

CASES: list[Case] = [
    pooling("max", Setting("MAX", (2, 2), (2, 2), policy="VALID"), 6, 5, twin=lambda x: F.max_pool2d(x, 2), bad=BAD),
    pooling("max-same-overlapping", Setting("MAX", (3, 3), (2, 2)), 6, 5),
    pooling("max-same-stride-1", Setting("MAX", (3, 3), (1, 1)), 4, 5, twin=lambda x: F.max_pool2d(x, 3, 1, 1)),
    pooling("max-same-stride-1-even-kernel", Setting("MAX", (2, 4), (1, 1)), 4, 5),
    pooling("max-same-mixed-strides", Setting("MAX", (2, 3), (1, 2)), 4, 6),
    pooling("max-same-wide-stride", Setting("MAX", (1, 2), (3, 3)), 7, 8),
    pooling("max-dilated", Setting("MAX", (2, 3), (1, 2), (2, 2)), 5, 6),
    pooling(
        "max-dilated-valid",
        Setting("MAX", (2, 2), (2, 1), (2, 3), policy="VALID"),
        5,
        6,
        twin=lambda x: F.max_pool2d(x, 2, (2, 1), 0, (2, 3)),
    ),
    pooling(
        "max-sized",
        Setting("MAX", (3, 2), (2, 2), policy="USE_PADDING_SIZE", sizes=(1, 1)),
        6,
        5,
        twin=lambda x: F.max_pool2d(x, (3, 2), 2, 1),
    ),
    pooling("max-sized-wide", Setting("MAX", (3, 3), (1, 2), policy="USE_PADDING_SIZE", sizes=(2, 2)), 4, 5),
    pooling(
        "average",
        Setting("AVERAGE", (2, 3), (2, 3), policy="VALID"),
        6,
        7,
        twin=lambda x: F.avg_pool2d(x, (2, 3)),
    ),
    pooling(
        "average-same",
        Setting("AVERAGE", (3, 3), (1, 1)),
        4,
        5,
        twin=lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    ),
    pooling("average-same-counted", Setting("AVERAGE", (3, 3), (1, 1), counts=True), 4, 5),
    pooling("average-same-odd-total", Setting("AVERAGE", (3, 2), (2, 2)), 6, 5),
    pooling("average-same-odd-total-counted", Setting("AVERAGE", (3, 2), (2, 2), counts=True), 6, 5),
    pooling("average-same-stride-1-even-kernel", Setting("AVERAGE", (2, 4), (1, 1)), 4, 5),
    pooling("average-same-stride-1-even-kernel-counted", Setting("AVERAGE", (2, 4), (1, 1), counts=True), 4, 5),
    pooling("average-dilated", Setting("AVERAGE", (3, 2), (1, 2), (2, 2)), 6, 5, bad=(EMPTY,)),
    pooling("average-dilated-counted", Setting("AVERAGE", (3, 2), (1, 2), (2, 2), counts=True), 6, 5),
    pooling(
        "average-sized-counted",
        Setting("AVERAGE", (3, 3), (2, 2), policy="USE_PADDING_SIZE", sizes=(1, 1), counts=True),
        5,
        6,
        twin=lambda x: F.avg_pool2d(x, 3, 2, 1),
    ),
    pooling("average-sized-wide", Setting("AVERAGE", (3, 3), (1, 1), policy="USE_PADDING_SIZE", sizes=(2, 2)), 3, 4),
    pooling(
        "l2-norm",
        Setting("L2_NORM", (2, 2), (2, 2), policy="VALID"),
        6,
        5,
        twin=lambda x: F.lp_pool2d(x, 2.0, 2),
    ),
    pooling("l2-norm-same", Setting("L2_NORM", (3, 2), (2, 2)), 6, 5),
    pooling("l2-norm-dilated", Setting("L2_NORM", (2, 2), (1, 1), (2, 3)), 5, 6),
    pooling("l2-norm-sized", Setting("L2_NORM", (3, 3), (2, 1), policy="USE_PADDING_SIZE", sizes=(2, 1)), 4, 5),
]
