"""Executing a `TrainingGraph`: batch sizes, completion, waiting and awaiting, profiles, and every option."""

import asyncio
from collections.abc import Callable
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

Call = Callable[..., sg.Execution]


def whole(network: Network, **settings: Any) -> sg.Execution:
    return network.training.execute({"x": X}, {"y": Y}, **settings)


def forward(network: Network, **settings: Any) -> sg.Execution:
    network.bind()
    return network.training.execute_forward(**settings)


def gradient(network: Network, **settings: Any) -> sg.Execution:
    forward(network)
    return network.training.execute_gradient(**settings)


def update(network: Network, **settings: Any) -> sg.Execution:
    gradient(network)
    return network.training.execute_optimizer_update(**settings)


CALLS = {
    "execute": whole,
    "execute_forward": forward,
    "execute_gradient": gradient,
    "execute_optimizer_update": update,
}
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


def assert_did(network: Network, call: Call, start: list[torch.Tensor]) -> None:
    """What the call promises: loss readable, gradients readable, parameters changed, each where it should be."""
    loss = F.mse_loss(predict(start), torch.tensor(Y))
    moved = descended(loss, start) if call in (whole, update) else start
    assert_close(network.parameters, moved)
    if call in (gradient, update):
        assert_close(network.gradients(), torch.autograd.grad(F.mse_loss(predict(start), torch.tensor(Y)), start))


# Batch sizes


class Folding:
    """Images that a reshape with the batch extent turns into rows, and a loss."""

    def __init__(self, reduction: sg.ReductionType = sg.ReductionType.MEAN) -> None:
        self.x, self.y = sg.Tensor.image(2, 2, 3, BATCH), sg.Tensor((BATCH, 2))
        self.layer, graph = dense(12, 2, 10), sg.Graph()
        graph.node(self.layer, graph.reshape((BATCH, -1), self.x))
        self.training = sg.TrainingGraph([graph], mse(reduction), sgd())
        self.training.add_inputs({"x": self.x}, {"y": self.y})
        self.training.compile(CPU)


@pytest.mark.parametrize("phases", [False, True], ids=["execute", "phases"])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_batch_size_takes_that_many_rows_and_means_divide_by_them(rows: int, phases: bool) -> None:
    one, images, labels = Folding(), numbers(7, 3, 2, 2, seed=3), numbers(7, 2, seed=4)
    parameters = leaves([one.layer.weights, one.layer.biases])
    inputs = torch.tensor(images[:rows]).reshape(rows, 12)
    loss = F.mse_loss(F.linear(inputs, *parameters), torch.tensor(labels[:rows]))
    if phases:
        data = {"x": images, "y": labels}
        one.training.bind_and_write_data(data, {"x": one.x, "y": one.y}, CPU, batch_size=rows)
        found = one.training.execute_forward(rows).loss
        one.training.execute_gradient(rows)
        one.training.execute_optimizer_update()
    else:
        found = one.training.execute({"x": images}, {"y": labels}, batch_size=rows).loss
    assert found == pytest.approx(loss.item(), rel=1e-5)
    assert_close([one.layer.weights, one.layer.biases], descended(loss, parameters))


def test_batch_size_is_compiled_once_and_zero_means_the_declared_one() -> None:
    network, written = Network(mse(), sgd()).compiled(), np.full((BATCH, 2), 9, "f")
    network.training.add_outputs({"out": network.out})
    whole(network, batch_size=2)
    compiled = list(network.training.executables)
    expected = predict(leaves(network.parameters))
    whole(network, batch_size=2, outputs_data={"out": written})
    assert_close([written[:2], written[2:]], [expected[:2], np.full((2, 2), 9)])
    assert network.training.executables == compiled
    expected = F.mse_loss(predict(leaves(network.parameters)), torch.tensor(Y))
    assert whole(network, batch_size=0).loss == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("rows", [-1, 1.5, True])
def test_batch_size_that_is_no_count_is_refused(rows: Any) -> None:
    network = Network(mse(), sgd()).compiled()
    with pytest.raises(sg.ArgumentError, match="batch_size"):
        whole(network, batch_size=rows)


def test_gradient_pass_refuses_another_batch_size_than_its_forward_pass() -> None:
    network = Network(mse()).compiled()
    forward(network, batch_size=2)
    with pytest.raises(sg.ArgumentError, match="is 3, but the forward pass ran with 2"):
        network.training.execute_gradient(3)


# Completion, waiting, awaiting, time


@every_call
@pytest.mark.parametrize("options", [Run.NONE, Run.SYNCHRONOUS | Run.PROFILING])
def test_completion_is_called_exactly_once_with_tensor_error_and_seconds(call: Call, options: Run) -> None:
    network, got = Network(mse(), sgd()).compiled(), []
    start = leaves(network.parameters)
    execution = call(network, options=options, completion=lambda *given: got.append(given))
    execution.wait()
    ((tensor, error, seconds),) = got
    assert error is None and tensor is execution.result
    assert (seconds == execution.time > 0) if Run.PROFILING in options else (seconds == 0 and execution.time is None)
    if call in (whole, forward):
        loss = F.mse_loss(predict(start), torch.tensor(Y)).item()
        assert [execution.loss, tensor.numpy().item()] == pytest.approx([loss] * 2, rel=1e-6)
    else:
        assert tensor is None and execution.loss is None
    assert_did(network, call, start)


@every_call
@pytest.mark.parametrize("options", [Run.NONE, Run.PROFILING])
def test_awaiting_gives_the_execution_and_its_time_where_profiling_was_asked_for(call: Call, options: Run) -> None:
    network = Network(mse(), sgd()).compiled()
    start = leaves(network.parameters)

    async def main() -> sg.Execution:
        return await call(network, options=options)

    execution = asyncio.run(main())
    assert isinstance(execution, sg.Execution) and execution.done and execution.error is None
    assert (execution.time is None) if options is Run.NONE else execution.time > 0
    assert_did(network, call, start)


@torch.library.custom_op("stepgraph_test::fragile", mutates_args=())
def fragile(x: torch.Tensor) -> torch.Tensor:
    """Breaks where a number is 7: that shows only when it runs."""
    if (x == 7).any():
        raise RuntimeError("7 is too much")
    return x.clone()


fragile.register_fake(torch.empty_like)
fragile.register_autograd(lambda _, g: g)


class Fragile(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return fragile(x)


def classifier() -> tuple[sg.TrainingGraph, sg.FullyConnectedLayer]:
    x, y, graph, layer = sg.Tensor((BATCH, 3)), sg.Tensor((BATCH,), "int64"), sg.Graph(), dense(3, 2, 10)
    graph.node(layer, graph.node(Fragile(), x))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sgd())
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    return training, layer


@pytest.mark.parametrize("options", [Run.NONE, Run.PER_LAYER_PROFILING])
def test_work_that_fails_reaches_the_completion_and_leaves_the_parameters_alone(options: Run) -> None:
    training, layer = classifier()
    parameters, got = leaves([layer.weights, layer.biases]), []
    bad, good = np.full_like(X, 7), np.array([0, 1, 0, 1])
    with pytest.raises(sg.ExecutionError, match="7 is too much"):
        training.execute({"x": bad}, {"y": good}, options=options)
    execution = training.execute({"x": bad}, {"y": good}, options=options, completion=lambda *told: got.append(told))
    ((tensor, error, _),) = got
    assert tensor is None and isinstance(error, sg.ExecutionError)
    with pytest.raises(sg.ExecutionError):
        execution.wait()
    assert_close([layer.weights, layer.biases], parameters, tolerance=0)
    loss = F.cross_entropy(F.linear(torch.tensor(X), *parameters), torch.tensor(good))
    assert training.execute({"x": X}, {"y": good}).loss == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("inputs", "labels", "outputs", "refusal"),
    [
        ({}, {"y": Y}, None, sg.DataError),
        ({"x": X[:1]}, {"y": Y}, None, sg.DataError),
        ({"x": X, "z": X}, {"y": Y}, None, sg.UnknownNameError),
        ({"x": X}, {"z": Y}, None, sg.UnknownNameError),
        ({"x": X}, {"y": Y}, {"out": np.zeros(3, "f")}, sg.DataError),
    ],
    ids=["missing", "too short", "unknown input", "unknown label", "too short output"],
)
def test_refused_call_changes_nothing_and_never_calls_the_completion(
    inputs: dict, labels: dict, outputs: dict | None, refusal: type[Exception]
) -> None:
    network, got = Network(mse(), sgd()).compiled(), []
    network.training.add_outputs({"out": network.out})
    start = leaves(network.parameters)
    with pytest.raises(refusal):
        network.training.execute(inputs, labels, outputs_data=outputs, completion=lambda *given: got.append(given))
    assert got == [] and network.training.optimizer.time_step == 1
    assert_close(network.parameters, start, tolerance=0)


def test_phases_out_of_order_are_refused() -> None:
    network = Network(mse(), sgd())
    for call in CALLS.values():
        with pytest.raises(sg.StateError, match="not compiled"):
            call(network)
    training = network.compiled().training
    with pytest.raises(sg.StateError, match="no forward pass"):
        training.execute_gradient()
    with pytest.raises(sg.StateError, match="no gradients"):
        training.execute_optimizer_update()
    bare = Network(mse()).compiled()
    with pytest.raises(sg.StateError, match="no optimizer"):
        update(bare)


@pytest.mark.parametrize("outside", [False, True], ids=["it ends in one number", "its user gradient is written"])
def test_whole_step_without_a_loss_equals_the_phases(outside: bool) -> None:
    rows, vector = (BATCH, numbers(BATCH, 1, seed=9)) if outside else (1, np.ones((1, 1), "f"))
    for phases in (False, True):
        x, graph, layer = sg.Tensor((rows, 3)), sg.Graph(), dense(3, 1, 10)
        out = graph.node(sg.ActivationLayer.tanh(), graph.node(layer, x))
        training = sg.TrainingGraph([graph], None, sgd())
        if outside:
            training.bind_and_write_data({"g": vector}, {"g": training.allocate_user_gradient(out)}, CPU)
        training.compile(CPU)
        start = leaves([layer.weights, layer.biases])
        training.bind_and_write_data({"x": X[:rows]}, {"x": x}, CPU)
        if phases:
            training.execute_forward()
            training.execute_gradient()
            training.execute_optimizer_update()
        else:
            training.execute({})
        value = (torch.tanh(F.linear(torch.tensor(X[:rows]), *start)) * torch.tensor(vector)).sum()
        assert_close([layer.weights, layer.biases], descended(value, start))


PHASES = {whole: {"forward", "gradient", "update"}, forward: {"forward"}, gradient: {"gradient"}, update: {"update"}}


@every_call
def test_per_layer_profiling_tells_the_layers_and_phases_of_the_graph(call: Call) -> None:
    network = Network(mse(label="loss"), sgd()).compiled()
    start = leaves(network.parameters)
    profile = call(network, options=Run.PER_LAYER_PROFILING).profile
    assert_did(network, call, start)
    found = {(layer, phase) for layer, phase, _, _ in profile.rows}
    layers = {"first", "tanh", "second", "loss"}
    assert {phase for _, phase in found} == PHASES[call]
    assert {(layer, phase) for layer in layers for phase in PHASES[call] - {"update"}} <= found
    owners = {layer.split(".")[0] for layer, _ in found}  # an update is that of `first.weights`, or of all at once
    assert owners <= layers | {"optimizer", "random stream"}
    assert all(seconds > 0 for _, _, seconds, _ in profile.rows)
    assert call(network).profile is None


# Options of compile that show when executing


@pytest.mark.parametrize("asked", ["before", "after"])
def test_debug_layers_keeps_results_and_gradients_of_debugged_layers_readable(asked: str) -> None:
    network = Network(mse(), sgd())
    network.tanh.is_debugging_enabled = True
    network.compiled(Compile.DEBUG_LAYERS)
    tensors = lambda: [  # noqa: E731
        *network.training.source_gradient_tensors(network.tanh),
        *network.training.result_gradient_tensors(network.tanh),
    ]
    if asked == "before":
        tensors()
    parameters = leaves(network.parameters)
    hidden = F.linear(torch.tensor(X), *parameters[:2])
    active = torch.tanh(hidden)
    loss = F.mse_loss(F.linear(active, *parameters[2:]), torch.tensor(Y))
    whole(network)
    assert_close([network.active.data], [active])
    assert_close(tensors(), torch.autograd.grad(loss, [hidden, active]))
    assert network.gradients() == [None] * 4 and network.tanh.is_debugging_enabled


def test_compute_all_gradients_reaches_inputs_and_passes_through_frozen_layers() -> None:
    network, frozen = Network(mse(), sgd()), dense(2, 2, 30)
    network.training.node(frozen, network.out, disable_update=True)
    network.compiled(Compile.COMPUTE_ALL_GRADIENTS)
    gradient(network)
    x, parameters, fixed = (
        torch.tensor(X, requires_grad=True),
        leaves(network.parameters),
        leaves([frozen.weights, frozen.biases]),
    )
    active = torch.tanh(F.linear(x, *parameters[:2]))
    loss = F.mse_loss(F.linear(F.linear(active, *parameters[2:]), *fixed), torch.tensor(Y))
    expected = torch.autograd.grad(loss, [x, *parameters])
    assert_close([network.training.gradient_tensor(network.x), *network.gradients()], expected)
    network.training.execute_optimizer_update()
    assert_close([frozen.weights, frozen.biases], fixed, tolerance=0)


# Options of execute


def test_skip_writing_input_data_uses_what_was_written_last() -> None:
    network, other = Network().compiled(), numbers(BATCH, 3, seed=8)
    parameters, skip = leaves(network.parameters), Run.SKIP_WRITING_INPUT_DATA_TO_DEVICE
    with pytest.raises(sg.DataError):
        network.training.execute({"x": X}, options=skip)
    network.training.execute({"x": X})
    assert_close([network.training.execute({"x": other}, options=skip).result], [predict(parameters, X)])
    network.bind(other, None)
    assert_close([network.training.execute({}, options=skip).result], [predict(parameters, other)])


@pytest.mark.parametrize("phases", [False, True], ids=["execute", "execute_forward"])
def test_forward_for_inference_drops_nothing_uses_running_statistics_and_changes_nothing(phases: bool) -> None:
    x, y, graph = sg.Tensor((BATCH, 3)), sg.Tensor((BATCH, 3)), sg.Graph()
    layer, normalization = dense(3, 3, 10), sg.BatchNormalizationLayer.create(3, momentum=0.5)
    graph.node(sg.DropoutLayer(0.5), graph.node(normalization, graph.node(layer, x)))
    training = sg.TrainingGraph([graph], mse(), sg.AdamOptimizer(learning_rate=RATE))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    labels = numbers(BATCH, 3, seed=5)
    training.execute({"x": X}, {"y": labels})
    tensors = [layer.weights, layer.biases, *normalization.parameters.values(), *normalization.statistics.values()]
    before, steps = [tensor.numpy().copy() for tensor in tensors], training.optimizer.time_step
    weights, biases, beta, gamma, mean, variance = map(torch.tensor, before)
    rows = F.batch_norm(F.linear(torch.tensor(X), weights, biases), mean, variance, gamma, beta, eps=1e-5)
    training.bind_and_write_data({"x": X, "y": labels}, {"x": x, "y": y}, CPU)
    option = Run.FORWARD_FOR_INFERENCE
    found = training.execute_forward(options=option) if phases else training.execute({}, options=option)
    assert found.loss == pytest.approx(F.mse_loss(rows, torch.tensor(labels)).item(), rel=1e-5)
    assert_close([graph.nodes[-1].results[0]], [rows], 1e-5)
    assert_close(tensors, before, tolerance=0)
    assert training.optimizer.time_step == steps


# ACCUMULATE_GRADIENTS


def accumulate(network: Network, rows: slice, options: Run = Run.ACCUMULATE_GRADIENTS) -> None:
    network.bind(X[rows], Y[rows], batch_size=len(X[rows]))
    network.training.execute_forward(len(X[rows]))
    network.training.execute_gradient(options=options)


def test_accumulate_gradients_over_micro_batches_equals_the_big_batch() -> None:
    big, micro = (Network(mse(sg.ReductionType.SUM), sgd()).compiled() for _ in range(2))
    for _ in range(2):  # the first pass after an update starts anew
        update(big)
        for rows in (slice(0, 1), slice(1, 4)):
            accumulate(micro, rows)
        assert_close(micro.gradients(), big.gradients(), 1e-5)
        micro.training.execute_optimizer_update()
        assert_close(micro.parameters, big.parameters, 1e-5)


def test_gradient_passes_without_accumulation_replace_each_other() -> None:
    network, plain = (Network(mse(sg.ReductionType.SUM)).compiled() for _ in range(2))
    accumulate(network, slice(0, 3), Run.NONE)
    accumulate(network, slice(3, 4), Run.NONE)
    accumulate(plain, slice(3, 4), Run.NONE)
    assert_close(network.gradients(), plain.gradients(), tolerance=0)


@pytest.mark.parametrize("whole_call", [True, False], ids=["execute", "execute_forward"])
def test_an_evaluation_between_micro_batches_does_not_lose_gradients(whole_call: bool) -> None:
    watched, plain = (Network(mse(sg.ReductionType.SUM), sgd()).compiled() for _ in range(2))
    for network in (watched, plain):
        accumulate(network, slice(0, 2))
        if network is watched:
            (whole if whole_call else forward)(network, options=Run.FORWARD_FOR_INFERENCE)
        accumulate(network, slice(2, 4))
    assert_close(watched.gradients(), plain.gradients(), tolerance=0)
