"""Metrics by name and those of torchmetrics, in `fit` and `evaluate`, against scikit-learn and SciPy."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as reference

import stepgraph as sg
from tests.fit_runs import BATCH, CLASSES, FEATURES, arrays, network, parameters, renewed

torchmetrics = pytest.importorskip("torchmetrics")
QUIET: dict[str, Any] = {"progress": "quiet"}
TEST = arrays(50, 1)


def plain() -> Any:
    return network(dropout=0.0)


def predicted(training: sg.TrainingGraph, x: np.ndarray) -> np.ndarray:
    graph = sg.InferenceGraph([training._graphs[0]])
    graph.add_inputs({"x": training.inputs["x"]})
    graph.compile(sg.Device.cpu())
    return graph.execute({"x": x}, batch_size=len(x)).result.numpy().copy()


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def test_names_of_classes_agree_with_scikit_learn() -> None:
    training = renewed(make=plain)
    sg.fit(training, arrays(), epochs=3, **QUIET)
    names = ["accuracy", "f1", "precision", "recall", "auroc", "kappa", "mcc", "iou", "top-2", "confusion"]
    found = sg.evaluate(training, TEST, metrics=names)
    scores, wanted = predicted(training, TEST[0]), TEST[1]
    guess = scores.argmax(axis=1)
    several = {"average": "macro", "zero_division": 0}
    expected = {
        "accuracy": reference.accuracy_score(wanted, guess),
        "f1": reference.f1_score(wanted, guess, **several),
        "precision": reference.precision_score(wanted, guess, **several),
        "recall": reference.recall_score(wanted, guess, **several),
        "auroc": reference.roc_auc_score(wanted, softmax(scores), multi_class="ovr"),
        "kappa": reference.cohen_kappa_score(wanted, guess),
        "mcc": reference.matthews_corrcoef(wanted, guess),
        "iou": reference.jaccard_score(wanted, guess, average="macro"),
        "top-2": reference.top_k_accuracy_score(wanted, scores, k=2),
    }
    assert found.pop("confusion") == reference.confusion_matrix(wanted, guess).tolist()
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert list(found) == ["loss", *names[:-1]]


def graph_with(loss: sg.Layer, width: int) -> sg.TrainingGraph:
    sg.set_seed(3)
    x, y, graph = sg.Tensor((BATCH, FEATURES)), sg.Tensor((BATCH, width)), sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(FEATURES, width), x)
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(learning_rate=0.05))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    return training


@pytest.mark.parametrize("width", [1, 3])
def test_names_of_yes_and_no_agree_with_scikit_learn(width: int) -> None:
    x = TEST[0]
    y = (x[:, :width] + 0.3 * x[:, 1 : width + 1] > 0).astype(np.float32)
    training = graph_with(sg.LossLayer.sigmoid_cross_entropy(), width)
    found = sg.evaluate(training, (x, y), metrics=["accuracy", "f1", "auroc"])
    scores = predicted(training, x)
    guess, average = scores > 0, "binary" if width == 1 else "macro"
    assert found["f1"] == pytest.approx(reference.f1_score(y, guess, average=average), abs=1e-6)
    assert found["auroc"] == pytest.approx(reference.roc_auc_score(y, scores), abs=1e-6)
    assert found["accuracy"] == pytest.approx(np.mean(guess == (y > 0.5)), abs=1e-6)


@pytest.mark.parametrize("width", [1, 2])
def test_names_of_quantities_agree_with_formulas(width: int) -> None:
    x = TEST[0]
    y = 2 * x[:, :width] + x[:, 2 : width + 2]
    training = graph_with(sg.LossLayer.mean_squared_error(), width)
    found = sg.evaluate(training, (x, y), metrics=["mae", "mse", "r2", "pearson", "mean_absolute_error"])
    guess = predicted(training, x).astype(np.float64)
    assert found["mse"] == pytest.approx(found["loss"], rel=1e-5)
    assert found["mae"] == found["mean_absolute_error"] == pytest.approx(np.abs(guess - y).mean(), rel=1e-5)
    assert found["r2"] == pytest.approx(reference.r2_score(y, guess), rel=1e-4)
    pearson = [stats.pearsonr(guess[:, i], y[:, i]).statistic for i in range(width)]
    np.testing.assert_allclose(found["pearson"], pearson if width > 1 else pearson[0], rtol=1e-4)


def test_lower_is_better_where_the_metric_says_so() -> None:
    training = graph_with(sg.LossLayer.mean_squared_error(), 1)
    data = TEST[0], TEST[0][:, :1]
    history = sg.fit(training, data, epochs=3, metrics=["mae"], watch="mae", **QUIET)
    assert history.best_epoch == 1 + int(np.argmin(history["mae"])) == 3
    assert sg.fit(training, data, epochs=3, metrics=["r2"], watch="r2", **QUIET).best_epoch == 3


def test_objects_of_torchmetrics_work_as_they_are() -> None:
    f1 = torchmetrics.F1Score(task="multiclass", num_classes=CLASSES, average=None)
    auroc = torchmetrics.AUROC(task="multiclass", num_classes=CLASSES)
    pair = torchmetrics.MetricCollection(
        {"p": torchmetrics.Precision(task="multiclass", num_classes=CLASSES)}, prefix="my "
    )
    wrapped = torchmetrics.ClasswiseWrapper(torchmetrics.Recall(task="multiclass", num_classes=CLASSES, average=None))
    training = renewed(make=plain)
    metrics = [f1, auroc, pair, wrapped, sg.accuracy]
    history = sg.fit(training, arrays(), validation=TEST, epochs=2, metrics=metrics, **QUIET)
    row, scores = history.epochs[-1], predicted(training, TEST[0])
    guess = scores.argmax(axis=1)
    expected = reference.f1_score(TEST[1], guess, average=None)
    np.testing.assert_allclose(row["validation MulticlassF1Score"], expected, atol=1e-6)
    wanted = reference.roc_auc_score(TEST[1], softmax(scores), multi_class="ovr")
    assert row["validation MulticlassAUROC"] == pytest.approx(wanted, abs=1e-6)
    assert 0 <= row["my p"] <= 1 and any(name.startswith("ClasswiseWrapper ") for name in row)
    assert f1._update_count == 0  # the run works on copies
    by_name = sg.evaluate(training, TEST, metrics={"mine": pair, "curve": auroc})
    assert by_name["mine my p"] == row["validation my p"] and by_name["curve"] == pytest.approx(wanted, abs=1e-6)
    last = next(name for name in row if name.startswith("ClasswiseWrapper "))
    assert sg.fit(training, arrays(), metrics=metrics, watch=last, **QUIET).best_epoch == 1
    with pytest.raises(sg.UnknownNameError, match="watch is 'nothing'"):
        sg.fit(training, arrays(), metrics=metrics, watch="nothing", **QUIET)


class Mine:
    """An object of one's own."""

    def reset(self) -> None:
        self.rows: list[int] = []

    def update(self, prediction: torch.Tensor, labels: torch.Tensor) -> None:
        self.rows.append(len(labels))

    def compute(self) -> Any:
        return self.result(sum(self.rows))

    def result(self, rows: int) -> Any:
        return rows


def test_an_object_of_ones_own_works_and_must_return_numbers() -> None:
    training = renewed()
    assert sg.evaluate(training, TEST, metrics=[Mine()])["Mine"] == 50
    silent = Mine()
    silent.result = lambda rows: None  # type: ignore[method-assign]
    with pytest.raises(sg.DataTypeError, match="'Mine' returned NoneType"):
        sg.evaluate(training, TEST, metrics=[silent])


def test_metrics_of_an_epoch_survive_a_stop_within_it(tmp_path: Path) -> None:
    class Stop(sg.Callback):
        def step(self, moment: sg.Moment) -> None:
            if moment.step == 9:
                moment.stop()

    settings: dict[str, Any] = {"epochs": 3, "metrics": ["f1", "auroc", "mcc", "accuracy"], **QUIET}
    whole, resumed = renewed(), renewed(1)
    expected = sg.fit(whole, arrays(), **settings)
    sg.fit(renewed(2), arrays(), checkpoints=tmp_path, callbacks=[Stop()], **settings)
    history = sg.fit(resumed, arrays(), checkpoints=tmp_path, resume=True, **settings)
    for name in settings["metrics"]:
        assert history[name] == pytest.approx(expected[name], abs=1e-7), name
    assert parameters(whole) == parameters(resumed)


def test_what_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = renewed()
    with pytest.raises(sg.UnknownNameError, match=r"no metric 'f11'[^\n]*\n[^\n]*f1"):
        sg.evaluate(training, TEST, metrics=["f11"])
    with pytest.raises(sg.UnknownNameError) as caught:
        sg.evaluate(training, TEST, metrics=["acuracy"])
    assert str(caught.value).count("accuracy") == 1 and "mae" not in str(caught.value)
    with pytest.raises(sg.UnknownNameError, match="no metric 'mae' for classification"):
        sg.evaluate(training, TEST, metrics=["mae"])
    with pytest.raises(sg.ArgumentError, match="needs settings of its own"):
        sg.evaluate(training, TEST, metrics=["precision_at_fixed_recall"])
    with pytest.raises(sg.ArgumentError, match="same name"):
        sg.evaluate(training, TEST, metrics=["f1", "f1"])
    with pytest.raises(sg.DataTypeError, match="not a function"):
        sg.evaluate(training, TEST, metrics=[3])
    wrong = torchmetrics.F1Score(task="multiclass", num_classes=7)
    with pytest.raises(Exception) as caught:
        sg.evaluate(training, TEST, metrics=[wrong])
    assert "in the metric 'MulticlassF1Score', called with prediction (8, 3)" in caught.value.__notes__[0]
    monkeypatch.setitem(sys.modules, "torchmetrics.classification", None)
    with pytest.raises(sg.StateError, match="torchmetrics, which is not installed"):
        sg.evaluate(training, TEST, metrics=["f1"])
    assert sg.evaluate(training, TEST, metrics=["accuracy", "top-2", "confusion"])["accuracy"] >= 0  # ours need none


def test_one_name_needs_no_list() -> None:
    training = renewed()
    assert sg.evaluate(training, TEST, metrics="f1").keys() == {"loss", "f1"}
