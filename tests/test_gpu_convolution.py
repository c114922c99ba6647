"""A convolution with its pool in one kernel on a CUDA device, against the formulas it stands in for."""

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.tuned import small_convolution_sums as sums
from tests import launches
from tests.launches import noted

tiles = pytest.importorskip(
    "stepgraph.compiler.tuned.small_convolution_kernels", reason="Triton comes with PyTorch for CUDA"
)
pytestmark = pytest.mark.gpu
CASES = [  # channels, outputs, kernel, stride, padding, window
    (1, 32, (3, 3), (1, 1), (1, 1), (2, 2)),
    (1, 5, (3, 3), (2, 2), (0, 0), (2, 2)),
    (2, 70, (2, 2), (1, 1), (1, 1), (1, 3)),
    (1, 20, (3, 2), (2, 1), (1, 0), (4, 1)),
    (4, 64, (2, 2), (1, 1), (0, 0), (2, 1)),
    (1, 130, (4, 4), (1, 1), (2, 2), (2, 2)),
]


@pytest.mark.parametrize("rectifies", [False, True])
@pytest.mark.parametrize("channels, outputs, kernel, stride, padding, window", CASES)
def test_tiles_give_the_numbers_of_the_formulas(
    monkeypatch, channels, outputs, kernel, stride, padding, window, rectifies
):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (7, channels, 23, 19), (outputs, channels, *kernel), (outputs,)
    x, w, b = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    settings = stride, padding, window
    assert sums.fit(x)
    maxima, places = sums.convolve_and_pool(x, w, b, *settings, rectifies)
    g = torch.randn(maxima.shape, generator=generator, device="cuda")
    gradients = sums.pooled_gradients(g, places, x, w, *settings)
    monkeypatch.setattr(sums, "fit", lambda x: False)
    right, where = sums.convolve_and_pool(x, w, b, *settings, rectifies)
    torch.testing.assert_close(maxima, right, rtol=1e-5, atol=1e-5)
    assert (places != where).float().mean() < 1e-3  # a tie may round to either side
    wanted = sums.pooled_gradients(g, places, x, w, *settings)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-3)


def test_not_a_number_is_a_maximum():
    x = torch.zeros(1, 1, 4, 4, device="cuda")
    x[0, 0, 1, 0] = x[0, 0, 2, 2] = torch.nan
    y, places = sums.convolve_and_pool(x, torch.ones(3, 1, 1, 1, device="cuda"), None, (1, 1), (0, 0), (2, 2), True)
    assert y.isnan()[0, 0].tolist() == [[True, False], [False, True]]
    assert places[0, 2].tolist() == [[2, 255], [255, 0]]


def test_a_fused_step_has_them(monkeypatch):
    names = noted(monkeypatch, tiles)
    plain = losses(sg.GraphCompilationOptions.DETERMINISTIC)
    assert not names
    fused = losses(sg.GraphCompilationOptions.FUSE_LAYERS)
    assert {"_forward", "_gradients"} <= set(names)
    np.testing.assert_allclose(fused, plain, rtol=1e-4)


def losses(options: sg.GraphCompilationOptions) -> list[float]:
    sg.set_seed(7)
    x, y = sg.Tensor.image(12, 12, 1, 16), sg.Tensor((16,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.ActivationLayer.relu(), graph.node(sg.ConvolutionLayer.create(1, 8, 3), x))
    hidden = graph.node(sg.PoolingLayer.max(2), hidden)
    graph.node(sg.FullyConnectedLayer.create(288, 10), graph.reshape((16, -1), hidden))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    device = sg.Device.gpu()
    assert device is not None
    training.compile(device, options, tf32=False)
    generator = np.random.default_rng(0)
    data = {"x": generator.standard_normal((16, 1, 12, 12), np.float32)}, {"y": generator.integers(0, 10, 16)}
    return launches.losses(training, *data)
