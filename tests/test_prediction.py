"""`training.inference()` and `sg.predict`: what a trained graph answers, for any number of rows and threads."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Net:
    """Two dense layers with dropout between them, and their twin in NumPy."""

    def __init__(self, rows: int = 32, device: str = "cpu", outputs: bool = False, **settings: Any) -> None:
        sg.set_seed(3)
        self.x, self.y, self.graph = sg.Tensor((rows, 5)), sg.Tensor((rows,), "int64"), sg.Graph()
        self.first, self.second = sg.FullyConnectedLayer.create(5, 8), sg.FullyConnectedLayer.create(8, 3)
        self.hidden = self.graph.node(sg.ActivationLayer.tanh(), self.graph.node(self.first, self.x))
        self.logits = self.graph.node(self.second, self.graph.node(sg.DropoutLayer(0.5), self.hidden))
        loss, optimizer = sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=0.05)
        self.training = sg.TrainingGraph([self.graph], loss, optimizer)
        self.training.add_inputs({"x": self.x}, {"y": self.y})
        if outputs:
            self.training.add_outputs({"logits": self.logits, "hidden": self.hidden})
        self.training.compile(device, **settings)

    def expected(self, x: np.ndarray) -> np.ndarray:
        hidden = np.tanh(x @ self.first.weights.numpy().T + self.first.biases.numpy())
        return hidden @ self.second.weights.numpy().T + self.second.biases.numpy()

    def learn(self) -> None:
        self.training.execute({"x": numbers(32, 5, seed=7)}, {"y": np.arange(32) % 3})


X = numbers(330, 5)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 330])
def test_any_number_of_rows_none_lost_and_none_repeated(rows: int) -> None:
    net = Net()
    found = sg.predict(net.training, X[:rows])
    assert list(found) == ["output"] and found["output"].shape == (rows, 3)
    np.testing.assert_allclose(found["output"], net.expected(X[:rows]), rtol=1e-4, atol=1e-6)


def test_all_kinds_of_data_and_graphs_give_the_same() -> None:
    net = Net(outputs=True)
    inference = net.training.inference()
    wanted, labels = net.expected(X), np.zeros(330, np.int64)
    dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(labels))
    kinds: list[Any] = [
        X,
        torch.tensor(X),
        {"x": X},
        {"x": X, "y": labels},
        (X, labels),
        [X[:100], X[100:101], X[101:]],
        torch.utils.data.DataLoader(dataset, batch_size=64),
        ((X[i : i + 50],) for i in range(0, 330, 50)),
    ]
    for graph in (net.training, inference):
        for data in kinds[:-1] if graph is inference else kinds:
            found = sg.predict(graph, data)
            assert list(found) == ["logits", "hidden"] and found["hidden"].shape == (330, 8)
            np.testing.assert_allclose(found["logits"], wanted, rtol=1e-4, atol=1e-6)
    found = sg.predict(inference, X, batch_size=100, prefetch=2)
    np.testing.assert_allclose(found["logits"], wanted, rtol=1e-4, atol=1e-6)


def test_predictions_follow_training_and_change_nothing() -> None:
    net, twin = Net(), Net()
    for _ in range(3):
        net.learn()
        twin.learn()
        np.testing.assert_allclose(sg.predict(net.training, X)["output"], net.expected(X), rtol=1e-4, atol=1e-6)
    assert np.array_equal(net.second.weights, twin.second.weights)
    predictions = sg.predict(net.training, X)["output"]
    net.graph.node(sg.SoftmaxLayer.softmax(), net.logits)
    assert np.array_equal(sg.predict(net.training, X)["output"], predictions)  # the compiled graph is unchanged


def test_inference_leaves_out_losses_and_shares_everything_else() -> None:
    net = Net(outputs=True, compute_type="bfloat16")
    inference = net.training.inference()
    assert [node.layer for node in inference.nodes] == net.graph.layers
    assert list(inference.inputs) == ["x"] and inference.loss_labels == {}
    assert inference.compilation.settings.compute_type is torch.bfloat16
    net.learn()
    hidden = [graph.execute({"x": X[:32]})["hidden"] for graph in (inference, net.training.inference())]
    assert np.array_equal(*hidden)
    exact = net.training.inference(compute_type=None, tf32=False)
    np.testing.assert_allclose(exact.execute({"x": X[:32]}).result.numpy(), net.expected(X[:32]), rtol=1e-4, atol=1e-5)
    probabilities = inference.node(sg.SoftmaxLayer.softmax(), net.logits)
    inference.compile()
    inference.add_outputs({"probabilities": probabilities})
    assert inference.execute({"x": X[:32]})["probabilities"].numpy().sum(1) == pytest.approx(1, abs=1e-2)


def test_inference_of_a_graph_with_loss_nodes_and_constants() -> None:
    x, y, scale, graph = sg.Tensor((4, 3)), sg.Tensor((4, 2)), sg.Tensor((1, 3)), sg.Graph()
    scaled = graph.node(sg.ArithmeticLayer.multiply(), x, scale)
    one, two = (graph.node(sg.FullyConnectedLayer.create(3, 2), scaled) for _ in range(2))
    doubled = graph.node(sg.ArithmeticLayer.add(), y, y)
    losses = [graph.node(sg.LossLayer.mean_squared_error(), t, loss_labels=doubled) for t in (one, two)]
    graph.node(sg.ArithmeticLayer.add(), *losses)
    training = sg.TrainingGraph([graph], optimizer=sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x, "scale": scale}, {"y": y})
    training.compile("cpu", input_tensors={"scale": scale}, input_tensors_data={"scale": np.full((1, 3), 2, "f")})
    inference = training.inference()
    assert len(inference.nodes) == 3 and "y" not in {**inference.inputs, **inference.loss_labels}
    found = sg.predict(training, numbers(9, 3))
    assert {name: array.shape for name, array in found.items()} == {"output": (9, 2), "output2": (9, 2)}
    layer = graph.layers[2]
    expected = 2 * numbers(9, 3) @ layer.weights.numpy().T + layer.biases.numpy()
    np.testing.assert_allclose(found["output2"], expected, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_predicted_is_refused() -> None:
    net = Net()
    for given, error, words in (
        ((net.graph, X), sg.DataTypeError, "not a training or inference graph"),
        ((sg.InferenceGraph([net.graph]), X), sg.StateError, "not compiled"),
        ((net.training, X[:, :4]), sg.ShapeError, "shape"),
        ((net.training, {"z": X}), sg.UnknownNameError, "no data"),
        ((net.training, X[:0]), sg.DataError, "no rows"),
        ((net.training, []), sg.DataError, "no batches"),
    ):
        with pytest.raises(error, match=words):
            sg.predict(*given)
    for wrong in ({"batch_size": 0}, {"batch_size": True}, {"prefetch": -1}):
        with pytest.raises(sg.ArgumentError, match=next(iter(wrong))):
            sg.predict(net.training, X, **wrong)
    graph = sg.Graph()
    x = sg.Tensor((4, 3))
    graph.node(sg.ReductionLayer(sg.ReductionType.SUM, (0,)), x)
    inference = sg.InferenceGraph([graph])
    inference.compile("cpu")
    assert sg.predict(inference, numbers(4, 3))["output"].shape[-1] == 3
    with pytest.raises(sg.ArgumentError, match="not a row per row"):
        sg.predict(inference, numbers(8, 3))


def _requests(device: str, count: int) -> None:
    """Eight threads ask one inference graph for different rows, by single calls and whole predictions."""
    net = Net(1, device, outputs=True)
    inference = net.training.inference()
    net.training.synchronize_updates()
    rows = numbers(512, 5, seed=11)
    wanted, wrong = net.expected(rows), list[int]()
    for _ in range(12):
        inference.execute({"x": rows[:1]})

    def ask(number: int) -> None:
        held = []
        for i in range(count):
            row = (number * 61 + i * 7) % 512
            held.append((row, inference.execute({"x": rows[row : row + 1]})))
            if len(held) == 5:
                for asked, execution in held:
                    close = np.allclose(execution["logits"].numpy()[0], wanted[asked], rtol=1e-2, atol=1e-2)
                    if not close or not np.array_equal(execution["logits"], execution.result):
                        wrong.append(asked)
                held.clear()
        if not np.allclose(sg.predict(inference, rows, batch_size=100)["logits"], wanted, rtol=1e-2, atol=1e-2):
            wrong.append(-1)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_requests_from_eight_threads_each_get_their_own_answer() -> None:
    _requests("cpu", 60)


@pytest.mark.deep
def test_twenty_thousand_requests_from_eight_threads_each_get_their_own_answer() -> None:
    _requests("cpu", 2500)


@pytest.mark.gpu
def test_twenty_thousand_requests_on_cuda_each_get_their_own_answer() -> None:
    _requests("cuda", 2500)
