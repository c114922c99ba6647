"""Values that cross the boundary: Objective-C's kinds of argument in, PyObjC's objects out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from enum import IntFlag
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch

import stepgraph as sg
from stepgraph.errors import DataTypeError, StepgraphError
from stepgraph.mlc.face import Face, face_of
from stepgraph.mlc.refusals import MLCError, guarded, shown
from stepgraph.types import RawEnum

MAX_DIMENSIONS = 4  # stepgraph itself supports 5


class Kind(NamedTuple):
    """A kind of argument: its description, and its conversion to stepgraph's."""

    wanted: str
    convert: Callable[[Any], Any]
    makes_empty: bool = False

    def take(self, call: str, name: str, value: Any) -> Any:
        """The value as stepgraph takes it; rejected with its name if it is of another kind."""
        try:
            return self.convert(value)
        except StepgraphError:
            raise
        except Exception:  # whatever an odd object raises when it is inspected
            raise DataTypeError(call, f"{name} is {shown(value)}", fix=f"pass {self.wanted}") from None


class NSData(np.ndarray):
    """Bytes of a tensor, shared, not copied: an array of uint8 that also has `bytes()` and `length()`."""

    def bytes(self) -> memoryview:
        """The memory."""
        return memoryview(np.asarray(self))  # type: ignore[arg-type]

    def length(self) -> int:
        """Number of bytes."""
        return int(self.nbytes)

    def __bool__(self) -> bool:
        return self.size > 0

    def __eq__(self, other: object) -> Any:
        return self.tobytes() == bytes(other) if isinstance(other, bytes | bytearray | memoryview | NSData) else False

    def __ne__(self, other: object) -> Any:
        return not self == other

    __hash__ = None


def give(value: Any) -> Any:
    """A result as PyObjC would return it: raw values, single precision, lists, bytes, faces."""
    if value is None or isinstance(value, bool | str | memoryview | NSData):
        return value
    if isinstance(value, int):  # including enumerations
        return int(value)
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8).view(NSData)
    if isinstance(value, list | tuple):
        return [give(one) for one in value]
    return face_of(value)


def unwrapped(value: Any) -> Any:
    """The native object behind a face; anything else unchanged, so that both styles mix."""
    return value.native if isinstance(value, Face) else value


def _whole(value: Any) -> int:
    if isinstance(value, bool | np.bool_):
        raise TypeError
    return operator.index(value)


def _real(value: Any) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def _switch(value: Any) -> bool:
    if isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError


def _list(value: Any) -> list[Any]:
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes | bytearray | memoryview):
        raise TypeError
    return list(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _shape(value: Any) -> tuple[int, ...]:
    extents = tuple(_whole(one) for one in _list(value))
    if not 1 <= len(extents) <= MAX_DIMENSIONS:
        raise ValueError
    return extents


def _pair(default: int | None, value: Any) -> tuple[int, ...] | int | None:
    if value is None:
        return default
    sizes = tuple(_whole(one) for one in _list(value))
    if len(sizes) not in (1, 2):
        raise ValueError
    return sizes


def _flags(kind: type[IntFlag], value: Any) -> IntFlag:
    number = _whole(value)
    if number < 0:
        raise ValueError
    return kind(number)


def _memory(value: Any) -> Any:
    """Raw memory: an `MLCTensorData`, or any bytes-like object or array."""
    native = unwrapped(value)
    if isinstance(native, NSData):
        return sg.TensorData(native.view(np.ndarray))
    if isinstance(native, sg.TensorData | bytes | bytearray | memoryview | np.ndarray | torch.Tensor):
        return native
    return sg.TensorData(np.frombuffer(native, np.uint8))  # anything else with the buffer protocol, or a TypeError


def _by_name(convert: Callable[[Any], Any], value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {_text(name): convert(one) for name, one in value.items()}


def _handler(value: Any) -> Callable[..., None]:
    if not callable(value):
        raise TypeError
    handler = guarded(value, "completion handler")
    return lambda tensor, error, seconds: handler(face_of(tensor), None if error is None else MLCError(error), seconds)


def optional(kind: Kind, *, makes_empty: bool = False, nil: Callable[[], Any] | None = None) -> Kind:
    """The kind, or nil: None, the result of `nil`, or an empty object."""

    def convert(value: Any) -> Any:
        if value is None:
            return None if nil is None else nil()
        return kind.convert(value)

    return Kind(f"{kind.wanted} or None", convert, makes_empty)


def one_of(enum: type[RawEnum]) -> Kind:
    """A constant of an enumeration."""
    return Kind(f"a constant of MLC{enum.__name__}", lambda value: enum(_whole(value)))


def an(native: type) -> Kind:
    """The face of a native class, or the native object itself."""

    def convert(value: Any) -> Any:
        found = unwrapped(value)
        if not isinstance(found, native):
            raise TypeError
        return found

    return Kind(f"an MLC{native.__name__}", convert)


def list_of(kind: Kind) -> Kind:
    """A list."""
    return Kind(f"a list, each element {kind.wanted}", lambda value: [kind.convert(one) for one in _list(value)])


def pair(default: int | None) -> Kind:
    """Two numbers, `[y, x]`; one applies to both, nil means the default."""
    return Kind("[height, width], [size] or None", lambda value: _pair(default, value))


INT = Kind("an integer", _whole)
FLOAT = Kind("a number", _real)
BOOL = Kind("True or False", _switch)
TEXT = Kind("a string", _text)
INTS = Kind("a list of integers", lambda value: tuple(_whole(one) for one in _list(value)))
SHAPE = Kind("a list of 1 to 4 integers", _shape)
NUMBER = Kind("a number", lambda value: int(value) if isinstance(value, bool | np.bool_) else _real(value))
DATA = Kind("an MLCTensorData or bytes", _memory)
DATAS = Kind("a list of MLCTensorData", lambda value: [_memory(one) for one in _list(value)])
BUFFER = Kind("memory to write to, such as a bytearray or an array", _memory)
DATA_BY_NAME = Kind("a dictionary of MLCTensorData by name", lambda value: _by_name(_memory, value))
HANDLER = Kind("a function (resultTensor, error, executionTime) or None", lambda v: None if v is None else _handler(v))

DATA_TYPE = one_of(sg.DataType)
REDUCTION = one_of(sg.ReductionType)
COMPILE_OPTIONS = Kind("MLCGraphCompilationOptions", lambda value: _flags(sg.GraphCompilationOptions, value))
EXECUTE_OPTIONS = Kind("MLCExecutionOptions", lambda value: _flags(sg.ExecutionOptions, value))
TENSOR, TENSORS = an(sg.Tensor), list_of(an(sg.Tensor))
TENSOR_BY_NAME = Kind("a dictionary of MLCTensor by name", lambda value: _by_name(an(sg.Tensor).convert, value))
LAYER, DEVICE = an(sg.Layer), an(sg.Device)
