"""Writes a graph, or a group of linked graphs, to a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepgraph.checkpoint import files
from stepgraph.checkpoint.graph_json import Describer
from stepgraph.checkpoint.kept import Kept
from stepgraph.checkpoint.tensors_file import Stored, ordered
from stepgraph.errors import DataTypeError, ExecutionError, StorageError, reason
from stepgraph.runtime.sliced import Sliced
from stepgraph.runtime.world import ALONE, World

SLICES = "optimizer state for save, which every rank must call"
WRITTEN = "whether the first rank has written a checkpoint"


def save(
    group: Sequence[Kept],
    saved: int,
    path: Any,
    keep: int | None,
    notes: Mapping[str, Any] | None,
    world: World = ALONE,
) -> Path:
    """Writes linked graphs to `path`, or with `keep` as the next checkpoint of a series in it.

    Of several ranks, the first one writes. The others send it their slices of the optimizer's buffers, one after
    another, and all of them even if it cannot write: no rank waits for one that has failed. They return when the
    checkpoint is there, so that any rank can read it, or raise an error as well.

    Args:
        group: all of them.
        saved: the index of the one being saved.
        path: the destination.
        keep: how many checkpoints of a series to keep.
        notes: the user's notes.
        world: the ranks that train them, each of which calls this.
    """
    folder, describer = files.as_path("save", path), Describer(group)
    if not world.is_first:
        describer.describe()
        has_failed = world.any(False, SLICES)
        if not has_failed:
            _fetch_rest(_fetched(describer))
            has_failed = world.any(False, WRITTEN)
        if has_failed:
            raise StorageError(f"{folder}", "the first rank has not written it", fix="see the error of rank 0")
        return folder
    try:
        content = _content(describer, saved, notes)
        files.check_keep(keep)
        target = folder if keep is None else files.next_member(folder)
    except BaseException:
        world.any(True, SLICES)
        raise
    world.any(False, SLICES)
    arrays = _fetched(describer)
    try:
        files.write(target, content, arrays)
    except ExecutionError:  # the other ranks cannot be reached
        raise
    except BaseException:
        _fetch_rest(arrays)
        world.any(True, WRITTEN)
        raise
    world.any(False, WRITTEN)
    if keep is not None:
        files.rotate(folder, keep)
    return target


def _content(describer: Describer, saved: int, notes: Mapping[str, Any] | None) -> dict[str, Any]:
    written = _checked(notes or {})
    description = describer.describe()
    made_by = {"torch": torch.__version__}
    return {"made_by": made_by, "notes": written, "saved": saved, **description}


@dataclass
class _Slices:
    """A buffer that the first rank receives from all when it writes it."""

    of: Sliced
    is_fetched: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def fetch(self) -> torch.Tensor:
        self.is_fetched = True
        found = self.of.on_first(SLICES)
        return torch.empty(0) if found is None else found


def _fetched(describer: Describer) -> dict[str, Stored]:
    """What is written; slices are fetched then."""
    given = describer.encoder.arrays
    return {name: _Slices(one) if isinstance(one, Sliced) else one for name, one in given.items()}


def _fetch_rest(arrays: Mapping[str, Stored]) -> None:
    """Takes part in the exchange of slices that have not been written."""
    for one in ordered(arrays).values():
        if isinstance(one, _Slices) and not one.is_fetched:
            one.fetch()


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
