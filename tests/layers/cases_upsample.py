"""Cases of upsampling."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.upsample import SampleMode, UpsampleLayer
from tests.layers.case import Bad, Case, normal


def nearest(m: int, n: int) -> np.ndarray:
    """What each of the `n` pixels gives to each of `m`: the one at `floor(p n / m)` gives all."""
    weights = np.zeros((m, n))
    for p in range(m):
        weights[p, p * n // m] = 1
    return weights


def linear(m: int, n: int, aligned: bool) -> np.ndarray:
    """What each of the `n` pixels gives to each of `m`: `1 - distance` of those next to the position."""
    weights = np.zeros((m, n))
    for p in range(m):
        start = 0.0 if m == 1 else p * (n - 1) / (m - 1)
        position = start if aligned else (p + 0.5) * n / m - 0.5
        position = min(max(position, 0), n - 1)
        weights[p] = np.maximum(0, 1 - np.abs(np.arange(n) - position))
    return weights


def reference(height: int, width: int, along: Callable[[int, int], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: np.einsum("nchw,yh,xw->ncyx", x, along(height, x.shape[2]), along(width, x.shape[3]))


def twin(size: tuple[int, int], mode: str, aligned: bool | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.interpolate(x, size, mode=mode, align_corners=aligned)


CASES = [
    Case(
        "upsample, nearest",
        lambda: UpsampleLayer([8, 15]),
        (normal(2, 3, 4, 5),),
        lambda x: x.repeat(2, axis=2).repeat(3, axis=3),
        twin((8, 15), "nearest"),
        bad=(
            Bad(((2, 3, 4),), ShapeError, "the source has 3 dimensions, but [batch, channels, height, width] has 4"),
            Bad((np.zeros((2, 3, 4, 5), np.uint8),), DataTypeError, "the source is uint8"),
        ),
    ),
    Case(
        "upsample, nearest, any factor",
        lambda: UpsampleLayer((7, 3), SampleMode.NEAREST),
        (normal(2, 3, 4, 5),),
        reference(7, 3, nearest),
        twin((7, 3), "nearest"),
    ),
    Case(
        "upsample, nearest, width only",
        lambda: UpsampleLayer.nearest([10]),
        (normal(2, 3, 4, 5),),
        lambda x: x.repeat(2, axis=3),
        twin((4, 10), "nearest"),
    ),
    Case(
        "upsample, nearest, where PyTorch is off by one",
        lambda: UpsampleLayer.nearest((46, 4)),
        (normal(1, 1, 14, 3),),
        reference(46, 4, nearest),
    ),
    Case(
        "upsample, linear",
        lambda: UpsampleLayer.linear((8, 10)),
        (normal(2, 3, 4, 5),),
        reference(8, 10, lambda m, n: linear(m, n, aligned=False)),
        twin((8, 10), "bilinear", False),
    ),
    Case(
        "upsample, linear, any factor",
        lambda: UpsampleLayer((7, 3), SampleMode.LINEAR),
        (normal(2, 3, 4, 5),),
        reference(7, 3, lambda m, n: linear(m, n, aligned=False)),
        twin((7, 3), "bilinear", False),
    ),
    Case(
        "upsample, linear, width only",
        lambda: UpsampleLayer.linear([9]),
        (normal(2, 3, 4, 5),),
        reference(4, 9, lambda m, n: linear(m, n, aligned=False)),
        twin((4, 9), "bilinear", False),
    ),
    Case(
        "upsample, linear, aligned corners",
        lambda: UpsampleLayer((7, 12), SampleMode.LINEAR, aligns_corners=True),
        (normal(2, 3, 4, 5),),
        reference(7, 12, lambda m, n: linear(m, n, aligned=True)),
        twin((7, 12), "bilinear", True),
    ),
    Case(
        "upsample, linear, aligned corners, to one pixel",
        lambda: UpsampleLayer.linear((1, 4), aligns_corners=True),
        (normal(2, 3, 4, 1),),
        reference(1, 4, lambda m, n: linear(m, n, aligned=True)),
        twin((1, 4), "bilinear", True),
    ),
]
