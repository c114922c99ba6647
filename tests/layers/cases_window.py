"""Rows of the conformance table: convolution and pooling over sequences and volumes, and global pooling."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import ShapeError
from stepgraph.layers.convolution import ConvolutionLayer, ConvolutionType
from stepgraph.layers.global_pooling import GlobalPoolingLayer
from stepgraph.layers.pooling import PoolingDescriptor, PoolingLayer, PoolingType
from stepgraph.types import PaddingPolicy, RandomInitializerType
from tests.layers.case import Bad, Case, normal
from tests.layers.cases_pooling import distinct

Numbers = tuple[int, ...]
CONVOLUTIONS = {1: F.conv1d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 3: F.conv_transpose3d}


@dataclass(frozen=True)
class Window:
    """A window over any number of axes, in plain numbers."""

    kernel: Numbers
    stride: Numbers
    dilation: Numbers
    policy: str = "SAME"
    sizes: int = 0
    transposed: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "dilation_rates": self.dilation,
            "padding_policy": PaddingPolicy[self.policy],
            "padding_sizes": self.sizes,
            "dimensions": len(self.kernel),
        }

    def axis(self, size: int, axis: int) -> tuple[int, int]:
        """Extent of the result and pixels before the first one, by the tables of the layer."""
        k, s, d, p = self.kernel[axis], self.stride[axis], self.dilation[axis], self.sizes
        e, same = (k - 1) * d + 1, -(-size // s)
        if self.transposed:
            valid, own = (size - 1) * s + e, (size * s, max(e - s, 0) // 2)
            return {"VALID": (valid, 0), "USE_PADDING_SIZE": (valid - 2 * p, p), "SAME": own}[self.policy]
        return {
            "VALID": ((size - e) // s + 1, 0),
            "USE_PADDING_SIZE": ((size + 2 * p - e) // s + 1, p),
            "SAME": (same, max((same - 1) * s + e - size, 0) // 2),
        }[self.policy]

    def taps(self, coarse: Numbers, before: Numbers) -> list[tuple[Numbers, Numbers]]:
        """Each tap of the window at one coarse pixel, and the fine pixel it joins."""
        places = []
        for tap in np.ndindex(self.kernel):
            joined = zip(coarse, self.stride, tap, self.dilation, before, strict=True)
            places.append((tap, tuple(p * s + k * d - b for p, s, k, d, b in joined)))
        return places


def inside(place: Numbers, sizes: Numbers) -> bool:
    return all(0 <= p < n for p, n in zip(place, sizes, strict=True))


def convolution(name: str, window: Window, *size: int, kind: str = "STANDARD", groups: int = 1, **more: Any) -> Case:
    inputs, outputs, axes = 2, 4, len(size)
    blocks = inputs if kind == "DEPTHWISE" else groups

    def make() -> ConvolutionLayer:
        layer = ConvolutionLayer.create(
            inputs, outputs, window.kernel, type=ConvolutionType[kind], group_count=groups, strides=window.stride,
            initializer=RandomInitializerType.UNIFORM, **window.settings,
        )  # fmt: skip
        assert layer.biases is not None
        layer.biases.torch().copy_(torch.arange(outputs))
        return layer

    def reference(x: np.ndarray, weights: np.ndarray, biases: np.ndarray) -> np.ndarray:
        sizes, befores = zip(*(window.axis(n, i) for i, n in enumerate(x.shape[2:])), strict=True)
        y = np.zeros((len(x), outputs, *sizes)) + biases.reshape(1, -1, *[1] * axes)
        w = weights.reshape(blocks, outputs // blocks, inputs // blocks, *window.kernel)
        source, result = x.reshape(len(x), blocks, -1, *x.shape[2:]), y.reshape(len(x), blocks, -1, *sizes)
        fine_sizes = sizes if window.transposed else x.shape[2:]
        for coarse in np.ndindex(x.shape[2:] if window.transposed else sizes):
            for tap, fine in window.taps(coarse, befores):
                if inside(fine, fine_sizes):
                    here, there = (coarse, fine) if window.transposed else (fine, coarse)
                    part = np.einsum("goi,ngi->ngo", w[(..., *tap)], source[(..., *here)])
                    result[(..., *there)] += part
        return y

    def twin(x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
        sizes, befores = zip(*(window.axis(n, i) for i, n in enumerate(x.shape[2:])), strict=True)
        crop = (..., *(slice(n) for n in sizes))
        if window.transposed:
            turned = torch.cat([block.transpose(0, 1) for block in weights.chunk(groups)])
            y = TRANSPOSED[axes](x, turned, None, window.stride, 0, 0, groups, window.dilation)
            y = F.pad(y, [n for _ in sizes for n in (0, 3)])  # a stride wider than its window leaves pixels out
            y = y[(..., *(slice(b, b + n) for b, n in zip(befores, sizes, strict=True)))]
            return y + biases.reshape(-1, *[1] * axes)
        padded = F.pad(x, [n for before in reversed(befores) for n in (before, 9)])  # more than any window reads
        return CONVOLUTIONS[axes](padded, weights, biases, window.stride, 0, window.dilation, blocks)[crop]

    return Case(f"convolution-{axes}d-{name}", make, (normal(2, inputs, *size),), reference, twin, **more)


def pooling(name: str, kind: str, window: Window, *size: int, twin: Any = None, counts: bool = False) -> Case:
    def make() -> PoolingLayer:
        settings = {**window.settings, "count_includes_padding": counts}
        return PoolingLayer(PoolingDescriptor(PoolingType[kind], window.kernel, window.stride, **settings))

    def reference(x: np.ndarray) -> np.ndarray:
        sizes, befores = zip(*(window.axis(n, i) for i, n in enumerate(x.shape[2:])), strict=True)
        y = np.zeros((*x.shape[:2], *sizes))
        for coarse in np.ndindex(sizes):
            places = [fine for _, fine in window.taps(coarse, befores) if inside(fine, x.shape[2:])]
            taken = np.stack([x[(..., *place)] for place in places])
            count = np.prod(window.kernel) if counts else len(places)
            found = {"MAX": taken.max(0), "AVERAGE": taken.sum(0) / count, "L2_NORM": np.sqrt((taken**2).sum(0))}
            y[(..., *coarse)] = found[kind]
        return y

    return Case(f"pooling-{len(size)}d-{name}", make, (distinct(2, 2, *size),), reference, twin)


def globally(kind: str, *size: int, keeps: bool = False) -> Case:
    def reference(x: np.ndarray) -> np.ndarray:
        rows = x.reshape(*x.shape[:2], -1)
        found = {"MAX": rows.max(2), "AVERAGE": rows.sum(2) / rows.shape[2], "L2_NORM": np.sqrt((rows**2).sum(2))}
        return found[kind].reshape(*x.shape[:2], *[1] * len(size)) if keeps else found[kind]

    functions: dict[tuple[str, int], Callable[..., torch.Tensor]] = {
        ("MAX", 1): F.adaptive_max_pool1d,
        ("AVERAGE", 2): F.adaptive_avg_pool2d,
        ("AVERAGE", 3): F.adaptive_avg_pool3d,
    }
    function = functions.get((kind, len(size)))
    return Case(
        f"global-pooling-{kind.lower()}-{len(size)}d",
        lambda: GlobalPoolingLayer(PoolingType[kind], keeps),
        (distinct(2, 3, *size),),
        reference,
        None if function is None else lambda x: function(x, 1) if keeps else function(x, 1).flatten(1),
        bad=(Bad(((2, 3),), ShapeError, "the source [2, 3] has no axis after [batch, channels]"),),
    )


ONE, VOLUME = ((1,), (1,)), ((1, 1, 1), (1, 1, 1))
OTHER_AXES = (
    Bad(((2, 2, 6, 6),), ShapeError, "the source has 4 dimensions, but [batch, channels, steps] has 3"),
    Bad(((2, 2, 6, 6),), ShapeError, "pass dimensions=2 to the layer's factory or descriptor"),
    Bad(((2, 3, 6),), ShapeError, "3 channels, but the layer takes 2"),
    Bad(((2, 2),), ShapeError, "the source has 2 dimensions, but [batch, channels, steps] has 3"),
)
SMALL = Bad(
    ((2, 2, 3, 1, 4),), ShapeError, "the window spans 2 × 2 × 3 pixels, but the image with its padding has 3 × 1"
)

ORDINARY = (
    "convolution-1d-same",
    "convolution-1d-transposed",
    "convolution-3d-strided-valid",
    "convolution-3d-depthwise",
    "pooling-1d-average",
    "pooling-3d-max-same-dilated",
    "pooling-3d-average",
    "global-pooling-max-1d",
    "global-pooling-average-3d",
)
WINDOWS: list[Case] = [
    convolution("same", Window((3,), *ONE), 6, bad=OTHER_AXES),
    convolution("strided-dilated", Window((3,), (2,), (2,)), 7, groups=2),
    convolution("sized-depthwise", Window((2,), (1,), (1,), "USE_PADDING_SIZE", 2), 5, kind="DEPTHWISE"),
    convolution("transposed", Window((3,), (2,), (1,), transposed=True), 4, kind="TRANSPOSED", groups=2),
    convolution("transposed-valid", Window((2,), (3,), (2,), "VALID", transposed=True), 4, kind="TRANSPOSED"),
    convolution("same", Window((3, 2, 3), *VOLUME), 3, 3, 2),
    convolution("strided-valid", Window((2, 2, 2), (1, 2, 1), (1, 1, 2), "VALID"), 3, 4, 4, groups=2, bad=(SMALL,)),
    convolution("depthwise", Window((2, 3, 1), (2, 1, 1), (1, 1, 1)), 3, 3, 2, kind="DEPTHWISE"),
    convolution("transposed", Window((2, 3, 2), (2, 1, 3), (1, 1, 1), transposed=True), 2, 2, 2, kind="TRANSPOSED"),
    pooling("max", "MAX", Window((2,), (2,), (1,), "VALID"), 7, twin=lambda x: F.max_pool1d(x, 2)),
    pooling("average", "AVERAGE", Window((3,), (2,), (1,)), 6),
    pooling("norm-dilated", "L2_NORM", Window((2,), (1,), (2,)), 6),
    pooling("max", "MAX", Window((2, 3, 2), (2, 1, 2), (1, 1, 1), "VALID"), 4, 3, 4,
            twin=lambda x: F.max_pool3d(x, (2, 3, 2), (2, 1, 2))),
    pooling("max-same-dilated", "MAX", Window((2, 2, 2), (1, 2, 1), (2, 1, 1)), 3, 4, 3),
    pooling("average", "AVERAGE", Window((3, 2, 2), (2, 2, 1), (1, 1, 1)), 4, 3, 3),
    pooling("average-counting", "AVERAGE", Window((2, 3, 2), (2, 2, 2), (1, 1, 1), "USE_PADDING_SIZE", 1), 3, 3, 4,
            twin=lambda x: F.avg_pool3d(x, (2, 3, 2), 2, 1), counts=True),
    pooling("norm", "L2_NORM", Window((2, 2, 2), (2, 1, 2), (1, 1, 1), "VALID"), 4, 3, 2,
            twin=lambda x: F.lp_pool3d(x, 2.0, 2, (2, 1, 2))),
    globally("MAX", 5),
    globally("AVERAGE", 3, 4),
    globally("L2_NORM", 3, 2, keeps=True),
    globally("AVERAGE", 2, 3, 2, keeps=True),
]  # fmt: skip
CASES = [replace(case, deep=case.name not in ORDINARY) for case in WINDOWS]
