"""Rows of the conformance table: embedding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.embedding import EmbeddingDescriptor, EmbeddingLayer
from stepgraph.tensors.tensor import Tensor
from tests.layers.case import Bad, Case, Source

ROWS, WIDTH = 7, 3


def embedding(shape: tuple[int, ...] = (ROWS, WIDTH), **settings: Any) -> EmbeddingLayer:
    """A layer whose dictionary has rows of rising norm, none of them zero."""
    values = np.random.default_rng(4).uniform(0.2, 0.6, (ROWS, WIDTH)) * np.linspace(0.5, 3, ROWS)[:, None]
    weights = Tensor(shape, data=values.astype(np.float32).reshape(shape))
    return EmbeddingLayer(EmbeddingDescriptor(ROWS, WIDTH, **settings), weights)


def indices(*shape: int, dtype: Any = np.int64) -> Source:
    """Indices of which some occur several times; the first ones are 0, 2, 2."""

    def draw(generator: np.random.Generator) -> np.ndarray:
        found = generator.integers(0, ROWS, shape).astype(dtype)
        found.ravel()[:3] = (0, 2, 2)
        return found

    return draw


def looked_up(
    padding: int | None = None, maximum: float | None = None, p: float = 2.0
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Row by row: scaled down to the norm, zero for the padding."""

    def reference(source: np.ndarray, weights: np.ndarray) -> np.ndarray:
        table, found = weights.reshape(ROWS, WIDTH), []
        for index in source.ravel():
            row = table[index]
            norm = np.abs(row).max() if p == np.inf else (np.abs(row) ** p).sum() ** (1 / p)
            row = row * maximum / norm if maximum is not None and norm > maximum else row
            found.append(np.zeros(WIDTH) if index == padding else row)
        return np.array(found).reshape(*source.shape, WIDTH)

    return reference


def twin(source: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return F.embedding(source, weights.reshape(ROWS, WIDTH))


def padded_twin(source: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    keep = (torch.arange(ROWS) != 2)[:, None]
    return F.embedding(source, weights * keep, padding_idx=2)


BAD = (
    Bad(((4, 3),), DataTypeError, "the indices are float32"),
    Bad((np.zeros((4,), np.int8),), DataTypeError, "the indices are int8"),
    Bad((np.zeros((1, 1, 1, 1, 2), np.int32),), ShapeError, "the indices have 5 dimensions"),
)

CASES: list[Case] = [
    Case("embedding", embedding, (indices(4, 3),), looked_up(), twin, bad=BAD),
    Case("embedding-int32", embedding, (indices(9, dtype=np.int32),), looked_up(), twin),
    Case("embedding-rank-4", embedding, (indices(2, 1, 3, 2),), looked_up(), twin),
    Case("embedding-packed", lambda: embedding((1, ROWS, 1, WIDTH)), (indices(5, 2),), looked_up(), twin),
    Case("embedding-inference", embedding, (indices(4, 3),), looked_up(), twin, training=False),
    Case(
        "embedding-padding",
        lambda: embedding(padding_index=2),
        (indices(4, 3),),
        looked_up(padding=2),
        padded_twin,
    ),
    Case(
        "embedding-norm-not-reached",
        lambda: embedding(maximum_norm=9.0, padding_index=0),
        (indices(4, 3),),
        looked_up(padding=0),
    ),
    *(
        Case(
            f"embedding-norm-{p}-{'training' if training else 'inference'}",
            lambda p=p: embedding(maximum_norm=0.8, p_norm=p, padding_index=2),
            (indices(6, 3),),
            looked_up(2, 0.8, p),
            training=training,
            differentiable=False,  # the gradient is that of the changed row: see test_embedding
        )
        for p in (1.0, 2.0, 3.5, np.inf)
        for training in (True, False)
    ),
    Case(
        "embedding-by-frequency",
        lambda: embedding(scales_gradient_by_frequency=True),
        (indices(4, 3),),
        looked_up(),
        differentiable=False,  # nor is the scaled gradient a derivative
    ),
]
