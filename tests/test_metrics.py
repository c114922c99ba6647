"""Metrics against scikit-learn, schedules against their formula."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

import stepgraph as sg
from stepgraph.fitting.metrics import Tally, by_name

GENERATOR = np.random.default_rng(0)
SCORES = GENERATOR.standard_normal((50, 4)).astype(np.float32)
CLASSES = GENERATOR.integers(0, 4, 50)
P, L = torch.from_numpy(SCORES), torch.from_numpy(CLASSES)


def test_metrics_agree_with_scikit_learn() -> None:
    found = SCORES.argmax(axis=1)
    assert sg.accuracy(P, L).item() == pytest.approx(reference.accuracy_score(CLASSES, found))
    for k in (1, 2, 3):
        wanted = reference.top_k_accuracy_score(CLASSES, SCORES, k=k, labels=range(4))
        assert sg.TopK(k)(P, L).item() == pytest.approx(wanted)
    np.testing.assert_array_equal(sg.ConfusionMatrix(4)(P, L), reference.confusion_matrix(CLASSES, found))


def test_labels_may_be_one_hot_and_pixels_count() -> None:
    hot = torch.nn.functional.one_hot(L, 4).float()
    assert sg.accuracy(P, hot) == sg.accuracy(P, L) == sg.accuracy(P, L.reshape(50, 1))
    pixels, labels = P.reshape(2, 5, 5, 4).permute(0, 3, 1, 2), L.reshape(2, 5, 5)
    for metric in (sg.accuracy, sg.TopK(2), sg.ConfusionMatrix(4)):
        assert torch.equal(metric(pixels, labels), metric(P, L))


def test_a_tally_is_the_metric_of_all_rows() -> None:
    metrics = by_name([sg.accuracy, sg.TopK(2), sg.ConfusionMatrix(4)])
    tally, whole = Tally(metrics), Tally(metrics)
    whole.add(P, L, 50)
    for part in (slice(0, 20), slice(20, 45), slice(45, 50)):
        tally.add(P[part], L[part], len(L[part]))
        resumed = Tally(metrics)
        resumed.resume(tally.state())
        tally = resumed
    found, wanted = tally.values(), whole.values()
    assert found["confusion"] == wanted["confusion"]
    assert found["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-7)
    assert list(found) == ["loss", "accuracy", "top-2", "confusion"]


class Silent:
    def __array__(self, *_: object, **__: object) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("given", [None, "0.5", {}, object(), [[1], [1, 2]], np.array(["x"]), Silent()])
def test_a_metric_that_gives_no_number_is_named(given: object) -> None:
    tally = Tally({"mine": lambda prediction, labels: given})
    with pytest.raises(sg.DataTypeError, match=rf"metrics: 'mine' returned {type(given).__name__} .*not a number\."):
        tally.add(P, L, 50)
    assert not tally.sums and not tally.rows


def test_a_metric_that_changes_its_shape_is_named() -> None:
    metric = sg.ConfusionMatrix(4)
    tally = Tally({"mine": lambda prediction, labels: torch.ones(len(labels))})
    tally.add(P, L, 50)
    with pytest.raises(sg.ShapeError, match=r"'mine' returned shape \(20,\), but \(50,\) for earlier batches"):
        tally.add(P[:20], L[:20], 20)
    assert metric(P, L).sum() == 50


def test_wrong_metrics_are_refused() -> None:
    for make in (lambda: sg.TopK(0), lambda: sg.ConfusionMatrix(1), lambda: sg.TopK(5)(P, L)):
        with pytest.raises(sg.ArgumentError):
            make()
    with pytest.raises(sg.ShapeError, match=r"\(50, 1\)"):
        sg.accuracy(P[:, :1], L)
    with pytest.raises(sg.ShapeError, match="3 classes"):
        sg.ConfusionMatrix(3)(P, L)


def test_warm_up_and_cosine() -> None:
    rate = sg.WarmupCosine(2.0, warmup=10, steps=110, floor=0.5)
    assert [rate(n) for n in (0, 4, 9)] == pytest.approx([0.2, 1.0, 2.0])
    assert [rate(n) for n in (10, 35, 60, 110, 500)] == pytest.approx(
        [2.0, 1.25 + 0.75 * math.cos(math.pi / 4), 1.25, 0.5, 0.5]
    )
    assert sg.WarmupCosine(1.0, steps=10)(0) == 1.0
    for settings in ({"warmup": -1}, {"warmup": 5, "steps": 5}, {"floor": 2.0}):
        with pytest.raises(sg.ArgumentError):
            sg.WarmupCosine(1.0, **settings)
    with pytest.raises(sg.ArgumentError, match="number of updates is unknown"):
        sg.WarmupCosine(1.0)(3)
