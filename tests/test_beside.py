"""Arrays that only updates use are passed to them beside PyTorch's compiler: the same arrays, in their places."""

import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

import stepgraph as sg
from stepgraph.compiler import fusion, pipeline
from stepgraph.compiler.kernels.update import BY_KERNEL, TOGETHER, named, reference, update
from stepgraph.compiler.kernels.update_kernel import Update
from stepgraph.compiler.passes import beside
from stepgraph.compiler.program import set_fake
from stepgraph.graphs import compilation

aten = torch.ops.aten
KERNELS = sys.modules[update.__module__]
ROW = "pass optimizer buffers beside the compiler"
NAMES = ("x", "p0", "p1", "g0", "g1", "s0", "s1", "t0", "t1", "c0", "c1", "numbers")
KERNEL = 7


def updating(copies: bool = True, read: tuple[str, ...] = ("c0",), returned: tuple[str, ...] = ()) -> fx.Graph:
    """A graph that updates two parameters with two buffers each; a layer reads some arrays, some are returned."""
    graph = fx.Graph()
    of = {name: graph.placeholder(name) for name in NAMES}
    result = of["x"]
    for name in read:
        result = graph.call_function(torch.ops.aten.add.Tensor, (result, of[name]))
    lists = [[of[name] for name in names] for names in (("p0", "p1"), ("g0", "g1"), ("s0", "s1", "t0", "t1"))]
    rounded = [of["c0"], of["c1"]] if copies else []
    graph.call_function(BY_KERNEL, (*lists, rounded, of["numbers"], None, None, KERNEL))
    graph.output([result, *(of[name] for name in returned)])
    return graph


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What kernels are launched with."""
    found: list[Any] = []
    monkeypatch.setattr(beside, "launch_kernel", lambda *given: found.append(given))
    return found


def left(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.find_nodes(op="placeholder")]


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, ["x", "g0", "g1", "c0", "numbers"]),
        ({"read": ("c0", "c1")}, ["x", "g0", "g1", "c0", "c1", "numbers"]),
        ({"copies": False, "read": ("p0", "p1")}, ["x", "p0", "p1", "g0", "g1", "c0", "c1", "numbers"]),
        ({"read": ("p1", "c1", "t0")}, ["x", "p1", "g0", "g1", "t0", "c1", "numbers"]),
        ({"returned": ("s1",)}, ["x", "g0", "g1", "s1", "c0", "numbers"]),
    ],
    ids=["one copy", "copies", "parameters", "one of each", "returned"],
)
def test_updates_receive_the_same_arrays(settings: Any, expected: list[str], launched: list[Any]) -> None:
    arrays = {name: torch.full((2,), float(i)) for i, name in enumerate(NAMES)}
    graph = updating(**settings)
    beside.pass_beside(graph)
    graph.lint()
    assert left(graph) == expected
    module = fx.GraphModule(torch.nn.Module(), graph)
    with beside.passing(list(arrays.values())):
        module(*(arrays[name] for name in expected))
    ((parameters, gradients, states, copies, numbers, norm, finite, kernel),) = launched
    given = [[arrays[name] for name in names.split()] for names in ("p0 p1", "g0 g1", "s0 s1 t0 t1", "c0 c1")]
    for found, wanted in zip((parameters, gradients, states, copies), given, strict=True):
        wanted = [] if found is copies and not settings.get("copies", True) else wanted
        assert [id(one) for one in found] == [id(one) for one in wanted]
    assert numbers is arrays["numbers"] and (norm, finite, kernel) == (None, None, KERNEL)


def test_an_update_without_visible_effect_stays() -> None:
    graph = updating(read=())
    beside.pass_beside(graph)
    assert left(graph) == list(NAMES) and len(graph.find_nodes(op="call_function", target=BY_KERNEL)) == 1


def multiplying(*, between: bool) -> tuple[fx.Graph, fx.Node]:
    """A graph whose products read a weight before its update; after it, one reads the others, or only the last."""
    graph = fx.Graph()
    x, w, g, s, numbers = (graph.placeholder(name) for name in ("x", "w", "g", "s", "numbers"))
    turned = graph.call_function(aten.t.default, (w,))
    first = graph.call_function(aten.mm.default, (x, turned))
    second = graph.call_function(aten.mm.default, (first, w)) if between else first
    update = graph.call_function(BY_KERNEL, ([w], [g], [s], [], numbers, None, None, KERNEL))
    last = graph.call_function(aten.relu.default, (graph.call_function(aten.view.default, (second, [-1])),))
    graph.output([last])
    for node in (x, w, g, s, turned, first, second, last):
        set_fake(node, torch.empty(4, 4, device="meta"))
    beside.pass_beside(graph)
    return second, update


def test_updates_come_after_products_that_are_needed_later() -> None:
    for between in (False, True):
        last, update = multiplying(between=between)
        assert update.target is torch.ops.stepgraph.update_beside_.default
        assert update.args[-1] == [last]  # the first of two products is not needed any more


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
def test_the_compiler_makes_no_copies_of_what_updates_change(launched: list[Any]) -> None:
    """Without the product as an argument, it moves the product behind the update, which then needs a copy of `w`."""
    from torch._inductor.utils import run_and_get_code

    def step(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, numbers: torch.Tensor, hold: bool) -> Any:
        y = x @ w
        given = [w], [g], numbers, None, None, [beside.SEEN, 0], 0, KERNEL, [y] if hold else []
        torch.ops.stepgraph.update_beside_(*given)
        return g @ g, y.relu() @ g

    arrays = *(torch.ones(64, 64) for _ in range(3)), torch.ones(4)
    for hold in (False, True):
        torch.compiler.reset()
        with beside.passing([torch.ones(64, 64)]):
            _, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), *arrays, hold)
        assert ("clone" in code) is not hold
    assert len(launched) == 2


def test_arrays_of_a_call_are_forgotten() -> None:
    with beside.passing([torch.ones(1)]):
        with pytest.raises(ZeroDivisionError), beside.passing([torch.ones(2)]):
            raise ZeroDivisionError
        assert beside._call.arrays[0].shape == (1,)
    assert len(beside._call.arrays) == 0


def test_a_compiled_function_takes_all_arrays() -> None:
    compiled = updating()
    beside.pass_beside(compiled)
    seen: list[Any] = []

    def function(*arrays: torch.Tensor) -> list[torch.Tensor]:
        seen.append((arrays, beside._call.arrays))
        return list(arrays)

    arrays = [torch.full((2,), float(i)) for i in range(len(NAMES))]
    of_all = fusion._of_all(function, [NAMES.index(name) for name in left(compiled)], len(NAMES))
    expected = [arrays[NAMES.index(name)] for name in left(compiled)]
    assert all(map(torch.equal, of_all(*arrays), expected))
    assert all(map(torch.equal, seen[0][1], arrays))
    assert fusion._of_all(function, range(len(NAMES)), len(NAMES)) is function


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[sg.Optimizer]:
    """Updates on the CPU as on CUDA, with the rule's operators in the place of kernels; takes the optimizers in use."""
    used: list[sg.Optimizer] = []

    def launch(arrays: Update, rules: Any, norms: Any) -> None:
        names = [name for name in vars(named(used[-1], torch.zeros(len(used[-1].columns)))) if name != TOGETHER]
        reference(used[-1], arrays, SimpleNamespace(**dict(zip(names, arrays.numbers.unbind(), strict=True))))

    monkeypatch.setattr(KERNELS, "AS_ONE", {"cpu"})
    monkeypatch.setattr(KERNELS, "FUSED", {})
    monkeypatch.setattr(KERNELS, "MANY", 0)
    monkeypatch.setattr(KERNELS, "_rules", lambda optimizer, arrays, *_: ["its code"] * len(arrays.parameters))
    monkeypatch.setattr(KERNELS, "launch", launch)
    monkeypatch.setattr(compilation, "ROUNDED", {"cpu"})
    rows = (replace(row, applies=lambda *_: True) if row.name == ROW else row for row in pipeline.TABLE)
    monkeypatch.setattr(pipeline, "TABLE", tuple(rows))
    return used


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
@pytest.mark.parametrize("half", [None, "bfloat16"])
def test_fused_steps_update_all_arrays(half: str | None, as_on_cuda: list[sg.Optimizer]) -> None:
    inputs, labels = (np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32) for _ in range(2))

    def trained(fuse: bool) -> tuple[list[float], sg.TrainingGraph]:
        sg.set_seed(0)
        x, y, graph = sg.Tensor((4, 8)), sg.Tensor((4, 8)), sg.Graph()
        graph.dense(graph.tanh(graph.dense(x, 8)), 8)
        optimizer = sg.AdamWOptimizer(0.01)
        as_on_cuda.append(optimizer)
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), optimizer)
        training.add_inputs({"x": x}, {"y": y})
        training.compile("cpu", compute_type=half, fuse=fuse)
        return [float(training.execute({"x": inputs}, {"y": labels}).loss) for _ in range(5)], training

    (expected, plain), (found, fused) = trained(False), trained(True)
    (executable,) = fused.compilation.programs.executables.values()
    assert executable.mode == "fused traced" and executable._function.__qualname__.startswith("_of_all")
    np.testing.assert_allclose(found, expected, rtol=1e-5 if half is None else 2e-2)
    states = [[buffer for own in one.progress().buffers.values() for buffer in own] for one in (plain, fused)]
    for one, other in zip(*states, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4 if half is None else 5e-2, atol=1e-3)
        assert np.any(np.asarray(other) != 0)
