"""Cases of slices."""

import numpy as np

from stepgraph.errors import ShapeError
from stepgraph.layers.shape import SliceLayer
from tests.layers.case import Bad, Case, normal

CASES = [
    Case(
        "slice",
        lambda: SliceLayer([0, 1, 2], [2, 3, 6]),
        (normal(2, 4, 6),),
        lambda x: x[:, 1:3, 2:6],
        lambda x: x.narrow(1, 1, 2).narrow(2, 2, 4),
        bad=(
            Bad(((2, 4),), ShapeError, "the slice has 3 dimensions, but the source has 2"),
            Bad(((2, 4, 5),), ShapeError, "dimension 2 is sliced from 2 to 6, but the source has 5"),
            Bad(((1, 4, 6),), ShapeError, "dimension 0 is sliced from 0 to 2, but the source has 1"),
        ),
    ),
    Case(
        "slice with strides",
        lambda: SliceLayer((0, 1, 0), (3, 4, 6), (2, 1, 5)),
        (normal(3, 4, 6),),
        lambda x: np.stack([x[i, 1:4][:, [0, 5]] for i in (0, 2)]),
        lambda x: x[::2, 1:4, ::5],
    ),
    Case(
        "slice of whole numbers",
        lambda: SliceLayer((1,), (6,), (3,)),
        (lambda generator: generator.integers(0, 9, 7, dtype=np.int64),),
        lambda x: np.array([x[1], x[4]]),
        differentiable=False,
    ),
    Case(
        "slice of everything",
        lambda: SliceLayer((0, 0, 0, 0, 0), (2, 1, 3, 1, 2)),
        (normal(2, 1, 3, 1, 2),),
        lambda x: x,
        lambda x: x,
    ),
]
