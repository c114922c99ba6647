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

from stepgraph.compiler import pipeline
from stepgraph.compiler.kernels.gelu import gelu, gelu_gradient
from stepgraph.compiler.passes import absorbed, rewritten
from stepgraph.compiler.passes.absorbed import made
from stepgraph.compiler.passes.recompute_fused import recompute_by_default, recompute_cheap
from stepgraph.compiler.program import Phase, adopt_tags, fake, is_view, note, notes, tag
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


def test_work_is_what_products_and_kernels_move_and_compute() -> None:
    step = recorded(perceptron, *BLOCKS[:4])
    products = [node for node in step.graph.nodes if node.target is aten.mm.default]
    moved = sum(fake(one).nbytes for node in products for one in (node, *node.all_input_nodes))
    operations = len(products) * 2 * ROWS * WIDTH * WIDTH
    by_kernels = 4 * SIZE  # x and y, then dy and dx; that x is read again, only recomputation decides
    assert rewritten._work(step.graph) == moved + operations / rewritten.OPERATIONS + by_kernels


def centered(a: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Any:
    """Columns without their means."""
    x = a @ w
    y = x - x.mean(0)
    z = y @ w
    yield
    yield [y.t() @ (g * z)]


def test_what_is_computed_with_sums_over_rows_reads_the_rows_again() -> None:
    step = recorded(centered, drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH), drawn(ROWS, WIDTH))
    assert rewritten._moved_by_kernels(step.graph) == 6 * SIZE  # x twice and y, then g, z and their product


def converted(a: torch.Tensor, g: torch.Tensor, *weights: torch.Tensor) -> Any:
    """The same, from an input in float32."""
    return perceptron(a.to(HALF), g, *weights)


def test_what_costs_least_for_its_bytes_is_written_again_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A converted input comes first, but takes a read in float32."""
    step = recorded(converted, BLOCKS[0].float(), *BLOCKS[1:])
    monkeypatch.setattr(rewritten, "SHARE", 1.0)
    kept = rewritten.kept_for_products(step.graph)
    inputs = {node for node in kept if node.args[0].op == "placeholder"}
    for budget, count, whether in ((2 * SIZE, 2, False), (5 * SIZE - 1, 2, False), (5 * SIZE, 3, True)):
        monkeypatch.setattr(rewritten, "_work", lambda graph, budget=budget: budget)
        found = rewritten.affordable(step.graph, kept)
        assert len(found) == count and (inputs <= found) is whether


def rectified(a: torch.Tensor, w: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> Any:
    """A ReLU whose gradient reads only its result."""
    y = (a @ w).relu()
    z = (y @ v) @ v
    yield
    dy = (g @ z.t() @ z) @ v.t()
    yield [y.t() @ g, ((y > 0) * dy) @ w.t()]


def test_nothing_is_written_again_from_an_array_that_would_wait_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewritten, "SHARE", 1e6)
    step = recorded(rectified, drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH), drawn(WIDTH, WIDTH), drawn(ROWS, WIDTH))
    kept = rewritten.kept_for_products(step.graph)
    assert any(node.target is aten.relu.default for node in kept)
    assert not rewritten.affordable(step.graph, kept)


def normalized(a: torch.Tensor, w: torch.Tensor, v: torch.Tensor, g: torch.Tensor, scale: torch.Tensor) -> Any:
    """A ReLU whose gradient reads its source, too, as behind a normalization, and then two products."""
    x = a @ w
    y = (x * scale).relu()
    z = (y @ v @ v).sin()
    yield
    du, g = z.t() @ g, g @ v.t()
    dv = y.t() @ g
    dx = (y > 0) * (g @ v.t())
    yield [du, dv, (dx * x).sum(0), dx @ w.t()]


def test_products_wait_for_kernels_that_read_the_source_of_what_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They also compute for themselves where a ReLU was 0, and do not read it."""
    arrays = [drawn(ROWS, WIDTH), *(drawn(WIDTH, WIDTH) for _ in range(2)), drawn(ROWS, WIDTH), drawn(1, WIDTH)]
    step = recorded(normalized, *arrays)
    monkeypatch.setattr(rewritten, "SHARE", 1e6)
    after = changed(step, recompute_by_default, *arrays)
    again = [node for node in after.find_nodes(op="call_function", target=aten.relu.default) if notes(node).recomputed]
    readers = sorted((user for node in again for user in absorbed.users_of(node)), key=list(after.nodes).index)
    assert len(again) == 2 and [node.target for node in readers] == [aten.gt.Scalar, aten.mm.default]
    products = after.find_nodes(op="call_function", target=aten.mm.default)
    assert readers[1] is products[-1]  # behind the kernel of the sum, and the product that is next


def gated(a: torch.Tensor, g: torch.Tensor, *weights: torch.Tensor) -> Any:
    """Blocks of a joint product, a SwiGLU and another product, with joint gradients, as in Llama."""
    inner, found = [], []
    for w, v in zip(weights[::2], weights[1::2], strict=True):
        x, u = (a @ w).view(2, ROWS // 2, 2 * WIDTH).split(WIDTH, 2)
        s = (x.float() / (1 + torch.exp(-x.float()))).to(HALF)
        h = (s * u).view(ROWS, WIDTH)
        inner.append((a, x, u, s, h))
        a = h @ v
    yield
    for (a, x, u, s, h), w, v in zip(inner[::-1], weights[-2::-2], weights[::-2], strict=True):
        found += [g.t() @ h]
        dh = (g @ v.t()).view_as(u)
        part = 1 / (1 + torch.exp(-x.float()))
        dx = ((dh * u).float() * part * (1 + x.float() * (1 - part))).to(HALF)
        both = torch.cat([one.view(ROWS, WIDTH) for one in (dx, dh * s)], 1)
        found += [a.t() @ both]
        g = both @ w.t()
    yield [*found, g]


def test_a_gated_activation_is_written_by_the_kernel_of_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing keeps it from that kernel, which reads both of its sources once, under one name each."""
    arrays = [drawn(ROWS, WIDTH), drawn(ROWS, WIDTH), *(drawn(WIDTH, (2 - i % 2) * WIDTH) / 8 for i in range(4))]
    step = recorded(gated, *arrays)
    monkeypatch.setattr(rewritten, "SHARE", 1e6)
    graph = changed(step, recompute_by_default, *arrays)
    kernel = graph.find_nodes(op="call_function", target=aten.cat.default)[-1]
    products = [node for node in graph.find_nodes(op="call_function", target=aten.mm.default) if node > kernel]
    (hidden,) = {made(source) for node in products for source in node.all_input_nodes if notes(source).recomputed}
    assert hidden.target is aten.mul.Tensor and not is_behind(hidden, kernel)
    read = [node for node in graph.find_nodes(op="call_function", target=later) if is_behind(hidden, node)]
    (gate, _), (up, _) = (node.args for node in read[-2:])
    for source in (gate, up):
        assert [user.target for user in source.users if absorbed.is_gradient(user)] == [later]


def with_residuals(a: torch.Tensor, g: torch.Tensor, first: torch.Tensor, *weights: torch.Tensor) -> Any:
    """Blocks of a normalization by rows, a product, a GELU and another product, beside a residual sum."""
    r, inner = a @ first, []
    for w, v in zip(weights[::2], weights[1::2], strict=True):
        f = r.float()
        s = torch.rsqrt((f * f).mean(1, keepdim=True) + 1e-6)
        h = (f * s).to(HALF)
        z = h @ w
        y = gelu(z)
        inner.append((r, s, h, z, y))
        r = r + y @ v
    yield
    found = []
    for (r, s, h, z, y), w, v in zip(inner[::-1], weights[-2::-2], weights[::-2], strict=True):
        found.append(y.t() @ g)
        dz = gelu_gradient(g @ v.t(), z)
        found.append(h.t() @ dz)
        dh, f = (dz @ w.t()).float(), r.float()
        g = g + (dh * s - f * s**3 * (dh * f).mean(1, keepdim=True)).to(HALF)
    yield [*found, a.t() @ g]


def test_what_is_written_again_does_not_wait_for_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual stream is read from the last block to the first; what one computes from it is written in its own."""
    arrays = [drawn(ROWS, WIDTH), drawn(ROWS, WIDTH), *(drawn(WIDTH, WIDTH) / 8 for _ in range(7))]
    step = recorded(with_residuals, *arrays)
    monkeypatch.setattr(rewritten, "SHARE", 1e6)
    graph = changed(step, recompute_by_default, *arrays)
    products = graph.find_nodes(op="call_function", target=aten.mm.default)
    written = {(made(one), product) for product in products for one in product.all_input_nodes}
    waits = [sum(node < each < product for each in products) for node, product in written if notes(node).recomputed]
    assert len(waits) == 3 and max(waits) < 4  # the products of a block


def is_behind(node: fx.Node, other: fx.Node) -> bool:
    """Whether an operator can only run after another one."""
    return node is other or any(is_behind(source, other) for source in node.all_input_nodes)


def convolved(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, g: torch.Tensor) -> Any:
    """Convolutions with ReLU after the first; one operator computes both gradients of each."""
    settings = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    first = aten.convolution(x, w, None, *settings)
    y = first.relu().to(v.dtype)
    read, found = [y], []
    for _ in range(2):
        read.append(aten.convolution(read[-1], v, None, *settings))
    yield
    for one in reversed(read):
        g, dv, _ = aten.convolution_backward(g, one, v, None, *settings, [True, True, False])
        found.append(dv)
    yield [*found, g * first.sigmoid()]


def images(kind: torch.dtype) -> list[torch.Tensor]:
    x, w, v = drawn(2, 8, 8, 8, dtype=torch.float32), *(drawn(8, 8, 3, 3, dtype=torch.float32) for _ in range(2))
    return [x, w, v.to(kind), x.to(kind)]


@pytest.mark.parametrize(("kind", "cost"), [(torch.float32, 1), (torch.float64, 3)])
def test_sources_that_no_kernel_reads_at_that_time_cost_a_read(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, cost: int
) -> None:
    """If a gradient cannot read a shape from a source, because that has another type, kernels have to wait for it."""
    arrays = images(kind)
    step = recorded(convolved, *arrays)
    monkeypatch.setattr(rewritten, "SHARE", 1.0)
    for budget, chosen in ((cost * arrays[0].nbytes - 1, 0), (cost * arrays[0].nbytes, 1)):
        monkeypatch.setattr(rewritten, "_work", lambda graph, budget=budget: budget)
        assert len(rewritten.affordable(step.graph, rewritten.kept_for_products(step.graph))) == chosen


def test_gradients_of_filters_are_computed_behind_kernels_that_write_their_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = recorded(convolved, *images(torch.float32))
    monkeypatch.setattr(rewritten, "SHARE", 1e6)
    after = changed(step, recompute_by_default, *images(torch.float32))
    *whole, source, filters = after.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert [node.args[-1] for node in whole] == [[True, True, False]] * 2  # what they read is not recomputed
    assert (source.args[-1], filters.args[-1]) == ([True, False, False], [False, True, False])
    assert source.args[1].target is aten.convolution.default and notes(filters.args[1]).recomputed
    (kernel,) = after.find_nodes(op="call_function", target=aten.mul.Tensor)
    assert source < kernel < filters


def test_kernels_stay_the_same_when_products_are_divided_and_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = recorded(convolved, *images(torch.float32)).graph
    monkeypatch.setattr(rewritten, "SHARE", 1e6)
    kept, before, order = rewritten.kept_for_products(graph), rewritten._kernels(graph), list(graph.nodes)
    rewritten.write_late(graph, rewritten.affordable(graph, kept), kept)
    assert list(graph.nodes) != order and rewritten._kernels(graph) == before != set()


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
