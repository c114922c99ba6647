"""Fused steps: the same numbers from PyTorch's compiler, also on the CPU where that is asked for."""

import shutil
import threading

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.compiler import fusion
from stepgraph.compiler.step import Fusion
from stepgraph.settings import fusion_of

OPTIONS = sg.GraphCompilationOptions


def network(options: OPTIONS) -> sg.TrainingGraph:
    sg.set_seed(7)
    x, y = sg.Tensor.image(8, 8, 1, 16), sg.Tensor((16,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.BatchNormalizationLayer.create(4), graph.node(sg.ConvolutionLayer.create(1, 4, 3), x))
    hidden = graph.node(sg.PoolingLayer.max(2), graph.node(sg.ActivationLayer.relu(), hidden))
    hidden = graph.node(sg.DropoutLayer(0.2), graph.reshape((16, -1), hidden))
    graph.node(sg.FullyConnectedLayer.create(64, 10), hidden)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), options)
    return training


def losses(training: sg.TrainingGraph) -> list[float]:
    images = np.random.default_rng(1).standard_normal((16, 1, 8, 8)).astype(np.float32)
    return [training.execute({"x": images}, {"y": np.arange(16) % 10}).loss for _ in range(20)]


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
def test_a_fused_step_on_the_cpu_equals_the_plain_one() -> None:
    fused = network(OPTIONS.FUSE_LAYERS)
    np.testing.assert_allclose(losses(fused), losses(network(OPTIONS.DETERMINISTIC)), rtol=1e-4)
    assert next(iter(fused._programs.executables.values())).mode == "fused traced"


def test_who_is_fused_and_when() -> None:
    import torch

    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert fusion_of(OPTIONS.NONE, cpu, planned=False) is Fusion.NEVER
    assert fusion_of(OPTIONS.NONE, cuda, planned=False) is Fusion.LATER
    assert fusion_of(OPTIONS.FUSE_LAYERS, cpu, planned=False) is Fusion.FIRST
    for options in (OPTIONS.DISABLE_LAYER_FUSION, OPTIONS.DETERMINISTIC, OPTIONS.FUSE_LAYERS | OPTIONS.DETERMINISTIC):
        assert fusion_of(options, cuda, planned=False) is Fusion.NEVER
    assert fusion_of(OPTIONS.FUSE_LAYERS, cuda, planned=True) is Fusion.NEVER  # a memory limit is a promise


def test_the_fused_function_is_taken_between_two_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The way of a GPU, with a compiler that only counts and a step that is asked to fuse on the CPU."""
    ready, calls = threading.Event(), []
    training, plain = network(OPTIONS.NONE), network(OPTIONS.NONE)
    (executable,) = training._programs.executables.values()

    def slow(part: object) -> fusion.Function:
        ready.wait(10)
        return lambda *arrays: calls.append(1) or unfused(*arrays)

    unfused = executable._function
    monkeypatch.setattr(fusion, "fuse", slow)
    executable._fusing = fusion.fuse_in_background(executable.part)
    assert losses(training)[:5] == losses(plain)[:5] and not calls  # steps go on meanwhile
    ready.set()
    executable._fusing.result(10)
    assert losses(training) == losses(plain)
    assert len(calls) == 20 and executable.is_fused and "fused" in caplog.text


def test_a_compiler_that_fails_leaves_the_step_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(part: object) -> fusion.Function:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(fusion, "fuse", broken)
    training = network(OPTIONS.NONE)
    (executable,) = training._programs.executables.values()
    executable._fusing = fusion.fuse_in_background(executable.part)
    executable._fusing.exception(10)
    assert np.isfinite(losses(training)).all()
    assert "stay unfused: no compiler here" in caplog.text and not executable.is_fused
