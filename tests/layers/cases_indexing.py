"""Cases of selection, gather and scatter."""

import numpy as np
import torch

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.indexing import GatherLayer, ScatterLayer, SelectionLayer
from stepgraph.types import ReductionType
from tests.layers.case import Bad, Case, Source, normal


def mask(*shape: int) -> Source:
    return lambda generator: generator.random(shape) < 0.5


def fixed(values: object, dtype: type = np.int64) -> Source:
    return lambda _: np.array(values, dtype)


def rows(condition: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.stack([x[i] if chosen else y[i] for i, chosen in enumerate(condition)])


def picked(x: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray:
    """`x` at each place of `indices`, with the index in place of the coordinate along `axis`."""
    result = np.empty(indices.shape)
    for place in np.ndindex(indices.shape):
        source = list(place)
        source[axis] = indices[place]
        result[place] = x[tuple(source)]
    return result


def placed(updates: np.ndarray, indices: np.ndarray, copy_from: np.ndarray, axis: int, adds: bool) -> np.ndarray:
    result = copy_from.copy()
    for place in np.ndindex(indices.shape):
        target = list(place)
        target[axis] = indices[place]
        result[tuple(target)] = updates[place] + (result[tuple(target)] if adds else 0)
    return result


def slices(updates: np.ndarray, indices: np.ndarray, copy_from: np.ndarray, adds: bool) -> np.ndarray:
    """Rows of the updates, written to or added at rows of the copy."""
    result = copy_from.copy()
    for row, index in zip(updates, indices, strict=True):
        result[index] = row + (result[index] if adds else 0)
    return result


BOOLEAN, INT64 = np.zeros((2, 3), bool), np.zeros((2, 3), np.int64)

CASES = [
    Case(
        "selection",
        SelectionLayer,
        (mask(2, 3, 4), normal(2, 3, 4), normal(2, 3, 4)),
        np.where,
        torch.where,
        bad=(
            Bad(((2, 3), (2, 3), (2, 3)), DataTypeError, "the condition is float32, not boolean"),
            Bad((BOOLEAN, (2, 3), (2, 4)), ShapeError, "the shapes [2, 3] and [2, 4] do not broadcast"),
            Bad((BOOLEAN, (2, 3), INT64), DataTypeError, "the sources mix float32 and int64"),
            Bad((BOOLEAN, (3, 3), (3, 3)), ShapeError, "a condition [2, 3] cannot select from [3, 3]"),
            Bad((BOOLEAN, (2,), (2,)), ShapeError, "a condition [2, 3] cannot select from [2]"),
            Bad((BOOLEAN, (2, 3)), ShapeError, "2 sources were passed, but 3 are needed"),
        ),
    ),
    Case("selection of rows", SelectionLayer, (mask(5), normal(5, 2, 3), normal(5, 2, 3)), rows),
    Case(
        "selection of rows of a square",
        SelectionLayer,
        (mask(4), normal(4, 4), normal(4, 4)),
        rows,
        lambda condition, x, y: torch.where(condition[:, None], x, y),
    ),
    Case("selection from a number", SelectionLayer, (mask(5, 2), normal(5, 2), normal(1)), np.where, torch.where),
    Case(
        "gather of slices",
        lambda: GatherLayer(1),
        (normal(2, 5, 3), fixed([4, 0, 0, 2], np.int32)),
        lambda x, indices: np.take(x, indices, 1),
        lambda x, indices: x[:, indices],
        bad=(
            Bad(((2, 5), (3,)), DataTypeError, "the indices are float32"),
            Bad(
                ((5,), np.zeros(2, np.int32)), ShapeError, "dimension 1 is out of range for a source with 1 dimensions"
            ),
            Bad(((2, 5, 3), INT64), ShapeError, "the indices have 2 dimensions, but the source has 3"),
            Bad(((1, 3), INT64), ShapeError, "extent 2 of dimension 0 does not fit 1: [2, 3] and [1, 3]"),
        ),
    ),
    Case("gather of numbers", lambda: GatherLayer(0), (normal(5), fixed([3, 3, 1])), lambda x, indices: x[indices]),
    Case(
        "gather of elements",
        lambda: GatherLayer(1),
        (normal(3, 5), fixed([[4, 0], [2, 2], [1, 3]], np.int32)),
        lambda x, indices: picked(x, indices, 1),
        lambda x, indices: torch.gather(x, 1, indices.long()),
    ),
    Case(
        "gather of elements, rows",
        lambda: GatherLayer(0),
        (normal(3, 4), fixed([[2, 0, 1], [0, 0, 2]])),
        lambda x, indices: picked(x, indices, 0),
        lambda x, indices: torch.gather(x, 0, indices),
    ),
    Case(
        "scatter of slices",
        lambda: ScatterLayer(0),
        (normal(2, 3), fixed([4, 1], np.int32), normal(5, 3)),
        lambda updates, indices, copy_from: slices(updates, indices, copy_from, False),
        lambda updates, indices, copy_from: copy_from.index_copy(0, indices.long(), updates),
        bad=(
            Bad(((2, 3), (2,), (5, 3)), DataTypeError, "the indices are float32"),
            Bad(((2, 3), np.zeros(3, np.int32), (5, 3)), ShapeError, "indices [3] do not fit updates [2, 3]"),
            Bad(((2, 3), np.zeros((2, 2), np.int32), (5, 3)), ShapeError, "indices [2, 2] do not fit updates [2, 3]"),
            Bad(((2, 3), np.zeros(2, np.int32), (5, 4)), ShapeError, "extent 3 of dimension 1 does not fit 4"),
            Bad(((2, 3), INT64, (5, 2)), ShapeError, "extent 3 of dimension 1 does not fit 2"),
            Bad(((2, 3), np.zeros(2, np.int32), (5, 3, 1)), ShapeError, "the updates have 2 dimensions"),
            Bad(((2, 3), np.zeros(2, np.int32), INT64), DataTypeError, "the sources mix float32 and int64"),
        ),
    ),
    Case(
        "scatter of slices, added",
        lambda: ScatterLayer(0, ReductionType.SUM),
        (normal(4, 3), fixed([4, 1, 4, 0]), normal(5, 3)),
        lambda updates, indices, copy_from: slices(updates, indices, copy_from, True),
        lambda updates, indices, copy_from: copy_from.index_add(0, indices, updates),
    ),
    Case(
        "scatter of elements",
        lambda: ScatterLayer(1),
        (normal(2, 3), fixed([[4, 0, 2], [1, 3, 0]], np.int32), normal(3, 5)),
        lambda updates, indices, copy_from: placed(updates, indices, copy_from, 1, False),
        lambda updates, indices, copy_from: copy_from.scatter(1, indices.long(), updates),
    ),
    Case(
        "scatter of elements, added",
        lambda: ScatterLayer(0, ReductionType.SUM),
        (normal(3, 2), fixed([[0, 1], [0, 0], [1, 1]]), normal(2, 2)),
        lambda updates, indices, copy_from: placed(updates, indices, copy_from, 0, True),
        lambda updates, indices, copy_from: copy_from.scatter_add(0, indices, updates),
    ),
]
