"""Numbers that a rank has written by itself: what its program does to parameters between updates.

Ranks have the same parameters and statistics after each update. Whoever can write to one is noticed before
(`Tensor.expect_writes`), and a checksum is kept. In front of the next update, the rank tells the others by how much its
checksums have changed; a rank where nobody could write tells zeros. If all ranks tell the same, they still have the
same numbers. Nothing is read on the host, and nothing is computed in updates before which nobody could write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stepgraph.tensors.tensor import Tensor
from stepgraph.tensors.writes import Watch, checksum

_BITS = (1 << 48) - 1  # of a change that ranks compare: exact as float64
_NONE = 1 << 31  # greater than the number of any tensor


class Changes:
    """The changes of some tensors.

    Args:
        tensors: those that all ranks have, in the same order.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self._watches = tensors, [_watched(tensor) for tensor in tensors]
        self._taken: list[tuple[Watch, torch.Tensor | None]] = []  # what an update that may be refused has found

    @torch.inference_mode()
    def told(self) -> torch.Tensor | None:
        """The change since the last update, and the number of the first tensor with one, from 1; None without one.

        Both are 0 if somebody could write, and has not.
        """
        opened = [number for number, watch in enumerate(self._watches) if watch.before is not None]
        if not opened:
            return None
        found = [_change(self.tensors[number], self._watches[number]) for number in opened]
        changes = torch.stack(found)
        numbers = torch.tensor(opened, device=changes.device) + 1
        first = torch.where(changes != 0, numbers, _NONE).amin() % _NONE
        return torch.stack([(changes * (2 * numbers + 1)).sum() & _BITS, first])

    def accept(self) -> None:
        """Takes the numbers behind an update as those of all ranks; called when it has been made, or started."""
        self._taken = [(watch, watch.before) for watch in self._watches if watch.before is not None]
        for tensor in self.tensors if self._taken else ():
            watch = _watched(tensor)
            if watch.before is not None:
                watch.before = checksum(tensor.array()) if tensor.is_shared else None

    def refuse(self) -> None:
        """Takes back the last `accept`, since the device has refused the update."""
        for watch, before in self._taken:
            watch.before = before
        self._taken = []

    def forget(self) -> None:
        """Takes the numbers as they are as those of all ranks."""
        for watch in self._watches:
            watch.before = None
        self._taken = []


def _watched(tensor: Tensor) -> Watch:
    if tensor.watch is None:
        tensor.watch = Watch()
    return tensor.watch


def _change(tensor: Tensor, watch: Watch) -> torch.Tensor:
    assert watch.before is not None
    return checksum(tensor.array()) - watch.before
