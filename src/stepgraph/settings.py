"""What `compile` and `execute` may be asked for, checked and decided."""

from __future__ import annotations

from typing import Any

import torch

from stepgraph.compiler.step import Fusion
from stepgraph.errors import ArgumentError, DataTypeError
from stepgraph.types import DataType, GraphCompilationOptions


def mixed(compute_type: DataType | torch.dtype | str | None) -> torch.dtype | None:
    """The type layers compute in, or None where it is what tensors declare."""
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
        raise DataTypeError("compile", f"memory_limit is {memory_limit!r}", fix="give a whole number of bytes")
    if memory_limit is not None and memory_limit <= 0:
        raise ArgumentError("compile", f"memory_limit is {memory_limit}", fix="give a positive number of bytes")
    return memory_limit


def fusion_of(options: GraphCompilationOptions, device: torch.device, *, planned: bool) -> Fusion:
    """On CUDA a fused step pays for its long compilation; elsewhere only who asks for it gets it.

    A step that must keep to a plan (`planned`) is not fused: PyTorch's compiler makes plans of its own.
    """
    if options & (GraphCompilationOptions.DISABLE_LAYER_FUSION | GraphCompilationOptions.DETERMINISTIC) or planned:
        return Fusion.NEVER
    if GraphCompilationOptions.FUSE_LAYERS in options:
        return Fusion.FIRST
    return Fusion.LATER if device.type == "cuda" else Fusion.NEVER


def require_options(options: Any, kind: type) -> None:
    """Refuses options of another kind."""
    if not isinstance(options, kind):
        raise DataTypeError("options", f"the options are {options!r}", fix=f"use {kind.__name__}")
