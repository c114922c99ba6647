"""Cases of the layers that arrange elements anew."""

import numpy as np
import torch

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.shape import ConcatenationLayer, ReshapeLayer, SplitLayer, TransposeLayer
from tests.layers.case import Bad, Case, Source, normal


def whole_numbers(*shape: int) -> Source:
    """An int32 source."""
    return lambda generator: generator.integers(-9, 9, shape, dtype=np.int32)


CASES = [
    Case(
        "reshape",
        lambda: ReshapeLayer([4, 6, 1, 1]),
        (normal(4, 2, 3),),
        lambda x: np.reshape(x, (4, 6, 1, 1)),
        lambda x: x.reshape(4, 6, 1, 1),
        bad=(Bad(((4, 5),), ShapeError, "20 elements cannot take the shape [4, 6, 1, 1]"),),
    ),
    Case(
        "reshape with -1",
        lambda: ReshapeLayer((4, -1)),
        (normal(4, 2, 3),),
        lambda x: np.reshape(x, (4, 6)),
        lambda x: x.reshape(4, 6),
        bad=(Bad(((3, 5),), ShapeError, "15 elements cannot take the shape [4, -1]"),),
    ),
    Case(
        "reshape of whole numbers",
        lambda: ReshapeLayer((-1,)),
        (whole_numbers(4, 3),),
        np.ravel,
        torch.flatten,
        differentiable=False,
    ),
    Case(
        "transpose",
        lambda: TransposeLayer([0, 3, 1, 2]),
        (normal(2, 3, 4, 5),),
        lambda x: np.transpose(x, (0, 3, 1, 2)),
        lambda x: x.permute(0, 3, 1, 2),
        bad=(Bad(((2, 3),), ShapeError, "4 dimensions are listed, but the source has 2"),),
    ),
    Case("transpose of the batch", lambda: TransposeLayer((1, 0)), (normal(2, 3),), np.transpose, lambda x: x.T),
    Case(
        "concatenation",
        ConcatenationLayer,
        (normal(2, 3, 4), normal(2, 1, 4), normal(2, 2, 4)),
        lambda *xs: np.concatenate(xs, 1),
        lambda *xs: torch.cat(xs, 1),
        bad=(
            Bad(((2,), (2,)), ShapeError, "dimension 1 is out of range for a source with 1 dimensions"),
            Bad(((2, 3), (4, 3)), ShapeError, "sources 0 and 1 differ in more than dimension 1: [2, 3] and [4, 3]"),
            Bad(((2, 3), (2, 3), (2, 3, 1)), ShapeError, "sources 0 and 2 differ"),
            Bad(((2, 3), np.zeros((2, 3), np.int32)), DataTypeError, "the sources mix float32 and int32"),
            Bad((), ShapeError, "0 sources were passed, but 1 or more are needed"),
        ),
    ),
    Case(
        "concatenation of rows", lambda: ConcatenationLayer(0), (normal(2), normal(3)), lambda *xs: np.concatenate(xs)
    ),
    Case("concatenation of one", ConcatenationLayer, (normal(2, 3),), lambda x: x),
    Case(
        "split by count, last shorter",
        lambda: SplitLayer(2),
        (normal(2, 3, 4),),
        lambda x: (x[:, :2], x[:, 2:]),
        lambda x: x.chunk(2, 1),
        bad=(Bad(((2,),), ShapeError, "dimension 1 is out of range for a source with 1 dimensions"),),
    ),
    Case("split by count, fewer parts", lambda: SplitLayer(3), (normal(2, 2),), lambda x: (x[:, :1], x[:, 1:])),
    Case(
        "split by lengths",
        lambda: SplitLayer(split_section_lengths=[1, 3, 2], dimension=2),
        (normal(2, 3, 6),),
        lambda x: np.split(x, [1, 4], axis=2),
        lambda x: x.split([1, 3, 2], 2),
        bad=(Bad(((2, 3, 5),), ShapeError, "the sections [1, 3, 2] add up to 6, but dimension 2 has 5"),),
    ),
]
