"""Sums over rows in fused steps on a GPU: the kernel that writes the rows adds them up, block by block."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

import stepgraph as sg
from stepgraph.compiler.kernels.gelu import gelu, gelu_gradient
from stepgraph.compiler.passes import absorbed, sums_of_rows
from stepgraph.compiler.passes.shared_gradients import store_gradients
from stepgraph.compiler.passes.sums_of_rows import sum_rows_where_written
from stepgraph.compiler.program import fake, notes
from stepgraph.system import torch_private
from tests.test_recompute_default import recorded

aten = torch.ops.aten
HALF = torch.bfloat16
BATCH, STEPS, WIDTH = 4, 12, 8
ROWS = BATCH * STEPS


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a test count as large, their sums do not, and blocks have at least six rows."""
    monkeypatch.setattr(absorbed, "SMALL", ROWS * WIDTH)
    monkeypatch.setattr(sums_of_rows, "ROWS", 6)
    monkeypatch.setattr(sums_of_rows, "FEWEST", 2 * WIDTH)
    monkeypatch.setattr(sums_of_rows, "SHORT", 100)


def drawn(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rewritten(function: Callable[..., Any], *arrays: torch.Tensor, before: Any = None) -> tuple[fx.Graph, fx.Graph]:
    """A recorded step before and after the pass; results are the same, up to the order of sums."""
    module = recorded(function, *arrays)
    if before is not None:
        before(module.graph)
    after = fx.GraphModule(module, copy.deepcopy(module.graph))
    sum_rows_where_written(after.graph)
    expected, found = (fx.Interpreter(one).run(*arrays) for one in (module, after))
    for one, other in zip(expected, found, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2)
    assert all(notes(node).layer for node in after.graph.nodes if node.op == "call_function")
    return module.graph, after.graph


def blocks(graph: fx.Graph) -> list[tuple[int, ...]]:
    """The shapes of what is written in blocks."""
    stores = graph.find_nodes(op="call_function", target=torch_private.written_to_memory())
    return sorted(tuple(fake(node).shape) for node in stores if fake(node).ndim == 3)


def summed(graph: fx.Graph) -> list[tuple[tuple[int, ...], Any]]:
    """The shapes of what is added up, and along which dimensions; the last stage comes first."""
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    found = [(tuple(fake(node.args[0]).shape), list(node.args[1])) for node in sums]
    return sorted(found, key=lambda one: (len(one[0]), one))


def same(before: fx.Graph, after: fx.Graph) -> bool:
    return [node.target for node in before.nodes] == [node.target for node in after.nodes]


def perceptron(a: torch.Tensor, g: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
    """A product with a bias and a GELU; the gradient of the bias is a sum over rows."""
    x = a @ w
    yield
    dy = (g.view(ROWS, WIDTH) @ v).view(BATCH, STEPS, WIDTH)
    dx = gelu_gradient(dy, x).view(ROWS, WIDTH)
    yield [dx @ w.t(), dx.sum(0, keepdim=True), gelu(x).view(ROWS, WIDTH).t() @ dx]


MATRICES = [drawn(BATCH, STEPS, WIDTH), drawn(BATCH, STEPS, WIDTH), drawn(WIDTH, WIDTH), drawn(WIDTH, WIDTH)]
IN_BLOCKS = [((8, WIDTH), [0]), ((8, 6, WIDTH), [1])]  # 4 batches, each in two blocks of six rows


def test_the_gradient_of_a_bias_is_summed_by_blocks() -> None:
    _, after = rewritten(perceptron, *MATRICES)
    assert summed(after) == IN_BLOCKS
    # The GELU, which the same kernel recomputes, is written in the same loops.
    assert blocks(after) == [(8, 6, WIDTH)] * 2


def test_blocks_add_up_in_float32() -> None:
    _, after = rewritten(perceptron, *MATRICES)
    for node in after.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        assert fake(node).dtype is fake(node.args[0]).dtype is torch.float32


@pytest.mark.parametrize(("name", "number"), [("ROWS", ROWS), ("FEWEST", ROWS * WIDTH), ("LIMIT", WIDTH)])
def test_rows_that_make_no_good_blocks_stay(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums_of_rows, name, number)
    assert same(*rewritten(perceptron, *MATRICES))


@pytest.mark.parametrize(("batch", "divided"), [(BATCH, True), (1, False)])
def test_a_long_computation_keeps_its_loops(batch: int, divided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Intermediate results that the compiler stores could not be fused with other loops."""
    monkeypatch.setattr(sums_of_rows, "SHORT", 3)
    given = [drawn(batch, ROWS // batch, WIDTH), *MATRICES[2:]]

    def long(g: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> Any:
        yield
        dx = (g @ w).float().sin().mul(2).exp().to(HALF)
        yield [dx @ v, dx.view(ROWS, WIDTH).sum(0)]

    before, after = rewritten(long, *given)
    assert blocks(after) == ([(BATCH, STEPS, WIDTH)] if divided else [])
    assert divided or same(before, after)


def test_small_results_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbed, "SMALL", 4 * ROWS * WIDTH)
    assert same(*rewritten(perceptron, *MATRICES))


def residual(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    """The gradient behind a residual sum and a ReLU, with the sums of a batch normalization; channels are last."""
    a, b, y, x = (one.permute(0, 3, 1, 2) for one in (a, b, y, x))
    yield
    a = torch.conv2d(a, w)
    g = torch.where(y <= 0, torch.zeros((), dtype=a.dtype), a + b)
    level = g.float().sum([0, 2, 3], keepdim=True)
    along = (g.float() * x.float()).sum([0, 2, 3], keepdim=True)
    dx = (g.float() - level - x.float() * along).to(a.dtype)
    yield [torch.conv2d(dx, w), g, level.view(-1), along.view(-1)]


def test_sums_of_a_normalized_gradient_stay() -> None:
    """They also read the source of the normalization."""
    images = [drawn(4, 4, 6, WIDTH) for _ in range(4)]
    assert same(*rewritten(residual, *images, drawn(WIDTH, WIDTH, 1, 1), before=store_gradients))
    assert same(*rewritten(residual, *images, drawn(WIDTH, WIDTH, 1, 1)))


def joint(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> Any:
    """Gradients of two products of one source, side by side, and those of their biases."""
    yield
    parts = [one @ w for one in (q, k)]
    biases = [one.sum(0) for one in parts]
    halves = [one * 2 for one in biases]  # comes before the concatenation
    g = torch.cat(parts, 1)
    yield [g.t() @ q, *halves]


def test_parts_that_are_written_side_by_side_are_summed_at_once() -> None:
    _, after = rewritten(joint, drawn(ROWS, WIDTH), drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH))
    assert summed(after) == [((8, 2 * WIDTH), [0]), ((8, 6, 2 * WIDTH), [1])]
    assert blocks(after) == [(8, 6, 2 * WIDTH)]


def test_a_concatenation_of_computed_parts_stays() -> None:
    """Kernels write such parts directly to their places."""

    def computed(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> Any:
        yield
        parts = [(one @ w) * 2 for one in (q, k)]
        yield [torch.cat(parts, 1).t() @ q, *(one.sum(0) for one in parts)]

    assert same(*rewritten(computed, drawn(ROWS, WIDTH), drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH)))


@pytest.mark.parametrize("reads", [False, True])
def test_a_kernel_that_reduces_rows_keeps_its_loops(reads: bool) -> None:
    """The gradient of a layer normalization is computed from sums along rows; a layer normalization computes them."""

    def normalized(g: torch.Tensor, w: torch.Tensor) -> Any:
        yield
        dy = g @ w
        dx = dy * 2 if reads else dy - dy.float().mean(1, keepdim=True).to(dy.dtype)
        others = [(dx - dx.float().mean(1, keepdim=True)).to(HALF) @ w] if reads else []
        yield [dx @ w, dx.sum(0), *others]

    assert same(*rewritten(normalized, drawn(ROWS, WIDTH), drawn(WIDTH, WIDTH)))


@pytest.mark.parametrize("axes", [[0], [1], [2]])
def test_sums_over_some_rows_are_what_they_were(axes: list[int]) -> None:
    """With as many batches as steps, only the axes tell which rows are added up."""

    def some(g: torch.Tensor, w: torch.Tensor) -> Any:
        yield
        x = torch.relu(g @ w)
        yield [x.view(-1, WIDTH).t() @ x.view(-1, WIDTH), x.sum(axes)]

    rewritten(some, drawn(STEPS, STEPS, WIDTH), drawn(WIDTH, WIDTH))


def transformer(fuse: bool) -> sg.TrainingGraph:
    """A block with biases, large enough to fill a GPU."""
    sg.set_seed(5)
    x, y = sg.Tensor((64, 128, 256)), sg.Tensor((64, 128, 256))
    graph = sg.Graph()
    h = graph.add(x, graph.node(sg.MultiheadAttentionLayer.create(256, 4), [x, x, x]))
    inner = graph.gelu(graph.dense(graph.layer_normalization(h), 1024))
    graph.add(h, graph.dense(inner, 256))
    made = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    made.add_inputs({"x": x}, {"y": y})
    made.compile("cuda", fuse=fuse, compute_type="bfloat16")
    return made


@pytest.mark.gpu
def test_a_fused_step_sums_where_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, generated = [], torch_private.generated_module

    def note_code(one: Any) -> Any:
        module = generated(one)
        codes.append(Path(str(module.__file__)).read_text())
        return module

    monkeypatch.undo()  # of sizes
    monkeypatch.setattr(torch_private, "generated_module", note_code)
    numbers = np.random.default_rng(0)
    data = tuple({name: numbers.standard_normal((64, 128, 256), np.float32)} for name in "xy")
    plain, fused = transformer(False), transformer(True)
    for _ in range(5):
        assert fused.execute(*data).loss == pytest.approx(plain.execute(*data).loss, rel=5e-3)
    kernels = re.findall(r"^def triton_(\w+?)_fused\w*\((.*?)\):\n(.*?)^'''", codes[-1], re.M | re.S)
    pairs = [(kind, body) for kind, given, body in kernels if len(re.findall(r"\bin_(?:out_)?ptr\d", given)) > 1]
    gradients = [kind for kind, body in pairs if "exp2(" in body]  # of GELU, which read two arrays
    assert gradients and "poi" not in gradients, "the kernels that compute them also add up their rows"


@pytest.mark.parametrize("shape", [(3,), (2, 3), (4, 1, 3), (1, 1), (2, 0, 3), (3, 2, 4)])
def test_contiguous_rows_are_found_without_pytorch(shape: tuple[int, ...]) -> None:
    whole = torch.empty([2 * extent for extent in shape])
    every = tuple(slice(extent) for extent in shape)
    arrays = [torch.empty(shape), whole[every], torch.empty(shape[::-1]).permute(*reversed(range(len(shape))))]
    arrays.append(torch.empty(1).expand(shape))
    for array in arrays:
        assert sums_of_rows._are_contiguous(array.shape, array.stride()) == array.is_contiguous()
