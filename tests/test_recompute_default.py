"""What the gradient pass of every fused step on a GPU recomputes: less waits for it, and the bits are the same.

The passes run on CUDA. Here they run on graphs as PyTorch's compiler would get them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler import absorbed, pipeline, rewritten
from stepgraph.compiler.absorbed import made
from stepgraph.compiler.kernels.gelu import gelu, gelu_gradient
from stepgraph.compiler.program import Phase, adopt_tags, fake, is_view, note, notes, tag
from stepgraph.compiler.recompute_fused import recompute_by_default, recompute_cheap
from stepgraph.system import torch_private

aten, later = torch.ops.aten, torch.ops.stepgraph.later.default
HALF, ROWS, WIDTH = torch.float16, 16, 32
CONVERTED = torch.ops.prims.convert_element_type.default
SIZE = ROWS * WIDTH * 2  # bytes of an activation


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a test count as large, those with one number per row or column do not."""
    monkeypatch.setattr(absorbed, "SMALL", SIZE // 2)
    monkeypatch.setattr(rewritten, "SHARE", 0.0)
    monkeypatch.setattr(rewritten, "ENOUGH", 0)


def recorded(function: Callable[..., Any], *arrays: torch.Tensor) -> fx.GraphModule:
    """A function recorded as a step: a generator, which yields where its gradient pass begins.

    Conversions are those that PyTorch's compiler sees.
    """

    def whole(*given: torch.Tensor) -> Any:
        steps = function(*given)
        with traceback.annotate(tag("layer", Phase.FORWARD)):
            next(steps)
        with traceback.annotate(tag("layer", Phase.GRADIENT)):
            return next(steps)

    with traceback.preserve_node_meta():
        module = make_fx(whole, tracing_mode="fake")(*arrays)
    adopt_tags(module.graph)
    for node in module.graph.find_nodes(op="call_function", target=torch_private.to_copy.default):
        node.target, node.args, node.kwargs = CONVERTED, (node.args[0], node.kwargs["dtype"]), {}
    graph = torch_private.inductor().without_repeats(module.graph)
    return fx.GraphModule(module, graph)


def drawn(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(dtype)


def changed(module: fx.GraphModule, run: Callable[[fx.Graph], None], *arrays: torch.Tensor) -> fx.Graph:
    """The graph after a pass, which computes the same bits."""
    after = fx.GraphModule(module, copy.deepcopy(module.graph))
    run(after.graph)
    expected, found = (fx.Interpreter(one).run(*arrays) for one in (module, after))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
    assert all(notes(node).layer for node in after.graph.nodes if node.op == "call_function")
    return after.graph


def waiting(graph: fx.Graph) -> list[tuple[str, torch.dtype]]:
    """What waits for the gradient pass: the operators that made it, and its type."""
    read = {
        made(source)
        for node in graph.nodes
        if node.op == "call_function" and notes(node).phase is Phase.GRADIENT and not is_view(node)
        for source in node.all_input_nodes
    }
    kept = [node for node in read if node.op == "call_function" and notes(node).phase is Phase.FORWARD]
    large = [node for node in kept if fake(node).numel() > WIDTH]
    return sorted(((node.target.name().split("::")[1], fake(node).dtype) for node in large), key=str)


def perceptron(a: torch.Tensor, g: torch.Tensor, *weights: torch.Tensor) -> Any:
    """Blocks of a product, GELU and another product, with all gradients."""
    inner, found = [], []
    for w, v in zip(weights[::2], weights[1::2], strict=True):
        x = a @ w
        y = gelu(x)
        inner.append((a, x, y))
        a = y @ v
    yield
    for (a, x, y), w, v in zip(inner[::-1], weights[-2::-2], weights[::-2], strict=True):
        found += [y.t() @ g]
        dx = gelu_gradient(g @ v.t(), x)
        found += [a.t() @ dx]
        g = dx @ w.t()
    yield [*found, g]


BLOCKS = [drawn(ROWS, WIDTH), drawn(ROWS, WIDTH), *(drawn(WIDTH, WIDTH) for _ in range(6))]


def test_a_long_activation_is_not_shared_by_both_passes() -> None:
    """Its inner results would be: PyTorch's compiler writes what takes many operations, here in float32."""
    step = recorded(perceptron, *BLOCKS)
    assert any(kind is torch.float32 for _, kind in waiting(step.graph))
    after = changed(step, recompute_by_default, *BLOCKS)
    # Three sources of GELU, its results, and two sources of blocks; the first is an input.
    assert waiting(after) == [("convert_element_type", HALF)] * 3 + [("mm", HALF)] * 5
    assert not any(notes(node).recomputed for node in after.nodes if "mm" in str(node.target))


def test_inputs_of_products_are_written_again_within_a_share_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = recorded(perceptron, *BLOCKS)
    monkeypatch.setattr(rewritten, "SHARE", 1.0)
    for budget, count in ((0, 0), (SIZE - 1, 0), (SIZE, 1), (10 * SIZE, 2)):
        monkeypatch.setattr(rewritten, "_work", lambda graph, budget=budget: budget)
        after = changed(step, recompute_by_default, *BLOCKS)
        # The last one would be needed again before anything is freed.
        assert waiting(after).count(("convert_element_type", HALF)) == 3 - count
    monkeypatch.undo()
    monkeypatch.setattr(absorbed, "SMALL", SIZE // 2)
    assert waiting(changed(step, recompute_cheap, *BLOCKS)) == [("mm", HALF)] * 5  # within a limit, all


def test_the_first_results_are_written_again_first(monkeypatch: pytest.MonkeyPatch) -> None:
    step = recorded(perceptron, *BLOCKS)
    monkeypatch.setattr(rewritten, "SHARE", 1.0)
    monkeypatch.setattr(rewritten, "_work", lambda graph: SIZE)
    kept = rewritten.kept_for_products(step.graph)
    (found,) = rewritten.affordable(step.graph, kept)
    order = [node for node in step.graph.nodes if node in kept and node.target is CONVERTED]
    assert found is order[0]


def test_a_step_that_keeps_little_writes_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    step = recorded(perceptron, *BLOCKS)
    monkeypatch.setattr(rewritten, "SHARE", 1e6)
    kept = rewritten.kept_for_products(step.graph)
    waiting = sum(fake(node).nbytes for node in kept)
    for enough, found in ((waiting, True), (waiting + 1, False)):
        monkeypatch.setattr(rewritten, "ENOUGH", enough)
        assert bool(rewritten.affordable(step.graph, kept)) is found


def biased(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, g: torch.Tensor) -> Any:
    """A product with a bias, and its GELU."""
    x = torch.addmm(bias, a, w)
    y = gelu(x)
    yield
    yield [gelu_gradient(g, x), y]


def test_products_are_kept_with_their_biases() -> None:
    """PyTorch's compiler would keep the product, and add the bias in a kernel of its own."""
    arrays = [one.float() for one in (drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH), drawn(WIDTH), drawn(ROWS, WIDTH))]
    step = recorded(biased, *arrays)
    after = changed(step, recompute_by_default, *arrays)
    (stored,) = after.find_nodes(op="call_function", target=torch_private.written_to_memory())
    assert stored.args[0].target is aten.addmm.default


def test_work_is_what_products_move_and_compute() -> None:
    step = recorded(perceptron, *BLOCKS[:4])
    products = [node for node in step.graph.nodes if node.target is aten.mm.default]
    moved = sum(fake(one).nbytes for node in products for one in (node, *node.all_input_nodes))
    operations = len(products) * 2 * ROWS * WIDTH * WIDTH
    assert rewritten._work(step.graph) == moved + operations / rewritten.OPERATIONS


def convolved(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> Any:
    """Convolutions with ReLU after the first; one operator computes both gradients of each."""
    settings = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    first = aten.convolution(x, w, None, *settings)
    y = first.relu()
    read, found = [y], []
    for _ in range(2):
        read.append(aten.convolution(read[-1], v, None, *settings))
    yield
    for one in reversed(read):
        g, dv, _ = aten.convolution_backward(g, one, v, None, *settings, [True, True, False])
        found.append(dv)
    yield [*found, g * first.sigmoid()]


def test_sources_that_no_kernel_reads_at_that_time_cost_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [drawn(2, 8, 8, 8, dtype=torch.float32), *(drawn(8, 8, 3, 3, dtype=torch.float32) for _ in range(2))]
    arrays.append(arrays[0].clone())
    step = recorded(convolved, *arrays)
    monkeypatch.setattr(rewritten, "SHARE", 1.0)
    size = arrays[0].nbytes
    for budget, chosen in ((size, 0), (2 * size - 1, 0), (2 * size, 1)):
        monkeypatch.setattr(rewritten, "_work", lambda graph, budget=budget: budget)
        assert len(rewritten.affordable(step.graph, rewritten.kept_for_products(step.graph))) == chosen


def residual(a: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Any:
    """A residual sum, centered and scaled, as the input of a product."""
    s = (a @ w) @ w + a @ w
    mean, scale = s.float().mean(1, keepdim=True), s.float().square().mean(1, keepdim=True).rsqrt()
    y = ((s.float() - mean) * scale).to(HALF)
    out = y @ w
    yield
    dy = (g * out) @ w.t()
    normalized = (s.float() - mean) * scale
    yield [y.t() @ g, (dy.float() * normalized).sum(0), (dy.float() - normalized).to(HALF) @ w.t()]


def test_normalized_values_are_recomputed_from_a_sum_that_is_stored() -> None:
    arrays = [drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH), drawn(ROWS, WIDTH)]
    step = recorded(residual, *arrays)
    assert ("mul.Tensor", torch.float32) in waiting(step.graph)
    after = changed(step, recompute_by_default, *arrays)
    assert waiting(after) == [("convert_element_type", HALF), ("inductor_force_stride_order", HALF), ("mm", HALF)]
    (stored,) = after.find_nodes(op="call_function", target=torch_private.written_to_memory())
    assert stored.args[0].target is aten.add.Tensor and notes(stored).phase is Phase.FORWARD


def scaled(a: torch.Tensor, w: torch.Tensor, g: torch.Tensor, *columns: torch.Tensor) -> Any:
    """ReLU of what is computed from one large array and several small ones."""
    x = a @ w
    y = x
    for one in columns:
        y = y * one
    y = y.relu()
    yield
    masked = (y > 0) * (g @ w)
    yield [masked.sum(0), masked @ w, (x * g).sum(0)]


@pytest.mark.parametrize(("count", "repeats"), [(3, True), (4, False)])
def test_what_a_compiler_would_write_again_is_kept(count: int, repeats: bool) -> None:
    arrays = [drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH), drawn(ROWS, WIDTH), *(drawn(1, WIDTH) for _ in range(count))]
    after = changed(recorded(scaled, *arrays), recompute_by_default, *arrays)
    assert (("relu", HALF) not in waiting(after)) is repeats
    assert any(notes(node).recomputed for node in after.nodes) is repeats


def concatenated(a: torch.Tensor, w: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> Any:
    """A result that a product reads in a concatenation, and its own gradient as it is."""
    y = (a @ w).tanh()
    both = torch.cat([y, (a @ w).to(v.dtype)], 1)
    z = both @ v
    yield
    dy = (g.to(v.dtype) * z) @ v.t()
    yield [both.t() @ g.to(v.dtype), dy[:, :WIDTH] * (1 - y * y)]


@pytest.mark.parametrize("kind", [HALF, torch.float32])
def test_a_part_is_read_from_the_concatenation_that_is_kept(kind: torch.dtype) -> None:
    arrays = [drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH), drawn(2 * WIDTH, WIDTH, dtype=kind), drawn(ROWS, WIDTH)]
    step = recorded(concatenated, *arrays)
    assert ("tanh", HALF) in waiting(step.graph)
    after = waiting(changed(step, recompute_by_default, *arrays))
    assert ("cat", kind) in after
    assert (("tanh", HALF) in after) is (kind is not HALF)  # a concatenation of another type is no copy


@pytest.mark.parametrize("run", [recompute_by_default, recompute_cheap])
def test_passes_that_share_results_are_left_alone(run: Callable[[fx.Graph], None]) -> None:
    arrays = [drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH), drawn(2 * WIDTH, WIDTH), drawn(ROWS, WIDTH)]
    step = recorded(concatenated, *arrays)
    first = next(node for node in step.graph.nodes if node.op == "call_function")
    note(first, phase=Phase.GRADIENT)
    assert len(changed(step, run, *arrays).nodes) == len(step.graph.nodes)


def test_only_gpus_recompute_by_default() -> None:
    rows = {row.name: row for row in pipeline.TABLE}
    default, cheap = rows["recompute what is nearly free"], rows["recompute what is cheap"]
    step: Any = SimpleNamespace(device=torch.device("cuda"), memory_limit=None)
    assert default.applies(step, None) and not cheap.applies(step, None)
    step.memory_limit = 1 << 30
    assert cheap.applies(step, None) and not default.applies(step, None)
    step.device, step.memory_limit = torch.device("cpu"), None
    assert not default.applies(step, None) and not cheap.applies(step, None)
