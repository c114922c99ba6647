"""Rotary positions: each pair of features of a query or key is turned by an angle that grows with its position."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, *, heads: int, base: float, dimension: int, interleaved: bool) -> torch.Tensor:
    """Turns pair `i` of each head of `x` `[N, T, heads * d]` at step `t` by `t * base ** (-2 i / dimension)`.

    The first `dimension` features of a head are rotated; the others stay. A pair is `(i, i + dimension / 2)`, or
    `(2 i, 2 i + 1)` if interleaved. Angles and products have at least float32 precision.
    """
    rotated, rest = x.unflatten(-1, (heads, -1)).tensor_split((dimension,), -1)
    member = -1 if interleaved else -2  # the axis of a pair's two members
    pairs = rotated.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    angles = _angles(x, base=base, dimension=dimension)[:, None]
    cosine, sine = angles.cos().unsqueeze(member), angles.sin()
    turned = pairs * cosine + pairs.flip(member) * torch.stack([-sine, sine], member)
    joined = turned.flatten(-2).to(x.dtype)
    return (torch.cat([joined, rest], -1) if rest.shape[-1] else joined).flatten(-2)


def _angles(x: torch.Tensor, *, base: float, dimension: int) -> torch.Tensor:
    """`[T, dimension / 2]`: the angle of every pair at every step."""
    dtype, device = torch.promote_types(x.dtype, torch.float32), x.device
    frequencies = base ** (-torch.arange(0, dimension, 2, dtype=dtype, device=device) / dimension)
    return torch.arange(x.shape[1], dtype=dtype, device=device)[:, None] * frequencies
