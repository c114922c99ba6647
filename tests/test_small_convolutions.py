"""Convolutions of small windows and the pool behind them as sums: the numbers of PyTorch's operators."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.passes import simplification
from stepgraph.compiler.passes.pool_first import POOL_GRADIENT, RELU, pool_first
from stepgraph.compiler.tuned.gpus import OFF
from stepgraph.compiler.tuned.pool_gradients import compare_positions, spread
from stepgraph.compiler.tuned.small_convolution_sums import convolve_and_pool, pooled_gradients
from stepgraph.compiler.tuned.small_convolutions import expand_small_convolutions

aten = torch.ops.aten
CASES = [
    (1, (3, 3), (1, 1), (1, 1)),
    (1, (3, 3), (2, 2), (0, 0)),
    (2, (2, 2), (1, 1), (1, 1)),
    (1, (3, 2), (2, 1), (1, 0)),
]


def arrays(channels, window):
    torch.manual_seed(0)
    x, w = torch.randn(3, channels, 12, 11), torch.randn(5, channels, *window)
    return x.double(), w.double().requires_grad_(), torch.randn(5).double()


@pytest.mark.parametrize("rectifies", [False, True])
@pytest.mark.parametrize("pool", [(2, 2), (1, 2), (4, 1)])
@pytest.mark.parametrize("channels, window, stride, padding", CASES)
def test_sums_with_a_pool_behind(channels, window, stride, padding, pool, rectifies):
    x, w, b = arrays(channels, window)
    b.requires_grad_()
    y = torch.nn.functional.max_pool2d(torch.conv2d(x, w, b, stride, padding), pool)
    y = torch.relu(y) if rectifies else y
    g = torch.randn_like(y)
    maxima, places = convolve_and_pool(x, w, b, stride, padding, pool, rectifies)
    torch.testing.assert_close(maxima, y)
    assert torch.equal(places == OFF, (y == 0) & rectifies)
    assert places[places != OFF].max() == pool[0] * pool[1] - 1
    found = pooled_gradients(g, places, x, w, stride, padding, pool)
    torch.testing.assert_close(found, torch.autograd.grad(y, (w, b), g))


@pytest.mark.parametrize("extents, window", [((8, 8), (2, 2)), ((9, 7), (2, 3)), ((7, 7), (3, 3))])
def test_a_pool_s_gradient_by_comparing_places(extents, window):
    x = torch.randn(2, 3, *extents, requires_grad=True)
    y, places = torch.nn.functional.max_pool2d(x, window, return_indices=True)
    g = torch.randn_like(y)
    torch.testing.assert_close(spread(g, places, extents, window), torch.autograd.grad(y, x, g)[0], rtol=0, atol=0)


def step(x, w, b, v):
    """Two convolutions with pools, and the gradients of all their parameters."""
    w, b, v = (one.detach().requires_grad_() for one in (w, b, v))
    hidden = torch.nn.functional.max_pool2d(torch.relu(torch.conv2d(x, w, b, padding=1)), 2)
    loss = torch.nn.functional.max_pool2d(torch.relu(torch.conv2d(hidden, v)), 2).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, (w, b, v))]


def rewritten(*given):
    module = make_fx(step, tracing_mode="fake")(*given)
    simplification.simplify(module)
    pool_first(module.graph)
    module.graph.eliminate_dead_code()
    expand_small_convolutions(module.graph)
    compare_positions(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def test_a_forward_pass_alone():
    def function(x, w):
        return torch.nn.functional.max_pool2d(torch.relu(torch.conv2d(x, w)), 2)

    given = torch.randn(2, 1, 10, 10), torch.randn(4, 1, 3, 3)
    module = make_fx(function, tracing_mode="fake")(*given)
    pool_first(module.graph)
    module.graph.eliminate_dead_code()
    expand_small_convolutions(module.graph)
    module.recompile()
    assert convolve_and_pool in [node.target for node in module.graph.nodes]
    torch.testing.assert_close(module(*given), function(*given))


@pytest.mark.parametrize("size", [16, 15])
def test_a_step_with_everything_expanded(size):
    torch.manual_seed(0)
    given = torch.randn(2, 1, size, size), torch.randn(4, 1, 3, 3), torch.randn(4), torch.randn(6, 4, 3, 3)
    module = rewritten(*given)
    targets = [node.target for node in module.graph.nodes]
    assert {convolve_and_pool, pooled_gradients, spread} <= set(targets) and POOL_GRADIENT not in targets
    assert targets.count(RELU) == 1 and aten.sum.dim_IntList not in targets  # only the second ReLU is left
    for found, right in zip(module(*given), step(*given), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-4)


def test_a_pool_whose_source_is_read_elsewhere_stays():
    def function(x, w):
        y = torch.conv2d(x, w)
        return [torch.nn.functional.max_pool2d(y, 2), y.sum()]

    given = torch.randn(2, 1, 10, 10), torch.randn(4, 1, 3, 3)
    module = make_fx(function, tracing_mode="fake")(*given)
    before = str(module.graph)
    expand_small_convolutions(module.graph)
    assert str(module.graph) == before


def test_channels_last_makes_no_difference():
    def function(x, w):
        y = torch.conv2d(x, w).clone(memory_format=torch.channels_last)
        return torch.nn.functional.max_pool2d(y, 2)

    given = torch.randn(2, 1, 10, 10), torch.randn(4, 1, 3, 3)
    module = make_fx(function, tracing_mode="fake")(*given)
    expand_small_convolutions(module.graph)
    module.graph.lint()
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert convolve_and_pool in targets and aten.clone.default not in targets
    torch.testing.assert_close(module(*given), function(*given))


def test_a_relu_whose_source_is_read_elsewhere_stays():
    def function(x, w):
        w = w.detach().requires_grad_()
        y = torch.nn.functional.max_pool2d(torch.conv2d(x, w), 2)
        return torch.autograd.grad(torch.relu(y).sum() + y.square().sum(), w)[0]

    given = torch.randn(2, 1, 10, 10), torch.randn(4, 1, 3, 3)
    module = make_fx(function, tracing_mode="fake")(*given)
    simplification.simplify(module)
    module.graph.eliminate_dead_code()
    expand_small_convolutions(module.graph)
    module.recompile()
    (joined,) = (node for node in module.graph.nodes if node.target is convolve_and_pool)
    assert joined.args[-1] is False
    torch.testing.assert_close(module(*given), function(*given))
