"""LSTMs in training and inference graphs: learning, phases, PyTorch's numbers, states handed on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.layers.recurrent import LSTMLayer
from tests.layers.cases_recurrent import Setting
from tests.layers.test_recurrent import run

BATCH, STEPS = 16, 8


def recall(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Sequences of several lengths; the class is the sign of the first step's first feature, long gone by the end."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((count, BATCH, STEPS, 2)).astype(np.float32)
    lengths = generator.integers(1, STEPS + 1, (count, BATCH)).astype(np.int32)
    return list(zip(x, lengths, (x[:, :, 0, 0] > 0).astype(np.int64), strict=True))


class Recall:
    """An LSTM and a classifier over its last output."""

    def __init__(self, optimizer: sg.Optimizer, **settings: Any) -> None:
        sg.set_seed(3)
        self.x, self.lengths, self.y = (
            sg.Tensor((BATCH, STEPS, 2)),
            sg.Tensor((BATCH,), "int32"),
            sg.Tensor((BATCH,), "int64"),
        )
        self.lstm = LSTMLayer.create(2, 12, returns_sequences=False, **settings)
        self.dense = sg.FullyConnectedLayer.create(12 * self.lstm.descriptor.direction_count, 2)
        graph = sg.Graph()
        last = graph.node(self.lstm, self.x, self.lengths)
        self.logits = graph.node(self.dense, graph.reshape((BATCH, -1), last))
        self.training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), optimizer)
        self.training.add_inputs({"x": self.x, "lengths": self.lengths}, {"y": self.y})
        self.training.compile(sg.Device.cpu())

    def step(self, x: np.ndarray, lengths: np.ndarray, y: np.ndarray) -> float:
        return float(self.training.execute({"x": x, "lengths": lengths}, {"y": y}).loss)

    def phases(self, x: np.ndarray, lengths: np.ndarray, y: np.ndarray) -> float:
        tensors = {"x": self.x, "lengths": self.lengths, "y": self.y}
        self.training.bind_and_write_data({"x": x, "lengths": lengths, "y": y}, tensors, sg.Device.cpu())
        loss = float(self.training.execute_forward().loss)
        self.training.execute_gradient()
        self.training.execute_optimizer_update()
        return loss

    def values(self) -> list[np.ndarray]:
        return [tensor.numpy() for layer in (self.lstm, self.dense) for tensor in layer.parameters.values()]


DEEPER = {"layer_count": 2, "is_bidirectional": True}


@pytest.mark.parametrize(
    "settings",
    [{}, *(pytest.param(one, marks=pytest.mark.deep) for one in (DEEPER, {"peepholes": True}))],
)
def test_training_learns_to_recall(settings: dict) -> None:
    network = Recall(sg.AdamOptimizer(learning_rate=4e-2), **settings)
    losses = [network.step(*batch) for batch in recall(200)]
    assert np.mean(losses[:5]) > 0.5
    assert np.mean(losses[-20:]) < 0.2


@pytest.mark.parametrize("settings", [{}, {"layer_count": 2, "is_bidirectional": True, "dropout": 0.2}])
def test_phases_equal_the_whole_step_to_the_bit(settings: dict) -> None:
    whole, parts = (Recall(sg.AdamOptimizer(learning_rate=1e-2), **settings) for _ in range(2))
    for batch in recall(3):
        assert whole.step(*batch) == parts.phases(*batch)
    for one, other in zip(whole.values(), parts.values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_three_steps_equal_pytorch() -> None:
    network = Recall(sg.SGDOptimizer(learning_rate=0.5), layer_count=2, is_bidirectional=True)
    setting = Setting(inputs=2, hidden=12, layers=2, both=True, sequences=False, batch=BATCH, steps=STEPS)
    layer, dense = network.lstm, network.dense
    mine = {one: one.torch().clone().requires_grad_() for part in (layer, dense) for one in part.parameters.values()}
    for x, lengths, y in recall(3, seed=1):
        ours = network.step(x, lengths, y)
        given = dataclasses.replace(setting, lengths=tuple(int(n) for n in lengths))
        fields = ("input_weights", "hidden_weights", "biases")
        last = given.twin(torch.from_numpy(x), **{name: [mine[one] for one in getattr(layer, name)] for name in fields})
        logits = torch.nn.functional.linear(last.flatten(1), mine[dense.weights], mine[dense.biases])
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y))
        assert ours == pytest.approx(loss.item(), rel=1e-5)
        for leaf, gradient in zip(mine.values(), torch.autograd.grad(loss, list(mine.values())), strict=True):
            leaf.data -= 0.5 * gradient
    for tensor, leaf in mine.items():
        np.testing.assert_allclose(tensor.numpy(), leaf.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_states_come_back_and_go_in_again() -> None:
    """Two halves of a sequence, the second starting from the states of the first, are the whole."""
    setting = Setting(steps=6, layers=2, states_out=True)
    layer = setting.layer()
    graph, x = sg.Graph(), sg.Tensor((3, 6, 3))
    first, second = graph.split(x, 2, dimension=1)
    head = graph.node(layer, first)
    h, c = graph.result_tensors(layer)[1:]
    tail = graph.node(layer, second, h, c)
    joined = graph.concatenate([head, tail], dimension=1)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({"joined": joined, "h": graph.result_tensors(layer)[4]})
    inference.compile(sg.Device.cpu())
    values = np.random.default_rng(1).standard_normal((3, 6, 3)).astype(np.float32)
    inference.execute({"x": values})
    output, h_n, _ = run(layer, [torch.from_numpy(values)]).results
    np.testing.assert_allclose(joined.numpy(), output.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(graph.result_tensors(layer)[4].numpy(), h_n.detach().numpy(), rtol=1e-5, atol=1e-6)
