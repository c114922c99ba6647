"""Batches that run in parts: the same numbers as whole ones, and parts that fit by the memory plan."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.fitting import portions
from stepgraph.fitting.data import source
from stepgraph.fitting.portions import Portions, bytes_of
from stepgraph.fitting.trained import Trained
from tests.fit_runs import parameters, renewed

ROWS, WIDTH = 600, 6
QUIET: dict[str, Any] = {"progress": "quiet", "shuffle": False}
X = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
Y = X[:, :3].argmax(axis=1)


def network(loss: sg.Layer | None = None, normalized: bool = False, **settings: Any) -> sg.TrainingGraph:
    sg.set_seed(3)
    x, y, graph = sg.Tensor((4, WIDTH)), sg.Tensor((4,), "int64"), sg.Graph()
    h = x
    for _ in range(1 + normalized):
        h = graph.node(sg.ActivationLayer.tanh(), graph.node(sg.FullyConnectedLayer.create(WIDTH, WIDTH), h))
    if normalized:
        h = graph.node(sg.ReshapeLayer((4, WIDTH, 1, 1)), h)
        h = graph.node(sg.BatchNormalizationLayer.create(WIDTH), h)
        h = graph.node(sg.DropoutLayer(0.1), graph.node(sg.ReshapeLayer((4, WIDTH)), h))
    graph.node(sg.FullyConnectedLayer.create(WIDTH, 3), h)
    training = sg.TrainingGraph(
        [graph], loss or sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.1)
    )
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), sg.GraphCompilationOptions.DETERMINISTIC, **settings)
    return training


def close(a: sg.TrainingGraph, b: sg.TrainingGraph) -> None:
    for mine, theirs in zip(a.layers, b.layers, strict=True):
        for name, tensor in mine.parameters.items():
            np.testing.assert_allclose(tensor.numpy(), theirs.parameters[name].numpy(), rtol=1e-5, atol=1e-6)


SUM, MEAN = sg.ReductionType.SUM, sg.ReductionType.MEAN


@pytest.mark.parametrize(
    "reduction, accumulate",
    [(MEAN, 2), *(pytest.param(*row, marks=pytest.mark.deep) for row in ((MEAN, 1), (SUM, 1), (SUM, 2)))],
)
def test_parts_give_the_numbers_of_whole_batches(reduction: sg.ReductionType, accumulate: int) -> None:
    whole, parts = (network(sg.LossLayer.softmax_cross_entropy(reduction)) for _ in range(2))
    for one in (whole, parts):
        one.optimizer.learning_rate = 0.1 if reduction is sg.ReductionType.MEAN else 0.1 / 256
    limit = whole.memory_plan_for(128).total
    settings: dict[str, Any] = {"batch_size": 256, "epochs": 2, "accumulate": accumulate, "metrics": ["accuracy"]}
    settings |= {"validation": (X[:260], Y[:260]), **QUIET}  # 256, 256 and 88 rows; validation with 256 and 4
    expected = sg.fit(whole, (X, Y), **settings)
    sizes: list[int] = []
    execute, add = parts.execute, parts.add_gradients
    parts.execute = lambda *a, batch_size, **k: sizes.append(batch_size) or execute(*a, batch_size=batch_size, **k)  # type: ignore[method-assign]
    parts.add_gradients = lambda *a, batch_size, **k: sizes.append(batch_size) or add(*a, batch_size=batch_size, **k)  # type: ignore[method-assign]
    history = sg.fit(parts, (X, Y), memory_limit=limit, **settings)
    assert max(sizes) < 256 and history["step"] == expected["step"]
    for name in ("loss", "accuracy", "validation loss", "validation accuracy"):
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)
    np.testing.assert_allclose(history.losses, expected.losses, rtol=1e-5)
    close(parts, whole)
    (note,) = history.notes
    assert note.startswith("batches of 256 rows run in ") and "normalization" not in note


@pytest.mark.deep
def test_the_parts_are_the_largest_that_fit() -> None:
    training = renewed(0, network)
    graph, data = Trained(training), source(training, (X, Y), 256)
    for rows, accumulates in ((60, False), (200, True), (256, False)):
        roomy = Portions(graph, [data], 10**12, accumulates)
        assert roomy.find() == 256
        limit = roomy.needed(rows, rows == 256)
        tight = Portions(graph, [data], limit, accumulates)
        part = tight.find()
        count = -(-256 // part)
        assert tight.needed(part, part == 256 and not accumulates) <= limit  # it fits, and in fewer parts it would not
        assert count == 1 or tight.needed(-(-256 // (count - 1)), False) > limit
        assert count <= -(-256 // rows)


def test_batches_of_one_update_need_the_memory_of_one() -> None:
    """And the sums of the gradients, as the plan says before and after."""
    training = renewed(0, network)
    whole = training.memory_plan_for(64)
    sums = sum(tensor.descriptor.tensor_allocation_size_in_bytes for tensor in training.declaration.parameter_names)
    planned = Portions(Trained(training), [source(training, (X, Y), 64)], 10**12, True).needed(64, False)
    sg.fit(training, (X[:256], Y[:256]), batch_size=64, accumulate=4, epochs=1, **QUIET)
    assert whole.total < planned == training.memory_plan.total <= whole.total + sums


def test_one_row_that_does_not_fit_is_refused() -> None:
    training = renewed(0, network)
    before = parameters(training)
    with pytest.raises(sg.MemoryLimitError, match="even one row at a time needs"):
        sg.fit(training, (X, Y), batch_size=256, memory_limit=300, **QUIET)
    assert parameters(training) == before


def test_what_depends_on_the_whole_batch_is_pointed_out() -> None:
    """Embeddings that count indices and running statistics, in parts of two rows."""
    words, y, graph = sg.Tensor((sg.BATCH, 3), "int64"), sg.Tensor((sg.BATCH, 3, 4)), sg.Graph()
    rows = graph.embedding(words, 5, 4, scales_gradient_by_frequency=True)
    graph.instance_normalization(rows, tracks_running_statistics=True)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"words": words}, {"y": y})
    training.compile("cpu")
    data = np.arange(24).reshape(8, 3) % 5, np.zeros((8, 3, 4), np.float32)
    limit = Portions(Trained(training), [source(training, data, 8)], 1 << 30).needed(2, False)
    text = sg.fit(training, data, batch_size=8, memory_limit=limit, **QUIET).notes[0]
    assert "running statistics are updated by each part" in text and "frequency of indices in each part" in text
    assert "dropout" not in text and "batch normalization" not in text


@pytest.mark.deep
def test_normalization_and_dropout_are_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    training = network(normalized=True)
    limit = training.memory_plan_for(128).total
    history = sg.fit(training, (X, Y), batch_size=256, memory_limit=limit, progress="plain")
    text = history.notes[0]
    assert "batch normalization uses the statistics of each part" in text and "dropout draws other masks" in text
    assert text in capsys.readouterr().out and "statistics of each part" in str(history)


@pytest.mark.deep
def test_auto_is_what_this_machine_has_free() -> None:
    training, whole = network(), network()
    history = sg.fit(training, (X, Y), batch_size=256, memory_limit="auto", **QUIET)  # this machine has enough
    expected = sg.fit(whole, (X, Y), batch_size=256, **QUIET)
    assert history.notes == [] and parameters(training) == parameters(whole) and history.losses == expected.losses


def test_auto_asks_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(portions, "free", lambda device: asked.append(device) or 20_000)
    training = renewed(0, network)
    history = sg.fit(training, (X, Y), batch_size=256, memory_limit="auto", **QUIET)
    assert asked == [training.device] and "batches of 256 rows run in" in history.notes[0]


def test_the_free_memory_of_this_machine_is_plausible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**20 < portions.free(sg.Device.cpu()) < 2**50
    assert portions._of_container(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600\n")
    assert portions._of_container(tmp_path) == sys.maxsize
    (tmp_path / "memory.max").write_text("1000\n")
    assert portions._of_container(tmp_path) == 400
    monkeypatch.setattr(Path, "exists", lambda self: False)  # as on macOS
    assert portions._of_machine() > 2**20


@pytest.mark.deep
def test_batches_of_a_stream_are_divided_too() -> None:
    training, whole = network(), network()
    batches = [(X[i : i + 200], Y[i : i + 200]) for i in range(0, ROWS, 200)]
    limit = training.memory_plan_for(64).total
    sg.fit(whole, batches, **QUIET)
    sg.fit(training, batches, memory_limit=limit, **QUIET)
    close(training, whole)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=200
    )
    again = network()
    history = sg.fit(again, loader, memory_limit=limit, **QUIET)
    assert "batches of 200 rows" in history.notes[0]
    close(again, whole)


def pairs() -> sg.TrainingGraph:
    """A row of labels for every two rows of the input."""
    sg.set_seed(3)
    x, y, graph = sg.Tensor((2 * sg.BATCH, WIDTH)), sg.Tensor((sg.BATCH, 3)), sg.Graph()
    graph.sum(graph.dense(x, 3).reshape(sg.BATCH, -1, 3), [1]).reshape(sg.BATCH, 3)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", deterministic=True)
    return training


def test_inputs_with_several_rows_for_each_of_the_batch_are_divided() -> None:
    whole, parts = pairs(), pairs()
    batches = [(X[:80], X[200:240, :3]), (X[80:120], X[300:320, :3])]
    sg.fit(whole, batches, epochs=2, **QUIET)
    history = sg.fit(parts, batches, epochs=2, memory_limit=parts.memory_plan_for(9).total, **QUIET)
    assert history.notes[0].startswith("batches of 40 rows run in ")  # of the longest in the list
    close(parts, whole)


def test_batches_of_unknown_size_are_refused() -> None:
    training = pairs()
    with pytest.raises(sg.ArgumentError, match="neither the graph nor the data shows"):
        sg.fit(training, lambda epoch: [(X[:80], X[:40, :3])], memory_limit="1 GB", **QUIET)
    history = sg.fit(training, [(X[:80], X[:40, :3])], memory_limit="1 GB", **QUIET)
    assert history.notes == [] and ("step", 40) in training.executables  # it fits, so it is not divided


def test_inputs_that_cannot_be_divided_are_refused() -> None:
    sg.set_seed(3)
    x, mask, y, graph = sg.Tensor((sg.BATCH, 3)), sg.Tensor((sg.BATCH, sg.BATCH)), sg.Tensor((sg.BATCH, 3)), sg.Graph()
    graph.node(sg.MatMulLayer(sg.MatMulDescriptor()), [mask, graph.dense(x, 3)])
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x, "mask": mask}, {"y": y})
    training.compile("cpu", deterministic=True)
    batch = {"x": X[:40, :3], "mask": np.eye(40, dtype=np.float32), "y": X[:40, :3]}
    assert sg.fit(training, [batch], memory_limit="1 GB", **QUIET).notes == []
    with pytest.raises(sg.ArgumentError, match=r"input 'mask'\) cannot be divided with the batch"):
        sg.fit(training, [batch], memory_limit=training.memory_plan_for(9).total, **QUIET)


@pytest.mark.deep
def test_the_limit_of_compile_counts_too() -> None:
    free = network()
    training = network(memory_limit=free.memory_plan_for(128).total)
    history = sg.fit(training, (X, Y), batch_size=256, memory_limit="1 GiB", **QUIET)
    assert "run in" in history.notes[0]


@pytest.mark.deep
def test_a_resumed_run_divides_batches_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(sg.Callback):
        def step(self, moment: sg.Moment) -> None:
            if moment.step == 4:
                moment.stop()

    free = [30_000]
    monkeypatch.setattr(portions, "free", lambda device: free[0])
    settings: dict[str, Any] = {"batch_size": 256, "memory_limit": "auto", "epochs": 3, **QUIET}
    whole, resumed = network(), network()
    sg.fit(whole, (X, Y), **settings)
    sg.fit(network(), (X, Y), checkpoints=tmp_path, callbacks=[Stop()], **settings)
    free[0] = 10**9
    sg.fit(resumed, (X, Y), checkpoints=tmp_path, resume=True, **settings)
    assert parameters(resumed) == parameters(whole)


@pytest.mark.parametrize(
    "given, wanted",
    [
        ("4 GiB", 4 * 2**30),
        ("1.5kib", 1536),
        ("2 MB", 2 * 10**6),
        ("500", 500),
        ("3 k", 3000),
        (7, 7),
        ("auto", "auto"),
    ],
)
def test_limits_may_have_units(given: Any, wanted: Any) -> None:
    assert bytes_of(given) == wanted


@pytest.mark.parametrize("given", ["4 GiBi", "-1 GB", "", "much", 0, -5, 1.5, True, "0 GB"])
def test_senseless_limits_are_refused(given: Any) -> None:
    with pytest.raises(sg.StepgraphError, match="memory_limit is"):
        bytes_of(given)


@pytest.mark.gpu
def test_parts_on_a_gpu_fit_and_agree() -> None:
    training, whole = network(), network()
    for one in (training, whole):
        one.compile(sg.Device.gpu())
    limit = training.memory_plan_for(16).total * 3
    history = sg.fit(training, (X, Y), batch_size=256, epochs=8, memory_limit=limit, **QUIET)
    expected = sg.fit(whole, (X, Y), batch_size=256, epochs=8, **QUIET)
    np.testing.assert_allclose(history.losses, expected.losses, rtol=1e-3)
    assert sg.fit(training, (X, Y), batch_size=256, memory_limit="auto", **QUIET).stopped == "finished"
