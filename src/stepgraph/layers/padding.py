"""Padding: adds rows and columns around images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.shape import whole_number
from stepgraph.layers.window import Pair, require_images
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import RawEnum

Sizes = int | Sequence[int]


class PaddingType(RawEnum):
    """The contents of the padding."""

    ZERO = 0, "Zero"
    REFLECT = 1, "Reflect"
    SYMMETRIC = 2, "Symmetric"
    CONSTANT = 3, "Constant"


class PaddingLayer(Layer):
    """Images with extra rows above and below and extra columns left and right.

    | type | two columns left of `a b c` | maximum columns |
    |---|---|---|
    | `ZERO` | `0 0`, then `a b c` | any number |
    | `CONSTANT` | `v v`, with `v = constant_value` | any number |
    | `REFLECT` | `c b`: mirrored without the border | one less than the image |
    | `SYMMETRIC` | `b a`: mirrored with the border | as many as the image |

    Shapes: `[batch, channels, height, width] → [batch, channels, top + height + bottom, left + width + right]`. The
    gradient of a pixel is the sum over its mirror images. PyTorch has no symmetric padding.

    The factories take the original's arrays: `v` or `[v]` for all sides, `[left, right]`, or
    `[top, bottom, left, right]`.

    Example:
        >>> PaddingLayer.zero([1, 2]).infer(TensorDescriptor((8, 3, 5, 5)))[0].shape
        (8, 3, 5, 8)
    """

    padding_type: PaddingType
    _: KW_ONLY
    padding_left: int = 0
    padding_right: int = 0
    padding_top: int = 0
    padding_bottom: int = 0
    constant_value: float = 0.0

    default_label = "Padding"

    def __post_init__(self) -> None:
        if not isinstance(self.padding_type, PaddingType):
            problem = f"padding_type is {self.padding_type!r}"
            raise ArgumentError(self.where, problem, fix="use a member of PaddingType")
        for name in ("padding_left", "padding_right", "padding_top", "padding_bottom"):
            object.__setattr__(self, name, whole_number(self, name, getattr(self, name)))
        value = self.constant_value
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise ArgumentError(self.where, f"constant_value is {value!r}", fix="pass a number")
        object.__setattr__(self, "constant_value", float(value))

    @classmethod
    def reflection(cls, padding: Sizes, *, label: str = "") -> PaddingLayer:
        """The image mirrored at its border, which is not repeated."""
        return cls(PaddingType.REFLECT, **_sides(padding), label=label)

    @classmethod
    def symmetric(cls, padding: Sizes, *, label: str = "") -> PaddingLayer:
        """The image mirrored with its border."""
        return cls(PaddingType.SYMMETRIC, **_sides(padding), label=label)

    @classmethod
    def zero(cls, padding: Sizes, *, label: str = "") -> PaddingLayer:
        """Zeros."""
        return cls(PaddingType.ZERO, **_sides(padding), label=label)

    @classmethod
    def constant(cls, padding: Sizes, value: float, *, label: str = "") -> PaddingLayer:
        """The same value everywhere."""
        return cls(PaddingType.CONSTANT, **_sides(padding), constant_value=value, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source is a batch of images that are large enough to be mirrored."""
        super().check(*sources)
        (source,) = sources
        require_images(self, source)
        if self.padding_type not in _BORDERS:
            return
        for name, size, padding in zip(("rows", "columns"), source.shape[2:], self._axes, strict=True):
            most = size - _BORDERS[self.padding_type]
            if max(padding) > most:
                problem = f"{max(padding)} {name} of padding, but {size} {name} have only {most} to mirror"
                raise ShapeError(self.where, problem, source=source, fix=f"pad by {most} {name} at most")

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """The image with its padding."""
        rows, columns = self._axes
        return PADDINGS[self.padding_type](x, rows, columns, self.constant_value)

    @property
    def _axes(self) -> tuple[Pair, Pair]:
        """(before, after) of the rows, then of the columns."""
        return (self.padding_top, self.padding_bottom), (self.padding_left, self.padding_right)


def pad_symmetric(x: torch.Tensor, *, rows: Pair, columns: Pair) -> torch.Tensor:
    """`x` between its mirrored borders; concatenation is faster than indexing, forward and backward."""
    for axis, (before, after) in ((3, columns), (2, rows)):
        first, last = x.narrow(axis, 0, before), x.narrow(axis, x.shape[axis] - after, after)
        parts = [part for part in (first.flip(axis), x, last.flip(axis)) if part.shape[axis]]
        x = torch.cat(parts, axis) if len(parts) > 1 else x
    return x


PADDINGS: dict[PaddingType, Callable[[torch.Tensor, Pair, Pair, float], torch.Tensor]] = {
    PaddingType.ZERO: lambda x, rows, columns, _: F.pad(x, (*columns, *rows)),
    PaddingType.REFLECT: lambda x, rows, columns, _: F.pad(x, (*columns, *rows), "reflect"),
    PaddingType.SYMMETRIC: lambda x, rows, columns, _: pad_symmetric(x, rows=rows, columns=columns),
    PaddingType.CONSTANT: lambda x, rows, columns, value: F.pad(x, (*columns, *rows), value=value),
}

_BORDERS = {PaddingType.REFLECT: 1, PaddingType.SYMMETRIC: 0}  # pixels of the image that are not mirrored


def _sides(padding: Sizes) -> dict[str, Any]:
    """`v`, `[v]`, `[left, right]` or `[top, bottom, left, right]` by name."""
    sizes = list(padding) if isinstance(padding, Sequence) else [padding]
    match sizes:
        case [every]:
            top = bottom = left = right = every
        case [left, right]:
            top = bottom = 0
        case [top, bottom, left, right]:
            pass
        case _:
            problem = f"the padding {padding!r} has {len(sizes)} entries"
            fix = "pass [v], [left, right] or [top, bottom, left, right]"
            raise ArgumentError("PaddingLayer", problem, fix=fix)
    return {"padding_left": left, "padding_right": right, "padding_top": top, "padding_bottom": bottom}
