"""Statistics updated together: the same bits as one by one, and one operator for all of them.

The pass runs on CUDA. Here it runs on the CPU, with the operators of each rule in the place of a kernel.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stepgraph as sg
from stepgraph.compiler import phases, pipeline
from stepgraph.compiler.kernels import statistics
from stepgraph.compiler.kernels.statistics import TRACK, Rule, known
from stepgraph.compiler.program import Part, PartName
from stepgraph.compiler.verifier import check
from stepgraph.graphs import compilation

aten = torch.ops.aten
ROW = "merge updates of statistics"
GENERATOR = np.random.default_rng(3)
X = GENERATOR.standard_normal((6, 2, 5, 5)).astype(np.float32)
LABELS = np.array([0, 2, 1, 1, 0, 2])
OPTIONS = sg.GraphCompilationOptions.DETERMINISTIC


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    table = tuple(replace(row, applies=lambda *_: True) if row.name == ROW else row for row in pipeline.TABLE)
    monkeypatch.setattr(pipeline, "TABLE", table)
    yield


def packed(channels: int) -> sg.BatchNormalizationLayer:
    tensors = (sg.Tensor((1, channels, 1, 1), fill=value) for value in (0.0, 1.0, 0.0, 1.0))
    return sg.BatchNormalizationLayer(channels, *tensors, 1e-3, 0.4)


def layers(kind: str) -> list[Any]:
    if kind == "shared":
        return [sg.BatchNormalizationLayer.create(2)] * 2
    if kind == "instances":
        return [sg.InstanceNormalizationLayer.create(2, tracks_running_statistics=True)]
    return [sg.BatchNormalizationLayer.create(2, momentum=0.9), packed(2)]


def network(kind: str, **settings: Any) -> sg.TrainingGraph:
    sg.set_seed(1)
    loss, optimizer = sg.LossLayer.softmax_cross_entropy(axis=1), sg.SGDOptimizer(0.1)
    if kind == "imported":
        torch.manual_seed(0)
        module = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(50, 3))
        training = sg.from_torch(module, (torch.from_numpy(X),)).training(
            loss, optimizer, sg.Tensor((sg.BATCH,), "int64")
        )
    else:
        x, graph = sg.Tensor(X.shape), sg.Graph()
        hidden = x
        for layer in layers(kind):
            hidden = graph.relu(graph.node(layer, hidden))
        graph.node(sg.FullyConnectedLayer.create(50, 3), graph.reshape((6, 50), hidden))
        training = sg.TrainingGraph([graph], loss, optimizer)
        training.add_inputs({"x": x}, {"labels": sg.Tensor((6,), "int64")})
    training.compile(sg.Device.cpu(), OPTIONS, **settings)
    return training


def trained(training: sg.TrainingGraph, labels: np.ndarray = LABELS) -> list[Any]:
    names = [next(iter(training.inputs)), next(iter(training.loss_labels))]
    losses = [training.execute({names[0]: X}, {names[1]: labels}).loss for _ in range(3)]
    return [*losses, *(array.numpy().tobytes() for array in training.state_dict().values())]


def part_of(training: sg.TrainingGraph) -> Part:
    compiled = training.compilation
    return compiled.programs.executable(PartName.STEP, 6).part


def counted(part: Part) -> tuple[int, int]:
    """How many statistics are updated together, and how many one by one."""
    together = [len(node.args[0]) for node in part.nodes if node.target is TRACK]
    alone = [node for node in part.nodes if node.target is aten.copy_.default]
    return sum(together), len(alone)


# PyTorch's modules also count batches, with integers.
CASES = {"batches": (4, 0), "instances": (2, 0), "imported": (4, 2), "shared": (0, 2)}


@pytest.mark.parametrize("kind", ["batches", "imported", "shared", pytest.param("instances", marks=pytest.mark.deep)])
def test_updates_together_have_the_same_bits(kind: str, merged: None) -> None:
    with pytest.MonkeyPatch.context() as before:
        before.setattr(pipeline, "TABLE", tuple(row for row in pipeline.TABLE if row.name != ROW))
        plain = network(kind)
    together = network(kind)
    assert counted(part_of(together)) == CASES[kind]
    assert trained(together) == trained(plain)
    step = together.compilation.programs.program(6).step
    part = phases.whole(pipeline.program(step), together.compilation.kept())
    check(pipeline.settled(part, step, PartName.STEP), part.results)
    if kind == "batches":
        clones = [node for node in part_of(together).nodes if node.target is aten.clone.default]
        assert not clones  # of statistics that no gradient reads


def test_a_refused_call_changes_no_statistic(merged: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "GUARDED", {"cpu"})
    training = network("batches")
    assert counted(part_of(training)) == (4, 1)  # and the note of a refusal
    statistics = [tensor for node in training.compilation.nodes for tensor in node.layer.statistics.values()]
    trained(training)
    before = [tensor.numpy().copy() for tensor in statistics]
    part, arrays = part_of(training), training.session.arrays()
    feeds = {key: array for key, array in training.session.written.items()}
    for key, array in feeds.items():
        if not array.is_floating_point():
            feeds[key] = torch.full_like(array, 7)
    part.module(*({**arrays, **feeds}[key] for key in part.inputs))
    for tensor, old in zip(statistics, before, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), old)


def test_a_fused_step_gets_single_operators(merged: None) -> None:
    part = part_of(network("batches"))
    statistics.expand_statistics(part.module.graph)
    assert TRACK not in {node.target for node in part.nodes}


RULES = [Rule(((aten.lerp.Scalar, ("found", "old", weight)),)) for weight in (0.0, 0.1, 0.499, 0.5, 0.9, 0.99, 1.0)] + [
    Rule(
        (
            (aten.pow.Tensor_Scalar, ("found", -2)),
            (aten.sub.Tensor, (("result", 0), 1e-5)),
            (aten.clamp_min.default, (("result", 1), 0)),
            (aten.lerp.Scalar, (("result", 2), "old", 0.9)),
        )
    ),
    Rule(
        (
            (aten.mul.Tensor, ("old", 0.9)),
            (aten.mul.Tensor, ("found", 0.1)),
            (aten.add.Tensor, (("result", 0), ("result", 1))),
        )
    ),
]


@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_every_rule_has_code(rule: Rule) -> None:
    code = statistics._code(known(rule))
    assert code is not None and code.splitlines()[-1].startswith("P = ")
    assert known(rule) == rule.number == Rule(rule.operators).number


@pytest.mark.gpu
def test_the_kernel_computes_the_bits_of_the_rules() -> None:
    draw = torch.Generator().manual_seed(0)
    counts = [3, 64, 1000, 5000]
    numbers = [known(rule) for rule in RULES for _ in counts]
    old, found = ([torch.rand(n, generator=draw).cuda() for _ in RULES for n in counts] for _ in range(2))
    ours, theirs = [one.clone() for one in old], [one.clone() for one in old]
    with torch.inference_mode():
        statistics.track(ours, found, numbers, torch.tensor(False, device="cuda"))
        assert all(map(torch.equal, ours, old))
        statistics.track(ours, found, numbers, torch.tensor(True, device="cuda"))
        statistics.tracked_one_by_one(theirs, found, numbers, None)
    assert all(map(torch.equal, ours, theirs))
