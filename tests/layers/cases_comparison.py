"""Cases of every comparison."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.comparison import ComparisonLayer, ComparisonOperation
from tests.layers.case import Bad, Case, Source


def numbers(*shape: int, dtype: type = np.float64) -> Source:
    """Few values, so that many are equal."""
    return lambda generator: generator.integers(-2, 3, shape).astype(dtype)


def booleans(*shape: int) -> Source:
    return lambda generator: generator.random(shape) < 0.5


def case(name: str, *sources: Source, reference: Any, twin: Any, suffix: str = "", bad: tuple[Bad, ...] = ()) -> Case:
    operation = ComparisonOperation[name]
    return Case(
        f"{operation.debug_description}{suffix}",
        lambda: ComparisonLayer(operation),
        sources,
        reference,
        twin,
        differentiable=False,
        bad=bad,
    )


RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "EQUAL": operator.eq,
    "NOT_EQUAL": operator.ne,
    "LESS": operator.lt,
    "GREATER": operator.gt,
    "LESS_OR_EQUAL": operator.le,
    "GREATER_OR_EQUAL": operator.ge,
}
LOGIC: dict[str, Callable[[Any, Any], Any]] = {
    "LOGICAL_AND": lambda x, y: x & y,
    "LOGICAL_OR": lambda x, y: x | y,
    "LOGICAL_NAND": lambda x, y: ~(x & y),
    "LOGICAL_NOR": lambda x, y: ~(x | y),
    "LOGICAL_XOR": lambda x, y: x ^ y,
}


def by_truth_table(name: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The results for false-false, false-true, true-false, true-true, looked up."""
    table = {
        "LOGICAL_AND": [0, 0, 0, 1],
        "LOGICAL_OR": [0, 1, 1, 1],
        "LOGICAL_NAND": [1, 1, 1, 0],
        "LOGICAL_NOR": [1, 0, 0, 0],
        "LOGICAL_XOR": [0, 1, 1, 0],
    }[name]
    return lambda x, y: np.array(table, bool)[2 * x + y]


def by_sign(name: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The results for a difference that is negative, zero, positive, looked up."""
    table = {
        "EQUAL": [0, 1, 0],
        "NOT_EQUAL": [1, 0, 1],
        "LESS": [1, 0, 0],
        "GREATER": [0, 0, 1],
        "LESS_OR_EQUAL": [1, 1, 0],
        "GREATER_OR_EQUAL": [0, 1, 1],
    }[name]
    return lambda x, y: np.array(table, bool)[1 + np.sign(x.astype(float) - y.astype(float)).astype(int)]


FLAGS, INTEGERS = np.zeros((3, 4), bool), np.zeros((3, 4), np.int32)
BAD_RELATION = (
    Bad(((3, 4), (3, 5)), ShapeError, "the shapes [3, 4] and [3, 5] do not broadcast"),
    Bad(((3, 4),), ShapeError, "Less takes 2 sources, not 1"),
    Bad((FLAGS, FLAGS), DataTypeError, "Less takes numbers, but a source is boolean"),
    Bad(((3, 4), INTEGERS), DataTypeError, "float32 and int32 cannot be compared exactly"),
)
BAD_LOGIC = (
    Bad(((3, 4), (3, 4)), DataTypeError, "Logical XOR takes booleans, but a source is float32"),
    Bad((FLAGS, INTEGERS), DataTypeError, "Logical XOR takes booleans, but a source is int32"),
    Bad((FLAGS, FLAGS[:2]), ShapeError, "the shapes [3, 4] and [2, 4] do not broadcast"),
)
BAD_NOT = (
    Bad((FLAGS, FLAGS), ShapeError, "Logical NOT takes 1 source, not 2"),
    Bad((INTEGERS,), DataTypeError, "Logical NOT takes booleans, but a source is int32"),
)

CASES = [
    *(
        case(
            name,
            numbers(3, 4),
            numbers(3, 4),
            reference=by_sign(name),
            twin=twin,
            bad=BAD_RELATION if name == "LESS" else (),
        )
        for name, twin in RELATIONS.items()
    ),
    *(
        case(
            name,
            booleans(3, 4),
            booleans(3, 4),
            reference=by_truth_table(name),
            twin=twin,
            bad=BAD_LOGIC if name == "LOGICAL_XOR" else (),
        )
        for name, twin in LOGIC.items()
    ),
    case(
        "LOGICAL_NOT",
        booleans(3, 4),
        reference=lambda x: np.where(x, False, True),
        twin=torch.logical_not,
        bad=BAD_NOT,
    ),
    case(
        "LESS",
        numbers(2, 3, 4),
        numbers(3, 1),
        reference=by_sign("LESS"),
        twin=operator.lt,
        suffix=", broadcast",
    ),
    case(
        "EQUAL",
        numbers(5, dtype=np.int32),
        numbers(4, 1, dtype=np.int64),
        reference=by_sign("EQUAL"),
        twin=operator.eq,
        suffix=", whole numbers of two widths",
    ),
    case(
        "LOGICAL_NAND",
        booleans(2, 1),
        booleans(3),
        reference=by_truth_table("LOGICAL_NAND"),
        twin=LOGIC["LOGICAL_NAND"],
        suffix=", broadcast",
    ),
]
