"""Indices that the step itself checks on the device.

A GPU does not survive an index out of range, and looking at indices before a call would synchronize. So the step
replaces them with the nearest index in range, and notes the first one it meets: `[number, place, index, extent]` with
the number of the tensor among `Step.guarded`, from 1 on, the place in its flattened array, and the extent that was
exceeded. As long as a note is there, losses are NaN, and parameters, optimizer state and statistics stay. Whoever reads
such a loss finds the note, raises the error and erases it (`runtime/refusal.py`).
"""

from __future__ import annotations

import torch

from stepgraph.compiler.step import Limit

Array = torch.Tensor
LENGTH = 4  # numbers of a note


def clamped(indices: Array, limit: Limit) -> Array:
    """The indices, those out of range replaced with the nearest one in range; ignored ones stay."""
    if indices.dtype is torch.bool:
        return indices
    bounds = torch.iinfo(indices.dtype)
    found = indices.clamp(max(0, bounds.min), min(limit.extent - 1, bounds.max))
    for one in limit.ignored:
        if bounds.min <= one <= bounds.max:
            found = torch.where(indices == one, indices, found)
    return found


def noted(note: Array, number: int, indices: Array, in_range: Array, extent: int) -> Array:
    """The note after looking at one tensor: as it was, if it has something already."""
    outside, given = (indices != in_range).flatten(), indices.flatten().long()
    place = outside.byte().argmax().reshape(1)  # the first one
    found = torch.cat([outside.take(place) * number, place, given.take(place), note.new_full((1,), extent)])
    return torch.where(accepts(note), found, note)


def accepts(note: Array) -> Array:
    """Whether nothing has been noted."""
    return note[0] == 0
