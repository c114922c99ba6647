"""How long a GPU waits for other ranks: events around each wait, which a captured step records in every replay.

They are read in the next update, when the host knows anyway that the GPU has passed them; nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A moment in the work of a GPU."""

    def record(self) -> None:
        """Takes the moment at which the GPU comes here."""

    def query(self) -> bool:
        """Whether it has come."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to another."""


# An event that is not external would be one of the graph, whose time cannot be read.
_event: Callable[[], Event] = partial(torch.cuda.Event, enable_timing=True, external=True)


class Waits:
    """The waits of one rank in an update, by what it waits for.

    Args:
        event: creates an event.
    """

    def __init__(self, event: Callable[[], Event] = _event) -> None:
        self._event = event
        self._pairs: dict[str, tuple[Event, Event]] = {}
        self._start: Event | None = None

    @contextmanager
    def around(self, what: str) -> Iterator[None]:
        """Measures what the GPU waits for in the block; if that is captured, in each replay."""
        if what not in self._pairs:
            self._pairs[what] = self._event(), self._event()
        begin, end = self._pairs[what]
        begin.record()
        yield
        end.record()

    def next(self) -> float | None:
        """The seconds of waiting since the last call, which the GPU must have passed; None if nothing was measured."""
        start = self._start
        found = [] if start is None else [self._milliseconds(start, *pair) for pair in self._pairs.values()]
        self._start = start or self._event()
        self._start.record()
        known = [one for one in found if one is not None]
        return sum(known) / 1000 if known else None

    @staticmethod
    def _milliseconds(start: Event, begin: Event, end: Event) -> float | None:
        """A wait; None if the last update did not have it."""
        try:
            if not (start.query() and begin.query() and end.query()) or start.elapsed_time(begin) < 0:
                return None
            return max(begin.elapsed_time(end), 0.0)
        except RuntimeError:  # of an event that a discarded capture has recorded; a time must not end a run
            return None
