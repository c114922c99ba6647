"""Results of a captured step that outlive it.

A replayed CUDA graph writes its results over the last ones. A result that a caller may still read is lent: it is copied
when it is read, or just before the next replay if somebody still holds it by then.
"""

from __future__ import annotations

import weakref

import torch


class Lent:
    """A result in the memory of a captured graph; once it is owned, in memory of its own."""

    __slots__ = ("__weakref__", "_is_owned", "array")

    def __init__(self, array: torch.Tensor) -> None:
        self.array, self._is_owned = array, False

    def own(self) -> torch.Tensor:
        """The result, in memory that nobody writes over."""
        if not self._is_owned:
            self.array, self._is_owned = self.array.clone(), True
        return self.array


class Lending:
    """What one captured graph has lent since its last replay."""

    def __init__(self) -> None:
        self._lent: weakref.ref[Lent] | None = None

    def lend(self, array: torch.Tensor) -> Lent:
        """Hands a result of the last replay out."""
        lent = Lent(array)
        self._lent = weakref.ref(lent)
        return lent

    def call_in(self) -> None:
        """To be called before each replay: it must not write over what somebody may still read."""
        lent, self._lent = None if self._lent is None else self._lent(), None
        if lent is not None:
            lent.own()
