"""Notes of who writes to the arrays of tensors, for those who keep something that was computed from them.

Whoever writes to an array that a tensor holds notes it: steps that train, tensors that are bound or loaded. The last
note having the same number as before means that nothing has changed in between. No array is looked at.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_numbers = itertools.count(1)  # unique, even if several threads write
_last = [0]


def note() -> int:
    """Notes that arrays are written to; returns the number of the note."""
    _last[0] = number = next(_numbers)
    return number


def latest() -> int:
    """The number of the last note."""
    return _last[0]


class Shares:
    """Arrays that were given away and share the memory of another: who still holds one may write to it unnoticed."""

    def __init__(self) -> None:
        self._given: list[StorageWeakRef] = []

    def give(self, array: torch.Tensor) -> torch.Tensor:
        """An array over the same memory; it and its views are known as long as anyone holds them."""
        note()
        shared = torch.from_dlpack(array)  # with a storage object of its own
        self._given = [*self._held(), StorageWeakRef(shared.untyped_storage())]
        return shared

    @property
    def are_held(self) -> bool:
        """Whether anyone holds one of them."""
        return bool(self._held())

    def _held(self) -> list[StorageWeakRef]:
        return [one for one in self._given if not one.expired()]

    def __deepcopy__(self, memo: Any) -> Shares:
        return Shares()
