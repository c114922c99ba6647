"""The memory that operators share, as the plan knows it, is what they share when they run."""

import gc
from typing import Any

import pytest
import torch
from torch import fx

import stepgraph as sg
from benchmarks.in_stepgraph import Stepgraph
from benchmarks.models import FURTHER, SMALL
from stepgraph.compiler import memory
from stepgraph.compiler.kernels import label_losses
from stepgraph.compiler.program import Part, PartName, fake, notes, storages

LONG = dict.fromkeys(("resnet18", *FURTHER), pytest.mark.deep)


class Watched(fx.Interpreter):
    """Runs a part operator by operator, and compares what each result shares with the arguments."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.module)
        self.wrong: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        if n.op == "call_function":
            for source in n.all_input_nodes:
                # What nothing reads again is written over, and has the memory of the result.
                planned = not set(storages(n)).isdisjoint(storages(source)) or (
                    notes(n).in_place and n.args[0] is source
                )
                if planned is places(found).isdisjoint(places(self.env[source])):
                    self.wrong.append(f"{n.format_node()}: {source} is {'not ' * planned}shared")
        return found


def places(value: Any) -> set[int]:
    """Where the memory of arrays begins."""
    arrays = value if isinstance(value, tuple | list) else [value]
    return {one.untyped_storage().data_ptr() for one in arrays if isinstance(one, torch.Tensor) and one.numel()}


def settled(training: sg.TrainingGraph) -> Part:
    assert training.compilation is not None
    batch = training.session.feeds.batch
    return training.compilation.programs.settled(PartName.STEP, batch)[1][PartName.STEP]


def wrong(part: Part) -> list[str]:
    """Where the plan and what runs differ."""
    given = [fake(node) for node in part.placeholders]
    arrays = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype) for one in given]
    for one in arrays:
        one.fill_(0.5 if one.is_floating_point() else 0)
    watched = Watched(part)
    with torch.inference_mode():
        watched.run(*arrays, enable_io_processing=False)
    return watched.wrong


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in SMALL])
def test_models_share_the_memory_that_the_plan_says(name: str) -> None:
    assert wrong(settled(Stepgraph(SMALL[name], "cpu", dropout=True).training)) == []


def many_classes(rows: int, classes: int, device: str, **settings: Any) -> sg.TrainingGraph:
    x, y, graph = sg.Tensor((rows, 16, 64)), sg.Tensor((rows, 16), "int64"), sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(64, classes), x)
    loss = sg.LossLayer.softmax_cross_entropy(axis=2)
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(device, compute_type="bfloat16", **settings)
    return training


def test_gradients_of_a_loss_are_written_over_the_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_losses, "LARGE", 0)
    monkeypatch.setattr("stepgraph.graphs.compilation.LARGEST", 0)  # nobody reads the predictions
    part = settled(many_classes(3, 300, "cpu"))
    assert label_losses.run_with_gradient_in_place in {node.target for node in part.nodes if notes(node).in_place}
    births, _ = memory.lifetimes(part)
    assert [size for _, size, _ in births.values()].count(2 * 3 * 16 * 300) == 1
    assert wrong(part) == []


@pytest.mark.gpu
def test_the_plan_of_a_loss_with_many_classes_is_within_5_percent_of_the_measured_peak() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    training = many_classes(2048, 1 << 15, "cuda", fuse=False)
    x = {"x": torch.randn(2048, 16, 64, device="cuda")}
    y = {"y": torch.randint(0, 1 << 15, (2048, 16), device="cuda")}
    data = x["x"].nbytes + y["y"].nbytes
    for _ in range(2):  # operator by operator, and captured
        torch.cuda.reset_peak_memory_stats()
        training.execute(x, y).wait()
        measured = torch.cuda.max_memory_allocated() - before - data
        assert training.memory_plan.total == pytest.approx(measured, rel=0.05)
