"""Indices that a step checks itself, as on CUDA: a call with one out of range changes nothing and says so later."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.step import REFUSED
from stepgraph.graphs import compilation

NOTHING, ADDING = sg.ExecutionOptions.NONE, sg.ExecutionOptions.ACCUMULATE_GRADIENTS
EVALUATING = sg.ExecutionOptions.FORWARD_FOR_INFERENCE
PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Data = dict[str, torch.Tensor]


@pytest.fixture(autouse=True, params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device; the CPU takes the path of CUDA."""
    monkeypatch.setattr(compilation, "GUARDED", {"cpu", "cuda"})
    yield request.param


def network(**settings: Any) -> sg.TrainingGraph:
    """Words to classes, with a parameter that is updated early, statistics, dropout and an average."""
    words, classes = sg.Tensor((4, 3), "int64"), sg.Tensor((4,), "int64")
    graph = sg.Graph()
    x = graph.node(sg.EmbeddingLayer.create(300, 256), words)  # large: its update does not wait for the others
    x = graph.dropout(graph.reshape((4, 3 * 256), x), rate=0.25)
    x = graph.batch_normalization(graph.dense(x, 8))
    graph.node(sg.FullyConnectedLayer.create(8, 5), x)
    optimizer = sg.AdamWOptimizer(0.01, **settings)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), optimizer, average=0.9)
    training.add_inputs({"words": words}, {"classes": classes})
    return training


def data(place: str, word: int = 7, label: int = 2) -> tuple[Data, Data]:
    words, classes = torch.arange(12).reshape(4, 3), torch.tensor([0, 1, 2, 4])
    words[1, 2], classes[3] = word, label
    return {"words": words.to(place)}, {"classes": classes.to(place)}


def everything(training: sg.TrainingGraph) -> dict[Any, np.ndarray]:
    """All that a step changes, by what it is."""
    held = {f"held {index}": tensor.torch() for index, tensor in enumerate(training.compilation.held)}
    arrays = training.session.state.arrays
    kept = {f"{key.kind} {index}": arrays[key] for index, key in enumerate(arrays) if key != REFUSED}
    return {name: array.detach().cpu().numpy().copy() for name, array in (held | kept).items()}


def changed(training: sg.TrainingGraph, before: dict[Any, np.ndarray]) -> list[str]:
    return [name for name, array in everything(training).items() if not np.array_equal(array, before[name])]


BAD = [
    ({"label": 5}, "Tensor .* 'classes'.: row 3 holds the class index 5, but Loss takes 0 to 4"),
    ({"word": -(2**40)}, r"row 1, position 2 holds the index -2147483648 or less, but Embedding takes 0 to 299"),
]


def compiled(place: str, **settings: Any) -> sg.TrainingGraph:
    sg.set_seed(1)
    training = network(**settings.pop("optimizer", {}))
    training.compile(place, **settings)
    return training


@pytest.mark.parametrize(("bad", "problem"), BAD)
def test_a_refused_step_changes_nothing_and_the_next_one_works(place: str, bad: dict[str, int], problem: str) -> None:
    training, twin = (compiled(place, deterministic=True) for _ in range(2))
    for _ in range(4):  # on CUDA, the third is a replay
        assert training.execute(*data(place)).loss == twin.execute(*data(place)).loss
        before = everything(training)
        step = training.execute(*data(place, **bad))
        with pytest.raises(sg.DataError, match=problem):
            _ = step.loss
        assert not changed(training, before) and training.optimizer.time_step == twin.optimizer.time_step
    with pytest.raises(sg.DataError, match=problem):
        step.wait()
    assert not changed(training, everything(twin))


@pytest.mark.parametrize("settings", [
    {"compute_type": "float16"}, {"optimizer": {"clip_norm": 1.0, "groups": sg.DECAY_MATRICES_ONLY}},
    pytest.param({"fuse": True}, marks=pytest.mark.gpu),
])  # fmt: skip
def test_every_kind_of_update_is_left_out(place: str, settings: dict[str, Any]) -> None:
    training = compiled(place, **settings)
    assert np.isfinite(training.execute(*data(place)).loss)
    before = everything(training)
    with pytest.raises(sg.DataError, match="row 3 holds the class index 5"):
        training.execute(*data(place, label=5)).wait()
    assert not changed(training, before)


def test_calls_after_a_refused_one_change_nothing_until_somebody_reads(place: str) -> None:
    training = compiled(place)
    training.execute(*data(place)).wait()
    before = everything(training)
    steps = [training.execute(*data(place, label=label)) for label in (9, 0, 1)]
    with pytest.raises(sg.DataError, match="class index 9"):
        _ = steps[2].loss
    assert not changed(training, before) and training.optimizer.time_step == 2
    for step in steps:
        with pytest.raises(sg.DataError, match="class index 9"):
            _ = step.losses
    assert np.isfinite(training.execute(*data(place)).loss) and training.optimizer.time_step == 3


def test_one_bad_part_of_several_refuses_their_update(place: str) -> None:
    training = compiled(place)
    training.execute(*data(place)).wait()
    before = everything(training)
    for index, label in enumerate((5, 1, 2)):
        training.execute_forward(*data(place, label=label))
        training.execute_gradient(options=ADDING if index else NOTHING)
    with pytest.raises(sg.DataError, match="row 3 holds the class index 5"):
        training.execute_optimizer_update().wait()
    assert not changed(training, before) and training.optimizer.time_step == 2
    with pytest.raises(sg.StateError, match="there are no gradients"):
        training.execute_optimizer_update()
    training.execute_forward(*data(place))
    training.execute_gradient()
    training.execute_optimizer_update().wait()
    assert training.optimizer.time_step == 3 and changed(training, before)


def test_evaluation_saving_and_completions_report_it(place: str, tmp_path: Any) -> None:
    training = compiled(place)
    with pytest.raises(sg.DataError, match="class index 5"):
        _ = training.execute(*data(place, label=5), options=EVALUATING).loss
    training.execute(*data(place, label=5))
    with pytest.raises(sg.DataError, match="class index 5"):
        training.save(tmp_path / "model")
    training.execute(*data(place, label=5))
    with pytest.raises(sg.DataError, match="class index 5"):
        training.synchronize_updates()
    told: list[Any] = []
    execution = training.execute(*data(place, label=5), completion=lambda *all_of_it: told.append(all_of_it))
    with pytest.raises(sg.DataError, match="class index 5"):
        execution.wait()
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:  # on CUDA, another thread tells it
        time.sleep(0.01)
    assert told[0][0] is None and isinstance(told[0][1], sg.DataError)
    training.save(tmp_path / "model")


def test_an_ignored_label_and_a_diverged_loss_are_no_refusals(place: str) -> None:
    x, y = sg.Tensor((2, 3, 4)), sg.Tensor((2, 3), "int32")
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(4, 4), x)
    loss = sg.LossLayer.softmax_cross_entropy(axis=2, ignored_label=-100)
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(place)
    labels = torch.tensor([[0, 1, -100], [3, 2, -100]], dtype=torch.int32, device=place)
    assert np.isfinite(training.execute({"x": torch.ones(2, 3, 4, device=place)}, {"y": labels}).loss)
    labels[1, 1] = -99
    with pytest.raises(sg.DataError, match="row 1, position 1 holds the class index -99, but Loss takes 0 to 3 or -10"):
        _ = training.execute({"x": torch.ones(2, 3, 4, device=place)}, {"y": labels}).loss
    labels[1, 1] = 1
    assert np.isnan(training.execute({"x": torch.full((2, 3, 4), torch.nan, device=place)}, {"y": labels}).loss)


def test_indices_that_a_layer_computes_are_checked_too(place: str) -> None:
    x, y = sg.Tensor((4, 6)), sg.Tensor((4, 1, 2))
    graph = sg.Graph()
    largest = graph.node(sg.ReductionLayer(sg.ReductionType.ARG_MAX, 1), x)
    graph.node(sg.EmbeddingLayer.create(5, 2), largest)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(place)
    zeros, given = {"y": torch.zeros(4, 1, 2, device=place)}, torch.eye(6, device=place)
    assert np.isfinite(training.execute({"x": given[:4]}, zeros).loss)
    with pytest.raises(sg.DataError, match="row 3 holds the index 5, but Embedding takes 0 to 4"):
        _ = training.execute({"x": given[2:]}, zeros).loss


def test_fit_names_a_bad_label_and_its_metrics_survive_it(place: str) -> None:
    training = compiled(place)

    def batches(_: int) -> Iterator[tuple[Data, Data]]:
        return (data(place, label=5 if index == 6 else 1) for index in range(12))

    with pytest.raises(sg.DataError, match="row 3 holds the class index 5, but Loss takes 0 to 4"):
        sg.fit(training, batches, epochs=1, metrics={"confusion": sg.ConfusionMatrix(5)}, progress="quiet")
    assert training.optimizer.time_step == 7


def test_linked_graphs_and_checked_numbers_are_checked_before_the_call(place: str) -> None:
    training = compiled(place, check_numerics=True)
    with pytest.raises(sg.DataError, match="class index 5"):
        training.execute(*data(place, label=5))
