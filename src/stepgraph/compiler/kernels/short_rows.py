"""Alternative implementations of softmax and its logarithm over short rows.

PyTorch computes a row with vectors of its numbers. What a row has beyond whole vectors takes one number at a time, and
a row that is shorter than a vector has nothing else. Here they are padded to a whole vector, with what adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import torch

from stepgraph.system import torch_private

aten = torch.ops.aten
Array = torch.Tensor
VECTOR = 16  # numbers in the longest vectors of float32 that processors have


def log_softmax(x: Array, axis: int, to_float: bool) -> Array:
    """`log softmax(x)` along the last axis."""
    return _cut(torch_private.log_softmax.default(_padded(x), axis, to_float), x)


def softmax(x: Array, axis: int, to_float: bool) -> Array:
    """`softmax(x)` along the last axis."""
    return _cut(torch_private.softmax.default(_padded(x), axis, to_float), x)


def _padded(x: Array) -> Array:
    return aten.constant_pad_nd.default(x, [0, VECTOR - x.shape[-1]], -inf)


def _cut(padded: Array, like: Array) -> Array:
    return padded[..., : like.shape[-1]].contiguous()


def fits(arguments: Sequence[Any]) -> bool:
    """Whether rows are shorter than a vector, and dense."""
    x, axis, _ = arguments
    is_plain = x.dtype == torch.float32 and x.is_contiguous()
    return is_plain and x.ndim > 0 and axis % x.ndim == x.ndim - 1 and 1 < x.shape[-1] < VECTOR


def workspace(arguments: Sequence[Any], results: int) -> int:
    """Bytes of the padded rows and of their padded results, besides those of the results: these come afterwards."""
    return 2 * results * VECTOR // arguments[0].shape[-1] - results
