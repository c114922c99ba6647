"""Ctrl-C between steps: what arrives while something is being changed waits until all of it is."""

from __future__ import annotations

import importlib
import threading
from types import FrameType
from typing import Any

# What the module `signal` wraps into enumerations, which takes three times as long as the work itself.
_signal: Any = importlib.import_module("_signal")
SIGINT, getsignal, signal = _signal.SIGINT, _signal.getsignal, _signal.signal


class Uninterrupted:
    """Holds an interrupt back while a block runs, then delivers it; a second one goes through at once.

    Python runs signal handlers in the main thread only, so that other threads need nothing.
    """

    __slots__ = ("_before", "_came")

    def __enter__(self) -> None:
        self._before: Any = None
        self._came: tuple[int, FrameType | None] | None = None
        if threading.get_ident() == threading.main_thread().ident:
            before = getsignal(SIGINT)
            if callable(before):  # the others, to ignore it or to end the process, interrupt no Python code
                signal(SIGINT, self._note)
                self._before = before

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is not None:
            self._before(number, frame)
        self._came = number, frame

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal(SIGINT, self._before)
            if self._came is not None:
                self._before(*self._came)
