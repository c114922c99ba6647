"""Indices that the step itself checks on the device.

A GPU does not survive an index out of range, and looking at indices before a call would synchronize. So the step
replaces them with the nearest index in range, and keeps a note of one number per tensor of `Step.guarded`: 0, or the
place and the value of the first index out of range. As long as a note is there, losses are NaN, and parameters,
optimizer state and statistics stay. Whoever reads such a loss finds the note, raises the error and erases it
(`runtime/refusal.py`).

The note is one number, so that a fused step finds it beside the loss, in a kernel that it has anyway.
"""

from __future__ import annotations

import torch

from stepgraph.compiler.step import Limit

Array = torch.Tensor
_VALUES = 1 << 32  # values that a note tells apart
LEAST, MOST = -(_VALUES // 2), _VALUES // 2 - 1  # values beyond are noted as these


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


def noted(indices: Array, in_range: Array) -> Array:
    """The note on one tensor, `[1]`."""
    outside, given = (indices != in_range).flatten(), indices.flatten()
    count = given.numel()
    left = torch.where(outside, count - torch.arange(count, device=given.device), 0).amax(0, keepdim=True)
    place = count - left  # of the first one; the array's end if there is none
    value = given.take(place.clamp(max=count - 1)).long().clamp(LEAST, MOST)
    return torch.where(left > 0, (place + 1) * _VALUES + (value - LEAST), 0)


def moved(notes: Array, places: Array) -> Array:
    """Notes about a part of an array as notes about the whole, in which the part begins at `places`."""
    return torch.where(notes == 0, 0, notes + places * _VALUES)


def read(note: int) -> tuple[int, int]:
    """The place in the flattened array, and the value, of a note."""
    place, value = divmod(note, _VALUES)
    return place - 1, value + LEAST


def kept(notes: Array, found: Array) -> Array:
    """The notes after a call: those that were there before, or else what it found."""
    return torch.where(accepts(notes), found, notes)


def accepts(notes: Array) -> Array:
    """Whether nothing has been noted."""
    return notes[0] == 0 if len(notes) == 1 else (notes == 0).all()
