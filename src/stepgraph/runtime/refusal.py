"""Calls that the device itself has refused, because an index was out of range (`compiler/guard.py`).

The host learns of it when it synchronizes: from a loss that is NaN, or when it waits for a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from stepgraph.compiler import guard
from stepgraph.compiler.step import Limit
from stepgraph.errors import DataError
from stepgraph.runtime.indices import refused
from stepgraph.tensors.tensor import Tensor


class Check(Protocol):
    """Knows whether the device has refused a call."""

    def require_none(self) -> None:
        """Raises if it has; synchronizes with the device."""


class Refusal:
    """What the device has noted since the last error; each call looks at the one that was current when it ran.

    Args:
        note: what the device has noted, see `compiler/guard.py`.
        explain: makes the error for it.
        report: called when an error has been found, before it is raised.
    """

    __slots__ = ("_error", "_explain", "_note", "_report")

    def __init__(
        self,
        note: torch.Tensor,
        explain: Callable[[list[int]], DataError],
        report: Callable[[], None],
    ) -> None:
        self._note, self._explain, self._report = note, explain, report
        self._error: DataError | None = None

    def require_none(self) -> None:
        """Raises if the device has refused a call; synchronizes with it."""
        if self._error is None:
            noted = self._note.tolist()
            if not any(noted):
                return
            self._error = self._explain(noted)
            with torch.inference_mode():
                self._note.zero_()
            self._report()
        raise self._error


def explanation(guarded: Mapping[Tensor, Limit], titles: Mapping[Tensor, str]) -> Callable[[list[int]], DataError]:
    """The error for what steps have noted about these tensors."""
    return partial(_explained, tuple(guarded.items()), titles)


def _explained(guarded: tuple[tuple[Tensor, Limit], ...], titles: Mapping[Tensor, str], noted: list[int]) -> DataError:
    (tensor, limit), note = next((one, note) for one, note in zip(guarded, noted, strict=True) if note)
    place, index = guard.read(note)
    at: list[int] = []
    for inner in reversed(tensor.shape[1:]):
        place, position = divmod(place, int(inner))
        at.insert(0, position)
    beyond = {guard.LEAST: " or less", guard.MOST: " or more"}.get(index, "")
    return refused(
        titles.get(tensor, tensor.where),
        limit,
        [place, *at],
        tensor.shape,
        f"{index}{beyond}",
        found_later="that call and those after it have changed nothing",
    )
