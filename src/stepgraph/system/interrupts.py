"""Ctrl-C between steps: an interrupt that arrives during a change is delivered when the change is complete."""

from __future__ import annotations

import importlib
import os
from threading import get_ident, main_thread
from types import FrameType
from typing import Any

# The functions that module `signal` wraps into enumerations, which takes three times as long as the work itself.
_signal: Any = importlib.import_module("_signal")
SIGINT, getsignal, signal = _signal.SIGINT, _signal.getsignal, _signal.signal


class _Main:
    """The thread that runs signal handlers; needed in every call, so cached, and refreshed in a forked child."""

    def __init__(self) -> None:
        self.ident = main_thread().ident

    def look_again(self) -> None:
        self.ident = get_ident()


_main = _Main()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_main.look_again)


class Uninterrupted:
    """Defers an interrupt while a block runs, then delivers it; a second one is delivered immediately.

    Python runs signal handlers only in the main thread, so other threads need nothing.
    """

    __slots__ = ("_before", "_came")
    _before: Any
    _came: tuple[int, FrameType | None] | None

    def __enter__(self) -> None:
        self._before = self._came = None
        if get_ident() == _main.ident:
            before = getsignal(SIGINT)
            if callable(before):  # the others (ignore, end the process) interrupt no Python code
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
