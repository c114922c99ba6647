"""Ctrl-C, SIGTERM and SIGHUP between steps: what arrives during a change takes effect when the change is complete."""

from __future__ import annotations

import importlib
import os
from threading import get_ident, main_thread
from types import FrameType
from typing import Any

# The functions that module `signal` wraps into enumerations, which takes three times as long as the work itself.
_signal: Any = importlib.import_module("_signal")
SIGINT, SIGTERM, SIG_IGN = _signal.SIGINT, _signal.SIGTERM, _signal.SIG_IGN
SIGHUP: int = getattr(_signal, "SIGHUP", 0)  # the terminal was closed; Windows has none
getsignal, signal, raise_signal = _signal.getsignal, _signal.signal, _signal.raise_signal


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


class Uninterruptible:
    """Ignores interrupts while a short block runs at the end of the program."""

    _before: Any = None

    def __enter__(self) -> None:
        if get_ident() == _main.ident and callable(getsignal(SIGINT)):
            self._before = signal(SIGINT, SIG_IGN)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal(SIGINT, self._before)


class StopSignals:
    """Makes the first Ctrl-C or SIGTERM during a block a request to stop; the next one does what it did before.

    A handler that the program has installed is respected: it is restored, and after `end_as_terminated` it gets the
    SIGTERM that it missed. A signal that the program ignores stays ignored, and outside the main thread, where Python
    runs no handlers, nothing changes.

    SIGHUP is one too, unless the program has a handler for it, which may mean anything. Further ones have no effect: a
    terminal that is closed sends it, and so does its shell.

    Attributes:
        came: the signal that came, or None; of several, the first that ends the program.
    """

    def __init__(self) -> None:
        self.came: int | None = None
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def __enter__(self) -> StopSignals:
        if get_ident() == _main.ident:
            for number in filter(None, (SIGINT, SIGTERM, SIGHUP)):
                before = getsignal(number)
                is_others = number == SIGHUP and callable(before)
                if before not in (None, SIG_IGN) and not is_others:  # None: installed by a library in C
                    self._before[number] = before
                    signal(number, self._ask)
        return self

    @property
    def ending(self) -> int | None:
        """The signal that came, if it ends the program."""
        return None if self.came == SIGINT else self.came

    def _ask(self, number: int, frame: FrameType | None) -> None:
        is_forked = os.getpid() != self._process  # a worker of a data loader, for example
        if is_forked or number != SIGHUP:
            signal(number, self._before[number])
        if is_forked:
            raise_signal(number)
        elif self.ending is None:
            self.came = number

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal(number, before)


def end_as_terminated(number: int = SIGTERM) -> None:
    """Does what a signal would have done: calls the program's own handler, or ends the program (SIGTERM: status 143).

    It ends as by `sys.exit`, so files are flushed, and whatever waits for the end of the program runs.
    """
    handler = getsignal(number) if get_ident() == _main.ident else None
    if callable(handler):
        raise_signal(number)
    elif handler != SIG_IGN:
        raise SystemExit(128 + number)
