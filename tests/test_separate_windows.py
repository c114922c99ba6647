"""Fused steps on CUDA compute transposed convolutions whose windows do not overlap as products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.passes import separate_windows
from stepgraph.compiler.program import fake

aten = torch.ops.aten
LAST = torch.channels_last
Arrays = tuple[torch.Tensor, ...]
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every convolution is large."""
    monkeypatch.setattr(separate_windows, "LARGE", 0)


@dataclass(frozen=True)
class Shape:
    """A convolution of images of 3 by 5 pixels."""

    inputs: int = 16
    outputs: int = 8
    size: tuple[int, int] = (2, 2)
    stride: tuple[int, int] | None = None
    padding: int = 0
    more: int = 0
    dilation: int = 1
    groups: int = 1
    transposed: bool = True
    dtype: torch.dtype = torch.bfloat16
    order: torch.memory_format = LAST

    @property
    def settings(self) -> tuple[Any, ...]:
        window = list(self.stride or self.size), [self.padding] * 2, [self.dilation] * 2
        return *window, self.transposed, [self.more] * 2, self.groups

    def drawn(self) -> Arrays:
        """Source, filters and biases: small integers, whose products and sums are exact in float32."""
        generator = torch.Generator().manual_seed(self.outputs)
        filters = (self.inputs, self.outputs // self.groups, *self.size)
        shapes = (2, self.inputs, 3, 5), filters, (self.outputs,)
        x, w, b = (torch.randint(-2, 3, shape, generator=generator).to(self.dtype) for shape in shapes)
        return x.contiguous(memory_format=self.order), w.contiguous(memory_format=self.order), b


def concatenated(shape: Shape) -> Callable[..., Arrays]:
    """A result beside another one, and the gradients of both from one array, as in a U-Net."""

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Arrays:
        y = aten.convolution(x, w, b, *shape.settings)
        whole = torch.cat([b.view(1, -1, 1, 1).expand_as(y), y], 1)
        g = whole.clamp(-2, 2).clone()[:, y.shape[1] :]
        dx, dw, _ = aten.convolution_backward(g, x, w, [w.shape[1]], *shape.settings, [True, True, False])
        return whole.sub(1), dx, dw, g.sum([0, 2, 3])

    return run


def changed(run: Callable[..., Arrays], arrays: Arrays) -> fx.Graph:
    """The graph of a function after the pass; it computes the same."""
    module = make_fx(run, tracing_mode="fake")(*arrays)
    separate_windows.multiply_windows(module.graph)
    module.graph.lint()
    module.recompile()
    for found, wanted in zip(module(*arrays), run(*arrays), strict=True):
        assert torch.equal(found, wanted)
    return module.graph


def convolutions(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.target in CONVOLUTIONS]


def products(graph: fx.Graph) -> list[fx.Node]:
    return graph.find_nodes(op="call_function", target=aten.mm.default)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(2, 2), (3, 1), (4, 2)])
def test_results_and_gradients_are_products(size: tuple[int, int], dtype: torch.dtype) -> None:
    shape = Shape(size=size, dtype=dtype)
    graph = changed(concatenated(shape), shape.drawn())
    assert not convolutions(graph)
    result, source, filters = products(graph)
    wide = size[0] * size[1] * 8
    assert [tuple(fake(one).shape) for one in (result, source, filters)] == [(30, wide), (30, 16), (16, wide)]
    assert source.args[0] is filters.args[1]  # the gradient is moved once


def test_only_gradients_that_are_asked_for_are_computed() -> None:
    shape = Shape()

    def run(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> Arrays:
        part = g.neg()[:, 8:]
        return (aten.convolution_backward(part, x, w, None, *shape.settings, [False, True, False])[1],)

    x, w, _ = shape.drawn()
    g = torch.ones(2, 16, 6, 10, dtype=x.dtype).contiguous(memory_format=LAST)
    assert len(products(changed(run, (x, w, g)))) == 1


@pytest.mark.parametrize(
    "shape",
    [
        Shape(size=(3, 3), stride=(2, 2)),
        Shape(size=(2, 2), stride=(3, 3)),
        Shape(padding=1),
        Shape(more=1),
        Shape(dilation=2),
        Shape(groups=2, outputs=16),
        Shape(inputs=8, transposed=False, size=(1, 1)),
        Shape(dtype=torch.float32),
        Shape(order=torch.contiguous_format),
        Shape(outputs=12),
        Shape(inputs=12),
    ],
    ids=lambda shape: repr(shape)[6:],
)
def test_other_convolutions_stay(shape: Shape) -> None:
    assert convolutions(changed(concatenated(shape), shape.drawn())) == list(CONVOLUTIONS)


def test_small_convolutions_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separate_windows, "LARGE", 2 * 8 * 6 * 10 + 1)
    assert convolutions(changed(concatenated(Shape()), Shape().drawn())) == list(CONVOLUTIONS)


def test_what_is_not_moved_anyway_stays() -> None:
    shape = Shape()

    def returned(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Arrays:
        y = aten.convolution(x, w, b, *shape.settings)
        return torch.cat([y, y], 1), y

    def normalized(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Arrays:
        y = aten.convolution(x, w, b, *shape.settings)
        return torch.cat([y.relu(), y.neg()], 1), y.sum([0, 2, 3])

    def dense(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Arrays:
        g = b.view(1, -1, 1, 1) + torch.zeros(2, 8, 6, 10, dtype=x.dtype).contiguous(memory_format=LAST)
        return aten.convolution_backward(g, x, w, None, *shape.settings, [True, True, False])[:2]

    for run in (returned, normalized, dense):
        assert not products(changed(run, shape.drawn()))
