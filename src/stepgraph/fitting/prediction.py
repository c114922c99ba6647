"""Predictions for any number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from stepgraph.errors import ArgumentError, DataTypeError
from stepgraph.fitting.data import Source, ahead, kept, source
from stepgraph.graphs.compilation import Compilation
from stepgraph.graphs.compiled import CompiledGraph
from stepgraph.graphs.inference import InferenceGraph, inference_of
from stepgraph.runtime.execution import Execution

# The inference graph over each graph that has a loss, and the compilation it was made from.
_made: WeakKeyDictionary[CompiledGraph, tuple[Compilation, InferenceGraph]] = WeakKeyDictionary()


def predict(
    graph: CompiledGraph, data: Any, *, batch_size: int | None = None, prefetch: int | None = None
) -> dict[str, np.ndarray]:
    """The outputs of a compiled graph for any number of rows, in inference mode; nothing is learned.

    Args:
        graph: a training or inference graph. Losses are left out, so data needs no labels.
        data: arrays, datasets, loaders or batches, as `fit` reads them; labels in them are ignored.
        batch_size: rows of a batch, for arrays and datasets; by default, the graph's own. The last batch may be short.
        prefetch: batches prepared ahead by a thread.

    Returns:
        One array per output, by name, with the rows in the order of the data. Without `add_outputs`, the prediction
        that the loss compares, or the last result, is named `output`; further ones `output2` and so on.

    Example:
        >>> predict(training, pictures)["output"].argmax(axis=1)  # doctest: +SKIP
        array([7, 2, 1])
    """
    if not isinstance(graph, CompiledGraph):
        kind = type(graph).__name__
        raise DataTypeError("predict", f"{kind} is not a training or inference graph", fix="compile one first")
    for name, count, least in (("batch_size", batch_size, 1), ("prefetch", prefetch, 0)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int | np.integer) or count < least):
            raise ArgumentError("predict", f"{name} is {count!r}", fix=f"pass an integer ≥ {least}")
    predictor = _predictor(graph)
    batches = source(predictor, data, batch_size, what="data", inputs_only=True)
    found: dict[str, list[torch.Tensor]] = {}
    for execution in _executions(predictor, batches, prefetch):
        for name in execution.outputs:
            found.setdefault(name, []).append(execution[name].torch().cpu())
    return {name: _joined(predictor, name, arrays) for name, arrays in found.items()}


def _predictor(graph: CompiledGraph) -> InferenceGraph:
    """A graph that needs no labels; made once for each compilation."""
    now = graph.require_session("predict").compilation
    if isinstance(graph, InferenceGraph) and not any(node.is_loss for node in now.nodes):
        return graph
    known = _made.get(graph)
    if known is None or known[0] is not now:
        known = _made[graph] = now, inference_of(graph)
    return known[1]


def _executions(graph: InferenceGraph, batches: Source, prefetch: int | None) -> Iterator[Execution]:
    """One call per batch, each returned when the next one is on its way: reading waits for a GPU."""
    count = (2 if batches.wants_a_thread else 0) if prefetch is None else prefetch
    before: Execution | None = None
    read = batches.epoch(0, (0,))
    if batches.may_overwrite and count:
        read = kept(read, count + 1)
    with closing(ahead(read, count)) as coming:  # type: ignore[type-var]
        for batch in coming:
            execution = graph.execute(*batch.parts, batch_size=batch.rows)
            if before is not None:
                yield before
            before = execution
    if before is not None:
        yield before


def _joined(graph: InferenceGraph, name: str, arrays: list[torch.Tensor]) -> np.ndarray:
    """The rows of all batches."""
    now = graph.require_session("predict").compilation
    if len(arrays) > 1 and not now.feeds.is_batched(now.predictions[name]):
        shape = list(now.predictions[name].shape)
        raise ArgumentError(
            "predict",
            f"the output '{name}' has shape {shape}, not a row per row of the data",
            fix="pass data for one batch, or declare outputs with a row per row",
        )
    whole = arrays[0] if len(arrays) == 1 else torch.cat(arrays)
    return (whole.float() if whole.dtype is torch.bfloat16 else whole).numpy()
