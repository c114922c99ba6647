"""Norms that have the same bits however an array is cut between blocks of elements.

A library's norm adds in an order that depends on the length of the array. Here the squares of each block are added by
halves, with one rounding per sum, and the sums of blocks in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from stepgraph.compiler.slices import BLOCK

CHUNK = 256  # blocks that are squared at once, which bounds the memory

_library = torch.library.Library("stepgraph", "FRAGMENT")
_library.define("sums_of_squares(Tensor[] arrays, ScalarType type) -> Tensor")
sums_of_squares = torch.ops.stepgraph.sums_of_squares.default


@torch.library.impl(_library, "sums_of_squares", "CompositeExplicitAutograd")
def _sums_of_squares(arrays: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of the squares of each block, array by array; the last block of each is filled up with zeros."""
    found = [_halved(chunk) for chunk in _chunks(arrays, dtype)]
    return torch.cat(found) if len(found) > 1 else found[0]


@torch.library.register_fake("stepgraph::sums_of_squares", lib=_library)
def _(arrays: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return arrays[0].new_empty(sum(_blocks(array) for array in arrays), dtype=dtype)


def _blocks(array: torch.Tensor) -> int:
    return -(-array.numel() // BLOCK)


def _chunks(arrays: Sequence[torch.Tensor], dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The blocks of all arrays as rows, so many at once."""
    left = sum(map(_blocks, arrays))
    chunk, filled = arrays[0].new_zeros(min(left, CHUNK), BLOCK, dtype=dtype), 0
    for array in arrays:
        flat, start = array.reshape(-1), 0
        while start < len(flat):
            count = min(len(flat) - start, (len(chunk) - filled) * BLOCK)
            chunk.view(-1)[filled * BLOCK :][:count] = flat[start : start + count]
            start, filled = start + count, filled + -(-count // BLOCK)
            if filled == len(chunk):
                yield chunk
                left -= filled
                chunk, filled = chunk.new_zeros(min(left, CHUNK), BLOCK), 0


def _halved(rows: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row."""
    squares = rows.mul_(rows)
    while (width := squares.shape[1]) > 1:
        squares = squares[:, : width // 2] + squares[:, width // 2 :]
    return squares.view(-1)
