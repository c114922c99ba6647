"""Values go to the device while the step is recorded; nobody notices but the clock."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.graphs.compilation import Compilation
from stepgraph.tensors import arrivals
from stepgraph.tensors.tensor import Tensor


@pytest.fixture(autouse=True)
def _sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "SENT", {"cpu", "cuda"})


def network() -> sg.TrainingGraph:
    sg.set_seed(3)
    x, y, graph = sg.Tensor((4, 3), label="x"), sg.Tensor((4, 2), label="y"), sg.Graph()
    graph.dense(graph.batch_normalization(graph.dense(x, 5)), 2)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    return training


def losses(training: sg.TrainingGraph) -> list[float]:
    rng = np.random.default_rng(1)
    data = {"x": rng.standard_normal((4, 3), np.float32)}, {"y": rng.standard_normal((4, 2), np.float32)}
    return [training.execute(*data).loss for _ in range(4)]


def test_training_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = network()
    ahead.compile("cpu")
    monkeypatch.setattr(arrivals, "SENT", set())
    plain = network()
    plain.compile("cpu")
    assert losses(ahead) == losses(plain)


@pytest.mark.parametrize("mode", ["default type", "determinism", "precision"])
def test_compiling_does_not_wait_for_a_thread_that_waits_for_it(mode: str) -> None:
    """Such settings belong to the process: who changes them excludes other threads, but not the one it waits for."""
    matmul = torch.get_float32_matmul_precision()
    if mode == "default type":
        torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(mode == "determinism")
    torch.set_float32_matmul_precision("high" if mode == "precision" else matmul)
    try:
        training = network()
        compiling = threading.Thread(target=training.compile, args=("cpu",), daemon=True)
        compiling.start()
        compiling.join(60)
        assert not compiling.is_alive() and len(losses(training)) == 4
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(matmul)


def test_values_are_on_their_way_before_the_step_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()
    on, prepare = Tensor.on, Compilation.prepare

    def noted(tensor: Tensor, device: sg.Device) -> Any:
        order.append("value")
        return on(tensor, device)

    def recorded(compilation: Compilation, call: str) -> None:
        while not order:  # without a thread this would never end
            pass
        order.append("recorded")
        prepare(compilation, call)

    monkeypatch.setattr(Tensor, "on", noted)
    monkeypatch.setattr(Compilation, "prepare", recorded)
    network().compile("cpu")
    assert order[0] == "value" and "recorded" in order


def test_what_goes_wrong_on_the_way_is_raised_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    training = network()
    training.compile("cpu")
    before = losses(training)[-1]
    on = Tensor.on

    def full(tensor: Tensor, device: sg.Device) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Tensor, "on", full)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        training.compile("cpu")
    monkeypatch.setattr(Tensor, "on", on)
    assert losses(training)[0] < before


@pytest.mark.gpu
def test_parameters_arrive_on_a_gpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        training = network()
        training.compile(device, tf32=False)
        found.append(losses(training))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
