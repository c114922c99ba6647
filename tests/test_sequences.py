"""The call sequences A to N that every program of the original relies on, each with numbers from PyTorch or NumPy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph as sg
from tests.test_training_members import (
    BATCH,
    CPU,
    RATE,
    Compile,
    Network,
    Run,
    X,
    Y,
    assert_close,
    dense,
    descended,
    leaves,
    mse,
    numbers,
    predict,
    sgd,
)

LINKED = Compile.LINK_GRAPHS | Compile.COMPUTE_ALL_GRADIENTS


def batches(count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for seed in range(count):
        yield numbers(BATCH, 3, seed=100 + seed), numbers(BATCH, 2, seed=200 + seed)


def test_a_plain_training() -> None:
    images, labels, graph = sg.Tensor.image(6, 6, 2, 8), sg.Tensor((8, 3)), sg.Graph()
    convolution, head = sg.ConvolutionLayer.create(2, 4, 3), dense(36, 3, 10)
    hidden = graph.node(sg.ActivationLayer.relu(), graph.node(convolution, images))
    graph.node(head, graph.reshape((8, -1), graph.node(sg.PoolingLayer.max(2), hidden)))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sgd(momentum_scale=0.9))
    training.add_inputs({"image": images}, loss_labels={"label": labels})
    training.compile(CPU)
    tensors = [convolution.weights, convolution.biases, head.weights, head.biases]
    twin = torch.optim.SGD(parameters := leaves(tensors), lr=RATE, momentum=0.9)
    for step, rows in enumerate((8, 8, 8, 5)):  # the last batch is not full
        image = numbers(rows, 2, 6, 6, seed=step)
        label = np.eye(3, dtype=np.float32)[np.arange(rows) % 3]
        hidden = F.max_pool2d(F.relu(F.conv2d(torch.tensor(image), *parameters[:2], padding=1)), 2).flatten(1)
        loss = F.cross_entropy(F.linear(hidden, *parameters[2:]), torch.tensor(label))
        twin.zero_grad()
        loss.backward()
        twin.step()
        found = training.execute({"image": image}, {"label": label}, batch_size=rows).loss
        assert found == pytest.approx(loss.item(), rel=1e-5)
    training.synchronize_updates()
    assert_close([tensor.data for tensor in tensors], parameters, 1e-5)


def test_b_training_and_inference_share_weights() -> None:
    network = Network(mse(), sgd()).compiled()
    inference = sg.InferenceGraph([network.graph])
    inference.node(sg.SoftmaxLayer.softmax(), network.out)
    inference.add_inputs({"x": network.x})
    inference.compile(CPU)
    parameters = leaves(network.parameters)
    for x, y in batches(3):
        shares = inference.execute({"x": x}).result
        assert_close([shares], [predict(parameters, x).softmax(1)])
        loss = F.mse_loss(predict(parameters, x), torch.tensor(y))
        assert network.training.execute({"x": x}, {"y": y}).loss == pytest.approx(loss.item(), rel=1e-5)
        parameters = [p.detach().requires_grad_() for p in descended(loss, parameters)]
    assert_close([inference.execute({"x": X}).result], [predict(parameters).softmax(1)], 1e-5)


@pytest.mark.parametrize("kind", [sg.TrainingGraph, sg.InferenceGraph])
def test_c_forward_only(kind: Any) -> None:
    a, b, graph, got = sg.Tensor((1, 1)), sg.Tensor((1, 1)), sg.Graph(), []
    graph.node(sg.ArithmeticLayer.add(), a, b)
    made = kind([graph])
    made.add_inputs({"a": a, "b": b})
    made.compile(CPU)
    made.execute({"a": [[4]], "b": [[2]]}, options=Run.SYNCHRONOUS, completion=lambda *given: got.append(given))
    assert [(tensor.data.item(), error) for tensor, error, _ in got] == [(6, None)]


def test_d_three_phases() -> None:
    network = Network(mse(), sgd(momentum_scale=0.9)).compiled()
    twin = torch.optim.SGD(parameters := leaves(network.parameters), lr=RATE, momentum=0.9)
    for x, y in batches(3):
        network.bind(x, y)
        loss = F.mse_loss(predict(parameters, x), torch.tensor(y))
        assert network.training.execute_forward().loss == pytest.approx(loss.item(), rel=1e-5)
        twin.zero_grad()
        loss.backward()
        network.training.execute_gradient()
        assert_close(network.gradients(), [p.grad for p in parameters], 1e-5)
        twin.step()
        network.training.execute_optimizer_update()
        assert_close(network.parameters, parameters, 1e-5)


def test_e_custom_optimizer() -> None:
    network, memory = Network(mse()).compiled(), []
    parameters = leaves(network.parameters)
    for x, y in batches(3):
        network.bind(x, y)
        network.training.execute_forward()
        network.training.execute_gradient()
        for parameter, found in zip(network.parameters, network.gradients(), strict=True):
            memory.append((parameter.numpy() - 0.01 * np.sign(found)).astype(np.float32))
            parameter.bind_and_write_data(memory[-1], CPU)
        gradients = torch.autograd.grad(F.mse_loss(predict(parameters, x), torch.tensor(y)), parameters)
        moved = [p - 0.01 * g.sign() for p, g in zip(parameters, gradients, strict=True)]
        parameters = [p.detach().requires_grad_() for p in moved]
    assert_close(network.parameters, parameters)
    network.bind()
    expected = F.mse_loss(predict(parameters), torch.tensor(Y)).item()
    assert network.training.execute_forward().loss == pytest.approx(expected, rel=1e-5)


def test_f_foreign_loss() -> None:
    network = Network(None, sgd()).compiled()
    parameters = leaves(network.parameters)
    for x, y in batches(2):  # the loss Σ log cosh(out - y) and its gradient tanh(out - y) are NumPy's
        network.bind(x, None)
        out = network.training.execute_forward().result.numpy()
        given = network.training.allocate_user_gradient(network.out)
        network.training.bind_and_write_data({"g": np.tanh(out - y)}, {"g": given}, CPU)
        network.training.execute_gradient()
        loss = torch.log(torch.cosh(predict(parameters, x) - torch.tensor(y))).sum()
        assert_close(network.gradients(), torch.autograd.grad(loss, parameters, retain_graph=True), 1e-5)
        network.training.execute_optimizer_update()
        parameters = [p.detach().requires_grad_() for p in descended(loss, parameters)]
        assert_close(network.parameters, parameters, 1e-5)


def test_g_late_optimizer() -> None:
    network = Network(mse()).compiled()
    before = leaves(network.parameters)
    network.training.execute({"x": X}, {"y": Y})
    assert_close(network.parameters, before, tolerance=0)
    network.training.compile_optimizer(sg.AdamOptimizer(learning_rate=0.01, epsilon=1e-12))
    twin = torch.optim.Adam(before, lr=0.01, eps=1e-12)  # with so small an ε both forms of Adam agree
    for x, y in batches(3):
        twin.zero_grad()
        F.mse_loss(predict(before, x), torch.tensor(y)).backward()
        twin.step()
        network.training.execute({"x": x}, {"y": y})
        assert_close(network.parameters, before, 1e-5)


class Regularized:
    """A network with normalization and dropout."""

    def __init__(self, optimizer: sg.Optimizer, dropout: float) -> None:
        self.x, self.y, graph = sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 2)), sg.Graph()
        self.first, self.second = dense(3, 5, 10), dense(5, 2, 20)
        self.normalization = sg.BatchNormalizationLayer.create(5, momentum=0.8)
        hidden = graph.node(self.normalization, graph.node(self.first, self.x))
        graph.node(self.second, graph.node(sg.DropoutLayer(dropout), hidden) if dropout else hidden)
        self.training = sg.TrainingGraph([graph], mse(), optimizer)
        self.training.add_inputs({"x": self.x}, {"y": self.y})
        layers = [self.first, self.normalization, self.second]
        self.parameters = [t for layer in layers for t in layer.parameters.values()]
        self.tensors = [*self.parameters, *self.normalization.statistics.values()]


def evaluated(network: Regularized) -> float:
    """The loss on (X, Y) with running statistics and without dropout, by PyTorch."""
    normalization = network.normalization
    names = ("mean", "variance", "gamma", "beta")
    mean, variance, gamma, beta = (torch.tensor(getattr(normalization, name).numpy()) for name in names)
    hidden = F.linear(torch.tensor(X), *leaves([network.first.weights, network.first.biases]))
    hidden = F.batch_norm(hidden, mean, variance, gamma, beta, eps=normalization.variance_epsilon)
    out = F.linear(hidden, *leaves([network.second.weights, network.second.biases]))
    return F.mse_loss(out, torch.tensor(Y)).item()


def test_h_evaluation_in_a_training_graph() -> None:
    plain, watched = (Regularized(sg.AdamOptimizer(learning_rate=0.02), dropout=0.5) for _ in range(2))
    for network in (plain, watched):
        sg.set_seed(3)  # both draw the same masks
        network.training.compile(CPU)
    for x, y in batches(3):
        found = watched.training.execute({"x": X}, {"y": Y}, options=Run.FORWARD_FOR_INFERENCE).loss
        assert found == pytest.approx(evaluated(watched), rel=1e-5)
        watched.training.bind_and_write_data({"x": X, "y": Y}, {"x": watched.x, "y": watched.y}, CPU)
        assert watched.training.execute_forward(options=Run.FORWARD_FOR_INFERENCE).loss == found
        losses = [one.training.execute({"x": x}, {"y": y}).loss for one in (plain, watched)]
        assert losses[0] == losses[1]  # evaluating leaves no trace in the training
    assert_close(watched.tensors, [tensor.numpy() for tensor in plain.tensors], tolerance=0)


def test_i_trainable_input() -> None:
    image, target, graph, layer = sg.Tensor((1, 3), data=X[:1].copy()), sg.Tensor((1, 2)), sg.Graph(), dense(3, 2, 10)
    graph.node(sg.ActivationLayer.tanh(), graph.node(layer, image, disable_update=True))
    training = sg.TrainingGraph([graph], mse(), sgd(momentum_scale=0.9))
    training.add_inputs({"image": image}, {"target": target})
    training.set_training_tensor_parameters([sg.TensorParameter(image)])
    training.compile(CPU)
    pixels, (weights, biases) = torch.tensor(X[:1], requires_grad=True), leaves([layer.weights, layer.biases])
    twin = torch.optim.SGD([pixels], lr=RATE, momentum=0.9)
    for _ in range(4):
        loss = F.mse_loss(torch.tanh(F.linear(pixels, weights, biases)), torch.tensor(Y[:1]))
        twin.zero_grad()
        loss.backward()
        twin.step()
        assert training.execute({}, {"target": Y[:1]}).loss == pytest.approx(loss.item(), rel=1e-5)
    training.synchronize_updates()
    assert_close([image.data], [pixels])
    assert_close([layer.weights, layer.biases], [weights, biases], tolerance=0)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda **settings: sg.AdamOptimizer(learning_rate=0.02, **settings),
        lambda **settings: sg.AdamOptimizer(learning_rate=0.02, uses_ams_grad=True, **settings),
        lambda **settings: sgd(momentum_scale=0.9),
    ],
    ids=["Adam", "AMSGrad", "SGD with momentum"],
)
def test_j_resume(optimizer: Any) -> None:
    data = list(batches(10))
    whole, first = (Regularized(optimizer(), dropout=0) for _ in range(2))
    whole.training.compile(CPU)
    expected = [whole.training.execute({"x": x}, {"y": y}).loss for x, y in data]
    first.training.compile(CPU)
    found = [first.training.execute({"x": x}, {"y": y}).loss for x, y in data[:5]]
    values = [tensor.numpy().tobytes() for tensor in first.tensors]
    states = [[bytes(one.bytes) for one in parameter.optimizer_data] for parameter in first.parameters]
    step = first.training.optimizer.time_step
    assert step == 6 and all(states)
    second = Regularized(optimizer(time_step=step), dropout=0)
    for tensor, value in zip(second.tensors, values, strict=True):
        tensor.bind_and_write_data(np.frombuffer(value, np.float32).copy(), CPU)
    for parameter, state in zip(second.parameters, states, strict=True):
        second.training.bind_optimizer_data([np.frombuffer(one, np.float32).copy() for one in state], parameter)
    second.training.compile(CPU)
    found += [second.training.execute({"x": x}, {"y": y}).loss for x, y in data[5:]]
    assert found == expected
    assert_close(second.tensors, [tensor.numpy() for tensor in whole.tensors], tolerance=0)


ORDER = [3, 0, 4, 1, 2]


def test_k_linked_sub_graphs_with_numpy_between() -> None:
    x, z, y, before, after = sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 5)), sg.Tensor((BATCH, 2)), sg.Graph(), sg.Graph()
    first, second = dense(3, 5, 10), dense(5, 2, 20)
    middle = before.node(first, x)
    after.node(second, z)
    one, two = sg.TrainingGraph([before], None, sgd()), sg.TrainingGraph([after], mse(), sgd())
    one.add_inputs({"x": x})
    two.add_inputs({"z": z}, {"y": y})
    given = one.allocate_user_gradient(middle)
    for graph in (one, two):
        graph.compile(CPU, LINKED)
    one.link([two])
    tensors = [first.weights, first.biases, second.weights, second.biases]
    parameters = leaves(tensors)
    for inputs, labels in batches(2):
        one.bind_and_write_data({"x": inputs}, {"x": x}, CPU)
        squashed = np.tanh(one.execute_forward().result.numpy()[:, ORDER])
        two.bind_and_write_data({"z": squashed, "y": labels}, {"z": z, "y": y}, CPU)
        loss = two.execute_forward().loss
        two.execute_gradient()
        inner = two.gradient_tensor(z).numpy() * (1 - squashed**2)
        one.bind_and_write_data({"g": inner[:, np.argsort(ORDER)]}, {"g": given}, CPU)
        one.execute_gradient()
        fused = torch.tanh(F.linear(torch.tensor(inputs), *parameters[:2])[:, ORDER])
        expected = F.mse_loss(F.linear(fused, *parameters[2:]), torch.tensor(labels))
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        found = [one.gradient_data(t, first) for t in tensors[:2]] + [two.gradient_data(t, second) for t in tensors[2:]]
        assert_close(found, torch.autograd.grad(expected, parameters, retain_graph=True), 1e-5)
        for graph in (one, two):
            graph.execute_optimizer_update()
        parameters = [p.detach().requires_grad_() for p in descended(expected, parameters)]
        assert_close(tensors, parameters, 1e-5)


def test_k_linked_sub_graphs_hand_over_a_result_and_share_a_weight() -> None:
    x, y, before, after, shared = sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 3)), sg.Graph(), sg.Graph(), dense(3, 3, 10)
    twin = sg.FullyConnectedLayer(shared.weights, None, shared.descriptor)
    middle = before.node(sg.ActivationLayer.tanh(), before.node(shared, x))
    after.node(twin, middle)
    one, two = sg.TrainingGraph([before], None, sgd()), sg.TrainingGraph([after], mse(), sgd())
    one.add_inputs({"x": x})
    two.add_inputs({"middle": middle}, {"y": y})
    for graph in (one, two):
        graph.compile(CPU, Compile.LINK_GRAPHS)
    one.link([two])
    parameters = leaves([shared.weights, shared.biases])
    for rows in (BATCH, BATCH, 2):
        inputs, labels = numbers(rows, 3, seed=30 + rows), numbers(rows, 3, seed=40 + rows)
        one.bind_and_write_data({"x": inputs}, {"x": x}, CPU, batch_size=rows)
        two.bind_and_write_data({"y": labels}, {"y": y}, CPU, batch_size=rows)
        one.execute_forward(rows)
        found = two.execute_forward(rows).loss
        for graph in (two, one):
            graph.execute_gradient(rows)
        hidden = torch.tanh(F.linear(torch.tensor(inputs), *parameters))
        loss = F.mse_loss(F.linear(hidden, parameters[0]), torch.tensor(labels))
        assert found == pytest.approx(loss.item(), rel=1e-5)
        for graph in (one, two):
            graph.execute_optimizer_update()
        parameters = [p.detach().requires_grad_() for p in descended(loss, parameters)]
        assert_close([shared.weights, shared.biases], parameters, 1e-5)


@pytest.mark.parametrize("by_node", [True, False], ids=["disable_update", "is_updatable"])
def test_l_frozen_layers(by_node: bool) -> None:
    x, y, graph, first, second = (
        sg.Tensor((BATCH, 3)),
        sg.Tensor((BATCH, 2)),
        sg.Graph(),
        dense(3, 5, 10),
        dense(5, 2, 20),
    )
    graph.node(second, graph.node(first, x), disable_update=by_node)
    second.weights_parameter.is_updatable = second.biases_parameter.is_updatable = by_node
    training = sg.TrainingGraph([graph], mse(), sgd())
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    own, frozen = leaves([first.weights, first.biases]), leaves([second.weights, second.biases])
    for inputs, labels in batches(2):
        loss = F.mse_loss(F.linear(F.linear(torch.tensor(inputs), *own), *frozen), torch.tensor(labels))
        training.execute({"x": inputs}, {"y": labels})
        own = [p.detach().requires_grad_() for p in descended(loss, own)]
    assert_close([first.weights, first.biases], own, 1e-5)
    assert_close([second.weights, second.biases], frozen, tolerance=0)
    if not by_node:  # may thaw at any time
        second.weights_parameter.is_updatable = True
        loss = F.mse_loss(F.linear(F.linear(torch.tensor(X), *own), *frozen), torch.tensor(Y))
        training.execute({"x": X}, {"y": Y})
        assert_close([second.weights], descended(loss, frozen)[:1], 1e-5)
        assert_close([second.biases], frozen[1:], tolerance=0)


class Lookup(sg.Layer):
    """Rows of a table, by number."""

    table: sg.Tensor

    def check(self, *sources: sg.TensorDescriptor) -> None:
        assert not sources[0].data_type.is_floating

    def forward(self, words: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return F.embedding(words, scope.array(self.table))


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_m_embedding_on_the_cpu_before_a_model_elsewhere(device: str) -> None:
    elsewhere = sg.Device.gpu() if device == "gpu" else CPU
    words, z, y = sg.Tensor((BATCH,), "int64"), sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 2))
    lookup, layer = Lookup(sg.Tensor((6, 3), data=numbers(6, 3, seed=5))), dense(3, 2, 10)
    before, after = sg.Graph(), sg.Graph()
    found, _ = before.node(lookup, words), after.node(layer, z)
    one, two = sg.TrainingGraph([before], None, sgd()), sg.TrainingGraph([after], mse(), sgd())
    two.add_inputs({"z": z}, {"y": y})
    one.compile(CPU)
    two.compile(elsewhere, Compile.COMPUTE_ALL_GRADIENTS)
    tensors, text = [lookup.table, layer.weights, layer.biases], np.array([2, 5, 2, 0])
    parameters, given = leaves(tensors), one.allocate_user_gradient(found)
    for _ in range(3):
        one.bind_and_write_data({"words": text}, {"words": words}, CPU)
        rows = one.execute_forward().result.numpy()
        two.bind_and_write_data({"z": rows, "y": Y}, {"z": z, "y": y}, elsewhere)
        two.execute_forward()
        two.execute_gradient()
        two.execute_optimizer_update()
        one.bind_and_write_data({"g": two.gradient_tensor(z).numpy()}, {"g": given}, CPU)
        one.execute_gradient()
        one.execute_optimizer_update()
        picked = F.embedding(torch.tensor(text), parameters[0])
        loss = F.mse_loss(F.linear(picked, *parameters[1:]), torch.tensor(Y))
        parameters = [p.detach().requires_grad_() for p in descended(loss, parameters)]
        assert_close(tensors, parameters, 1e-5)


@pytest.mark.parametrize("own_data", [True, False], ids=["data of the tensor", "data given to compile"])
@pytest.mark.parametrize("kind", [sg.TrainingGraph, sg.InferenceGraph])
def test_n_constants(kind: Any, own_data: bool) -> None:
    x, scale, graph, factors = sg.Tensor((BATCH, 3)), sg.Tensor((1, 3)), sg.Graph(), numbers(1, 3, seed=5)
    graph.node(sg.ArithmeticLayer.multiply(), x, scale)
    made, taken = kind([graph]), factors.copy()
    made.add_inputs({"x": x, "scale": scale})
    if own_data:
        scale.bind_and_write_data(taken, CPU)
    made.compile(CPU, input_tensors={"scale": scale}, input_tensors_data=None if own_data else {"scale": taken})
    taken[:] = 0  # the data was taken by compile
    for inputs, _ in batches(2):
        assert_close([made.execute({"x": inputs}).result], [inputs * factors])
    assert_close([made.execute({"x": X}, batch_size=2).result], [X[:2] * factors])


def test_k_linked_graphs_that_exchange_gradients_refuse_a_whole_step() -> None:
    x, y = sg.Tensor((2, 3)), sg.Tensor((2, 1))
    first, second = sg.Graph(), sg.Graph()
    between = first.node(sg.FullyConnectedLayer.create(3, 4), x)
    second.node(sg.FullyConnectedLayer.create(4, 1), between)
    one = sg.TrainingGraph([first], None, sg.SGDOptimizer(learning_rate=0.1))
    two = sg.TrainingGraph([second], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    two.add_inputs({"between": between}, {"y": y})
    for graph in (one, two):
        graph.compile(sg.Device.cpu(), sg.GraphCompilationOptions.LINK_GRAPHS)
    one.link([two])
    data = {"between": np.zeros((2, 4), np.float32)}, {"y": np.zeros((2, 1), np.float32)}
    with pytest.raises(sg.StateError, match="execute_gradient"):
        two.execute(*data)
    assert two.execute(*data, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE).loss >= 0
