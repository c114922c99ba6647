"""Python's garbage collector, where many objects are created that stay.

A full collection looks at every object of the process: with PyTorch's compiler loaded, about a million. Recording or
compiling a step creates enough objects to cause several collections, and each finds next to nothing.
"""

from __future__ import annotations

import gc
import os
import threading

NEVER = 1_000_000  # collections of middle-aged objects before the next full one


class _Collector:
    """Counts who asks for no full collections, and restores what was set before the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: tuple[int, int, int] = gc.get_threshold()

    def defer(self) -> None:
        with self._lock:
            if not self._users:
                self._before = gc.get_threshold()
                gc.set_threshold(*self._before[:2], NEVER)
            self._users += 1

    def resume(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._restore()

    def forget_users(self) -> None:
        """In a forked child: the threads that were busy do not exist there."""
        self._lock = threading.Lock()
        if self._users:
            self._users = 0
            self._restore()

    def _restore(self) -> None:
        if gc.get_threshold() == (*self._before[:2], NEVER):  # nobody else has changed it
            gc.set_threshold(*self._before)


_collector = _Collector()
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
