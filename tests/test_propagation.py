"""Results without memory are those that PyTorch computes, with the same layouts and the same memory in common."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config as compiler_settings
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

import stepgraph as sg
from stepgraph.compiler import fusion
from stepgraph.compiler.program import fake, fakes, storages
from stepgraph.compiler.propagation import propagate
from stepgraph.system import torch_private
from tests.test_alike import repetitions
from tests.test_fusion import attention, network

aten = torch.ops.aten


def described(graph: fx.Graph) -> list[Any]:
    """Every result: its layout, and which other arrays have been in its memory first."""
    first, found = dict[int, int](), list[Any]()
    for node in graph.nodes:
        memory = [first.setdefault(one, len(first)) for one in storages(node)]
        layouts = [(one.shape, one.stride(), one.storage_offset(), one.dtype, one.device) for one in fakes(node)]
        found.append(
            (node.name, type(fake(node)) if layouts else None, layouts, memory)
        )  # PyTorch 2.11 shows no numbers
    return found


def check(graph: fx.Graph, arrays: Sequence[torch.Tensor]) -> int:
    """Compares with PyTorch; returns how many operators did not run."""
    own, theirs = copy.deepcopy(graph), copy.deepcopy(graph)
    with torch.no_grad():
        with repetitions() as repeated:
            assert propagate(own, arrays)
        FakeTensorProp(fx.GraphModule({}, theirs), arrays[0].fake_mode).propagate_dont_convert_inputs(*arrays)
    assert described(own) == described(theirs)
    return len(repeated)


def recorded(function: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[fx.Graph, list[torch.Tensor]]:
    """The operators of a function without anything known about them, and its inputs."""
    with torch_private.FakeTensorMode():
        arrays = [torch.empty(shape) for shape in shapes]
        graph = make_fx(function)(*arrays).graph
    for node in graph.nodes:
        node.meta.clear()
    return graph, arrays


class Enough(BaseException):
    """Ends a compilation whose code nobody needs; the compiler wraps other errors."""


@contextmanager
def compared(found: list[int]) -> Any:
    """Compares the graph that is compiled; notes how many operators did not run, and ends the compilation."""

    def compare(graph: fx.Graph, arrays: Sequence[torch.Tensor]) -> bool:
        found.append(check(graph, arrays))
        raise Enough

    # What another test has compiled would not be compiled again.
    with pytest.MonkeyPatch.context() as patch, compiler_settings.patch(fx_graph_cache=False):
        patch.setattr(fusion, "propagate", compare)
        with pytest.raises(Enough):
            yield


def recurrent(options: Any) -> sg.TrainingGraph:
    """Gates, and sums over steps."""
    sg.set_seed(5)
    x, y, graph = sg.Tensor((4, 5, 6)), sg.Tensor((4, 5, 8)), sg.Graph()
    graph.node(sg.LayerNormalizationLayer.create((8,)), graph.node(sg.LSTMLayer.create(6, 8), x))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.RMSPropOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", options)
    return training


@pytest.mark.skipif(not fusion.has_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("made", [network, lambda options: attention(3, options), recurrent])
def test_results_of_whole_steps_are_those_of_pytorch(made: Callable[..., sg.TrainingGraph]) -> None:
    found = list[int]()
    training = made(sg.GraphCompilationOptions.DETERMINISTIC)
    (executable,) = training.compilation.programs.executables.values()
    with compared(found):
        fusion.fuse(executable.part, executable.step)
    assert found[0] > 0, "every operator ran"


def test_operators_that_are_alike_run_once() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return [x + 1, y + 1, x.t() + 1, x + 2, y.sum(1), x.sum(1), x.sum(0)]

    graph, arrays = recorded(function, (2, 3), (2, 3))
    assert check(graph, arrays) == 2  # y + 1, x.sum(1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: [x.view(-1), y.view(-1), x.view(-1)[2:], y.view(-1)[2:]],
        lambda x, y: [aten.reshape(x.t(), (-1,)), aten.reshape(y.t(), (-1,)), aten.reshape(x, (-1,))],
        lambda x, y: [*aten.split(x, 1), *aten.split(y, 1)],
        lambda x, y: [*aten.var_mean(x, [1]), *aten.var_mean(y, [1])],
        lambda x, y: [aten.cat([x, y]), aten.cat([y, x]), aten.cat([x, x])],
        lambda x, y: [aten.expand(x[:, :1], (2, 3)), aten.expand(y[:, :1], (2, 3)), x * y[:, :1], y * x[:, :1]],
        lambda x, y: [aten.full([2, 3], 1.0), aten.full([2, 3], 1.0), aten.full([2, 3], 1), x * 0.0, y * -0.0],
    ],
)
def test_memory_is_shared_as_in_pytorch(function: Callable[..., Any]) -> None:
    check(*recorded(function, (2, 3), (2, 3)))


def test_what_changes_arrays_runs_each_time() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.copy_(y + 1)
        y.copy_(x + 1)
        return [x * 2]

    assert check(*recorded(function, (2, 3), (2, 3))) == 1  # the second sum


def test_a_graph_with_constants_is_left_to_pytorch() -> None:
    graph, arrays = recorded(lambda x: [x + 1], (2, 3))
    (end,) = graph.find_nodes(op="output")
    with graph.inserting_before(end):
        graph.create_node("get_attr", "constant")
    assert not propagate(graph, arrays)
    assert all(fake(node) is None for node in graph.nodes)


def test_numbers_among_results_reach_what_reads_them() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return [aten.mul(one, aten.sym_size.int(one, 1)) for one in (x, y)]

    graph, arrays = recorded(function, (2, 3), (2, 3))
    for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        with graph.inserting_before(node):
            node.update_arg(1, graph.call_function(aten.sym_size.int, (node.args[0], 1)))
    assert check(graph, arrays) == 1  # the second product


def test_other_threads_propagate_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from torch._inductor import compile_fx

    asked = list[str]()
    monkeypatch.setattr(compile_fx, "fake_tensor_prop", lambda *_: asked.append("PyTorch's"))
    before = compile_fx.fake_tensor_prop
    graph, arrays = recorded(lambda x: [x + 1], (2, 3))
    module = fx.GraphModule({}, graph)

    def own(*_: Any) -> bool:
        asked.append("own")
        return len(asked) < 3

    with torch_private.propagated_by(own), ThreadPoolExecutor(1) as threads:
        assert compile_fx.fake_tensor_prop(module, arrays) is arrays[0].fake_mode
        threads.submit(compile_fx.fake_tensor_prop, module, arrays).result()
        compile_fx.fake_tensor_prop(module, arrays)  # refused
    assert asked == ["own", "PyTorch's", "own", "PyTorch's"]
    assert compile_fx.fake_tensor_prop is before
