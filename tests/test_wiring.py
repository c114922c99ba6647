"""Wiring with few words: functions, operators, sequences, input sizes found when a layer is wired."""

import ast
import copy
import gc
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph as sg
from stepgraph.layers import functions
from tools import layer_functions as wiring


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def computed(graph: sg.Graph, inputs: dict[str, tuple[sg.Tensor, Any]], **results: sg.Tensor) -> dict[str, np.ndarray]:
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({name: tensor for name, (tensor, _) in inputs.items()})
    inference.add_outputs(results)
    inference.compile("cpu")
    step = inference.execute({name: data for name, (_, data) in inputs.items()})
    return {name: step[name].numpy() for name in results}


# Functions


def test_the_written_functions_are_those_of_the_layers() -> None:
    def body(text: str) -> tuple[set[str], list[str]]:
        tree = ast.parse(text)
        imports = {ast.dump(one) for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)}
        return imports, [ast.dump(one) for one in tree.body if isinstance(one, ast.ClassDef)]

    path = Path(inspect.getsourcefile(functions) or "")
    command = "python tools/layer_functions.py > src/stepgraph/layers/functions.py"
    assert body(path.read_text()) == body(wiring.written(wiring.public_layers())), command


def test_every_layer_has_a_function_and_every_function_a_real_signature() -> None:
    found = list(wiring.rows(wiring.public_layers()))
    assert len({row.name for row in found}) == len(found)
    covered = {row.layer for row in found} | {getattr(sg, name) for name in wiring.ELSEWHERE | wiring.BY_NODE}
    assert covered == set(wiring.public_layers())
    for row in found:
        function = getattr(sg.Graph, row.name)
        assert inspect.getdoc(function) and list(inspect.signature(function).parameters)[:2] == ["self", "x"]
    dense = inspect.signature(sg.Graph.dense)
    assert list(dense.parameters) == ["self", "x", "outputs", "biases", "initializer", "label"]


def test_functions_wire_what_the_layers_compute() -> None:
    graph, x, image = sg.Graph(), sg.Tensor((sg.BATCH, 6)), sg.Tensor((sg.BATCH, 2, 8, 8))
    dense = graph.dense(x, 3, label="head")
    soft = graph.softmax(dense)
    pooled = graph.max_pooling(graph.relu(graph.convolution(image, 4, 3)), 2)
    bounded = graph.minimum(graph.maximum(graph.exp(x), 0.5), 2)
    normal = graph.layer_normalization(x)
    mean = graph.mean(x, 1)
    data, pictures = numbers(5, 6), numbers(5, 2, 8, 8, seed=1)
    found = computed(
        graph, {"x": (x, data), "image": (image, pictures)},
        soft=soft, pooled=pooled, bounded=bounded, normal=normal, mean=mean,
    )  # fmt: skip
    head, convolution = graph.layers[0], graph.layers[2]
    assert head.label == "head" and convolution.weights.shape == (4, 2, 3, 3)
    t = torch.tensor(data)
    expected = {
        "soft": F.linear(t, head.weights.torch(), head.biases.torch()).softmax(1),
        "pooled": F.max_pool2d(F.conv2d(torch.tensor(pictures), convolution.weights.torch(),
                                        convolution.biases.torch(), padding=1).relu(), 2),
        "bounded": t.exp().clamp(0.5, 2),
        "normal": F.layer_norm(t, (6,)),
        "mean": t.mean(1),
    }  # fmt: skip
    for name, wanted in expected.items():
        np.testing.assert_allclose(found[name].reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_layer_with_several_results_returns_all_of_them() -> None:
    graph, x = sg.Graph(), sg.Tensor((sg.BATCH, 3, 4))
    assert graph.lstm(x, 5).shape == (sg.BATCH, 3, 5)
    states = graph.lstm(x, 5, result_mode=sg.LSTMResultMode.OUTPUT_AND_STATES)
    assert [tensor.shape for tensor in states] == [(sg.BATCH, 3, 5), (1, 1, sg.BATCH, 5), (1, 1, sg.BATCH, 5)]
    assert graph.attention(x, 2).shape == x.shape
    other = sg.Tensor((sg.BATCH, 7, 4))
    assert graph.attention(x, 2, key=other).shape == x.shape
    last = sg.LSTMLayer.create(4, 5, result_mode=sg.LSTMResultMode.OUTPUT_AND_STATES)
    assert len(graph.sequence(x, sg.ActivationLayer.relu(), last)) == 3
    both = sg.LSTMLayer.create(5, result_mode=sg.LSTMResultMode.OUTPUT_AND_STATES)
    assert graph.sequence(x, both, sg.FullyConnectedLayer.create(2)).shape == (sg.BATCH, 3, 2)
    assert graph.sequence(x) is x


def test_losses_as_functions_train() -> None:
    graph, x, y = sg.Graph(), sg.Tensor((sg.BATCH, 4)), sg.Tensor((sg.BATCH,), "int64")
    graph.softmax_cross_entropy(graph.dense(x, 3), y)
    training = sg.TrainingGraph([graph], optimizer=sg.SGDOptimizer(learning_rate=0.5))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu")
    data = {"x": numbers(6, 4)}, {"y": np.arange(6) % 3}
    first = training.execute(*data).loss
    assert [training.execute(*data).loss for _ in range(30)][-1] < first / 2


# Operators


def test_operators_compute_and_differentiate_what_they_say() -> None:
    graph, x, w = sg.Graph(), sg.Tensor((sg.BATCH, 3)), sg.Tensor((3, 2), data=numbers(3, 2, seed=4))
    dense = sg.FullyConnectedLayer.create(3)
    h = graph.node(dense, x)
    matrix, row = numbers(2, 3, seed=5).astype(np.float64), np.arange(3.0)
    z = (2 * h - 1) / 4 + h**2 - 3 / (h * h + 2) + (1 - h)
    z = -(z @ w) @ matrix + row
    z = (row - z) * np.float32(0.5) + torch.ones(1, 3)
    flat = (h + x).reshape(sg.BATCH, 3, 1).reshape((sg.BATCH, -1))
    loss = graph.mean_squared_error(z + flat, x)
    training = sg.TrainingGraph([graph], optimizer=sg.SGDOptimizer(learning_rate=1.0))
    training.add_inputs({"x": x})
    training.add_outputs({"loss": loss})
    training.compile("cpu")
    data = numbers(4, 3)
    weights, biases = (t.torch().clone().requires_grad_() for t in (dense.weights, dense.biases))
    t = torch.tensor(data)
    a = F.linear(t, weights, biases)
    b = (2 * a - 1) / 4 + a**2 - 3 / (a * a + 2) + (1 - a)
    b = -(b @ torch.tensor(w.numpy())) @ torch.tensor(matrix, dtype=torch.float32) + torch.arange(3.0)
    b = (torch.arange(3.0) - b) * 0.5 + 1
    expected = F.mse_loss(b + a + t, t)
    expected.backward()
    assert training.execute({"x": data}).loss == pytest.approx(expected.item(), rel=1e-4)
    np.testing.assert_allclose(dense.weights.numpy(), (weights - weights.grad).detach(), rtol=1e-3, atol=1e-4)


def test_operators_need_one_live_graph_and_a_failure_adds_nothing() -> None:
    one, two, x = sg.Graph(), sg.Graph(), sg.Tensor((2, 3))
    a, b = one.relu(x), two.relu(x)
    with pytest.raises(sg.StateError, match=r"results of a graph(.|\n)*graph\.add"):
        x + 1
    with pytest.raises(sg.StateError, match=r"two graphs(.|\n)*training\.multiply"):
        a * b
    with pytest.raises(TypeError, match="unsupported operand"):
        a + "text"
    assert (a + x).graph is one and one.add(x, 1).shape == (2, 3)
    count = len(one.nodes)
    with pytest.raises(sg.ShapeError, match="broadcast"):
        a + np.ones((5, 7), np.float32)
    with pytest.raises(sg.DataTypeError, match="float64"):
        one.node(sg.ReductionLayer.arg_max(1), a) + np.array([0.5])
    assert len(one.nodes) == count + 1
    training = sg.TrainingGraph([one, two])
    assert training.multiply(a, b).graph is training and a.graph is one
    copied = copy.deepcopy(one)
    assert copied.nodes[0].results[0].graph is None  # the copy's results are used with copied.add(…)
    del one
    gc.collect()
    assert b.graph is two


def test_arrays_read_tensors_that_are_results_of_no_graph() -> None:
    tensor = sg.Tensor((2,), data=np.array([1, 2], np.float32))
    assert np.array_equal(np.ones(2) + tensor, [2, 3]) and np.array_equal(tensor * np.ones(2), [1, 2])


def test_constants_are_held_by_the_graph_and_saved_with_it(tmp_path: Path) -> None:
    graph, x = sg.Graph(), sg.Tensor((sg.BATCH, 3))
    table = np.arange(3, dtype=np.float32)
    y = graph.add(graph.relu(x), table) * 2
    table += 100  # the graph has its own copy
    kinds = [graph.constant(v).data_type for v in (1.5, 2, True, np.zeros(2, np.float64), np.zeros(2, np.int32))]
    assert [str(kind) for kind in kinds] == ["FLOAT32", "INT64", "BOOLEAN", "FLOAT64", "INT32"]
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({"y": y})
    inference.compile("cpu")
    assert list(inference.inputs) == ["x"]
    inference.save(tmp_path / "model")
    data = numbers(4, 3)
    for one in (inference, sg.load(tmp_path / "model", "cpu")):
        np.testing.assert_allclose(one.execute({"x": data})["y"].numpy(), 2 * (data.clip(0) + np.arange(3)), rtol=1e-6)


# Sizes that are found


@pytest.mark.parametrize(
    ("layer", "source", "parameter", "shape"),
    [
        (lambda: sg.FullyConnectedLayer.create(5), (2, 3), "weights", (5, 3)),
        (lambda: sg.FullyConnectedLayer.create(outputs=5), (sg.BATCH, 4, 3), "weights", (5, 3)),
        (lambda: sg.ConvolutionLayer.create(4, kernel_sizes=3), (2, 3, 8, 8), "weights", (4, 3, 3, 3)),
        (lambda: sg.ConvolutionLayer.create(4, 3), (sg.BATCH, 3, 8, 8), "weights", (4, 3, 3, 3)),
        (sg.BatchNormalizationLayer.create, (2, 3, 8, 8), "gamma", (3,)),
        (lambda: sg.InstanceNormalizationLayer.create(momentum=0.9), (2, 3, 8, 8), "gamma", (3,)),
        (lambda: sg.GroupNormalizationLayer.create(2), (2, 4, 8, 8), "gamma", (4,)),
        (sg.LayerNormalizationLayer.create, (2, 7, 6), "gamma", (6,)),
    ],
)
def test_input_sizes_are_found_when_a_layer_is_wired(layer: Any, source: Any, parameter: str, shape: Any) -> None:
    made, graph = layer(), sg.Graph()
    assert made.is_deferred and "not wired yet" in repr(made)
    with pytest.raises(sg.StateError, match=f"'{parameter}' does not exist before the layer is wired"):
        getattr(made, parameter)
    graph.node(made, sg.Tensor(source))
    assert getattr(made, parameter).shape == shape and made in graph.layers and not made.is_deferred
    assert "test_wiring.py" in made.line and made.label == type(made).default_label


def test_a_layer_that_could_not_be_wired_still_finds_its_inputs() -> None:
    layer, graph = sg.FullyConnectedLayer.create(5, label="late"), sg.Graph()
    with pytest.raises(sg.DataTypeError, match="late"):
        graph.node(layer, sg.Tensor((2, 3), "int64"))
    with pytest.raises(sg.ShapeError, match="inputs would be BATCH"):
        graph.node(layer, sg.Tensor((3, sg.BATCH)))
    assert layer.is_deferred and not graph.nodes
    graph.node(layer, sg.Tensor((2, 7)))
    assert layer.weights.shape == (5, 7) and layer.label == "late"
    assert graph.node(layer, sg.Tensor((4, 7))).shape == (4, 5)  # a second use shares the weights
    with pytest.raises(sg.ShapeError, match="last dimension of the source is 6"):
        graph.node(layer, sg.Tensor((4, 6)))
    for wrong in (lambda: sg.FullyConnectedLayer.create(inputs=3), lambda: sg.ConvolutionLayer.create(3)):
        with pytest.raises(TypeError, match="missing"):
            wrong()


def test_found_and_given_sizes_make_the_same_weights(tmp_path: Path) -> None:
    models = []
    for sizes in ((5,), (3, 5)):
        sg.set_seed(4)
        layer, graph = sg.FullyConnectedLayer.create(*sizes), sg.Graph()
        graph.node(layer, sg.Tensor((2, 3)))
        models.append(layer)
    assert np.array_equal(models[0].weights, models[1].weights)
