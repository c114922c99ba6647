"""Convolutions of few channels by our kernels on a CUDA device, against float64, and in fused steps."""

import numpy as np
import pytest
import torch

import stepgraph as sg
from tests import few_channels_runs as runs
from tests import launches

kernels = pytest.importorskip(
    "stepgraph.compiler.kernels.few_channels_kernels", reason="Triton comes with PyTorch for CUDA"
)
pytestmark = pytest.mark.gpu
DATA = np.random.default_rng(0)
X, Y = DATA.standard_normal((32, 3, 40, 36), np.float32), DATA.integers(0, 10, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [*runs.CASES, *map(runs.drawn, range(6))], ids=str)
def test_kernels_round_once(case: runs.Case, dtype: torch.dtype) -> None:
    runs.compare(case, dtype, "cuda")


def test_numbers_beside_a_window_do_not_count() -> None:
    runs.not_finite_stays_in_its_windows(torch.bfloat16, "cuda")


def test_arrays_of_more_than_two_billion_numbers() -> None:
    """Offsets of images need 64 bits: the last image is right, too."""
    x = torch.zeros(3, 1, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(16, 1, 3, 3, device="cuda").bfloat16()
    x[2, 0, -5:, -5:] = 1
    y = runs.few_channels.convolved(x, w, None, [1, 1], [1, 1])
    assert y.numel() > 2**31 and not y[:2].any()
    right = torch.conv2d(x[2:, :, -9:, -9:].float(), w.float(), padding=1)[..., 1:, 1:]
    torch.testing.assert_close(y[2:, :, -8:, -8:].float(), right, rtol=0.004, atol=1e-3)
    gradient = runs.few_channels.convolved_gradient(y, x, list(w.shape), [1, 1], [1, 1])
    part = y[2:, :, -9:, -9:].float(), x[2:, :, -10:, -10:].float()
    wanted = torch.nn.grad.conv2d_weight(part[1], w.shape, torch.nn.functional.pad(part[0], (1, 0, 1, 0)), 1, 1)
    torch.testing.assert_close(gradient.float(), wanted, rtol=0.01, atol=0.1)


def training(options: sg.GraphCompilationOptions, compute_type: str) -> sg.TrainingGraph:
    sg.set_seed(3)
    x, y = sg.Tensor((32, 3, 40, 36)), sg.Tensor((32,), "int64")
    graph = sg.Graph()
    same = {"padding_policy": sg.PaddingPolicy.SAME}
    h = graph.relu(graph.convolution(x, 24, 5, strides=2, **same))
    h = graph.relu(graph.batch_normalization(graph.convolution(h, 32, 3, strides=2, biases=False, **same)))
    graph.node(sg.FullyConnectedLayer.create(32, 10), graph.reshape((32, 32), graph.mean(h, (2, 3))))
    made = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.05))
    made.add_inputs({"x": x}, {"y": y})
    made.compile("cuda", options, compute_type=compute_type)
    return made


@pytest.mark.parametrize("compute_type", ["bfloat16", "float16"])
def test_a_fused_step_has_them(monkeypatch: pytest.MonkeyPatch, compute_type: str) -> None:
    names = launches.noted(monkeypatch, kernels)
    plain = launches.losses(training(sg.GraphCompilationOptions.DETERMINISTIC, compute_type), {"x": X}, {"y": Y})
    assert not names
    fused = launches.losses(training(sg.GraphCompilationOptions.FUSE_LAYERS, compute_type), {"x": X}, {"y": Y})
    assert {"_forward", "_gradients"} <= set(names)
    np.testing.assert_allclose(fused, plain, rtol=0.02)
