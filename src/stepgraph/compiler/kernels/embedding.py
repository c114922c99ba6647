"""Alternative implementations of the gradient of an embedding, which sums gradient rows by word.

A word that occurs several times gets the sum of its rows, in a fixed order. PyTorch scans every word in each
thread; adding the rows to zeros visits only those that occur.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
Array = torch.Tensor


def by_index(g: Array, indices: Array, words: int, padding: int, by_frequency: bool) -> Array:
    """Adds row by row."""
    rows = g.reshape(-1, g.shape[-1])
    return _without(padding, rows.new_zeros(words, rows.shape[1]).index_add_(0, indices.reshape(-1), rows))


def by_scatter(g: Array, indices: Array, words: int, padding: int, by_frequency: bool) -> Array:
    """Sorts the positions by word first, so that threads can divide up the words."""
    rows = g.reshape(-1, g.shape[-1])
    places = indices.reshape(-1, 1).long().expand_as(rows)
    return _without(padding, rows.new_zeros(words, rows.shape[1]).scatter_add_(0, places, rows))


def _without(padding: int, found: Array) -> Array:
    """Zeroes the gradient of the padding word; -1 means that there is none."""
    if padding >= 0:
        found[padding] = 0
    return found


IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "pytorch": aten.embedding_dense_backward.default,
    "index": by_index,
    "scatter": by_scatter,
}


def fits(node: fx.Node) -> bool:
    """Whether gradients are summed, not averaged."""
    by_frequency = node.args[4]
    return not by_frequency


def words(arguments: Sequence[Any]) -> int:
    """The exclusive upper bound of every index."""
    return int(arguments[2])


def workspace(arguments: Sequence[Any], _: int) -> int:
    """A contiguous copy of the rows, if they are not contiguous."""
    g, indices = arguments[:2]
    return (0 if g.is_contiguous() else g.nbytes) + (0 if indices.is_contiguous() else indices.nbytes)


def workspace_of_sorting(arguments: Sequence[Any], results: int) -> int:
    """The same, plus words and their positions, each twice."""
    return workspace(arguments, results) + 5 * 8 * arguments[1].numel()
