"""Alternative implementations of batch normalization of images, and of its gradients.

PyTorch reads each channel twice for its statistics, one number at a time. Sums and norms of rows, one for each
channel of each image, are vectorized; the results of a channel's rows are then summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten
Array = torch.Tensor
FAR = 16  # times the variance: larger squares would cost more than one digit of precision


def normalize_by_rows(x: Array, gamma: Array, beta: Array, *settings: Any) -> tuple[Array, Array, Array]:
    """`γ (x - mean) / sqrt(variance + ε) + β`, the mean, and `1 / sqrt(variance + ε)`.

    The variance comes from sums of squares, unless a channel is so far from 0 that this would lose precision.
    """
    epsilon, count = settings[-1], x.numel() // x.shape[1]
    mean, square = _total(x) / count, _squares(x) / count
    variance = torch.addcmul(square, mean, mean, value=-1)
    if bool((square > FAR * variance).any()):
        return _centered(x, mean, gamma, beta, epsilon)
    inverse = variance.add_(epsilon).rsqrt_()
    slope = inverse * gamma
    offset = torch.addcmul(beta, mean, slope, value=-1)
    return torch.mul(x, _across(slope, x)).add_(_across(offset, x)), mean, inverse


def _centered(x: Array, mean: Array, gamma: Array, beta: Array, epsilon: float) -> tuple[Array, Array, Array]:
    """The same from squares of `x - mean`: one more pass over the images."""
    y = x - _across(mean, x)
    inverse = (_squares(y) / (x.numel() // x.shape[1])).add_(epsilon).rsqrt_()
    return y.mul_(_across(inverse * gamma, x)).add_(_across(beta, x)), mean, inverse


def gradients_by_rows(g: Array, x: Array, gamma: Array, *settings: Any) -> tuple[Array | None, ...]:
    """With `x̂ = (x - mean) / deviation`: `β' = Σ g`, `γ' = Σ g x̂`, `x' = γ / deviation (g - (β' + x̂ γ') / count)`."""
    _, _, mean, inverse, *_, wanted = settings
    count = x.numel() // x.shape[1]
    of_beta, products = _total(g), x * g
    of_gamma = torch.addcmul(_total(products), mean, of_beta, value=-1).mul_(inverse)
    slope, share = inverse * gamma, inverse * of_gamma / -count
    offset = torch.addcmul(of_beta / count, mean, share).mul_(slope)
    of_x = torch.mul(x, _across(share, x), out=products).add_(g).mul_(_across(slope, x)).sub_(_across(offset, x))
    return of_x, of_gamma if wanted[1] else None, of_beta if wanted[2] else None


def _total(x: Array) -> Array:
    """`Σ x` of each channel."""
    return x.flatten(2).sum(2).sum(0)


def _squares(x: Array) -> Array:
    """`Σ x²` of each channel."""
    return torch.linalg.vector_norm(x.flatten(2), dim=2).square_().sum(0)


def _across(numbers: Array, x: Array) -> Array:
    """One number per channel, to be combined with images."""
    return numbers.view(-1, *[1] * (x.ndim - 2))


def fits(arguments: Sequence[Any]) -> bool:
    """Whether contiguous images are normalized with their own statistics, and with `γ` and `β`."""
    x, gamma, beta, *statistics, training = arguments[:6]
    return _is_plain(x) and gamma is not None and beta is not None and statistics == [None, None] and bool(training)


def fits_gradient(arguments: Sequence[Any]) -> bool:
    """The same for the gradients, of which that of the images is needed."""
    g, x, gamma, *statistics = arguments[:5]
    training, _, wanted = arguments[-3:]
    own = gamma is not None and statistics == [None, None] and bool(training)
    return own and _is_plain(g) and _is_plain(x) and bool(wanted[0])


def _is_plain(images: Array) -> bool:
    return images.ndim > 2 and images.is_contiguous() and images.dtype in (torch.float32, torch.float64)


def workspace(arguments: Sequence[Any], _: int) -> int:
    """One number per channel of each image, at most two arrays at a time."""
    x = arguments[0]
    return 2 * x.shape[0] * x.shape[1] * x.element_size()
