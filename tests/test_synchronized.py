"""Batch normalization with the statistics of the whole batch, whatever the number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.layers import over_ranks
from tests.parallel_runs import marks, together

SIZES = (13, 16)  # rows of a batch: uneven shards, and even ones


def network(shards: int | None, synchronized: bool = True) -> sg.TrainingGraph:
    """Normalizes the channels of short sequences with a scale and a shift, and features without."""
    sg.set_seed(5)
    x, y, graph = sg.Tensor((sg.BATCH, 2, 3), label="x"), sg.Tensor((sg.BATCH,), "int64", label="y"), sg.Graph()
    h = graph.batch_normalization(x, synchronized=synchronized, momentum=0.8)
    h = graph.dense(graph.reshape((sg.BATCH, 6), h), 4)
    mean, variance = (sg.Tensor((4,), fill=value) for value in (0.0, 1.0))
    h = graph.node(sg.BatchNormalizationLayer(4, mean, variance, synchronized=synchronized), h)
    graph.dense(graph.tanh(h), 3)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.1, momentum=0.5))
    training.add_inputs({"x": x}, {"y": y})
    parallel = None if shards is None else sg.Parallel(shards, timeout=30)
    training.compile("cpu", parallel=parallel, deterministic=True)
    return training


def batch(rows: int, seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Rows whose mean and variance change from one to the next, so that shards have other statistics than all."""
    random = np.random.default_rng(seed)
    x = np.linspace(1, 5, rows)[:, None, None] * random.standard_normal((rows, 2, 3)) + np.arange(rows)[:, None, None]
    return {"x": x.astype(np.float32)}, {"y": random.integers(0, 3, rows)}


def trained(shards: int | None, synchronized: bool = True) -> dict[str, Any]:
    """Losses of a few steps, and all numbers of the graph after them."""
    training = network(shards, synchronized)
    losses = [training.execute(*batch(rows, step)).loss for step, rows in enumerate(SIZES)]
    return {name: tensor.numpy().copy() for name, tensor in training.named_tensors().items()} | {"losses": losses}


def failed() -> dict[str, Any]:
    """A step in which a label of the second rank is out of range, and one after it."""
    training = network(2)
    training.execute(*batch(16, 0))
    before = marks(training)
    inputs, labels = batch(16, 1)
    labels["y"][12] = 99
    with pytest.raises(sg.StepgraphError) as caught:
        training.execute(inputs, labels)
    is_same = marks(training) == before
    return {"error": str(caught.value), "same": is_same, "next": training.execute(*batch(16, 2)).loss}


def both() -> tuple[dict[str, Any], dict[str, Any]]:
    return trained(2), failed()


def test_two_ranks_use_the_statistics_of_the_whole_batch() -> None:
    whole, ranks = trained(None), together(2, both)
    assert not isinstance(ranks[0], str), ranks[0]
    for name, expected in whole.items():
        first, second = (found[name] for found, _ in ranks)
        np.testing.assert_allclose(first, expected, rtol=2e-5, atol=2e-6, err_msg=name)
        assert np.array_equal(first, second)
    # A rank that fails in the middle of a step leaves nobody waiting.
    failures = [after for _, after in ranks]
    assert all("row 12 holds the class index 99" in one["error"] for one in failures)
    assert failures[0]["same"] and failures[1]["same"] and failures[0]["next"] == failures[1]["next"]


def test_one_process_has_the_ordinary_layer() -> None:
    one, other = trained(1), trained(1, synchronized=False)
    assert all(np.array_equal(one[name], other[name]) for name in other)


def test_several_shards_on_a_rank_are_refused() -> None:
    with pytest.raises(sg.StateError, match=r"synchronized, but there are 4 shards for 1 rank\b") as caught:
        network(4)
    assert "Parallel(shards=1)" in str(caught.value)


def few() -> str:
    training = network(2)
    with pytest.raises(sg.ArgumentError) as caught:
        training.execute(*batch(1, 0))
    return str(caught.value)


@pytest.mark.deep
def test_a_rank_without_rows_is_refused() -> None:
    assert all("a batch of 1 rows leaves some of 2 ranks without rows" in one for one in together(2, few))


def test_it_is_saved_and_ignored_by_inference(tmp_path: Path) -> None:
    training = network(None)
    loaded = sg.load(training.save(tmp_path / "model"), "cpu")
    assert [layer.synchronized for layer in loaded.layers if isinstance(layer, sg.BatchNormalizationLayer)] == [
        True
    ] * 2
    inputs, _ = batch(16, 0)
    plain = network(None, synchronized=False)
    expected = plain.inference().execute(inputs).result
    assert np.array_equal(training.inference().execute(inputs).result, expected)


def test_the_gradient_of_a_sum_is_the_sum_of_the_gradients() -> None:
    def twice(array: torch.Tensor, what: str) -> Any:
        return lambda: torch.stack([array, 2 * array])

    x = torch.ones(3, requires_grad=True)
    with over_ranks.among(twice):
        total = over_ranks.sum_over_ranks(x)
        (gradient,) = torch.autograd.grad(total, x, torch.tensor([1.0, 2.0, 3.0]))
    assert total.tolist() == [3, 3, 3] and gradient.tolist() == [3, 6, 9]
