"""Attention in tiles on a CUDA device: TF32's numbers, at every length and width, and a step that trains with it."""

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.tuned.attention_in_tiles import fits_tiles
from tests import launches
from tests.launches import noted

tiles = pytest.importorskip("stepgraph.compiler.tuned.attention_kernels", reason="Triton comes with PyTorch for CUDA")
pytestmark = pytest.mark.gpu
OPTIONS = sg.GraphCompilationOptions
TF32 = 4e-3  # of the largest number: products round to 10 bits, and sums of them follow


def arrays(batch: int, heads: int, queries: int, keys: int, width: int) -> list[torch.Tensor]:
    """Query, key, value and a gradient, with heads side by side in memory as the layer has them."""
    generator = torch.Generator("cuda").manual_seed(0)
    steps = queries, keys, keys, queries
    shapes = [(batch, count, heads, width) for count in steps]
    return [torch.randn(shape, generator=generator, device="cuda").transpose(1, 2) for shape in shapes]


def in_tiles(q, k, v, g) -> list[torch.Tensor]:
    y, norms = tiles.attend(q, k, v)
    return [y, *tiles.attend_gradients(q, k, v, y, norms, g)]


def by_formula(q, k, v, g) -> list[torch.Tensor]:
    q, k, v = sources = [one.double().requires_grad_() for one in (q, k, v)]
    y = torch.softmax(q @ k.transpose(2, 3) / q.shape[3] ** 0.5, 3) @ v
    return [y.detach(), *torch.autograd.grad(y, sources, g.double())]


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # PyTorch's first backward pass, in a thread of its own
@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("queries, keys", [(1, 1), (37, 5), (128, 128), (70, 300), (513, 513)])
def test_tiles_give_the_numbers_of_the_formula(width: int, queries: int, keys: int) -> None:
    given = arrays(2, 3, queries, keys, width)
    assert fits_tiles(*given[:3])
    for one, other in zip(in_tiles(*given), by_formula(*given), strict=True):
        # With one key the gradients of query and key are differences of equal numbers, of about 1.
        assert (one - other).abs().max() <= TF32 * max(1.0, other.abs().max())


def test_logarithms_are_those_of_pytorch_s_operator() -> None:
    q, k, v, _ = arrays(2, 3, 70, 50, 32)
    found = tiles.attend(q, k, v)[1]
    right = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[1]
    assert found.shape == right.shape
    torch.testing.assert_close(found, right, rtol=TF32, atol=TF32)


def test_rows_of_the_result_lie_as_the_layer_joins_them() -> None:
    y, _ = tiles.attend(*arrays(2, 3, 8, 8, 16)[:3])
    assert y.transpose(1, 2).is_contiguous()


def test_joint_gradients_are_the_three_side_by_side() -> None:
    q, k, v, g = arrays(2, 3, 24, 24, 16)
    y, norms = tiles.attend(q, k, v)
    joint = tiles.attend_joint_gradients(q, k, v, y, norms, g)
    for i, one in enumerate(tiles.attend_gradients(q, k, v, y, norms, g)):
        torch.testing.assert_close(joint[:, :, i].transpose(1, 2), one, rtol=0, atol=0)


def test_large_scores_do_not_overflow() -> None:
    q, k, v, g = arrays(1, 2, 40, 40, 32)
    assert all(one.isfinite().all() for one in in_tiles(100 * q, 100 * k, v, g))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return noted(monkeypatch, tiles)


def transformer(options: OPTIONS = OPTIONS.FUSE_LAYERS, *, phases: bool = False, **settings) -> list[float]:
    sg.set_seed(5)
    x, y = sg.Tensor((4, 20, 32)), sg.Tensor((80,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.MultiheadAttentionLayer.create(32, 2), x, x, x)
    graph.reshape((-1, 7), graph.node(sg.FullyConnectedLayer.create(32, 7), hidden))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    device = sg.Device.gpu()
    assert device is not None
    training.compile(device, options, **settings)
    generator = np.random.default_rng(0)
    data = {"x": generator.standard_normal((4, 20, 32), np.float32)}, {"y": generator.integers(0, 7, 80)}
    return launches.losses(training, *data, phases=phases)


@pytest.mark.parametrize("phases", [False, True])
def test_a_fused_step_trains_with_tiles_where_tf32_is_allowed(launched: list[str], phases: bool) -> None:
    right = transformer(tf32=False)
    assert not launched
    losses = transformer(tf32=True, phases=phases)
    assert {"_forward", "_key_gradients"} <= set(launched)
    np.testing.assert_allclose(losses, right, rtol=1e-2)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("options", [OPTIONS.DETERMINISTIC, OPTIONS.DISABLE_LAYER_FUSION])
def test_a_step_that_is_not_fused_has_pytorch_s_kernels(launched: list[str], options: OPTIONS) -> None:
    assert np.isfinite(transformer(options, tf32=True)).all() and not launched


def modern(device: sg.Device, compute_type: str | None, steps: int = 24) -> tuple[sg.TrainingGraph, list[float]]:
    """Causal attention with grouped heads and rotary positions, and the losses of 20 steps."""
    sg.set_seed(5)
    x, y, graph = sg.Tensor((4, steps, 64)), sg.Tensor((4, steps, 64)), sg.Graph()
    settings = {"key_value_head_count": 2, "causal": True, "rotary_base": 10_000.0}
    graph.node(sg.MultiheadAttentionLayer.create(64, 4, **settings), x, x, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(device, compute_type=compute_type, tf32=False)
    values = np.random.default_rng(0).standard_normal((4, steps, 64), np.float32)
    return training, launches.losses(training, {"x": values}, {"y": np.roll(values, 1, 1)})


@pytest.mark.parametrize("steps", [24, 600])
@pytest.mark.parametrize(("kind", "tolerance"), [(None, 1e-4), ("bfloat16", 3e-2), ("float16", 1e-2)])
def test_causal_grouped_attention_trains_as_on_the_cpu(steps: int, kind: str | None, tolerance: float) -> None:
    device = sg.Device.gpu()
    assert device is not None
    _, right = modern(sg.Device.cpu(), None, steps)
    training, found = modern(device, kind, steps)
    np.testing.assert_allclose(found, right, rtol=tolerance)
    recorded = {str(node.target) for node in training.compilation.programs.program(4).nodes}
    if kind is not None:
        assert any("flash_attention" in name or "cudnn_attention" in name for name in recorded), recorded
    assert not any("_scaled_dot_product_attention_math" in name for name in recorded)
