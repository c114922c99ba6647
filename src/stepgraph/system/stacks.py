"""What other threads execute.

Python creates objects for the frames of those threads. In Python 3.11 that may start a collection of garbage, in which
other threads go on; Python then writes to frames that are over, and the process crashes. So no collection may start.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from stepgraph.errors import short

_OURS = Path(__file__).parents[1]


class Line(NamedTuple):
    """A line of Python that a thread executes.

    Args:
        file: the file.
        number: the number of the line.
        function: the function, method or class around it.
    """

    file: str
    number: int | None
    function: str


def lines(thread: int) -> list[Line]:
    """The lines that a thread executes, innermost first; none of one that has ended, or whose frames cannot be read.

    Args:
        thread: its `ident`.
    """
    found: list[Line] = []
    with _no_collection():
        frame = _frame(thread)
        while frame is not None:
            found.append(Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
    return found


def place(thread: int) -> object:
    """Where a thread is in its Python code, which remains the same while it is in a function written in C."""
    with _no_collection():
        frame = _frame(thread)
        return None if frame is None else (id(frame), frame.f_lasti)


def line_of(thread: int) -> str:
    """The innermost line of the user's program that a thread executes, and the function called there."""
    found = lines(thread)
    own = next((one for one in found if not _is_library(one.file)), None)
    if own is None:
        return "no line of your program"
    text = f"{short(own.file)}:{own.number}"
    return text if own is found[0] else f"{text} (in {found[0].function})"


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python collects no garbage; from 3.12 on it does so only between instructions, where it does no harm."""
    is_safe = sys.version_info >= (3, 12) or not gc.isenabled()
    if is_safe:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _frame(thread: int) -> FrameType | None:
    """The innermost frame of a thread; None where threads run at the same time, and may leave it while it is read."""
    is_gil_enabled = getattr(sys, "_is_gil_enabled", None)
    if is_gil_enabled is not None and not is_gil_enabled():
        return None
    return sys._current_frames().get(thread)  # noqa: SLF001 - documented, for all threads there are


def _is_library(file: str) -> bool:
    """Whether a file belongs to Python itself, to PyTorch or to stepgraph, or is none."""
    if file.startswith("<"):
        return True
    path = Path(file)
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if path.is_relative_to(_OURS) or (torch is not None and path.is_relative_to(Path(torch).parent)):
        return True
    python = Path(os.__file__).parent
    return path.is_relative_to(python) and not {"site-packages", "dist-packages"} & {*path.relative_to(python).parts}
