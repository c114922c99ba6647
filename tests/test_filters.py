"""Filters of convolutions kept in the compute type in the order that convolutions read: no step reorders them.

On CUDA images have their channels last and parameters have copies. Here both are so on the CPU.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import filters
from stepgraph.compiler.kernels.update_kernel import is_ordered
from stepgraph.compiler.passes.conversions import convert_in_order
from stepgraph.compiler.program import PartName, fake
from stepgraph.compiler.step import KeyKind, Step, gradient, rounded, value
from stepgraph.graphs import compilation
from stepgraph.graphs.compilation import Compilation
from stepgraph.system import torch_private
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


def test_images_are_converted_and_reordered_at_once(last: None) -> None:
    training, _ = network()
    program = training.compilation.programs.program(2)
    images = program.inputs[value(next(iter(training.inputs.values())))]
    (first,) = images.users
    (second,) = first.users
    assert (first.target, second.target) == (torch_private.to_copy.default, aten.clone.default)
    order = fake(second).stride()
    convert_in_order(program.module.graph)
    (only,) = images.users
    assert only is second and only.target is torch_private.to_copy.default
    made = only.target(torch.from_numpy(X), **only.kwargs)
    assert made.stride() == order == fake(only).stride()
    assert torch.equal(made, torch.from_numpy(X).bfloat16())


def test_fed_images_may_have_their_channels_last(last: None) -> None:
    training, other = network()[0], network()[0]
    (x,) = training.inputs.values()
    assert training.compilation.images == {x}
    images = torch.from_numpy(X).contiguous(memory_format=torch.channels_last)
    for _ in range(3):
        assert training.execute({"x": images}, {"y": Y}).loss == other.execute({"x": X}, {"y": Y}).loss
    assert training.session.written[value(x)].data_ptr() == images.data_ptr()  # read where they are
    part = training.compilation.programs.executable(PartName.STEP, 2).part
    moved = part.reordered({value(x): images.stride()})
    strides = dict(zip(moved.inputs, (fake(node).stride() for node in moved.placeholders), strict=True))
    assert strides[value(x)] == images.stride()
    assert part.reordered({value(x): torch.from_numpy(X).stride()}) is part


def test_images_that_other_layers_read_are_copied_into_order(last: None) -> None:
    x, graph = sg.Tensor(X.shape), sg.Graph()
    graph.node(sg.ConvolutionLayer.create(3, 3, 3), graph.add(x, graph.node(sg.ConvolutionLayer.create(3, 3, 3), x)))
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(CPU, OPTIONS.DETERMINISTIC)
    assert not inference.compilation.images
    images = torch.from_numpy(X).contiguous(memory_format=torch.channels_last)
    inference.execute({"x": images})
    assert inference.session.written[value(x)].is_contiguous()


@pytest.mark.deep
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


def settle(training: sg.TrainingGraph, images: torch.Tensor, labels: torch.Tensor) -> None:
    """Steps until they are fused and captured."""
    executable = training.compilation.programs.executable(PartName.STEP, 2)
    deadline = time.monotonic() + 120
    while "fused CUDA" not in executable.mode and time.monotonic() < deadline:
        training.execute({"x": images}, {"y": labels}).wait()
    assert executable.mode == "fused CUDA graph", executable.fusing


@pytest.mark.gpu
def test_a_gpu_reads_images_in_either_order() -> None:
    first, labels = torch.from_numpy(X).cuda(), torch.from_numpy(Y).cuda()
    last = first.contiguous(memory_format=torch.channels_last)
    found = []
    for order in ([first, first, first], [last, last, last], [last, first, last.clone()]):
        training, _ = network("cuda")
        start = {name: array.clone() for name, array in training.state_dict().items()}
        settle(training, order[0], labels)
        training.load_state_dict(start)
        now = training.progress()
        zeros = {tensor: tuple(map(torch.zeros_like, buffers)) for tensor, buffers in now.buffers.items()}
        training.resume(replace(now, buffers=zeros))
        training.optimizer.time_step = 1
        found.append([training.execute({"x": one}, {"y": labels}).loss for one in (*order, *order)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-3)
