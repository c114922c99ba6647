"""Notes of who writes to the arrays of tensors, for those who keep something that was computed from them.

Whoever writes to an array that a tensor holds notes it: steps that train, tensors that are bound or loaded. The last
note having the same number as before means that nothing has changed in between. No array is looked at.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

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


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDTH = 4096


@torch.inference_mode()
def checksum(array: torch.Tensor) -> torch.Tensor:
    """A number, on the device of the array, that depends on all its bits and their order; integers add up exactly."""
    flat = array.contiguous().view(-1).view(_INTEGERS[array.element_size()])
    whole = flat.numel() // _WIDTH * _WIDTH
    table = flat[:whole].view(-1, _WIDTH)
    sums = torch.cat([table.sum(0), table.sum(1), flat[whole:].long()])
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()


class Watched(Protocol):
    """A tensor that can be watched."""

    watch: Watch | None


class Watch:
    """Shows whether the numbers of a tensor, which other ranks have, too, are still the same.

    Attributes:
        before: the checksum of these numbers, taken when somebody could begin to write; None if nobody can have.
        given: checksums of the optimizer buffers that the program has given for the tensor since then, by number.
    """

    def __init__(self) -> None:
        self.before: torch.Tensor | None = None
        self.given: dict[int, torch.Tensor] = {}

    def note_given(self, number: int, whole: torch.Tensor) -> None:
        """Must be called with a whole optimizer buffer, of which each rank then keeps a part."""
        self.given[number] = checksum(whole) * (2 * number + 1) + number + 1  # not zero if all its numbers are

    def expect_writes(self, array: torch.Tensor) -> None:
        """Must be called before anybody but an update writes to the array."""
        if self.before is None:
            self.before = checksum(array)


def watched(tensor: Watched) -> Watch:
    """What watches a tensor, from now on."""
    if tensor.watch is None:
        tensor.watch = Watch()
    return tensor.watch


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
