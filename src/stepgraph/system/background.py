"""Threads that work beside the program, and that the program does not wait for at its end.

Python ends daemon threads wherever they are. Inside PyTorch's code in C++ that aborts the whole process: a program that
has done its work is reported as crashed.

The system may allow no more threads, and Python starts none while a program ends. Work that only saves time is then
done in the calling thread, before it goes on (`do`), except for work that nobody needs or that takes too long: fusing.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepgraph.system import stacks
from stepgraph.system.interrupts import Uninterruptible

PATIENCE = 2.0  # seconds that the end of a program waits; a thread that waits for something cannot be asked to end
LONGEST = 10.0  # seconds that it waits for a thread that computes
PAUSE = 0.01  # seconds until a thread that goes on is asked again

_running = set[threading.Thread]()


def start(name: str, work: Callable[[], None]) -> threading.Thread:
    """Starts a thread; at the end of the program, `SystemExit` is raised where it works.

    Raises `RuntimeError` if the system allows no more threads.
    """

    def run() -> None:
        with suppress(SystemExit):
            work()
        _running.discard(thread)

    atexit.unregister(end)
    atexit.register(end)  # the last one runs first: before libraries end that the thread uses
    thread = threading.Thread(target=run, name=name, daemon=True)
    _running.add(thread)
    try:
        thread.start()
    except BaseException:
        _running.discard(thread)
        raise
    return thread


def do(name: str, work: Callable[[], None]) -> None:
    """Does work in a thread, like `start`; in the calling thread if the system allows no more threads."""
    try:
        start(name, work)
    except RuntimeError:
        pass
    else:
        return
    work()  # outside of the handler: what it raises has nothing to do with threads


def end(patience: float = PATIENCE, longest: float = LONGEST) -> None:
    """Ends all threads, wherever they are; waits some seconds for it, and longer for one that computes.

    What computes outside of Python still uses libraries that are being unloaded at the end of the process.
    """
    said, last = sys.unraisablehook, time.monotonic() + longest
    deadline, places = time.monotonic() + patience, dict[threading.Thread, object]()
    with Uninterruptible():  # whoever presses Ctrl-C again wants this end
        sys.unraisablehook = lambda one: None if one.exc_type is SystemExit else said(one)  # it may hit a finalizer
        while (running := [one for one in [*_running] if one.is_alive()]) and time.monotonic() < min(deadline, last):
            for one in running:  # again and again: PyTorch's code in C++ turns some exceptions into others
                _raise_exit(one)
            running[0].join(PAUSE)
            before, places = places, {one: stacks.place(one.ident or 0) for one in running}
            if any(before.get(one) == place and _computes(one) for one, place in places.items()):
                deadline = time.monotonic() + patience
        sys.unraisablehook = said


def _computes(thread: threading.Thread) -> bool:
    """Whether a thread is on a processor or reads from a disk; where the system does not say so, it does not."""
    try:
        found = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    except OSError:
        return False
    return found.rpartition(")")[2].split()[0] in ("R", "D")


def _raise_exit(thread: threading.Thread) -> None:
    raise_in: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc
    raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
