"""What attention computes: heads, masks and weights, as pure functions of arrays `[N, heads, T, d]`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, causal: bool = False
) -> torch.Tensor:
    """`softmax(q kᵀ / sqrt(d) + mask) v` in one operator, zero for queries whose keys are all masked.

    Key and value heads are shared by adjacent query heads if there are fewer of them.
    """
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def attention_weights(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`softmax(q kᵀ / sqrt(d) + mask)`; the smallest finite number represents -∞, so that no row becomes NaN."""
    scores = q / math.sqrt(q.shape[-1]) @ repeat_heads(k, heads=q.shape[1]).transpose(-2, -1)
    return torch.softmax(scores if mask is None else (scores + mask).clamp_min(torch.finfo(q.dtype).min), -1)


def weighted(weights: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The values, weighted; zero for queries whose keys are all masked."""
    gathered = weights @ repeat_heads(v, heads=weights.shape[1])
    return gathered if mask is None else gathered.masked_fill(all_masked(mask), 0)


def repeat_heads(x: torch.Tensor, *, heads: int) -> torch.Tensor:
    """`[N, groups, T, d] → [N, heads, T, d]`: each head as often as adjacent query heads share it."""
    if x.shape[1] == heads:
        return x
    return x[:, :, None].expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def position_mask(steps: int, keys: int, *, causal: bool, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """An additive mask `[1, 1, steps, keys]`: -∞ for keys after the query (causal) and outside the window.

    Keys from `steps` on are appended rows, which have no position and are seen by every query.
    """
    query = torch.arange(steps, device=like.device)[:, None]
    key = torch.arange(keys, device=like.device)
    distance = query - key
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (distance.abs() >= window)
    hidden = hidden & (key < steps)
    return as_added(hidden, like.dtype)[None, None]


def as_added(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An additive mask: -∞ where a key is hidden, else 0."""
    return hidden.new_zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -math.inf)


def split_heads(x: torch.Tensor, *, heads: int) -> torch.Tensor:
    """`[N, T, heads * d] → [N, heads, T, d]`, without a copy."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def append_rows(x: torch.Tensor, row: torch.Tensor | None, *, zero: bool) -> torch.Tensor:
    """`[x; row; 0]` along the steps, each only if it exists."""
    shape = x.shape[0], 1, x.shape[2]
    rows = [] if row is None else [row.reshape(1, 1, -1).expand(shape)]
    rows += [x.new_zeros(shape)] if zero else []
    return torch.cat([x, *rows], 1) if rows else x


def join_masks(*masks: torch.Tensor, batch: int, keys: int, dtype: torch.dtype) -> torch.Tensor | None:
    """One additive mask for scores `[N, heads, L, keys]`, against which it broadcasts: -∞ where a key is masked.

    Keys beyond those of a mask are appended rows, which are not masked. Booleans become numbers here because not every
    implementation behind PyTorch's operator returns zeros for a row of a boolean mask that masks everything.
    """
    joined: torch.Tensor | None = None
    for mask in masks:
        if mask.dtype is torch.bool:
            mask = as_added(mask, dtype)
        mask = F.pad(mask.to(dtype), (0, keys - mask.shape[-1])) if keys > mask.shape[-1] else mask.to(dtype)
        rows = batch if mask.shape[0] > 1 else 1
        if mask.ndim == 2:
            mask = mask[:, None, None]
        else:  # one for all heads, or one per head
            mask = mask[:, None] if mask.shape[0] == rows else mask.reshape(rows, -1, *mask.shape[1:])
        joined = mask if joined is None else joined + mask
    return joined


def all_masked(mask: torch.Tensor) -> torch.Tensor:
    """`[..., L, 1]`: whether all keys of a query are masked."""
    return (mask == -math.inf).all(-1, keepdim=True)
