"""The gated feed-forward layer beyond the table: what it is made of, and what it refuses."""

from typing import Any

import pytest

import stepgraph as sg
from stepgraph.layers.feed_forward import GatedFeedForwardLayer


def test_create_makes_three_matrices() -> None:
    layer = GatedFeedForwardLayer.create(4, 6, biases=True, label="mlp")
    assert [tensor.shape for tensor in layer.weights] == [(6, 4), (6, 4), (4, 6)]
    assert layer.biases is not None
    assert [tensor.shape for tensor in layer.biases] == [(6,), (6,), (4,)]
    assert list(layer.parameters) == [f"{name}.{i}" for name in ("weights", "biases") for i in range(3)]
    assert (layer.label, layer.activation.type) == ("mlp", sg.ActivationType.SILU)
    plain = GatedFeedForwardLayer.create(4, 6, 2, activation=sg.ActivationDescriptor(sg.ActivationType.RELU, 0.1))
    assert (plain.biases, plain.weights[2].shape, plain.activation.a) == (None, (2, 6), 0.1)


def tensors(*shapes: tuple[int, ...]) -> list[sg.Tensor]:
    return [sg.Tensor(shape, fill=0.0) for shape in shapes]


@pytest.mark.parametrize(
    ("weights", "biases", "error", "words"),
    [
        ([(6, 4), (6, 4)], None, sg.ArgumentError, "2 weights were passed, but 3 are needed"),
        ([(6, 4), (6, 4), (4, 6)], [(6,)], sg.ArgumentError, "1 biases were passed, but 3 are needed"),
        ([(24,), (6, 4), (4, 6)], None, sg.ShapeError, r"the gate weights are \[24\], not a matrix"),
        ([(6, 4), (5, 4), (4, 6)], None, sg.ShapeError, r"the up weights are \[5, 4\], but the others need \[6, 4\]"),
        ([(6, 4), (6, 4), (4, 5)], None, sg.ShapeError, r"the down weights are \[4, 5\], but the others need \[4, 6\]"),
        ([(6, 4), (6, 4), (4, 6)], [(6,), (6,), (6,)], sg.ShapeError, r"the down biases are \[6\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(weights: Any, biases: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        GatedFeedForwardLayer(tensors(*weights), None if biases is None else tensors(*biases))


def test_sizes_that_are_no_sizes_are_refused() -> None:
    with pytest.raises(sg.ArgumentError, match="GatedFeedForwardLayer: hidden is 0"):
        GatedFeedForwardLayer.create(4, 0)
