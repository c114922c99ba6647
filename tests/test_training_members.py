"""The members of `TrainingGraph` that prepare it, against plain PyTorch.

Those that inspect it are in `test_training_inspection.py`, executing and its options in `test_training_options.py`.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph as sg

CPU = sg.Device.cpu()
Compile, Run = sg.GraphCompilationOptions, sg.ExecutionOptions
BATCH, RATE = 4, 0.1
mse = sg.LossLayer.mean_squared_error


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, Y = numbers(BATCH, 3, seed=1), numbers(BATCH, 2, seed=2)


def sgd(**settings: Any) -> sg.SGDOptimizer:
    return sg.SGDOptimizer(learning_rate=RATE, **settings)


def dense(inputs: int, outputs: int, seed: int, label: str = "") -> sg.FullyConnectedLayer:
    """A fully connected layer with numbers that are the same in every test."""
    weights, biases = numbers(outputs, inputs, seed=seed), numbers(outputs, seed=seed + 1)
    tensors = sg.Tensor((outputs, inputs), data=weights), sg.Tensor((outputs,), data=biases)
    return sg.FullyConnectedLayer(*tensors, sg.ConvolutionDescriptor(1, inputs, outputs), label=label)


class Network:
    """`tanh(x Aᵀ + a) Bᵀ + b`, perhaps with a loss and an optimizer."""

    def __init__(self, loss: sg.Layer | None = None, optimizer: sg.Optimizer | None = None) -> None:
        self.x, self.y = sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 2))
        self.first, self.second = dense(3, 5, 10, "first"), dense(5, 2, 20, "second")
        self.tanh = sg.ActivationLayer.tanh(label="tanh")
        graph = self.graph = sg.Graph()
        self.hidden = graph.node(self.first, self.x)
        self.active = graph.node(self.tanh, self.hidden)
        self.out = graph.node(self.second, self.active)
        self.training = sg.TrainingGraph([graph], loss, optimizer)
        self.training.add_inputs({"x": self.x}, {"y": self.y} if loss else None)

    def compiled(self, options: Compile = Compile.NONE) -> "Network":
        self.training.compile(CPU, options)
        return self

    @property
    def parameters(self) -> list[sg.Tensor]:
        return [self.first.weights, self.first.biases, self.second.weights, self.second.biases]

    def bind(self, x: np.ndarray = X, y: np.ndarray | None = Y, **settings: Any) -> None:
        data, tensors = {"x": x} | ({} if y is None else {"y": y}), {"x": self.x, "y": self.y}
        self.training.bind_and_write_data(data, tensors, CPU, **settings)

    def gradients(self) -> list[np.ndarray | None]:
        layers = [self.first, self.first, self.second, self.second]
        return [self.training.gradient_data(p, layer) for p, layer in zip(self.parameters, layers, strict=True)]


def leaves(tensors: list[sg.Tensor]) -> list[torch.Tensor]:
    """Copies of the current values, to differentiate by."""
    return [torch.tensor(tensor.numpy()).requires_grad_() for tensor in tensors]


def predict(parameters: list[torch.Tensor], x: np.ndarray = X) -> torch.Tensor:
    a, b, c, d = parameters
    return F.linear(torch.tanh(F.linear(torch.tensor(x), a, b)), c, d)


def descended(loss: torch.Tensor, parameters: list[torch.Tensor], rate: float = RATE) -> list[torch.Tensor]:
    """The parameters after one step of plain gradient descent."""
    return [p - rate * g for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True)]


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    """Both are lists of arrays; neither may be empty. Without a tolerance they must be equal."""
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        expected = torch.as_tensor(other).detach().numpy()
        np.testing.assert_allclose(np.asarray(mine), expected, rtol=1e-5 if tolerance else 0, atol=tolerance)


# Creation


@pytest.mark.parametrize("device", [CPU, sg.Device.any()], ids=["cpu", "any"])
def test_parameters_without_data_are_filled_before_there_is_a_graph(device: sg.Device) -> None:
    arrays = numbers(2, 3, seed=3), numbers(2, seed=4)
    weights, biases, x, y = sg.Tensor((2, 3)), sg.Tensor((2,)), sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 2))
    weights.bind_and_write_data(arrays[0].copy(), device)
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer(weights, biases, sg.ConvolutionDescriptor(1, 3, 2)), x)
    training = sg.TrainingGraph([graph], mse(), sgd())
    training.add_inputs({"x": x}, {"y": y})
    with pytest.raises(sg.DataError, match="bind_and_write_data"):
        training.compile(device)
    with pytest.raises(sg.DataError, match="4 bytes for 8 bytes"):
        biases.bind_and_write_data(arrays[1][:1], device)
    assert not biases.has_data and biases.device is None
    biases.bind_and_write_data(arrays[1].copy(), device)
    training.compile(device)
    expected = [torch.tensor(array).requires_grad_() for array in arrays]
    loss = F.mse_loss(F.linear(torch.tensor(X), *expected), torch.tensor(Y))
    assert training.execute({"x": X}, {"y": Y}).loss == pytest.approx(loss.item(), rel=1e-6)
    training.synchronize_updates()
    assert_close([weights, biases], descended(loss, expected))


def test_creation_adopts_layers_and_tensors_and_trains_like_pytorch() -> None:
    optimizer, distance = sgd(), mse()
    network = Network(distance, optimizer)
    training = network.training
    assert training.layers == [network.first, network.tanh, network.second, distance]
    assert training.result_tensors(network.tanh) == [network.active]
    assert training.source_tensors(network.tanh) == [network.hidden]
    assert training.optimizer is optimizer and training.device is None
    network.compiled()
    expected = leaves(network.parameters)
    loss = F.mse_loss(predict(expected), torch.tensor(Y))
    assert training.execute({"x": X}, {"y": Y}).loss == pytest.approx(loss.item(), rel=1e-6)
    assert_close(network.parameters, descended(loss, expected))


def test_creation_without_arguments_gives_an_empty_graph_that_cannot_be_compiled() -> None:
    training = sg.TrainingGraph()
    assert (training.layers, training.optimizer, training.device) == ([], None, None)
    with pytest.raises(sg.StateError, match="no layers"):
        training.compile(CPU)


def test_creation_from_several_graphs_with_nodes_added_directly_equals_one_graph() -> None:
    whole = Network(mse(), sgd()).compiled()
    x, y, before, after = sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 2)), sg.Graph(), sg.Graph()
    first, second = dense(3, 5, 10), dense(5, 2, 20)
    active = after.node(sg.ActivationLayer.tanh(), before.node(first, x))
    training = sg.TrainingGraph([before, after], mse(), sgd())
    training.node(second, active)
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    for _ in range(3):
        assert training.execute({"x": X}, {"y": Y}).loss == whole.training.execute({"x": X}, {"y": Y}).loss
    assert len(training.layers) == 4 and after.layers == training.layers[1:2]
    assert np.array_equal(second.weights.numpy(), whole.second.weights.numpy())


def test_creation_with_a_loss_node_in_the_graph_equals_a_loss_layer() -> None:
    given, inside = Network(mse(), sgd()).compiled(), Network(None, sgd())
    inside.graph.node(mse(), inside.out, loss_labels=inside.y)
    inside.training.add_inputs({}, {"y": inside.y})
    inside.compiled()
    for _ in range(3):
        execution = inside.training.execute({"x": X}, {"y": Y})
        assert execution.loss == given.training.execute({"x": X}, {"y": Y}).loss
    assert_close(inside.parameters, [p.numpy() for p in given.parameters], tolerance=0)


def test_creation_with_several_losses_descends_on_their_sum() -> None:
    network, target = Network(None, sgd()), sg.Tensor((BATCH, 5))
    network.graph.node(sg.LossLayer.huber(weight=0.5), network.active, loss_labels=[target])
    network.graph.node(mse(), network.out, loss_labels=[network.y])
    network.training.add_inputs({}, {"y": network.y, "target": target})
    network.compiled()
    expected, wanted = leaves(network.parameters), numbers(BATCH, 5, seed=3)
    active = torch.tanh(F.linear(torch.tensor(X), *expected[:2]))
    last = F.mse_loss(F.linear(active, *expected[2:]), torch.tensor(Y))
    total = last + 0.5 * F.huber_loss(active, torch.tensor(wanted))
    execution = network.training.execute({"x": X}, {"y": Y, "target": wanted})
    assert execution.loss == pytest.approx(total.item(), rel=1e-6)
    assert execution.losses["Loss2"] == pytest.approx(last.item(), rel=1e-6)
    assert_close(network.parameters, descended(total, expected))


def test_creation_keeps_what_was_compiled_when_the_graph_grows_and_takes_it_at_the_next_compile() -> None:
    network = Network().compiled()
    before = network.training.execute({"x": X}).result.numpy().copy()
    network.graph.node(sg.ActivationLayer.relu(), network.out)
    for rows in (BATCH, 2):
        assert_close([network.training.execute({"x": X}, batch_size=rows).result.numpy()], [before[:rows]])
    network.compiled()
    assert_close([network.training.execute({"x": X}).result.numpy()], [np.maximum(before, 0)])


# add_inputs, add_outputs


@pytest.mark.parametrize(
    ("on_layer", "as_weights"),
    [(False, True), (True, False), (True, True)],
    ids=["label weights", "input held by the loss layer", "label weights held by the loss layer"],
)
def test_add_inputs_takes_label_weights_however_a_program_declares_them(on_layer: bool, as_weights: bool) -> None:
    weights, values = sg.Tensor((BATCH, 1)), np.array([0.5, 2.0, 0.0, 1.0], np.float32)
    network = Network(mse(weights=weights if on_layer else None), sgd())
    if as_weights:
        network.training.add_inputs({}, loss_label_weights={"w": weights})
    else:
        network.training.add_inputs({"w": weights})
    network.compiled()
    expected = leaves(network.parameters)
    squares = (predict(expected) - torch.tensor(Y)) ** 2
    loss = (torch.tensor(values)[:, None] * squares).mean()
    given = ({"x": X}, {"y": Y}, {"w": values}) if as_weights else ({"x": X, "w": values}, {"y": Y})
    assert network.training.execute(*given).loss == pytest.approx(loss.item(), rel=1e-6)
    assert_close(network.parameters, descended(loss, expected))


def test_add_inputs_calls_accumulate_and_refuse_a_name_for_two_tensors() -> None:
    graph, a, b = sg.Graph(), sg.Tensor((2, 3)), sg.Tensor((2, 3))
    graph.node(sg.ArithmeticLayer.subtract(), a, b)
    training = sg.TrainingGraph([graph])
    training.add_inputs({"a": a})
    training.add_inputs({"b": b})
    with pytest.raises(sg.StateError, match="'a' already refers to"):
        training.add_inputs({"a": b})
    training.compile(CPU)
    data = {"a": np.full((2, 3), 5, "f"), "b": np.full((2, 3), 2, "f")}
    assert training.execute(data).result.numpy().tolist() == [[3] * 3] * 2


def test_add_inputs_is_optional_and_possible_after_compile() -> None:
    x, graph = sg.Tensor((2, 2), label="image"), sg.Graph()
    graph.node(sg.ActivationLayer.relu(), x)
    training = sg.TrainingGraph([graph])
    training.compile(CPU)
    data = np.array([[-1, 2], [3, -4]], np.float32)
    assert training.execute({"image": data}).result.numpy().tolist() == [[0, 2], [3, 0]]
    training.add_inputs({"other name": x})
    assert training.execute({"other name": -data}).result.numpy().tolist() == [[1, 0], [0, 4]]


def test_add_inputs_of_a_tensor_that_no_layer_reads_is_refused_by_compile() -> None:
    network = Network()
    network.training.add_inputs({"stranger": sg.Tensor((4, 1))})
    with pytest.raises(sg.UnknownNameError, match="stranger"):
        network.compiled()


def test_add_outputs_of_results_are_written_to_the_caller_and_stay_readable() -> None:
    network = Network(mse(), sgd())
    network.training.add_outputs({"active": network.active})
    network.compiled()
    network.training.add_outputs({"out": network.out})
    expected = leaves(network.parameters)
    active = torch.tanh(F.linear(torch.tensor(X), *expected[:2]))
    written = {"active": np.zeros((BATCH, 5), "f"), "out": np.zeros(BATCH * 2 + 3, "f")}
    network.training.execute({"x": X}, {"y": Y}, outputs_data=written)
    assert_close([written["active"], network.active.numpy()], [active, active])
    assert_close([written["out"][:8].reshape(BATCH, 2)], [predict(expected)])
    assert not written["out"][8:].any()


@pytest.mark.parametrize("whole", [True, False], ids=["execute", "execute_gradient"])
def test_add_outputs_of_gradient_tensors_are_written_to_the_caller(whole: bool) -> None:
    network = Network(mse()).compiled(Compile.COMPUTE_ALL_GRADIENTS)
    training = network.training
    training.add_outputs({"dx": training.gradient_tensor(network.x)})
    training.add_outputs({"dh": training.source_gradient_tensors(network.tanh)[0]})
    x, hidden = torch.tensor(X, requires_grad=True), leaves(network.parameters)
    before = F.linear(x, *hidden[:2])
    loss = F.mse_loss(F.linear(torch.tanh(before), *hidden[2:]), torch.tensor(Y))
    written = {"dx": np.zeros((BATCH, 3), "f"), "dh": np.zeros((BATCH, 5), "f")}
    if whole:
        training.execute({"x": X}, {"y": Y}, outputs_data=written)
    else:
        network.bind()
        training.execute_forward()
        training.execute_gradient(outputs_data=written)
    assert_close([written["dx"], written["dh"]], torch.autograd.grad(loss, [x, before]))


def test_add_outputs_refuses_what_no_layer_makes_and_a_call_refuses_what_was_not_declared() -> None:
    network = Network(mse(), sgd()).compiled()
    with pytest.raises(sg.UnknownNameError, match="stranger"):
        network.training.add_outputs({"stranger": sg.Tensor((BATCH, 2))})
    with pytest.raises(sg.UnknownNameError, match="'out' is not an output"):
        network.training.execute({"x": X}, {"y": Y}, outputs_data={"out": np.zeros((BATCH, 2), "f")})


# stop_gradient


@pytest.mark.parametrize("late", [False, True], ids=["before compile", "after compile"])
def test_stop_gradient_equals_detach_and_is_drawn_dashed(late: bool) -> None:
    x, graph, layer = sg.Tensor((BATCH, 3)), sg.Graph(), dense(3, 2, 10)
    hidden = graph.node(layer, x)
    stopped = graph.node(sg.ActivationLayer.tanh(), hidden)
    graph.node(sg.ArithmeticLayer.multiply(), hidden, stopped)
    training, y = sg.TrainingGraph([graph], mse(), sgd()), sg.Tensor((BATCH, 2))
    training.add_inputs({"x": x}, {"y": y})
    assert training.summarized_dot_description.count("style=dashed") == 1  # the labels
    if late:
        training.compile(CPU)
    training.stop_gradient([stopped])
    assert training.summarized_dot_description.count("style=dashed") == 2
    assert graph.summarized_dot_description.count("style=dashed") == 0
    if not late:
        training.compile(CPU)
    expected = leaves([layer.weights, layer.biases])
    hidden = F.linear(torch.tensor(X), *expected)
    loss = F.mse_loss(hidden * torch.tanh(hidden).detach(), torch.tensor(Y))
    training.execute({"x": X}, {"y": Y})
    assert_close([layer.weights, layer.biases], descended(loss, expected))


# compile_optimizer, compile, link


def test_compile_optimizer_adds_an_optimizer_or_exchanges_it() -> None:
    network = Network(mse())
    with pytest.raises(sg.StateError, match="not compiled"):
        network.training.compile_optimizer(sgd())
    network.compiled()
    before = [p.numpy().copy() for p in network.parameters]
    network.training.execute({"x": X}, {"y": Y})
    assert_close(network.parameters, before, tolerance=0)
    for rate in (0.1, 0.01):
        optimizer = sg.SGDOptimizer(learning_rate=rate)
        network.training.compile_optimizer(optimizer)
        assert network.training.optimizer is optimizer
        expected = leaves(network.parameters)
        loss = F.mse_loss(predict(expected), torch.tensor(Y))
        network.training.execute({"x": X}, {"y": Y})
        assert_close(network.parameters, descended(loss, expected, rate))


@pytest.mark.parametrize("options", [*Compile, Compile.DEBUG_LAYERS | Compile.LINK_GRAPHS], ids=repr)
def test_compile_options_do_not_change_the_numbers(options: Compile) -> None:
    network = Network(mse(), sgd()).compiled(options)
    expected = leaves(network.parameters)
    loss = F.mse_loss(predict(expected), torch.tensor(Y))
    network.training.execute({"x": X}, {"y": Y})
    assert_close(network.parameters, descended(loss, expected))


def test_compile_without_a_device_keeps_the_one_it_has() -> None:
    network = Network(mse(), sgd(momentum_scale=0.9))
    with pytest.raises(sg.DeviceError, match="no device"):
        network.training.compile()
    assert network.training.device is None and network.training.device_memory_size == 0
    other = Network(mse(), sgd(momentum_scale=0.9)).compiled()
    for step in range(4):
        if step in (0, 2):
            network.training.compile(*([CPU] if step == 0 else []))
        assert network.training.execute({"x": X}, {"y": Y}).loss == other.training.execute({"x": X}, {"y": Y}).loss
    assert network.training.device == CPU and other.training.device == CPU


def test_compile_refuses_a_parameter_without_data_and_leaves_the_graph_not_compiled() -> None:
    x, graph = sg.Tensor((2, 3)), sg.Graph()
    empty = sg.FullyConnectedLayer(sg.Tensor((4, 3), label="empty"), None, sg.ConvolutionDescriptor(1, 3, 4))
    graph.node(empty, x)
    training = sg.TrainingGraph([graph])
    with pytest.raises(sg.DataError, match="empty"):
        training.compile(CPU)
    assert training.device is None
    with pytest.raises(sg.StateError, match="not compiled"):
        training.execute({"x": X[:2]})


def test_link_refuses_graphs_that_are_not_compiled_for_it_and_does_not_grow_the_first() -> None:
    plain, ready, other = Network(), Network().compiled(), Network().compiled(Compile.LINK_GRAPHS)
    first = Network().compiled(Compile.LINK_GRAPHS)
    with pytest.raises(sg.StateError, match="not compiled"):
        first.training.link([plain.training])
    with pytest.raises(sg.StateError, match="LINK_GRAPHS"):
        first.training.link([ready.training])
    first.training.link([other.training])
    assert first.training.layers == [first.first, first.tanh, first.second]
    assert_close([first.training.execute({"x": X}).result], [predict(leaves(first.parameters))])


def test_link_sums_what_two_readers_hand_back_and_updates_their_common_layer_weight_once() -> None:
    x, y, graphs = sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 2)), [sg.Graph() for _ in range(3)]
    trunk, head = dense(3, 5, 10), dense(5, 2, 20)
    twin = sg.FullyConnectedLayer(head.weights, head.biases, head.descriptor)
    hidden = graphs[0].node(trunk, x)
    graphs[1].node(sg.ActivationLayer.tanh(), graphs[1].node(head, hidden))
    graphs[2].node(twin, hidden)
    losses = [None, mse(), sg.LossLayer.huber()]
    made = [sg.TrainingGraph([g], loss, sgd(momentum_scale=0.9)) for g, loss in zip(graphs, losses, strict=True)]
    for training, loss in zip(made, losses, strict=True):
        training.add_inputs({}, {"y": y} if loss else None)
        training.compile(CPU, Compile.LINK_GRAPHS)
    made[0].link(made[1:])
    tensors = [trunk.weights, trunk.biases, head.weights, head.biases]
    optimizer = torch.optim.SGD(parameters := leaves(tensors), lr=RATE, momentum=0.9)
    for seed in range(3):
        data = {"x": numbers(BATCH, 3, seed=seed), "y": numbers(BATCH, 2, seed=seed + 50)}
        made[0].bind_and_write_data(data, {"x": x, "y": y}, CPU)
        for training in made:
            training.execute_forward()
        for training in reversed(made):
            training.execute_gradient()
        for training in made:
            training.execute_optimizer_update()
        logits = F.linear(F.linear(torch.tensor(data["x"]), *parameters[:2]), *parameters[2:])
        labels = torch.tensor(data["y"])
        optimizer.zero_grad()
        (F.mse_loss(torch.tanh(logits), labels) + F.huber_loss(logits, labels)).backward()
        optimizer.step()
        assert_close(tensors, parameters, 1e-5)
