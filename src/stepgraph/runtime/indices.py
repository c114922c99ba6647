"""Range checks of fed indices (class indices of a loss, rows of an embedding).

The CPU's operators raise an error before anything has changed. Fused ones raise it after other kernels may have changed
something, a fused loop with several threads would end the process, and a GPU would lose its context, so there indices
are checked before the call. Those that are already on a GPU are left to the step, if it checks them itself
(`compiler/guard.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from stepgraph.compiler.guard import clamped
from stepgraph.compiler.step import Key, Limit, Step, value
from stepgraph.errors import DataError
from stepgraph.system import torch_private
from stepgraph.tensors.tensor import Tensor


class Indices:
    """The index feeds of one batch size, checked before a call."""

    def __init__(self, step: Step, titles: Mapping[Tensor, str]) -> None:
        self.limits = {value(tensor): limit for tensor, limit in step.index_limits.items() if tensor in step.fed}
        self._titles, self._is_guarded = titles, step.guards
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
        if elsewhere and (self._is_guarded or self._is_part_of_known(key, array)):
            return
        if not within(array, limit):
            raise _refused(array, limit, self._titles[key.owner])
        if elsewhere:
            self._remember(key, array, limit)

    def in_range(self, key: Key, array: torch.Tensor) -> torch.Tensor:
        """The array as the step reads it: where the step checks indices, those out of range are replaced."""
        return clamped(array, self.limits[key]) if self._is_guarded and key in self.limits else array

    def require_all(self, arrays: Mapping[Key, torch.Tensor]) -> None:
        """The same for all feeds."""
        for key, limit in self.limits.items():
            array = arrays.get(key)
            if array is None or (array.numel() == 1 and array.is_cpu and 0 <= array.item() < limit.extent):
                continue  # a tiny step takes only some microseconds
            self.require(key, array)

    def _is_part_of_known(self, key: Key, array: torch.Tensor) -> bool:
        known = self._seen.get(key)
        if known is None or array.is_inference():
            return False
        return known[0]() is _whole(array) and torch_private.version(array) == known[1]

    def _remember(self, key: Key, array: torch.Tensor, limit: Limit) -> None:
        whole = _whole(array)
        if not array.is_inference() and (whole is array or within(whole, limit)):  # inference tensors: no versions
            self._seen[key] = weakref.ref(whole), torch_private.version(whole)


def _whole(array: torch.Tensor) -> torch.Tensor:
    """The array that an array is a view of."""
    base = torch_private.base(array)
    return array if base is None or base.dtype != array.dtype else base


def within(array: torch.Tensor, limit: Limit) -> bool:
    """Whether all indices of an array are in range; on a GPU this synchronizes."""
    if array.numel() == 0:
        return True
    if array.device.type != "cpu":
        if limit.ignored:
            return not bool(_outside(array, limit).any())
        least, most = torch.stack(torch.aminmax(array)).tolist()
        return bool(least >= 0 and most < limit.extent)
    numbers = array.numpy()  # NumPy is much faster for few numbers
    unsigned = numbers.view(f"u{numbers.itemsize}") if numbers.dtype.kind == "i" else numbers  # negative becomes large
    if np.max(unsigned) < limit.extent:
        return True
    return bool(limit.ignored) and not bool(_outside(array, limit).any())


def _outside(array: torch.Tensor, limit: Limit) -> torch.Tensor:
    """Where an array holds what the layer does not accept."""
    found = (array < 0) | (array >= limit.extent)
    for one in limit.ignored:
        found &= array != one
    return found


def _refused(array: torch.Tensor, limit: Limit, where: str) -> DataError:
    outside = _outside(array, limit)
    place = outside.nonzero()[0].tolist()
    count = f"{int(outside.sum())} of {array.numel()} numbers"
    return refused(where, limit, place, array.shape, int(array[tuple(place)]), out_of_range=count)


def refused(
    where: str, limit: Limit, place: Sequence[int], shape: Sequence[int], index: int | str, **facts: object
) -> DataError:
    """The error for an index out of range at a place in an array."""
    allowed = f"0 to {limit.extent - 1}" + "".join(f" or {one}" for one in sorted(limit.ignored))
    return DataError(
        where,
        f"{_named(place, shape)} holds the {limit.what} {index}, but {limit.where} takes {allowed}",
        place=list(place),
        **facts,
        fix=f"use integers from {allowed}",
    )


def _named(place: Sequence[int], shape: Sequence[int]) -> str:
    """A place as a row and, if a row holds several numbers, its position there: `row 3, position 17`."""
    inner = [index for index, extent in zip(place[1:], shape[1:], strict=True) if extent > 1]
    if not inner:
        return f"row {place[0]}"
    return f"row {place[0]}, position {inner[0] if len(inner) == 1 else inner}"
