"""Indices of max pools wait for the gradient pass in few bytes, where that saves memory."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import memory, pipeline, verifier
from stepgraph.compiler.passes import pool_indices
from stepgraph.compiler.passes.pool_first import POOL, POOL_GRADIENT
from stepgraph.compiler.program import Part, PartName, fake, storages

PASS = "keep indices of pools narrow"
IMAGES = np.random.default_rng(0).standard_normal((4, 3, 16, 16)).astype(np.float32)
LABELS = np.array([0, 1, 2, 0])


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on the CPU."""
    rows = [replace(row, applies=lambda step, part: True) if row.name == PASS else row for row in pipeline.TABLE]
    monkeypatch.setattr(pipeline, "TABLE", tuple(rows))


def network(more: int = 0, **settings: Any) -> sg.TrainingGraph:
    """A network in which a pool's windows overlap, and another's do not, with more layers between them."""
    sg.set_seed(2)
    x, y, graph = sg.Tensor((4, 3, 16, 16)), sg.Tensor((4,), "int64"), sg.Graph()
    hidden = graph.node(sg.ConvolutionLayer.create(3, 8, 3), x)
    hidden = graph.node(sg.PoolingLayer.max(3, 1), hidden)
    for _ in range(more):
        hidden = graph.node(sg.ActivationLayer.tanh(), graph.node(sg.ActivationLayer.sigmoid(), hidden))
    hidden = graph.node(sg.ConvolutionLayer.create(8, 8, 3), hidden)
    hidden = graph.node(sg.PoolingLayer.max(2), hidden)
    flat = graph.reshape((4, -1), hidden)
    graph.node(sg.FullyConnectedLayer.create(flat.shape[1], 3), flat)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.01))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", deterministic=True, **settings)
    return training


def settled(training: sg.TrainingGraph) -> Part:
    assert training.compilation is not None
    return training.compilation.programs.settled(PartName.STEP, 4)[1][PartName.STEP]


def losses(training: sg.TrainingGraph) -> list[float]:
    return [training.execute({"x": IMAGES}, {"y": LABELS}).loss for _ in range(4)]


def kinds(part: Part) -> list[torch.dtype]:
    """The types of the indices that gradients wait with."""
    gradients = [node for node in part.nodes if node.target is POOL_GRADIENT]
    return [fake(node.args[-1].args[0]).dtype for node in gradients if node.args[-1].target is pool_indices.CONVERT]


def test_the_same_bits_in_less_memory(monkeypatch: pytest.MonkeyPatch, everywhere: None) -> None:
    narrow = network()
    with monkeypatch.context() as without:
        without.setattr(pool_indices, "GRADIENTS", {})
        plain = network()
        assert kinds(settled(plain)) == []
    assert kinds(settled(narrow)) == [torch.int16, torch.int16]
    verifier.check(settled(narrow))
    found = losses(narrow)
    assert found == losses(plain) and found[-1] < found[0]
    pooled = sum(fake(node)[1].numel() for node in settled(plain).nodes if node.target is POOL)
    saved = plain.memory_plan.intermediates - narrow.memory_plan.intermediates
    assert 0.5 * 6 * pooled < saved <= 6 * pooled


def test_steps_with_a_memory_limit(everywhere: None) -> None:
    plain = network(4)
    limit = int(0.8 * plain.memory_plan.total)
    limited = network(4, memory_limit=limit)
    assert limited.memory_plan.total <= limit
    assert losses(limited) == losses(plain)


def test_only_what_exists_at_the_peak_is_converted(monkeypatch: pytest.MonkeyPatch, everywhere: None) -> None:
    whole = network()
    pools = [node for node in settled(whole).nodes if node.target is POOL]
    chosen: list[set[int]] = []

    def second(part: Part) -> set[int]:
        chosen.append({storages(node)[1] for node in part.nodes if node.target is POOL and node.name == pools[1].name})
        return chosen[-1]

    monkeypatch.setattr(memory, "alive_at_peak", second)
    assert len(kinds(settled(network()))) == len(chosen[0]) == 1


@pytest.mark.parametrize(
    ("extent", "kind"), [(128, torch.int16), (180, torch.int16), (182, torch.int32), (256, torch.int32)]
)
def test_indices_fit(extent: int, kind: torch.dtype, everywhere: None) -> None:
    x, graph = sg.Tensor((1, 1, extent, extent)), sg.Graph()
    hidden = graph.node(sg.PoolingLayer.max(2), graph.node(sg.ConvolutionLayer.create(1, 1, 1), x))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(1.0))
    training.add_inputs({"x": x}, {"y": sg.Tensor(hidden.shape)})
    training.compile("cpu", deterministic=True)
    assert training.compilation is not None
    part = training.compilation.programs.settled(PartName.STEP, 1)[1][PartName.STEP]
    assert kinds(part) == [kind]
    image = np.zeros((1, 1, extent, extent), np.float32)
    first = training.layers[0].parameters["weights"].numpy().copy()
    image[..., -1, -1] = 3 * np.sign(first.item())  # the largest index there is
    training.execute({"x": image}, {"y": np.zeros(hidden.shape, np.float32)})
    last = training.layers[0].parameters["weights"].numpy()
    np.testing.assert_allclose(first - last, 2 * 3 * (3 * first) / np.prod(hidden.shape), rtol=1e-4, atol=1e-6)


def test_passes_for_fused_steps_see_the_indices_themselves(monkeypatch: pytest.MonkeyPatch, everywhere: None) -> None:
    with monkeypatch.context() as without:
        without.setattr(pool_indices, "GRADIENTS", {})
        plain = settled(network())
    narrow = settled(network())
    assert len(narrow.nodes) == len(plain.nodes) + 4
    pool_indices.restore(narrow.module.graph)
    assert [node.target for node in narrow.nodes] == [node.target for node in plain.nodes]
    verifier.check(narrow)
    gradients = [node for node in narrow.nodes if node.target is POOL_GRADIENT]
    assert all(node.args[-1].args[0].target is POOL for node in gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("fuse", [False, True])
def test_on_cuda(fuse: bool) -> None:
    on_cpu = network()
    on_gpu = network()
    on_gpu.compile("cuda", fuse=fuse, deterministic=True)
    assert torch.int16 in kinds(settled(on_gpu))
    np.testing.assert_allclose(losses(on_gpu), losses(on_cpu), rtol=1e-4)
