"""Cases of every kind of padding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.padding import PaddingLayer
from tests.layers.case import Bad, Case, normal

Sides = tuple[int, int, int, int]  # top, bottom, left, right


def mirrored(position: int, size: int, kind: str) -> int | None:
    """Which pixel stands at a position outside of the image: None for the constant."""
    if 0 <= position < size:
        return position
    if kind == "constant":
        return None
    border = 0 if kind == "reflect" else 1  # a symmetric mirror stands half a pixel further out
    return -position - border if position < 0 else 2 * (size - 1) - position + border


def padded(x: np.ndarray, sides: Sides, kind: str, value: float = 0.0) -> np.ndarray:
    """Every pixel of the result, looked up one by one."""
    top, bottom, left, right = sides
    height, width = x.shape[2:]
    result = np.full((*x.shape[:2], top + height + bottom, left + width + right), value, x.dtype)
    for i in range(result.shape[2]):
        for j in range(result.shape[3]):
            row, column = mirrored(i - top, height, kind), mirrored(j - left, width, kind)
            if row is not None and column is not None:
                result[:, :, i, j] = x[:, :, row, column]
    return result


def reference(kind: str, *sides: int, value: float = 0.0) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: padded(x, sides, kind, value)  # type: ignore[arg-type]


def twin(mode: str, *sides: int, **settings: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    top, bottom, left, right = sides
    return lambda x: F.pad(x, (left, right, top, bottom), mode, **settings)


CASES = [
    Case(
        "zero padding",
        lambda: PaddingLayer.zero([1, 2, 3, 0]),
        (normal(2, 3, 4, 5),),
        reference("constant", 1, 2, 3, 0),
        twin("constant", 1, 2, 3, 0),
        bad=(
            Bad(((2, 3, 4),), ShapeError, "the source has 3 dimensions, but [batch, channels, height, width] has 4"),
            Bad((np.zeros((2, 3, 4, 5), np.int32),), DataTypeError, "the source is int32"),
        ),
    ),
    Case(
        "constant padding",
        lambda: PaddingLayer.constant([2, 1], -1.5),
        (normal(2, 3, 4, 5),),
        reference("constant", 0, 0, 2, 1, value=-1.5),
        twin("constant", 0, 0, 2, 1, value=-1.5),
    ),
    Case(
        "reflection padding",
        lambda: PaddingLayer.reflection([3, 1, 2, 4]),
        (normal(2, 3, 4, 5),),
        reference("reflect", 3, 1, 2, 4),
        twin("reflect", 3, 1, 2, 4),
        bad=(
            Bad(((2, 3, 3, 5),), ShapeError, "3 rows of padding, but 3 rows have only 2 to mirror"),
            Bad(((2, 3, 4, 4),), ShapeError, "4 columns of padding, but 4 columns have only 3 to mirror"),
        ),
    ),
    Case(
        "reflection padding, all sides",
        lambda: PaddingLayer.reflection(2),
        (normal(2, 3, 4, 5),),
        reference("reflect", 2, 2, 2, 2),
        twin("reflect", 2, 2, 2, 2),
    ),
    Case(
        "symmetric padding",
        lambda: PaddingLayer.symmetric([4, 1, 2, 5]),
        (normal(2, 3, 4, 5),),
        reference("symmetric", 4, 1, 2, 5),
        bad=(
            Bad(((2, 3, 3, 5),), ShapeError, "4 rows of padding, but 3 rows have only 3 to mirror"),
            Bad(((2, 3, 4, 4),), ShapeError, "5 columns of padding, but 4 columns have only 4 to mirror"),
        ),
    ),
    Case(
        "symmetric padding by one",  # there it repeats the border, as PyTorch's replication does
        lambda: PaddingLayer.symmetric([1]),
        (normal(2, 3, 4, 5),),
        reference("symmetric", 1, 1, 1, 1),
        twin("replicate", 1, 1, 1, 1),
    ),
    Case(
        "symmetric padding of columns",
        lambda: PaddingLayer.symmetric([0, 3]),
        (normal(2, 1, 2, 3),),
        reference("symmetric", 0, 0, 0, 3),
    ),
]
