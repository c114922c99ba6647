"""Writing a graph, or a group of linked graphs, into a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepgraph.checkpoint import files
from stepgraph.checkpoint.structure import Describer
from stepgraph.errors import DataTypeError, reason
from stepgraph.runtime.execution import turn

if TYPE_CHECKING:
    from stepgraph.graphs.compiled import CompiledGraph


def save(graph: CompiledGraph, path: Any, keep: int | None, notes: Mapping[str, Any] | None) -> Path:
    """Writes a checkpoint at `path`, or with `keep` the next one of a series in it."""
    folder = files.as_path("save", path)
    files.check_keep(keep)
    written = _checked(notes or {})
    # No other thread may run a step while the arrays are read.
    with nullcontext() if graph.device is None else turn(graph.device):
        describer = Describer(graph._linked)
        description = describer.describe()
        made_by = {"torch": torch.__version__}
        saved = {"made_by": made_by, "notes": written, "saved": graph._linked.index(graph), **description}
        target = folder if keep is None else files.next_member(folder)
        files.write(target, saved, _apart(describer.encoder.arrays))
    if keep is not None:
        files.rotate(folder, keep)
    return target


def _checked(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Notes as JSON gives them back; refused where it cannot."""
    try:
        if not isinstance(notes, Mapping):
            raise TypeError(f"{type(notes).__name__} is no dictionary")
        return json.loads(json.dumps(dict(notes), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataTypeError(
            "save", f"the notes cannot be JSON: {reason(error)}", fix="give a dictionary of finite numbers and text"
        ) from None


def _apart(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arrays on the host, contiguous, each with memory of its own, as a safetensors file wants them."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, array in arrays.items():
        host = array.detach().cpu().contiguous()
        address = host.untyped_storage().data_ptr()
        found[key] = host.clone() if address in seen else host
        seen.add(address)
    return found
