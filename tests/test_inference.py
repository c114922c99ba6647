"""`InferenceGraph`: every member, and the parameters it shares with a training graph."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph as sg
from tests.test_training_members import (
    BATCH,
    CPU,
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


def inference_over(network: Network, options: Compile = Compile.NONE) -> sg.InferenceGraph:
    inference = sg.InferenceGraph([network.graph])
    inference.add_inputs({"x": network.x})
    inference.compile(CPU, options)
    return inference


# Creation and inspection


def test_creation_adopts_layers_and_tensors() -> None:
    network = Network()
    inference = sg.InferenceGraph([network.graph])
    assert inference.layers == [network.first, network.tanh, network.second]
    assert inference.source_tensors(network.tanh) == [network.hidden]
    assert inference.result_tensors(network.tanh) == [network.active]
    assert inference.result_tensors(sg.ActivationLayer.tanh()) == []
    assert (inference.device, inference.device_memory_size, inference.executables) == (None, 0, [])


def test_measured_example_writes_a_relu_into_the_named_output() -> None:
    x, graph, written, got = sg.Tensor((2, 2)), sg.Graph(), np.full(4, 9, "f"), []
    y = graph.node(sg.ActivationLayer.relu(), x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({"y": y})
    inference.compile(CPU)
    data = sg.TensorData(np.array([-1, 2, -3, 4], np.float32))
    settings = {"outputs_data": {"y": sg.TensorData(written)}, "options": Run.SYNCHRONOUS}
    inference.execute({"x": data}, **settings, completion=lambda *given: got.append(given))
    assert written.tolist() == [0, 2, 0, 4]
    assert [(tensor.label, error) for tensor, error, _ in got] == [(y.label, None)]
    assert got[0][0].tensor_id == y.tensor_id and np.array_equal(got[0][0], y)
    assert inference.device_memory_size == 16  # the result


def test_several_graphs_and_own_nodes_run_in_order() -> None:
    x, before, after, first, second = sg.Tensor((BATCH, 3)), sg.Graph(), sg.Graph(), dense(3, 5, 10), dense(5, 2, 20)
    hidden = after.node(sg.ActivationLayer.tanh(), before.node(first, x))
    inference = sg.InferenceGraph([before, after])
    inference.node(second, hidden)
    inference.add_inputs({"x": x})
    inference.compile(CPU)
    parameters = leaves([first.weights, first.biases, second.weights, second.biases])
    assert_close([inference.execute({"x": X}).result], [predict(parameters)])
    assert len(inference.layers) == 3 and after.layers == inference.layers[1:2]


def test_compile_needs_layers_and_a_device_and_may_be_called_again() -> None:
    with pytest.raises(sg.StateError, match="no layers"):
        sg.InferenceGraph().compile(CPU)
    network = Network()
    inference = sg.InferenceGraph([network.graph])
    with pytest.raises(sg.DeviceError, match="no device"):
        inference.compile()
    with pytest.raises(sg.StateError, match="not compiled"):
        inference.execute({"x": X})
    inference.compile(CPU)
    inference.add_inputs({"x": network.x})
    expected = predict(leaves(network.parameters))
    assert_close([inference.execute({"x": X}).result], [expected])
    network.graph.node(sg.ActivationLayer.relu(), network.out)
    inference.compile()
    assert inference.device == CPU
    assert_close([inference.execute({"x": X}).result], [expected.relu()])


# Parameters shared with training


@pytest.mark.parametrize("training_first", [True, False], ids=["training compiled first", "inference compiled first"])
def test_inference_sees_every_update_without_a_copy(training_first: bool) -> None:
    network = Network(mse(), sgd())
    if training_first:
        network.compiled()
    inference = inference_over(network)
    if not training_first:
        network.compiled()
    parameters = leaves(network.parameters)
    for _ in range(3):
        assert_close([inference.execute({"x": X}).result], [predict(parameters)], 1e-5)
        loss = F.mse_loss(predict(parameters), torch.tensor(Y))
        assert network.training.execute({"x": X}, {"y": Y}).loss == pytest.approx(loss.item(), rel=1e-5)
        parameters = [p.detach().requires_grad_() for p in descended(loss, parameters)]
    assert_close([inference.execute({"x": X}).result], [predict(parameters)], 1e-5)


def test_inference_sees_weights_that_were_bound_by_hand() -> None:
    network = Network()
    inference = inference_over(network)
    weights = numbers(2, 5, seed=77)
    network.second.weights.bind_and_write_data(weights, CPU)
    parameters = leaves(network.parameters)
    parameters[2] = torch.tensor(weights)
    assert_close([inference.execute({"x": X}).result], [predict(parameters)])


def test_inference_between_forward_and_gradient_does_not_disturb_them() -> None:
    disturbed, plain = (Network(mse(), sgd()).compiled() for _ in range(2))
    inference = inference_over(disturbed)
    for network in (disturbed, plain):
        network.bind()
        network.training.execute_forward()
        if network is disturbed:
            inference.execute({"x": numbers(2, 3, seed=5)}, batch_size=2)
        network.training.execute_gradient()
        network.training.execute_optimizer_update()
    assert_close(disturbed.parameters, [parameter.numpy() for parameter in plain.parameters], tolerance=0)


def test_extra_softmax_is_seen_by_inference_and_not_by_training() -> None:
    network = Network(mse(), sgd()).compiled()
    inference, softmax = sg.InferenceGraph([network.graph]), sg.SoftmaxLayer.softmax()
    shares = inference.node(softmax, network.out)
    inference.add_inputs({"x": network.x})
    inference.add_outputs({"logits": network.out})
    inference.compile(CPU)
    logits, expected = np.zeros((BATCH, 2), "f"), predict(leaves(network.parameters))
    assert np.array_equal(inference.execute({"x": X}, outputs_data={"logits": logits}).result, shares)
    assert_close([shares, logits], [expected.softmax(1), expected])
    assert softmax not in network.training.layers and softmax not in network.graph.layers
    loss = F.mse_loss(expected, torch.tensor(Y))
    assert network.training.execute({"x": X}, {"y": Y}).loss == pytest.approx(loss.item(), rel=1e-6)


def test_layers_run_in_inference_mode_and_keep_their_statistics() -> None:
    x, graph, normalization = sg.Tensor((BATCH, 3)), sg.Graph(), sg.BatchNormalizationLayer.create(3)
    mean, variance = numbers(3, seed=6), np.array([0.5, 1.0, 4.0], np.float32)
    normalization.mean.bind_and_write_data(mean.copy(), CPU)
    normalization.variance.bind_and_write_data(variance.copy(), CPU)
    graph.node(sg.DropoutLayer(0.9), graph.node(normalization, x))
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(CPU)
    for _ in range(2):
        assert_close([inference.execute({"x": X}).result], [(X - mean) / np.sqrt(variance + 1e-5)])
    assert_close([normalization.mean, normalization.variance], [mean, variance], tolerance=0)


# Executing


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_batch_size_takes_that_many_rows_and_is_compiled_once(rows: int) -> None:
    images, graph, layer = sg.Tensor.image(2, 2, 3, BATCH), sg.Graph(), dense(12, 2, 10)
    out = graph.node(layer, graph.reshape((BATCH, -1), images))
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"images": images})
    inference.add_outputs({"out": out})
    inference.compile(CPU)
    data, written = numbers(9, 3, 2, 2, seed=3), np.full((9, 2), 7, "f")
    expected = F.linear(torch.tensor(data).flatten(1), *leaves([layer.weights, layer.biases])).detach()
    inference.execute({"images": data}, batch_size=rows)
    compiled = list(inference.executables)
    found = inference.execute({"images": data}, batch_size=rows, outputs_data={"out": written}).result.numpy()
    assert inference.executables == compiled
    assert_close([found, written[:rows]], [expected[:rows]] * 2)
    assert (written[rows:] == 7).all()
    assert_close([inference.execute({"images": data}, batch_size=BATCH).result], [expected[:BATCH]])
    for declared in (0, None):
        with pytest.raises(sg.DataError, match="9 rows, but the call reads 4"):
            inference.execute({"images": data}, batch_size=declared)


def test_batch_size_never_cuts_an_input_that_is_no_batch() -> None:
    table, rows, graph = sg.Tensor((7, 3)), sg.Tensor((BATCH,), "int64"), sg.Graph()
    graph.gather(0, table, rows)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"table": table, "rows": rows})
    inference.compile(CPU)
    data, picked = numbers(7, 3, seed=3), np.array([0, 1, 0, 1])
    try:
        found = inference.execute({"table": data, "rows": picked}, batch_size=2).result.numpy()
    except sg.ArgumentError:
        return  # refused: nobody can tell which of the two is the batch
    assert_close([found], [data[picked[:2]]])


def test_add_outputs_before_and_after_compile_are_written_and_stay_readable() -> None:
    network = Network()
    inference = sg.InferenceGraph([network.graph])
    inference.add_inputs({"x": network.x})
    inference.add_outputs({"hidden": network.hidden})
    inference.compile(CPU)
    inference.add_outputs({"active": network.active})
    written = {"hidden": np.zeros((BATCH, 5), "f"), "active": np.zeros((BATCH, 5), "f")}
    inference.execute({"x": X}, outputs_data=written)
    hidden = F.linear(torch.tensor(X), *leaves(network.parameters[:2]))
    assert_close([*written.values(), network.hidden, network.active], [hidden, torch.tanh(hidden)] * 2)


@pytest.mark.parametrize(
    ("inputs", "labels", "outputs", "refusal"),
    [
        ({}, None, None, sg.DataError),
        ({"x": X[:2]}, None, None, sg.DataError),
        ({"z": X}, None, None, sg.UnknownNameError),
        ({"x": X}, {"y": Y}, None, sg.UnknownNameError),
        ({"x": X}, None, {"hidden": np.zeros((BATCH, 5), "f")}, sg.UnknownNameError),
        ({"x": X}, None, {"out": np.zeros(7, "f")}, sg.DataError),
    ],
    ids=["missing", "too short", "unknown input", "undeclared labels", "undeclared output", "too short output"],
)
def test_refused_call_never_calls_the_completion(
    inputs: dict, labels: dict | None, outputs: dict | None, refusal: type[Exception]
) -> None:
    network, got = Network(), []
    inference = inference_over(network)
    inference.add_outputs({"out": network.out})
    with pytest.raises(refusal):
        inference.execute(inputs, labels, outputs_data=outputs, completion=lambda *given: got.append(given))
    assert got == []


def test_add_outputs_refuses_what_no_layer_makes() -> None:
    inference = inference_over(Network())
    with pytest.raises(sg.UnknownNameError, match="stranger"):
        inference.add_outputs({"stranger": sg.Tensor((BATCH, 2))})


class Places(sg.Layer):
    """Whole numbers from real ones: whether they are in range shows only when they are used."""

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x.long()


def test_work_that_fails_reaches_the_completion() -> None:
    table, rows, graph, got = sg.Tensor((3, 2)), sg.Tensor((2,)), sg.Graph(), []
    graph.gather(0, table, graph.node(Places(), rows))
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"table": table, "rows": rows})
    inference.compile(CPU)
    data = np.arange(6, dtype=np.float32).reshape(3, 2)
    bad = inference.execute({"table": data, "rows": [0.0, 5.0]}, completion=lambda *given: got.append(given))
    ((tensor, error, _),) = got
    assert tensor is None and isinstance(error, sg.ExecutionError) and bad.error is error
    with pytest.raises(sg.ExecutionError):
        bad.wait()
    assert inference.execute({"table": data, "rows": [2.0, 0.0]}).result.numpy().tolist() == [[4, 5], [0, 1]]


@pytest.mark.parametrize("options", [Run.NONE, Run.PROFILING, Run.SYNCHRONOUS | Run.PROFILING])
def test_awaiting_and_completion_give_result_and_time(options: Run) -> None:
    network, got = Network(), []
    inference = inference_over(network)

    async def main() -> sg.Execution:
        return await inference.execute({"x": X}, options=options, completion=lambda *given: got.append(given))

    execution = asyncio.run(main())
    assert_close([execution.result], [predict(leaves(network.parameters))])
    assert execution.loss is None and execution.done
    assert (execution.time > 0) if Run.PROFILING in options else (execution.time is None)
    assert got == [(execution.result, None, execution.time or 0.0)] and np.array_equal(got[0][0], network.out)


def test_per_layer_profiling_tells_the_layers_of_the_graph() -> None:
    network = Network()
    execution = inference_over(network).execute({"x": X}, options=Run.PER_LAYER_PROFILING)
    assert {row[:2] for row in execution.profile.rows} == {(name, "forward") for name in ("first", "tanh", "second")}
    assert_close([execution.result], [predict(leaves(network.parameters))])


def test_skip_writing_input_data_uses_what_was_written_last() -> None:
    network, other = Network(), numbers(BATCH, 3, seed=8)
    inference, parameters, skip = (
        inference_over(network),
        leaves(network.parameters),
        Run.SKIP_WRITING_INPUT_DATA_TO_DEVICE,
    )
    inference.execute({"x": X})
    assert_close([inference.execute({"x": other}, options=skip).result], [predict(parameters)])
    inference.bind_and_write_data({"x": other}, {"x": network.x}, CPU)
    assert_close([inference.execute({}, options=skip).result], [predict(parameters, other)])


def test_debug_layers_keeps_results_of_debugged_layers_readable() -> None:
    network = Network()
    network.first.is_debugging_enabled = True
    inference_over(network, Compile.DEBUG_LAYERS).execute({"x": X})
    assert_close([network.hidden.data], [F.linear(torch.tensor(X), *leaves(network.parameters[:2]))])


def test_link_hands_results_to_the_next_graph() -> None:
    x, before, after, layer = sg.Tensor((BATCH, 3)), sg.Graph(), sg.Graph(), dense(3, 5, 10)
    middle = before.node(layer, x)
    after.node(sg.ActivationLayer.tanh(), middle)
    one, two = sg.InferenceGraph([before]), sg.InferenceGraph([after])
    with pytest.raises(sg.StateError, match="not compiled"):
        one.link([two])
    one.compile(CPU, Compile.LINK_GRAPHS)
    two.compile(CPU)
    with pytest.raises(sg.StateError, match="LINK_GRAPHS"):
        one.link([two])
    two.compile(CPU, Compile.LINK_GRAPHS)
    one.link([two])
    one.add_inputs({"x": x})
    for rows in (BATCH, 2):
        one.execute({"x": X}, batch_size=rows)
        expected = torch.tanh(F.linear(torch.tensor(X[:rows]), *leaves([layer.weights, layer.biases])))
        assert_close([two.execute({}, batch_size=rows).result], [expected])
    assert one.layers == [layer]


# Evaluation by a loss node


def evaluation(network: Network, loss: sg.LossLayer, weights: sg.Tensor | None = None) -> sg.InferenceGraph:
    inference = sg.InferenceGraph([network.graph])
    inference.node(loss, network.out, loss_labels=[network.y, *([weights] if weights else [])])
    inference.add_inputs({"x": network.x}, {"y": network.y}, {"w": weights} if weights else None)
    return inference


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_loss_node_evaluates_with_labels_and_weights(weighted: bool, rows: int | None) -> None:
    network, weights = Network(), sg.Tensor((BATCH, 1)) if weighted else None
    inference = evaluation(network, mse(), weights)
    inference.compile(CPU)
    factors = np.array([0.5, 2, 0, 1], np.float32)
    data: list[Any] = [{"x": X}, {"y": Y}, *([{"w": factors}] if weighted else [])]
    squares = (predict(leaves(network.parameters)) - torch.tensor(Y)) ** 2
    expected = (squares * torch.tensor(factors)[:, None] if weighted else squares)[:rows].mean()
    execution = inference.execute(*data, batch_size=rows)
    assert [execution.loss, execution.result.numpy().item()] == pytest.approx([expected.item()] * 2, rel=1e-6)


def test_loss_node_without_reduction_gives_one_loss_for_each_element() -> None:
    network = Network()
    inference = evaluation(network, mse(sg.ReductionType.NONE))
    inference.compile(CPU)
    expected = (predict(leaves(network.parameters)) - torch.tensor(Y)) ** 2
    assert_close([inference.execute({"x": X}, {"y": Y}).loss], [expected])


def test_loss_node_before_the_last_layer_is_the_loss_and_the_last_layer_the_result() -> None:
    network = Network()
    inference = evaluation(network, mse())
    shares = inference.node(sg.SoftmaxLayer.softmax(), network.out)
    inference.compile(CPU)
    out = predict(leaves(network.parameters))
    execution = inference.execute({"x": X}, {"y": Y})
    assert execution.loss == pytest.approx(F.mse_loss(out, torch.tensor(Y)).item(), rel=1e-6)
    assert np.array_equal(execution.result, shares)
    assert_close([shares], [out.softmax(1)])


def test_compiling_gives_every_tensor_its_device() -> None:
    x, graph = sg.Tensor((2, 3)), sg.Graph()
    y = graph.node(sg.ActivationLayer.relu(), x)
    inference = sg.InferenceGraph([graph])
    assert x.device is y.device is None and inference.loss_labels == {}
    inference.compile(sg.Device.cpu())
    assert x.device == y.device == inference.device and inference.inputs == {x.label: x}
    labels = sg.Tensor((2, 3))
    inference.add_inputs({"x": x}, loss_labels={"y": labels})
    assert inference.loss_labels == {"y": labels}


def test_a_completion_is_called_at_once_where_the_caller_has_waited() -> None:
    class Event:
        """A device's event that has happened."""

        def synchronize(self) -> None: ...

    threads: list[int] = []
    called = threading.Event()

    def completion(*_: object) -> None:
        threads.append(threading.get_ident())
        called.set()

    execution = sg.Execution(sg.Device.cpu(), timed=False)
    execution._events = [Event(), Event()]  # type: ignore[list-item]
    execution.announce(completion, waited=True)
    assert threads == [threading.get_ident()]
    called.clear()
    execution.announce(completion, waited=False)
    assert called.wait(30) and threads[1] != threads[0]
