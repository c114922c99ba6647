"""Python's garbage collector, where many objects are created that stay.

A full collection looks at every object of the process: with PyTorch's compiler loaded, about a million. Recording or
compiling a step creates enough objects to cause several collections, and each finds next to nothing.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Mapping
from typing import Any

NEVER = 1_000_000  # collections of middle-aged objects before the next full one


class _Collector:
    """Counts who asks for no full collections.

    One that became due meanwhile comes when as many objects have been created again, so that the first call of what was
    compiled need not wait for it. Blocks one after another put it off once, not each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = self._began = 0
        self._before = self._ours = gc.get_threshold()  # what the program has set, and what is set here instead
        self._due: int | None = None  # the count at which a full collection comes that was put off

    def defer(self) -> None:
        with self._lock:
            if not self._users:
                if gc.get_threshold() != self._ours or self._due is None:
                    self._before, self._due = gc.get_threshold(), None
                self._ours = gc.get_threshold()
                self._began = gc.get_count()[2]
                self._put(NEVER)
            self._users += 1

    def resume(self) -> None:
        with self._lock:
            if self._users == 1:
                self._let_come()
            self._users -= 1

    def _let_come(self) -> None:
        count, most = gc.get_count()[2], self._before[2]
        if count > most and self._due is None:
            self._due = count + max(count - self._began, most)
        self._put(most if self._due is None or count > self._due else self._due)

    def note(self, phase: str, found: Mapping[str, Any]) -> None:
        """Called by Python around each collection; behind a full one, nothing is put off."""
        if phase == "stop" and found["generation"] == 2 and not self._users and self._due is not None:
            self._put(self._before[2])
            self._due = None

    def forget_users(self) -> None:
        """In a forked child: the threads that were busy do not exist there."""
        self._lock = threading.Lock()
        if self._users:
            self._users, self._due = 0, None
            self._put(self._before[2])

    def _put(self, count: int) -> None:
        if gc.get_threshold() == self._ours:  # nobody else has changed it
            self._ours = *self._before[:2], count
            gc.set_threshold(*self._ours)


_collector = _Collector()
gc.callbacks.append(_collector.note)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collector.forget_users)


class FullCollectionsDeferred:
    """Defers the full collections that Python starts by itself while a block runs, in any number of threads.

    Young objects are collected as before, and `gc.collect()` collects everything.
    """

    def __enter__(self) -> None:
        _collector.defer()

    def __exit__(self, *_: object) -> None:
        _collector.resume()
