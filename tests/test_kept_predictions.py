"""What a training step keeps of the predictions that losses compare: small ones, and large ones that are asked for."""

from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.compiler.program import PartName
from stepgraph.compiler.step import value
from stepgraph.graphs import compilation
from stepgraph.mlc.tables.graphs import compile_for

ROWS, CLASSES = 8, 64


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step of this file predicts is too large to be kept unasked; half of it is not."""
    monkeypatch.setattr(compilation, "LARGEST", ROWS * CLASSES - 1)


def network(**settings: Any) -> tuple[sg.TrainingGraph, sg.Tensor, tuple[dict[str, Any], dict[str, Any]]]:
    sg.set_seed(1)
    x, y = sg.Tensor((ROWS, 4)), sg.Tensor((ROWS,), "int64")
    graph = sg.Graph()
    logits = graph.node(sg.FullyConnectedLayer.create(4, CLASSES), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", **settings)
    random = np.random.default_rng(0)
    rows = random.standard_normal((ROWS, 4)).astype(np.float32)
    return training, logits, ({"x": rows}, {"y": random.integers(0, CLASSES, ROWS)})


def keeps(training: sg.TrainingGraph, prediction: sg.Tensor, batch: int = ROWS) -> bool:
    assert training.compilation is not None
    return value(prediction) in training.compilation.programs.executable(PartName.STEP, batch).part.outputs


def test_a_large_prediction_is_not_kept_and_says_what_to_declare() -> None:
    training, logits, data = network()
    assert not keeps(training, logits)
    first = training.execute(*data).loss
    with pytest.raises(sg.StateError, match="declare it with add_outputs"):
        logits.numpy()
    training.add_outputs({"logits": logits})
    step = training.execute(*data)
    assert step.loss < first
    np.testing.assert_array_equal(step["logits"].numpy(), logits.numpy())


def test_the_rows_of_a_call_decide() -> None:
    training, logits, (x, y) = network()
    training.execute({"x": x["x"][:4]}, {"y": y["y"][:4]}, batch_size=4)
    assert logits.numpy().shape == (4, CLASSES)
    training.execute(x, y)
    with pytest.raises(sg.StateError, match="declare it"):
        logits.numpy()


def test_evaluations_and_phases_keep_it() -> None:
    training, logits, data = network()
    step = training.execute(*data, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)
    assert step["output"].numpy().shape == logits.numpy().shape == (ROWS, CLASSES)
    training.execute(*data)
    training.execute_forward(*data)
    assert logits.numpy().shape == (ROWS, CLASSES)


@pytest.mark.parametrize("settings", [{"check_numerics": True}, {"memory_limit": 1 << 20}], ids=str)
def test_options(settings: dict[str, Any]) -> None:
    training, logits, data = network(**settings)
    training.execute(*data)
    assert logits.has_data == ("check_numerics" in settings)


def test_metrics_of_fit_ask_for_it() -> None:
    training, logits, (x, y) = network()
    sg.fit(training, (x, y), epochs=1, progress="quiet")
    assert not keeps(training, logits)
    history = sg.fit(training, (x, y), epochs=1, metrics=[sg.accuracy], progress="quiet")
    assert keeps(training, logits) and 0 <= history.epochs[-1]["accuracy"] <= 1
    training.compile("cpu")
    assert keeps(training, logits)


def test_graphs_under_ml_computes_names_keep_it() -> None:
    training, logits, data = network()
    compile_for(training, sg.Device.cpu())
    training.execute(*data)
    assert logits.numpy().shape == (ROWS, CLASSES)


def test_it_is_kept_where_a_linked_graph_reads_it() -> None:
    training, logits, _ = network(link_graphs=True)
    more = sg.Graph()
    more.node(sg.FullyConnectedLayer.create(CLASSES, 2), logits)
    reader = sg.TrainingGraph([more], optimizer=sg.SGDOptimizer(0.1))
    reader.add_inputs({"logits": logits})
    reader.compile("cpu", link_graphs=True)
    training.link([reader])
    assert keeps(training, logits)


def test_the_gradient_overwrites_what_is_not_kept() -> None:
    """A large vocabulary needs its predictions once, in half precision, and no other array of that size."""
    sg.set_seed(0)
    x, y = sg.Tensor((64, 8, 16)), sg.Tensor((64, 8), "int64")
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(16, 2048), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(axis=-1), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", compute_type="bfloat16", memory_limit=1 << 30)
    plan = training.memory_plan
    predictions = 2 * 64 * 8 * 2048
    assert plan.activations + plan.gradients < 1.4 * predictions
