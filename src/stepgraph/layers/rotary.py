"""Rotary positions: each pair of features of a query or key is turned by an angle that grows with its position."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, *, heads: int, base: float, dimension: int, interleaved: bool) -> torch.Tensor:
    """Turns pair `i` of each head of `x` `[N, T, heads * d]` at step `t` by `t * base ** (-2 i / dimension)`.

    The first `dimension` features of a head are rotated; the others stay. A pair is `(i, i + dimension / 2)`, or
    `(2 i, 2 i + 1)` if interleaved. Angles and products have at least float32 precision.
    """
    a, b, rest = _pairs(x.unflatten(-1, (heads, -1)), dimension, interleaved)
    angles = _angles(x, base=base, dimension=dimension)[:, None]
    cosine, sine = angles.cos(), angles.sin()
    turned = a * cosine - b * sine, b * cosine + a * sine
    joined = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([joined.to(x.dtype), rest], -1).flatten(-2)


def _pairs(x: torch.Tensor, dimension: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both members of every pair, and the features that are not rotated."""
    rotated, rest = x.tensor_split((dimension,), -1)
    a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.chunk(2, -1)
    return a, b, rest


def _angles(x: torch.Tensor, *, base: float, dimension: int) -> torch.Tensor:
    """`[T, dimension / 2]`: the angle of every pair at every step."""
    dtype, device = torch.promote_types(x.dtype, torch.float32), x.device
    frequencies = base ** (-torch.arange(0, dimension, 2, dtype=dtype, device=device) / dimension)
    return torch.arange(x.shape[1], dtype=dtype, device=device)[:, None] * frequencies
