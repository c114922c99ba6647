"""Layers that choose elements: selection by a condition, gather and scatter by indices."""

from __future__ import annotations

import torch

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.shape import MovingLayer, require_dimension, require_same_type, whole_number
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import DataType, ReductionType


class SelectionLayer(MovingLayer):
    """`z = x where condition else y`; the sources are `[condition, x, y]`.

    The condition is boolean. `x` and `y` have the same data type and shapes that broadcast. A condition with fewer
    dimensions selects whole rows: it applies to their first dimensions (in NumPy and PyTorch: to their last).

    Example:
        >>> condition = TensorDescriptor((8,), DataType.BOOLEAN)
        >>> SelectionLayer().infer(condition, TensorDescriptor((8, 3)), TensorDescriptor((8, 3)))[0].shape
        (8, 3)
    """

    default_label = "Selection"
    source_counts = (3, 3)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks for a boolean condition over the first dimensions of two matching sources."""
        condition, x, y = sources
        if condition.data_type is not DataType.BOOLEAN:
            kind = condition.data_type.debug_description
            raise DataTypeError(
                self.where, f"the condition is {kind}, not boolean", fix="compare first (ComparisonLayer)"
            )
        require_same_type(self, x, y)
        try:
            shape = torch.broadcast_shapes(x.shape, y.shape)
        except RuntimeError:
            problem = f"the shapes {list(x.shape)} and {list(y.shape)} do not broadcast"
            raise ShapeError(self.where, problem, fix="pass x and y the same shape") from None
        rows = shape[: condition.dimension_count]
        if len(rows) < condition.dimension_count or any(
            m not in (1, n) for m, n in zip(condition.shape, rows, strict=True)
        ):
            raise ShapeError(
                self.where,
                f"a condition {list(condition.shape)} cannot select from {list(shape)}",
                fix=f"use the first dimensions of {list(shape)}",
            )

    def forward(self, condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """`x` where the condition holds, else `y`."""
        return select(condition, x, y)


def select(condition: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x` where `condition`, else `y`; missing dimensions of the condition are added at its end."""
    missing = max(x.ndim, y.ndim) - condition.ndim
    return torch.where(condition.reshape(*condition.shape, *[1] * missing), x, y)


class GatherLayer(MovingLayer):
    """Elements of a source, picked by indices along `dimension`; the sources are `[source, indices]`.

    Indices with one dimension pick whole slices (`torch.index_select`). Indices with as many dimensions as the source
    pick element by element (`torch.gather`): `z[i][j] = x[indices[i][j]][j]` for dimension 0. They are int32 or int64;
    an index outside the source is an error.

    Example:
        >>> GatherLayer(1).infer(TensorDescriptor((8, 5)), TensorDescriptor((2,), DataType.INT32))[0].shape
        (8, 2)
    """

    dimension: int

    default_label = "Gather"
    source_counts = (2, 2)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dimension", whole_number(self, "dimension", self.dimension))

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks for integer indices, one-dimensional or shaped like the source."""
        source, indices = sources
        require_dimension(self, self.dimension, source)
        require_indices(self, indices, source)
        if indices.dimension_count > 1:
            _require_within(self, indices, source, self.dimension)

    def index_limits(self, *sources: TensorDescriptor) -> dict[int, int]:
        """The extent to gather from."""
        return {1: sources[0].shape[self.dimension]}

    def forward(self, x: torch.Tensor, indices: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """The picked slices or elements."""
        return gather(x, indices, dimension=self.dimension)


def gather(x: torch.Tensor, indices: torch.Tensor, *, dimension: int) -> torch.Tensor:
    """Slices of `x` for indices of one dimension, else elements."""
    if indices.ndim == 1:
        return torch.index_select(x, dimension, indices)
    return torch.gather(x, dimension, indices.long())


class ScatterLayer(MovingLayer):
    """A copy of one source with updates written or added at indices; the sources are `[updates, indices, copy_from]`.

    `NONE` overwrites, `SUM` adds; of several updates for one position, `NONE` keeps any one. Indices with one dimension
    place whole slices of the updates, indices shaped like the updates place element by element (`torch.scatter`).

    Example:
        >>> layer = ScatterLayer(0, ReductionType.SUM)
        >>> indices = TensorDescriptor((2,), DataType.INT64)
        >>> layer.infer(TensorDescriptor((2, 3)), indices, TensorDescriptor((8, 3)))[0].shape
        (8, 3)
    """

    dimension: int
    reduction_type: ReductionType = ReductionType.NONE

    default_label = "Scatter"
    source_counts = (3, 3)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dimension", whole_number(self, "dimension", self.dimension))
        if self.reduction_type not in (ReductionType.NONE, ReductionType.SUM):
            raise ArgumentError(
                self.where, f"reduction_type is {self.reduction_type}", fix="use NONE (overwrite) or SUM (add)"
            )

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that updates fit into the copy, and indices match the updates."""
        updates, indices, copy_from = sources
        require_dimension(self, self.dimension, copy_from)
        require_same_type(self, updates, copy_from)
        require_indices(self, indices, updates)
        if updates.dimension_count != copy_from.dimension_count:
            counts = f"{updates.dimension_count} dimensions, but the copied source {copy_from.dimension_count}"
            raise ShapeError(self.where, f"the updates have {counts}", updates=updates, copy_from=copy_from)
        wanted = list(updates.shape) if indices.dimension_count > 1 else [updates.shape[self.dimension]]
        if list(indices.shape) != wanted:
            raise ShapeError(
                self.where,
                f"indices {list(indices.shape)} do not fit updates {list(updates.shape)}",
                fix=f"pass indices of shape {wanted}",
            )
        _require_within(self, updates, copy_from, self.dimension, exactly=indices.dimension_count == 1)

    def index_limits(self, *sources: TensorDescriptor) -> dict[int, int]:
        """The extent to write to."""
        return {1: sources[2].shape[self.dimension]}

    def forward(
        self, updates: torch.Tensor, indices: torch.Tensor, copy_from: torch.Tensor, *, scope: Scope
    ) -> torch.Tensor:
        """`copy_from` with the updates applied."""
        adds = self.reduction_type is ReductionType.SUM
        return scatter(updates, indices, copy_from, dimension=self.dimension, adds=adds)


def scatter(
    updates: torch.Tensor, indices: torch.Tensor, copy_from: torch.Tensor, *, dimension: int, adds: bool
) -> torch.Tensor:
    """A copy of `copy_from` with `updates` written or added at `indices`."""
    indices = indices.long()
    if indices.ndim == 1:
        return (torch.index_add if adds else torch.index_copy)(copy_from, dimension, indices, updates)
    return (torch.scatter_add if adds else torch.scatter)(copy_from, dimension, indices, updates)


def require_indices(layer: Layer, indices: TensorDescriptor, source: TensorDescriptor) -> None:
    """Rejects indices that are not integers, or that have neither one dimension nor the source's."""
    if indices.data_type not in (DataType.INT32, DataType.INT64):
        kind = indices.data_type.debug_description
        raise DataTypeError(layer.where, f"the indices are {kind}", indices=indices, fix="pass int32 or int64")
    if indices.dimension_count not in (1, source.dimension_count):
        raise ShapeError(
            layer.where,
            f"the indices have {indices.dimension_count} dimensions, but the source has {source.dimension_count}",
            indices=indices,
            source=source,
            fix=f"pass indices with 1 or {source.dimension_count} dimensions",
        )


def _require_within(
    layer: Layer, inner: TensorDescriptor, outer: TensorDescriptor, dimension: int, exactly: bool = False
) -> None:
    for axis, (small, large) in enumerate(zip(inner.shape, outer.shape, strict=True)):
        if axis != dimension and (small > large or (exactly and small != large)):
            raise ShapeError(
                layer.where,
                f"extent {small} of dimension {axis} does not fit {large}: {list(inner.shape)} and {list(outer.shape)}",
                fix=f"only dimension {dimension} may be {'different' if exactly else 'longer'}",
            )
