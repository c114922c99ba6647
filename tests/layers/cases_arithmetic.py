"""Cases of every arithmetic operation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.arithmetic import ArithmeticLayer, ArithmeticOperation
from tests.layers.case import Bad, Case, Source, normal, uniform

REAL = uniform(3, 4, low=-3, high=3)
POSITIVE = uniform(3, 4, low=0.2, high=4)
WITHIN_ONE = uniform(3, 4, low=-0.9, high=0.9)
ABOVE_ONE = uniform(3, 4, low=1.1, high=4)

UNARY: dict[ArithmeticOperation, tuple[Source, Callable[[np.ndarray], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    ArithmeticOperation.FLOOR: (REAL, np.floor, torch.floor),
    ArithmeticOperation.ROUND: (REAL, np.rint, torch.round),
    ArithmeticOperation.CEIL: (REAL, np.ceil, torch.ceil),
    ArithmeticOperation.SQRT: (POSITIVE, np.sqrt, torch.sqrt),
    ArithmeticOperation.RSQRT: (POSITIVE, lambda x: 1 / np.sqrt(x), torch.rsqrt),
    ArithmeticOperation.SIN: (REAL, np.sin, torch.sin),
    ArithmeticOperation.COS: (REAL, np.cos, torch.cos),
    ArithmeticOperation.TAN: (WITHIN_ONE, np.tan, torch.tan),
    ArithmeticOperation.ASIN: (WITHIN_ONE, np.arcsin, torch.asin),
    ArithmeticOperation.ACOS: (WITHIN_ONE, np.arccos, torch.acos),
    ArithmeticOperation.ATAN: (REAL, np.arctan, torch.atan),
    ArithmeticOperation.SINH: (REAL, np.sinh, torch.sinh),
    ArithmeticOperation.COSH: (REAL, np.cosh, torch.cosh),
    ArithmeticOperation.TANH: (REAL, np.tanh, torch.tanh),
    ArithmeticOperation.ASINH: (REAL, np.arcsinh, torch.asinh),
    ArithmeticOperation.ACOSH: (ABOVE_ONE, np.arccosh, torch.acosh),
    ArithmeticOperation.ATANH: (WITHIN_ONE, np.arctanh, torch.atanh),
    ArithmeticOperation.EXP: (REAL, np.exp, torch.exp),
    ArithmeticOperation.EXP2: (REAL, np.exp2, torch.exp2),
    ArithmeticOperation.LOG: (POSITIVE, np.log, torch.log),
    ArithmeticOperation.LOG2: (POSITIVE, np.log2, torch.log2),
}

BAD_BINARY = (
    Bad(((3, 4),), ShapeError, "Add takes 2 sources, not 1"),
    Bad(((3, 4), (3, 5)), ShapeError, "the shapes [3, 4] and [3, 5] do not broadcast"),
    Bad(((3, 4), (3, 4), (3, 4)), ShapeError, "3 sources were passed, but 1 to 2 are needed"),
    Bad(((3, 4), np.zeros((3, 4), np.int32)), DataTypeError, "the source is int32, but a floating type is needed"),
)
BAD_UNARY = (Bad(((3, 4), (3, 4)), ShapeError, "Floor takes 1 source, not 2"),)


def some_zeros(*shape: int) -> Source:
    """Numbers of which every third is 0."""

    def draw(generator: np.random.Generator) -> np.ndarray:
        values = generator.uniform(0.5, 2, shape) * generator.choice([-1, 1], shape)
        values.flat[::3] = 0
        return values

    return draw


def unary(operation: ArithmeticOperation) -> Case:
    source, reference, twin = UNARY[operation]
    bad = BAD_UNARY if operation is ArithmeticOperation.FLOOR else ()
    return Case(operation.debug_description, lambda: ArithmeticLayer(operation), (source,), reference, twin, bad=bad)


CASES = [
    *(unary(operation) for operation in UNARY),
    Case("Add", ArithmeticLayer.add, (REAL, REAL), np.add, torch.add, bad=BAD_BINARY),
    Case("Add, rank 1", ArithmeticLayer.add, (normal(1), normal(1)), np.add, torch.add),
    Case("Add, broadcast", ArithmeticLayer.add, (normal(2, 3, 4), normal(3, 1)), np.add, torch.add),
    Case("Subtract", ArithmeticLayer.subtract, (REAL, REAL), np.subtract, torch.sub),
    Case("Subtract, both broadcast", ArithmeticLayer.subtract, (normal(3, 1), normal(1, 4)), np.subtract, torch.sub),
    Case("Multiply", ArithmeticLayer.multiply, (REAL, REAL), np.multiply, torch.mul),
    Case("Multiply, broadcast", ArithmeticLayer.multiply, (normal(4), normal(2, 1, 4)), np.multiply, torch.mul),
    Case("Divide", ArithmeticLayer.divide, (REAL, POSITIVE), np.divide, torch.div),
    Case("Pow", ArithmeticLayer.pow, (POSITIVE, REAL), np.power, torch.pow),
    Case(
        "MultiplyNoNaN",
        ArithmeticLayer.multiply_no_nan,
        (normal(4, 5), some_zeros(4, 5)),
        lambda x, y: np.where(y == 0, 0, x * y),
        torch.mul,  # the same for finite numbers
    ),
    Case(
        "DivideNoNaN",
        ArithmeticLayer.divide_no_nan,
        (normal(4, 5), uniform(5, low=0.5, high=2)),
        np.divide,
        torch.div,
    ),
    Case(
        "DivideNoNaN, zeros",
        ArithmeticLayer.divide_no_nan,
        (normal(4, 5), some_zeros(4, 5)),
        lambda x, y: np.where(y == 0, 0, x / np.where(y == 0, 1, y)),
        differentiable=False,  # it jumps at 0; its gradient there is tested apart
    ),
    Case("ElementwiseMin", ArithmeticLayer.min, (REAL, REAL), np.minimum, torch.minimum),
    Case("ElementwiseMin, broadcast", ArithmeticLayer.min, (normal(3, 4), normal(1)), np.minimum, torch.minimum),
    Case("ElementwiseMax", ArithmeticLayer.max, (REAL, REAL), np.maximum, torch.maximum),
]
