"""Memory from anywhere, seen as torch arrays without a copy.

`read` turns what a caller hands over (NumPy, DLPack, torch, any buffer, nested numbers) into an array of a descriptor's
shape and type; `write` puts an array into the caller's memory. Raw memory (`TensorData`, bytes) is taken as it is:
longer than needed is fine, the rest is ignored; shorter is refused. Shaped arrays must have the shape.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stepgraph.errors import DataError, DataTypeError, ShapeError
from stepgraph.types import DataType


class TensorData:
    """Raw host memory: a view over somebody's buffer that is never copied and never owned.

    Args:
        buffer: an ndarray, a torch tensor on the CPU, a bytearray, a memoryview, anything with DLPack or the buffer
            protocol. Bytes that may not be written (`bytes`, read-only arrays) are copied, since results go in place.
        deallocator: called once when this object goes away.

    Example:
        >>> TensorData(np.zeros(4, np.float32)).length
        16
    """

    def __init__(self, buffer: Any, *, deallocator: Callable[[], object] | None = None) -> None:
        self._bytes = _flat_bytes(as_array(buffer, "TensorData"))
        if deallocator is not None:
            weakref.finalize(self, deallocator)

    @property
    def bytes(self) -> memoryview:
        """The memory itself; writing here writes there."""
        return memoryview(self._bytes.numpy())  # type: ignore[arg-type]

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self._bytes.numel()

    def array(self, dtype: torch.dtype) -> torch.Tensor:
        """The memory as a flat array of whole elements of `dtype`, sharing it."""
        usable = self.length - self.length % dtype.itemsize
        memory = self._bytes[:usable]
        # An odd address cannot be viewed as wider elements; such memory is rare and is copied.
        return (memory if memory.data_ptr() % dtype.itemsize == 0 else memory.clone()).view(dtype)

    def __repr__(self) -> str:
        return f"TensorData({self.length} bytes)"


def as_array(data: Any, where: str) -> torch.Tensor:
    """`data` as a torch array of its own type and shape, sharing its memory where that may be written."""
    if isinstance(data, torch.Tensor):
        return data.detach()
    try:
        if not isinstance(data, np.ndarray) and hasattr(data, "__dlpack__"):
            return torch.from_dlpack(data)
        values = np.asarray(data)
        writable = values.flags.writeable and values.dtype.isnative and all(step >= 0 for step in values.strides)
        return torch.from_numpy(values if writable else np.array(values, values.dtype.newbyteorder("=")))
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        message = f"{type(data).__name__} cannot be seen as an array ({error})"
        raise DataTypeError(where, message, fix="give NumPy, torch, DLPack or bytes") from None


def read(data: Any, shape: Sequence[int], data_type: DataType, where: str) -> torch.Tensor:
    """An array of `shape` and `data_type` over `data`, without a copy where its memory allows it."""
    if isinstance(data, TensorData | bytes | bytearray):
        raw = data if isinstance(data, TensorData) else TensorData(np.frombuffer(data, np.uint8))
        return _take(raw.array(data_type.torch), shape, data_type, where, given=f"{raw.length} bytes")
    if isinstance(data, list | tuple | int | float):
        data = np.asarray(data, _numpy_type(data_type))
    array = as_array(data, where)
    if array.dtype != data_type.torch:
        raise DataTypeError(
            where,
            f"the data is {str(array.dtype).removeprefix('torch.')}, the tensor is {data_type.debug_description}",
            fix=f"convert it first, for example .astype(np.{data_type.debug_description})",
        )
    return _fit(array, shape, data_type, where)


def write(array: torch.Tensor, target: Any, where: str) -> None:
    """Copies `array` into the caller's memory."""
    destination(target, array.shape, DataType.of(array.dtype), where).copy_(array)


def destination(destination: Any, shape: Sequence[int], data_type: DataType, where: str) -> torch.Tensor:
    """The caller's memory as an array to write to."""
    if isinstance(destination, bytes | str | list | tuple | int | float):
        raise DataError(where, f"{type(destination).__name__} cannot be written to", fix="give an ndarray or bytearray")
    if isinstance(destination, np.ndarray) and not destination.flags.writeable:
        raise DataError(where, "the array given for the output is read-only", fix="give a writable array")
    if isinstance(destination, bytearray | memoryview):
        destination = TensorData(np.frombuffer(destination, np.uint8))
    return read(destination, shape, data_type, where)


def _fit(array: torch.Tensor, shape: Sequence[int], data_type: DataType, where: str) -> torch.Tensor:
    given, wanted = tuple(array.shape), tuple(shape)
    if given == wanted:
        return array
    if array.ndim <= 1 or _without_ones(given) == _without_ones(wanted):
        return _take(array.reshape(-1), shape, data_type, where, given=f"{array.nbytes} bytes, shape {given}")
    if given[1:] == wanted[1:] or _without_ones(given[1:]) == _without_ones(wanted[1:]):
        rows = array.reshape(given[0], -1)
        return _take(rows.reshape(-1), shape, data_type, where, given=f"{array.nbytes} bytes, shape {given}")
    raise ShapeError(
        where, f"the data has shape {given}, the tensor has shape {wanted}", fix="reshape or flatten the data"
    )


def _take(flat: torch.Tensor, shape: Sequence[int], data_type: DataType, where: str, given: str) -> torch.Tensor:
    count = math.prod(shape)
    if flat.numel() < count:
        needed = count * data_type.element_size
        raise DataError(
            where,
            f"the data is too short: {flat.numel() * data_type.element_size} bytes for {needed} bytes",
            given=given,
            needed=f"{needed} bytes, shape {tuple(shape)} of {data_type.debug_description}",
            fix="give at least that much, or pass batch_size= for a batch with fewer rows",
        )
    return flat[:count].view(tuple(shape))


def _flat_bytes(array: torch.Tensor) -> torch.Tensor:
    if not array.is_cpu or not array.is_contiguous():
        kind = "not contiguous" if array.is_cpu else f"on {array.device}"
        raise DataError("TensorData", f"the memory is {kind}", fix="give contiguous host memory")
    return array.reshape(-1).view(torch.uint8)


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def _numpy_type(data_type: DataType) -> Any:
    return (
        np.float32
        if data_type is DataType.BFLOAT16
        else ("bool" if data_type is DataType.BOOLEAN else data_type.debug_description)
    )
