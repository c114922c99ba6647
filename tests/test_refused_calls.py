"""A refused call changes nothing: not the graph, not its tensors, not the random numbers that come later."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.runtime import executable as executables
from stepgraph.tensors.tensor import Tensor

CPU = sg.Device.cpu()
ROWS = 8
X = np.random.default_rng(1).standard_normal((ROWS, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)
LINK = sg.GraphCompilationOptions.LINK_GRAPHS


class Network:
    """A small regression with Adam and dropout, always from the same numbers."""

    def __init__(self, options: sg.GraphCompilationOptions = sg.GraphCompilationOptions.NONE, **settings: Any) -> None:
        sg.set_seed(9)
        self.x, self.y = sg.Tensor((ROWS, 4)), sg.Tensor((ROWS, 1))
        self.graph = sg.Graph()
        self.first = sg.FullyConnectedLayer.create(4, 16)
        self.hidden = self.graph.node(sg.ActivationLayer.tanh(), self.graph.node(self.first, self.x))
        self.dropped = self.graph.node(sg.DropoutLayer(0.25), self.hidden)
        self.graph.node(sg.FullyConnectedLayer.create(16, 1), self.dropped)
        self.optimizer = sg.AdamOptimizer(learning_rate=0.02)
        self.training = sg.TrainingGraph([self.graph], sg.LossLayer.mean_squared_error(), self.optimizer)
        self.training.add_inputs({"x": self.x}, {"y": self.y})
        self.settings = settings
        self.options = options

    def compiled(self) -> "Network":
        self.training.compile(CPU, self.options, **self.settings)
        return self

    def losses(self, count: int = 4) -> list[Any]:
        return [self.training.execute({"x": X}, {"y": Y}).loss for _ in range(count)]


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise RuntimeError("not enough memory")


REFUSED: dict[str, Callable[[Network], Any]] = {
    "memory_limit": lambda n: n.training.compile(CPU, memory_limit=100),
    "unknown input": lambda n: n.training.execute({"z": X}),
    "short data": lambda n: n.training.execute({"x": X[:2]}, {"y": Y}),
    "short labels": lambda n: n.training.execute({"x": X}, {"y": Y[:2]}),
    "wrong output": lambda n: n.training.execute({"x": X}, {"y": Y}, outputs_data={"z": X}),
    "no function": lambda n: n.training.execute({"x": X}, {"y": Y}, completion=3),  # type: ignore[arg-type]
    "a GPU that is not there": lambda n: n.training.compile(None),
    "no device": lambda n: n.training.compile("warp"),  # type: ignore[arg-type]
    "wrong options": lambda n: n.training.compile(CPU, 3),  # type: ignore[arg-type]
    "wrong compute type": lambda n: n.training.compile(CPU, compute_type="int8"),
    "constant without data": lambda n: n.training.compile(CPU, input_tensors={"x": n.x}),
    "unlinkable": lambda n: n.training.link([Network().compiled().training]),
    "a user gradient of a stranger": lambda n: n.training.allocate_user_gradient(sg.Tensor((2,))),
    "no optimizer": lambda n: n.training.compile_optimizer(3),  # type: ignore[arg-type]
    "stop at nothing": lambda n: n.training.stop_gradient([3]),  # type: ignore[list-item]
    "outputs of others": lambda n: n.training.add_outputs({"z": sg.Tensor((2,))}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_between_two_steps_leaves_no_trace(name: str) -> None:
    plain, tried = Network().compiled(), Network().compiled()
    assert tried.losses() == plain.losses()
    plan, size = tried.training.memory_plan, tried.training.device_memory_size
    with pytest.raises(sg.StepgraphError):
        REFUSED[name](tried)
    assert tried.training.memory_plan == plan and tried.training.device_memory_size == size
    assert tried.training.device == CPU and tried.training.linked_graphs == (tried.training,)
    assert tried.losses() == plain.losses()
    assert tried.optimizer.time_step == plain.optimizer.time_step


def test_a_refused_first_compile_draws_no_seed() -> None:
    losses = []
    for limits in ([], [100, 200]):
        network = Network()
        for limit in limits:
            with pytest.raises(sg.MemoryLimitError):
                network.training.compile(CPU, memory_limit=limit)
        losses.append(network.compiled().losses())
    assert losses[0] == losses[1]


def test_a_compile_refused_for_another_device_moves_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for a GPU: a place that every tensor could be moved to, if anything moved before all was decided."""
    network = Network().compiled()
    before, moved = network.losses(), []
    monkeypatch.setattr(Tensor, "settle", lambda *arguments: moved.append(arguments))
    elsewhere = sg.Device(sg.DeviceType.GPU, (torch.device("meta"),))
    with pytest.raises(sg.MemoryLimitError):
        network.training.compile(elsewhere, memory_limit=100)
    monkeypatch.undo()
    assert not moved and network.first.device_type is sg.DeviceType.CPU and network.training.device == CPU
    plain = Network().compiled()
    assert before + network.losses() == plain.losses(8)
    network.training.compile(CPU)
    assert network.losses(1) == plain.losses(1)


def test_memory_that_runs_out_while_tensors_move_leaves_them_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    network, plain = Network().compiled(), Network().compiled()
    assert network.losses() == plain.losses()
    real = Tensor.on

    def short(self: Tensor, device: sg.Device) -> Any:
        return out_of_memory() if self.shape == (1, 16) else real(self, device)

    monkeypatch.setattr(Tensor, "on", short)
    with pytest.raises(RuntimeError, match="not enough memory"):
        network.training.compile(CPU, sg.GraphCompilationOptions.CHECK_NUMERICS)
    monkeypatch.undo()
    assert network.losses() == plain.losses()


def linked(limit: int | None = None) -> tuple[Network, sg.TrainingGraph, Tensor]:
    """Two graphs, the second reads what the first makes; only the second has a limit."""
    first = Network(LINK).compiled()
    graph = sg.Graph()
    result = first.training.nodes[-1].results[0]
    graph.node(sg.FullyConnectedLayer.create(1, 1), result)
    second = sg.TrainingGraph([graph], None, sg.SGDOptimizer(learning_rate=0.1))
    second.compile(CPU, LINK, memory_limit=limit)
    return first, second, result


def test_a_link_that_fails_leaves_both_graphs_unlinked(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = linked()
    plain = Network(LINK).compiled()
    assert first.losses() == plain.losses()
    made = executables.Executable.__init__
    count = iter(range(100))

    def failing(self: Any, *arguments: Any) -> None:
        if next(count) == 1:  # the second graph's
            raise RuntimeError("no memory for it")
        made(self, *arguments)

    monkeypatch.setattr(executables.Executable, "__init__", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        first.training.link([second])
    monkeypatch.undo()
    assert first.training.linked_graphs == (first.training,) and second.linked_graphs == (second,)
    assert first.losses() == plain.losses()
    first.training.link([second])
    assert first.training.linked_graphs == second.linked_graphs == (first.training, second)


def test_devices_that_are_the_same_place_are_equal_and_keep_what_was_learned() -> None:
    named = sg.Device.of("cpu")
    assert named == CPU and hash(named) == hash(CPU)
    if sg.Device.gpu() is None:
        assert sg.Device.any() == CPU
        plain, network = Network().compiled(), Network()
        network.training.compile(sg.Device.any())
        assert network.losses() == plain.losses()
        network.training.compile(CPU)  # once forgot Adam's buffers and the random stream, not the step count
        plain.training.compile(CPU)
        assert network.losses() == plain.losses()


def test_a_device_that_is_not_there_is_refused_and_not_taken_for_the_one_of_before() -> None:
    network = Network().compiled()
    with pytest.raises(sg.DeviceError, match="the device is None"):
        network.training.compile(None)
    network.training.compile()
    inference = sg.InferenceGraph([network.graph])
    for _ in range(2):
        with pytest.raises(sg.DeviceError, match="the device is None"):
            inference.compile(None)
        inference.compile(CPU)


def test_compilations_in_threads_are_whole_or_taken_back() -> None:
    """Two threads whose compilations are refused, and one that trains meanwhile."""
    network, plain = Network().compiled(), Network().compiled()
    losses: list[Any] = []

    def refused() -> None:
        for _ in range(3):
            with pytest.raises(sg.MemoryLimitError):
                network.training.compile(CPU, sg.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS, memory_limit=1)

    threads = [threading.Thread(target=refused), threading.Thread(target=refused)]
    threads.append(threading.Thread(target=lambda: losses.extend(network.losses(6))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert losses + network.losses(2) == plain.losses(8)


def test_a_tensor_of_a_frozen_and_a_trained_layer_is_one_parameter() -> None:
    """Its gradient is the sum over both uses, whichever gradients are computed besides."""
    learned = []
    for options in (sg.GraphCompilationOptions.NONE, sg.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS):
        x, y = sg.Tensor((1, 2)), sg.Tensor((1, 2))
        graph = sg.Graph()
        first = sg.FullyConnectedLayer.create(2, 2, biases=False)
        first.weights.data[:] = [[1.0, 0.5], [0.25, 1.0]]
        second = dataclasses.replace(first, label="frozen")
        graph.node(second, graph.node(first, x), disable_update=True)
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
        training.add_inputs({"x": x}, {"y": y})
        training.compile(CPU, options)
        training.execute({"x": [[1.0, 2.0]]}, {"y": [[0.0, 0.0]]})
        learned.append(first.weights.data.copy())
    weights = torch.tensor([[1.0, 0.5], [0.25, 1.0]], requires_grad=True)
    (torch.tensor([[1.0, 2.0]]) @ weights.T @ weights.T).square().mean().backward()
    np.testing.assert_allclose(learned[0], (weights - 0.1 * weights.grad).detach(), rtol=1e-5)
    assert np.array_equal(learned[0], learned[1])


def test_linking_again_joins_all() -> None:
    """A graph that is linked with one of them stays linked: it would train nothing alone."""
    first, second, result = linked()
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(1, 1), result)
    third = sg.TrainingGraph([graph], None, sg.SGDOptimizer(learning_rate=0.1))
    third.compile(CPU, LINK)
    first.training.link([second])
    first.training.link([third])
    group = (first.training, second, third)
    assert all(one.linked_graphs == group for one in group)


def test_a_step_that_updates_nothing_is_not_counted() -> None:
    network = Network()
    for layer in network.graph.layers:
        for tensor in layer.parameters.values():
            tensor.is_updatable = False
    network.compiled().losses(3)
    assert network.optimizer.time_step == 1
    network.first.weights.is_updatable = True
    network.losses(2)
    assert network.optimizer.time_step == 3 == network.training.progress().time_step


def test_freezing_between_two_passes_goes_on_after_the_first() -> None:
    networks = Network().compiled(), Network().compiled()
    for network, freezes in zip(networks, (False, True), strict=True):
        network.training.bind_and_write_data({"x": X, "y": Y}, {"x": network.x, "y": network.y}, CPU)
        network.training.execute_forward()
        network.first.weights.is_updatable = not freezes
        network.training.execute_gradient()
        network.training.execute_optimizer_update()
    trained, frozen = (network.first for network in networks)
    assert np.array_equal(trained.biases.data, frozen.biases.data)
    assert not np.array_equal(trained.weights.data, frozen.weights.data)


def test_what_the_limit_refuses_names_the_call() -> None:
    free = Network(memory_limit=2**30).compiled()  # planned like the other: without an arena
    network = Network(memory_limit=free.training.memory_plan.total).compiled()
    with pytest.raises(sg.MemoryLimitError, match=r"add_outputs: with these outputs the step needs"):
        network.training.add_outputs({"hidden": network.hidden, "dropped": network.dropped})
    rows = 400
    data = {"x": np.ones((rows, 4), np.float32)}, {"y": np.ones((rows, 1), np.float32)}
    options = sg.ExecutionOptions.FORWARD_FOR_INFERENCE
    with pytest.raises(sg.MemoryLimitError, match=r"execute \(batch_size=400\): 'evaluation' needs") as refused:
        network.training.execute(*data, batch_size=rows, options=options)
    assert "use fewer rows" in str(refused.value)
    with pytest.raises(sg.MemoryLimitError, match="check_numerics"):
        network.training.check_numerics(*data, batch_size=rows)


@pytest.mark.parametrize("call", REFUSED)
def test_a_refused_call_replaces_nothing(call: str) -> None:
    """Declaration, compilation and session are swapped at one moment, or stay the objects they were."""
    network = Network().compiled()

    def live() -> tuple[Any, ...]:
        training = network.training
        return training.session, training.compilation, training.declaration, training.linked_graphs

    before = live()
    with pytest.raises(sg.StepgraphError):
        REFUSED[call](network)
    assert before == live()
