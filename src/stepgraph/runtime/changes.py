"""Numbers that a rank has written by itself: what its program does to parameters between updates.

Ranks have the same parameters and statistics after each update. Whoever can write to one is noticed before
(`Tensor.expect_writes`), and a checksum is kept. In front of the next update, the rank tells the others by how much its
checksums have changed; a rank where nobody could write tells zeros. If all ranks tell the same, they still have the
same numbers. Nothing is read on the host, and nothing is computed in updates before which nobody could write.

Of optimizer buffers a rank has only a part. Whoever binds or restores them has them whole, so that their checksum tells
whether all ranks have taken their parts of the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from stepgraph.tensors.tensor import Tensor
from stepgraph.tensors.writes import Watch, checksum, watched

_BITS = (1 << 48) - 1  # of a change that ranks compare: exact as float64
_NONE = 1 << 31  # greater than the number of any tensor


class Changes:
    """The changes of some tensors.

    Args:
        tensors: those that all ranks have, in the same order.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self._watches = tensors, [watched(tensor) for tensor in tensors]
        # What an update that may be refused has found.
        self._taken: list[tuple[Watch, torch.Tensor | None, dict[int, torch.Tensor]]] = []

    @torch.inference_mode()
    def told(self) -> torch.Tensor | None:
        """The change since the last update, and the number of the first tensor with one, from 1; None without one.

        Both are 0 if somebody could write, and has not. Behind the tensors, their optimizer buffers are numbered.
        """
        found = dict(self._found())
        if not found:
            return None
        changes = torch.stack([*found.values()])
        numbers = torch.tensor([*found], device=changes.device) + 1
        first = torch.where(changes != 0, numbers, _NONE).amin() % _NONE
        return torch.stack([(changes * (2 * numbers + 1)).sum() & _BITS, first])

    def _found(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The changes of tensors that somebody could write to, by their numbers, and the buffers that were given."""
        for number, (tensor, watch) in enumerate(zip(self.tensors, self._watches, strict=True)):
            if watch.before is not None:
                yield number, checksum(tensor.array()) - watch.before
        for number, (tensor, watch) in enumerate(zip(self.tensors, self._watches, strict=True), len(self.tensors)):
            if watch.given:
                yield number, torch.stack([*watch.given.values()]).sum().to(tensor.array().device)

    def accept(self) -> None:
        """Takes the numbers behind an update as those of all ranks; called when it has been made, or started."""
        noted = [watch for watch in self._watches if watch.before is not None or watch.given]
        self._taken = [(watch, watch.before, watch.given) for watch in noted]
        for watch in noted:
            watch.given = {}
        for tensor in self.tensors if self._taken else ():
            watch = watched(tensor)
            if watch.before is not None:
                watch.before = checksum(tensor.array()) if tensor.is_shared else None

    def refuse(self) -> None:
        """Takes back the last `accept`, since the device has refused the update."""
        for watch, before, given in self._taken:
            watch.before, watch.given = before, given
        self._taken = []

    def forget(self) -> None:
        """Takes the numbers of tensors as they are as those of all ranks; optimizer buffers are not shared."""
        for watch in self._watches:
            watch.before = None
        self._taken = []
