"""Batch normalization of half-precision arrays for a compiler that fuses it: its statistics as two sums.

PyTorch's compiler computes them by Welford's algorithm, with a division for every element it reads, which takes a GPU
longer than reading them. Sums of differences and of their squares need neither that nor a second pass. Differences
from an element of the channel itself stay small where the mean is large, so that few digits cancel.

A normalized element is `scale x + offset`, with two numbers per channel. So a kernel of the gradient pass that reads
`x` can compute where a ReLU behind the normalization was 0, and need not read the ReLU's result.

The gradient of `x` is `scale dy + slope x + offset`, with three numbers per channel. PyTorch's formula reads six for
every element and combines them there, which takes a GPU longer than reading `x` and `dy`. `stored.py` lets a small
kernel combine them.
"""

from __future__ import annotations

import torch
from torch import fx

from stepgraph.compiler.kernels.half import HALF
from stepgraph.compiler.program import fake

Array = torch.Tensor


def expand_batch_norms(graph: fx.Graph) -> None:
    """Expands batch normalization of half-precision arrays and its gradient, with the statistics of the batch."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.native_batch_norm.default:
            x, _, _, mean, variance, training, *_ = node.args
            if training and mean is None and variance is None and fake(x).dtype in HALF:
                node.target = normalized_by_sums
        elif node.target is torch.ops.aten.native_batch_norm_backward.default:
            _, x, *_, training, _, _ = node.args
            if training and fake(x).dtype in HALF:
                node.target = gradient_by_factors


def normalized_by_sums(
    x: Array,
    gamma: Array | None,
    beta: Array | None,
    _mean: None,
    _variance: None,
    _training: bool,
    _momentum: float,
    epsilon: float,
) -> tuple[Array, Array, Array]:
    """`aten.native_batch_norm` without running statistics: the result, the mean and `1 / sqrt(variance + ε)`."""
    axes = [axis for axis in range(x.ndim) if axis != 1]
    count = x.numel() // x.shape[1]
    full = x.float()
    shift = full[(slice(1), slice(None), *(slice(1),) * (x.ndim - 2))]
    differences = full - shift
    mean = differences.sum(axes, keepdim=True) / count
    variance = ((differences * differences).sum(axes, keepdim=True) / count - mean * mean).clamp_min(0)
    mean, inverse_deviation = mean + shift, torch.rsqrt(variance + epsilon)
    gamma, beta = (None if one is None else one.float().view(mean.shape) for one in (gamma, beta))
    scale = inverse_deviation if gamma is None else inverse_deviation * gamma
    offset = -mean * scale if beta is None else beta - mean * scale
    return (full * scale + offset).to(x.dtype), mean.flatten(), inverse_deviation.flatten()


def gradient_by_factors(
    dy: Array,
    x: Array,
    gamma: Array | None,
    _mean: Array | None,
    _variance: Array | None,
    mean: Array,
    inverse_deviation: Array,
    _training: bool,
    _epsilon: float,
    _masks: list[bool],
) -> tuple[Array, Array, Array]:
    """`aten.native_batch_norm_backward` with statistics of the batch: the gradients of `x`, γ and β."""
    axes = [axis for axis in range(x.ndim) if axis != 1]
    count = x.numel() // x.shape[1]
    shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
    mean, inverse_deviation = mean.view(shape), inverse_deviation.view(shape)
    full, g = x.float(), dy.float()
    total = g.sum(axes, keepdim=True)
    product = (g * (full - mean)).sum(axes, keepdim=True)
    scale = inverse_deviation if gamma is None else inverse_deviation * gamma.float().view(shape)
    slope = product * inverse_deviation * inverse_deviation * scale * (-1 / count)
    offset = total * scale * (-1 / count) - mean * slope
    dx = (g * scale + (full * slope + offset)).to(x.dtype)
    return dx, (product * inverse_deviation).flatten(), total.flatten()
