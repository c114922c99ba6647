"""Indices that the step itself checks on the device.

A GPU does not survive an index out of range, and looking at indices before a call would synchronize. So the step
replaces them with the nearest index in range, and keeps a note of one number per tensor of `Step.guarded`: 0, or the
place and the value of the first index out of range. As long as a note is there, losses are NaN, and parameters,
optimizer state and statistics stay. Whoever reads such a loss finds the note, raises the error and erases it
(`runtime/refusal.py`).

One number, a maximum over the indices, costs a fused step nothing: it is computed beside the loss.
"""

from __future__ import annotations

import torch

from stepgraph.compiler.step import Limit

Array = torch.Tensor
_VALUES, _PLACES = 1 << 32, (1 << 31) - 1  # values that a note tells apart, and the most places
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
    outside, given = (indices != in_range).flatten(), indices.flatten().long()
    before_end = _PLACES - torch.arange(given.numel(), device=given.device)
    notes = before_end * _VALUES + (given.clamp(LEAST, MOST) - LEAST)
    return torch.where(outside, notes, 0).amax(0, keepdim=True)  # the largest is that of the first place


def read(note: int) -> tuple[int, int]:
    """The place in the flattened array, and the value, of a note."""
    before_end, value = divmod(note, _VALUES)
    return _PLACES - before_end, value + LEAST


def kept(notes: Array, found: Array) -> Array:
    """The notes after a call: those that were there before, or else what it found."""
    return torch.where(accepts(notes), found, notes)


def accepts(notes: Array) -> Array:
    """Whether nothing has been noted."""
    return notes[0] == 0 if len(notes) == 1 else (notes == 0).all()
