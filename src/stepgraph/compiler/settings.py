"""The settings of `compile` and `execute`, checked and resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch

from stepgraph.compiler.ranks.parallel import TREE, Parallel
from stepgraph.compiler.step import FULL, Fusion
from stepgraph.device import Device
from stepgraph.errors import ArgumentError, DataTypeError, DeviceError
from stepgraph.system.surroundings import Precision
from stepgraph.types import DataType, GraphCompilationOptions

# The keywords of `compile` beside its option flags: the flags that True and False set.
SWITCHES: dict[str, tuple[GraphCompilationOptions, GraphCompilationOptions]] = {
    "deterministic": (GraphCompilationOptions.DETERMINISTIC, GraphCompilationOptions.NONE),
    "check_numerics": (GraphCompilationOptions.CHECK_NUMERICS, GraphCompilationOptions.NONE),
    "fuse": (GraphCompilationOptions.FUSE_LAYERS, GraphCompilationOptions.DISABLE_LAYER_FUSION),
    "all_gradients": (GraphCompilationOptions.COMPUTE_ALL_GRADIENTS, GraphCompilationOptions.NONE),
    "debug_layers": (GraphCompilationOptions.DEBUG_LAYERS, GraphCompilationOptions.NONE),
    "link_graphs": (GraphCompilationOptions.LINK_GRAPHS, GraphCompilationOptions.NONE),
}


class _Same(Enum):
    """Represents the previous device of a graph; None would be a missing device."""

    DEVICE = "the previous device"

    def __repr__(self) -> str:
        return "SAME_DEVICE"


@dataclass(frozen=True)
class Settings:
    """The settings of a compilation.

    Args:
        options: the requested options.
        compute_type: the type layers compute in, if it differs from what tensors declare.
        tf32: whether a GPU may round float32 factors to TF32; None uses PyTorch's setting.
        memory_limit: bytes that a step may need.
        precision: the resulting precision.
        parallel: how updates are divided among ranks; None if they are not.
    """

    options: GraphCompilationOptions = GraphCompilationOptions.NONE
    compute_type: torch.dtype | None = None
    tf32: bool | None = None
    memory_limit: int | None = None
    precision: Precision = FULL
    parallel: Parallel | None = None

    @classmethod
    def checked(
        cls,
        options: Any,
        compute_type: Any,
        tf32: Any,
        memory_limit: Any = None,
        parallel: Any = None,
        **switches: bool | None,
    ) -> Settings:
        """Checked settings; rejects invalid ones, and keywords that contradict the option flags."""
        require_options(options, GraphCompilationOptions)
        options = switched(options, switches)
        tf32 = tf32_allowed(tf32)
        divided = divisible(parallel, options)
        return cls(options, mixed(compute_type), tf32, limited(memory_limit), Precision.of(tf32), divided)

    @property
    def chooses_kernels(self) -> bool:
        """Whether to look for faster implementations."""
        return GraphCompilationOptions.DETERMINISTIC not in self.options


SAME_DEVICE = _Same.DEVICE
ChosenDevice = Device | str | torch.device | Literal[_Same.DEVICE] | None


def chosen(where: str, device: ChosenDevice, before: Device | None) -> Device:
    """The device to compile for."""
    if device is SAME_DEVICE:
        if before is None:
            raise DeviceError(where, "there is no device to compile for", fix="pass Device.any() or Device.cpu()")
        return before
    wanted = device
    if isinstance(device, str | torch.device):
        device = Device.of(device)
    if device is None:
        asked = "the device is None: this machine has no device of the requested kind"
        raise DeviceError(
            where,
            asked if wanted is None else f"this machine has no device '{wanted}' that PyTorch can use",
            fix="pass Device.any(), which uses a GPU if there is one, or Device.cpu()",
        )
    if not isinstance(device, Device):
        raise DataTypeError(where, f"{device!r} is not a Device", fix="pass Device.any()")
    return device


def switched(options: GraphCompilationOptions, switches: Mapping[str, bool | None]) -> GraphCompilationOptions:
    """The options with those that keywords set; a keyword that is None decides nothing."""
    for name, value in switches.items():
        if value is None:
            continue
        if not isinstance(value, bool):
            raise DataTypeError("compile", f"{name} is {value!r}", fix="pass True, False or None")
        on, off = SWITCHES[name]
        wanted, other = (on, off) if value else (off, on)
        if other & options:
            raise ArgumentError(
                "compile", f"{name} is {value}, but the options contain {other!r}", fix="pass one of them"
            )
        options |= wanted
    return options


def tf32_allowed(tf32: bool | None) -> bool | None:
    """Whether TF32 may be used; None uses PyTorch's setting."""
    if tf32 is not None and not isinstance(tf32, bool):
        raise DataTypeError("compile", f"tf32 is {tf32!r}", fix="pass True, False or None")
    return tf32


def mixed(compute_type: DataType | torch.dtype | str | None) -> torch.dtype | None:
    """The type layers compute in; None if it is what tensors declare."""
    if compute_type is None:
        return None
    kind = DataType.of(compute_type)
    if kind not in (DataType.FLOAT16, DataType.BFLOAT16):
        raise ArgumentError(
            "compile", f"compute_type is {kind.debug_description}", fix='use "bfloat16" or "float16", or leave it out'
        )
    return kind.torch


def limited(memory_limit: int | None) -> int | None:
    """Bytes a graph may need, or None."""
    if memory_limit is not None and (isinstance(memory_limit, bool) or not isinstance(memory_limit, int)):
        raise DataTypeError("compile", f"memory_limit is {memory_limit!r}", fix="pass an integer number of bytes")
    if memory_limit is not None and memory_limit <= 0:
        raise ArgumentError("compile", f"memory_limit is {memory_limit}", fix="pass a positive number of bytes")
    return memory_limit


def divisible(parallel: Any, options: GraphCompilationOptions) -> Parallel | None:
    """How updates are divided; rejected with options that need the whole batch in one program."""
    if parallel is None:
        return None
    if not isinstance(parallel, Parallel):
        raise DataTypeError("compile", f"parallel is {parallel!r}", fix="pass Parallel(shards=8), or None")
    for option in (GraphCompilationOptions.LINK_GRAPHS, GraphCompilationOptions.DEBUG_LAYERS):
        if option in options:
            raise ArgumentError("compile", f"{option!r} and parallel exclude each other", fix="pass one of them")
    return parallel


def fusion_of(options: GraphCompilationOptions, device: torch.device, parallel: Parallel | None = None) -> Fusion:
    """On CUDA a fused step repays its long compilation, on the CPU a tiny one does; elsewhere it must be requested.

    CHECK_NUMERICS is for debugging; on the CPU its steps stay as they are. If ranks promise the same bits, they fuse
    only on request: the time that compiling takes must not decide which steps are fused.
    """
    if options & (GraphCompilationOptions.DISABLE_LAYER_FUSION | GraphCompilationOptions.DETERMINISTIC):
        return Fusion.NEVER
    if GraphCompilationOptions.FUSE_LAYERS in options:
        return Fusion.FIRST
    if parallel is not None and (parallel.order == TREE or device.type == "cpu"):
        return Fusion.NEVER
    if device.type == "cpu" and GraphCompilationOptions.CHECK_NUMERICS not in options:
        return Fusion.FIXED
    return Fusion.LATER if device.type == "cuda" else Fusion.NEVER


def require_options(options: Any, kind: type) -> None:
    """Rejects options of another kind."""
    if not isinstance(options, kind):
        raise DataTypeError("options", f"the options are {options!r}", fix=f"use {kind.__name__}")
