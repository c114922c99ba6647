"""Overlapping max pools and residual blocks in fused steps on a CUDA device."""

from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.kernels import max_pool
from tests import launches

kernels = pytest.importorskip(
    "stepgraph.compiler.kernels.max_pool_kernels", reason="Triton comes with PyTorch for CUDA"
)
pytestmark = pytest.mark.gpu
aten = torch.ops.aten
CASES = [  # shape, window, stride, padding, whether windows may hang over the border
    ((7, 64, 23, 19), [3, 3], [2, 2], [1, 1], False),
    ((2, 5, 9, 11), [3, 2], [1, 1], [1, 0], False),
    ((1, 130, 8, 8), [3, 3], [2, 2], [0, 0], True),
    ((3, 3, 10, 9), [5, 4], [2, 3], [2, 2], True),
    ((1, 4, 6, 6), [2, 2], [3, 3], [1, 1], True),
    ((300, 2, 3, 3), [3], [1], [1], False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "window", "stride", "padding", "ceil"), CASES)
def test_pools_by_rows_choose_as_pytorch_does(
    shape: Any, window: Any, stride: Any, padding: Any, ceil: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cuda").mul(2).round().to(dtype)  # with ties
    x[0, 0, :4, :4], x[0, 1, 2, 2] = -torch.inf, torch.nan
    x = x.contiguous(memory_format=torch.channels_last)
    settings = window, stride, padding, [1, 1], ceil
    right, indices = aten.max_pool2d_with_indices(x.contiguous(), *settings)
    found, places = max_pool.pooled(x, *settings)
    torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)
    g = torch.randn(right.shape, generator=generator, device="cuda").to(dtype)
    wanted = aten.max_pool2d_with_indices_backward(g.double(), x.contiguous().double(), *settings, indices)
    gradient = max_pool.pool_gradient(g, places, list(shape), *settings)
    torch.testing.assert_close(gradient.double(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


def training(options: sg.GraphCompilationOptions) -> sg.TrainingGraph:
    """A stem with a pool and two residual blocks, large enough that their arrays do not fit into caches."""
    sg.set_seed(3)
    x, y = sg.Tensor.image(64, 64, 3, 64), sg.Tensor((64,), "int64")
    graph = sg.Graph()
    same = {"padding_policy": sg.PaddingPolicy.SAME, "biases": False}
    h = graph.relu(graph.batch_normalization(graph.convolution(x, 32, 7, strides=2, **same)))
    h = graph.max_pooling(h, 3, 2, padding_sizes=1)
    for block in range(2):
        inner = graph.relu(graph.batch_normalization(graph.convolution(h, 64, 3, **same)))
        inner = graph.batch_normalization(graph.convolution(inner, 128, 1, **same))
        shortcut = h if block else graph.batch_normalization(graph.convolution(h, 128, 1, **same))
        h = graph.relu(graph.add(inner, shortcut))
    graph.node(sg.FullyConnectedLayer.create(128, 10), graph.reshape((64, 128), graph.mean(h, (2, 3))))
    made = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=1e-2))
    made.add_inputs({"x": x}, {"y": y})
    made.compile("cuda", options, compute_type="bfloat16")
    return made


def test_a_fused_residual_network_follows_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    names = launches.noted(monkeypatch, kernels)
    generator = np.random.default_rng(0)
    data = {"x": generator.standard_normal((64, 3, 64, 64), np.float32)}, {"y": generator.integers(0, 10, 64)}
    plain = launches.losses(training(sg.GraphCompilationOptions.DETERMINISTIC), *data)
    assert not names
    fused = launches.losses(training(sg.GraphCompilationOptions.FUSE_LAYERS), *data)
    assert {"_maxima", "_gradients"} <= set(names)
    np.testing.assert_allclose(fused, plain, rtol=0.02)
