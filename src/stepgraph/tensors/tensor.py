"""Tensors: the values that a graph connects.

A `TensorDescriptor` is a value: shape, element type, sequence lengths. A `Tensor` has an identity: it names one
value of a graph and may hold data. On the CPU its data is the buffer the compiled graph works on; on other devices
the current value is on the device and `synchronize_data` copies it to the host.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Union

import numpy as np
import torch

from stepgraph.device import Device
from stepgraph.errors import ArgumentError, DataError, DataTypeError, DeviceError, ShapeError, StateError
from stepgraph.random import describes, initialize, new_array
from stepgraph.system import surroundings
from stepgraph.tensors import buffers, writes
from stepgraph.tensors.buffers import TensorData
from stepgraph.tensors.extents import BatchExtent, is_open
from stepgraph.tensors.quantization import dequantize, quantize
from stepgraph.types import DataType, RandomInitializerType

Array = torch.Tensor
Operand = Union["Tensor", float, np.ndarray, torch.Tensor]  # a source that may be a constant
MAX_DIMENSIONS = 5  # the original stops at 4


@dataclass(frozen=True)
class TensorDescriptor:
    """Shape and element type of a tensor, outermost dimension first; images are `[batch, channels, height, width]`.

    Args:
        shape: one to five positive integers; `BATCH` stands for the rows of a call.
        data_type: element type, in any form that `DataType.of` accepts.
        sequence_lengths: lengths of the sequences in a `[batch, steps, features]` tensor.
        sorted_sequences: whether the lengths are sorted, longest first.

    Example:
        >>> TensorDescriptor((2, 3, 4, 5)).stride
        (240, 80, 20, 4)
    """

    shape: tuple[int, ...]
    data_type: DataType = DataType.FLOAT32
    sequence_lengths: tuple[int, ...] | None = field(default=None, kw_only=True)
    sorted_sequences: bool = field(default=False, kw_only=True)

    max_tensor_dimensions: ClassVar[int] = MAX_DIMENSIONS

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _extents(self.shape))
        object.__setattr__(self, "data_type", DataType.of(self.data_type))
        if self.sequence_lengths is not None:
            object.__setattr__(self, "sequence_lengths", _extents(self.sequence_lengths, "sequence_lengths", None))
            self._check_sequences()

    def _check_sequences(self) -> None:
        lengths = self.sequence_lengths or ()
        if len(self.shape) != 3 or max(lengths) != self.shape[1]:
            raise ShapeError(
                "TensorDescriptor",
                f"sequences of up to {max(lengths)} steps do not fit the shape {self.shape}",
                fix="use [batch, steps, features] with as many steps as the longest sequence",
            )
        if self.shape[0] not in (1, len(lengths)):
            raise ShapeError(
                "TensorDescriptor",
                f"{len(lengths)} lengths were passed for {self.shape[0]} rows",
                fix="pass one length per row",
            )
        if self.sorted_sequences and list(lengths) != sorted(lengths, reverse=True):
            raise ArgumentError("TensorDescriptor", f"lengths {lengths} are not sorted", fix="pass the longest first")

    @classmethod
    def image(
        cls, width: int, height: int, channels: int, batch_size: int, data_type: DataType = DataType.FLOAT32
    ) -> TensorDescriptor:
        """A batch of images, `[batch_size, channels, height, width]`."""
        return cls((batch_size, channels, height, width), data_type)

    @classmethod
    def convolution_weights(
        cls, inputs: int, outputs: int, width: int = 1, height: int = 1, data_type: DataType = DataType.FLOAT32
    ) -> TensorDescriptor:
        """Apple's packed weights, `[1, outputs * inputs, height, width]`, output-major in memory."""
        return cls((1, outputs * inputs, height, width), data_type)

    @classmethod
    def convolution_biases(cls, channels: int, data_type: DataType = DataType.FLOAT32) -> TensorDescriptor:
        """Apple's packed biases, `[1, channels, 1, 1]`."""
        return cls((1, channels, 1, 1), data_type)

    @property
    def dimension_count(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def element_count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stride(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each dimension."""
        return tuple(math.prod(self.shape[axis + 1 :]) * self.data_type.element_size for axis in range(len(self.shape)))

    @property
    def tensor_allocation_size_in_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.element_count * self.data_type.element_size

    @property
    def batch_size_per_sequence_step(self) -> tuple[int, ...] | None:
        """How many sequences are still running at each step; None for a tensor without sequence lengths."""
        lengths = self.sequence_lengths
        return None if lengths is None else tuple(sum(n > t for n in lengths) for t in range(max(lengths)))

    def meta(self) -> Array:
        """An array of this shape and type without memory, for shape inference."""
        return torch.empty(tuple(map(int, self.shape)), dtype=self.data_type.torch, device="meta")

    @property
    def is_open(self) -> bool:
        """Whether its shape depends on the rows of a call."""
        return is_open(self.shape)

    def at(self, rows: int) -> TensorDescriptor:
        """The descriptor for a number of rows; without `BATCH` in its shape, the same."""
        shape = tuple(extent.at(rows) if isinstance(extent, BatchExtent) else extent for extent in self.shape)
        return replace(self, shape=shape)

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.data_type.debug_description}"


class Tensor:
    """One value of a graph: an input, a parameter, a result or a gradient.

    Args:
        shape: the shape, or a `TensorDescriptor`. With `BATCH` as the first extent, calls decide the number of rows.
        data_type: element type; by default float32.
        data: host memory that this tensor uses; it may be longer than needed.
        fill: a number to fill new memory with.
        random: an initializer to fill new memory with. Glorot and Xavier interpret the shape as weights `[out, in]` or
            `[out, in, *kernel]`; for packed weights `[1, out * in, …]`, use a layer's `create`.
        label: name; by default `data<tensor_id>`.

    Example:
        >>> Tensor((2, 2), data=np.eye(2, dtype=np.float32)).data
        array([[1., 0.],
               [0., 1.]], dtype=float32)
    """

    _ids = itertools.count()
    switches = 0  # how often `is_updatable` of any tensor was assigned: as long as it is the same, nobody need look

    def __init__(
        self,
        shape: Sequence[int] | TensorDescriptor,
        data_type: DataType | torch.dtype | str | None = None,
        *,
        data: Any = None,
        fill: float | None = None,
        random: RandomInitializerType | None = None,
        label: str | None = None,
    ) -> None:
        kind = DataType.FLOAT32 if data_type is None else DataType.of(data_type)
        self.descriptor = shape if isinstance(shape, TensorDescriptor) else TensorDescriptor(shape, kind)  # type: ignore[arg-type]
        self.tensor_id = next(Tensor._ids)
        self.label = f"data{self.tensor_id}" if label is None else label
        self.device: Device | None = None
        self._is_updatable = True
        self._graph: weakref.ref[Any] | None = None
        self.is_bound = False  # whether its data was bound after creation, for a call
        self.optimizer_data: list[TensorData] = []
        self.optimizer_device_data: list[TensorOptimizerDeviceData] = []
        with surroundings.tracing():
            values = self._first_values(data, fill, random)
        is_described = values is not None and values.is_meta
        self._host = None if is_described else values
        self.current = self._host  # the array behind the value: replaced when the tensor is bound again
        self._own: Array | None = None  # device memory that this tensor allocated itself and may overwrite
        self._missing = "it was created without memory" if is_described else "it has never received data"
        self._is_lent, self._shares = False, writes.Shares()
        self.watch: writes.Watch | None = None  # where ranks must have the same numbers

    @classmethod
    def image(cls, width: int, height: int, channels: int, batch_size: int, **settings: Any) -> Tensor:
        """A batch of images, `[batch_size, channels, height, width]`; other settings as for `Tensor`."""
        return cls((batch_size, channels, height, width), **settings)

    @classmethod
    def sequence(cls, length: int, channels: int, batch_size: int, **settings: Any) -> Tensor:
        """Sequences of one length, `[batch_size, length, channels]`; other settings as for `Tensor`."""
        if isinstance(batch_size, BatchExtent):
            return cls((batch_size, length, channels), **settings)
        return cls.sequences([length] * batch_size, channels, batch_size, sorted_sequences=True, **settings)

    @classmethod
    def sequences(
        cls, lengths: Sequence[int], channels: int, batch_size: int, *, sorted_sequences: bool = False, **settings: Any
    ) -> Tensor:
        """Sequences of several lengths, `[batch_size, longest, channels]`; other settings as for `Tensor`."""
        kind = settings.pop("data_type", DataType.FLOAT32)
        shape = (batch_size, max(lengths, default=0), channels)
        descriptor = TensorDescriptor(shape, kind, sequence_lengths=tuple(lengths), sorted_sequences=sorted_sequences)
        return cls(descriptor, **settings)

    @property
    def shape(self) -> tuple[int, ...]:
        """The descriptor's shape."""
        return self.descriptor.shape

    @property
    def data_type(self) -> DataType:
        """The descriptor's element type."""
        return self.descriptor.data_type

    @property
    def data(self) -> np.ndarray | None:
        """Host data, shared, not copied, or None. For a parameter on a GPU: as of the last synchronization."""
        array = self.current if self._host is None else self._host
        if array is None or array is not self.current:
            return None if array is None else self._as_numpy(array)
        return self.numpy()

    @property
    def memory(self) -> TensorData | None:
        """The host memory behind `data`, including the rest of the caller's buffer; None without data."""
        if self._host is None:
            return None if self.current is None else TensorData(self.current.detach().cpu().contiguous())
        if self._host is self.current:
            self.expect_writes()
        start = self._host.storage_offset() * self._host.element_size()
        whole = torch.empty(0, dtype=torch.uint8).set_(self._host.untyped_storage())
        return TensorData(whole[start:])

    @property
    def has_data(self) -> bool:
        """Whether there is a value to read."""
        return self.current is not None

    @property
    def has_valid_numerics(self) -> bool:
        """False if any element is NaN or infinite; True without data."""
        return self.current is None or bool(torch.isfinite(self.current).all())

    def torch(self) -> Array:
        """The current value on its device, shared, not copied."""
        if self._is_watched:
            self.expect_writes()
            return self._shares.give(self.array())
        if not self._is_lent:
            self._is_lent = True
            writes.note()
        return self.array()

    def array(self) -> Array:
        """The same for stepgraph itself, which notes when it writes to it."""
        if self.current is None:
            raise StateError(
                self.where,
                f"there is no data: {self._missing}",
                fix="execute first, or write data with bind_and_write_data",
            )
        # Results are created in inference mode; a new view can enter the caller's own autograd.
        return torch.from_dlpack(self.current) if self.current.is_inference() else self.current

    def numpy(self) -> np.ndarray:
        """The current value on the host; shared if it is there, otherwise copied."""
        return self._as_numpy(self.array() if self.watch is None or self.array().is_cuda else self.torch())

    def _as_numpy(self, array: Array) -> np.ndarray:
        if array.dtype is torch.bfloat16:
            raise DataTypeError(self.where, "NumPy has no bfloat16", fix="use torch(), or torch().float().numpy()")
        return array.detach().cpu().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.numpy()  # NumPy 1 takes no None for `copy`
        return np.asarray(found, dtype) if copy is None else np.array(found, dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        return self.torch().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.torch().__dlpack_device__()

    def synchronize_data(self) -> None:
        """Copies the device's current value into `data`."""
        if self.current is not None and self._host is not self.current:
            self._host = self.current.cpu() if self._host is None else _copied(self._host, self.current)

    def synchronize_optimizer_data(self) -> None:
        """Copies the device's optimizer buffers into `optimizer_data`."""
        for host, device in zip(self.optimizer_data, self.optimizer_device_data, strict=False):
            if device.array is not None:
                _copied(host.array(device.array.dtype)[: device.array.numel()], device.array.reshape(-1))

    def copy_data_from_device_memory(
        self, destination: Any, length: int | None = None, synchronize_with_device: bool = True
    ) -> None:
        """Copies the first `length` bytes of the current value into `destination`.

        The copy always synchronizes with the device; the flag exists for programs that pass it.
        """
        available = buffers.as_bytes(self.array().contiguous())
        count = available.numel() if length is None else length
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ArgumentError(self.where, f"length is {count!r}", fix="pass a number of bytes ≥ 0, or None for all")
        if count > available.numel():
            raise DataError(
                self.where,
                f"{count} bytes were requested, but the tensor has {available.numel()}",
                fix="request fewer bytes",
            )
        target = buffers.bytes_to_write(destination, self.where)
        if target.length < count:
            raise DataError(self.where, f"{count} bytes do not fit in {target.length}", fix="pass a larger buffer")
        _copied(target.array(torch.uint8)[:count], available[:count])

    def bind_and_write_data(self, data: Any, device: Device) -> None:
        """Makes `data` this tensor's host memory and writes it to the device: for parameters set manually.

        On the CPU the caller's memory is the parameter from then on.
        """
        require_device(device, self.where)
        self.bind(buffers.read(data, self.shape, self.data_type, self.where), device)

    def bind_optimizer_data(
        self, data: Sequence[Any], device_data: Sequence[TensorOptimizerDeviceData] | None = None
    ) -> None:
        """Attaches initial optimizer buffers (momentum, velocity, …); call it before the first update."""
        views = [TensorData(buffers.read(one, self.shape, self.data_type, self.where)) for one in data]
        self.optimizer_data = views
        self.optimizer_device_data = list(device_data or (TensorOptimizerDeviceData() for _ in views))

    def quantized(
        self, data_type: DataType, *, scale: float | Tensor, bias: float | Tensor, axis: int | None = None
    ) -> Tensor:
        """`round(scale * x + bias)` in int8, uint8 or int32, saturating; with `axis`, one pair per slice."""
        return self._like(quantize(self, data_type, scale=scale, bias=bias, axis=axis))

    def dequantized(
        self, data_type: DataType, *, scale: float | Tensor, bias: float | Tensor, axis: int | None = None
    ) -> Tensor:
        """`(y - bias) / scale` in float32: the inverse of `quantized`."""
        return self._like(dequantize(self, data_type, scale=scale, bias=bias, axis=axis))

    def _like(self, array: Array) -> Tensor:
        """A new tensor of this shape, with other numbers."""
        return Tensor(replace(self.descriptor, data_type=DataType.of(array.dtype)), data=array)

    def copy(self) -> Tensor:
        """A new tensor with its own id and label over the same data."""
        twin = Tensor(self.descriptor)
        twin._host = twin.current = self._host if self._host is not None else self.current
        twin.optimizer_data = list(self.optimizer_data)
        return twin

    # Arithmetic on results

    @property
    def graph(self) -> Any:
        """The graph that this tensor is a result of; None for inputs, parameters and results of calls."""
        graph = None if self._graph is None else self._graph()
        return graph if graph is not None and graph.makes(self) else None

    def join(self, graph: Any) -> None:
        """Records the graph of a result; a graph that adopts its node later does not count."""
        if self.graph is None:
            self._graph = weakref.ref(graph)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_graph": None, "watch": None}  # a copy is a result of no graph, and no rank has it

    @property
    def __array_priority__(self) -> float:
        """NumPy leaves `array + result` to the result; other tensors are converted to arrays."""
        return -1e6 if self.graph is None else 1e3

    def reshape(self, *shape: Any) -> Tensor:
        """This result in another shape: `x.reshape(BATCH, -1)`, or with one tuple."""
        extents = shape[0] if len(shape) == 1 and isinstance(shape[0], Iterable) else shape
        found: Tensor = _common_graph("reshape", self).reshape(tuple(extents), self)
        return found

    def __add__(self, other: Operand) -> Tensor:
        return _combined("add", self, other)

    def __radd__(self, other: Operand) -> Tensor:
        return _combined("add", other, self)

    def __sub__(self, other: Operand) -> Tensor:
        return _combined("subtract", self, other)

    def __rsub__(self, other: Operand) -> Tensor:
        return _combined("subtract", other, self)

    def __mul__(self, other: Operand) -> Tensor:
        return _combined("multiply", self, other)

    def __rmul__(self, other: Operand) -> Tensor:
        return _combined("multiply", other, self)

    def __truediv__(self, other: Operand) -> Tensor:
        return _combined("divide", self, other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return _combined("divide", other, self)

    def __pow__(self, other: Operand) -> Tensor:
        return _combined("pow", self, other)

    def __rpow__(self, other: Operand) -> Tensor:
        return _combined("pow", other, self)

    def __matmul__(self, other: Operand) -> Tensor:
        return _combined("matmul", self, other)

    def __rmatmul__(self, other: Operand) -> Tensor:
        return _combined("matmul", other, self)

    def __neg__(self) -> Tensor:
        return _combined("multiply", self, -1)

    @property
    def is_updatable(self) -> bool:
        """Whether graphs that train this tensor update it."""
        return self._is_updatable

    @is_updatable.setter
    def is_updatable(self, value: bool) -> None:
        self._is_updatable = value
        Tensor.switches += 1

    @property
    def where(self) -> str:
        """The name of this tensor in messages."""
        return f"Tensor '{self.label}'"

    def __repr__(self) -> str:
        return f"Tensor({self.label!r}, {self.descriptor})"

    # Used by the compiler and the runtime. Users read `data`, `numpy()` or `torch()`.

    @property
    def _is_watched(self) -> bool:
        """Whether somebody must know who writes to its memory.

        Ranks that must have the same numbers, or steps that keep something they computed from it, on a device.
        """
        if self.current is None:
            return False
        return self.watch is not None or (self.current is self._own and self.current.is_cuda)

    @property
    def is_exposed(self) -> bool:
        """Whether others may write to its memory unnoticed: it is theirs, or they hold an array that shares it."""
        return self.current is not self._own or self._shares.are_held

    @property
    def is_shared(self) -> bool:
        """Whether anybody holds an array that shares its memory, of those that were given away on watch."""
        return self._shares.are_held

    def expect_writes(self) -> None:
        """Must be called before anybody but an update writes to its memory."""
        if self.watch is not None and self.current is not None:
            self.watch.expect_writes(self.current)

    def on(self, device: Device) -> Array:
        """The value as it will be on `device`, copied if necessary; the tensor itself does not change."""
        value = self.array()
        if self.device is not None and self.device.torch != device.torch and self.current is not self._host:
            raise StateError(
                self.where, f"it is on {self.device}, but the graph is compiled for {device}", fix="use one device"
            )
        return value.to(device.torch)

    def settle(self, array: Array, device: Device) -> None:
        """Makes the result of `on` the current value; the host keeps its own copy except on the CPU."""
        if self.current is None or array.device != self.current.device:
            self.current = self._own = array
        self.device = device

    def bind(self, array: Array, device: Device) -> None:
        """Uses `array` as data and writes it to `device`, into the buffer in use if this tensor allocated it."""
        self.expect_writes()
        if device.torch.type == "cpu":
            self.current = array
        elif self._own is not None and self._own is self.current and self._fits(self._own, array, device):
            _copied(self._own, array)
        else:  # the value may be the caller's memory, or a result that is still in use
            self.current = self._own = array.to(device.torch, copy=True)
        self._host, self.is_bound, self.device = array, True, device

    @staticmethod
    def _fits(own: Array, array: Array, device: Device) -> bool:
        return (own.device, own.shape, own.dtype) == (device.torch, array.shape, array.dtype)

    def overwrite(self, array: Array) -> None:
        """Writes new values into the existing memory, so that everything that shares it sees them."""
        self.expect_writes()
        if self.has_data:
            _copied(self.array(), array)
            self.synchronize_data()
        else:
            self.bind(array, Device.cpu())

    def hold(self, array: Array | None, missing: str = "it was not computed") -> None:
        """Makes a result the current value, or drops the value and remembers why."""
        self.current, self._host, self._missing = array, None, missing

    def _first_values(self, data: Any, fill: float | None, random: RandomInitializerType | None) -> Array | None:
        if sum(source is not None for source in (data, fill, random)) > 1:
            raise ArgumentError(self.where, "data, fill and random were passed together", fix="pass only one")
        if self.descriptor.is_open and (data, fill, random) != (None, None, None):
            shape = list(self.shape)
            raise ShapeError(self.where, f"its shape is {shape}, but data has a number of rows", fix="pass that number")
        if isinstance(data, torch.Tensor) and data.is_meta and describes():
            return data
        if data is not None:
            return buffers.read(data, self.shape, self.data_type, self.where)
        if fill is not None:
            return self._filled(fill)
        if random is not None:
            return initialize(random, self.shape, *_fans(self.shape), self.data_type.torch)
        return None

    def _filled(self, number: Any) -> Array:
        if not isinstance(number, int | float):
            raise DataTypeError(self.where, f"fill is {number!r}, not a number", fix="pass a number")
        array = new_array(self.where, self.shape, self.data_type.torch)
        try:
            buffers.read(number, (1,), self.data_type, self.where)  # `fill_` would silently truncate to an integer
            return array.fill_(number)
        except (RuntimeError, OverflowError, DataTypeError):
            kind = self.data_type.debug_description
            raise ArgumentError(
                self.where, f"fill is {number}, which {kind} cannot hold", fix="use another type"
            ) from None


def _combined(operation: str, left: Any, right: Any) -> Any:
    """Wires an operation into the graph of its operands; NotImplemented for anything but tensors and numbers."""
    if not all(isinstance(one, Tensor | int | float | np.ndarray | np.generic | torch.Tensor) for one in (left, right)):
        return NotImplemented
    tensors = [one for one in (left, right) if isinstance(one, Tensor)]
    # NumPy and PyTorch read the numbers of a tensor that is no result; without numbers, NumPy's error would mislead.
    readers = (np.ndarray, np.generic, torch.Tensor) if tensors[0].has_data else torch.Tensor
    if tensors[0].graph is None and any(isinstance(one, readers) for one in (left, right)):
        return NotImplemented
    return getattr(_common_graph(operation, *tensors), operation)(left, right)


def _common_graph(operation: str, *tensors: Tensor) -> Any:
    """The graph that tensors are results of; some may be inputs."""
    graphs = list(dict.fromkeys(tensor.graph for tensor in tensors if tensor.graph is not None))
    where = " and ".join(tensor.where for tensor in tensors)
    if not graphs:
        problem, fix = "operators work on results of a graph, and this is none", f"call graph.{operation}"
        raise StateError(where, problem, fix=fix)
    if len(graphs) > 1:
        fix = f"wire it in a graph that contains both: training.{operation}(…)"
        raise StateError(where, "they are results of two graphs", fix=fix)
    return graphs[0]


def constant_tensor(values: Any, data_type: DataType | None = None) -> Tensor:
    """A tensor with a copy of numbers or an array; a number has shape `[1]`."""
    where = "constant"
    if isinstance(values, np.ndarray | np.generic | torch.Tensor):
        array = buffers.as_array(np.asarray(values) if isinstance(values, np.generic) else values, where).clone()
        kind = DataType.of(array.dtype) if data_type is None else data_type
        if array.dtype.is_floating_point and not kind.is_floating:
            names = f"{DataType.of(array.dtype).debug_description}, but {kind.debug_description} is needed"
            raise DataTypeError(where, f"the array is {names}", fix="round it, or convert the other operand")
        array = array.to("cpu", kind.torch)
        return Tensor(tuple(array.shape) or (1,), kind, data=array.reshape(tuple(array.shape) or (1,)))
    numbers = np.asarray(values)
    kind = data_type or (DataType.FLOAT32 if numbers.dtype.kind == "f" else DataType.of(numbers.dtype))
    shape = numbers.shape or (1,)
    return Tensor(shape, kind, data=numbers.reshape(shape).tolist())


class TensorOptimizerDeviceData:
    """An opaque handle for one optimizer buffer on a device; filled by stepgraph."""

    def __init__(self) -> None:
        self.array: Array | None = None


class TensorParameter:
    """A tensor that an optimizer updates. All parameters of one tensor are the same parameter.

    Args:
        tensor: the tensor to update.
        optimizer_data: initial optimizer buffers.

    Example:
        >>> layer = FullyConnectedLayer.create(3, 2)
        >>> layer.weights_parameter.is_updatable = False  # frozen from the next step on
        >>> TensorParameter(layer.weights).is_updatable
        False
    """

    def __init__(self, tensor: Tensor, optimizer_data: Sequence[Any] | None = None) -> None:
        if not isinstance(tensor, Tensor):
            raise DataTypeError("TensorParameter", f"{type(tensor).__name__} is not a Tensor", fix="pass a Tensor")
        self.tensor = tensor
        if optimizer_data is not None:
            tensor.bind_optimizer_data(optimizer_data)

    @property
    def is_updatable(self) -> bool:
        """Whether the optimizer may change the tensor."""
        return self.tensor.is_updatable

    @is_updatable.setter
    def is_updatable(self, value: bool) -> None:
        self.tensor.is_updatable = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorParameter) and self.tensor is other.tensor

    def __hash__(self) -> int:
        return hash(self.tensor)

    def __repr__(self) -> str:
        return f"TensorParameter({self.tensor!r}, is_updatable={self.is_updatable})"


@torch.inference_mode()
def _copied(target: Array, source: Array) -> Array:
    """Writes into memory created in inference mode, which allows writes only in inference mode."""
    writes.note()
    return target.copy_(source)


def require_device(device: Any, where: str) -> None:
    """Rejects anything but a device."""
    if not isinstance(device, Device):
        raise DeviceError(where, f"{device!r} is not a device to write to", fix="pass Device.cpu() or Device.any()")


def row_count(values: Any, tensor: Tensor) -> int:
    """Rows in one batch of data for `tensor`; flat arrays and raw memory hold them contiguously."""
    shape = getattr(values, "shape", None)
    if shape is None and isinstance(values, list | tuple):
        return len(values)
    if shape is None:
        return _length_in_bytes(values, tensor) // (tensor.data_type.element_size * math.prod(tensor.shape[1:]))
    if len(shape) == 0:
        return 1
    return int(shape[0]) // math.prod(tensor.shape[1:]) if len(shape) == 1 else int(shape[0])


def _length_in_bytes(values: Any, tensor: Tensor) -> int:
    try:
        return values.length if isinstance(values, TensorData) else memoryview(values).nbytes
    except TypeError:
        fix = "pass NumPy, torch, DLPack or bytes"
        raise DataTypeError(tensor.where, f"{type(values).__name__} is not an array", fix=fix) from None


def _fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Fan-in and fan-out of weights with this shape.

    The shape is interpreted as `[out, in, *kernel]`, as in PyTorch; a single dimension is both. Packed weights
    `[1, out * in, …]` do not reveal them: use a layer's `create`.
    """
    out, inside, *kernel = shape if len(shape) > 1 else (*shape, *shape)
    return inside * math.prod(kernel), out * math.prod(kernel)


def _extents(values: Sequence[int], name: str = "shape", most: int | None = MAX_DIMENSIONS) -> tuple[int, ...]:
    if not isinstance(values, Iterable):
        raise ShapeError("TensorDescriptor", f"the {name} is {values!r}", fix="pass a tuple, such as (2, 3)")
    extents = tuple(values)
    if not extents or (most is not None and len(extents) > most):
        raise ShapeError(
            "TensorDescriptor",
            f"the {name} has {len(extents)} dimensions",
            fix=f"pass 1 to {most}" if most else "pass at least one",
        )
    for extent in extents:
        if isinstance(extent, bool) or not isinstance(extent, int | np.integer) or extent < 1:
            raise ShapeError(
                "TensorDescriptor",
                f"{extent!r} in the {name} {extents} is not a positive integer",
                fix="use extents ≥ 1",
            )
    return tuple(extent if isinstance(extent, BatchExtent) else int(extent) for extent in extents)
