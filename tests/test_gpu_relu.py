"""ReLU's gradient with the sums of a batch normalization on a CUDA device, and steps that have both."""

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import relu_gradients
from tests.launches import noted

tiles = pytest.importorskip("stepgraph.compiler.tiles.relu", reason="Triton comes with PyTorch for CUDA")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("shape", [(3, 64, 5, 7), (2, 10, 9, 3), (4, 130, 4, 4), (64, 64, 32, 32)])
def test_tiles_give_the_numbers_of_the_formula(monkeypatch, shape, terms):
    generator = torch.Generator("cuda").manual_seed(0)
    given = [torch.randn(shape, generator=generator, device="cuda") for _ in range(4)]
    g, h, y, x = (one.contiguous(memory_format=torch.channels_last) for one in given)
    mean = torch.randn(shape[1], generator=generator, device="cuda")
    arguments = g, h if terms == 2 else None, y, x, mean
    d, sums = relu_gradients.mask_and_sum(*arguments)
    monkeypatch.setattr(relu_gradients.tiles, "fit", lambda x: False)
    right, wanted = relu_gradients.mask_and_sum(*arguments)
    torch.testing.assert_close(d, right, rtol=0, atol=0)
    assert d.stride() == x.stride()
    torch.testing.assert_close(sums.sum(0), wanted.sum(0), rtol=1e-3, atol=1e-2)


def test_a_fused_block_with_a_shortcut(monkeypatch):
    names = noted(monkeypatch, tiles)
    plain, fused = (losses(options) for options in (sg.GraphCompilationOptions.DETERMINISTIC, FUSED))
    assert "_mask_and_sum" in names
    np.testing.assert_allclose(fused, plain, rtol=1e-4)


FUSED = sg.GraphCompilationOptions.FUSE_LAYERS


def losses(options: sg.GraphCompilationOptions) -> list[float]:
    sg.set_seed(7)
    x, y = sg.Tensor.image(12, 12, 8, 16), sg.Tensor((16,), "int64")
    graph = sg.Graph()

    def normalized(z: sg.Tensor) -> sg.Tensor:
        convolved = graph.node(sg.ConvolutionLayer.create(8, 8, 3), z)
        return graph.node(sg.BatchNormalizationLayer.create(8), convolved)

    z: sg.Tensor = x
    for _ in range(2):
        hidden = normalized(graph.node(sg.ActivationLayer.relu(), normalized(z)))
        z = graph.node(sg.ActivationLayer.relu(), graph.node(sg.ArithmeticLayer.add(), hidden, z))
    graph.node(sg.FullyConnectedLayer.create(8 * 12 * 12, 10), graph.reshape((16, -1), z))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=1e-3))
    training.add_inputs({"x": x}, {"y": y})
    device = sg.Device.gpu()
    assert device is not None
    training.compile(device, options, tf32=False)
    generator = np.random.default_rng(0)
    data = {"x": generator.standard_normal((16, 8, 12, 12), np.float32)}, {"y": generator.integers(0, 10, 16)}
    return [float(training.execute(*data).loss) for _ in range(20)]
