"""Fused steps: the same numbers from PyTorch's compiler, also on the CPU where that is asked for."""

import copy
import shutil
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import fx

import stepgraph as sg
from stepgraph.compiler import fusion, phases
from stepgraph.compiler.join import join_products
from stepgraph.compiler.small_products import spell_out_small_products
from stepgraph.compiler.step import Fusion
from stepgraph.settings import fusion_of

OPTIONS = sg.GraphCompilationOptions
aten = torch.ops.aten


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


def attention(layers: int) -> sg.TrainingGraph:
    """Self-attentions, each with a shortcut, and two fully connected layers that read the same."""
    sg.set_seed(3)
    x, y = sg.Tensor((4, 6, 16)), sg.Tensor((4, 6, 16))
    graph = sg.Graph()
    z: sg.Tensor = x
    for _ in range(layers):
        z = graph.node(sg.ArithmeticLayer.add(), z, graph.node(sg.MultiheadAttentionLayer.create(16, 2), z, z, z))
    one, other = (graph.node(sg.FullyConnectedLayer.create(16, 16), z) for _ in range(2))
    graph.node(sg.ArithmeticLayer.multiply(), one, other)
    # Not Adam: key biases have no gradient but rounding, which Adam would make as large as any other.
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), OPTIONS.DETERMINISTIC)
    return training


# Forward, of weights and of the source: 2 of 3 products go in an attention (x gets no gradient), 1 of 2 at the end.
JOINED = (2 + 2) + (2 + 2 + 2) + (1 + 1 + 1)


@pytest.mark.parametrize(("change", "fewer"), [(join_products, JOINED), (spell_out_small_products, 27)])
def test_products_are_changed_and_give_the_same(change: Callable[[fx.Graph], None], fewer: int) -> None:
    training = attention(layers=2)
    part = phases.whole(training._programs.program(4), training._programs._kept())
    changed = copy.deepcopy(part.module)
    change(changed.graph)
    changed.recompile()
    generator = torch.Generator().manual_seed(0)
    fed = {key: torch.randn(4, 6, 16, generator=generator) for key in training._feeds.keys}
    arrays = training._bound("step", 4).filled(fed)
    given, again = ([one.clone() for one in arrays] for _ in range(2))
    with torch.no_grad():
        for found, wanted in zip(changed(*given), part.module(*again), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for found, wanted in zip(given, again, strict=True):  # parameters and state change in place
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not all(map(torch.equal, given, arrays))
    products = [
        sum(node.target in (aten.mm.default, aten.addmm.default) for node in one.graph.nodes)
        for one in (part.module, changed)
    ]
    assert products[0] - products[1] == fewer
