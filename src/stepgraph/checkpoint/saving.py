"""Writes a graph, or a group of linked graphs, to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stepgraph.checkpoint import files
from stepgraph.checkpoint.graph_json import Describer
from stepgraph.checkpoint.kept import Kept
from stepgraph.errors import DataTypeError, reason


def save(group: Sequence[Kept], saved: int, path: Any, keep: int | None, notes: Mapping[str, Any] | None) -> Path:
    """Writes linked graphs to `path`, or with `keep` as the next checkpoint of a series in it.

    Args:
        group: all of them.
        saved: the index of the one being saved.
        path: the destination.
        keep: how many checkpoints of a series to keep.
        notes: the user's notes.
    """
    folder = files.as_path("save", path)
    files.check_keep(keep)
    written = _checked(notes or {})
    describer = Describer(group)
    description = describer.describe()
    made_by = {"torch": torch.__version__}
    content = {"made_by": made_by, "notes": written, "saved": saved, **description}
    target = folder if keep is None else files.next_member(folder)
    files.write(target, content, apart(describer.encoder.arrays))
    if keep is not None:
        files.rotate(folder, keep)
    return target


def _checked(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Notes as JSON returns them; rejects values that JSON cannot hold."""
    try:
        if not isinstance(notes, Mapping):
            raise TypeError(f"{type(notes).__name__} is not a dictionary")
        return json.loads(json.dumps(dict(notes), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataTypeError(
            "save", f"the notes cannot be written as JSON: {reason(error)}", fix="pass finite numbers and text"
        ) from None


def apart(arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The arrays on the host, contiguous, each in its own memory, as a safetensors file requires."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for key, array in arrays.items():
        host = array.detach().cpu().contiguous()
        address = host.untyped_storage().data_ptr()
        found[key] = host.clone() if address in seen else host
        seen.add(address)
    return found
