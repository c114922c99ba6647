"""Class indices of every step, `[batch, steps]`, in whole graphs: trained, accumulated, measured, saved, refused."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph as sg
from stepgraph.cli import batch as cli_batch
from stepgraph.compiler.step import value
from stepgraph.fitting.metrics import Tally
from stepgraph.runtime.indices import Indices

ROWS, STEPS, INPUTS, CLASSES, RATE = 8, 5, 4, 7, 0.3
IGNORED = -100
Data = tuple[np.ndarray, np.ndarray, np.ndarray]


def network(
    rows: int = ROWS, *, weighted: bool = False, options: Any = sg.GraphCompilationOptions.NONE, **settings: Any
) -> sg.TrainingGraph:
    sg.set_seed(1)
    x, y = sg.Tensor((rows, STEPS, INPUTS)), sg.Tensor((rows, STEPS), "int64")
    w = sg.Tensor((rows, STEPS))
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(INPUTS, CLASSES), x)
    loss = sg.LossLayer.softmax_cross_entropy(axis=-1, ignored_label=IGNORED, **settings)
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(learning_rate=RATE))
    training.add_inputs({"x": x}, {"y": y}, *[{"w": w}] * weighted)
    training.compile(sg.Device.cpu())
    return training


def data(rows: int, seed: int = 0) -> Data:
    """Few labels count in some rows, none in others."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, STEPS, INPUTS)).astype(np.float32)
    y = random.integers(0, CLASSES, (rows, STEPS))
    y[random.random((rows, STEPS)) < random.random((rows, 1))] = IGNORED
    y[:ROWS] = IGNORED if rows > ROWS else y[:ROWS]
    return x, y, random.random((rows, STEPS)).astype(np.float32)


def parameters(training: sg.TrainingGraph) -> list[torch.Tensor]:
    return [t.torch().clone() for layer in training.layers for t in layer.parameters.values()]


def trained_by_torch(start: list[torch.Tensor], batches: list[Data], weighted: bool) -> tuple[list[float], list[Any]]:
    """The same steps in float64."""
    weight, bias = (one.double().requires_grad_() for one in start)
    losses = []
    for x, y, w in batches:
        logits = F.linear(torch.from_numpy(x).double(), weight.reshape(CLASSES, INPUTS), bias.reshape(CLASSES))
        labels = torch.from_numpy(y).reshape(-1)
        each = F.cross_entropy(logits.reshape(-1, CLASSES), labels, ignore_index=IGNORED, reduction="none")
        factors = torch.from_numpy(w).double().reshape(-1) if weighted else torch.ones_like(each)
        loss = (each * factors).sum() / factors[labels != IGNORED].sum()
        losses.append(loss.item())
        for one, slope in zip((weight, bias), torch.autograd.grad(loss, (weight, bias)), strict=True):
            one.data -= RATE * slope
    return losses, [weight, bias]


def same(training: sg.TrainingGraph, wanted: list[torch.Tensor]) -> None:
    for ours, theirs in zip(parameters(training), wanted, strict=True):
        torch.testing.assert_close(
            ours.double().reshape(-1), theirs.detach().double().reshape(-1), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_steps_are_those_of_pytorch_whole_and_in_phases(weighted: bool) -> None:
    batches = [data(ROWS, seed) for seed in range(4)]
    settings = {"weighted": weighted, "divides_by_weights": weighted}
    whole, phases = network(**settings), network(**settings)
    losses, wanted = trained_by_torch(parameters(whole), batches, weighted)
    for (x, y, w), loss in zip(batches, losses, strict=True):
        parts = ({"x": x}, {"y": y}, *[{"w": w}] * weighted)
        assert whole.execute(*parts).loss == pytest.approx(loss, rel=1e-5)
        tensors = {**phases.inputs, **phases.loss_labels, **phases.loss_label_weights}
        phases.bind_and_write_data({k: v for part in parts for k, v in part.items()}, tensors, sg.Device.cpu())
        assert phases.execute_forward().loss == pytest.approx(loss, rel=1e-5)
        phases.execute_gradient()
        phases.execute_optimizer_update()
    same(whole, wanted)
    same(phases, wanted)


def test_other_batch_sizes_and_batches_without_labels() -> None:
    training = network()
    before = parameters(training)
    x, y, _ = data(13)
    assert training.execute({"x": x}, {"y": np.full_like(y, IGNORED)}, batch_size=13).loss == 0
    same(training, before)
    losses, wanted = trained_by_torch(before, [(x, y, x)], weighted=False)
    assert training.execute({"x": x}, {"y": y}, batch_size=13).loss == pytest.approx(losses[0], rel=1e-5)
    same(training, wanted)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("rows", [29, pytest.param(32, marks=pytest.mark.deep)])
def test_accumulated_batches_are_one_large_batch(rows: int, weighted: bool) -> None:
    """A first batch without labels, then batches with few and many."""
    settings = {"weighted": weighted, "divides_by_weights": weighted}
    training = network(**settings)
    x, y, w = data(rows)
    assert (y[:ROWS] == IGNORED).all() and (y != IGNORED).any()
    losses, wanted = trained_by_torch(parameters(training), [(x, y, w)] * 2, weighted)
    history = sg.fit(
        training,
        (x, y, w)[: 2 + weighted],
        epochs=2,
        accumulate=4,
        shuffle=False,
        progress="quiet",
        metrics=[sg.accuracy],
    )
    same(training, wanted)
    np.testing.assert_allclose(history.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)


def test_updates_without_any_label_change_nothing() -> None:
    training = network()
    before = parameters(training)
    x, y, _ = data(2 * ROWS)
    history = sg.fit(training, (x, np.full_like(y, IGNORED)), accumulate=2, progress="quiet", metrics=[sg.accuracy])
    assert history["loss"] == [0] and np.isnan(history["accuracy"][0])
    same(training, before)


def test_metrics_count_what_the_loss_counts() -> None:
    training = network()
    x, y, _ = data(29)
    metrics = [sg.accuracy, sg.TopK(3), sg.ConfusionMatrix(CLASSES), shapes := lambda p, t: p.shape[-1] + 0 * t.sum()]
    found = sg.evaluate(training, (x, y), metrics={str(i): one for i, one in enumerate(metrics)})
    weight, bias = (one.reshape(-1) for one in parameters(training))
    scores = x.reshape(-1, INPUTS) @ weight.numpy().reshape(CLASSES, INPUTS).T + bias.numpy()
    labels = y.reshape(-1)
    counts = labels != IGNORED
    order = np.argsort(-scores, axis=1)[counts]
    assert found["0"] == pytest.approx((order[:, 0] == labels[counts]).mean())
    assert found["1"] == pytest.approx((order[:, :3] == labels[counts][:, None]).any(1).mean())
    assert np.sum(found["2"]) == counts.sum() and np.trace(found["2"]) == (order[:, 0] == labels[counts]).sum()
    assert found["3"] == CLASSES, "other functions see the prediction as it is"
    assert shapes is metrics[3]
    each = F.cross_entropy(torch.from_numpy(scores), torch.from_numpy(labels), ignore_index=IGNORED)
    assert found["loss"] == pytest.approx(each.item(), rel=1e-5)


def test_a_metric_keeps_what_its_caller_has_set() -> None:
    training = network()
    x, y, _ = data(ROWS)
    y = np.where(y == IGNORED, 0, y)
    found = sg.evaluate(training, (x, y), metrics={"all": partial(sg.accuracy, ignored_label=0), "some": sg.accuracy})
    assert found["all"] != found["some"]


def test_a_tally_that_counts_labels_is_resumed() -> None:
    class Counting:
        def __call__(self, prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return prediction.mean()

        def weight_of_batch(self, labels: torch.Tensor, rows: int) -> torch.Tensor:
            return (labels >= 0).sum()

    metrics = {"mean": Counting()}
    tally = Tally(metrics)
    for labels in ([0, 0, 0], [-1, -1, -1], [0, -1, -1]):
        tally.add(torch.full((3,), float(sum(labels))), torch.tensor(labels), 3)
        resumed = Tally(metrics)
        resumed.resume(tally.state())
        tally = resumed
    assert tally.values()["mean"] == -2 / 4


def test_labels_out_of_range_are_named() -> None:
    training = network()
    before = parameters(training)
    x, y, _ = data(ROWS)
    for label in (9, IGNORED + 1):
        y[3, 2] = label
        problem = rf"row 3, position 2 holds the class index {label}, but Loss takes 0 to 6 or -100"
        with pytest.raises(sg.DataError, match=problem):
            training.execute({"x": x}, {"y": y})
        with pytest.raises(sg.DataError, match=problem):  # before a call, as for a GPU
            indices(training).require(value(training.loss_labels["y"]), torch.from_numpy(y))
    same(training, before)
    y[3, 2] = IGNORED
    indices(training).require(value(training.loss_labels["y"]), torch.from_numpy(y))


def indices(training: sg.TrainingGraph) -> Indices:
    session = training.require_session("test")
    return Indices(session.compilation.step(ROWS, False), session.feeds.titles)


def test_two_readers_of_labels_accept_what_both_do() -> None:
    """An embedding that reads the labels too accepts no ignored one."""
    y = sg.Tensor((ROWS, STEPS), "int64")
    graph = sg.Graph()
    words = graph.node(sg.EmbeddingLayer.create(CLASSES + 3, INPUTS), y)
    graph.node(sg.FullyConnectedLayer.create(INPUTS, CLASSES), words)
    training = sg.TrainingGraph(
        [graph], sg.LossLayer.softmax_cross_entropy(axis=-1, ignored_label=8), sg.SGDOptimizer(learning_rate=RATE)
    )
    training.add_inputs({}, {"y": y})
    training.compile(sg.Device.cpu())
    labels = np.arange(ROWS * STEPS).reshape(ROWS, STEPS) % CLASSES
    labels[0, 0] = 8  # a word of the embedding, and ignored by the loss
    assert np.isfinite(training.execute({}, {"y": labels}).loss)
    labels[0, 0] = 9
    with pytest.raises(sg.DataError, match="row 0, position 0 holds the class index 9, but Loss takes 0 to 6 or 8"):
        training.execute({}, {"y": labels})


def test_settings_are_saved_loaded_and_shown(tmp_path: Path) -> None:
    training = network(divides_by_weights=True, weighted=True)
    x, y, w = data(ROWS)
    training.execute({"x": x}, {"y": y}, {"w": w})
    training.save(tmp_path / "words")
    loaded = sg.load(tmp_path / "words")
    loaded.compile(sg.Device.cpu())
    assert loaded.layers[-1].descriptor == training.layers[-1].descriptor
    assert "axis=-1, ignored_label=-100, divides_by_weights=True" in repr(loaded.layers[-1])
    assert loaded.execute({"x": x}, {"y": y}, {"w": w}).loss == training.execute({"x": x}, {"y": y}, {"w": w}).loss


def test_random_labels_of_the_command_line_are_classes() -> None:
    drawn = cli_batch.drawn([network()], 200, 0)
    assert drawn["y"].min() == 0 and drawn["y"].max() == CLASSES - 1
