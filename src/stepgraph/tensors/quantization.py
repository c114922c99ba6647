"""Real numbers as small integers and back, with one scale or one per index of an axis.

    y = round(scale * x + bias), clamped to the range of the type
    x = (y - bias) / scale

The scale multiplies when quantizing, as in ML Compute's own backend; PyTorch divides by its scale. `bias` is the
integer that represents zero. Halves round to even. Everything is computed in float64, so ties are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from stepgraph.errors import ArgumentError, DataError, DataTypeError, ShapeError
from stepgraph.types import DataType

Array = torch.Tensor
QUANTIZED = (DataType.INT8, DataType.UINT8, DataType.INT32)


class Values(Protocol):
    """Numbers of one type with a shape: the part of a tensor that this module needs."""

    @property
    def where(self) -> str:
        """Its name in messages."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extents."""

    @property
    def data_type(self) -> DataType:
        """The type of its numbers."""

    def torch(self) -> Array:
        """The numbers."""


Numbers = float | Values | np.ndarray | torch.Tensor | Sequence[float]


def quantize(tensor: Values, data_type: Any, *, scale: Numbers, bias: Numbers, axis: int | None = None) -> torch.Tensor:
    """`round(scale * x + bias)`, saturating at the range of the type.

    Args:
        tensor: float32, with data; infinities become the limits of the type, NaN is rejected.
        data_type: int8, uint8 or int32.
        scale: a finite number other than 0; with `axis`, also one per index along it.
        bias: the integer that represents zero; with `axis`, also one per index along it.
        axis: the dimension along which scales and biases differ; None for a single pair.

    Example:
        >>> x = Tensor((4,), data=np.array([1, 2, 3, 4], np.float32))
        >>> x.quantized(DataType.INT32, scale=[1, 10, 100, 1000], bias=0, axis=0).data
        array([   1,   20,  300, 4000], dtype=int32)
    """
    target = _type(tensor.where, data_type, QUANTIZED, "quantized to")
    _type(tensor.where, tensor.data_type, (DataType.FLOAT32,), "quantized from")
    factor, zero = _along(tensor, "scale", scale, axis), _along(tensor, "bias", bias, axis)
    x = tensor.torch().detach().cpu().double()
    if x.isnan().any():
        raise DataError(tensor.where, f"{int(x.isnan().sum())} elements are NaN", fix="replace them first")
    limits = torch.iinfo(target.torch)
    y = (factor * x + zero).round_().clamp_(limits.min, limits.max)
    return y.to(target.torch)


def dequantize(
    tensor: Values, data_type: Any, *, scale: Numbers, bias: Numbers, axis: int | None = None
) -> torch.Tensor:
    """`(y - bias) / scale`, with the scale and bias passed to `quantize`.

    Args:
        tensor: int8, uint8 or int32, with data.
        data_type: float32.
        scale: a finite number other than 0; with `axis`, also one per index along it.
        bias: the integer that represents zero; with `axis`, also one per index along it.
        axis: the dimension along which scales and biases differ; None for a single pair.

    Example:
        >>> y = Tensor((3,), "uint8", data=np.array([118, 128, 148], np.uint8))
        >>> y.dequantized(DataType.FLOAT32, scale=20.0, bias=128).data
        array([-0.5,  0. ,  1. ], dtype=float32)
    """
    target = _type(tensor.where, data_type, (DataType.FLOAT32,), "dequantized to")
    _type(tensor.where, tensor.data_type, QUANTIZED, "dequantized from")
    factor, zero = _along(tensor, "scale", scale, axis), _along(tensor, "bias", bias, axis)
    y = tensor.torch().detach().cpu().double()
    return ((y - zero) / factor).to(target.torch)


def _type(where: str, given: Any, allowed: Sequence[DataType], verb: str) -> DataType:
    kind = DataType.of(given)
    if kind not in allowed:
        names = ", ".join(one.debug_description for one in allowed)
        raise DataTypeError(where, f"nothing is {verb} {kind.debug_description}", fix=f"use {names}")
    return kind


def _along(tensor: Values, name: str, given: Numbers, axis: int | None) -> torch.Tensor:
    """The scale or bias as float64, shaped to broadcast along `axis`."""
    values = _numbers(tensor.where, name, given)
    if not values.isfinite().all() or (name == "scale" and (values == 0).any()):
        wanted = "finite, and not 0" if name == "scale" else "finite"
        raise ArgumentError(tensor.where, f"the {name} is {values.tolist()}", fix=f"pass numbers that are {wanted}")
    shape, rank = tensor.shape, len(tensor.shape)
    if axis is None:
        if values.numel() != 1:
            raise ShapeError(
                tensor.where, f"the {name} has {values.numel()} numbers for a tensor {list(shape)}", fix="pass axis="
            )
        return values.reshape(())
    if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
        raise ArgumentError(
            tensor.where, f"the axis is {axis!r}, but the shape is {list(shape)}", fix=f"use 0 to {rank - 1}"
        )
    if values.ndim == 0:
        return values
    if max(values.shape) != values.numel() or values.numel() != shape[axis]:
        raise ShapeError(
            tensor.where,
            f"the {name} has shape {list(values.shape)}, axis {axis} of the tensor has {shape[axis]} indices",
            tensor=f"{tensor.data_type.debug_description} {list(shape)}",
            fix=f"pass {shape[axis]} numbers, or one number for all",
        )
    return values.reshape([shape[axis] if i == axis % rank else 1 for i in range(rank)])


def _numbers(where: str, name: str, given: Any) -> torch.Tensor:
    array = given.torch() if hasattr(given, "torch") else given  # of a Tensor
    if isinstance(array, torch.Tensor) and array.dtype != torch.bool and not array.is_complex():
        return array.detach().cpu().double()
    try:
        values = np.asarray(array)
    except (TypeError, ValueError, RuntimeError):
        values = np.empty(0)
    if values.dtype.kind not in "iuf" or not values.size:
        raise DataTypeError(where, f"the {name} is {given!r}", fix="pass a number, numbers or a Tensor of numbers")
    return torch.from_numpy(values.astype(np.float64))
