"""Every layer of the table inside a training graph.

The whole step and the three phases leave the same bits, and so does a graph that was rebuilt from a saved one.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from tests.layers.case import Case
from tests.layers.test_conformance import CASES, each


class OneLayer:
    """A training graph around one layer; outside gradients stand for what would follow it."""

    def __init__(self, case: Case) -> None:
        sg.set_seed(11)
        generator = np.random.default_rng(zlib.crc32(case.name.encode()))
        self.layer = case.make()
        arrays = [np.array(draw(generator)) for draw in case.sources]
        self.data = [array.astype(np.float32) if array.dtype == np.float64 else array for array in arrays]
        self.sources = [sg.Tensor(array.shape, array.dtype, label=f"source {i}") for i, array in enumerate(self.data)]
        graph = sg.Graph()
        if self.layer.is_loss:
            graph.node(self.layer, self.sources[0], loss_labels=self.sources[1:])
        else:
            graph.node(self.layer, *self.sources)
        self.results = graph.result_tensors(self.layer)
        optimizer = sg.SGDOptimizer(learning_rate=0.1, momentum_scale=0.9)
        self.training = sg.TrainingGraph([graph], None, optimizer)
        self.training.compile(sg.Device.cpu(), sg.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS)
        self.training.add_outputs({f"result {i}": result for i, result in enumerate(self.results)})
        self.gradients = [generator.standard_normal(result.shape).astype(np.float32) for result in self.results]
        self.write_gradients()

    def write_gradients(self) -> None:
        for result, gradient in zip(self.results, self.gradients, strict=True):
            if result.data_type.is_floating and not self.layer.is_loss:
                self.training.allocate_user_gradient(result).bind_and_write_data(gradient, sg.Device.cpu())

    def reloaded(self, path: Path) -> "OneLayer":
        """The same from a file: nothing but the data of the calls comes from this program."""
        self.training.save(path)
        other = object.__new__(OneLayer)
        other.training = sg.load(path, sg.Device.cpu())
        (other.layer,) = other.training.layers
        other.results = other.training.result_tensors(other.layer)
        other.sources, other.data, other.gradients = self.sources, self.data, self.gradients
        other.write_gradients()
        return other

    def named(self) -> dict[str, np.ndarray]:
        return {tensor.label: array for tensor, array in zip(self.sources, self.data, strict=True)}

    def whole(self) -> None:
        self.training.execute(self.named())

    def phases(self) -> None:
        self.training.execute_forward(self.named())
        if any(result.data_type.is_floating for result in self.results):
            self.training.execute_gradient()
            if self.layer.parameters:
                self.training.execute_optimizer_update()

    def state(self) -> dict[str, bytes]:
        own = {**self.layer.parameters, **self.layer.statistics}
        named = {**own, **{f"result {i}": result for i, result in enumerate(self.results)}}
        return {name: tensor.numpy().tobytes() for name, tensor in named.items()}


# Recurrences that are recorded step by step take seconds to compile; the other LSTM cases run in every suite.
LONG = {
    f"LSTM, {kind}" for kind in ("packed peepholes", "diagonal peepholes", "forget activation", "result activation")
}


FEW = 3  # cases of each class that the ordinary suite runs; the deep one runs all


def rows() -> Iterator[Any]:
    """The cases, with those that only the deep suite runs marked: of each class, some that lie apart run in both."""
    kinds: dict[type, list[Case]] = defaultdict(list)
    for case in CASES:
        if case.training:
            kinds[type(case.make())].append(case)
    for cases in kinds.values():
        usual = [case for case in cases if case.name not in LONG]
        chosen = {case.name for case in usual[:: -(-len(usual) // FEW)]}
        yield from (pytest.param(c, id=c.name, marks=[] if c.name in chosen else [pytest.mark.deep]) for c in cases)


@pytest.mark.parametrize("case", [*rows()])
def test_whole_step_phases_and_a_graph_from_a_file_leave_the_same_bits(case: Case, tmp_path: Path) -> None:
    one = OneLayer(case)
    before = {name: t.numpy().tobytes() for name, t in one.layer.parameters.items()}
    one.whole()
    if case.differentiable and one.layer.parameters and not _is_still(case):
        assert any(one.state()[name] != bits for name, bits in before.items())  # something was learned
    loaded = one.reloaded(tmp_path)
    assert repr(loaded.layer) == repr(one.layer) and loaded.layer is not one.layer
    for _ in range(2):
        one.whole()
        loaded.phases()
        assert one.state() == loaded.state()


@each([case for case in CASES if not case.training])
def test_an_inference_graph_from_a_file_gives_the_same_bits(case: Case, tmp_path: Path) -> None:
    generator = np.random.default_rng(zlib.crc32(case.name.encode()))
    arrays = [np.array(draw(generator)) for draw in case.sources]
    arrays = [array.astype(np.float32) if array.dtype == np.float64 else array for array in arrays]
    graph = sg.InferenceGraph()
    graph.node(case.make(), *(sg.Tensor(a.shape, a.dtype, label=f"source {i}") for i, a in enumerate(arrays)))
    graph.compile(sg.Device.cpu())
    graph.save(tmp_path)
    found = []
    for one in (graph, sg.load(tmp_path, sg.Device.cpu())):
        result = one.execute({f"source {i}": array for i, array in enumerate(arrays)}).result
        found.append(result.numpy().tobytes())
    assert found[0] == found[1]


def _is_still(case: Case) -> bool:
    return "frozen" in case.name


@pytest.mark.parametrize("kind", ["float64", "float16"])
def test_graphs_compute_in_other_floating_types(kind: str) -> None:
    dtype = np.dtype(kind)
    generator = np.random.default_rng(0)
    x, y = sg.Tensor((4, 3), kind), sg.Tensor((4, 2), kind)
    weights = sg.Tensor((2, 3), kind, data=generator.standard_normal((2, 3)).astype(dtype))
    biases = sg.Tensor((2,), kind, fill=0.0)
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer(weights, biases, sg.ConvolutionDescriptor(1, 3, 2)), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    inputs, labels = generator.standard_normal((4, 3)).astype(dtype), generator.standard_normal((4, 2)).astype(dtype)
    w, b = weights.numpy().astype(np.float64), np.zeros(2)
    for _ in range(3):
        error = inputs @ w.T + b - labels
        loss = training.execute({"x": inputs}, {"y": labels}).loss
        assert loss == pytest.approx(np.mean(error.astype(np.float64) ** 2), rel=1e-12 if kind == "float64" else 1e-2)
        w, b = w - 0.1 * 2 / 8 * error.T @ inputs, b - 0.1 * 2 / 8 * error.sum(0)
    np.testing.assert_allclose(weights.numpy(), w, rtol=1e-12 if kind == "float64" else 1e-2, atol=1e-3)
    assert weights.numpy().dtype == dtype
