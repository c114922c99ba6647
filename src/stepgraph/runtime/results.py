"""Results of a captured step that outlive it.

A replayed CUDA graph overwrites its previous results. A result that a caller may still read is lent: it is copied
when it is read, or just before the next replay if something still refers to it.
"""

from __future__ import annotations

import weakref

import torch


class Lent:
    """A result in the memory of a captured graph; once owned, in its own memory."""

    __slots__ = ("__weakref__", "_is_owned", "array")

    def __init__(self, array: torch.Tensor) -> None:
        self.array, self._is_owned = array, False

    def is_of(self, array: torch.Tensor) -> bool:
        """Whether it still refers to this array in the graph's memory."""
        return self.array is array

    def own(self) -> torch.Tensor:
        """The result, in memory that is never overwritten."""
        if not self._is_owned:
            self.array, self._is_owned = self.array.clone(), True
        return self.array


class Lending:
    """The results lent by one captured graph since its last replay."""

    def __init__(self) -> None:
        self._lent: list[weakref.ref[Lent]] = []

    def lend(self, array: torch.Tensor) -> Lent:
        """Lends a result of the last replay; the same one if it is lent already."""
        for one in self._lent:
            lent = one()
            if lent is not None and lent.is_of(array):
                return lent
        lent = Lent(array)
        self._lent.append(weakref.ref(lent))
        return lent

    def call_in(self) -> None:
        """Must be called before each replay, which must not overwrite what may still be read."""
        if not self._lent:
            return
        for one in self._lent:
            lent = one()
            if lent is not None:
                lent.own()
        self._lent.clear()
