"""A case of the constant: a result without sources."""

import numpy as np

from stepgraph.errors import ShapeError
from stepgraph.layers.constant import ConstantLayer
from stepgraph.tensors.tensor import Tensor
from tests.layers.case import Bad, Case

CASES = [
    Case(
        "constant",
        lambda: ConstantLayer(Tensor((2, 3), data=np.arange(6, dtype=np.float32))),
        (),
        lambda value: value,
        differentiable=False,
        bad=(Bad(((2, 3),), ShapeError, "1 sources were passed, but 0 are needed"),),
    )
]
