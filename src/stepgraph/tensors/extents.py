"""Extents that follow the batch: `BATCH`, and what layers make of it.

A graph wired with `BATCH` has no declared number of rows. Layers infer shapes by running on arrays without memory, so
such a graph is wired with two numbers of rows at once: extents that differ between them follow the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from stepgraph.errors import ShapeError

# The numbers of rows that stand for any number; both have many divisors, so that batches can be divided.
PROBES = (12, 24)


class BatchExtent(int):
    """`multiple · BATCH + offset`, known once a call brings its rows.

    As an integer it is its value for the first of `PROBES`, so that arithmetic works. It equals only the same extent,
    never a number.

    Args:
        multiple: how often each row counts.
        offset: what is added.

    Example:
        >>> 2 * BATCH, (2 * BATCH).at(5), BATCH == 12
        (2·BATCH, 10, False)
    """

    multiple: Fraction
    offset: int

    def __new__(cls, multiple: Fraction | int = 1, offset: int = 0) -> BatchExtent:
        extent = super().__new__(cls, multiple * PROBES[0] + offset)
        extent.multiple, extent.offset = Fraction(multiple), offset
        return extent

    def __getnewargs__(self) -> tuple[Fraction, int]:  # type: ignore[override]
        return self.multiple, self.offset

    def at(self, rows: int) -> int:
        """The extent for a number of rows."""
        # Only operators of integers, so that PyTorch's symbolic number of rows stays symbolic.
        rows = int(rows) if isinstance(rows, int) else rows
        return rows * self.multiple.numerator // self.multiple.denominator + self.offset

    def rows(self, extent: int) -> int | None:
        """The number of rows for which this extent is `extent`; None if there is none."""
        times, parts = self.multiple.as_integer_ratio()  # dividing by a fraction takes as long as a small operator
        rows, rest = divmod((extent - self.offset) * parts, times)
        return rows if not rest and rows > 0 else None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchExtent) and (self.multiple, self.offset) == (other.multiple, other.offset)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((BatchExtent, self.multiple, self.offset))

    def __mul__(self, other: Any) -> Any:
        return BatchExtent(self.multiple * other, self.offset * other) if _is_number(other) else int(self) * other

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        return BatchExtent(self.multiple, self.offset + other) if _is_number(other) else int(self) + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self + -other if _is_number(other) else int(self) - other

    def __floordiv__(self, other: Any) -> Any:
        divides = _is_number(other) and self.offset % other == 0
        return BatchExtent(self.multiple / other, self.offset // other) if divides else int(self) // other

    def __repr__(self) -> str:
        times, share = self.multiple.numerator, self.multiple.denominator
        product = f"{times}·BATCH" if times != 1 else "BATCH"
        product += f"/{share}" if share != 1 else ""
        return f"{product}{self.offset:+d}" if self.offset else product

    __str__ = __repr__

    def __format__(self, form: str) -> str:
        return repr(self)


BATCH = BatchExtent()
"""The rows of a call, as the first extent of a tensor: `Tensor((BATCH, 784))`."""


def _is_number(value: Any) -> bool:
    return type(value) is int and value != 0


def follows_batch(extent: int, declared: int) -> bool:
    """Whether a first extent is the number of rows of a call, in a graph with a declared batch size or `BATCH`."""
    return isinstance(extent, BatchExtent) if isinstance(declared, BatchExtent) else extent == declared


def shape_at(shape: tuple[int, ...], declared: int, rows: int) -> tuple[int, ...]:
    """The shape of a fed tensor in a call with `rows` rows."""
    if isinstance(declared, BatchExtent):
        return tuple(extent.at(rows) if isinstance(extent, BatchExtent) else extent for extent in shape)
    return (rows, *shape[1:]) if shape[0] == declared else shape


def can_be_cut(shape: Sequence[int]) -> bool:
    """Whether parts of a batch are parts of an array of this shape: its rows, or equally many for each of the batch."""
    follows = [extent for extent in shape if isinstance(extent, BatchExtent)]
    return not follows or (follows == [shape[0]] and not follows[0].offset and follows[0].multiple.denominator == 1)


def is_open(shape: Sequence[int]) -> bool:
    """Whether any extent follows the batch."""
    return any(isinstance(extent, BatchExtent) for extent in shape)


def joined(first: Sequence[int], second: Sequence[int], where: str) -> tuple[int, ...]:
    """One shape from those that a layer returned for each of `PROBES`."""
    if len(first) != len(second):
        problem = f"its result has {len(first)} or {len(second)} dimensions, depending on the number of rows"
        raise ShapeError(where, problem, fix="declare the number of rows instead of BATCH")
    return tuple(_joined(one, two, where) for one, two in zip(first, second, strict=True))


def _joined(first: int, second: int, where: str) -> int:
    if first == second:
        return int(first)
    if second < first:
        rows = " and ".join(f"{extent} for {rows} rows" for extent, rows in zip((first, second), PROBES, strict=True))
        raise ShapeError(where, f"an extent of its result is {rows}", fix="declare the number of rows instead of BATCH")
    multiple = Fraction(second - first, PROBES[1] - PROBES[0])
    return BatchExtent(multiple, int(first - multiple * PROBES[0]))
