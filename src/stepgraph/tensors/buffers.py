"""Memory from any source as torch arrays, without a copy.

`read` turns the caller's data (NumPy, DLPack, torch, any buffer, nested numbers) into an array of a descriptor's
shape and type; `write` copies an array into the caller's memory. Raw memory (`TensorData`, bytes) is used directly:
it may be longer than needed, the rest is ignored; shorter memory is rejected. Shaped arrays must have the shape.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from stepgraph.errors import DataError, DataTypeError, ShapeError, reason
from stepgraph.system import torch_private
from stepgraph.types import DataType


class TensorData:
    """Raw host memory: a view of an existing buffer that is never copied and never owned.

    Args:
        buffer: an ndarray, a torch tensor on the CPU, a bytearray, a memoryview, anything with DLPack or the buffer
            protocol. Read-only memory (`bytes`, read-only arrays) is copied, since results are written in place.
        deallocator: called once when nothing reads the memory any more: neither this object nor any tensor over it.

    Example:
        >>> TensorData(np.zeros(4, np.float32)).length
        16
    """

    def __init__(self, buffer: Any, *, deallocator: Callable[[], object] | None = None) -> None:
        raw = np.frombuffer(buffer, np.uint8) if isinstance(buffer, bytes) else buffer
        self._bytes = _flat_bytes(as_array(raw, "TensorData"))
        if deallocator is not None:
            self._bytes = _released(self._bytes, deallocator)

    @property
    def bytes(self) -> memoryview:
        """The memory itself; writes go to the original buffer."""
        return memoryview(self._bytes.numpy())  # type: ignore[arg-type]

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self._bytes.numel()

    def array(self, dtype: torch.dtype) -> torch.Tensor:
        """The memory as a flat array of complete elements of `dtype`, sharing it."""
        usable = self.length - self.length % dtype.itemsize
        memory = self._bytes[:usable]
        # An odd address cannot be viewed as wider elements; such memory is rare and is copied.
        return (memory if memory.data_ptr() % dtype.itemsize == 0 else memory.clone()).view(dtype)

    def __repr__(self) -> str:
        return f"TensorData({self.length} bytes)"


def as_array(data: Any, where: str) -> torch.Tensor:
    """`data` as a torch array of its own type and shape, sharing its memory if that is writable."""
    if isinstance(data, torch.Tensor):
        _require_plain(data, where)
        return data.detach().resolve_neg()
    try:
        if not isinstance(data, np.ndarray) and hasattr(data, "__dlpack__"):
            return torch.from_dlpack(data)
        seen = np.asanyarray(data)
    except Exception as error:  # a foreign `__array__` or `__dlpack__` can raise anything
        raise _not_an_array(data, where, error) from error
    values = unmasked(seen, where)
    if values.dtype.kind not in "biufc":
        raise DataTypeError(
            where,
            f"{type(data).__name__} holds {values.dtype} elements, not numbers",
            fix="convert it first, for example .astype(np.float32)",
        )
    try:
        writable = values.flags.writeable and values.dtype.isnative and all(step >= 0 for step in values.strides)
        return torch.from_numpy(values if writable else np.array(values, values.dtype.newbyteorder("=")))
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_an_array(data, where, error) from error


def _not_an_array(data: Any, where: str, error: Exception) -> DataTypeError:
    message = f"{type(data).__name__} cannot be read as an array ({reason(error).partition('. ')[0]})"
    return DataTypeError(where, message, fix="pass NumPy, torch, DLPack or bytes")


def unmasked(array: np.ndarray, where: str) -> np.ndarray:
    """The array without its mask; rejects masked elements, whose values are meaningless."""
    if type(array) is np.ndarray:  # as a rule; NumPy takes a while to load its masked arrays
        return array
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        problem = f"masked elements: {np.ma.count_masked(array)} of {array.size}"
        raise DataError(where, problem, fix="choose their values: .filled(value)")
    return np.asarray(array)


def _require_plain(array: torch.Tensor, where: str) -> None:
    """Rejects torch arrays that are not dense numbers: sparse, nested, quantized, or without memory."""
    if array.layout is torch.strided and not (array.is_nested or array.is_quantized or array.is_meta):
        if isinstance(array, torch_private.FakeTensor):
            raise DataTypeError(where, "a fake tensor holds no numbers", fix="pass its data")
        return
    if array.is_meta:
        raise DataTypeError(where, "the torch tensor is on the meta device and holds no numbers", fix="pass its data")
    kind = "nested" if array.is_nested else "quantized" if array.is_quantized else None
    kind = kind or str(array.layout).removeprefix("torch.").removeprefix("_")
    fix = {"nested": "to_padded_tensor(0.0)", "quantized": "dequantize()"}.get(kind, "to_dense()")
    raise DataTypeError(where, f"the torch tensor is {kind}, not dense", fix=f"convert it first, with .{fix}")


def read(
    data: Any, shape: Sequence[int], data_type: DataType, where: str, exact: bool = False, channels_last: bool = False
) -> torch.Tensor:
    """An array of `shape` and `data_type` over `data`, without a copy if its memory allows it.

    With `exact`, an array with more rows is rejected instead of reading the first ones; raw memory may be longer. With
    `channels_last`, images may have their channels last in memory.
    """
    # Checked first, because in a loop the data usually needs no conversion.
    kind = type(data)
    if kind is torch.Tensor and data.layout is torch.strided and not (data.is_meta or data.is_nested):
        if data.dtype is data_type.torch and data.shape == shape and _is_in_order(data, channels_last):
            return data.detach() if data.requires_grad else data
    elif kind is np.ndarray and data.shape == shape and data.dtype == data_type.numpy:
        flags = data.flags
        if flags.c_contiguous and flags.writeable:
            try:
                return torch.from_numpy(data)
            except ValueError:  # one row of an array in reverse order counts as contiguous; it is copied
                pass
    if isinstance(data, TensorData | bytes | bytearray) or (isinstance(data, memoryview) and data.format == "B"):
        raw = data if isinstance(data, TensorData) else TensorData(np.frombuffer(data, np.uint8))
        return _take(raw.array(data_type.torch), shape, data_type, where, given=f"{raw.length} bytes")
    array = _numbers(data, data_type, where) if isinstance(data, list | tuple | int | float) else as_array(data, where)
    if array.dtype != data_type.torch:
        raise DataTypeError(
            where,
            f"the data is {str(array.dtype).removeprefix('torch.')}, but the tensor is {data_type.debug_description}",
            fix=f"convert it first, for example .astype(np.{data_type.debug_description})",
        )
    if exact and array.numel() > math.prod(shape):
        _refuse_more(array, shape, where)
    fitting = _fit(array, shape, data_type, where)
    return fitting if _is_in_order(fitting, channels_last) else fitting.contiguous()


def _is_in_order(array: torch.Tensor, channels_last: bool) -> bool:
    """Whether a compiled step can read an array as it is: its rows are contiguous, or its channels may be last."""
    if array.is_neg():  # its signs are only noted
        return False
    return array.is_contiguous() or (
        channels_last and array.ndim == 4 and array.is_contiguous(memory_format=torch.channels_last)
    )


def _refuse_more(array: torch.Tensor, shape: Sequence[int], where: str) -> None:
    """Rejects an array of the right shape but with more rows than a call reads."""
    rows, rest = divmod(array.numel(), math.prod(shape[1:]))
    if rest == 0 and (array.ndim <= 1 or _without_ones(array.shape[1:]) == _without_ones(shape[1:])):
        raise DataError(
            where,
            f"the data has {rows} rows, but the call reads {shape[0]}",
            given=f"shape {tuple(array.shape)}",
            needed=f"shape {tuple(shape)}",
            fix=f"pass {shape[0]} rows, or batch_size=; sg.predict and sg.evaluate divide any number into batches",
        )


def write(array: torch.Tensor, target: Any, where: str) -> None:
    """Copies `array` into the caller's memory."""
    destination(target, array.shape, DataType.of(array.dtype), where).copy_(array)


def destination(target: Any, shape: Sequence[int], data_type: DataType, where: str) -> torch.Tensor:
    """The caller's memory as an array to write to; rejected if writes would not reach it."""
    require_writable(target, where)
    memory = TensorData(np.frombuffer(target, np.uint8)) if isinstance(target, bytearray | memoryview) else target
    array = read(memory, shape, data_type, where)
    if not _shares(array, memory):
        raise DataError(
            where,
            "the memory for the output is not contiguous, not aligned or has another byte order",
            fix="pass a contiguous array in the machine's byte order",
        )
    return array


def bytes_to_write(target: Any, where: str) -> TensorData:
    """The caller's memory as writable bytes."""
    if isinstance(target, TensorData):
        return target
    require_writable(target, where)
    return TensorData(target)


def require_writable(target: Any, where: str) -> None:
    """Rejects memory that a result cannot be written to."""
    if isinstance(target, bytes | str | list | tuple | int | float | None):
        raise DataError(where, f"{type(target).__name__} cannot be written to", fix="pass an ndarray or bytearray")
    is_view = isinstance(target, memoryview)
    if target.readonly if is_view else isinstance(target, np.ndarray) and not target.flags.writeable:
        raise DataError(where, "the memory for the output is read-only", fix="pass a writable array")


def _fit(array: torch.Tensor, shape: Sequence[int], data_type: DataType, where: str) -> torch.Tensor:
    given, wanted = tuple(array.shape), tuple(shape)
    if given == wanted:
        return array
    if array.ndim <= 1 or _without_ones(given) == _without_ones(wanted):
        return _take(array.reshape(-1), shape, data_type, where, given=f"{array.nbytes} bytes, shape {given}")
    if given[1:] == wanted[1:] or _without_ones(given[1:]) == _without_ones(wanted[1:]):
        if given[0] > wanted[0]:  # a view of the first rows
            array = array[: wanted[0]]
        return _take(array.reshape(-1), shape, data_type, where, given=f"{array.nbytes} bytes, shape {given}")
    raise ShapeError(
        where, f"the data has shape {given}, but the tensor has shape {wanted}", fix=_fix_of_shape(given, wanted)
    )


def _fix_of_shape(given: Sequence[int], wanted: Sequence[int]) -> str:
    """A transpose if only the channels are elsewhere: a reshape would mix up the elements."""
    dimensions = range(1, len(given))
    for order in ((0, *dimensions[-1:], *dimensions[:-1]), (0, *dimensions[1:], *dimensions[:1])):
        if [given[place] for place in order][1:] == list(wanted[1:]):
            return f"transpose the data: np.transpose(data, {order}), or tensor.permute{order}"
    return "reshape or flatten the data"


def _take(flat: torch.Tensor, shape: Sequence[int], data_type: DataType, where: str, given: str) -> torch.Tensor:
    count = math.prod(shape)
    if flat.numel() < count:
        needed = count * data_type.element_size
        raise DataError(
            where,
            f"the data is too short: {flat.numel() * data_type.element_size} bytes for {needed} bytes",
            given=given,
            needed=f"{needed} bytes, shape {tuple(shape)} of {data_type.debug_description}",
            fix="pass at least that much, or use batch_size= for a batch with fewer rows",
        )
    return flat[:count].view(tuple(shape))


class _Memory(np.ndarray):
    """An array whose release can be observed."""


def _released(memory: torch.Tensor, deallocator: Callable[[], object]) -> torch.Tensor:
    """The same memory behind its own storage, which lives as long as any view of it and then calls `deallocator`.

    The storage holds the array it was created from, and that one holds `memory`.
    """
    watched = memory.numpy().view(_Memory)
    weakref.finalize(watched, deallocator)
    return torch.from_numpy(watched)


def _flat_bytes(array: torch.Tensor) -> torch.Tensor:
    if not array.is_cpu or not array.is_contiguous():
        kind = "not contiguous" if array.is_cpu else f"on {array.device}"
        raise DataError("TensorData", f"the memory is {kind}", fix="pass contiguous host memory")
    return as_bytes(array)


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous array as bytes, sharing it.

    The stride along a dimension of 1 is arbitrary, and a single element of a larger array keeps that array's stride.
    """
    if not array.numel():
        return torch.empty(0, dtype=torch.uint8)
    return array.as_strided((array.numel(),), (1,)).view(torch.uint8)


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def _numbers(data: Any, data_type: DataType, where: str) -> torch.Tensor:
    """Nested numbers as a new array; rejects numbers that the type would change."""
    _require_unmasked(data, where)
    try:
        values = np.asarray(data)
        if values.dtype.kind not in "biuf":
            raise ValueError("it contains something other than numbers")
        with np.errstate(all="ignore"):  # numbers that do not fit are reported below, with their values
            array = torch.from_numpy(values.astype(_numpy_type(data_type))).to(data_type.torch)
        _require_same(values, array, data_type)
        return array
    except (TypeError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise DataTypeError(
            where,
            f"{type(data).__name__} cannot be read as an array of {data_type.debug_description} ({reason})",
            fix="pass numbers, in rows of equal length",
        ) from None


def _numpy_type(data_type: DataType) -> str:
    kind = data_type.debug_description
    return {"bfloat16": "float32", "boolean": "bool"}.get(kind, kind)


def _require_unmasked(data: Any, where: str) -> None:
    """Rejects masked elements among nested numbers: NumPy would silently drop the mask."""
    if isinstance(data, np.ndarray):
        unmasked(data, where)
    elif isinstance(data, list | tuple):
        for one in data:
            if not isinstance(one, float | int):
                _require_unmasked(one, where)


def _require_same(values: np.ndarray, array: torch.Tensor, data_type: DataType) -> None:
    """Raises a ValueError at the first number that the type changes; rounding of reals is allowed."""
    if values.dtype.kind == "b" or not values.size:
        return
    wanted = np.dtype(_numpy_type(data_type))
    if wanted.kind == "f":
        lost, why = np.isfinite(values) & ~array.isfinite().numpy(), "is too large"
    elif wanted.kind == "b":
        lost, why = (values != 0) & (values != 1), "is neither 0 nor 1"
    else:
        bounds = np.iinfo(wanted)
        # The largest int64 is not a float64; the number after it is.
        below = values < float(bounds.max) + 1 if values.dtype.kind == "f" else values <= bounds.max
        fits = (values >= bounds.min) & below & (values == np.trunc(values))
        lost, why = ~fits, f"is not an integer from {bounds.min} to {bounds.max}"
    if lost.any():
        raise ValueError(f"{values[lost][0]} {why}")


def _shares(array: torch.Tensor, memory: Any) -> bool:
    """Whether writes to `array` reach the caller's memory."""
    if isinstance(memory, np.ndarray):
        return np.shares_memory(array.numpy(), memory)
    given = memory.array(torch.uint8) if isinstance(memory, TensorData) else memory
    return (
        not isinstance(given, torch.Tensor) or array.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    )
