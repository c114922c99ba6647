"""Norms that have the same bits however an array is cut between blocks of elements.

A library's norm adds in an order that depends on the length of the array. Here the squares of each block are added by
halves, with one rounding per sum, and the sums of blocks in their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import torch

from stepgraph.compiler.ranks.collectives import of_all_ranks
from stepgraph.compiler.ranks.slices import BLOCK, Ownership
from stepgraph.tensors.tensor import Tensor

CHUNK = 256  # blocks that are squared at once, which bounds the memory


def norms(
    pieces: Mapping[Tensor, torch.Tensor], trained: Sequence[Tensor], ranks: Ownership | None, like: torch.Tensor
) -> dict[Tensor, torch.Tensor]:
    """The norm of each gradient, with the same bits for any number of ranks, each of which may have a part of it.

    Args:
        pieces: what this rank has of the gradients.
        trained: the parameters of all gradients, in an order that all ranks know.
        ranks: which rank has which part; None if there is only one.
        like: an array on the device.
    """
    double = any(tensor.data_type.torch is torch.float64 for tensor in trained)
    dtype = torch.float64 if double else torch.float32
    arrays = [pieces[tensor] for tensor in trained if tensor in pieces]
    sums = sums_of_squares(arrays, dtype) if arrays else like.new_empty(0, dtype=dtype)
    blocks = [-(-tensor.descriptor.element_count // BLOCK) for tensor in trained]
    if ranks is not None:
        firsts = dict(zip(trained, accumulate([0, *blocks[:-1]]), strict=True))
        sums = of_all_ranks(sums, ranks.rank, ranks.size, _places(firsts, ranks))
    return {tensor: own.sum().sqrt() for tensor, own in zip(trained, sums.split(blocks), strict=True)}


def _places(firsts: Mapping[Tensor, int], ranks: Ownership) -> list[int]:
    """Rank by rank, where the blocks of its slices begin among all blocks, and where they end."""
    found = []
    for rank in range(ranks.size):
        for tensor, first in firsts.items():
            own = ranks.slices[tensor][rank]
            found += [first + own.first, first + own.first + own.blocks]
    return found


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
