"""The GRU beyond the table: what it is made of, what it refuses, steps that train, sequences without steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.layers.gru import GRUDescriptor, GRULayer
from stepgraph.layers.layer import Scope


def test_create_makes_natural_shapes() -> None:
    layer = GRULayer.create(5, 4, 2, is_bidirectional=True, label="memory")
    assert [tensor.shape for tensor in layer.input_weights] == [*[(4, 5)] * 3, *[(4, 8)] * 3] * 2
    assert len(layer.hidden_weights) == 12 and layer.hidden_weights[0].shape == (4, 4)
    assert layer.biases is not None and len(layer.biases) == 12
    assert layer.hidden_biases is not None and len(layer.hidden_biases) == 4
    assert GRULayer.create(5, 4, reset_after=False).hidden_biases is None
    bare = GRULayer.create(5, 4, uses_biases=False)
    assert (bare.biases, bare.hidden_biases, bare.label) == (None, None, "GRU")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_size": 0}, "GRUDescriptor: hidden_size is 0"),
        ({"layer_count": 1.0}, "layer_count is 1.0"),
        ({"dropout": 1.0}, r"dropout is 1.0, not in \[0, 1\)"),
    ],
)
def test_descriptor_refuses(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(sg.ArgumentError, match=words):
        GRUDescriptor(**{"input_size": 3, "hidden_size": 2, **settings})


def test_tensors_that_do_not_fit_are_refused() -> None:
    good = GRULayer.create(3, 2)
    tensors = good.input_weights, good.hidden_weights, good.biases, good.hidden_biases
    for position, words in ((0, "there are 2 input_weights, but 1 layers in 1 directions need 3"), (2, "2 biases")):
        with pytest.raises(sg.ShapeError, match=words):
            GRULayer(good.descriptor, *(one[:2] if i == position else one for i, one in enumerate(tensors)))  # type: ignore
    with pytest.raises(sg.ShapeError, match=r"hidden_weights\[0\] holds 6 numbers, but 4 are needed"):
        GRULayer(good.descriptor, good.input_weights, good.input_weights)
    with pytest.raises(sg.ArgumentError, match="1 hidden_biases were passed, but reset_after is False"):
        GRULayer(GRUDescriptor(3, 2, reset_after=False), *tensors)
    with pytest.raises(sg.ArgumentError, match="3 biases were passed, but uses_biases is False"):
        GRULayer(GRUDescriptor(3, 2, uses_biases=False), *tensors)


def test_a_sequence_without_steps_passes_its_state_on() -> None:
    layer = GRULayer.create(3, 2, is_bidirectional=True, returns_state=True)
    arrays = {tensor: tensor.torch() for tensor in layer.parameters.values()}
    h0 = torch.randn(1, 2, 2, 2).requires_grad_()
    x = torch.full((2, 4, 3), torch.nan)
    x[1, :2] = 1
    y, h = layer.forward(x, h0, torch.tensor([0, 2]), scope=Scope(arrays))
    assert torch.equal(h[:, :, 0], h0[:, :, 0]) and not y[0].any() and not y[1, 2:].any()
    (gradient,) = torch.autograd.grad(h[:, :, 0].sum() + y.sum(), h0)
    assert torch.equal(gradient[:, :, 0], torch.ones(1, 2, 2)) and gradient.isfinite().all()


def network(compute_type: str | None = None) -> tuple[sg.TrainingGraph, dict[str, Any], dict[str, Any]]:
    """Two layers with dropout that learn the sum of sequences of several lengths."""
    sg.set_seed(4)
    x, lengths, y, graph = sg.Tensor((8, 6, 2)), sg.Tensor((8,), "int64"), sg.Tensor((8, 1, 1)), sg.Graph()
    layer = GRULayer.create(2, 8, 2, dropout=0.1, returns_sequences=False)
    graph.node(sg.FullyConnectedLayer.create(8, 1), graph.node(layer, x, lengths))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=0.02))
    training.add_inputs({"x": x, "lengths": lengths}, {"y": y})
    training.compile(sg.Device.cpu(), compute_type=compute_type)
    generator = np.random.default_rng(0)
    values, counts = generator.standard_normal((8, 6, 2), np.float32), generator.integers(1, 7, 8)
    sums = np.array([row[:count].sum() for row, count in zip(values, counts, strict=True)], np.float32)
    return training, {"x": values, "lengths": counts}, {"y": sums.reshape(8, 1, 1)}


def test_training_learns_and_goes_on_after_loading(tmp_path: Path) -> None:
    training, data, labels = network()
    losses = [training.execute(data, labels).loss for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]
    sg.save(tmp_path / "model", training)
    loaded = sg.load(tmp_path / "model", sg.Device.cpu())
    assert loaded.execute(data, labels).loss == training.execute(data, labels).loss
    with pytest.raises(sg.StepgraphError, match=r"sequence lengths are .*, but there are 6 steps"):
        training.execute(data | {"lengths": np.full(8, 7)}, labels)


@pytest.mark.deep
def test_phases_give_the_same_losses_and_mixed_precision_similar_ones() -> None:
    training, data, labels = network()
    losses = [training.execute(data, labels).loss for _ in range(5)]
    parted, *_ = network()
    for wanted in losses:
        parted.bind_and_write_data(data | labels, parted.inputs | parted.loss_labels, sg.Device.cpu())
        assert parted.execute_forward().loss == wanted
        parted.execute_gradient()
        parted.execute_optimizer_update()
    mixed, *_ = network("bfloat16")
    assert [mixed.execute(data, labels).loss for _ in range(5)] == pytest.approx(losses, rel=0.1)
