"""Embedding: looks up rows of a dictionary by index."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError
from stepgraph.layers.layer import Layer, ParameterOf, Scope
from stepgraph.random import initialize
from stepgraph.tensors.tensor import MAX_DIMENSIONS, Tensor, TensorDescriptor
from stepgraph.types import DataType, RandomInitializerType

_INDEX_TYPES = (DataType.INT32, DataType.INT64)


@dataclass(frozen=True)
class EmbeddingDescriptor:
    """The settings of an embedding.

    Args:
        embedding_count: rows in the dictionary.
        embedding_dimension: numbers in a row.
        padding_index: a row that reads as zero and never receives a gradient.
        maximum_norm: rows whose norm exceeds it are scaled down to it, in the dictionary, when they are looked up.
        p_norm: the norm: `(Σ |x|ᵖ)^(1/p)`, infinity for the largest magnitude; None means 2.
        scales_gradient_by_frequency: divide the gradient of a row by how often its index occurs in the source.

    Example:
        >>> EmbeddingDescriptor(1000, 64, padding_index=0).p_norm
        2.0
    """

    embedding_count: int
    embedding_dimension: int
    padding_index: int | None = None
    maximum_norm: float | None = None
    p_norm: float = 2.0
    scales_gradient_by_frequency: bool = False

    def __post_init__(self) -> None:
        where = "EmbeddingDescriptor"
        for name in ("embedding_count", "embedding_dimension"):
            if not _is_whole(getattr(self, name)) or getattr(self, name) < 1:
                raise ArgumentError(where, f"{name} is {getattr(self, name)!r}", fix="pass an integer ≥ 1")
        padding, rows = self.padding_index, self.embedding_count
        if padding is not None and not (_is_whole(padding) and 0 <= padding < rows):
            problem = f"padding_index is {padding!r}, but the dictionary has {rows} rows"
            raise ArgumentError(where, problem, fix=f"pass an integer from 0 to {rows - 1}, or None")
        object.__setattr__(self, "p_norm", 2.0 if self.p_norm is None else float(self.p_norm))
        if not self.p_norm > 0:
            raise ArgumentError(where, f"p_norm is {self.p_norm}", fix="use a number > 0, or infinity")
        if self.maximum_norm is not None and not 0 < self.maximum_norm < math.inf:
            raise ArgumentError(where, f"maximum_norm is {self.maximum_norm}", fix="pass a number > 0, or None")


class EmbeddingLayer(Layer):
    """`y[..., :] = W[index]`: each index becomes a row of the dictionary `W`.

    The row `padding_index` reads as zero, whatever the dictionary holds there, and gets no gradient. With
    `maximum_norm = m`, a row that is looked up in training becomes

        W[index] = W[index] * min(m / |W[index]|, 1)

    in the dictionary, before it is read; the gradient is that of the changed row. Inference returns the same numbers
    and does not change the dictionary. The gradient of a row is the sum over its occurrences, divided by their number
    with `scales_gradient_by_frequency`.

    Shapes: `[...] → [..., dimension]`, indices int32 or int64, rank 1 to 4. Weights hold `count * dimension` numbers,
    row by row, in any shape (`[count, dimension]`, Apple's `[1, count, 1, dimension]`). An index outside the
    dictionary is an error when the graph runs.

    Unlike `torch.nn.Embedding`, your own weights need no zeros at `padding_index`, and inference changes no row.

    Example:
        >>> EmbeddingLayer.create(1000, 64).infer(TensorDescriptor((8, 20), DataType.INT64))[0].shape
        (8, 20, 64)
    """

    descriptor: EmbeddingDescriptor
    weights: Tensor

    default_label = "Embedding"
    weights_parameter = ParameterOf("weights")
    # Rows are cast, not the whole dictionary, and what `maximum_norm` writes back keeps full precision.
    own_precision = True

    def __post_init__(self) -> None:
        rows, width = self.descriptor.embedding_count, self.descriptor.embedding_dimension
        if self.weights.descriptor.element_count != rows * width:
            raise ShapeError(
                self.where,
                f"the weights hold {self.weights.descriptor.element_count} numbers, "
                f"but {rows} rows of {width} need {rows * width}",
                fix=f"pass weights of shape [{rows}, {width}], or use EmbeddingLayer.create({rows}, {width})",
                weights=self.weights.descriptor,
            )

    @classmethod
    def create(
        cls,
        embedding_count: int,
        embedding_dimension: int,
        *,
        padding_index: int | None = None,
        maximum_norm: float | None = None,
        p_norm: float = 2.0,
        scales_gradient_by_frequency: bool = False,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
    ) -> EmbeddingLayer:
        """A layer with a new dictionary `[count, dimension]`, zero at `padding_index`."""
        shape = embedding_count, embedding_dimension
        descriptor = EmbeddingDescriptor(*shape, padding_index, maximum_norm, p_norm, scales_gradient_by_frequency)
        values = initialize(initializer, shape, *shape)
        if padding_index is not None:
            values[padding_index] = 0
        return cls(descriptor, Tensor(shape, data=values), label=label)

    @classmethod
    def supports_data_type(cls, data_type: DataType, device: Any = None) -> bool:
        """The index types."""
        return data_type in _INDEX_TYPES

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source holds indices, with room for one more axis."""
        source = sources[0]
        if source.data_type not in _INDEX_TYPES:
            kind = source.data_type.debug_description
            raise DataTypeError(self.where, f"the indices are {kind}", indices=source, fix="pass int32 or int64")
        if source.dimension_count >= MAX_DIMENSIONS:
            raise ShapeError(
                self.where,
                f"the indices have {source.dimension_count} dimensions, but the result would have one more",
                indices=source,
                fix=f"pass indices with at most {MAX_DIMENSIONS - 1} dimensions",
            )

    def index_limits(self, *sources: TensorDescriptor) -> dict[int, int]:
        """The number of rows in the dictionary."""
        return {0: self.descriptor.embedding_count}

    def forward(self, indices: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """The rows at the indices; updates the dictionary if `maximum_norm` may have changed it."""
        settings = self.descriptor
        weights = scope.array(self.weights, settings.embedding_count, settings.embedding_dimension)
        rows = embed(
            indices, weights, padding=settings.padding_index, by_frequency=settings.scales_gradient_by_frequency
        )
        read = rows.detach()
        if settings.maximum_norm is not None:
            read = clip_rows(read, maximum=settings.maximum_norm, p=settings.p_norm)
            if scope.training:  # an index that occurs twice writes the same numbers twice
                places = indices.flatten().long()
                scope.update(self.weights, weights.detach().index_copy(0, places, read.flatten(0, -2)))
        if settings.padding_index is not None:
            read = read.masked_fill((indices == settings.padding_index)[..., None], 0)
        changed = settings.maximum_norm is not None or settings.padding_index is not None
        return _Replaced.apply(rows, read) if changed else rows


def embed(indices: torch.Tensor, weights: torch.Tensor, *, padding: int | None, by_frequency: bool) -> torch.Tensor:
    """`W[indices]`, with a gradient for every row but `padding`, optionally divided by its frequency."""
    return F.embedding(indices, weights, padding, scale_grad_by_freq=by_frequency)


def clip_rows(rows: torch.Tensor, *, maximum: float, p: float) -> torch.Tensor:
    """`row * min(maximum / |row|, 1)` with the p-norm of each row."""
    norms = torch.linalg.vector_norm(rows, p, dim=-1, keepdim=True)
    return rows * (maximum / norms).clamp_max(1)


class _Replaced(torch.autograd.Function):
    """The second array, with the gradient of the first."""

    @staticmethod
    def forward(_: Any, rows: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
        return read.view_as(read)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
