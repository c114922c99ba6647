"""Steps are recorded as `make_fx` would record them, and what only `make_fx` can record is left to it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from benchmarks.real.contenders import Stepgraph
from benchmarks.real.models import SMALL
from stepgraph.compiler import recorder
from stepgraph.compiler.program import Program, fakes, notes, storages
from stepgraph.compiler.step import Step
from stepgraph.compiler.trace import trace
from stepgraph.system import torch_private

TRACE = trace.__globals__


def with_make_fx(step: Step, monkeypatch: pytest.MonkeyPatch) -> Program:
    def refuse(*_: object) -> None:
        raise recorder.Unsupported

    with monkeypatch.context() as patched:
        patched.setitem(TRACE, "record", refuse)
        return trace(step)


def described(program: Program) -> list[Any]:
    """Everything that is known about a program's operators, with numbers in the place of their memory."""
    memory: dict[int, int] = {}
    return [
        (
            *(node.op, node.name, node.target, str(node.args), str(node.kwargs), notes(node)),
            [(one.shape, one.stride(), one.storage_offset(), one.dtype, one.device) for one in fakes(node)],
            [memory.setdefault(one, len(memory)) for one in storages(node)],
        )
        for node in program.module.graph.nodes
    ]


def require_same(training: sg.TrainingGraph, monkeypatch: pytest.MonkeyPatch, *, alone: bool = True) -> None:
    step = training.compilation.programs.program(training.declaration.feeds.batch).step
    if alone:  # `make_fx` does not help
        with monkeypatch.context() as patched:
            patched.setitem(TRACE, "make_fx", None)
            found = trace(step)
    else:
        found = trace(step)
    assert described(found) == described(with_make_fx(step, monkeypatch))


def mixed(**settings: Any) -> sg.TrainingGraph:
    """Layers with statistics, random numbers, steps and indices, and a loss over classes."""
    images, labels = sg.Tensor.image(8, 8, channels=2, batch_size=3), sg.Tensor((3,), "int64")
    graph = sg.Graph()
    x = graph.node(sg.ConvolutionLayer.create(2, 4, kernel_sizes=3), images)
    x = graph.relu(graph.node(sg.BatchNormalizationLayer.create(4), x))
    x = graph.node(sg.DropoutLayer(0.5), graph.max_pooling(x, 2))
    x = graph.node(sg.FullyConnectedLayer.create(64, 5), graph.reshape((3, 64), x))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(1e-3))
    training.add_inputs({"images": images}, {"labels": labels})
    training.compile("cpu", deterministic=True, **settings)
    return training


@pytest.mark.parametrize("settings", [{}, {"compute_type": "float16"}], ids=["float32", "float16"])
def test_a_step_is_recorded_as_by_make_fx(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    require_same(mixed(**settings), monkeypatch)


@pytest.mark.deep
@pytest.mark.parametrize("name", SMALL)
def test_a_model_is_recorded_as_by_make_fx(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Stepgraph(SMALL[name], "cpu")
    made.make()
    require_same(made.training, monkeypatch)


def recorded(function: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    """The code of what is recorded, which `make_fx` records, too."""
    with torch_private.FakeTensorMode():
        arrays = [torch.empty(shape) for shape in shapes]
    graph = recorder.record(function, arrays).graph
    graph.lint()

    def of_any(*given: torch.Tensor) -> Any:
        return function(*given)

    made = make_fx(of_any, tracing_mode="fake")(*arrays).graph
    assert [node.format_node() for node in graph.nodes] == [node.format_node() for node in made.nodes]
    return str(graph)


def test_writes_and_several_results_are_followed() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x.add_(y)
        largest, _ = x.max(0)
        return [torch.cat(list(x.split(2))), largest, torch.ones_like(x).view(-1)]

    text = recorded(function, (4, 3), (3,))
    assert "add_" in text and "getitem" in text and "detach" not in text


def test_functions_of_types_are_not_operators() -> None:
    assert "promote" not in recorded(lambda x: [x.to(torch.promote_types(x.dtype, torch.float64))], (2,))


def test_numbers_among_results_are_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on CUDA returns lengths besides arrays."""
    library = torch.library.Library("stepgraph_tests", "DEF")
    library.define("lengths(Tensor x) -> (Tensor, SymInt)")
    library.impl("lengths", lambda x: (x.clone(), x.shape[0]), "CompositeExplicitAutograd")

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        y, length = torch.ops.stepgraph_tests.lengths(x)
        return [y * length]

    assert "(%getitem, 3)" in recorded(function, (3,))


@pytest.mark.parametrize(
    "function",
    [lambda x: [x + torch.tensor([1.0, 2.0])], lambda x: [x * float(x.sum())], lambda x: [x + CONSTANT]],
    ids=["new constant", "number", "array"],
)
def test_the_rest_is_left_to_make_fx(function: Callable[..., Any]) -> None:
    with torch_private.FakeTensorMode(allow_non_fake_inputs=True):
        array = torch.empty(2)
    with pytest.raises(recorder.Unsupported):
        recorder.record(function, [array])


CONSTANT = torch.ones(2)


class WithConstant(sg.Layer):
    """Adds an array that is not a tensor of the graph."""

    def forward(self, x: torch.Tensor, *, scope: Any) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0], device=x.device)


class Doubled(torch.autograd.Function):
    """Makes a constant on the way back."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * torch.tensor([2.0, 2.0], device=gradient.device)


class WithConstantGradient(sg.Layer):
    """Has a constant in its gradient."""

    def forward(self, x: torch.Tensor, *, scope: Any) -> torch.Tensor:
        doubled: torch.Tensor = Doubled.apply(x)
        return doubled


@pytest.mark.parametrize("layer", [WithConstant, WithConstantGradient])
def test_a_layer_may_make_constants(layer: type[sg.Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, graph = sg.Tensor((3, 2)), sg.Tensor((3, 2)), sg.Graph()
    graph.node(layer(), graph.node(sg.FullyConnectedLayer.create(2, 2), x))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", fuse=False)
    require_same(training, monkeypatch, alone=False)


def test_a_repeated_operator_is_asked_for_its_result_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, dispatch = list[Any](), torch_private.FakeTensorMode.__torch_dispatch__

    def counted(mode: Any, operator: Any, *given: Any, **named: Any) -> Any:
        asked.append(operator)
        return dispatch(mode, operator, *given, **named)

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x, y = x.sin(), y.sin()
        return [x.sin(), y.t(), x.t(), x.t().sin(), x.split(2)[1], y.split(2)[1]]

    with torch_private.FakeTensorMode():
        arrays = [torch.empty(4, 3), torch.empty(4, 3)]
    monkeypatch.setattr(torch_private.FakeTensorMode, "__torch_dispatch__", counted)
    recorder.record(function, arrays)
    aten = torch.ops.aten
    counts = {one: asked.count(one) for one in (aten.sin.default, aten.t.default, aten.split.Tensor)}
    assert counts == {aten.sin.default: 2, aten.t.default: 1, aten.split.Tensor: 1}  # of `x.t()`, it has other strides


def test_repeated_results_have_memory_of_their_own_or_that_of_their_argument() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [*(one for array in (x, y) for one in (array.t(), array.sin(), *array.unbind())), torch.cat([x, y])]

    with torch_private.FakeTensorMode():
        arrays = [torch.empty(2, 3), torch.empty(2, 3)]
    graph = recorder.record(function, arrays).graph
    x, y = (storages(node) for node in graph.find_nodes(op="placeholder"))
    (end,) = graph.find_nodes(op="output")
    found = [storages(node) for node in end.args[0]]
    assert found == [x, found[1], x, x, y, found[5], y, y, found[8]]
    assert len({*map(tuple, (x, y, found[1], found[5], found[8]))}) == 5


@pytest.mark.parametrize("change", ["type", "default type", "scalar type", "number of rows"])
def test_what_a_result_depends_on_is_distinguished(change: str) -> None:
    """Each function calls the same operator twice, with results of different layouts."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        match change:
            case "type":
                return [x.sum(0), x.double().sum(0)]
            case "default type":
                first = torch.full((2,), 1.0, device=x.device)
                torch.set_default_dtype(torch.float64)
                try:
                    return [first, torch.full((2,), 1.0, device=x.device)]
                finally:
                    torch.set_default_dtype(torch.float32)
            case "scalar type":
                return [x.long() * 1, x.long() * 1.0, x.long() * True]
            case _:
                return [x.expand(5, 3, 3), x.expand(6, 3, 3)]

    recorded(function, (3, 3))
    with torch_private.FakeTensorMode():
        arrays = [torch.empty(3, 3)]
    (end,) = recorder.record(function, arrays).graph.find_nodes(op="output")
    seen = [(one.shape, one.dtype) for node in end.args[0] for one in fakes(node)]
    assert seen == [(one.shape, one.dtype) for one in function(torch.empty(3, 3))]
