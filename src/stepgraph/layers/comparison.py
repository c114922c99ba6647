"""Comparison layers: relations of numbers and logical operations on booleans, with boolean results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.shape import require_broadcast
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import DataType, RawEnum


class ComparisonOperation(RawEnum):
    """Relations of two numbers, and logical operations on one boolean (NOT) or two."""

    EQUAL = 0, "Equal"
    NOT_EQUAL = 1, "Not Equal"
    LESS = 2, "Less"
    GREATER = 3, "Greater"
    LESS_OR_EQUAL = 4, "Less or Equal"
    GREATER_OR_EQUAL = 5, "Greater or Equal"
    LOGICAL_AND = 6, "Logical AND"
    LOGICAL_OR = 7, "Logical OR"
    LOGICAL_NOT = 8, "Logical NOT"
    LOGICAL_NAND = 9, "Logical NAND"
    LOGICAL_NOR = 10, "Logical NOR"
    LOGICAL_XOR = 11, "Logical XOR"


class ComparisonLayer(Layer):
    """`z = x ? y`, element by element, as booleans; two shapes broadcast as in NumPy. No gradient flows.

    Relations take numbers: both sources floating, or both integers, of any width (an integer cannot be
    compared exactly with a floating-point number). Logical operations take booleans.

    Example:
        >>> layer = ComparisonLayer(ComparisonOperation.LESS)
        >>> str(layer.infer(TensorDescriptor((8, 3)), TensorDescriptor((1,)))[0])
        '[8, 3] boolean'
    """

    operation: ComparisonOperation

    default_label = "Compare"
    source_counts = (1, 2)

    def __post_init__(self) -> None:
        if not isinstance(self.operation, ComparisonOperation):
            raise ArgumentError(
                self.where, f"the operation is {self.operation!r}", fix="use a member of ComparisonOperation"
            )

    @classmethod
    def equal(cls, *, label: str = "") -> ComparisonLayer:
        """`x = y`."""
        return cls(ComparisonOperation.EQUAL, label=label)

    @classmethod
    def not_equal(cls, *, label: str = "") -> ComparisonLayer:
        """`x ≠ y`."""
        return cls(ComparisonOperation.NOT_EQUAL, label=label)

    @classmethod
    def less(cls, *, label: str = "") -> ComparisonLayer:
        """`x < y`."""
        return cls(ComparisonOperation.LESS, label=label)

    @classmethod
    def greater(cls, *, label: str = "") -> ComparisonLayer:
        """`x > y`."""
        return cls(ComparisonOperation.GREATER, label=label)

    @classmethod
    def less_or_equal(cls, *, label: str = "") -> ComparisonLayer:
        """`x ≤ y`."""
        return cls(ComparisonOperation.LESS_OR_EQUAL, label=label)

    @classmethod
    def greater_or_equal(cls, *, label: str = "") -> ComparisonLayer:
        """`x ≥ y`."""
        return cls(ComparisonOperation.GREATER_OR_EQUAL, label=label)

    @classmethod
    def supports_data_type(cls, data_type: DataType, device: Any = None) -> bool:
        """Every type is supported by some operation."""
        return True

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks the number and types of sources and that their shapes broadcast."""
        operation = self.operation
        wanted, kind = (1 if operation in UNARY else 2), ("booleans" if operation in LOGICAL else "numbers")
        if len(sources) != wanted:
            problem = f"{operation.debug_description} takes {wanted} source{'s' * (wanted > 1)}, not {len(sources)}"
            raise ShapeError(self.where, problem, fix="check the node's sources")
        for source in sources:
            if (source.data_type is DataType.BOOLEAN) != (operation in LOGICAL):
                problem = (
                    f"{operation.debug_description} takes {kind}, but a source is {source.data_type.debug_description}"
                )
                raise DataTypeError(self.where, problem, source=source, fix=f"pass {kind}, or use another operation")
        if len({source.data_type.is_floating for source in sources}) > 1:
            kinds = " and ".join(source.data_type.debug_description for source in sources)
            problem = f"{kinds} cannot be compared exactly"
            raise DataTypeError(self.where, problem, fix="make both floating or both integers")
        require_broadcast(self, *(source.shape for source in sources))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, *, scope: Scope) -> torch.Tensor:
        """`x ? y`, or `not x`."""
        return UNARY[self.operation](x) if y is None else BINARY[self.operation](x, y)


UNARY: dict[ComparisonOperation, Callable[[torch.Tensor], torch.Tensor]] = {
    ComparisonOperation.LOGICAL_NOT: torch.logical_not,
}

BINARY: dict[ComparisonOperation, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ComparisonOperation.EQUAL: torch.eq,
    ComparisonOperation.NOT_EQUAL: torch.ne,
    ComparisonOperation.LESS: torch.lt,
    ComparisonOperation.GREATER: torch.gt,
    ComparisonOperation.LESS_OR_EQUAL: torch.le,
    ComparisonOperation.GREATER_OR_EQUAL: torch.ge,
    ComparisonOperation.LOGICAL_AND: torch.logical_and,
    ComparisonOperation.LOGICAL_OR: torch.logical_or,
    ComparisonOperation.LOGICAL_NAND: lambda x, y: torch.logical_not(torch.logical_and(x, y)),
    ComparisonOperation.LOGICAL_NOR: lambda x, y: torch.logical_not(torch.logical_or(x, y)),
    ComparisonOperation.LOGICAL_XOR: torch.logical_xor,
}

LOGICAL = {operation for operation in ComparisonOperation if operation >= ComparisonOperation.LOGICAL_AND}
