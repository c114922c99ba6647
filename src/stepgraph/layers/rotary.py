"""Rotary positions: each pair of features of a query or key is turned by an angle that grows with its position."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, *, heads: int, base: float, dimension: int, interleaved: bool) -> torch.Tensor:
    """Turns pair `i` of each head of `x` `[N, T, heads * d]` at step `t` by `t * base ** (-2 i / dimension)`.

    The first `dimension` features of a head are rotated; the others stay. A pair is `(i, i + dimension / 2)`, or
    `(2 i, 2 i + 1)` if interleaved. Angles and products have at least float32 precision.
    """
    features = x.unflatten(-1, (heads, -1))
    angles = _angles(x, base=base, dimension=dimension)[:, None]
    if features.shape[-1] == dimension:
        return _turned(features, angles, interleaved=interleaved).flatten(-2)
    rotated, rest = features.split((dimension, features.shape[-1] - dimension), -1)
    return torch.cat([_turned(rotated, angles, interleaved=interleaved), rest], -1).flatten(-2)


def _turned(x: torch.Tensor, angles: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """The pairs of `[..., dimension]` turned by `[..., dimension / 2]`.

    Both members of a pair are computed from the two arrays of members. So is the gradient, and kernels that PyTorch's
    compiler generates read whole rows of each array once.
    """
    member = -1 if interleaved else -2  # the axis of a pair's two members
    a, b = (one.to(angles.dtype) for one in x.unflatten(-1, (-1, 2) if interleaved else (2, -1)).unbind(member))
    cosine, sine = angles.cos(), angles.sin()
    turned = a * cosine - b * sine, b * cosine + a * sine
    return torch.stack([one.to(x.dtype) for one in turned], member).flatten(-2)


def _angles(x: torch.Tensor, *, base: float, dimension: int) -> torch.Tensor:
    """`[T, dimension / 2]`: the angle of every pair at every step."""
    dtype, device = torch.promote_types(x.dtype, torch.float32), x.device
    frequencies = base ** (-torch.arange(0, dimension, 2, dtype=dtype, device=device) / dimension)
    return torch.arange(x.shape[1], dtype=dtype, device=device)[:, None] * frequencies
