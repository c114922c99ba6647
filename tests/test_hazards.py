"""Memory that is shared, strided, frozen or named alike must not change what is learned."""

import numpy as np
import pytest
import torch

import stepgraph as sg

RNG = np.random.default_rng(3)
CPU = sg.Device.cpu()


def linear(weights: np.ndarray, optimizer: sg.Optimizer) -> tuple[sg.TrainingGraph, sg.FullyConnectedLayer, sg.Tensor]:
    x, y = sg.Tensor((4, 3)), sg.Tensor((4, 2))
    tensor = sg.Tensor((2, 3), data=weights)
    layer = sg.FullyConnectedLayer(tensor, None, sg.ConvolutionDescriptor(1, 3, 2))
    graph = sg.Graph()
    graph.node(layer, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), optimizer)
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    return training, layer, x


X, Y = RNG.standard_normal((4, 3)).astype(np.float32), RNG.standard_normal((4, 2)).astype(np.float32)
W = RNG.standard_normal((3, 2)).astype(np.float32)


@pytest.mark.parametrize("make", [lambda: sg.SGDOptimizer(0.1), lambda: sg.AdamOptimizer(0.1)])
def test_strided_parameters_train_like_contiguous_ones(make: object) -> None:
    strided, _, _ = linear(W.T, make())
    plain, _, _ = linear(np.ascontiguousarray(W.T), make())
    bound, layer, _ = linear(np.zeros((2, 3), np.float32), make())
    layer.weights.bind_and_write_data(W.T, CPU)
    for _ in range(20):
        losses = [training.execute({"x": X}, {"y": Y}).loss for training in (plain, strided, bound)]
        assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("options", [sg.GraphCompilationOptions.NONE, sg.GraphCompilationOptions.DETERMINISTIC])
def test_transposed_images_train_like_contiguous_ones(options: sg.GraphCompilationOptions) -> None:
    images = RNG.standard_normal((4, 6, 6, 2)).astype(np.float32).transpose(0, 3, 1, 2)
    labels = np.arange(4) % 3

    def network() -> sg.TrainingGraph:
        sg.set_seed(1)
        x, y = sg.Tensor.image(6, 6, 2, 4), sg.Tensor((4,), "int64")
        graph = sg.Graph()
        hidden = graph.reshape((4, -1), graph.node(sg.ConvolutionLayer.create(2, 4, 3), x))
        graph.node(sg.FullyConnectedLayer.create(144, 3), hidden)
        training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(0.01))
        training.add_inputs({"x": x}, {"y": y})
        training.compile(CPU, options)
        return training

    one, other = network(), network()
    for _ in range(10):
        plain = other.execute({"x": np.ascontiguousarray(images)}, {"y": labels}).loss
        assert one.execute({"x": images}, {"y": labels}).loss == plain


class Plus(sg.Layer):
    """`x + bias`, with a bias of the source's shape: its gradient is the incoming gradient itself."""

    bias: sg.Tensor

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x + scope.array(self.bias)


def sums() -> tuple[sg.TrainingGraph, list[Plus], sg.Tensor, sg.Tensor]:
    x = sg.Tensor((2, 3))
    layers = [Plus(sg.Tensor((2, 3), fill=0.0, label="bias ²")) for _ in range(2)]  # two tensors with one label
    graph = sg.Graph()
    result = graph.node(layers[1], graph.node(layers[0], x))
    training = sg.TrainingGraph([graph], None, sg.SGDOptimizer(0.5))
    training.add_inputs({"x": x})
    training.compile(CPU)
    return training, layers, x, result


def test_gradients_that_are_the_users_array_update_and_accumulate() -> None:
    training, layers, x, result = sums()
    given = RNG.standard_normal((2, 3)).astype(np.float32)
    training.allocate_user_gradient(result).bind_and_write_data(given.copy(), CPU)
    training.bind_and_write_data({"x": np.zeros((2, 3), np.float32)}, {"x": x}, CPU)
    for count in (1, 2, 3):
        training.execute_forward()
        training.execute_gradient(options=sg.ExecutionOptions.ACCUMULATE_GRADIENTS)
        for layer in layers:
            np.testing.assert_allclose(training.gradient_data(layer.bias, layer), count * given, rtol=1e-6)
    training.execute_optimizer_update()
    for layer in layers:
        np.testing.assert_allclose(layer.bias.numpy(), -0.5 * 3 * given, rtol=1e-6)


def test_an_expanded_gradient_accumulates() -> None:
    x, y = sg.Tensor((2, 3)), sg.Tensor((2, 3))
    layer = Plus(sg.Tensor((2, 3), fill=1.0))
    graph = sg.Graph()
    graph.node(sg.ReductionLayer.sum((0, 1)), graph.node(layer, x))
    training = sg.TrainingGraph([graph], None, sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x})
    training.compile(CPU)
    training.bind_and_write_data({"x": np.zeros(y.shape, np.float32)}, {"x": x}, CPU)
    for count in (1, 2):
        training.execute_forward()
        training.execute_gradient(options=sg.ExecutionOptions.ACCUMULATE_GRADIENTS)
        np.testing.assert_array_equal(training.gradient_data(layer.bias, layer), np.full((2, 3), count, np.float32))


def test_a_thawed_parameter_finds_its_state() -> None:
    training, layer, _ = linear(np.ascontiguousarray(W.T), sg.AdamOptimizer(0.1))
    for _ in range(3):
        training.execute({"x": X}, {"y": Y})
    velocity = bytes(layer.weights.optimizer_data[1].bytes)
    layer.weights_parameter.is_updatable = False
    training.execute({"x": X}, {"y": Y})
    layer.weights_parameter.is_updatable = True
    training.add_outputs({})
    assert bytes(layer.weights.optimizer_data[1].bytes) == velocity
    before = layer.weights.numpy().copy()
    training.execute({"x": X}, {"y": Y})
    assert np.abs(layer.weights.numpy() - before).max() < 0.11  # a fresh Adam would not know its step size


def test_a_refused_optimizer_leaves_the_old_one_at_work() -> None:
    training, layer, _ = linear(np.ascontiguousarray(W.T), sg.SGDOptimizer(0.1))
    twin, _, _ = linear(np.ascontiguousarray(W.T), sg.SGDOptimizer(0.1))
    layer.weights.bind_optimizer_data([np.zeros((2, 3), np.float32)])
    with pytest.raises(sg.DataError, match="optimizer buffers"):
        training.compile_optimizer(sg.AdamOptimizer(0.1))
    layer.weights.bind_optimizer_data([])
    for _ in range(3):
        assert training.execute({"x": X}, {"y": Y}).loss == twin.execute({"x": X}, {"y": Y}).loss


def test_used_gradients_stay_used_when_a_user_gradient_is_allocated() -> None:
    training, layer, x = linear(np.ascontiguousarray(W.T), sg.SGDOptimizer(0.0))
    y = training.nodes[0].results[0]
    training.bind_and_write_data({"x": X}, {"x": x}, CPU)
    label = next(tensor for tensor in training.declaration.feeds.tensors if tensor is not x)
    training.bind_and_write_data({"y": Y}, {"y": label}, CPU)

    def gradient() -> np.ndarray:
        training.execute_forward()
        training.execute_gradient(options=sg.ExecutionOptions.ACCUMULATE_GRADIENTS)
        return training.gradient_data(layer.weights, layer).copy()

    first = gradient()
    training.execute_optimizer_update()
    training.allocate_user_gradient(y)
    np.testing.assert_allclose(gradient(), first, rtol=1e-6)


class RunningScale(sg.Layer):
    """`x / s`, where the running scale `s` changes in every step: the gradient needs the old one."""

    s: sg.Tensor = sg.statistic()

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        scale = scope.array(self.s)
        scope.update(self.s, 0.5 * scale + 0.5 * x.detach().abs().mean())
        return x / scale


def test_the_gradient_uses_the_statistic_of_its_own_forward_pass() -> None:
    x = sg.Tensor((2, 2))
    layer = RunningScale(sg.Tensor((1,), fill=4.0))
    graph = sg.Graph()
    graph.node(layer, x)
    training = sg.TrainingGraph([graph])
    training.add_inputs({"x": x})
    training.compile(CPU, sg.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS)
    result = training.nodes[0].results[0]
    training.allocate_user_gradient(result).bind_and_write_data(np.ones((2, 2), np.float32), CPU)
    training.bind_and_write_data({"x": np.ones((2, 2), np.float32)}, {"x": x}, CPU)
    training.execute_forward()
    training.execute_gradient()
    np.testing.assert_allclose(training.gradient_tensor(x).numpy(), 0.25)
    np.testing.assert_allclose(layer.s.numpy(), 2.5)


class Silent(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        raise ValueError


class Forgetful(sg.Layer):
    def __init__(self) -> None:
        self.w = sg.Tensor((3,), fill=1.0)

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * scope.array(self.w)


@pytest.mark.parametrize(("layer", "words"), [(Silent, "ValueError"), (Forgetful, "field")])
def test_mistakes_in_own_layers_are_named(layer: type[sg.Layer], words: str) -> None:
    with pytest.raises(sg.StepgraphError, match=words):
        sg.Graph().node(layer(), sg.Tensor((2, 3)))


def test_a_condition_may_go_from_one_linked_graph_to_another() -> None:
    """It has no gradient, which the second graph must not ask for."""
    x, y, first, second = sg.Tensor((4, 3)), sg.Tensor((4, 3)), sg.Graph(), sg.Graph()
    layer = sg.FullyConnectedLayer.create(3, 3)
    hidden = first.node(layer, x)
    positive = first.node(sg.ComparisonLayer.greater(), hidden, x)
    second.select([hidden, x], positive)
    optimizer = sg.SGDOptimizer(learning_rate=0.1)
    graphs = [
        sg.TrainingGraph([first], None, optimizer),
        sg.TrainingGraph([second], sg.LossLayer.mean_squared_error(), optimizer),
    ]
    graphs[1].add_inputs({"hidden": hidden, "x": x, "positive": positive}, {"y": y})
    for graph in graphs:
        graph.compile(sg.Device.cpu(), sg.GraphCompilationOptions.LINK_GRAPHS)
    graphs[0].link(graphs[1:])
    before = layer.weights.data.copy()
    data = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
    device = sg.Device.cpu()
    graphs[0].bind_and_write_data({"x": data[0]}, {"x": x}, device)
    graphs[1].bind_and_write_data({"y": data[1]}, {"y": y}, device)
    for graph in graphs:
        graph.execute_forward()
    for graph in reversed(graphs):
        graph.execute_gradient()
    graphs[0].execute_optimizer_update()
    assert not np.array_equal(layer.weights.data, before)
