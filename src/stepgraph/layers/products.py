"""Products of sources: matrix products and Gram matrices. They have no parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.shape import require_broadcast, require_same_type
from stepgraph.layers.window import require_images
from stepgraph.tensors.tensor import TensorDescriptor


@dataclass(frozen=True)
class MatMulDescriptor:
    """The settings of a matrix product.

    Args:
        alpha: a factor for the product.
        transposes_x: whether to transpose the last two dimensions of the first source.
        transposes_y: the same for the second source.

    Example:
        >>> MatMulDescriptor(alpha=0.5, transposes_y=True)
        MatMulDescriptor(alpha=0.5, transposes_x=False, transposes_y=True)
    """

    alpha: float = 1.0
    transposes_x: bool = False
    transposes_y: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", _finite("MatMulDescriptor", "alpha", self.alpha))
        for name in ("transposes_x", "transposes_y"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError("MatMulDescriptor", f"{name} is {getattr(self, name)!r}", fix="pass True or False")


class MatMulLayer(Layer):
    """`z = alpha x y`, the matrix product over the last two dimensions; each source may be transposed first.

    Shapes: `[..., rows, inner], [..., inner, columns] → [..., rows, columns]`, with two to five dimensions. The leading
    dimensions broadcast: matched from the last, missing ones and those of size 1 repeat. The gradient of a
    source that repeats is summed.

    Same as `torch.matmul`, which also supports vectors.

    Example:
        >>> layer = MatMulLayer(MatMulDescriptor(transposes_y=True))
        >>> layer.infer(TensorDescriptor((8, 4, 16)), TensorDescriptor((8, 5, 16)))[0].shape
        (8, 4, 5)
    """

    descriptor: MatMulDescriptor = field(default_factory=MatMulDescriptor)

    default_label = "MatMul"
    source_counts = (2, 2)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that inner dimensions agree and leading dimensions broadcast."""
        super().check(*sources)
        x, y = sources
        require_same_type(self, x, y)
        for source in sources:
            if source.dimension_count < 2:
                problem = f"a source has {source.dimension_count} dimension, but a matrix has 2"
                raise ShapeError(self.where, problem, source=source, fix="reshape it to [1, n] or [n, 1]")
        inner = x.shape[-2 if self.descriptor.transposes_x else -1], y.shape[-1 if self.descriptor.transposes_y else -2]
        if inner[0] != inner[1]:
            raise ShapeError(
                self.where,
                f"the rows of x have {inner[0]} numbers, but the columns of y have {inner[1]}",
                x=_written(x, self.descriptor.transposes_x),
                y=_written(y, self.descriptor.transposes_y),
                fix="make them equal, or change transposes_x or transposes_y",
            )
        require_broadcast(self, x.shape[:-2], y.shape[:-2], name="leading extents")

    def forward(self, x: torch.Tensor, y: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """`alpha op(x) op(y)`."""
        x = x.mT if self.descriptor.transposes_x else x
        y = y.mT if self.descriptor.transposes_y else y
        return matmul(x, y, alpha=self.descriptor.alpha)


class GramMatrixLayer(Layer):
    """`z[b, c, 0, f] = scale Σ x[b, f, h, w] x[b, c, h, w]`: the correlation of each pair of channels of an image.

    Shapes: `[batch, channels, height, width] → [batch, channels, 1, channels]`. No mean is subtracted, and nothing is
    divided by a count; use `scale` for that.

    Example:
        >>> GramMatrixLayer(1 / (28 * 28)).infer(TensorDescriptor((8, 3, 28, 28)))[0].shape
        (8, 3, 1, 3)
    """

    scale: float

    default_label = "GramMatrix"

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", _finite(self.where, "scale", self.scale))

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source is a batch of images."""
        super().check(*sources)
        require_images(self, sources[0])

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """`scale x xᵀ` over the pixels."""
        return gram_matrix(x, scale=self.scale)


def matmul(x: torch.Tensor, y: torch.Tensor, *, alpha: float) -> torch.Tensor:
    """`alpha x y`, where `alpha` multiplies the smallest of the three arrays."""
    y = _one_matrix(y, x)
    x = _one_matrix(x, y)
    if alpha == 1:
        return torch.matmul(x, y)
    leading = torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    smallest = min(x.numel(), y.numel(), math.prod(leading) * x.shape[-2] * y.shape[-1])
    if smallest == x.numel():
        return torch.matmul(x * alpha, y)
    return torch.matmul(x, y * alpha) if smallest == y.numel() else torch.matmul(x, y) * alpha


def gram_matrix(x: torch.Tensor, *, scale: float) -> torch.Tensor:
    """`scale x xᵀ`, with the pixels of each channel as a row."""
    rows = x.flatten(2)
    return matmul(rows, rows.mT, alpha=scale).unsqueeze(2)


def _one_matrix(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A matrix that is the same for the whole other source, without its dimensions of 1: one product and no copies."""
    is_shared = all(extent == 1 for extent in one.shape[:-2]) and one.ndim <= other.ndim
    return one.reshape(one.shape[-2:]) if is_shared else one


def _finite(where: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ArgumentError(where, f"{name} is {value!r}", fix="pass a finite number")
    return float(value)


def _written(source: TensorDescriptor, transposed: bool) -> str:
    return f"{source}{', transposed' * transposed}"
