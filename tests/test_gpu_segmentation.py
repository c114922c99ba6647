"""A small U-Net on a CUDA device in half precision: fused steps move and pad less, and compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stepgraph as sg

pytestmark = pytest.mark.gpu
CLASSES = 21
SHAPE = 16, 8, 64, 64  # enough pixels for what is done only to large arrays


@pytest.mark.parametrize("head", [1, 3])
def test_fused_steps_compute_the_same(head: int) -> None:
    (plain, changes), (fused, others) = trained("cuda", head, fuse=False), trained("cuda", head, fuse=True)
    np.testing.assert_allclose(fused, plain, rtol=2e-3)
    for name, one in changes.items():
        assert np.linalg.norm(others[name] - one) < 0.1 * np.linalg.norm(one), name


def trained(device: str, head: int, **settings: Any) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of three steps, and how they have changed each parameter."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=SHAPE).astype("f")
    y = rng.integers(0, CLASSES, (SHAPE[0], *SHAPE[2:]))
    given, labels, graph = sg.Tensor(x.shape), sg.Tensor(y.shape, "int64"), sg.Graph()
    down = graph.relu(graph.node(layer(8, 32, 3), given))
    down = graph.node(sg.BatchNormalizationLayer.create(32), down)
    inner = graph.relu(graph.node(layer(32, 64, 3), graph.max_pooling(down, 2)))
    up = graph.node(layer(64, 32, 2, type=sg.ConvolutionType.TRANSPOSED, strides=2), inner)
    last = graph.relu(graph.node(layer(64, 32, 3), graph.concatenate([down, up])))
    graph.node(layer(32, CLASSES, head), last)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(axis=1), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": given}, {"y": labels})
    training.compile(device, compute_type="bfloat16", **settings)
    before = {name: one.numpy(force=True).copy() for name, one in training.state_dict().items()}
    losses = [float(np.asarray(training.execute({"x": x}, {"y": y}).loss)) for _ in range(3)]
    return losses, {name: one.numpy(force=True) - before[name] for name, one in training.state_dict().items()}


def layer(inputs: int, outputs: int, size: int, **settings: Any) -> sg.ConvolutionLayer:
    """A convolution with the same weights at every call."""
    rng = np.random.default_rng(outputs + size)
    weights = rng.normal(size=(outputs, inputs, size, size)).astype("f") / size / inputs**0.5
    descriptor = sg.ConvolutionDescriptor(size, inputs, outputs, **settings)
    return sg.ConvolutionLayer(sg.Tensor(weights.shape, data=weights), sg.Tensor((outputs,), fill=0.1), descriptor)
