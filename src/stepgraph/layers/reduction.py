"""Reductions: all elements along some dimensions become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph.errors import ArgumentError, DataTypeError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.shape import require_dimension, whole_number
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import DataType, ReductionType

Dimensions = int | Sequence[int]


class ReductionLayer(Layer):
    """One number for all elements along `dimensions`, which remain with size 1.

    | type | result | sources |
    |---|---|---|
    | `SUM` | `Σ x`; integers and booleans are summed as int64 | all |
    | `MEAN` | `Σ x / count` | floating |
    | `MAX`, `MIN` | the largest, the smallest | numbers |
    | `ARG_MAX`, `ARG_MIN` | its index along the one dimension, int32; the first of equal ones | numbers |
    | `L1_NORM` | `Σ abs(x)` | floating |
    | `ANY`, `ALL` | boolean: whether any, whether every element is not 0 | all |

    The gradient of `MAX` and `MIN` goes to the first of equal elements, the one that `ARG_MAX` and `ARG_MIN` return
    (`torch.amax` distributes it among them). Indices and booleans have none.

    Args:
        reduction_type: every kind but `NONE`.
        dimensions: one or more dimensions, counted from 0.

    Example:
        >>> ReductionLayer.mean((2, 3)).infer(TensorDescriptor((8, 3, 28, 28)))[0].shape
        (8, 3, 1, 1)
    """

    reduction_type: ReductionType
    dimensions: Dimensions

    default_label = "Reduction"

    def __post_init__(self) -> None:
        kind, given = self.reduction_type, self.dimensions
        if not isinstance(kind, ReductionType) or kind not in REDUCTIONS:
            known = ", ".join(str(one) for one in REDUCTIONS)
            raise ArgumentError(self.where, f"reduction_type is {kind!s}", fix=f"use one of {known}")
        several = given if isinstance(given, Sequence) else (given,)
        dimensions = tuple(whole_number(self, "a dimension", one) for one in several)
        object.__setattr__(self, "dimensions", dimensions)
        if not dimensions or len(set(dimensions)) < len(dimensions):
            raise ArgumentError(self.where, f"dimensions are {dimensions}", fix="name one or more, each once")
        if kind in _INDICES and len(dimensions) > 1:
            raise ArgumentError(
                self.where,
                f"{kind.debug_description} takes one dimension, but dimensions are {dimensions}",
                fix="pass one dimension, or reshape the source to merge them",
            )

    @classmethod
    def sum(cls, dimensions: Dimensions, *, label: str = "") -> ReductionLayer:
        """The sum."""
        return cls(ReductionType.SUM, dimensions, label=label)

    @classmethod
    def mean(cls, dimensions: Dimensions, *, label: str = "") -> ReductionLayer:
        """The sum divided by the number of elements."""
        return cls(ReductionType.MEAN, dimensions, label=label)

    @classmethod
    def max(cls, dimensions: Dimensions, *, label: str = "") -> ReductionLayer:
        """The largest element."""
        return cls(ReductionType.MAX, dimensions, label=label)

    @classmethod
    def min(cls, dimensions: Dimensions, *, label: str = "") -> ReductionLayer:
        """The smallest element."""
        return cls(ReductionType.MIN, dimensions, label=label)

    @classmethod
    def arg_max(cls, dimension: int, *, label: str = "") -> ReductionLayer:
        """The index of the largest element."""
        return cls(ReductionType.ARG_MAX, dimension, label=label)

    @classmethod
    def arg_min(cls, dimension: int, *, label: str = "") -> ReductionLayer:
        """The index of the smallest element."""
        return cls(ReductionType.ARG_MIN, dimension, label=label)

    @classmethod
    def l1_norm(cls, dimensions: Dimensions, *, label: str = "") -> ReductionLayer:
        """The sum of absolute values."""
        return cls(ReductionType.L1_NORM, dimensions, label=label)

    @classmethod
    def any(cls, dimensions: Dimensions, *, label: str = "") -> ReductionLayer:
        """Whether any element is not 0."""
        return cls(ReductionType.ANY, dimensions, label=label)

    @classmethod
    def all(cls, dimensions: Dimensions, *, label: str = "") -> ReductionLayer:
        """Whether no element is 0."""
        return cls(ReductionType.ALL, dimensions, label=label)

    @property
    def dimension(self) -> int:
        """The first of the dimensions."""
        return self._axes[0]

    @classmethod
    def supports_data_type(cls, data_type: DataType, device: Any = None) -> bool:
        """Every type is supported by some reduction."""
        return True

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source has the dimensions and a type that the reduction supports."""
        (source,), kind = sources, self.reduction_type
        for dimension in self._axes:
            require_dimension(self, dimension, source)
        if kind in _FLOATING:
            self.require_floating(source)
        if kind in _NUMBERS and source.data_type is DataType.BOOLEAN:
            problem = f"{kind.debug_description} takes numbers, but the source is boolean"
            raise DataTypeError(self.where, problem, source=source, fix="use ANY, ALL or SUM")

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """The reduction of this type."""
        return REDUCTIONS[self.reduction_type](x, self._axes)

    @property
    def _axes(self) -> tuple[int, ...]:
        return tuple(self.dimensions)  # type: ignore[arg-type]


Axes = tuple[int, ...]


def reduce_max(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The largest along `axes`; the first of equal elements receives the gradient."""
    return torch.amax(x, axes, keepdim=True) if not x.requires_grad else _one_by_one(torch.max, x, axes)


def reduce_min(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The smallest along `axes`; the first of equal elements receives the gradient."""
    return torch.amin(x, axes, keepdim=True) if not x.requires_grad else _one_by_one(torch.min, x, axes)


def _one_by_one(select: Callable[..., Any], x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Selects axis by axis, from the last one, so that the first of equal elements is kept, also by autograd."""
    for axis in sorted(axes, reverse=True):
        x = select(x, axis, keepdim=True).values
    return x


REDUCTIONS: dict[ReductionType, Callable[[torch.Tensor, Axes], torch.Tensor]] = {
    ReductionType.SUM: lambda x, axes: torch.sum(x, axes, keepdim=True),
    ReductionType.MEAN: lambda x, axes: torch.mean(x, axes, keepdim=True),
    ReductionType.MAX: reduce_max,
    ReductionType.MIN: reduce_min,
    ReductionType.ARG_MAX: lambda x, axes: torch.argmax(x, axes[0], keepdim=True).int(),
    ReductionType.ARG_MIN: lambda x, axes: torch.argmin(x, axes[0], keepdim=True).int(),
    ReductionType.L1_NORM: lambda x, axes: torch.sum(torch.abs(x), axes, keepdim=True),
    ReductionType.ANY: lambda x, axes: torch.any(x, axes, keepdim=True).bool(),  # PyTorch returns uint8 for uint8
    ReductionType.ALL: lambda x, axes: torch.all(x, axes, keepdim=True).bool(),
}

_INDICES = {ReductionType.ARG_MAX, ReductionType.ARG_MIN}
_NUMBERS = {ReductionType.MAX, ReductionType.MIN} | _INDICES
_FLOATING = {ReductionType.MEAN, ReductionType.L1_NORM}
