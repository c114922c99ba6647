"""Arithmetic layers: functions of one source, and of two sources with NumPy's broadcasting."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import RawEnum


class ArithmeticOperation(RawEnum):
    """Operations on one source (x) or two (x, y)."""

    ADD = 0, "Add"
    SUBTRACT = 1, "Subtract"
    MULTIPLY = 2, "Multiply"
    DIVIDE = 3, "Divide"
    FLOOR = 4, "Floor"
    ROUND = 5, "Round"  # halves round to even
    CEIL = 6, "Ceil"
    SQRT = 7, "Sqrt"
    RSQRT = 8, "Rsqrt"
    SIN = 9, "Sin"
    COS = 10, "Cos"
    TAN = 11, "Tan"
    ASIN = 12, "Asin"
    ACOS = 13, "Acos"
    ATAN = 14, "Atan"
    SINH = 15, "Sinh"
    COSH = 16, "Cosh"
    TANH = 17, "Tanh"
    ASINH = 18, "Asinh"
    ACOSH = 19, "Acosh"
    ATANH = 20, "Atanh"
    POW = 21, "Pow"
    EXP = 22, "Exp"
    EXP2 = 23, "Exp2"
    LOG = 24, "Log"
    LOG2 = 25, "Log2"
    MULTIPLY_NO_NAN = 26, "MultiplyNoNaN"  # 0 where y is 0, whatever x is
    DIVIDE_NO_NAN = 27, "DivideNoNaN"  # 0 where y is 0
    MIN = 28, "ElementwiseMin"
    MAX = 29, "ElementwiseMax"


class ArithmeticLayer(Layer):
    """`z = f(x)` or `z = f(x, y)`, element by element; two shapes are broadcast as NumPy does.

    The gradient of a broadcast source is summed over the copies. Where the derivative is undefined: `min`
    and `max` of equal numbers pass it to `x` (PyTorch: half to each), a power of 0 passes none to the exponent,
    `floor`, `round` and `ceil` pass none. `MULTIPLY_NO_NAN` and `DIVIDE_NO_NAN` have finite gradients where
    `y` is 0, even for an infinite `x`.

    Example:
        >>> ArithmeticLayer.add().infer(TensorDescriptor((8, 3, 4)), TensorDescriptor((3, 1)))[0].shape
        (8, 3, 4)
    """

    operation: ArithmeticOperation

    default_label = "Arithmetic"
    source_counts = (1, 2)

    def __post_init__(self) -> None:
        if not isinstance(self.operation, ArithmeticOperation):
            raise ArgumentError(
                self.where, f"the operation is {self.operation!r}", fix="use a member of ArithmeticOperation"
            )

    @classmethod
    def add(cls, *, label: str = "") -> ArithmeticLayer:
        """`x + y`."""
        return cls(ArithmeticOperation.ADD, label=label)

    @classmethod
    def subtract(cls, *, label: str = "") -> ArithmeticLayer:
        """`x - y`."""
        return cls(ArithmeticOperation.SUBTRACT, label=label)

    @classmethod
    def multiply(cls, *, label: str = "") -> ArithmeticLayer:
        """`x y`."""
        return cls(ArithmeticOperation.MULTIPLY, label=label)

    @classmethod
    def divide(cls, *, label: str = "") -> ArithmeticLayer:
        """`x / y`."""
        return cls(ArithmeticOperation.DIVIDE, label=label)

    @classmethod
    def pow(cls, *, label: str = "") -> ArithmeticLayer:
        """`x` to the power of `y`."""
        return cls(ArithmeticOperation.POW, label=label)

    @classmethod
    def multiply_no_nan(cls, *, label: str = "") -> ArithmeticLayer:
        """`x y`, and 0 where `y` is 0."""
        return cls(ArithmeticOperation.MULTIPLY_NO_NAN, label=label)

    @classmethod
    def divide_no_nan(cls, *, label: str = "") -> ArithmeticLayer:
        """`x / y`, and 0 where `y` is 0."""
        return cls(ArithmeticOperation.DIVIDE_NO_NAN, label=label)

    @classmethod
    def min(cls, *, label: str = "") -> ArithmeticLayer:
        """The smaller of `x` and `y`."""
        return cls(ArithmeticOperation.MIN, label=label)

    @classmethod
    def max(cls, *, label: str = "") -> ArithmeticLayer:
        """The larger of `x` and `y`."""
        return cls(ArithmeticOperation.MAX, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks the number of sources and that their shapes broadcast."""
        super().check(*sources)
        wanted = 2 if self.operation in BINARY else 1
        if len(sources) != wanted:
            raise ShapeError(
                self.where,
                f"{self.operation.debug_description} takes {wanted} source{'s' * (wanted > 1)}, not {len(sources)}",
                fix="check the node's sources",
            )
        if wanted == 2 and not _broadcast(sources[0].shape, sources[1].shape):
            raise ShapeError(
                self.where,
                f"the shapes {list(sources[0].shape)} and {list(sources[1].shape)} do not broadcast",
                fix="make their dimensions equal or 1, counted from the last one",
            )

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, *, scope: Scope) -> torch.Tensor:
        """`f(x)` or `f(x, y)`."""
        return UNARY[self.operation](x) if y is None else BINARY[self.operation](x, y)


def multiply_no_nan(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x y`, and 0 where `y` is 0; the derivative with respect to `y` is `x` there, or 0 if `x` is not finite."""
    return torch.where((y == 0) & ~torch.isfinite(x), 0.0, x) * y


def divide_no_nan(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`x / y`, and 0 with derivatives 0 where `y` is 0."""
    zero = y == 0
    return torch.where(zero, 0.0, x) / torch.where(zero, 1.0, y)


def minimum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The smaller of both; equal numbers pass the gradient to `x`. NaN in either gives NaN."""
    return torch.where(x <= y, x, torch.minimum(x.detach(), y))


def maximum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The larger of both; equal numbers pass the gradient to `x`. NaN in either gives NaN."""
    return torch.where(x >= y, x, torch.maximum(x.detach(), y))


UNARY: dict[ArithmeticOperation, Callable[[torch.Tensor], torch.Tensor]] = {
    ArithmeticOperation.FLOOR: torch.floor,
    ArithmeticOperation.ROUND: torch.round,
    ArithmeticOperation.CEIL: torch.ceil,
    ArithmeticOperation.SQRT: torch.sqrt,
    ArithmeticOperation.RSQRT: torch.rsqrt,
    ArithmeticOperation.SIN: torch.sin,
    ArithmeticOperation.COS: torch.cos,
    ArithmeticOperation.TAN: torch.tan,
    ArithmeticOperation.ASIN: torch.asin,
    ArithmeticOperation.ACOS: torch.acos,
    ArithmeticOperation.ATAN: torch.atan,
    ArithmeticOperation.SINH: torch.sinh,
    ArithmeticOperation.COSH: torch.cosh,
    ArithmeticOperation.TANH: torch.tanh,
    ArithmeticOperation.ASINH: torch.asinh,
    ArithmeticOperation.ACOSH: torch.acosh,
    ArithmeticOperation.ATANH: torch.atanh,
    ArithmeticOperation.EXP: torch.exp,
    ArithmeticOperation.EXP2: torch.exp2,
    ArithmeticOperation.LOG: torch.log,
    ArithmeticOperation.LOG2: torch.log2,
}

BINARY: dict[ArithmeticOperation, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ArithmeticOperation.ADD: torch.add,
    ArithmeticOperation.SUBTRACT: torch.sub,
    ArithmeticOperation.MULTIPLY: torch.mul,
    ArithmeticOperation.DIVIDE: torch.div,
    ArithmeticOperation.POW: torch.pow,
    ArithmeticOperation.MULTIPLY_NO_NAN: multiply_no_nan,
    ArithmeticOperation.DIVIDE_NO_NAN: divide_no_nan,
    ArithmeticOperation.MIN: minimum,
    ArithmeticOperation.MAX: maximum,
}


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(reversed(first), reversed(second), strict=False))
