"""One batch for a saved graph: random from a seed, or read from a file."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepgraph.errors import DataError, DataTypeError, StorageError, UnknownNameError, reason
from stepgraph.graphs.compiled import CompiledGraph
from stepgraph.layers.integers import accepted
from stepgraph.tensors.extents import shape_at
from stepgraph.tensors.tensor import Tensor

Batch = dict[str, np.ndarray | torch.Tensor]


def feeds(graphs: Sequence[CompiledGraph]) -> Iterator[tuple[str, str, Tensor]]:
    """The tensors that linked graphs need data for, as kind, name, tensor; excludes what one produces for another."""
    made = {tensor for graph in graphs for node in graph.shown_nodes() for tensor in node.results}
    for graph in graphs:
        for kind, name, tensor in graph.declaration.feeds:
            if tensor not in made and tensor in graph.declaration.feeds.tensors:
                yield kind, name, tensor


def drawn(graphs: Sequence[CompiledGraph], rows: int, seed: int) -> Batch:
    """Inputs from a normal distribution, labels and weights from [0, 1), integers within the range of their readers."""
    generator = np.random.default_rng(seed)
    nodes = [node for graph in graphs for node in graph.shown_nodes()]
    found: Batch = {}
    for kind, name, tensor in feeds(graphs):
        shape = shape_at(tensor.shape, graphs[0].declaration.feeds.batch, rows)
        if not tensor.data_type.is_floating:
            numbers: np.ndarray = generator.integers(*accepted(tensor, nodes), shape)
        else:
            numbers = generator.standard_normal(shape) if kind == "input" else generator.random(shape)
        found[name] = torch.from_numpy(np.asarray(numbers)).to(tensor.data_type.torch)
    return found


def read(path: Path, graphs: Sequence[CompiledGraph], unused: Collection[str] = ()) -> Batch:
    """The arrays of an `.npz` file, which must have one per name, and may have some of the `unused` names."""
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            found: Batch | None = dict(file) if isinstance(file, np.lib.npyio.NpzFile) else None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        message = getattr(error, "strerror", None) or reason(error)
        problem = f"it contains no readable arrays: {message}"
        raise StorageError(f"{path}", problem, fix="write it with numpy.savez") from None
    if found is None:
        raise DataTypeError(f"{path}", "it holds one array without a name", fix="write it with numpy.savez")
    wanted = {name: tensor for _, name, tensor in feeds(graphs)}
    found = {name: array for name, array in found.items() if name in wanted or name not in unused}
    _check_names(path, found, wanted)
    return found


def _check_names(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Tensor]) -> None:
    needed = ", ".join(f"{name} {tensor.descriptor}" for name, tensor in wanted.items())
    missing, unknown = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    if missing:
        raise DataError(f"{path}", f"it has no array {sorted(missing)[0]!r}", needed=needed, fix="add it")
    if unknown:
        raise UnknownNameError(
            f"{path}", f"the graph has no input or label {sorted(unknown)[0]!r}", needed=needed, fix="leave it out"
        )


def rows_of(batch: Batch, graphs: Sequence[CompiledGraph]) -> int:
    """The number of rows of a batch: the first dimension of the first input."""
    declared = graphs[0].declaration.feeds
    batched = [tensor for tensor in declared.tensors if declared.is_batched(tensor)] or declared.tensors
    first = next(((name, tensor) for _, name, tensor in feeds(graphs) if tensor is batched[0]), None)
    return int(declared.batch) if first is None else declared.rows_in(batch[first[0]], first[1])
