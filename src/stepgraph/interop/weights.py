"""Parameters and statistics alone, by name: safetensors files out, safetensors and ONNX files in."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file

from stepgraph.checkpoint.restore_report import Mismatch, RestoreReport
from stepgraph.errors import CheckpointError, DataTypeError, StateError, reason
from stepgraph.graph import Graph
from stepgraph.layers import state
from stepgraph.system.storage import as_path, open_regular, storage, whole

ALIASES = "stepgraph.aliases"  # in the metadata of a file: other names of its tensors, as JSON
FIX = "load what fits: partial=True"


def save_safetensors(graph: Graph, path: str | os.PathLike[str]) -> Path:
    """Writes the parameters and statistics of a graph as one safetensors file, atomically. Returns its path.

    Names are those of `graph.state_dict()`: for an imported model, the model's own. A tensor with several names is
    written once, under the first; the others are in the metadata, as JSON under `stepgraph.aliases`.

    Args:
        graph: any graph, compiled or not.
        path: the file, such as `"model.safetensors"`.

    Example:
        >>> save_safetensors(training, "model.safetensors")  # doctest: +SKIP
    """
    names, target = _names("save_safetensors", graph), as_path("save_safetensors", path)
    arrays: dict[str, torch.Tensor] = {}
    others: dict[str, str] = {}
    for tensor, (first, *more) in state.aliases(names).items():
        arrays[first] = tensor.array()
        others |= {name: first for name in more}
    notes = {"format": "pt", **({ALIASES: json.dumps(others)} if others else {})}
    _write(target, _apart(arrays), notes)
    return target


def load_safetensors(graph: Graph, path: str | os.PathLike[str], *, partial: bool = False) -> RestoreReport:
    """Loads parameters and statistics from a safetensors file, by name; nothing changes unless everything fits.

    One name of a tensor that has several is enough.

    Args:
        graph: any graph, compiled or not.
        path: a file of `save_safetensors`, or of another program with the same names.
        partial: load what fits; the report lists the rest.

    Example:
        >>> print(load_safetensors(training, "model.safetensors"))  # doctest: +SKIP
        model.safetensors: 6 of 6 tensors restored
    """
    names, source = _names("load_safetensors", graph), as_path("load_safetensors", path)
    raw = _read(source)
    try:
        arrays = load_tensors(raw)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        problem = f"it holds no tensors: {reason(error)}"
        raise CheckpointError(f"{source}", problem, fix="pass a safetensors file") from error
    return _load(graph, names, arrays, source, partial)


def load_onnx_weights(graph: Graph, path: str | os.PathLike[str], *, partial: bool = False) -> RestoreReport:
    """Loads parameters and statistics from the initializers of an ONNX file, by name.

    Nothing changes unless everything fits. Initializers that are not weights, such as numbers that an exporter made
    up, are listed as unexpected and do not count. Needs `pip install 'stepgraph[onnx]'`.

    Args:
        graph: any graph, compiled or not.
        path: a file of `save_onnx`, or of another program with the same names.
        partial: load what fits; the report lists the rest.

    Example:
        >>> print(load_onnx_weights(training, "model.onnx"))  # doctest: +SKIP
        model.onnx: 6 of 6 tensors restored
    """
    names, source = _names("load_onnx_weights", graph), as_path("load_onnx_weights", path)
    return _load(graph, names, _initializers(source), source, partial, spare=True)


def _load(
    graph: Graph,
    names: Mapping[str, Any],
    arrays: Mapping[str, torch.Tensor],
    source: Path,
    partial: bool,
    spare: bool = False,
) -> RestoreReport:
    """Writes what fits and reports the rest; with `spare`, the file may hold more."""
    found = state.matched(names, arrays)
    different = tuple(Mismatch(*one) for one in found.different)
    report = RestoreReport(source, found.loaded, found.missing, found.unexpected, different)
    if not partial and (found.missing or different or (found.unexpected and not spare)):
        raise CheckpointError(f"{source}", "the file and the graph do not match", **report.facts, fix=FIX)
    graph.write_state(found)
    return report


def _names(where: str, graph: Any) -> dict[str, Any]:
    if not isinstance(graph, Graph):
        raise DataTypeError(where, f"{type(graph).__name__} is not a graph", fix=f"call {where}(graph, path)")
    return graph.named_tensors()


def _read(path: Path) -> bytes:
    with storage(path, "read"), open_regular(path, CheckpointError) as file:
        return whole(file, os.fstat(file.fileno()).st_size, path.parent, CheckpointError)


def _write(path: Path, arrays: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
    """Replaces a file at once: a reader sees the old or the new one."""
    partial = path.with_name(f".{path.name}.{token_hex(4)}.partial")
    try:
        with storage(path, "written", SafetensorError):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.touch()
            mode = stat.S_IMODE(partial.stat().st_mode)
            save_file(dict(arrays), partial, dict(notes))
            partial.chmod(mode)  # the library creates files that only their owner can read
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _initializers(path: Path) -> dict[str, torch.Tensor]:
    """The weights of an ONNX file that PyTorch has types for."""
    try:
        ir = import_module("onnx_ir")
    except ImportError as error:
        raise StateError(
            "load_onnx_weights", "the package onnx-ir is missing", fix="pip install 'stepgraph[onnx]'"
        ) from error
    with storage(path, "read"):
        open_regular(path, CheckpointError).close()
    try:
        values = ir.load(path).graph.initializers.values()
        return {str(one.name): _array(one.const_value) for one in values if one.const_value is not None}
    except Exception as error:  # a damaged file can make the parser raise anything
        raise CheckpointError(f"{path}", f"it is not a readable ONNX file: {reason(error)}") from error


def _array(tensor: Any) -> torch.Tensor:
    if tensor.dtype.name == "BFLOAT16":
        return torch.from_numpy(np.array(tensor.numpy().view(np.int16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(tensor.numpy()))


def _apart(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arrays on the host, contiguous, each in its own memory, as the library that writes them requires."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, array in arrays.items():
        host = array.detach().cpu().contiguous()
        address = host.untyped_storage().data_ptr()
        found[key] = host.clone() if address in seen else host
        seen.add(address)
    return found
