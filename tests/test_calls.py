"""A call owns its data and its results, whichever thread makes it and whatever comes after it."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.system.interrupts import Uninterrupted

CPU = sg.Device.cpu()


def doubling(rows: int = 4) -> tuple[sg.InferenceGraph, sg.Tensor]:
    x = sg.Tensor((rows, 3))
    graph = sg.Graph()
    y = graph.node(sg.ArithmeticLayer.add(), x, x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(CPU)
    return inference, y


def full(number: float, rows: int = 4) -> dict[str, np.ndarray]:
    return {"x": np.full((rows, 3), number, np.float32)}


def test_each_execution_keeps_its_own_result() -> None:
    inference, y = doubling()
    results = [inference.execute(full(i)).result for i in range(5)]
    kept = [inference.execute(full(i)) for i in range(5)]
    assert [one.numpy()[0, 0] for one in results] == [one.result.numpy()[0, 0] for one in kept] == [0, 2, 4, 6, 8]
    assert y.numpy()[0, 0] == 8 and (results[0].label, results[0].tensor_id) == (y.label, y.tensor_id)
    assert inference.execute(full(1, 2), batch_size=2).result.shape == (2, 3)
    x = sg.Tensor((4, 3))
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(3, 1), x)
    scores = sg.InferenceGraph([graph])
    scores.compile(CPU)
    assert scores.execute({x.label: np.ones((1, 3), np.float32)}, batch_size=1).result.shape == (1, 1)
    assert kept[0].result is kept[0].result


def test_results_and_losses_of_a_step_are_its_own() -> None:
    x, labels = sg.Tensor((2, 1)), sg.Tensor((2, 1))
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(1, 1), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": labels})
    training.compile(CPU)
    data = {"x": np.ones((2, 1), np.float32)}, {"y": np.full((2, 1), 3, np.float32)}
    steps = [training.execute(*data) for _ in range(4)]
    losses = [step.loss for step in steps]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4
    assert [float(step.result.numpy()[0]) for step in steps] == losses


def in_threads(count: int, work: Callable[[int], None]) -> None:
    problems: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not problems, problems[0]


def test_threads_of_one_inference_graph_get_their_own_answers() -> None:
    inference, _ = doubling()
    wrong: list[tuple[float, float]] = []

    def ask(number: int) -> None:
        for i in range(300):
            asked, rows = number * 1000 + i, (1, 2, 4)[i % 3]
            found = inference.execute(full(asked, rows), batch_size=rows).result.numpy()
            if not (found == 2 * asked).all() or len(found) != rows:
                wrong.append((asked, found.ravel()[0] / 2))

    in_threads(4, ask)
    assert not wrong


def test_threads_of_one_training_graph_get_their_own_losses() -> None:
    """Nothing is learned (a rate of 0), so that the loss tells which data a step has seen."""
    x, labels = sg.Tensor((4, 3)), sg.Tensor((4, 3))
    graph = sg.Graph()
    layer = sg.FullyConnectedLayer.create(3, 3, biases=False)
    layer.weights.data[:] = np.eye(3)
    graph.node(layer, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.0))
    training.add_inputs({"x": x}, {"y": labels})
    training.compile(CPU)
    wrong: list[tuple[int, float]] = []

    def train(number: int) -> None:
        for i in range(300):
            asked = number + i % 7
            loss = training.execute(full(asked), {"y": np.zeros((4, 3), np.float32)}).loss
            if loss != asked**2:
                wrong.append((asked, loss))

    in_threads(3, train)
    assert not wrong and training.optimizer.time_step == 901


def test_a_completion_sees_the_result_of_its_own_call() -> None:
    inference, _ = doubling()
    seen: list[tuple[float, Any]] = []
    for i in range(4):
        inference.execute(full(i), completion=lambda result, error, seconds, i=i: seen.append((i, result)))
    assert [(i, result.numpy()[0, 0]) for i, result in seen] == [(0, 0), (1, 2), (2, 4), (3, 6)]


def test_memory_is_released_when_nothing_reads_it() -> None:
    freed: list[str] = []
    memory = np.arange(6, dtype=np.float32)
    tensor = sg.Tensor((2, 3), data=sg.TensorData(memory, deallocator=lambda: freed.append("free")))
    gc.collect()
    assert not freed and tensor.data.sum() == 15  # once freed while the tensor still read it
    twin, view = tensor.copy(), tensor.numpy()[1]
    del tensor
    gc.collect()
    assert not freed and view.sum() == 12
    del twin, view
    gc.collect()
    assert freed == ["free"]


@pytest.mark.parametrize("moment", ["training", "inference"])
def test_an_index_out_of_range_is_refused_and_the_next_call_works(moment: str) -> None:
    x, y = sg.Tensor((4, 3)), sg.Tensor((4,), "int64")
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(3, 5), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    options = sg.ExecutionOptions.FORWARD_FOR_INFERENCE if moment == "inference" else sg.ExecutionOptions.NONE
    right = {"y": np.array([0, 1, 2, 4])}
    before = training.execute(full(1), right, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE).loss
    called: list[Any] = []
    for bad in (5, -1, -100):
        labels = {"y": np.array([0, 1, bad, 2])}
        with pytest.raises(sg.DataError, match=f"row 2 holds the class index {bad}, but Loss takes 0 to 4"):
            training.execute(full(1), labels, options=options, completion=lambda *told: called.append(told))
    assert not called and training.optimizer.time_step == 1
    assert training.execute(full(1), right, options=options).loss == before


def test_indices_are_found_behind_layers_that_only_move_them() -> None:
    words = sg.Tensor((2, 6), "int32")
    graph = sg.Graph()
    parts = graph.split(graph.reshape((2, 2, 3), words), 2, dimension=1)
    graph.node(sg.EmbeddingLayer.create(7, 4), parts[1])
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"words": words})
    inference.compile(CPU)
    right = np.full((2, 6), 6, np.int32)
    inference.execute({"words": right})
    right[1, 4] = 7
    with pytest.raises(sg.DataError, match="row 1, position 4 holds the index 7, but Embedding takes 0 to 6"):
        inference.execute({"words": right})


def test_indices_of_a_gather_are_not_those_of_what_it_gathers() -> None:
    table, places = sg.Tensor((100,), "int64"), sg.Tensor((8,), "int64")
    graph = sg.Graph()
    graph.node(sg.EmbeddingLayer.create(5, 3), graph.gather(0, table, places))
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"table": table, "places": places})
    inference.compile(CPU)
    limits = inference.compilation.step(100, False).index_limits
    assert {tensor: limit.extent for tensor, limit in limits.items() if tensor in (table, places)} == {
        table: 5,
        places: 100,
    }


def test_a_tensor_that_is_thawed_after_the_gradient_pass_is_named() -> None:
    x, y = sg.Tensor((2, 3)), sg.Tensor((2, 3))
    graph = sg.Graph()
    layer = sg.FullyConnectedLayer.create(3, 3)
    graph.node(layer, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    layer.weights.is_updatable = False
    training.compile(CPU)
    data = np.ones((2, 3), np.float32)
    training.bind_and_write_data({"x": data, "y": data}, {"x": x, "y": y}, CPU)
    training.execute_forward()
    training.execute_gradient()
    layer.weights.is_updatable = True
    with pytest.raises(sg.StateError, match="has no gradient: it was not trained when the last gradient pass ran"):
        training.execute_optimizer_update()
    training.execute_forward()
    training.execute_gradient()
    training.execute_optimizer_update()


# Interrupts

LOOP = """
import signal, sys, threading, time, os
import numpy as np, torch
import stepgraph as sg

x, y = sg.Tensor((64, 32)), sg.Tensor((64, 8))
graph = sg.Graph()
hidden = x
for width in (48, 48):
    linear = sg.FullyConnectedLayer.create(hidden.shape[1], width)
    hidden = graph.node(sg.ActivationLayer.tanh(), graph.node(linear, hidden))
graph.node(sg.FullyConnectedLayer.create(48, 8), graph.node(sg.DropoutLayer(0.3), hidden))
training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=1e-3))
training.add_inputs({"x": x}, {"y": y})
training.compile(sg.Device.cpu())
data = np.random.default_rng(0).standard_normal((64, 40)).astype(np.float32)
batch = {"x": data[:, :32]}, {"y": data[:, 32:]}
state = lambda: [array.clone() for array in training.session.arrays().values()]
training.execute(*batch)
training.save(sys.argv[1] + "/start")
states = [state()]
for _ in range(40):
    training.execute(*batch)
    states.append(state())
waits = np.random.default_rng(int(sys.argv[2])).uniform(0, 0.01, 50)
wrong = came = 0
for wait in waits:
    training.restore(sys.argv[1] + "/start")
    try:
        threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT)).start()
        for _ in range(40):
            training.execute(*batch)
        time.sleep(0.1)
    except KeyboardInterrupt:
        came += 1
    now, count = state(), training.optimizer.time_step - 2
    wrong += not all(map(torch.equal, now, states[count]))
print(came, wrong)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no signals")
def test_an_interrupt_comes_between_two_steps(tmp_path: Any) -> None:
    """Whenever Ctrl-C comes, weights, buffers, random stream and step count are those of one step."""
    program = tmp_path / "loop.py"
    program.write_text(textwrap.dedent(LOOP))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), str(tmp_path), "3"]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=environment)
    came, wrong = map(int, found.stdout.split())
    assert (came, wrong) == (50, 0), found.stderr


def test_a_second_interrupt_goes_through_at_once() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("first")
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
        reached.append("second")
    assert reached == ["first"]


def test_an_interrupt_waits_for_the_end_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted(), Uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("end")
    assert reached == ["end"] and signal.getsignal(signal.SIGINT) is before
    with Uninterrupted():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_thread_beside_the_main_one_needs_nothing() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work(_: int) -> None:
        with Uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    in_threads(1, work)
    assert seen == [before] and signal.getsignal(signal.SIGINT) is before


def test_binding_writes_into_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With data that is on the device already, as a GPU's is; here the device is one that only copies."""
    place = sg.Device(sg.DeviceType.GPU, (torch.device("meta"),))
    first, second = (torch.empty(3, device="meta") for _ in range(2))
    tensor = sg.Tensor((3,))
    written: list[Any] = []
    monkeypatch.setattr("stepgraph.tensors.tensor._copied", lambda target, source: written.append(target) or target)
    tensor.bind(first, place)
    assert tensor.torch() is not first
    own = tensor.torch()
    tensor.bind(second, place)
    assert tensor.torch() is own and len(written) == 1 and written[0] is own
    tensor.hold(first)
    tensor.bind(second, place)
    assert tensor.torch() is not first and tensor.torch() is not second


def test_data_like_that_of_the_last_call_is_read_as_it_is_and_other_data_is_looked_at() -> None:
    graph, _ = doubling()
    usual = torch.arange(12.0).reshape(4, 3)

    def doubled(data: Any) -> Any:
        found = graph.execute({"x": data}).result
        assert found is not None
        return found.numpy().copy()

    for data in (usual, usual.clone(), usual.clone().requires_grad_(), usual.numpy(), usual):
        np.testing.assert_array_equal(doubled(data), 2 * usual.numpy())
    across = usual.T.contiguous().T
    np.testing.assert_array_equal(doubled(across), 2 * usual.numpy())
    with torch.inference_mode():
        np.testing.assert_array_equal(doubled(usual.clone()), 2 * usual.numpy())
    with pytest.raises(sg.DataTypeError):
        graph.execute({"x": usual.double()})
    with pytest.raises(sg.StepgraphError):
        graph.execute({"x": torch.cat([usual, usual])})
    with pytest.raises(sg.DataTypeError):
        graph.execute({"x": usual.to_sparse()})
    with pytest.raises(sg.DataError):
        graph.execute({})
    np.testing.assert_array_equal(doubled(usual), 2 * usual.numpy())
