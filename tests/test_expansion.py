"""Operators that are expanded once for all like them: the graph and the values that PyTorch's own way gives."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.real.contenders import Stepgraph
from benchmarks.real.models import SMALL
from stepgraph.compiler import fused_cache, fusion
from stepgraph.compiler.expansion import ExpansionFailed, Unexpandable, expand
from stepgraph.compiler.modules import Module
from stepgraph.compiler.program import Part, adopt_tags, complete_notes, fake, fakes, is_view, notes, set_fake
from stepgraph.system import torch_private

aten = torch.ops.aten
SLOW = {"resnet50": pytest.mark.deep}  # 53 convolutions to record
NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler")
called: Counter[str] = Counter()


def recorded(function: Callable[..., Any], *arrays: torch.Tensor) -> tuple[fx.Graph, list[torch.Tensor]]:
    """A graph with fakes, as steps are recorded, and its inputs without memory."""
    with torch_private.FakeTensorMode() as mode:
        given = [mode.from_tensor(one) for one in arrays]
        graph = make_fx(function)(*given).graph
    return graph, [fake(node) for node in graph.find_nodes(op="placeholder")]


def expanded(graph: fx.Graph, arrays: Sequence[torch.Tensor]) -> fx.GraphModule:
    with torch_private.compiling(arrays, fusion.SETTINGS):
        return expand(graph, arrays)


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def check(function: Callable[..., Any], *arrays: torch.Tensor) -> fx.GraphModule:
    """Runs the expanded operators and the function; results and what both change are equal."""
    module = expanded(*recorded(function, *arrays))
    ours, plain = ([one.clone() for one in arrays] for _ in range(2))
    results = module(*ours)
    torch.testing.assert_close([*results, *ours], [*function(*plain), *plain])
    written = [node for node in module.graph.nodes if node.target is aten.copy_.default]
    assert all(node.args[0].op == "placeholder" for node in written), "only inputs are written to"
    return module


# What is recorded once


def gelu(x: torch.Tensor) -> torch.Tensor:
    called[str(tuple(x.shape))] += 1
    return aten.gelu(x, approximate="tanh")


def test_equal_operators_are_recorded_once() -> None:
    graph = fx.Graph()
    with torch_private.FakeTensorMode():
        arrays = [torch.empty(2, 3), torch.empty(3, 2)]
    nodes = [graph.placeholder(name) for name in "xy"]
    for node, array in zip(nodes, arrays, strict=True):
        set_fake(node, array)
    results = []
    for node in nodes:
        for _ in range(5):
            node = graph.call_function(gelu, (node,))
            set_fake(node, torch_private.another(arrays[len(results)]))
        results.append(node)
    graph.output(results)
    called.clear()
    module = expanded(graph, arrays)
    assert called == {"(2, 3)": 1, "(3, 2)": 1}
    assert targets(module).count(aten.tanh.default) == 10
    given = [torch.randn(2, 3), torch.randn(3, 2)]
    wanted = given
    for _ in range(5):
        wanted = [aten.gelu(one, approximate="tanh") for one in wanted]
    torch.testing.assert_close(list(module(*given)), wanted)


def test_copies_have_memory_of_their_own() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(4):
            x = (x.t() * 2).contiguous().view(3, 2).t().relu()
        return (x,)

    module = check(function, torch.randn(2, 3))
    memory: dict[int, fx.Node] = {}
    for node in module.graph.nodes:
        for array in fakes(node) if node.op != "output" else ():
            (source,) = node.all_input_nodes or [None]
            owner = memory.setdefault(torch_private.identity(array.untyped_storage()), node)
            assert owner is node or is_view(node), f"{node} shares the memory of {owner}"
            if is_view(node):
                assert array.untyped_storage()._cdata == fake(source).untyped_storage()._cdata


def test_arguments_that_only_look_equal_are_told_apart() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        low, high = x.clamp(0.0, 1.0), x.clamp(0, 1)
        return (
            x + 1,
            x + True,
            x + 1.0,
            1 / (y * 0.0),
            1 / (y * -0.0),
            low,
            high,
            x - y,
            y - x,
            x - x,
            x.sum(0),
            x.sum(1),
        )

    check(function, torch.randn(3, 3), torch.rand(3, 3) + 1)


def test_strides_types_and_offsets_are_told_apart() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = [x, x.t(), x[1:], x.double(), x.t().contiguous()]
        return tuple(torch.empty_like(one).copy_(one).flatten() for one in both) + tuple(one.softmax(0) for one in both)

    check(function, torch.randn(4, 4))


# What changes


def test_inputs_and_their_views_are_changed() -> None:
    def function(x: torch.Tensor, state: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = state * 2
        row = state[1]
        row.add_(x.mean(0))
        between = state.sum(0)
        state.mul_(0.5)
        count[0].add_(1)
        count[0].add_(1)
        kept = x.clone()
        kept.view(-1)[2:4].fill_(3)
        return before, between, row * 2, kept, kept.t() + 1, x.relu()

    module = check(function, torch.randn(3, 4), torch.randn(2, 4), torch.zeros(3))
    assert targets(module).count(aten.copy_.default) == 2, "one for each input that is changed"


def overwritten(x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Changes what it is given, which its name does not say."""
    before = x.sum()
    return x.mul_(by), before


def test_a_function_that_changes_its_argument_is_noticed() -> None:
    graph, arrays = recorded(lambda x, y: [x.relu().view(-1), x.view(-1) + 1], torch.empty(2, 3), torch.empty(6))
    (end,) = graph.find_nodes(op="output")
    _, y = graph.find_nodes(op="placeholder")
    hidden, other = end.args[0]
    with graph.inserting_before(end):
        results = []
        for _ in range(2):
            both = graph.call_function(overwritten, (hidden, y))
            with arrays[0].fake_mode:  # type: ignore[attr-defined]
                set_fake(both, (torch.empty(6), torch.empty(())))
            results += [graph.call_function(getitem, (both, place)) for place in range(2)]
            for place, one in enumerate(results[-2:]):
                set_fake(one, fake(both)[place])
        total = graph.call_function(aten.add.Tensor, (hidden, results[0]))
        set_fake(total, torch_private.another(fake(hidden)))
    end.args = ([total, results[1], results[3], other],)
    module = expanded(graph, arrays)
    given = torch.randn(2, 3), torch.randn(6)
    start = given[0].relu().view(-1)
    wanted = [2 * start * given[1] ** 2, start.sum(), (start * given[1]).sum(), given[0].view(-1) + 1]
    torch.testing.assert_close(list(module(*given)), wanted)
    assert not any(node.target is aten.mul_.Tensor for node in module.graph.nodes)


def exchanged(x: torch.Tensor, y: torch.Tensor, is_first: bool) -> torch.Tensor:
    """Changes one of two arrays, which its name does not say."""
    (x if is_first else y).add_(1)
    return x * y


def test_what_a_function_changes_is_found_for_each_argument() -> None:
    graph, arrays = recorded(lambda x, y: (x * y, x / y, x + 1, y + 1), torch.empty(3), torch.empty(3))
    for node, target, is_first in zip(
        graph.nodes, [None, None, exchanged, exchanged], [None, None, True, False], strict=False
    ):
        if target is not None:
            node.target, node.args = target, (*node.args, is_first)
    module = expanded(graph, arrays)
    x, y = given = [torch.rand(3), torch.rand(3)]
    wanted = [(x + 1) * y, (x + 1) * (y + 1), x + 2, y + 2, x + 1, y + 1]
    torch.testing.assert_close([*module(*given), *given], wanted)


def test_what_a_changing_function_only_reads_is_recorded_once() -> None:
    graph, arrays = recorded(lambda x, y: (x + 1, y.relu(), y.relu()), torch.empty(3), torch.empty(3))
    for node in graph.find_nodes(op="call_function", target=aten.relu.default):
        node.target = gelu
    (end,) = graph.find_nodes(op="output")
    (x, _), (_, first, second) = graph.find_nodes(op="placeholder"), end.args[0]
    with graph.inserting_before(end):
        for by in (first, second):
            both = graph.call_function(overwritten, (x, by))
            with arrays[0].fake_mode:  # type: ignore[attr-defined]
                set_fake(both, (torch.empty(3), torch.empty(())))
    called.clear()
    module = expanded(graph, arrays)
    assert called == {"(3,)": 1}
    x, y = given = [torch.rand(3), torch.rand(3)]
    by = aten.gelu(y, approximate="tanh")
    wanted = [x + 1, by, by, x * by * by, y.clone()]
    torch.testing.assert_close([*module(*given), *given], wanted)


@pytest.mark.parametrize("is_viewed", [False, True])
def test_an_input_is_followed_from_its_first_change(is_viewed: bool) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row = x[0] if is_viewed else y
        return x * 2, y.relu(), row + 1, x.view(-1) + 1, x[1] + 1

    graph, arrays = recorded(function, torch.empty(2, 2), torch.empty(2))
    (relu,) = graph.find_nodes(op="call_function", target=aten.relu.default)
    x, _ = graph.find_nodes(op="placeholder")
    relu.target, relu.args = counted, (x, *relu.args)
    called.clear()
    module = expanded(graph, arrays)
    assert called["counted"] == (2 if is_viewed else 1), "only a view that is older needs another pass"
    old, y = given = [torch.rand(2, 2), torch.rand(2)]
    new = old + y
    wanted = [old * 2, y * 2, (new[0] if is_viewed else y) + 1, new.view(-1) + 1, new[1] + 1, new]
    torch.testing.assert_close([*module(*given), given[0]], wanted)


def counted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Changes what it is given, which its name does not say."""
    called["counted"] += 1
    x.add_(y)
    return y * 2


def test_random_numbers_are_not_copied() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand_like(x), torch.rand_like(x)

    first, second = expanded(*recorded(function, torch.empty(100)))(torch.empty(100))
    assert not torch.equal(first, second)


# What stays with PyTorch


def viewed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.view(-1),)


def changed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x.add_(1),)


def viewed_twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x + 1
    return y, y.view(-1)


def returned_twice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x + 1
    return y, y


@pytest.mark.parametrize("function", [viewed, changed, viewed_twice, returned_twice])
def test_what_pytorch_finishes_around_its_code_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(Unexpandable, match="share memory"):
        expanded(*recorded(function, torch.empty(2, 3)))


def test_constants_are_refused() -> None:
    graph, arrays = recorded(lambda x: (x + 1,), torch.empty(2, 3))
    (end,) = graph.find_nodes(op="output")
    with graph.inserting_before(end):
        graph.create_node("get_attr", "numbers")
    with pytest.raises(Unexpandable, match="constants"):
        expanded(graph, arrays)


def refused(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("not alone.")


def with_refused() -> tuple[fx.Graph, list[torch.Tensor]]:
    """A graph with an operator that raises an error."""
    graph, arrays = recorded(lambda x: (x + 1,), torch.empty(2, 3))
    (added,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    added.target, added.args = refused, added.args[:1]
    return graph, arrays


def test_whatever_an_operator_raises_stays_with_pytorch() -> None:
    with pytest.raises(ExpansionFailed, match=r"not alone$"):
        expanded(*with_refused())


@pytest.mark.parametrize("is_defect", [False, True])
def test_only_a_defect_is_a_warning(
    is_defect: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph, arrays = with_refused() if is_defect else recorded(viewed, torch.empty(2, 3))

    def compile_graph(*_: Any, **__: Any) -> Any:
        raise InterruptedError  # nothing need be compiled

    plain = torch_private.inductor()._replace(compile_graph=compile_graph)
    monkeypatch.setattr(torch_private, "inductor", lambda: plain)
    step: Any = None
    with caplog.at_level("DEBUG", "stepgraph"), pytest.raises(InterruptedError):
        fusion._compiled(Module(torch.nn.Module(), graph), step, arrays, fusion.SETTINGS)
    (told,) = [one for one in caplog.records if one.name == "stepgraph"]
    assert told.levelname == ("WARNING" if is_defect else "DEBUG")
    assert ("not alone" if is_defect else "share memory") in told.message
    caplog.clear()


@pytest.mark.parametrize(
    "name, device",
    [
        pytest.param("bert", "cpu", marks=[pytest.mark.deep, NEEDS_COMPILER]),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in SMALL),
    ],
)
def test_a_fused_step_is_the_same_if_pytorch_expands_it(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expansions: list[fx.GraphModule] = []
    refusals = []

    def keep(*given: Any) -> fx.GraphModule:
        expansions.append(expand(*given))
        return expansions[-1]

    def refuse(graph: fx.Graph, *_: Any) -> Any:
        refusals.append(graph)
        raise Unexpandable("for a test")

    monkeypatch.setattr(fused_cache, "load", lambda *_: None)
    monkeypatch.setattr(fusion, "expand", keep)
    expected = losses(SMALL[name], device)
    assert len(expansions) == 1
    monkeypatch.setattr(fusion, "expand", refuse)
    np.testing.assert_allclose(losses(SMALL[name], device), expected, rtol=1e-6)
    assert len(refusals) == 1


def losses(model: Any, device: str = "cpu") -> list[float]:
    """The losses of three fused steps, compiled now."""

    class Fused(Stepgraph):
        settings: ClassVar = {"fuse": True}

    contender = Fused(model, device)
    contender.make()
    contender.remember()
    found = []
    for step in range(3):
        contender.step(*model.batch(step, device))
        found.append(contender.loss)
    (executable,) = contender.training.compilation.programs.executables.values()
    assert executable.mode.startswith("fused")
    return found


# Whole steps


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in SMALL])
def test_a_step_is_expanded_as_by_pytorch(name: str) -> None:
    part, step = part_of(name)
    ours, theirs = fusion._prepared(part, step), fusion._prepared(part, step)
    arrays = [fake(node) for node in ours.graph.find_nodes(op="placeholder")]
    found: list[list[Any]] = []

    def see(module: fx.GraphModule, *_: Any, **__: Any) -> Any:
        adopt_tags(module.graph)
        complete_notes(module.graph)
        found.append(described(module.graph))
        raise InterruptedError  # nothing need be compiled

    with torch.no_grad():
        with pytest.raises(InterruptedError), torch_private.compiling(arrays, fusion.SETTINGS):
            torch_private.compile_expanded(expand(ours.graph, arrays), arrays, see)
        with pytest.raises(InterruptedError):
            torch_private.inductor().compile_graph(theirs, arrays, see, config_patches=fusion.SETTINGS)
    assert len(found[0]) > 50
    assert found[0] == found[1]


def part_of(name: str) -> tuple[Part, Any]:
    """A recorded step of a small model, and what it computes."""

    class Plain(Stepgraph):
        settings: ClassVar = {"deterministic": True}

    contender = Plain(SMALL[name], "cpu")
    contender.make()
    contender.remember()
    contender.step(*SMALL[name].batch(0, "cpu"))
    (executable,) = contender.training.compilation.programs.executables.values()
    return executable.part, executable.step


def described(graph: fx.Graph) -> list[Any]:
    """All operators but views, with what they read, what they return and their notes."""
    own: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        own[node] = own[node.args[0]] if is_view(node) and node.target is not getitem else f"%{len(set(own.values()))}"
    shown = [node for node in graph.nodes if not is_view(node) or node.target is getitem]
    read = {node: str(fx.map_arg((node.args, node.kwargs), own.__getitem__)) for node in shown}
    return [(node.op, str(node.target), read[node], layouts(node), noted(node)) for node in shown]


def layouts(node: fx.Node) -> list[Any]:
    return [(one.shape, one.stride(), one.dtype) for one in fakes(node)]


def noted(node: fx.Node) -> Any:
    source = [one.name for one in node.meta.get("from_node", ())[:1]]  # by which the memory plan finds layers
    return notes(node).layer, notes(node).phase, notes(node).recomputed, source
