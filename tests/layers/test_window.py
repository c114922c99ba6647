"""Windows over sequences and volumes beyond the table: descriptors, shapes, a step that trains, files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg


def test_descriptors_have_as_many_numbers_as_axes() -> None:
    sequence = sg.ConvolutionDescriptor(5, 3, 8, dimensions=1, strides=2)
    assert (sequence.kernel_sizes, sequence.strides, sequence.extents) == ((5,), (2,), (5,))
    assert (sequence.kernel_width, sequence.kernel_height, sequence.padding_size_in_y) == (5, 1, 0)
    volume = sg.ConvolutionDescriptor.depthwise((2, 3, 5), 4, 2, dimensions=3)
    assert (volume.weights_shape, volume.kernel_height, volume.kernel_width) == ((8, 1, 2, 3, 5), 3, 5)
    assert sg.PoolingLayer.max(2, dimensions=3).descriptor.strides == (2, 2, 2)
    assert sg.ConvolutionDescriptor(3, 1, 1) == sg.ConvolutionDescriptor(3, 1, 1, dimensions=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dimensions": 4}, "dimensions is 4"),
        ({"dimensions": True}, "dimensions is True"),
        ({"kernel_sizes": (3, 3, 3)}, r"kernel_sizes is \(3, 3, 3\).*3 numbers need dimensions=3"),
        ({"dimensions": 3, "strides": (1, 2)}, r"strides is \(1, 2\).*or \(depth, height, width\)"),
        ({"dimensions": 1, "strides": 0}, "strides is 0"),
    ],
)
def test_descriptors_refuse(settings: dict[str, Any], words: str) -> None:
    channels = {"input_feature_channel_count": 1, "output_feature_channel_count": 1}
    with pytest.raises(sg.ArgumentError, match=f"(?s){words}"):
        sg.ConvolutionDescriptor(**{"kernel_sizes": 3, **settings}, **channels)


@pytest.mark.deep
def test_a_network_over_volumes_and_sequences_trains_as_in_pytorch(tmp_path: Path) -> None:
    """Convolution, pooling and a sequence of what is left, against the same modules with the same weights."""
    sg.set_seed(3)
    x, y, graph = sg.Tensor((4, 2, 4, 6, 6)), sg.Tensor((4, 3)), sg.Graph()
    first = sg.ConvolutionLayer.create(2, 4, 3, dimensions=3, padding_sizes=1)
    second = sg.ConvolutionLayer.create(4, 3, 3, dimensions=1, padding_policy=sg.PaddingPolicy.VALID)
    pooled = graph.node(sg.PoolingLayer.max(2, dimensions=3), graph.node(first, x))
    row = graph.node(second, graph.reshape((4, 4, 18), pooled))
    graph.node(sg.GlobalPoolingLayer.average(), row)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    modules = torch.nn.Conv3d(2, 4, 3, padding=1), torch.nn.Conv1d(4, 3, 3)
    for layer, module in zip((first, second), modules, strict=True):
        assert layer.biases is not None and module.bias is not None
        module.weight.data.copy_(layer.weights.torch())
        module.bias.data.copy_(layer.biases.torch())
    training.compile(sg.Device.cpu())
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)
    generator = np.random.default_rng(0)
    data, labels = (generator.standard_normal(shape, np.float32) for shape in (x.shape, y.shape))
    for _ in range(5):
        found = torch.nn.functional.max_pool3d(modules[0](torch.from_numpy(data)), 2).reshape(4, 4, 18)
        loss = torch.nn.functional.mse_loss(modules[1](found).mean(2), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert training.execute({"x": data}, {"y": labels}).loss == pytest.approx(loss.item(), rel=1e-4)
    np.testing.assert_allclose(first.weights.numpy(), modules[0].weight.detach(), rtol=1e-3, atol=1e-5)
    sg.save(tmp_path / "model", training)
    loaded = sg.load(tmp_path / "model")
    kept, given = ([getattr(layer, "descriptor", None) for layer in one.layers] for one in (loaded, training))
    assert kept == given
    assert "GlobalPooling" in str(training)
