"""The training loop: the same numbers as a loop written by hand, and everything that is decided between steps."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.fitting.loop import Loop
from tests.fit_runs import BATCH, CLASSES, FEATURES, ROWS, SETTINGS, arrays, network, parameters


def by_hand(training: sg.TrainingGraph, batches: list) -> list[float]:
    return [training.execute({"x": x}, {"y": y}, batch_size=len(x)).loss for x, y in batches]


def cut(x: np.ndarray, y: np.ndarray, size: int = BATCH) -> list:
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def test_it_does_what_a_loop_by_hand_does() -> None:
    fitted, mine = network(), network()
    history = sg.fit(fitted, arrays(), epochs=2, shuffle=False, progress="quiet")
    losses = by_hand(mine, cut(*arrays()) * 2)
    assert history.losses == losses and parameters(fitted) == parameters(mine)
    rows = [len(x) for x, _ in cut(*arrays())]
    assert rows[-1] == ROWS % BATCH  # a short last batch, counted by its rows
    mean = np.average(losses[: len(rows)], weights=rows)
    assert history["loss"][0] == pytest.approx(mean, rel=1e-12)
    assert history["step"] == [6, 12] and history.stopped == "finished"


def test_it_learns_and_tells_by_metrics() -> None:
    training, test = network(dropout=0.0), arrays(64, 1)
    history = sg.fit(training, arrays(400), validation=test, epochs=20, metrics=[sg.accuracy], progress="quiet")
    assert history["accuracy"][-1] > 0.95 and history["validation accuracy"][-1] > 0.9
    found = sg.evaluate(training, test, metrics=[sg.accuracy])
    assert found == {name: history[f"validation {name}"][-1] for name in ("loss", "accuracy")}
    inference = sg.InferenceGraph([training._graphs[0]])
    inference.compile(sg.Device.cpu())
    logits = inference.execute({"x": test[0]}, batch_size=64).result.numpy()
    assert found["accuracy"] == np.mean(logits.argmax(axis=1) == test[1])


def test_the_order_is_the_graphs_own_and_another_in_each_epoch_and_run() -> None:
    seen: list[list[float]] = []

    def spy(prediction: torch.Tensor, labels: torch.Tensor) -> float:
        seen[-1].extend(labels.tolist())
        return 0.0

    training, again = network(), network()
    data = arrays()[0], np.arange(ROWS) % CLASSES
    for one in (training, training, again):
        seen.append([])
        sg.fit(one, data, epochs=2, metrics={"spy": spy}, progress="quiet")
    first, second, repeated = seen
    assert first == repeated and first != second and first[:ROWS] != first[ROWS:]
    for epoch in (first[:ROWS], first[ROWS:], second[:ROWS]):
        assert sorted(epoch) == sorted(data[1].tolist())
    state = torch.get_rng_state()
    sg.fit(training, data, progress="quiet")
    assert torch.equal(state, torch.get_rng_state())


def test_validation_does_not_change_what_is_learned() -> None:
    plain, validated = network(), network()
    sg.fit(plain, arrays(), **SETTINGS)
    history = sg.fit(validated, arrays(), validation=arrays(11, 4), **SETTINGS)
    assert parameters(plain) == parameters(validated)
    assert np.sum(history["validation confusion"][0]) == 11 and np.sum(history["confusion"][0]) == ROWS


@pytest.mark.parametrize("kind", [sg.ReductionType.MEAN, sg.ReductionType.SUM])
@pytest.mark.parametrize("rows", [32, 28])
def test_accumulated_batches_are_one_large_batch(kind: sg.ReductionType, rows: int) -> None:
    settings = sg.OptimizerDescriptor(
        0.1,
        applies_gradient_clipping=True,
        gradient_clip_max=0.02,  # by value, so that the size of a gradient shows where it is not clipped
        gradient_clip_min=-0.02,
    )
    loss = sg.LossLayer.softmax_cross_entropy(kind)
    small, large = (network(sg.SGDOptimizer(settings), loss, dropout=0.0) for _ in range(2))
    x, y = arrays(rows)
    history = sg.fit(small, (x, y), epochs=2, accumulate=4, shuffle=False, progress="quiet")
    losses = by_hand(large, [(x, y), (x, y)])
    for a, b in zip(small.layers, large.layers, strict=True):
        for name, tensor in a.parameters.items():
            np.testing.assert_allclose(tensor.numpy(), b.parameters[name].numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(history.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)  # one update per epoch
    assert small.optimizer.time_step == 3 and history["step"] == [1, 2]


@pytest.mark.parametrize("kind", [sg.ReductionType.MEAN, sg.ReductionType.SUM, sg.ReductionType.NONE])
@pytest.mark.parametrize("shards", [None, 3])
def test_the_loss_of_an_epoch_does_not_depend_on_batches(kind: sg.ReductionType, shards: int | None) -> None:
    """It is that of all rows as one batch, whatever runs at once."""
    x, y = sg.Tensor((sg.BATCH, FEATURES), label="x"), sg.Tensor((sg.BATCH,), "int64", label="y")
    graph = sg.Graph()
    graph.dense(x, CLASSES)
    loss = sg.LossLayer.softmax_cross_entropy(kind)
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(0.0))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", parallel=None if shards is None else sg.Parallel(shards))
    data = arrays(27)
    whole = sg.fit(training, data, batch_size=27, progress="quiet")["loss"][0]
    for size, together in ((5, 1), (8, 1), (4, 3)):
        settings = {"batch_size": size, "accumulate": together, "validation": data, "progress": "quiet"}
        history = sg.fit(training, data, **settings)
        found = [
            history["loss"][0],
            history["validation loss"][0],
            sg.evaluate(training, data, batch_size=size)["loss"],
        ]
        assert found == pytest.approx([whole] * 3, rel=1e-5)


def test_an_epoch_may_end_within_a_group() -> None:
    training = network()
    history = sg.fit(training, arrays(), epochs=1, accumulate=4, progress="quiet")  # 6 batches: 4 and 2
    assert history["step"] == [2] and training.optimizer.time_step == 3
    with pytest.raises(ValueError, match="there is no data for it"):  # nothing stays bound
        sg.fit(training, {"x": arrays()[0]}, progress="quiet")


def test_schedules_set_the_rate_of_each_update_and_compile_nothing() -> None:
    training = network()
    history = sg.fit(training, arrays(40), epochs=2, schedule=lambda n: 0.1 / (n + 1), progress="quiet")
    assert [rate for _, _, rate in history.steps] == [0.1 / (n + 1) for n in range(10)]
    compiled = training.executables
    history = sg.fit(training, arrays(40), epochs=2, schedule=sg.WarmupCosine(0.5, warmup=4), progress="quiet")
    expected = [0.125, 0.25, 0.375, 0.5] + [0.25 * (1 + math.cos(math.pi * n / 6)) for n in range(6)]
    assert [rate for _, _, rate in history.steps] == pytest.approx(expected)
    assert training.executables == compiled and training.optimizer.learning_rate == history["rate"][-1]


def test_a_schedule_that_needs_the_number_of_updates_says_so() -> None:
    batches = [arrays(BATCH)] * 2
    training, schedule = network(), sg.WarmupCosine(0.5, warmup=1)
    assert [rate for _, _, rate in sg.fit(training, batches, schedule=schedule, progress="quiet").steps] == [0.5, 0.5]
    with pytest.raises(ValueError, match="number of updates is unknown"):
        sg.fit(training, lambda epoch: iter(batches), schedule=schedule, progress="quiet")


def test_it_ends_when_nothing_gets_better() -> None:
    training, values = network(), iter([0.5, 0.8, 0.7, 0.75, 0.9])

    def score(prediction: torch.Tensor, labels: torch.Tensor) -> float:
        return next(values)

    history = sg.fit(
        training, arrays(BATCH), epochs=9, metrics={"score": score}, watch="score", patience=2, progress="quiet"
    )
    assert history["score"] == [0.5, 0.8, 0.7, 0.75]
    assert history.best_epoch == 2 and history.stopped == "no improvement"
    values = iter([3.0, 2.0, 2.5, 2.6, 0.0])
    settings = {"metrics": {"score": score}, "watch": "score", "better": "lower", "patience": 2}
    assert len(sg.fit(training, arrays(BATCH), epochs=9, progress="quiet", **settings).epochs) == 4
    frozen = network(sg.SGDOptimizer(learning_rate=0.0), dropout=0.0)
    assert len(sg.fit(frozen, arrays(), epochs=9, patience=3, shuffle=False, progress="quiet").epochs) == 4


def test_a_loss_that_is_no_number_is_never_the_best() -> None:
    training, values = network(), iter([math.nan, 1.0, math.nan, 0.5])
    score = {"score": lambda prediction, labels: next(values)}
    history = sg.fit(training, arrays(BATCH), epochs=4, metrics=score, watch="score", better="lower", progress="quiet")
    assert history.best_epoch == 4


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_a_run_of_nothing_but_nan_has_no_best_epoch_and_loses_patience(tmp_path: Path, better: str) -> None:
    settings = {"metrics": {"score": lambda prediction, labels: math.nan}, "watch": "score", "better": better}
    history = sg.fit(network(), arrays(BATCH), epochs=9, patience=3, checkpoints=tmp_path, progress="quiet", **settings)
    assert (len(history.epochs), history.best_epoch, history.stopped) == (3, None, "no improvement")
    assert not (tmp_path / "best").exists()
    assert "nan" in str(history)


def test_a_number_after_nan_and_infinity_is_the_best(tmp_path: Path) -> None:
    values = iter([math.inf, math.nan, 2.0, math.nan, 2.5])
    score = {"score": lambda prediction, labels: next(values)}
    settings = {"metrics": score, "watch": "score", "better": "lower", "patience": 3, "progress": "quiet"}
    history = sg.fit(network(), arrays(BATCH), epochs=5, checkpoints=tmp_path, **settings)
    assert (history.best_epoch, history.stopped) == (3, "finished")
    assert (tmp_path / "best").exists()


def mixed_extents() -> sg.TrainingGraph:
    """A graph with an input and a label whose first extents are not the batch."""
    sg.set_seed(3)
    x, shift, y = sg.Tensor((BATCH, FEATURES)), sg.Tensor((1, FEATURES)), sg.Tensor((BATCH, 2))
    graph = sg.Graph()
    moved = graph.node(sg.ArithmeticLayer(sg.ArithmeticOperation.ADD), x, shift)
    graph.node(sg.FullyConnectedLayer.create(FEATURES, 2), moved)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x, "shift": shift}, {"y": y})
    training.compile(sg.Device.cpu(), sg.GraphCompilationOptions.DETERMINISTIC)
    return training


def test_accumulating_takes_feeds_without_a_batch() -> None:
    random = np.random.default_rng(0)
    rows, shift = random.standard_normal((2 * BATCH, FEATURES)).astype(np.float32), np.ones((1, FEATURES), np.float32)
    wanted = rows[:, :2].copy()
    halves = [({"x": rows[i : i + BATCH], "shift": shift}, {"y": wanted[i : i + BATCH]}) for i in (0, BATCH)]
    short = ({"x": rows[:3], "shift": shift}, {"y": wanted[:3]})
    whole, accumulated = mixed_extents(), mixed_extents()
    for _ in range(3):
        whole.execute({"x": rows, "shift": shift}, {"y": wanted}, batch_size=2 * BATCH)
    sg.fit(accumulated, halves, epochs=3, accumulate=2, progress="quiet")
    for ours, theirs in zip(parameter_arrays(accumulated), parameter_arrays(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    history = sg.fit(accumulated, [*halves, short], epochs=1, accumulate=3, progress="quiet")
    assert history["step"] == [1]


def parameter_arrays(training: sg.TrainingGraph) -> list[np.ndarray]:
    return [t.numpy() for layer in training.layers for t in layer.parameters.values()]


def test_a_history_whose_epochs_have_other_numbers_can_be_read_and_shown() -> None:
    first = {"epoch": 1, "step": 3, "loss": 0.5, "confusion": [[1]], "rate": 0.1, "seconds": 1.0}
    second = {"epoch": 2, "step": 6, "loss": 0.4, "accuracy": 0.9, "rate": 0.1, "seconds": 1.0}
    history = sg.History([first, second], best_epoch=2)
    assert history["loss"] == [0.5, 0.4]
    assert history["accuracy"] == [None, 0.9]
    assert history["confusion"] == [[[1]], None]
    head, _, one, two, *_ = str(history).splitlines()
    assert head.replace("┃", " ").split() == ["epoch", "step", "loss", "accuracy", "rate", "seconds"]
    assert one.split("│")[3].strip() == "" and two.split("│")[3].strip() == "0.9000"
    assert "0.9000" in history._repr_html_()
    with pytest.raises(KeyError, match="accuracy"):
        history["acuracy"]


def test_a_history_can_be_read_and_printed() -> None:
    history = sg.fit(network(), arrays(), **SETTINGS)
    assert [row["epoch"] for row in history.epochs] == [1, 2, 3, 4]
    text = str(history)
    assert "accuracy" in text and "confusion" not in text and f"{history['loss'][3]:.4f}" in text and "finished" in text
    with pytest.raises(KeyError, match="acuracy"):
        history["acuracy"]


def test_a_long_history_is_thinned() -> None:
    history = sg.History()
    for step in range(1, 4 * sg.History.most_steps):
        history.add_step(step, 1.0 * step, 0.1)
    assert len(history.steps) <= sg.History.most_steps and history.every == 4
    assert [step for step, _, _ in history.steps] == list(range(4, 4 * sg.History.most_steps, 4))
    assert sg.History.from_state(history.state()) == history


def test_lines_and_bars(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SETTINGS, "epochs": 2, "validation": arrays(9)}
    sg.fit(network(), arrays(), **settings)
    assert capsys.readouterr().out == ""
    sg.fit(network(), arrays(), **settings | {"progress": "auto"})  # no terminal here
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert all(word in lines[0] for word in ("loss", "accuracy", "validation loss", "rate 0.01"))
    monkeypatch.setattr("stepgraph.fitting.progress.Plain.pause", 0.0)
    monkeypatch.setattr("stepgraph.fitting.progress.Bar.pause", 0.0)
    monkeypatch.setattr(Loop, "seldom", (1, 0.0))
    sg.fit(network(), arrays(), **settings | {"progress": "plain"})
    lines = capsys.readouterr().out.splitlines()
    assert "step 3/12" in lines[2] and " left" in lines[2] and "MiB" in lines[2] and "accuracy" in lines[2]
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("FORCE_COLOR", "1")
    sg.fit(network(), arrays(), **settings | {"progress": "rich"})
    shown = capsys.readouterr().out
    assert "12/12" in shown and "MiB" in shown and "epoch 2/2" in shown and "rate" in shown


def test_mixed_names_weights_and_losses_one_by_one() -> None:
    x, y, w = sg.Tensor((BATCH, FEATURES)), sg.Tensor((BATCH, 1)), sg.Tensor((BATCH, 1))
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(FEATURES, 1), x)
    loss = sg.LossLayer.mean_squared_error(sg.ReductionType.NONE)
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(learning_rate=0.01))
    training.add_inputs({"x": x}, {"y": y}, {"w": w})
    training.compile(sg.Device.cpu())
    data = arrays(24)[0]
    wanted, weights = data[:, :1] * 2, np.zeros((24, 1), np.float32)
    history = sg.fit(training, (data, wanted, weights), epochs=2, progress="quiet")
    assert history["loss"] == [0.0, 0.0]  # nothing counts
    history = sg.fit(training, {"x": data, "y": wanted, "w": weights + 1}, epochs=30, progress="quiet")
    assert history["loss"][-1] < 0.1 * history["loss"][0]
    error = {"error": lambda prediction, labels: (prediction - labels).abs().mean()}
    assert sg.evaluate(training, (data, wanted, weights + 1), metrics=error)["error"] < 0.5


@pytest.fixture(scope="module")
def untouched() -> sg.TrainingGraph:
    return network()


@pytest.mark.parametrize(
    "settings, error, words",
    [
        ({"epochs": -1}, ValueError, "epochs is -1"),
        ({"epochs": True}, ValueError, "epochs is True"),
        ({"accumulate": 0}, ValueError, "accumulate is 0"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"patience": 0}, ValueError, "patience is 0"),
        ({"keep": 0}, ValueError, "keep is 0"),
        ({"save_every": 0}, ValueError, "save_every is 0"),
        ({"prefetch": -1}, ValueError, "prefetch is -1"),
        ({"progress": "loud"}, ValueError, "progress is 'loud'"),
        ({"watch": "accuracy"}, KeyError, "watch is 'accuracy'"),
        ({"watch": "confusion", "metrics": [sg.ConfusionMatrix(3)]}, ValueError, "not a single number"),
        ({"better": "best"}, ValueError, "better is 'best'"),
        ({"schedule": 0.1}, TypeError, "schedule is 0.1"),
        ({"metrics": {"loss": sg.accuracy}}, ValueError, "'loss' is reserved"),
        ({"metrics": [sg.accuracy, sg.accuracy]}, ValueError, "have the same name"),
        ({"metrics": [3]}, TypeError, "not a function"),
        ({"resume": True}, ValueError, "resume needs checkpoints"),
        ({"save_every": 2}, ValueError, "save_every needs a folder"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_done(
    untouched: sg.TrainingGraph, settings: dict, error: type, words: str
) -> None:
    training = untouched
    before = parameters(training)
    with pytest.raises(error) as caught:
        sg.fit(training, arrays(), **{"progress": "quiet", **settings})
    assert words in str(caught.value) and "Fix:" in str(caught.value)
    assert parameters(training) == before and training.optimizer.time_step == 1


def test_graphs_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(TypeError, match="Graph is not a TrainingGraph"):
        sg.fit(sg.Graph(), arrays())
    with pytest.raises(TypeError, match="evaluate: InferenceGraph is not a TrainingGraph"):
        sg.evaluate(sg.InferenceGraph(), arrays())  # type: ignore[arg-type]
    graph, x = sg.Graph(), sg.Tensor((BATCH, FEATURES), label="x")
    graph.node(sg.FullyConnectedLayer.create(FEATURES, 1), x)
    training = sg.TrainingGraph([graph], None, sg.SGDOptimizer(learning_rate=0.1))
    with pytest.raises(RuntimeError, match="not compiled"):
        sg.fit(training, arrays())
    training.compile(sg.Device.cpu())
    with pytest.raises(RuntimeError, match="no loss"):
        sg.fit(training, arrays())


def test_a_run_over_no_epochs_is_empty() -> None:
    history = sg.fit(network(), arrays(), epochs=0, progress="quiet")
    assert history.epochs == [] and history.losses == [] and history.stopped == "finished"


@pytest.mark.gpu
def test_on_a_gpu_the_same_is_learned(tmp_path: Path) -> None:
    here, there = network(), network()
    there.compile(sg.Device.gpu())
    there.restore(here.save(tmp_path / "start"))  # compiled for another device, a graph has drawn a new seed
    settings = {**SETTINGS, "validation": arrays(11, 4)}
    first, second = (sg.fit(one, arrays(), **settings) for one in (here, there))
    np.testing.assert_allclose(first.losses, second.losses, rtol=1e-3)
    assert first["confusion"] == second["confusion"]
