"""Fused steps on CUDA pad the classes of pixels that a convolution predicts for a cross entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.kernels import label_losses
from stepgraph.compiler.passes import pad_channels
from stepgraph.compiler.passes.pad_predictions import pad_predictions
from stepgraph.compiler.program import fake

aten, ours = torch.ops.aten, torch.ops.stepgraph
LAST = torch.channels_last
LEFT_OUT = -100
Arrays = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every convolution is large."""
    monkeypatch.setattr(pad_channels, "LARGE", 0)


@dataclass(frozen=True)
class Head:
    """The last convolution of a network, of 3 images with 8 by 6 pixels, and the cross entropy behind it."""

    classes: int = 5
    size: int = 3
    biased: bool = True
    smoothing: float = 0.0
    dtype: torch.dtype = torch.bfloat16

    @property
    def settings(self) -> tuple[Any, ...]:
        return [1, 1], [self.size // 2] * 2, [1, 1], False, [0, 0], 1

    def drawn(self) -> Arrays:
        """Source, filters and biases whose products and sums are exact, labels, and the gradients of the losses."""
        of = torch.Generator().manual_seed(self.classes)
        shapes = (3, 16, 8, 6), (self.classes, 16, self.size, self.size), (self.classes,)
        x, w, b = ((torch.randint(-1, 2, shape, generator=of) / 2).to(self.dtype) for shape in shapes)
        t = torch.randint(0, self.classes, (3, 48), generator=of)
        t[0, :5] = LEFT_OUT
        g = torch.rand(3, 48, generator=of)
        return x.contiguous(memory_format=LAST), w.contiguous(memory_format=LAST), b, t, g

    def step(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> Arrays:
        """As it is recorded if filters have several pixels."""
        y = aten.convolution(x, w, b if self.biased else None, *self.settings)
        dy, losses = self.at_once(y, t, g)
        of = [self.biased and self.classes], *self.settings, [True, True, self.biased]
        dx, dw, db = aten.convolution_backward(dy.view(y.shape), x, w, *of)
        return (losses.mean(), dx, dw, db) if self.biased else (losses.mean(), dx, dw)

    def hidden(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> Arrays:
        """As it is with filters of one pixel, when miscompiled operators are hidden."""
        orders = [[one.stride(i) for i in range(4)] for one in (x, w)]
        order = [48 * self.classes, 1, 6 * self.classes, self.classes]
        y = ours.convolution(x, w, None, *self.settings, order)
        y = y + b.view(1, -1, 1, 1) if self.biased else y
        dy, losses = self.at_once(y, t, g)
        dy = dy.view(y.shape)
        back = (ours.convolution_backward(dy, x, w, [5], *self.settings, i, orders[i]) for i in (0, 1))
        return losses.mean(), *back, dy.sum([0, 2, 3])

    def at_once(self, y: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> Any:
        rows = y.view(*y.shape[:2], -1)
        return ours.label_losses_with_gradient(rows, t, g, LEFT_OUT, self.smoothing)


def padded(run: Callable[..., Arrays], arrays: Arrays) -> fx.Graph:
    """The graph of a function after the pass; it computes the same, also if the cross entropy is expanded."""
    module = make_fx(partial(run), tracing_mode="fake")(*arrays)  # it does not take methods
    wanted = run(*arrays)
    for rewrite in (pad_predictions, label_losses.expand):
        rewrite(module.graph)
        module.recompile()
        for found, one in zip(module(*arrays), wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=2e-2, atol=1e-2)
    return module.graph


def width(graph: fx.Graph) -> int:
    """The channels of the only convolution."""
    (node,) = (node for node in graph.nodes if node.target in pad_channels.RESULTS)
    return fake(node).shape[1]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("classes", "to"), [(5, 8), (21, 24)])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("size", "kind"), [(3, "step"), (1, "hidden")])
def test_predictions_and_gradients_are_padded(
    size: int, kind: str, biased: bool, classes: int, to: int, smoothing: float
) -> None:
    head = Head(classes, size, biased, smoothing)
    graph = padded(getattr(head, kind), head.drawn())
    assert width(graph) == to
    (both,) = (node for node in graph.nodes if node.args[3:] == (LEFT_OUT, smoothing, classes))
    assert fake(both.args[0]).shape == (3, to, 48)
    for node in graph.nodes:
        if node.target in (aten.convolution_backward.default, ours.convolution_backward.default):
            gradient, _, filters = node.args[:3]
            assert fake(gradient).shape == (3, to, 8, 6) and fake(gradient).is_contiguous(memory_format=LAST)
            assert fake(filters).shape[0] == to


def test_both_types_are_padded() -> None:
    head = Head(dtype=torch.float16)
    assert width(padded(head.step, head.drawn())) == 8


@pytest.mark.parametrize("head", [Head(8), Head(dtype=torch.float32)], ids=["aligned", "float32"])
def test_what_is_aligned_is_not_padded(head: Head) -> None:
    assert width(padded(head.step, head.drawn())) == head.classes


def test_predictions_that_something_else_reads_are_not_padded() -> None:
    head = Head()

    def returned(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> Arrays:
        y = aten.convolution(x, w, b, *head.settings)
        dy, losses = head.at_once(y, t, g)
        return y, losses, *aten.convolution_backward(dy.view(y.shape), x, w, [5], *head.settings, [True] * 3)

    def read_elsewhere(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> Arrays:
        y = aten.convolution(x, w, b, *head.settings)
        dy, losses = head.at_once(y, t, g)
        dy = dy.view(y.shape)
        return losses, dy.abs(), *aten.convolution_backward(dy, x, w, [5], *head.settings, [True] * 3)

    for run in (returned, read_elsewhere):
        assert width(padded(run, head.drawn())) == head.classes
