"""Fused steps on CUDA pad the channels of convolutions whose pixels would not begin at multiples of 16 bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.passes import pad_channels
from stepgraph.compiler.program import fake

aten, ours, converted = torch.ops.aten, torch.ops.stepgraph, torch.ops.prims.convert_element_type
LAST = torch.channels_last
Arrays = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every convolution is large."""
    monkeypatch.setattr(pad_channels, "LARGE", 0)


@dataclass(frozen=True)
class Shape:
    """A convolution of 8 by 6 pixels, and how its arrays lie in memory."""

    inputs: int = 16
    outputs: int = 5
    size: int = 3
    groups: int = 1
    transposed: bool = False
    dtype: torch.dtype = torch.bfloat16
    order: torch.memory_format = LAST

    @property
    def settings(self) -> tuple[Any, ...]:
        margin = [self.size // 2] * 2
        return [1, 1], margin, [1, 1], self.transposed, [0, 0], self.groups

    def drawn(self) -> Arrays:
        """Source, filters and biases: small integers, whose products and sums are exact in float32."""
        generator = torch.Generator().manual_seed(self.outputs)
        first, second = self.outputs, self.inputs // self.groups
        filters = (second, first) if self.transposed else (first, second)
        shapes = (3, self.inputs, 8, 6), (*filters, self.size, self.size), (self.outputs,)
        x, w, b = (torch.randint(-2, 3, shape, generator=generator).to(self.dtype) for shape in shapes)
        return x.contiguous(memory_format=self.order), w.contiguous(memory_format=self.order), b


def step(shape: Shape) -> Callable[..., Arrays]:
    """What a step does around the last convolution: what reads the result, and the gradients."""

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Arrays:
        y = aten.convolution(x, w, b, *shape.settings)
        rows = converted(y.view(*y.shape[:2], -1), torch.float32)
        g = converted(rows.clamp(-2, 2), y.dtype).view(y.shape)
        dx, dw, _ = aten.convolution_backward(g, x, w, [shape.outputs], *shape.settings, [True, True, False])
        return rows.amax(1), dx, dw, g.sum([0, 2, 3])

    return run


def padded(run: Callable[..., Arrays], arrays: Arrays) -> fx.Graph:
    """The graph of a function after the pass; it computes the same."""
    module = make_fx(run, tracing_mode="fake")(*arrays)
    pad_channels.pad_channels(module.graph)
    module.recompile()
    for found, wanted in zip(module(*arrays), run(*arrays), strict=True):
        assert torch.equal(found, wanted)
    return module.graph


def pads(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)


def called(graph: fx.Graph, target: Any) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "size"), [(5, 3), (21, 3), (1, 5)])
def test_results_and_gradients_are_padded(outputs: int, size: int, dtype: torch.dtype) -> None:
    shape = Shape(outputs=outputs, size=size, dtype=dtype)
    graph = padded(step(shape), shape.drawn())
    width = -(-outputs // 8) * 8
    (result,), (both,) = called(graph, aten.convolution.default), called(graph, aten.convolution_backward.default)
    assert fake(result).shape[1] == width and fake(result).is_contiguous(memory_format=LAST)
    gradient, _, filters = both.args[:3]
    assert fake(gradient).shape[1] == width and fake(gradient).is_contiguous(memory_format=LAST)
    assert result.args[1] is filters and fake(filters).shape[0] == width
    assert len(pads(graph)) == 2  # filters once, and the gradient once for products and sums
    assert {user.target for user in gradient.users} == {aten.convolution_backward.default, aten.sum.dim_IntList}


def test_hidden_convolutions_are_padded() -> None:
    """With filters of one pixel, PyTorch's compiler gets operators of ours."""
    shape = Shape(size=1)
    order, back = [240, 1, 30, 5], [[768, 1, 96, 16], [16, 1, 16, 16]]

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Arrays:
        y = ours.convolution(x, w, None, *shape.settings, order) + b.view(1, -1, 1, 1)
        g = y.clamp(-2, 2)
        dx, dw = (ours.convolution_backward(g, x, w, [5], *shape.settings, i, back[i]) for i in (0, 1))
        return y.amax(1), dx, dw, g.sum([0, 2, 3])

    graph = padded(run, shape.drawn())
    (result,) = called(graph, ours.convolution.default)
    assert fake(result).stride() == (384, 1, 48, 8)
    first, second = called(graph, ours.convolution_backward.default)
    assert first.args[:3] == second.args[:3] and fake(first.args[0]).stride() == (384, 1, 48, 8)
    assert len(pads(graph)) == 2


@pytest.mark.parametrize(
    "shape",
    [
        Shape(dtype=torch.float32),
        Shape(outputs=24),
        Shape(inputs=12),
        Shape(order=torch.contiguous_format),
        Shape(outputs=10, groups=2),
        Shape(transposed=True),
    ],
    ids=["float32", "aligned", "unaligned source", "channels first", "groups", "transposed"],
)
def test_other_convolutions_are_not_padded(shape: Shape) -> None:
    assert not pads(padded(step(shape), shape.drawn()))


def test_small_convolutions_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pad_channels, "LARGE", 3 * 5 * 8 * 6 + 1)
    assert not pads(padded(step(Shape()), Shape().drawn()))


def test_what_would_be_copied_is_not_padded() -> None:
    shape = Shape()
    more = torch.randint(-2, 3, (8, 5, 3, 3)).to(torch.bfloat16).contiguous(memory_format=LAST)
    g = torch.randint(-2, 3, (3, 5, 8, 6)).to(torch.bfloat16).contiguous(memory_format=LAST)

    def returned(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Arrays:
        return (aten.convolution(x, w, b, *shape.settings),)

    def convolved(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, more: torch.Tensor) -> Arrays:
        return (aten.convolution(aten.convolution(x, w, b, *shape.settings), more, None, *shape.settings).neg(),)

    def passed_in(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Arrays:
        return aten.convolution_backward(g, x, w, None, *shape.settings, [True, True, False])[:2]

    def read_elsewhere(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Arrays:
        gradient = g.neg()
        return *passed_in(x, w, gradient), gradient.amax(1)

    def summed_inside(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Arrays:
        return aten.convolution_backward(g.neg(), x, w, [5], *shape.settings, [True, True, True])

    x, w, b = shape.drawn()
    assert not pads(padded(returned, (x, w, b)))
    assert not pads(padded(convolved, (x, w, b, more)))
    for run in (passed_in, read_elsewhere, summed_inside):
        assert not pads(padded(run, (x, w, g)))
