"""Layers that rearrange elements: reshape, transpose, concatenate, split, slice. They take every data type."""

from __future__ import annotations

import math
from typing import Any

import torch

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.tensors.extents import BatchExtent
from stepgraph.tensors.tensor import MAX_DIMENSIONS, TensorDescriptor
from stepgraph.types import DataType


def whole_number(layer: Layer, name: str, value: Any, least: int = 0) -> int:
    """`value` as an int; rejects other types and values below `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < least:
        raise ArgumentError(layer.where, f"{name} is {value!r}", fix=f"pass an integer ≥ {least}")
    return value if isinstance(value, BatchExtent) else int(value)


def require_dimension(layer: Layer, dimension: int, source: TensorDescriptor) -> None:
    """Rejects a source without this dimension."""
    if dimension >= source.dimension_count:
        raise ShapeError(
            layer.where,
            f"dimension {dimension} is out of range for a source with {source.dimension_count} dimensions",
            source=source,
            fix=f"use a dimension below {source.dimension_count}",
        )


def require_same_type(layer: Layer, first: TensorDescriptor, second: TensorDescriptor) -> None:
    """Rejects two sources of different types."""
    if first.data_type is not second.data_type:
        kinds = f"{first.data_type.debug_description} and {second.data_type.debug_description}"
        raise DataTypeError(
            layer.where, f"the sources mix {kinds}", first=first, second=second, fix="use the same data type for both"
        )


def require_broadcast(layer: Layer, *shapes: tuple[int, ...], name: str = "shapes") -> None:
    """Rejects shapes that NumPy would not broadcast."""
    try:
        torch.broadcast_shapes(*shapes)
    except RuntimeError:
        listed = " and ".join(str(list(shape)) for shape in shapes)
        fix = "make their dimensions equal or 1, counted from the last one"
        raise ShapeError(layer.where, f"the {name} {listed} do not broadcast", fix=fix) from None


class MovingLayer(Layer):
    """Base of the layers that only move elements: no arithmetic, so every data type is supported."""

    moves = True

    def check(self, *sources: TensorDescriptor) -> None:
        """Accepts every type."""

    @classmethod
    def supports_data_type(cls, data_type: DataType, device: Any = None) -> bool:
        """Every type."""
        return True


class ReshapeLayer(MovingLayer):
    """The same elements, in the same order, in another shape; one dimension may be -1 and is then inferred.

    The first dimension follows the batch: if it is the declared batch size and a call uses another one, the result
    has that many rows. A shape with another number of elements than the source is rejected.

    Example:
        >>> ReshapeLayer((64, -1)).infer(TensorDescriptor((64, 3, 4, 4)))[0].shape
        (64, 48)
    """

    shape: tuple[int, ...]

    default_label = "Reshape"

    def __post_init__(self) -> None:
        shape = tuple(whole_number(self, "an extent of the shape", extent, -1) for extent in self.shape)
        object.__setattr__(self, "shape", shape)
        if not 1 <= len(shape) <= MAX_DIMENSIONS:
            raise ArgumentError(self.where, f"the shape has {len(shape)} dimensions", fix=f"use 1 to {MAX_DIMENSIONS}")
        if 0 in shape or shape.count(-1) > 1:
            raise ArgumentError(self.where, f"the shape is {shape}", fix="use positive integers and at most one -1")

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """The elements of `x` in the shape of this call."""
        # A source that keeps its declared size in a call with another batch size is not a batch: it keeps its shape.
        # A size that is symbolic, while PyTorch exports, follows the batch.
        keeps = isinstance(x.shape[0], int) and x.shape[0] == self.shape[0]
        first = self.shape[0] if keeps else scope.batched(self.shape[0])
        shape = (first, *(scope.batched(e) if isinstance(e, BatchExtent) else e for e in self.shape[1:]))
        known = math.prod(extent for extent in shape if extent != -1)
        fits = x.numel() % known == 0 if -1 in shape else x.numel() == known
        if not fits:
            raise ShapeError(
                self.where,
                f"{x.numel()} elements cannot take the shape {list(shape)}",
                source=list(x.shape),
                fix=f"use a shape with {x.numel()} elements, or -1 for one dimension",
            )
        return x.reshape(shape)


class TransposeLayer(MovingLayer):
    """Reorders dimensions: dimension `k` of the result is dimension `dimensions[k]` of the source.

    Same as `numpy.transpose` and `torch.permute`.

    Example:
        >>> TransposeLayer((0, 2, 1)).infer(TensorDescriptor((8, 3, 5)))[0].shape
        (8, 5, 3)
    """

    dimensions: tuple[int, ...]

    default_label = "Transpose"

    def __post_init__(self) -> None:
        dimensions = tuple(whole_number(self, "a dimension", one) for one in self.dimensions)
        object.__setattr__(self, "dimensions", dimensions)
        if not dimensions or sorted(dimensions) != list(range(len(dimensions))):
            raise ArgumentError(
                self.where,
                f"dimensions are {dimensions}",
                fix="list each dimension from 0 exactly once, such as (0, 2, 1)",
            )

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source has as many dimensions as are listed."""
        if sources[0].dimension_count != len(self.dimensions):
            raise ShapeError(
                self.where,
                f"{len(self.dimensions)} dimensions are listed, but the source has {sources[0].dimension_count}",
                dimensions=self.dimensions,
                source=sources[0],
                fix=f"list the dimensions 0 to {sources[0].dimension_count - 1}",
            )

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """`x` with its dimensions in that order."""
        return x.permute(self.dimensions)


class ConcatenationLayer(MovingLayer):
    """Concatenates the sources along `dimension`; all other dimensions and the data types must be the same.

    Example:
        >>> ConcatenationLayer().infer(TensorDescriptor((8, 3)), TensorDescriptor((8, 5)))[0].shape
        (8, 8)
    """

    dimension: int = 1

    default_label = "Concat"
    source_counts = (1, None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dimension", whole_number(self, "dimension", self.dimension))

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that all sources agree except in the dimension."""
        first = sources[0]
        require_dimension(self, self.dimension, first)
        for i, other in enumerate(sources[1:], start=1):
            require_same_type(self, first, other)
            if _without(first.shape, self.dimension) != _without(other.shape, self.dimension):
                raise ShapeError(
                    self.where,
                    f"sources 0 and {i} differ in more than dimension {self.dimension}:"
                    f" {list(first.shape)} and {list(other.shape)}",
                    fix=f"make all dimensions except {self.dimension} equal",
                )

    def forward(self, *sources: torch.Tensor, scope: Scope) -> torch.Tensor:
        """The concatenated sources."""
        return torch.cat(sources, self.dimension)


class SplitLayer(MovingLayer):
    """Splits the source along `dimension`, into `split_count` parts or into parts of `split_section_lengths`.

    With a count, each part is `ceil(extent / count)` long, the last may be shorter, and there are fewer parts if the
    extent runs out, as in `torch.chunk`. Lengths must add up to the extent.

    Example:
        >>> [part.shape for part in SplitLayer(2).infer(TensorDescriptor((8, 3)))]
        [(8, 2), (8, 1)]
    """

    split_count: int | None = None
    split_section_lengths: tuple[int, ...] | None = None
    dimension: int = 1

    default_label = "Split"

    def __post_init__(self) -> None:
        count, lengths = self.split_count, self.split_section_lengths
        if isinstance(lengths, int):
            problem = f"split_section_lengths is {lengths}, not a sequence"
            raise ArgumentError(self.where, problem, fix="pass the length of each part, such as (2, 3)")
        agree = lengths is not None and count == len(lengths)  # as both are after construction
        if (count is None) == (lengths is None) and not agree:
            raise ArgumentError(
                self.where,
                f"split_count is {count} and split_section_lengths are {lengths}",
                fix="pass exactly one of them",
            )
        if lengths is not None:
            lengths = tuple(whole_number(self, "a section length", length, 1) for length in lengths)
            object.__setattr__(self, "split_section_lengths", lengths)
            count = len(lengths)
        object.__setattr__(self, "split_count", whole_number(self, "split_count", count, 1))
        object.__setattr__(self, "dimension", whole_number(self, "dimension", self.dimension))

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the lengths add up to the extent that is split."""
        require_dimension(self, self.dimension, sources[0])
        lengths, extent = self.split_section_lengths, sources[0].shape[self.dimension]
        if lengths is not None and sum(lengths) != extent:
            raise ShapeError(
                self.where,
                f"the sections {list(lengths)} add up to {sum(lengths)}, but dimension {self.dimension} has {extent}",
                source=sources[0],
                fix=f"pass lengths that add up to {extent}",
            )

    def forward(self, x: torch.Tensor, *, scope: Scope) -> tuple[torch.Tensor, ...]:
        """The parts, in order."""
        if self.split_section_lengths is not None:
            return torch.split(x, list(self.split_section_lengths), self.dimension)
        return torch.chunk(x, self.split_count or 1, self.dimension)


class SliceLayer(MovingLayer):
    """Elements from `start` up to, not including, `end`, every `stride`-th, along each dimension of the source.

    If the end of the first dimension is the declared batch size, it means the end of the batch: in a call with another
    batch size, the slice follows. A slice that reaches past the source, or is empty, is rejected (NumPy and PyTorch
    truncate it silently).

    Args:
        start: first index for each dimension of the source.
        end: index after the last.
        stride: step from one element to the next; default 1.

    Example:
        >>> SliceLayer((0, 1), (8, 6), (1, 2)).infer(TensorDescriptor((8, 6)))[0].shape
        (8, 3)
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    stride: tuple[int, ...] | None = None

    default_label = "Slice"

    def __post_init__(self) -> None:
        start = tuple(whole_number(self, "a start", one) for one in self.start)
        end = tuple(whole_number(self, "an end", one, 1) for one in self.end)
        given = (1,) * len(start) if self.stride is None else self.stride
        stride = tuple(whole_number(self, "a stride", one, 1) for one in given)
        for name, value in (("start", start), ("end", end), ("stride", stride)):
            object.__setattr__(self, name, value)
        if not len(start) == len(end) == len(stride) or not start:
            counts = f"start has {len(start)} entries, end {len(end)}, stride {len(stride)}"
            raise ArgumentError(self.where, counts, fix="pass one of each per dimension of the source")
        for axis, (first, last) in enumerate(zip(start, end, strict=True)):
            if first >= last:
                problem = f"dimension {axis} starts at {first} and ends before {last}"
                raise ArgumentError(self.where, problem, fix="end it after its start")

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source has as many dimensions as the slice."""
        if sources[0].dimension_count != len(self.start):
            raise ShapeError(
                self.where,
                f"the slice has {len(self.start)} dimensions, but the source has {sources[0].dimension_count}",
                source=sources[0],
                fix="pass a start, an end and a stride per dimension",
            )

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """The elements of the slice, without a copy."""
        is_batch = x.shape[0] == scope.batch[1] or isinstance(self.end[0], BatchExtent)
        end = (scope.batched(self.end[0]) if is_batch else self.end[0], *self.end[1:])
        for axis, (first, last, extent) in enumerate(zip(self.start, end, x.shape, strict=True)):
            if not first < last <= extent:
                raise ShapeError(
                    self.where,
                    f"dimension {axis} is sliced from {first} to {last}, but the source has {extent}",
                    source=list(x.shape),
                    fix=f"start before the end, and end at {extent} or before",
                )
        return x[tuple(map(slice, self.start, end, self.stride or ()))]


def _without(shape: tuple[int, ...], dimension: int) -> tuple[int, ...]:
    return shape[:dimension] + shape[dimension + 1 :]
