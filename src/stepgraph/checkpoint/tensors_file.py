"""A safetensors file, written one array after another: only one has to be in memory, and some come from other ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Protocol

import torch

from stepgraph.tensors import buffers

ALIGNMENT = 8  # bytes; where the arrays begin
_TYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
}


class Fetched(Protocol):
    """An array that is fetched when it is written."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""

    def fetch(self) -> torch.Tensor:
        """The array; called once."""


Stored = torch.Tensor | Fetched


def save_file(arrays: Mapping[str, Stored], path: Path) -> None:
    """Writes arrays, in the order of `ordered`."""
    described, end = {}, 0
    for name, array in ordered(arrays).items():
        start, end = end, end + prod(array.shape) * array.dtype.itemsize
        described[name] = {"dtype": _TYPES[array.dtype], "shape": [*array.shape], "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in ordered(arrays).values():
            whole = array if isinstance(array, torch.Tensor) else array.fetch()
            file.write(buffers.as_bytes(whole.detach().cpu().contiguous()).numpy().data)


def ordered(arrays: Mapping[str, Stored]) -> dict[str, Stored]:
    """The arrays as they are in the file: those with large elements first, so that all are aligned."""
    return dict(sorted(arrays.items(), key=lambda one: -one[1].dtype.itemsize))
