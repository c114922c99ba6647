"""Losses of a captured step, each in a place of its own.

A replayed CUDA graph writes its results over the last ones, and a copy after every replay would cost the host as much
as the replay. So the graph itself writes each loss into the next of many places, and only when they are used up are
all of them copied at once, for whoever still holds one.
"""

from __future__ import annotations

import torch

PLACES = 1024


class _Written:
    """Losses written since places were last used up; later their copy."""

    def __init__(self, array: torch.Tensor) -> None:
        self.array = array


class Loss:
    """One number on the device, to be read when it is wanted."""

    __slots__ = ("_among", "_place", "_shape")

    def __init__(self, among: _Written, place: int, shape: torch.Size) -> None:
        self._among, self._place, self._shape = among, place, shape

    @property
    def array(self) -> torch.Tensor:
        """The number where it lies now: to be read before the next call."""
        return self._among.array[self._place]

    def own(self) -> torch.Tensor:
        """The number in the shape the step gives it, in memory that nobody writes over."""
        return self.array.reshape(self._shape).clone()


class Losses:
    """Where one captured graph writes its losses."""

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        self._shape = like.shape
        self._places = torch.zeros(PLACES, dtype=like.dtype, device=device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        self._written, self._count = _Written(self._places), 0

    def capture(self, loss: torch.Tensor) -> None:
        """What a replay is to do with its loss; called while the graph is captured."""
        with torch.inference_mode():
            self._places.index_copy_(0, self._next, loss.reshape(1))
            self._next.add_(1)

    def expect(self) -> None:
        """To be called before each replay: it must not write over what somebody may still read."""
        if self._count == PLACES:
            self._written.array = self._places.clone()
            self._next.zero_()
            self._written, self._count = _Written(self._places), 0
        self._count += 1

    def latest(self) -> Loss:
        """The loss of the last replay."""
        return Loss(self._written, self._count - 1, self._shape)
