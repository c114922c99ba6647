"""Losses of a captured step, each in its own slot.

A replayed CUDA graph overwrites its previous results, and a copy after every replay would cost the host as much
as the replay. Instead, the graph itself writes each loss into the next of many slots. Only when they are used up
are all of them copied, in one operation.
"""

from __future__ import annotations

import torch

SLOTS = 1024


class _Written:
    """Losses written since the slots were last used up; later, their copy."""

    def __init__(self, array: torch.Tensor) -> None:
        self.array = array


class Loss:
    """One number on the device, read on demand."""

    __slots__ = ("_among", "_slot", "_shape")

    def __init__(self, among: _Written, slot: int, shape: torch.Size) -> None:
        self._among, self._slot, self._shape = among, slot, shape

    @property
    def array(self) -> torch.Tensor:
        """The number in its current memory: read it before the next call."""
        return self._among.array[self._slot]

    def own(self) -> torch.Tensor:
        """The number in the step's shape, in memory that is never overwritten."""
        return self.array.reshape(self._shape).clone()


class Total:
    """The losses of one call of a graph with several: their sum is what the call minimizes."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[torch.Tensor | Loss, ...]) -> None:
        self.parts = parts

    @property
    def array(self) -> torch.Tensor:
        """The sum of all losses and of all their elements; read it before the next call."""
        arrays = [one.array if isinstance(one, Loss) else one for one in self.parts]
        wide = max((one.dtype for one in arrays), key=lambda dtype: dtype.itemsize)
        return torch.stack([one.sum(dtype=wide) for one in arrays]).sum().reshape(1)

    def own(self) -> torch.Tensor:
        """The sum, in memory that is never overwritten."""
        return self.array


class Losses:
    """Where one captured graph writes its losses."""

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        self._shape = like.shape
        self._slots = torch.zeros(SLOTS, dtype=like.dtype, device=device)
        self._next = torch.zeros(1, dtype=torch.int64, device=device)
        self._written, self._count = _Written(self._slots), 0

    def capture(self, loss: torch.Tensor) -> None:
        """Records how a replay stores its loss; called during capture."""
        with torch.inference_mode():
            self._slots.index_copy_(0, self._next, loss.reshape(1))
            self._next.add_(1)

    def expect(self) -> None:
        """Must be called before each replay, which must not overwrite what may still be read."""
        if self._count == SLOTS:
            self._written.array = self._slots.clone()
            self._next.zero_()
            self._written, self._count = _Written(self._slots), 0
        self._count += 1

    def latest(self) -> Loss:
        """The loss of the last replay."""
        return Loss(self._written, self._count - 1, self._shape)
