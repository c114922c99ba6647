"""Tiny steps in PyTorch's interpreter: the same bits and errors as from Python, and what it is not given."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from stepgraph.compiler.program import set_fake
from stepgraph.runtime import interpreted
from stepgraph.system import torch_private

aten = torch.ops.aten
LABELS = {"y": np.array([0, 2, 1])}


def _layers(kind: str, graph: sg.Graph, x: sg.Tensor) -> sg.Tensor:
    if kind == "images":
        image = graph.reshape((3, 1, 4, 4), x)
        z = graph.node(sg.ConvolutionLayer.create(1, 2, 3), image)
        z = graph.node(sg.ActivationLayer.relu(), graph.node(sg.BatchNormalizationLayer.create(2), z))
        return graph.reshape((3, -1), graph.node(sg.PoolingLayer.max(2), z))
    if kind == "dropout":
        return graph.node(sg.DropoutLayer(0.5), graph.node(sg.ActivationLayer.gelu(), x))
    hidden = graph.node(sg.FullyConnectedLayer.create(16, 5), x)
    return graph.node(sg.ActivationLayer.tanh() if kind == "tanh" else sg.ActivationLayer.relu(), hidden)


def _training(kind: str, optimizer: sg.Optimizer) -> sg.TrainingGraph:
    sg.set_seed(3)
    x, y = sg.Tensor((3, 16)), sg.Tensor((3,), "int64")
    graph = sg.Graph()
    z = _layers(kind, graph, x)
    graph.node(sg.FullyConnectedLayer.create(z.shape[1], 4), z)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), optimizer)
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", fuse=False)
    return training


def _data(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1 + step, 48).reshape(3, 16)}


def _trained(kind: str, optimizer: sg.Optimizer) -> list[Any]:
    training = _training(kind, optimizer)
    losses = [training.execute(_data(step), LABELS).loss for step in range(5)]
    arrays = [t.numpy() for node in training.nodes for t in node.layer.parameters.values()]
    return [*losses, *(array.tolist() for array in arrays)]


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: sg.AdamOptimizer(learning_rate=0.1),
        lambda: sg.SGDOptimizer(learning_rate=0.1, momentum_scale=0.9),
        lambda: sg.RMSPropOptimizer(learning_rate=0.1),
    ],
    ids=["adam", "sgd", "rmsprop"],
)
@pytest.mark.parametrize("kind", ["relu", "tanh", "dropout", "images"])
def test_steps_train_as_from_python(
    kind: str, optimizer: Callable[[], sg.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    interpret = torch_private.interpreted
    monkeypatch.setattr(torch_private, "interpreted", lambda text: texts.append(text) or interpret(text))
    found = _trained(kind, optimizer())
    assert texts
    monkeypatch.setattr(interpreted, "LEAST", 10_000)
    texts.clear()
    assert _trained(kind, optimizer()) == found
    assert not texts


def test_an_error_names_the_layer_and_changes_nothing() -> None:
    training = _training("relu", sg.AdamOptimizer(learning_rate=0.1))
    for step in range(3):
        training.execute(_data(step), LABELS)
    before = [t.numpy().copy() for node in training.nodes for t in node.layer.parameters.values()]
    with pytest.raises(sg.StepgraphError, match="y"):
        training.execute(_data(3), {"y": np.array([0, 9, 1])})
    after = [t.numpy() for node in training.nodes for t in node.layer.parameters.values()]
    assert all(map(np.array_equal, before, after))
    assert np.isfinite(training.execute(_data(3), LABELS).loss)


def test_what_fails_in_the_interpreter_fails_at_its_operator() -> None:
    text = "graph(%a : Tensor, %b : Tensor):\n  %c : Tensor = aten::mm(%a, %b)\n  return (%c)"
    called: list[Sequence[torch.Tensor]] = []

    def plain(*given: torch.Tensor) -> None:
        called.append(given)
        torch.mm(*given)

    function = interpreted.Interpreted(0, text, plain)
    a = torch.eye(2)
    for _ in range(2):
        assert torch.equal(function(a, a), a)
    assert not called
    with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied"):
        function(a, torch.eye(3))
    assert len(called) == 1


def _recorded(function: Callable[..., Any], *given: torch.Tensor) -> fx.Graph:
    """The operators of a function, with what they return."""
    graph = make_fx(function, tracing_mode="fake")(*given).graph
    for node in graph.nodes:
        set_fake(node, node.meta.get("val"))
    return graph


def _four(x: torch.Tensor) -> torch.Tensor:
    return x.exp().neg().tanh().abs()


def _names(graph: fx.Graph) -> list[str]:
    return [node.name.rpartition("_")[0] or node.name for node in graph.nodes if node.op == "call_function"]


def test_operators_that_follow_one_another_become_one_call() -> None:
    graph = _recorded(_four, torch.ones(3))
    assert interpreted.interpret(graph, lambda apart: lambda *given: None)
    assert _names(graph) == ["interpreted"]
    module = fx.GraphModule(torch.nn.Module(), graph)
    x = torch.linspace(-1, 1, 3)
    assert torch.equal(module(x), _four(x))


def test_several_results_leave_in_order() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        largest, place = x.max(1)
        return x.exp(), place, largest.neg(), x.sum([0, 1])

    graph = _recorded(function, torch.ones(3, 2))
    assert interpreted.interpret(graph, lambda apart: lambda *given: None)
    x = torch.arange(6.0).reshape(3, 2)
    found = fx.GraphModule(torch.nn.Module(), graph)(x)
    assert all(map(torch.equal, found, function(x)))


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.add_(1),  # of the caller: a step that fails changes nothing
        lambda x: x.to(torch.bfloat16),  # a type that is not among those the interpreter is told
        lambda x: x.clamp_max(float("inf")),
    ],
    ids=["writes", "type", "infinity"],
)
def test_what_is_not_translated_stays_between(between: Callable[[torch.Tensor], torch.Tensor]) -> None:
    graph = _recorded(lambda x: (between(x), _four(x)), torch.ones(3))
    assert interpreted.interpret(graph, lambda apart: lambda *given: None)
    names = _names(graph)
    assert names[-1] == "interpreted" and len(names) == 2


def test_few_operators_are_called_from_python() -> None:
    graph = _recorded(lambda x: x.exp().neg().tanh(), torch.ones(3))
    before = _names(graph)
    assert not interpreted.interpret(graph, lambda apart: lambda *given: None)
    assert _names(graph) == before
