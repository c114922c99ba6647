"""Attention in tiles on a CUDA device: TF32's numbers, at every length and width, and a step that trains with it."""

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.layers import attention

pytestmark = pytest.mark.gpu
TF32 = 4e-3  # of the largest number: products round to 10 bits, and sums of them follow


def arrays(batch: int, heads: int, queries: int, keys: int, width: int) -> list[torch.Tensor]:
    """Query, key, value and a gradient, with heads side by side in memory as the layer has them."""
    generator = torch.Generator("cuda").manual_seed(0)
    steps = queries, keys, keys, queries
    shapes = [(batch, count, heads, width) for count in steps]
    return [torch.randn(shape, generator=generator, device="cuda").transpose(1, 2) for shape in shapes]


def results(function, q, k, v, g) -> list[torch.Tensor]:
    sources = [one.detach().requires_grad_() for one in (q, k, v)]
    y = function(*sources)
    return [y.detach(), *torch.autograd.grad(y, sources, g)]


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("queries, keys", [(1, 1), (37, 5), (128, 128), (70, 300), (513, 513)])
def test_tiles_give_the_numbers_of_the_formula(width: int, queries: int, keys: int) -> None:
    given = arrays(2, 3, queries, keys, width)
    assert attention.tiles(*given[:3])
    found = results(attention.attend_in_tiles, *given)
    right = results(lambda *sources: attention.attend(*sources, None), *(one.double() for one in given))
    for one, other in zip(found, right, strict=True):
        # With one key the gradients of query and key are differences of equal numbers, of about 1.
        assert (one - other).abs().max() <= TF32 * max(1.0, other.abs().max())


def test_rows_of_the_result_lie_as_the_layer_joins_them() -> None:
    y = attention.attend_in_tiles(*arrays(2, 3, 8, 8, 16)[:3])
    assert y.transpose(1, 2).is_contiguous()


def test_large_scores_do_not_overflow() -> None:
    q, k, v, g = arrays(1, 2, 40, 40, 32)
    found = results(attention.attend_in_tiles, 100 * q, 100 * k, v, g)
    assert all(one.isfinite().all() for one in found)


def transformer(**settings) -> tuple[list[float], str]:
    sg.set_seed(5)
    x, y = sg.Tensor((4, 20, 32)), sg.Tensor((80,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.MultiheadAttentionLayer.create(32, 2), x, x, x)
    graph.reshape((-1, 7), graph.node(sg.FullyConnectedLayer.create(32, 7), hidden))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    device = sg.Device.gpu()
    assert device is not None
    training.compile(device, **settings)
    generator = np.random.default_rng(0)
    data = {"x": generator.standard_normal((4, 20, 32), np.float32)}, {"y": generator.integers(0, 7, 80)}
    losses = [training.execute(*data).loss for _ in range(20)]
    (executable, *_) = training._programs.executables.values()
    return losses, str(executable.part.module.graph)


def test_a_step_trains_with_tiles_where_tf32_is_allowed() -> None:
    losses, program = transformer(tf32=True)
    right, plain = transformer(tf32=False)
    assert "attend_gradients" in program and "attend" not in plain
    np.testing.assert_allclose(losses, right, rtol=1e-2)
    assert losses[-1] < 0.9 * losses[0]


def test_a_deterministic_step_has_pytorch_s_kernels() -> None:
    _, program = transformer(tf32=True, options=sg.GraphCompilationOptions.DETERMINISTIC)
    assert "attend" not in program
