"""Fused steps on a GPU write the computed parts of concatenations directly to their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.passes import concatenations
from stepgraph.layers.rotary import rotate
from stepgraph.system import torch_private

aten, own = torch.ops.aten, torch.ops.stepgraph


def stack(arrays: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """What PyTorch's compiler makes of stacked arrays."""
    return torch.cat([one.unsqueeze(dim) for one in arrays], dim)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every concatenation is large."""
    monkeypatch.setattr(concatenations, "LARGE", 0)


def changed(function: Callable[..., Any], *arrays: torch.Tensor) -> fx.Graph:
    """The graph of a function after the pass; it computes the same."""
    module = make_fx(function, {aten.stack.default: stack}, tracing_mode="fake")(*arrays)
    concatenations.store_parts(module.graph)
    module.recompile()
    for found, expected in zip(module(*arrays), function(*arrays), strict=True):
        assert torch.equal(found, expected)
    return module.graph


def written(graph: fx.Graph) -> list[Any]:
    """The operators whose results are written."""
    return [node.args[0].target for node in graph.find_nodes(op="call_function", target=own.written.default)]


def filled(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=own.filled.default)


def test_parts_that_read_the_same_are_written_together() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        gated = torch.cat([x.sin() * y, (x + y).view(4, 3)], 1) @ w
        read_by_kernel = torch.cat([x.cos(), x.tan()], 1) + 1
        unlike = torch.cat([x[:, :1] + 1, x[:, 1:] * y[:, 1:]], 1) @ w[:3]
        apart = torch.cat([x.exp(), y.exp()], 1) @ w
        copied = torch.cat([x, x], 1) @ w
        return [gated, read_by_kernel, unlike, apart, copied]

    graph = changed(function, torch.rand(4, 3), torch.rand(4, 3), torch.rand(6, 2))
    assert written(graph) == [aten.mul.Tensor, aten.view.default] and not filled(graph)


@pytest.mark.usefixtures("large")
def test_computed_parts_of_large_concatenations_are_written_on_their_own() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        apart = torch.cat([x.exp(), y.t(), (x @ w[:3]) + 1], 1) @ w.t().repeat(4, 1)
        read_by_kernel = torch.cat([x.cos(), y.t()], 1) + 1
        moved = torch.cat([x.flip(1).clone(), y.t()], 1) @ w
        return [apart, read_by_kernel, moved]

    graph = changed(function, torch.rand(4, 3), torch.rand(3, 4), torch.rand(6, 2))
    assert written(graph) == [aten.exp.default, aten.add.Tensor] and not filled(graph)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("axis", [-1, -2], ids=["interleaved", "halves"])
def test_parts_of_nested_concatenations_are_written_to_their_places(axis: int) -> None:
    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        pairs = torch.stack([x.sin(), x.cos()], axis).view(2, 5, 12)
        whole = torch.cat([torch.cat([pairs, y.exp()], 2), y], 2).view(10, 24)
        return [whole @ w]

    graph = changed(function, torch.rand(2, 5, 2, 3), torch.rand(2, 5, 6), torch.rand(24, 2))
    (whole,) = filled(graph)
    assert len(whole.args[0]) == 4 and len(written(graph)) == 3
    assert not graph.find_nodes(op="call_function", target=aten.cat.default)


@pytest.mark.usefixtures("large")
def test_other_nested_concatenations_stay() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        inner = torch.cat([x.sin(), x.cos()], 1)
        read_twice = torch.cat([inner, y.exp()], 1) @ w
        mixed = torch.cat([torch.cat([x.tan(), x.exp()], 0).view(4, 6), y], 1) @ w
        copied = torch.cat([torch.cat([x, y], 1), y.exp()], 1) @ w
        turned = torch.cat([torch.cat([x.sinh(), x.cosh()], 0).t().reshape(4, 6), y], 1) @ w
        return [read_twice, inner @ w[:6], mixed, copied, turned]

    graph = changed(function, torch.rand(4, 3), torch.rand(4, 3), torch.rand(9, 2))
    # Of an array inside another one, rows cannot be divided in the middle.
    assert not filled(graph) and aten.exp.default in written(graph)


@pytest.mark.usefixtures("large")
def test_parts_of_another_type_or_rank_stay() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        converted = torch.cat([x.exp(), y.double().exp()], 1) @ w.double()
        empty = torch.cat([x.exp(), torch.zeros(0), y], 1) @ w
        return [converted, empty]

    graph = changed(function, torch.rand(4, 3), torch.rand(4, 3), torch.rand(6, 2))
    assert not written(graph) and not filled(graph)


# Parts that other kernels read first


def images(channels: int, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(2, channels, 4, 6, generator=generator)
    return drawn.contiguous(memory_format=torch.channels_last)


def skipped(kernel: str, others: int = 8) -> tuple[fx.Graph, list[fx.Node]]:
    """The graph of a part with 8 channels that is pooled and concatenated with others, and its concatenations."""
    generator = torch.Generator().manual_seed(0)
    arrays = images(8, generator), images(others, generator), images(8 + others, generator)[:1]

    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        part = x.relu()
        read = {
            "pooled": lambda: torch.nn.functional.max_pool2d(part, 2),
            "summed": lambda: part.sum((2, 3)),
            "inlined": part.exp,
            "convolved": lambda: torch.conv2d(part, w[:, :8, :3, :3]),
            "returned": lambda: part,
        }[kernel]()
        whole = torch.cat([part, y.neg()], 1)
        return [read, torch.conv2d(whole, w), whole.sin() if kernel == "summed" else read]

    graph = changed(function, *arrays)
    return graph, filled(graph)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("kernel", ["pooled", "summed"])
def test_a_part_that_other_kernels_read_is_written_to_its_place(kernel: str) -> None:
    graph, found = skipped(kernel)
    (whole,) = found
    part, other = whole.args[0]  # type: ignore[misc]
    assert {written.args[0].target for written in (part, other)} == {aten.relu.default, aten.neg.default}
    assert set(whole.args[0][0].args[0].users) == {part}  # type: ignore[index, union-attr]
    assert len(part.users) == 2 and whole.args[2] == [384, 1, 96, 16] and whole.args[4] == [0, 8]
    assert not graph.find_nodes(op="call_function", target=aten.cat.default)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("kernel", "others"), [("inlined", 8), ("convolved", 8), ("returned", 8), ("pooled", 6)], ids=str
)
def test_parts_that_are_needed_elsewhere_or_lie_badly_are_copied(kernel: str, others: int) -> None:
    graph, _ = skipped(kernel, others)
    (relu,) = graph.find_nodes(op="call_function", target=aten.relu.default)
    assert len(relu.users) > 1


def test_small_concatenations_copy_their_parts() -> None:
    assert not skipped("pooled")[1]


@pytest.mark.deep
@pytest.mark.usefixtures("large")
def test_compiled_kernels_read_parts_in_their_places() -> None:
    generator, seen = torch.Generator().manual_seed(0), list[fx.Node]()
    arrays = images(8, generator), images(8, generator), images(16, generator)[:1]
    inductor = torch_private.inductor()

    def function(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        part = x.relu()
        whole = torch.cat([part, y.neg()], 1)
        return [torch.nn.functional.max_pool2d(part, 2), torch.conv2d(whole, w), whole[:, :8].sin()]

    def compile_inner(module: fx.GraphModule, *given: Any, **settings: Any) -> Any:
        concatenations.store_parts(module.graph)
        seen.extend(filled(module.graph))
        return inductor.compile_kernels(module, *given, **settings)

    with torch.no_grad():
        compiled = inductor.compile_graph(make_fx(function)(*arrays), arrays, compile_inner)
        torch.testing.assert_close(list(compiled(*arrays)), function(*arrays))
    assert len(seen) == 1


# Rotary positions, whose gradient is such a concatenation


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("dimension", [8, 4], ids=["whole", "partial"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_joint_gradient_of_rotated_rows_is_filled(dimension: int, interleaved: bool) -> None:
    settings = {"base": 10.0, "dimension": dimension, "interleaved": interleaved}

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        sources = [x.detach().requires_grad_() for x in (q, k)]
        turned = [rotate(x, heads=heads, **settings) for x, heads in zip(sources, (4, 2), strict=True)]
        gradients = torch.autograd.grad(turned, sources, [q, k])
        return [torch.cat([v, *gradients], -1).view(6, -1) @ w]

    shapes = (2, 3, 32), (2, 3, 16), (2, 3, 16), (64, 5)
    graph = changed(function, *(torch.rand(shape) for shape in shapes))
    (whole,) = filled(graph)
    assert len(whole.args[0]) == (5 if dimension == 8 else 7)


def test_gradients_of_rotated_rows_in_half_precision_are_rounded_once() -> None:
    x, g = (torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2))
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        source = x.to(dtype).requires_grad_()
        turned = rotate(source, heads=2, base=100.0, dimension=32, interleaved=False)
        found.append(torch.autograd.grad(turned, source, g.to(dtype))[0].double())
    torch.testing.assert_close(*found, rtol=2**-8, atol=1e-5)
