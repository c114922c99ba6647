"""The conformance cases of all layers as graphs in inference mode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import stepgraph as sg
from stepgraph.errors import StepgraphError
from stepgraph.interop.module import Prediction, module_of
from stepgraph.layers.layer import Layer, Scope
from tests.layers.case import Case
from tests.layers.test_conformance import CASES, Run, call, start

ROWS = (1, 2, 5)
ALL = [case for case in CASES if not case.make().is_loss]


@dataclass
class Wired:
    """One case as a node: its layer, inputs by name and their data, results."""

    case: Case
    run: Run
    inputs: dict[str, sg.Tensor]
    data: dict[str, torch.Tensor]
    results: tuple[sg.Tensor, ...]

    def expected(self) -> list[torch.Tensor]:
        """What the layer computes in inference mode; where the mode does not matter, its NumPy reference."""
        layer, run = self.run.layer, self.run
        if self.case.training and (layer.statistics or type(layer).__name__ in RANDOM):
            arrays = {t: t.torch() for t in run.arrays}
            found = layer.forward(*self.data.values(), scope=Scope(arrays, training=False))
            return list(found) if isinstance(found, tuple | list) else [found]
        return [torch.from_numpy(np.array(one)) for one in call(self.case.reference, run, lambda array: array.numpy())]


RANDOM = {"DropoutLayer", "LSTMLayer", "GRULayer", "MultiheadAttentionLayer"}  # in training


def wire(graph: sg.Graph, case: Case, name: str, *, free: bool = False) -> Wired:
    """Adds a case to a graph; with `free`, the first extent of its sources is `BATCH`."""
    run = start(case, torch.float64)
    layer: Layer = run.layer
    layer.label = name
    data = {f"{name} in {i}": _single(array) for i, array in enumerate(run.sources)}
    first = run.sources[0].shape[0] if run.sources else None
    inputs = {}
    for one, array in data.items():
        rows = sg.BATCH if free and array.shape[0] == first else array.shape[0]
        inputs[one] = sg.Tensor((rows, *array.shape[1:]), array.dtype, label=one)
    graph.node(layer, *inputs.values())
    return Wired(case, run, inputs, data, graph.nodes[-1].results)


def _single(array: torch.Tensor) -> torch.Tensor:
    return array.float() if array.dtype is torch.float64 else array


def freely(graph: sg.Graph, case: Case, name: str) -> Wired | None:
    """The same with `BATCH`, if the case can be wired and run with any number of rows."""
    layer = case.make()
    if isinstance(layer, sg.LSTMLayer) and not layer.is_standard and not layer.descriptor.batch_first:
        return None  # what is first are steps, and there is one subgraph for each
    try:
        alone = sg.InferenceGraph()
        one = wire(alone, case, name, free=True)
        module = module_of(prediction(alone, [one]))
        for rows in ROWS:
            module(*(resized(a, rows) if one.inputs[n].descriptor.is_open else a for n, a in one.data.items()))
    except (StepgraphError, RuntimeError, IndexError):  # what is first is not a batch there
        return None
    return wire(graph, case, name, free=True)


def prediction(graph: sg.InferenceGraph, wired: list[Wired]) -> Prediction:
    """What a graph of several cases computes."""
    graph.add_inputs({name: tensor for one in wired for name, tensor in one.inputs.items()})
    outputs = {f"{one.run.layer.label} out {i}": t for one in wired for i, t in enumerate(one.results)}
    graph.add_outputs(outputs)
    return graph.prediction("test")


def resized(array: torch.Tensor, rows: int) -> torch.Tensor:
    """The rows of an array, repeated or cut."""
    return torch.cat([array] * (rows // len(array) + 1))[:rows]
