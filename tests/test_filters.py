"""Filters of convolutions kept in the compute type in the order that convolutions read: no step reorders them.

On CUDA images have their channels last and parameters have copies. Here both are so on the CPU.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import filters
from stepgraph.compiler.kernels.update_kernel import is_ordered
from stepgraph.compiler.program import fake
from stepgraph.compiler.step import KeyKind, Step, gradient, rounded
from stepgraph.graphs import compilation
from stepgraph.graphs.compilation import Compilation
from stepgraph.tensors.tensor import Tensor

aten = torch.ops.aten
X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((2, 6, 16, 16)).astype(np.float32)
CPU, OPTIONS = sg.Device.cpu(), sg.GraphCompilationOptions


@pytest.fixture
def last(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Images have their channels last, and parameters have copies in the compute type."""
    step = Compilation.step

    def with_channels_last(self: Compilation, batch: int, training: bool) -> Step:
        return replace(step(self, batch, training), channels_last=True)

    monkeypatch.setattr(Compilation, "step", with_channels_last)
    monkeypatch.setattr(compilation, "ROUNDED", {"cpu"})
    monkeypatch.setattr(Tensor, "_is_watched", property(lambda tensor: tensor.current is not None))
    monkeypatch.setattr(Tensor, "is_exposed", property(lambda tensor: tensor._shares.are_held))
    yield


def network(device: Any = CPU) -> tuple[sg.TrainingGraph, list[sg.ConvolutionLayer]]:
    """Convolutions: plain, with filters packed as ML Compute packs them, by channel, and transposed."""
    sg.set_seed(0)
    kind = sg.ConvolutionType
    plain = sg.ConvolutionLayer.create(3, 4, 3)
    packed = sg.Tensor((1, 16, 3, 3), random=sg.RandomInitializerType.UNIFORM)
    convolutions = [
        plain,
        sg.ConvolutionLayer(packed, None, sg.ConvolutionDescriptor(3, 4, 4, padding_policy=sg.PaddingPolicy.SAME)),
        sg.ConvolutionLayer.create(4, 4, 3, type=kind.DEPTHWISE),
        sg.ConvolutionLayer.create(4, 6, 2, type=kind.TRANSPOSED, strides=2, padding_sizes=0),
    ]
    x, graph = sg.Tensor(X.shape), sg.Graph()
    hidden = x
    for layer in convolutions:
        hidden = graph.node(layer, hidden)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamWOptimizer(0.01))
    training.add_inputs({"x": x}, {"y": sg.Tensor(Y.shape)})
    training.compile(device, OPTIONS.DETERMINISTIC if device is CPU else OPTIONS.NONE, compute_type="bfloat16")
    return training, convolutions


def losses(training: sg.TrainingGraph) -> list[float]:
    return [training.execute({"x": X}, {"y": Y}).loss for _ in range(3)]


def test_copies_are_kept_in_the_order_that_convolutions_read(last: None) -> None:
    training, (plain, packed, by_channel, transposed) = network()
    program = training.compilation.programs.program(2)
    strides = filters.strides(program.step)
    assert {*strides} == {plain.weights, by_channel.weights, transposed.weights}
    assert strides[plain.weights] == (27, 1, 9, 3)
    assert strides[transposed.weights] == (1, 24, 12, 6)  # input-major, the channels of the result last
    arrays = training.session.state.arrays
    for key, node in program.inputs.items():
        if key.kind is KeyKind.ROUNDED:
            assert arrays[key].stride() == fake(node).stride()
            assert key.owner not in strides or arrays[key].stride() == strides[key.owner]
    copied = [node.args[0] for node in program.nodes if node.target is aten.clone.default]
    assert not {program.inputs[rounded(layer.weights)] for layer in (plain, by_channel, transposed)} & {*copied}
    for layer in (plain, packed, by_channel, transposed):
        assert is_ordered(fake(program.outputs[gradient(layer.weights)]))  # an update reads it where it is


def test_the_same_bits_as_with_filters_that_each_step_reorders(last: None) -> None:
    training, convolutions = network()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "strides", lambda step: {})
        other, others = network()
        assert losses(training) == losses(other)
    for ours, theirs in zip(convolutions, others, strict=True):
        assert ours.weights.numpy().tobytes() == theirs.weights.numpy().tobytes()
        copy = training.session.state.arrays[rounded(ours.weights)]
        assert torch.equal(copy, ours.weights.array().bfloat16())
        assert ours.weights.array().is_contiguous()  # what users see keeps its order


def test_another_layout_gets_other_copies(last: None, monkeypatch: pytest.MonkeyPatch) -> None:
    training, (plain, *_) = network()
    losses(training)
    monkeypatch.setattr(filters, "are_laid_out", lambda step, layer: False)
    training.compile(CPU, OPTIONS.DETERMINISTIC, compute_type="bfloat16")
    assert training.session.state.arrays[rounded(plain.weights)].is_contiguous()
    assert np.isfinite(losses(training)).all()


@pytest.mark.gpu
def test_steps_on_a_gpu_follow_the_cpu() -> None:
    training, (plain, *_, transposed) = network("cuda")
    arrays = training.session.state.arrays
    assert arrays[rounded(plain.weights)].stride() == (27, 1, 9, 3)
    assert arrays[rounded(transposed.weights)].stride() == (1, 24, 12, 6)
    found = [training.execute({"x": X}, {"y": Y}).loss for _ in range(3)]
    np.testing.assert_allclose(found, losses(network()[0]), rtol=0.03)
    assert torch.equal(arrays[rounded(plain.weights)], plain.weights.array().bfloat16())
