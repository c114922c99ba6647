"""Global pooling: one number for every channel, over all of its pixels."""

from __future__ import annotations

import torch

from stepgraph.errors import ShapeError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.pooling import PoolingType
from stepgraph.tensors.tensor import TensorDescriptor


class GlobalPoolingLayer(Layer):
    """`y[c] = pool over p of x[c, p]`: the maximum, mean or norm of each channel, over all pixels or steps.

    Shapes: `[batch, channels, ...] → [batch, channels]`, rank 3 to 5, or `[batch, channels, 1, ...]` with
    `keeps_dimensions`. The gradient of a maximum goes to the first of equal pixels.

    Same as `torch.nn.AdaptiveAvgPool2d(1)` and `AdaptiveMaxPool2d(1)`, which keep the dimensions.

    Args:
        pooling_type: maximum, average or norm.
        keeps_dimensions: keep an extent of 1 for every pooled axis.

    Example:
        >>> GlobalPoolingLayer.average().infer(TensorDescriptor((8, 32, 7, 7)))[0].shape
        (8, 32)
    """

    pooling_type: PoolingType
    keeps_dimensions: bool = False

    default_label = "GlobalPooling"

    def __post_init__(self) -> None:
        chosen = PoolingType.of_raw(type(self).__name__, "pooling_type", self.pooling_type)
        object.__setattr__(self, "pooling_type", chosen)

    @classmethod
    def max(cls, *, keeps_dimensions: bool = False, label: str = "") -> GlobalPoolingLayer:
        """The largest pixel of each channel."""
        return cls(PoolingType.MAX, keeps_dimensions, label=label)

    @classmethod
    def average(cls, *, keeps_dimensions: bool = False, label: str = "") -> GlobalPoolingLayer:
        """The mean of each channel."""
        return cls(PoolingType.AVERAGE, keeps_dimensions, label=label)

    @classmethod
    def l2_norm(cls, *, keeps_dimensions: bool = False, label: str = "") -> GlobalPoolingLayer:
        """The Euclidean norm of each channel."""
        return cls(PoolingType.L2_NORM, keeps_dimensions, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source has pixels or steps after its channels."""
        super().check(*sources)
        if sources[0].dimension_count < 3:
            problem = f"the source {list(sources[0].shape)} has no axis after [batch, channels]"
            raise ShapeError(self.where, problem, source=sources[0], fix="pass [batch, channels, steps] or images")

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """The pooling of the layer's type."""
        y = pool_globally(x, kind=self.pooling_type)
        return y.reshape(*y.shape, *[1] * (x.ndim - 2)) if self.keeps_dimensions else y


def pool_globally(x: torch.Tensor, *, kind: PoolingType) -> torch.Tensor:
    """`[batch, channels]`: the maximum, the mean or the norm over all other axes."""
    pixels = x.flatten(2)
    if kind is PoolingType.MAX:
        return pixels.max(2).values
    return pixels.mean(2) if kind is PoolingType.AVERAGE else torch.linalg.vector_norm(pixels, dim=2)
