"""Cases of the softmax layer."""

import numpy as np
import torch

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.softmax import SoftmaxLayer
from tests.layers.case import Bad, Case, normal


def shares(x: np.ndarray, axis: int) -> np.ndarray:
    powers = np.exp(x)
    return powers / powers.sum(axis, keepdims=True)


CASES = [
    Case(
        "softmax",
        SoftmaxLayer.softmax,
        (normal(3, 4, 2, 2),),
        lambda x: shares(x, 1),
        lambda x: torch.softmax(x, 1),
        bad=(
            Bad(((3,),), ShapeError, "dimension 1 is out of range for a source with 1 dimensions"),
            Bad((np.zeros((2, 3), np.int32),), DataTypeError, "the source is int32"),
        ),
    ),
    Case("softmax of rows", lambda: SoftmaxLayer.softmax(0), (normal(5),), lambda x: shares(x, 0), torch.nn.Softmax(0)),
    Case(
        "log softmax",
        SoftmaxLayer.log_softmax,
        (normal(3, 4),),
        lambda x: np.log(shares(x, 1)),
        lambda x: torch.log_softmax(x, 1),
    ),
    Case(
        "log softmax of the last dimension",
        lambda: SoftmaxLayer.log_softmax(2),
        (normal(2, 3, 4),),
        lambda x: np.log(shares(x, 2)),
        lambda x: torch.log_softmax(x, -1),
    ),
]
