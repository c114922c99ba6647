"""Range checks of fed indices (class indices of a loss, rows of an embedding).

The CPU's operators raise an error before anything has changed. A GPU would lose its context, and a fused loop with
several threads would end the process, so there indices are checked before the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np
import torch

from stepgraph.compiler.step import Key, Limit, Step, value
from stepgraph.errors import DataError
from stepgraph.system import torch_private
from stepgraph.tensors.tensor import Tensor


class Indices:
    """The index feeds of one batch size, checked before a call."""

    def __init__(self, step: Step, titles: Mapping[Tensor, str]) -> None:
        self.limits = {value(tensor): limit for tensor, limit in step.index_limits.items() if tensor in step.fed}
        self._titles = titles
        self._seen: dict[Key, tuple[weakref.ref[torch.Tensor], int]] = {}

    def require(self, key: Key, array: torch.Tensor) -> None:
        """Rejects an array that holds an index out of range.

        On a GPU, checking synchronizes. Memory that was checked and has not changed is not checked again: most batches
        there are slices of one array.
        """
        known = self._seen.get(key)
        if known is not None and known[0]() is array and torch_private.version(array) == known[1]:
            return
        limit, elsewhere = self.limits[key], not array.is_cpu
        if elsewhere and self._is_part_of_known(key, array):
            return
        if not _within(array, limit.extent):
            raise _refused(array, limit, self._titles[key.owner])
        if elsewhere:
            self._remember(key, array, limit.extent)

    def require_all(self, arrays: Mapping[Key, torch.Tensor]) -> None:
        """The same for all feeds."""
        for key in self.limits:
            if key in arrays:
                self.require(key, arrays[key])

    def _is_part_of_known(self, key: Key, array: torch.Tensor) -> bool:
        known = self._seen.get(key)
        if known is None or array.is_inference():
            return False
        return known[0]() is _whole(array) and torch_private.version(array) == known[1]

    def _remember(self, key: Key, array: torch.Tensor, extent: int) -> None:
        whole = _whole(array)
        if not array.is_inference() and (whole is array or _within(whole, extent)):  # inference tensors: no versions
            self._seen[key] = weakref.ref(whole), torch_private.version(whole)


def _whole(array: torch.Tensor) -> torch.Tensor:
    """The array that an array is a view of."""
    base = torch_private.base(array)
    return array if base is None or base.dtype != array.dtype else base


def _within(array: torch.Tensor, extent: int) -> bool:
    if array.numel() == 0:
        return True
    if array.device.type != "cpu":
        least, most = torch.stack(torch.aminmax(array)).tolist()
        return bool(least >= 0 and most < extent)
    numbers = array.numpy()  # NumPy is much faster for few numbers
    unsigned = numbers.view(f"u{numbers.itemsize}") if numbers.dtype.kind == "i" else numbers  # negative becomes large
    return bool(np.max(unsigned) < extent)


def _refused(array: torch.Tensor, limit: Limit, where: str) -> DataError:
    outside = (array < 0) | (array >= limit.extent)
    place = outside.nonzero()[0].tolist()
    number, allowed = int(array[tuple(place)]), f"0 to {limit.extent - 1}"
    return DataError(
        where,
        f"row {place[0]} holds the {limit.what} {number}, but {limit.where} takes {allowed}",
        place=place,
        out_of_range=f"{int(outside.sum())} of {array.numel()} numbers",
        fix=f"use integers from {allowed}",
    )
