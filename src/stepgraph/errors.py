"""The exceptions of stepgraph, and the common format of their messages.

A message reads `<where>: <what is wrong, with both values>.`, then aligned facts, then `Fix:`. Each class is also the
built-in that a caller would expect to catch.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# Characters that a terminal or a page would interpret instead of showing: control characters, marks that reverse the
# text direction, line separators, and lone surrogates.
OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class StepgraphError(Exception):
    """Base of every error that stepgraph raises deliberately.

    Args:
        where: the object and the line of the user's program that are affected.
        problem: what is wrong, with both values, without a full stop.
        fix: what to do about it.
        facts: other values, shown aligned below the first line.

    Example:
        >>> print(ShapeError("Reshape 'flat'", "12 elements cannot become 10", fix="use (2, 6)", source=(3, 4)))
        Reshape 'flat': 12 elements cannot become 10.
            source   (3, 4)
        Fix: use (2, 6).
    """

    def __init__(self, where: str, problem: str, *, fix: str | None = None, **facts: object) -> None:
        self.where, self.problem, self.fix, self.facts = where, problem, fix, facts
        super().__init__(where, problem)

    def __str__(self) -> str:
        width = max((len(name) for name in self.facts), default=0)
        lines = [f"{self.where}: {self.problem}."]
        lines += [f"    {name.replace('_', ' '):{width}}   {value}" for name, value in self.facts.items()]
        if self.fix:
            lines.append(f"Fix: {self.fix}.")
        return "\n".join(map(readable, lines))


class ArgumentError(StepgraphError, ValueError):
    """A setting is out of range."""


class ShapeError(StepgraphError, ValueError):
    """Shapes do not match."""


class DataTypeError(StepgraphError, TypeError):
    """A data type, or the type of an object, does not match."""


class DataError(StepgraphError, ValueError):
    """Data for a tensor is missing, too short or cannot be written."""


class UnknownNameError(StepgraphError, KeyError):
    """A name or a tensor is not part of the graph."""


class StateError(StepgraphError, RuntimeError):
    """A call is not possible in the current state."""


class MemoryLimitError(StepgraphError, MemoryError):
    """A graph exceeds its memory limit, or a tensor the available memory."""


class DeviceError(StepgraphError, RuntimeError):
    """A device is missing or does not support a request."""


class ExecutionError(StepgraphError, RuntimeError):
    """The device failed while running a compiled graph."""


class NumericsError(StepgraphError, FloatingPointError):
    """A step produced a NaN or an infinity; `layer`, `phase` and `step` show where, `report` has the details."""

    layer: str | None = None
    phase: str | None = None
    step: int | None = None
    report: object = None


class CheckpointError(StepgraphError, ValueError):
    """A checkpoint is damaged, has another format, or does not match the graph."""


class RunError(StepgraphError, ValueError):
    """A folder contains no run, a damaged run, or a run of another version."""


class StorageError(StepgraphError, OSError):
    """A checkpoint or a run cannot be written or read."""


def readable(text: str) -> str:
    r"""Foreign text as one line that is safe to show: control characters are escaped.

    Example:
        >>> print(readable("größe \x1b[2J"))
        größe \x1b[2J
    """
    return OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def readable_lines(text: str) -> str:
    """The same for text of several lines, which are kept."""
    return "\n".join(map(readable, text.split("\n")))


def reason(error: BaseException) -> str:
    """The message of a foreign exception, on one line without a full stop."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


@contextmanager
def shown_as(label: str, name: Callable[[], str]) -> Iterator[None]:
    """Lets errors of a layer show its name in tables, which is numbered if several layers share its label."""
    try:
        yield
    except StepgraphError as error:
        error.where = error.where.replace(f"'{label}'", f"'{name()}'", 1)
        raise


def user_line() -> str:
    """The line of the user's program being executed, as `file.py:12`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    if frame is None:
        return "unknown line"
    return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"


def raised_line(error: BaseException, *packages: str) -> str | None:
    """The innermost line, outside of stepgraph and `packages`, that an exception passed through; None without one."""
    found, trace = None, error.__traceback__
    while trace is not None:
        package = str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0]
        if package not in packages and not _is_ours(trace.tb_frame):
            found = f"{short(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _is_ours(frame: FrameType) -> bool:
    # The `__init__` that dataclasses generate for a user's layer runs in the user's module, but is not the user's code.
    generated = frame.f_code.co_name == "__init__" and frame.f_code.co_filename == "<string>"
    return generated or str(frame.f_globals.get("__name__", "")).split(".")[0] == "stepgraph"


def short(filename: str) -> str:
    """The path of a file as messages show it: from the working directory, or else without folders."""
    path, here = Path(filename), working_directory()
    return str(path.relative_to(here)) if here is not None and path.is_relative_to(here) else path.name


def working_directory() -> Path | None:
    """The working directory; None if that folder has been deleted."""
    try:
        return Path.cwd()
    except OSError:
        return None
