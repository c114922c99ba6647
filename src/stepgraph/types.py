"""Enumerations and option flags that several modules share. Raw values are Apple's, except those marked as ours."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch

from stepgraph.errors import ArgumentError, DataTypeError


class RawEnum(IntEnum):
    """An enumeration whose members carry Apple's raw value and debug description."""

    debug_description: str

    def __new__(cls, raw: int, description: str = "") -> Self:
        member = int.__new__(cls, raw)
        member._value_ = raw
        member.debug_description = description
        return member

    @classmethod
    def of_raw(cls, where: str, name: str, value: Any) -> Self:
        """The member equal to `value` or with `value` as its raw value."""
        try:
            return cls(value)
        except ValueError:
            raise ArgumentError(where, f"{name} is {value!r}", fix=f"use a member of {cls.__name__}") from None

    def __str__(self) -> str:
        return self.name


class DataType(RawEnum):
    """Element types of a tensor."""

    FLOAT32 = 1, "float32"
    FLOAT16 = 3, "float16"
    BOOLEAN = 4, "boolean"
    INT64 = 5, "int64"
    INT32 = 7, "int32"
    INT8 = 8, "int8"
    UINT8 = 9, "uint8"
    BFLOAT16 = 1001, "bfloat16"  # ours
    FLOAT64 = 1002, "float64"  # ours

    @classmethod
    def of(cls, value: DataType | torch.dtype | np.dtype | type | str) -> DataType:
        """The data type for a torch, NumPy or Python type or name.

        Example:
            >>> DataType.of("float32") is DataType.of(torch.float32) is DataType.of(np.float32)
            True
        """
        if isinstance(value, cls):
            return value
        try:
            if value is None:
                raise TypeError("NumPy would read None as float64")
            name = str(value).removeprefix("torch.") if isinstance(value, str | torch.dtype) else np.dtype(value).name  # type: ignore[arg-type]
        except TypeError:
            name = repr(value)
        for member in cls:
            if name == member.debug_description or (name == "bool" and member is cls.BOOLEAN):
                return member
        known = ", ".join(member.debug_description for member in cls)
        raise DataTypeError("DataType", f"{name} is not a data type of stepgraph", fix=f"use one of {known}")

    @cached_property
    def torch(self) -> torch.dtype:
        """The PyTorch type."""
        return torch.bool if self is DataType.BOOLEAN else getattr(torch, self.debug_description)

    @cached_property
    def numpy(self) -> np.dtype[Any] | None:
        """The NumPy type, in this machine's byte order; None for bfloat16, which NumPy lacks."""
        return None if self is DataType.BFLOAT16 else np.dtype(self.debug_description.replace("boolean", "bool"))

    @property
    def element_size(self) -> int:
        """Bytes of one element."""
        return self.torch.itemsize

    @property
    def is_floating(self) -> bool:
        """Whether gradients can flow through tensors of this type."""
        return self.torch.is_floating_point


class DeviceType(RawEnum):
    """Kinds of device."""

    CPU = 0, "CPU"
    GPU = 1, "GPU"
    ANY = 2, "Any"  # a GPU if there is one, else the CPU
    ANE = 3, "ANE"  # Apple's Neural Engine, which is never available


class RandomInitializerType(RawEnum):
    """How a new tensor is filled with random numbers."""

    UNIFORM = 1, "Uniform"  # uniform from 0 to 1
    GLOROT_UNIFORM = 2, "Glorot Uniform"  # uniform from -a to a, a = √(6 / (inputs + outputs))
    XAVIER = 3, "Xavier"  # normal, with variance 2 / (inputs + outputs)


class ReductionType(RawEnum):
    """How several values are reduced to one."""

    NONE = 0, "None"
    SUM = 1, "Sum"
    MEAN = 2, "Mean"
    MAX = 3, "Max"
    MIN = 4, "Min"
    ARG_MAX = 5, "Arg Max"
    ARG_MIN = 6, "Arg Min"
    L1_NORM = 7, "L1Norm"
    ANY = 8, "Any"
    ALL = 9, "All"


class PaddingPolicy(RawEnum):
    """How a sliding window treats the border of an image."""

    SAME = 0, "Same"  # pads so that a stride of 1 keeps the size; the extra pixel is at the bottom and right
    VALID = 1, "Valid"  # no padding: only windows entirely inside
    USE_PADDING_SIZE = 2, "Use Padding Size"  # as many pixels as in `padding_sizes`


class GraphCompilationOptions(IntFlag):
    """Options of `compile`."""

    NONE = 0
    DEBUG_LAYERS = 0x01  # layers with `is_debugging_enabled` keep their results and gradients readable
    DISABLE_LAYER_FUSION = 0x02  # never fuse
    LINK_GRAPHS = 0x04  # the graph will be connected to others with `link`
    COMPUTE_ALL_GRADIENTS = 0x08  # also gradients that no update needs: of inputs and of frozen layers
    DETERMINISTIC = 0x1000  # ours: PyTorch's own kernels only, none chosen by measurement, nothing fused
    FUSE_LAYERS = 0x2000  # ours: fuse with PyTorch's compiler before the first step, on any device
    CHECK_NUMERICS = 0x4000  # ours: a step that produces a NaN or an infinity is rolled back, and the error says where


class ExecutionOptions(IntFlag):
    """Options of execute calls."""

    NONE = 0
    SKIP_WRITING_INPUT_DATA_TO_DEVICE = 0x01  # reuse the data of the last call
    SYNCHRONOUS = 0x02  # return when the work is done, on a GPU too
    PROFILING = 0x04  # measure the time: `Execution.time`
    FORWARD_FOR_INFERENCE = 0x08  # the forward pass only, in inference mode
    PER_LAYER_PROFILING = 0x10  # measure time and memory by layer and phase: `Execution.profile`
    ACCUMULATE_GRADIENTS = 0x1000  # ours: add to the gradients of the last pass instead of replacing them
