"""Several losses: the step minimizes their sum, and each is reported by the name of its layer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph as sg
from stepgraph.checkpoint.files import read

ROWS, INPUTS, CLASSES, RATE = 8, 4, 5, 0.1
QUIET: dict[str, Any] = {"progress": "quiet", "shuffle": False}


def network(
    first: str = "digits", second: str = "size", *, how: sg.ReductionType = sg.ReductionType.MEAN, **settings: Any
) -> sg.TrainingGraph:
    """Two heads: classes, some ignored, and a number."""
    sg.set_seed(2)
    x, y, z = sg.Tensor((ROWS, INPUTS)), sg.Tensor((ROWS,), "int64"), sg.Tensor((ROWS, 1))
    graph = sg.Graph()
    scores = graph.node(sg.FullyConnectedLayer.create(INPUTS, CLASSES), x)
    number = graph.node(sg.FullyConnectedLayer.create(INPUTS, 1), x)
    training = sg.TrainingGraph([graph], optimizer=sg.SGDOptimizer(learning_rate=RATE))
    digits = sg.LossLayer.softmax_cross_entropy(ignored_label=-1, label=first)
    training.node(digits, scores, loss_labels=y)
    training.node(sg.LossLayer.mean_squared_error(how, weight=0.5, label=second), number, loss_labels=z)
    training.add_inputs({"x": x}, {"y": y, "z": z})
    training.add_outputs({"scores": scores, "number": number})
    training.compile(sg.Device.cpu(), **settings)
    return training


def arrays(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    y = random.integers(0, CLASSES, rows)
    y[: rows // 2] = -1
    x, z = (random.standard_normal((rows, n)).astype(np.float32) for n in (INPUTS, 1))
    return {"x": x, "y": y, "z": z}


def parts(given: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    return {"x": given["x"]}, {"y": given["y"], "z": given["z"]}


def parameters(training: sg.TrainingGraph) -> list[torch.Tensor]:
    return [t.torch().clone() for layer in training.layers for t in layer.parameters.values()]


def by_torch(
    start: list[torch.Tensor], given: dict[str, np.ndarray], steps: int, how: str = "mean"
) -> tuple[list[tuple[float, float]], list[torch.Tensor]]:
    """The losses of plain steps in float64, and the parameters after them."""
    own = [one.double().requires_grad_() for one in start]
    x, y, z = (torch.from_numpy(given[name]) for name in "xyz")
    losses = []
    for _ in range(steps):
        w, b, v, c = own
        first = F.cross_entropy(F.linear(x.double(), w.reshape(CLASSES, INPUTS), b.reshape(-1)), y, ignore_index=-1)
        second = 0.5 * F.mse_loss(F.linear(x.double(), v.reshape(1, INPUTS), c.reshape(-1)), z.double(), reduction=how)
        losses.append((first.item(), second.item()))
        for one, slope in zip(own, torch.autograd.grad(first + second, own), strict=True):
            one.data -= RATE * slope
    return losses, own


def same(training: sg.TrainingGraph, wanted: list[torch.Tensor]) -> None:
    for ours, theirs in zip(parameters(training), wanted, strict=True):
        torch.testing.assert_close(ours.double().reshape(-1), theirs.detach().reshape(-1), rtol=1e-5, atol=1e-6)


def test_a_step_minimizes_the_sum_and_reports_each() -> None:
    training, given = network(), arrays()
    losses, wanted = by_torch(parameters(training), given, 3)
    for first, second in losses:
        step = training.execute(*parts(given))
        assert step.loss == pytest.approx(first + second, rel=1e-5)
        assert step.losses == pytest.approx({"digits": first, "size": second}, rel=1e-5)
        assert (
            step.result is not None and step.result.shape == (1,) and step.result.numpy()[0] == pytest.approx(step.loss)
        )
    same(training, wanted)


def test_phases_evaluation_and_inference_report_each() -> None:
    training, given = network(), arrays()
    [(first, second)], wanted = by_torch(parameters(training), given, 1)
    each = pytest.approx({"digits": first, "size": second}, rel=1e-5)
    evaluated = training.execute(*parts(given), options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)
    assert evaluated.losses == each
    training.bind_and_write_data(given, {**training.inputs, **training.loss_labels}, sg.Device.cpu())
    assert training.execute_forward().losses == each
    training.execute_gradient()
    training.execute_optimizer_update()
    same(training, wanted)


def test_one_loss_has_its_name_too() -> None:
    x, y = sg.Tensor((4, 1)), sg.Tensor((4, 1))
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(1, 1), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=RATE))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    step = training.execute({"x": np.ones(4, np.float32)}, {"y": np.ones(4, np.float32)})
    assert step.losses == {"Loss": step.loss}
    ones = np.ones((4, 1), np.float32)
    assert list(sg.evaluate(training, (ones, ones))) == ["loss"]


def test_losses_without_labels_are_numbered_as_in_tables() -> None:
    training = network("", "")
    assert list(training.execute(*parts(arrays())).losses) == ["Loss1", "Loss2"]
    assert "Loss2" in str(training)


def test_a_layer_used_twice_has_two_names() -> None:
    x, y = sg.Tensor((4, 1)), sg.Tensor((4, 1))
    training = sg.TrainingGraph(optimizer=sg.SGDOptimizer(learning_rate=RATE))
    loss = sg.LossLayer.mean_squared_error(label="both")
    for _ in range(2):
        training.node(loss, training.node(sg.FullyConnectedLayer.create(1, 1), x), loss_labels=y)
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    assert list(training.execute({"x": np.ones(4, np.float32)}, {"y": np.ones(4, np.float32)}).losses) == [
        "both",
        "both 2",
    ]


def test_unreduced_losses_add_up_to_what_is_minimized() -> None:
    training, given = network(how=sg.ReductionType.NONE), arrays()
    step = training.execute(*parts(given))
    assert step.losses["size"].shape == (ROWS, 1)
    assert step.loss == pytest.approx(step.losses["digits"] + step.losses["size"].sum(), rel=1e-5)


def test_history_and_evaluation_have_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training, given = network(), arrays(20)
    settings: dict[str, Any] = {"epochs": 2, "validation": arrays(12, 1), "run": tmp_path / "run", "shuffle": False}
    history = sg.fit(
        training, given, **settings, progress="plain", metrics={"digits": [sg.accuracy], "number": {"error": error}}
    )
    for row in history.epochs:
        assert row["loss"] == pytest.approx(row["digits"] + row["size"])
        assert row["validation loss"] == pytest.approx(row["validation digits"] + row["validation size"])
        assert {"digits accuracy", "number error", "validation digits accuracy"} <= set(row)
    printed = capsys.readouterr().out
    assert "digits " in printed and "validation size" in printed
    assert "digits" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    notes = read(tmp_path / "run" / "checkpoints").description["notes"]["fit"]
    assert notes["history"]["epochs"][-1]["digits"] == history["digits"][-1]
    found = sg.evaluate(training, arrays(12, 1), metrics={"digits": sg.accuracy, "size": [error]})
    assert list(found) == ["loss", "digits", "size", "digits accuracy", "size error"]


def error(prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    assert prediction.shape == labels.shape and prediction.shape[1] == 1
    return (prediction - labels).abs().mean()


def test_a_loss_can_be_watched_and_an_interrupted_epoch_goes_on(tmp_path: Path) -> None:
    whole, given = network(), arrays(40)
    history = sg.fit(whole, given, epochs=2, watch="size", checkpoints=tmp_path / "a", save_every=2, **QUIET)
    assert history.best_epoch == 1 + int(np.argmin(history["size"]))
    resumed = network()
    sg.fit(resumed, given, epochs=1, watch="size", checkpoints=tmp_path / "b", **QUIET)
    again = sg.fit(resumed, given, epochs=2, watch="size", checkpoints=tmp_path / "b", resume=True, **QUIET)
    assert again["digits"] == history["digits"] and again["size"] == history["size"]


@pytest.mark.parametrize("how", ["mean", "sum"])
@pytest.mark.parametrize("rows", [27, pytest.param(32, marks=pytest.mark.deep)])
def test_accumulated_batches_are_one_large_batch(rows: int, how: str) -> None:
    """Half of the rows have no class: the two means divide by different numbers, and a sum by none."""
    training, given = network(how=sg.ReductionType[how.upper()]), arrays(rows)
    losses, wanted = by_torch(parameters(training), given, 2, how)
    history = sg.fit(training, given, epochs=2, accumulate=4, **QUIET)
    same(training, wanted)
    np.testing.assert_allclose(history["digits"], [first for first, _ in losses], rtol=1e-5)
    if how == "mean":
        np.testing.assert_allclose(history.losses, [sum(pair) for pair in losses], rtol=1e-5)
    state = training.require_session("test").state
    assert state is not None and state.loss_factors.tolist() == [1, 1], "later steps count in full again"


@pytest.mark.parametrize(
    ("names", "settings", "problem"),
    [
        (("rate", "size"), {}, "the loss 'rate' has a name that the history uses"),
        (("accuracy", "size"), {"metrics": [sg.accuracy]}, "the loss 'accuracy' has a name that a metric has too"),
        (("digits", "size"), {"metrics": {"other": [sg.accuracy]}}, "there is no loss 'other'"),
        (("digits", "size"), {"watch": "other"}, "watch is 'other'"),
    ],
)
def test_refused_names(names: tuple[str, str], settings: dict[str, Any], problem: str) -> None:
    training = network(*names)
    with pytest.raises(sg.StepgraphError, match=problem):
        sg.fit(training, arrays(), **settings, **QUIET)


def test_saved_and_loaded(tmp_path: Path) -> None:
    training, given = network(), arrays()
    training.execute(*parts(given))
    training.save(tmp_path / "two")
    loaded = sg.load(tmp_path / "two")
    loaded.compile(sg.Device.cpu())
    assert loaded.execute(*parts(given)).losses == training.execute(*parts(given)).losses


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"compute_type": "float16"}, marks=pytest.mark.deep),
        {"options": sg.GraphCompilationOptions.CHECK_NUMERICS},
    ],
)
def test_mixed_precision_and_checked_numerics(settings: dict[str, Any]) -> None:
    training, given = network(**settings), arrays()
    first, *_, last = [training.execute(*parts(given)).losses for _ in range(30)]
    assert sum(last.values()) < sum(first.values())


@pytest.mark.gpu
def test_captured_steps_keep_every_loss_on_a_gpu() -> None:
    training, plain, given = network(), network(), arrays()
    training.compile(sg.Device.gpu())
    steps = [training.execute(*parts(given)) for _ in range(6)]
    for step in steps:  # read after all of them ran
        assert step.losses == pytest.approx(plain.execute(*parts(given)).losses, rel=1e-4)
