"""Cases of matrix products and Gram matrices."""

from collections.abc import Callable

import numpy as np
import torch

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.products import GramMatrixLayer, MatMulDescriptor, MatMulLayer
from stepgraph.tensors.tensor import TensorDescriptor
from tests.layers.case import Bad, Case, normal


def product(x: np.ndarray, y: np.ndarray, alpha: float = 1.0, flip_x: bool = False, flip_y: bool = False) -> np.ndarray:
    """`alpha Σ x[i, k] y[k, j]`, written as a sum over the inner index, with leading extents broadcast."""
    first, second = ("...ki" if flip_x else "...ik"), ("...jk" if flip_y else "...kj")
    return alpha * np.einsum(f"{first},{second}->...ij", x, y)


def matmul(
    name: str, x: tuple[int, ...], y: tuple[int, ...], *settings: float | bool, bad: tuple[Bad, ...] = ()
) -> Case:
    alpha, flip_x, flip_y = (*settings, *(1.0, False, False)[len(settings) :])

    def twin(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return alpha * torch.matmul(x.mT if flip_x else x, y.mT if flip_y else y)

    return Case(
        name,
        lambda: MatMulLayer(MatMulDescriptor(alpha, bool(flip_x), bool(flip_y))),
        (normal(*x), normal(*y)),
        lambda x, y: product(x, y, alpha, bool(flip_x), bool(flip_y)),
        twin,
        bad=bad,
    )


def gram(scale: float) -> Callable[[np.ndarray], np.ndarray]:
    """`scale Σ x[f] x[c]` over the pixels of each image."""

    def reference(x: np.ndarray) -> np.ndarray:
        result = np.zeros((x.shape[0], x.shape[1], 1, x.shape[1]))
        for b, c, _, f in np.ndindex(*result.shape):
            result[b, c, 0, f] = scale * (x[b, f] * x[b, c]).sum()
        return result

    return reference


BAD = (
    Bad(((3, 4), (3, 4)), ShapeError, "the rows of x have 4 numbers, but the columns of y have 3"),
    Bad(((4,), (4, 3)), ShapeError, "a source has 1 dimension, but a matrix has 2"),
    Bad(((2, 3, 4), (3, 4, 5)), ShapeError, "the leading extents [2] and [3] do not broadcast"),
    Bad(((3, 4), TensorDescriptor((4, 3), "float16")), DataTypeError, "the sources mix float32 and float16"),
    Bad(((3, 4), np.zeros((4, 3), np.int32)), DataTypeError, "the source is int32, but a floating type is needed"),
    Bad(((3, 4),), ShapeError, "1 sources were passed, but 2 are needed"),
)

CASES = [
    matmul("matmul", (3, 4), (4, 5), bad=BAD),
    matmul("matmul, batch", (2, 3, 4), (2, 4, 5)),
    matmul("matmul, rank 5", (2, 1, 2, 3, 4), (2, 2, 2, 4, 3)),
    matmul("matmul, leading extents of 1 on both sides", (1, 3, 2, 4), (2, 1, 4, 2)),
    matmul("matmul, one matrix for all of x", (2, 2, 3, 4), (1, 4, 5), 0.5),
    matmul("matmul, one matrix for all of y", (1, 1, 3, 4), (2, 3, 4, 5), -2.0),
    matmul("matmul, one matrix each", (1, 3, 4), (1, 1, 4, 5)),
    matmul("matmul, missing leading extents", (3, 4), (2, 4, 5), 1.5),
    matmul("matmul, x transposed", (2, 4, 3), (2, 4, 5), 1.0, True),
    matmul("matmul, y transposed", (2, 3, 4), (5, 4), 0.5, False, True),
    matmul(
        "matmul, both transposed",
        (2, 4, 3),
        (2, 5, 4),
        0.5,
        True,
        True,
        bad=(Bad(((2, 3), (2, 4)), ShapeError, "the rows of x have 2 numbers, but the columns of y have 4"),),
    ),
    matmul("matmul, alpha on x", (2, 2, 3), (2, 3, 9), 0.25),
    matmul("matmul, alpha on y", (2, 9, 3), (2, 3, 2), 0.25),
    matmul("matmul, alpha on the result", (2, 2, 9), (2, 9, 3), 0.25),
    matmul("matmul, alpha 0", (2, 3), (3, 2), 0.0),
    Case(
        "Gram matrix",
        lambda: GramMatrixLayer(0.25),
        (normal(2, 3, 4, 5),),
        gram(0.25),
        lambda x: 0.25 * torch.einsum("bfhw,bchw->bcf", x, x)[:, :, None],
        bad=(
            Bad(((2, 3, 4),), ShapeError, "the source has 3 dimensions, but [batch, channels, height, width] has 4"),
            Bad((np.zeros((2, 3, 4, 5), np.int32),), DataTypeError, "the source is int32"),
        ),
    ),
    Case("Gram matrix of one pixel", lambda: GramMatrixLayer(1), (normal(1, 4, 1, 1),), gram(1.0)),
]
