"""Cases of the layer of functions; `tests/interop` compares it with PyTorch inside of models."""

import numpy as np
import torch

from stepgraph.errors import ShapeError
from stepgraph.layers.glue import Call, GlueLayer, Program, Slice, Value
from stepgraph.tensors.extents import BATCH
from stepgraph.tensors.tensor import Tensor
from tests.layers.case import Bad, Case, normal

GATED = Program(
    (
        Call("Tensor.chunk", (Value(0), 2, -1), results=(2, 3)),
        Call("torch.sigmoid", (Value(3),), results=(4,)),
        Call("Tensor.mul", (Value(2), Value(4)), results=(5,)),
        Call("Tensor.add", (Value(5), Value(1)), results=(6,)),
    ),
    (6,),
)
IN_PLACE = Program(
    (
        Call("Tensor.view", (Value(0), BATCH, 6), results=(1,)),
        Call("Tensor.__setitem__", (Value(1), (Slice(), 0), 0.0), changed=((1, 2), (0, 3))),
        Call("Tensor.mul", (Value(2), 2), results=(4,)),
    ),
    (4, 3),
    written=(0,),
)


def gated() -> GlueLayer:
    return GlueLayer(GATED, tensors=(Tensor((3,), data=np.array([0.5, -1.0, 2.0], np.float32)),), rows=4)


def zeroed(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y = x.copy()
    y[:, 0, 0] = 0
    return y.reshape(len(x), 6) * 2, y


CASES = [
    Case(
        "glue with a parameter",
        gated,
        (normal(4, 6),),
        lambda x, tensors: x[:, :3] / (1 + np.exp(-x[:, 3:])) + tensors[0],
        lambda x, tensors: torch.nn.functional.glu(x, -1) + tensors[0],
        bad=(Bad(((4, 5),), ShapeError, "broadcast"),),
    ),
    Case("glue in place", lambda: GlueLayer(IN_PLACE, rows=4), (normal(4, 3, 2),), zeroed),
]
