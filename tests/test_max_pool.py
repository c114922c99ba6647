"""Which max pools our kernels compute in fused steps, and how many windows; `test_gpu_pooling.py` runs them."""

import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.kernels import max_pool
from stepgraph.compiler.passes.pool_first import POOL, POOL_GRADIENT


def test_windows_are_counted_as_pytorch_counts_them() -> None:
    for size, stride, ceil in itertools.product((1, 2, 3, 5), (1, 2, 3), (False, True)):
        for extent, padding in itertools.product(range(size, 9), range(size // 2 + 1)):
            x = torch.zeros(1, 1, extent, extent)
            right = torch.nn.functional.max_pool2d(x, size, stride, padding, ceil_mode=ceil).shape[2]
            assert max_pool._count(extent, size, stride, padding, ceil) == right


def pooled(x: torch.Tensor, g: torch.Tensor, window: dict[str, int]) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = torch.nn.functional.max_pool2d(x, **window)
    return [y.detach(), *torch.autograd.grad(y, x, g)]


@pytest.mark.parametrize(
    ("window", "memory_format", "fits"),
    [
        ({"kernel_size": 3, "stride": 2, "padding": 1}, torch.channels_last, True),
        ({"kernel_size": 2, "stride": 1}, torch.channels_last, True),
        ({"kernel_size": 2}, torch.channels_last, False),  # windows do not overlap
        ({"kernel_size": 3, "stride": 1, "dilation": 2}, torch.channels_last, False),
        ({"kernel_size": 3, "stride": 2}, torch.contiguous_format, False),
    ],
)
def test_overlapping_pools_with_channels_last_are_replaced(
    monkeypatch: pytest.MonkeyPatch, window: dict[str, int], memory_format: torch.memory_format, fits: bool
) -> None:
    monkeypatch.setattr(max_pool, "run_on", lambda device: True)
    x = torch.randn(2, 4, 9, 9).contiguous(memory_format=memory_format)
    g = torch.ones_like(torch.nn.functional.max_pool2d(x, **window))
    graph = make_fx(lambda x, g: pooled(x, g, window), tracing_mode="fake")(x, g).graph
    max_pool.pool_by_rows(graph)
    targets = {node.target for node in graph.nodes}
    assert ({max_pool.pooled, max_pool.pool_gradient} <= targets) is fits
    assert targets.isdisjoint({POOL, POOL_GRADIENT}) is fits


def test_pools_whose_indices_are_read_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pool, "run_on", lambda device: True)
    x = torch.randn(2, 4, 9, 9).contiguous(memory_format=torch.channels_last)
    function = torch.ops.aten.max_pool2d_with_indices.default
    graph = make_fx(lambda x: function(x, [3, 3], [2, 2]), tracing_mode="fake")(x).graph
    max_pool.pool_by_rows(graph)
    assert graph.find_nodes(op="call_function", target=POOL)
