"""Cases of every kind of reduction."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.reduction import ReductionLayer
from tests.layers.case import Bad, Case, Source, normal


def distinct(*shape: int) -> Source:
    """Numbers that lie far apart, on both sides of 0."""
    count = int(np.prod(shape))
    return lambda generator: (generator.permutation(count).reshape(shape) - count / 2 + 0.25) / 8


def whole_numbers(*shape: int, dtype: type = np.int32, least: int = -4) -> Source:
    """Small whole numbers, many of them equal."""
    return lambda generator: generator.integers(least, 5, shape).astype(dtype)


def mostly(value: bool, *shape: int) -> Source:
    """Booleans with few exceptions, so that some reductions are true and some are not."""
    return lambda generator: (generator.random(shape) < 0.15) != value


def kept(function: Callable[..., Any], *axes: int) -> Callable[[np.ndarray], np.ndarray]:
    """A NumPy reduction over the axes one after the other, each kept with extent 1."""

    def reference(x: np.ndarray) -> np.ndarray:
        for axis in axes:
            x = np.expand_dims(np.apply_along_axis(function, axis, x), axis)
        return x

    return reference


OUT_OF_RANGE = Bad(((2, 3),), ShapeError, "dimension 2 is out of range for a source with 2 dimensions")

CASES = [
    Case(
        "sum",
        lambda: ReductionLayer.sum((1, 2)),
        (normal(3, 4, 5),),
        kept(sum, 1, 2),
        lambda x: x.sum((1, 2), keepdim=True),
        bad=(OUT_OF_RANGE,),
    ),
    Case("sum of the batch", lambda: ReductionLayer.sum(0), (normal(4),), kept(sum, 0), lambda x: x.sum(0, True)),
    Case(
        "sum of whole numbers",
        lambda: ReductionLayer.sum([1]),
        (whole_numbers(3, 400, dtype=np.int8, least=3),),
        lambda x: x.astype(np.int64).sum(1, keepdims=True),
        differentiable=False,
    ),
    Case(
        "sum of booleans",
        lambda: ReductionLayer.sum((0, 1)),
        (mostly(True, 5, 6),),
        lambda x: np.array([[np.count_nonzero(x)]]),
        differentiable=False,
    ),
    Case(
        "mean",
        lambda: ReductionLayer.mean((0, 2, 3)),
        (normal(2, 3, 4, 5),),
        lambda x: np.array([[[[x[:, c].sum() / 40]] for c in range(3)]]),
        lambda x: x.mean((0, 2, 3), keepdim=True),
        bad=(
            Bad((np.zeros((2, 3, 4, 5), np.int32),), DataTypeError, "int32, but a floating type is needed"),
            Bad(((2, 3, 4),), ShapeError, "dimension 3 is out of range"),
        ),
    ),
    Case("max", lambda: ReductionLayer.max(1), (distinct(3, 4, 5),), kept(max, 1), lambda x: x.amax(1, keepdim=True)),
    Case(
        "max over several dimensions",
        lambda: ReductionLayer.max((3, 0, 1)),
        (distinct(2, 3, 4, 5),),
        kept(max, 3, 0, 1),
        lambda x: x.amax((0, 1, 3), keepdim=True),
        bad=(Bad((np.zeros((2, 3, 4, 5), bool),), DataTypeError, "Max takes numbers, but the source is boolean"),),
    ),
    Case(
        "max of whole numbers",
        lambda: ReductionLayer.max(1),
        (whole_numbers(3, 4),),
        kept(max, 1),
        differentiable=False,
    ),
    Case(
        "min",
        lambda: ReductionLayer.min((2, 1)),
        (distinct(3, 4, 5),),
        kept(min, 2, 1),
        lambda x: x.amin((1, 2), keepdim=True),
    ),
    Case(
        "arg max",
        lambda: ReductionLayer.arg_max(1),
        (normal(3, 4, 5),),
        kept(lambda row: list(row).index(max(row)), 1),
        lambda x: x.argmax(1, keepdim=True),
        differentiable=False,
        bad=(
            Bad((np.zeros((2, 3), bool),), DataTypeError, "Arg Max takes numbers, but the source is boolean"),
            Bad(((2,),), ShapeError, "dimension 1 is out of range"),
        ),
    ),
    Case(
        "arg max, first of equal numbers",
        lambda: ReductionLayer.arg_max([2]),
        (whole_numbers(3, 4, 30),),
        kept(lambda row: list(row).index(max(row)), 2),
        differentiable=False,
    ),
    Case(
        "arg min, first of equal numbers",
        lambda: ReductionLayer.arg_min(0),
        (lambda generator: generator.integers(-2, 3, (30, 4)).astype(float),),
        kept(lambda row: list(row).index(min(row)), 0),
        lambda x: x.argmin(0, keepdim=True),
        differentiable=False,
    ),
    Case(
        "L1 norm",
        lambda: ReductionLayer.l1_norm((1, 3)),
        (distinct(2, 3, 4, 5),),
        lambda x: np.where(x < 0, -x, x).sum((1, 3), keepdims=True),
        lambda x: torch.linalg.vector_norm(x, 1, (1, 3), keepdim=True),
        bad=(Bad((np.zeros((2, 3, 4, 5), np.int8),), DataTypeError, "int8, but a floating type is needed"),),
    ),
    Case(
        "any",
        lambda: ReductionLayer.any((0, 2)),
        (mostly(False, 2, 9, 3),),
        lambda x: np.array([[[x[:, i].sum() > 0] for i in range(9)]]),
        lambda x: x.any(2, True).any(0, True),
        differentiable=False,
        bad=(OUT_OF_RANGE,),
    ),
    Case(
        "any of bytes",
        lambda: ReductionLayer.any(1),
        (lambda generator: generator.integers(0, 2, (12, 2)).astype(np.uint8),),
        lambda x: (x[:, :1] + x[:, 1:]) > 0,
        differentiable=False,
    ),
    Case(
        "all",
        lambda: ReductionLayer.all((1,)),
        (mostly(True, 9, 4),),
        lambda x: x.sum(1, keepdims=True) == 4,
        lambda x: x.all(1, True),
        differentiable=False,
    ),
    Case(
        "all of real numbers",
        lambda: ReductionLayer.all((1, 2)),
        (lambda generator: generator.integers(0, 20, (9, 2, 3)) / 4,),
        lambda x: np.array([[[np.count_nonzero(one) == 6]] for one in x]),
        differentiable=False,
    ),
]
