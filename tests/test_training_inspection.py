"""The members of `TrainingGraph` for gradients, trained tensors, optimizer state and memory, against plain PyTorch."""

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

LABELS = torch.tensor(Y)


def back_and_forth(network: Network) -> None:
    network.training.execute_forward()
    network.training.execute_gradient()


# allocate_user_gradient


def test_allocate_user_gradient_alone_is_a_vector_jacobian_product() -> None:
    network = Network().compiled()
    given = network.training.allocate_user_gradient(network.out)
    assert given.shape == network.out.shape and network.training.allocate_user_gradient(network.out) is given
    network.bind(y=None)
    network.training.execute_forward()
    for seed in (1, 2):  # a second pass over the same forward replaces the gradients of the first
        vector = numbers(BATCH, 2, seed=seed)
        network.training.bind_and_write_data({"g": vector}, {"g": given}, CPU)
        network.training.execute_gradient()
        parameters = leaves(network.parameters)
        assert_close(
            network.gradients(), torch.autograd.grad(predict(parameters), parameters, torch.tensor(vector)), 1e-5
        )


@pytest.mark.parametrize("moment", ["before compile", "after compile", "between forward and gradient"])
def test_allocate_user_gradient_is_added_to_gradients_from_layers(moment: str) -> None:
    network, vector = Network(mse()), numbers(BATCH, 5, seed=4)
    given = network.training.allocate_user_gradient(network.active) if moment == "before compile" else None
    network.compiled()
    given = network.training.allocate_user_gradient(network.active) if moment == "after compile" else given
    network.bind()
    network.training.execute_forward()
    given = given or network.training.allocate_user_gradient(network.active)
    network.training.bind_and_write_data({"g": vector}, {"g": given}, CPU)
    network.training.execute_gradient()
    parameters = leaves(network.parameters)
    active = torch.tanh(F.linear(torch.tensor(X), *parameters[:2]))
    total = F.mse_loss(F.linear(active, *parameters[2:]), LABELS) + (active * torch.tensor(vector)).sum()
    assert_close(network.gradients(), torch.autograd.grad(total, parameters), 1e-5)


@pytest.mark.parametrize("rows", [1, BATCH])
def test_allocate_user_gradient_counts_as_zero_while_unwritten(rows: int) -> None:
    x, y, graph, layer = sg.Tensor((rows, 3)), sg.Tensor((rows, 1)), sg.Graph(), dense(3, 1, 10)
    out = graph.node(layer, x)
    training = sg.TrainingGraph([graph], mse())
    training.add_inputs({"x": x}, {"y": y})
    training.allocate_user_gradient(out)
    training.compile(CPU)
    training.bind_and_write_data({"x": X[:rows], "y": Y[:rows, :1]}, {"x": x, "y": y}, CPU)
    training.execute_forward()
    training.execute_gradient()
    parameters = leaves([layer.weights, layer.biases])
    loss = F.mse_loss(F.linear(torch.tensor(X[:rows]), *parameters), LABELS[:rows, :1])
    found = [training.gradient_data(layer.weights, layer), training.gradient_data(layer.biases, layer)]
    assert_close(found, torch.autograd.grad(loss, parameters))


@pytest.mark.parametrize("bound", [1, BATCH], ids=["bound for this batch", "bound for the declared batch"])
def test_allocate_user_gradient_takes_the_rows_of_a_smaller_batch(bound: int, rows: int = 1) -> None:
    network, vector = Network().compiled(), numbers(BATCH, 2, seed=4)
    given = network.training.allocate_user_gradient(network.out)
    network.bind(y=None)
    network.training.bind_and_write_data({"g": vector}, {"g": given}, CPU, batch_size=bound)
    network.training.execute_forward(rows)
    network.training.execute_gradient(rows)
    parameters = leaves(network.parameters)
    expected = torch.autograd.grad(predict(parameters, X[:rows]), parameters, torch.tensor(vector[:rows]))
    assert_close(network.gradients(), expected, 1e-5)


def test_allocate_user_gradient_refuses_what_is_no_result_of_the_graph() -> None:
    network = Network()
    for stranger in (network.x, sg.Tensor((1, 1))):
        with pytest.raises(sg.UnknownNameError, match="not a result"):
            network.training.allocate_user_gradient(stranger)


# synchronize_updates, set_training_tensor_parameters, bind_optimizer_data


def test_synchronize_updates_brings_new_values_into_the_callers_own_memory() -> None:
    mine, x, y, graph = numbers(2, 3, seed=5), sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 2)), sg.Graph()
    weights = torch.tensor(mine, requires_grad=True)
    layer = sg.FullyConnectedLayer(sg.Tensor((2, 3), data=mine), None, sg.ConvolutionDescriptor(1, 3, 2))
    graph.node(layer, x)
    training = sg.TrainingGraph([graph], mse(), sgd())
    training.add_inputs({"x": x}, {"y": y})
    with pytest.raises(sg.StateError, match="not compiled"):
        training.synchronize_updates()
    training.compile(CPU)
    training.execute({"x": X}, {"y": Y})
    training.synchronize_updates()
    expected = descended(F.mse_loss(torch.tensor(X) @ weights.T, LABELS), [weights])
    assert_close([mine, layer.weights.data], expected * 2)


def shifted(optimizer: sg.Optimizer | None) -> tuple[Network, sg.Tensor, np.ndarray]:
    """A network whose prediction is shifted by an input tensor that can be trained."""
    network, shift, start = Network(mse(), optimizer), sg.Tensor((1, 2)), np.array([[0.5, -1.0]], np.float32)
    shift.bind_and_write_data(start, CPU)
    network.training.node(sg.ArithmeticLayer.add(), network.out, shift)
    network.training.add_inputs({"shift": shift})
    return network, shift, start.copy()


@pytest.mark.parametrize("late", [False, True], ids=["before compile", "after compile"])
def test_set_training_tensor_parameters_makes_an_input_trainable(late: bool) -> None:
    network, shift, start = shifted(sgd())
    if late:
        network.compiled()
    network.training.set_training_tensor_parameters([sg.TensorParameter(shift)])
    if not late:
        network.compiled()
    parameters = [*leaves(network.parameters), torch.tensor(start, requires_grad=True)]
    loss = F.mse_loss(predict(parameters[:4]) + parameters[4], LABELS)
    network.training.execute({"x": X}, {"y": Y})
    network.training.synchronize_updates()
    assert_close([*network.parameters, shift.data], descended(loss, parameters))


def test_set_training_tensor_parameters_on_a_compiled_graph_keeps_its_constants() -> None:
    network, shift, start = shifted(None)
    scale, factor = sg.Tensor((1, 2)), np.array([[2.0, 3.0]], np.float32)
    network.training.node(sg.ArithmeticLayer.multiply(), network.training.nodes[-1].results[0], scale)
    network.training.compile(CPU, input_tensors={"scale": scale}, input_tensors_data={"scale": factor})
    network.training.set_training_tensor_parameters([sg.TensorParameter(shift)])
    loss = F.mse_loss((predict(leaves(network.parameters)) + torch.tensor(start)) * torch.tensor(factor), LABELS)
    assert network.training.execute({"x": X}, {"y": Y}).loss == pytest.approx(loss.item(), rel=1e-6)


def test_set_training_tensor_parameters_refuses_parameters_of_layers_and_other_objects() -> None:
    network = Network()
    with pytest.raises(sg.ArgumentError, match="belongs to a layer"):
        network.training.set_training_tensor_parameters([network.first.weights_parameter])
    with pytest.raises(sg.DataTypeError, match="not a TensorParameter"):
        network.training.set_training_tensor_parameters([network.x])


@pytest.mark.parametrize("moment", ["before compile", "after compile", "before compile_optimizer"])
def test_bind_optimizer_data_is_where_the_optimizer_starts_and_what_it_writes(moment: str) -> None:
    late = moment == "before compile_optimizer"
    network = Network(mse(), None if late else sgd(momentum_scale=0.9))
    start = [numbers(*p.shape, seed=40 + i) for i, p in enumerate(network.parameters)]
    buffers, handles = [m.copy() for m in start], [sg.TensorOptimizerDeviceData() for _ in start]
    if moment != "before compile":
        network.compiled()
    for parameter, buffer, handle in zip(network.parameters, buffers, handles, strict=True):
        network.training.bind_optimizer_data([buffer], parameter, [handle])
    if moment == "before compile":
        network.compiled()
    if late:
        network.training.compile_optimizer(sgd(momentum_scale=0.9))
    parameters = leaves(network.parameters)
    gradients = torch.autograd.grad(F.mse_loss(predict(parameters), LABELS), parameters)
    momenta = [0.9 * torch.tensor(m) + RATE * g for m, g in zip(start, gradients, strict=True)]
    network.training.execute({"x": X}, {"y": Y})
    for parameter in network.parameters:
        parameter.synchronize_optimizer_data()
    assert_close(network.parameters, [p - m for p, m in zip(parameters, momenta, strict=True)])
    assert_close(buffers, momenta)
    assert_close([handle.array for handle in handles], momenta)


def test_bind_optimizer_data_refuses_a_wrong_count_and_a_tensor_that_is_not_trained() -> None:
    network = Network(mse(), sg.AdamOptimizer(learning_rate=RATE)).compiled()
    with pytest.raises(sg.ArgumentError, match="momentum, velocity"):
        network.training.bind_optimizer_data([numbers(5, 3, seed=0)], network.first.weights)
    with pytest.raises(sg.UnknownNameError, match="not trained"):
        network.training.bind_optimizer_data([numbers(BATCH, 3, seed=0)] * 2, network.x)


# optimizer


def test_optimizer_learning_rate_takes_effect_on_the_next_step_and_compiles_nothing() -> None:
    network = Network(mse(), sgd()).compiled()
    compiled = list(network.training.executables)
    for rate in (RATE, 0.5, 0.0, 0.02):
        network.training.optimizer.learning_rate = rate
        parameters = leaves(network.parameters)
        loss = F.mse_loss(predict(parameters), LABELS)
        network.training.execute({"x": X}, {"y": Y})
        assert_close(network.parameters, descended(loss, parameters, rate))
    assert network.training.executables == compiled


def clipped(kind: sg.GradientClippingType, gradients: list[torch.Tensor], bound: float) -> list[torch.Tensor]:
    if kind is sg.GradientClippingType.BY_VALUE:
        return [g.clamp(-bound, bound) for g in gradients]
    norms = [g.norm() for g in gradients]
    if kind is sg.GradientClippingType.BY_GLOBAL_NORM:
        norms = [torch.stack(norms).norm()] * len(norms)
    return [g * min(1.0, bound / n.item()) for g, n in zip(gradients, norms, strict=True)]


@pytest.mark.parametrize("kind", sg.GradientClippingType)
def test_optimizer_clipping_is_switched_on_and_off_between_steps(kind: sg.GradientClippingType) -> None:
    bound = 0.05
    settings = {"gradient_clip_max": bound, "gradient_clip_min": -bound, "maximum_clipping_norm": bound}
    optimizer = sg.SGDOptimizer(sg.OptimizerDescriptor(RATE, gradient_clipping_type=kind, **settings))
    network = Network(mse(), optimizer).compiled()
    compiled = list(network.training.executables)
    for clipping in (False, True, False, True):
        optimizer.applies_gradient_clipping = clipping
        parameters = leaves(network.parameters)
        gradients = list(torch.autograd.grad(F.mse_loss(predict(parameters), LABELS), parameters))
        bounded = clipped(kind, gradients, bound)
        assert not torch.allclose(bounded[0], gradients[0])  # the bound matters
        network.training.execute({"x": X}, {"y": Y})
        used = bounded if clipping else gradients
        assert_close(network.parameters, [p - RATE * g for p, g in zip(parameters, used, strict=True)])
    assert network.training.executables == compiled


# device_memory_size


def test_device_memory_size_of_one_relu_is_its_result_and_in_training_also_its_gradient() -> None:
    x, graph = sg.Tensor((2, 3)), sg.Graph()
    graph.node(sg.ActivationLayer.relu(), x)
    for made, size in ((sg.InferenceGraph([graph]), 24), (sg.TrainingGraph([graph]), 48)):
        assert made.device_memory_size == 0
        made.compile(CPU)
        assert made.device_memory_size == size


def test_device_memory_size_is_known_before_the_first_step_and_counts_optimizer_state() -> None:
    plain = Network(mse(), sgd()).compiled()
    adam = Network(mse(), sg.AdamOptimizer(learning_rate=RATE)).compiled()
    size = adam.training.device_memory_size
    state = 2 * 4 * (5 * 3 + 5 + 2 * 5 + 2)  # momentum and velocity of every parameter, four bytes each
    assert size - plain.training.device_memory_size == state
    adam.training.execute({"x": X}, {"y": Y})
    assert adam.training.device_memory_size == size


# gradient_tensor, source_gradient_tensors, result_gradient_tensors


def test_gradient_tensor_of_an_input_holds_its_gradient_where_all_gradients_are_computed() -> None:
    network = Network(mse())
    assert network.training.gradient_tensor(network.x) is None
    network.compiled()
    assert network.training.gradient_tensor(network.x) is None
    network.compiled(Compile.COMPUTE_ALL_GRADIENTS)
    for other in (network.hidden, network.y, sg.Tensor((1, 1))):
        assert network.training.gradient_tensor(other) is None
    found = network.training.gradient_tensor(network.x)
    assert found is not network.x and found.shape == network.x.shape
    network.bind()
    back_and_forth(network)
    x, (a, b, c, d) = torch.tensor(X, requires_grad=True), leaves(network.parameters)
    loss = F.mse_loss(F.linear(torch.tanh(F.linear(x, a, b)), c, d), LABELS)
    assert_close([found], torch.autograd.grad(loss, [x]))


def test_gradient_tensor_of_a_trained_input_needs_no_option() -> None:
    network, shift, start = shifted(None)
    network.training.set_training_tensor_parameters([sg.TensorParameter(shift)])
    network.compiled()
    network.bind()
    back_and_forth(network)
    leaf = torch.tensor(start, requires_grad=True)
    loss = F.mse_loss(predict(leaves(network.parameters)) + leaf, LABELS)
    assert_close([network.training.gradient_tensor(shift)], torch.autograd.grad(loss, [leaf]))


def test_source_gradients_are_a_layers_own_part_and_result_gradients_the_sum_over_readers() -> None:
    x, y, graph, layer = sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 2)), sg.Graph(), dense(3, 2, 10)
    tanh, relu, add, end = (
        sg.ActivationLayer.tanh(),
        sg.ActivationLayer.relu(),
        sg.ArithmeticLayer.add(),
        dense(2, 7, 30),
    )
    hidden = graph.node(layer, x)
    graph.node(end, hidden)  # nothing reads its result
    graph.node(add, graph.node(tanh, hidden), graph.node(relu, hidden))
    training = sg.TrainingGraph([graph], mse())
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    training.bind_and_write_data({"x": X, "y": Y}, {"x": x, "y": y}, CPU)
    training.execute_forward()
    training.execute_gradient()
    one, two = (torch.tensor(hidden.numpy(), requires_grad=True) for _ in range(2))
    loss = F.mse_loss(torch.tanh(one) + torch.relu(two), LABELS)
    by_tanh, by_relu = torch.autograd.grad(loss, [one, two])
    assert_close(training.source_gradient_tensors(tanh), [by_tanh])
    assert_close(training.source_gradient_tensors(relu), [by_relu])
    assert_close(training.result_gradient_tensors(layer), [by_tanh + by_relu])
    assert_close(training.source_gradient_tensors(add), training.result_gradient_tensors(add) * 2, 0)
    assert training.result_gradient_tensors(end) == []
    for member in (training.source_gradient_tensors, training.result_gradient_tensors):
        assert member(sg.ActivationLayer.tanh()) == []


def test_result_gradient_tensors_of_a_last_layer_hold_the_user_gradient() -> None:
    network, vector = Network().compiled(), numbers(BATCH, 2, seed=4)
    given = network.training.allocate_user_gradient(network.out)
    network.bind(y=None)
    network.training.bind_and_write_data({"g": vector}, {"g": given}, CPU)
    back_and_forth(network)
    assert_close(network.training.result_gradient_tensors(network.second), [vector], 0)


# gradient_data


@pytest.mark.parametrize("shape", [(5, 3), (1, 15, 1, 1)], ids=["natural", "packed"])
def test_gradient_data_is_the_raw_gradient_in_the_parameters_shape(shape: tuple[int, ...]) -> None:
    settings: dict[str, Any] = {
        "applies_gradient_clipping": True,
        "gradient_clip_max": 1e-3,
        "gradient_clip_min": -1e-3,
    }
    settings |= {"gradient_rescale": 7.0, "regularization_type": sg.RegularizationType.L2, "regularization_scale": 0.3}
    x, y, graph, start = sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 5)), sg.Graph(), numbers(5, 3, seed=6)
    layer = sg.FullyConnectedLayer(
        sg.Tensor(shape, data=start.copy().reshape(shape)), None, sg.ConvolutionDescriptor(1, 3, 5)
    )
    graph.node(layer, x)
    training = sg.TrainingGraph([graph], mse(), sg.SGDOptimizer(sg.OptimizerDescriptor(RATE, **settings)))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    labels, weights = numbers(BATCH, 5, seed=7), torch.tensor(start, requires_grad=True)
    training.bind_and_write_data({"x": X, "y": labels}, {"x": x, "y": y}, CPU)
    training.execute_forward()
    training.execute_gradient()
    training.execute_optimizer_update()
    (expected,) = torch.autograd.grad(F.mse_loss(torch.tensor(X) @ weights.T, torch.tensor(labels)), [weights])
    assert_close([training.gradient_data(layer.weights, layer)], [expected.reshape(shape)])


def test_gradient_data_is_none_unless_forward_and_gradient_ran_apart() -> None:
    network = Network(mse(), sgd())
    assert network.gradients() == [None] * 4
    network.compiled().bind()
    assert network.gradients() == [None] * 4
    network.training.execute_forward()
    assert network.gradients() == [None] * 4
    network.training.execute_gradient()
    assert all(found is not None for found in network.gradients())
    network.training.execute({"x": X}, {"y": Y}, options=Run.SYNCHRONOUS)
    assert network.gradients() == [None] * 4


def test_gradient_data_is_none_for_what_is_not_trained_and_for_strangers() -> None:
    network, frozen = Network(mse()), dense(2, 2, 30)
    network.training.node(frozen, network.out, disable_update=True)
    network.first.biases_parameter.is_updatable = False
    network.compiled().bind()
    back_and_forth(network)
    found = network.training.gradient_data
    assert found(frozen.weights, frozen) is None
    assert found(network.first.biases, network.first) is None
    assert found(network.first.weights, network.first) is not None
    assert found(network.first.weights, network.second) is None
    assert found(network.first.weights, network.tanh) is None
    assert found(network.first.weights, dense(3, 5, 10)) is None
