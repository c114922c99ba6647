"""Products of groups of rows, each with a matrix of its own, as mixtures of experts compute them.

PyTorch's operator reads the sizes of the groups from an array, so no other operators compute the same from shapes
alone, and without memory it takes bfloat16 only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def grouped_product(
    function: Callable[..., Any], x: torch.Tensor, weights: torch.Tensor, *rest: Any, **more: Any
) -> Any:
    """Rows times the matrices of their groups: every row times every matrix, of which its own is kept.

    Args:
        function: PyTorch's, for what is not answered here.
        x: rows, group after group.
        weights: one matrix per group.
        rest: where each group ends, and other arguments.
        more: the same by name.
    """
    ends, *others = (*rest, *more.values())
    is_plain = x.ndim == 2 and weights.ndim == 3 and isinstance(ends, torch.Tensor) and not any(map(_is_given, others))
    if not is_plain or x.dtype is torch.bfloat16:
        return function(x, weights, *rest, **more)
    rows = torch.arange(x.shape[0], device=x.device)
    group = torch.bucketize(rows, ends, right=True)
    found = torch.matmul(x, weights)[group.clamp_max(len(weights) - 1), rows]
    return found.where((group < len(weights))[:, None], 0).to(x.dtype)


def _is_given(value: Any) -> bool:
    return value is not None
