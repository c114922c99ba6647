"""How long a thread that computes in Python keeps this one waiting.

Threads take turns of 5 ms, and whoever calls PyTorch gives its turn away with each operator. Beside a thread that
compiles, launching two thousand operators one by one would take ten seconds.
"""

from __future__ import annotations

import os
import sys
import threading

TURN = 2e-4  # seconds; much longer than changing threads takes


class _Intervals:
    """Counts who asks for short turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = self._ours = 0.0

    def shorten(self) -> None:
        with self._lock:
            if not self._users:
                self._before = sys.getswitchinterval()
                _set(min(TURN, self._before))
                self._ours = sys.getswitchinterval()
            self._users += 1

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and sys.getswitchinterval() == self._ours:  # nobody else has changed it
                _set(self._before)

    def forget_users(self) -> None:
        """In a forked child: the threads that were busy do not exist there."""
        self._lock = threading.Lock()
        if self._users:
            self._users = 1
            self.restore()


def _set(seconds: float) -> None:
    sys.setswitchinterval(seconds + 5e-7)  # Python drops parts of a microsecond, and binary fractions lie below


_intervals = _Intervals()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_intervals.forget_users)


class ShortSwitchInterval:
    """Lets a block that calls PyTorch often have its turn back soon each time, in any number of threads."""

    def __enter__(self) -> None:
        _intervals.shorten()

    def __exit__(self, *_: object) -> None:
        _intervals.restore()
