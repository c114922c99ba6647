"""Gradients of convolutions' weights in tiles on a CUDA device: TF32's numbers, and a step that trains with them."""

import numpy as np
import pytest
import torch

import stepgraph as sg
from tests import launches
from tests.launches import noted

tiles = pytest.importorskip(
    "stepgraph.compiler.tuned.weight_gradient_kernels", reason="Triton comes with PyTorch for CUDA"
)
pytestmark = pytest.mark.gpu
OPTIONS = sg.GraphCompilationOptions
TF32 = 2e-3  # of the largest number: factors are cut to 10 bits


@pytest.mark.parametrize(
    ("count", "outputs", "inputs", "height", "width"),
    [
        (64, 64, 64, 32, 32),
        (300, 64, 32, 14, 14),
        (7, 32, 64, 5, 3),
        (1, 32, 32, 1, 1),
        (3, 96, 160, 9, 1),
        (5, 32, 64, 1, 40),
        (2, 128, 256, 6, 10),
    ],
)
def test_tiles_give_the_numbers_of_the_formula(count: int, outputs: int, inputs: int, height: int, width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (count, outputs, height, width), (count, inputs, height, width)
    g, x = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    found = tiles.weight_gradient_sums(g, x).sum(0).permute(2, 3, 0, 1)
    weights = torch.empty(outputs, inputs, 3, 3, dtype=torch.float64)
    settings = [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False]
    _, right, _ = torch.ops.aten.convolution_backward(g.double().cpu(), x.double().cpu(), weights, None, *settings)
    assert (found.cpu() - right).abs().max() <= TF32 * right.abs().max()


def losses(options: OPTIONS = OPTIONS.FUSE_LAYERS, *, phases: bool = False, **settings: bool) -> list[float]:
    sg.set_seed(7)
    x, y = sg.Tensor.image(12, 12, 32, 16), sg.Tensor((16,), "int64")
    graph = sg.Graph()
    hidden: sg.Tensor = x
    for inputs, outputs in ((32, 64), (64, 32)):
        border = {"padding_policy": sg.PaddingPolicy.USE_PADDING_SIZE, "padding_sizes": 1}
        hidden = graph.node(sg.ConvolutionLayer.create(inputs, outputs, 3, **border), hidden)
        hidden = graph.node(sg.ActivationLayer.relu(), hidden)
    graph.node(sg.FullyConnectedLayer.create(32 * 12 * 12, 10), graph.reshape((16, -1), hidden))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    device = sg.Device.gpu()
    assert device is not None
    training.compile(device, options, **settings)
    generator = np.random.default_rng(0)
    data = {"x": generator.standard_normal((16, 32, 12, 12), np.float32)}, {"y": generator.integers(0, 10, 16)}
    return launches.losses(training, *data, phases=phases)


@pytest.mark.parametrize("phases", [False, True])
def test_a_fused_step_trains_with_them_where_tf32_is_allowed(monkeypatch: pytest.MonkeyPatch, phases: bool) -> None:
    names = noted(monkeypatch, tiles)
    right = losses(tf32=False)
    assert not names
    found = losses(tf32=True, phases=phases)
    assert "_gradients" in names
    np.testing.assert_allclose(found, right, rtol=1e-2)
    assert found[-1] < 0.9 * found[0]


@pytest.mark.parametrize("options", [OPTIONS.DETERMINISTIC, OPTIONS.DISABLE_LAYER_FUSION])
def test_a_step_that_is_not_fused_has_cudnn_s(monkeypatch: pytest.MonkeyPatch, options: OPTIONS) -> None:
    names = noted(monkeypatch, tiles)
    assert np.isfinite(losses(options, tf32=True)).all() and not names
