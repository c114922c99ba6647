"""Shapes are found once for layers that are alike, and never taken from one that is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stepgraph as sg
from stepgraph.layers import layer as layers
from stepgraph.layers.likeness import likeness


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_known", {})


def block(graph: sg.Graph, x: sg.Tensor) -> sg.Tensor:
    h = x + graph.attention(graph.rms_normalization(x), 2, causal=True)
    return h + graph.gated_feed_forward(graph.layer_normalization(h), hidden=12)


@pytest.mark.parametrize("rows", [4, sg.BATCH])
def test_the_same_block_is_asked_once(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, returned = list[str](), layers.Layer._returned

    def counted(self: sg.Layer, *given: Any) -> Any:
        asked.append(type(self).__name__)
        return returned(self, *given)

    monkeypatch.setattr(layers.Layer, "_returned", counted)
    graph, x = sg.Graph(), sg.Tensor((rows, 5, 8))
    first = block(graph, x)
    once = len(asked)
    second = block(graph, block(graph, first))
    assert len(asked) == once > 0 and second.shape == first.shape == x.shape


def test_layers_that_differ_are_not_alike() -> None:
    def dense(outputs: int, biases: bool = True) -> sg.Layer:
        return sg.FullyConnectedLayer.create(8, outputs, biases=biases)

    different: list[sg.Layer] = [
        *(dense(3), dense(4), dense(3, False), sg.ReshapeLayer((1, 2)), sg.ReshapeLayer((sg.BATCH, 2))),
        *(sg.TransposeLayer((1, 0)), sg.TransposeLayer((0, 1)), sg.ActivationLayer.relu()),
        *(sg.ActivationLayer.tanh(), sg.DropoutLayer(0.1), sg.DropoutLayer(0.2)),
    ]
    keys = [likeness(one) for one in different]
    assert None not in keys and len({*keys}) == len(keys)
    named = dense(3)
    named.label = "another"
    assert likeness(named) == likeness(dense(3)) == keys[0]


def test_layers_of_others_are_always_asked() -> None:
    sizes = iter([1, 2, 3])

    class Moody(sg.Layer):
        def forward(self, x: torch.Tensor, *, scope: Any) -> torch.Tensor:
            return x.new_empty(x.shape[0], next(sizes))

    graph, x = sg.Graph(), sg.Tensor((4, 8))
    assert [graph.node(Moody(), x).shape[1] for _ in range(3)] == [1, 2, 3]
    assert likeness(sg.TorchLayer(torch.nn.Linear(8, 3))) is None


def test_what_a_layer_refuses_it_refuses_again() -> None:
    graph = sg.Graph()
    graph.dense(sg.Tensor((4, 8)), 3)
    layer = sg.FullyConnectedLayer.create(8, 3)
    for _ in range(2):
        with pytest.raises(sg.ShapeError):
            graph.node(layer, sg.Tensor((4, 9)))


def test_rows_that_follow_the_batch_are_not_a_number() -> None:
    graph, layer = sg.Graph(), sg.FullyConnectedLayer.create(8, 3)
    fixed, follows = graph.node(layer, sg.Tensor((12, 8))), sg.Graph().dense(sg.Tensor((sg.BATCH, 8)), 3)
    assert fixed.shape == (12, 3) and isinstance(follows.shape[0], type(sg.BATCH))


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MOST_KNOWN", 3)
    graph = sg.Graph()
    for rows in range(1, 9):
        graph.relu(sg.Tensor((rows, 2)))
        assert len(layers._known) <= 3
