"""The exceptions of stepgraph, and the one format every message keeps.

A message reads `<where>: <what is wrong, with both values>.`, then aligned facts, then `Fix:`. Each class is also the
built-in a caller would expect to catch.
"""

import re
import sys
from pathlib import Path
from types import FrameType

# What a terminal or a page would obey instead of showing it: control characters, marks that turn the direction of
# writing around, line separators, and halves of characters that no encoding has.
OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class StepgraphError(Exception):
    """Base of every error stepgraph raises on purpose.

    Args:
        where: the object and the line of the user's program that is concerned.
        problem: what is wrong, with both values, without a full stop.
        fix: what to do about it.
        facts: further values, shown aligned below the first line.

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
    """A setting is outside what it may be."""


class ShapeError(StepgraphError, ValueError):
    """Shapes do not fit together."""


class DataTypeError(StepgraphError, TypeError):
    """A data type, or the kind of an object, does not fit."""


class DataError(StepgraphError, ValueError):
    """Data given for a tensor is missing, too short or cannot be written."""


class UnknownNameError(StepgraphError, KeyError):
    """A name or a tensor is not part of the graph."""


class StateError(StepgraphError, RuntimeError):
    """A call came at a moment when it cannot be carried out."""


class MemoryLimitError(StepgraphError, MemoryError):
    """A graph does not fit into the memory it was given, or a tensor into the memory there is."""


class DeviceError(StepgraphError, RuntimeError):
    """A device is missing or cannot do what was asked."""


class ExecutionError(StepgraphError, RuntimeError):
    """The device failed while running a compiled graph."""


class NumericsError(StepgraphError, FloatingPointError):
    """A step made a NaN or an infinity; `layer`, `phase` and `step` tell where, `report` the rest."""

    layer: str | None = None
    phase: str | None = None
    step: int | None = None
    report: object = None


class CheckpointError(StepgraphError, ValueError):
    """A checkpoint is damaged, of another format, or does not fit the graph."""


class RunError(StepgraphError, ValueError):
    """A folder holds no run, a damaged one, or one of another version."""


class StorageError(StepgraphError, OSError):
    """A checkpoint or a run cannot be written to or read from where it should be."""


def readable(text: str) -> str:
    r"""Text of somebody else's as one line that is safe to show: what would be obeyed is escaped, the rest stays.

    Example:
        >>> print(readable("größe \x1b[2J"))
        größe \x1b[2J
    """
    return OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def readable_lines(text: str) -> str:
    """The same for text of several lines, which stay lines."""
    return "\n".join(map(readable, text.split("\n")))


def reason(error: BaseException) -> str:
    """What somebody else's exception says, in one line without a full stop."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")


def user_line() -> str:
    """The line of the user's program that is being carried out, as `file.py:12`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    if frame is None:
        return "unknown line"
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_ours(frame: FrameType) -> bool:
    # The `__init__` that dataclasses write for a user's own layer runs in the user's module, yet is nobody's line.
    generated = frame.f_code.co_name == "__init__" and frame.f_code.co_filename == "<string>"
    return generated or str(frame.f_globals.get("__name__", "")).split(".")[0] == "stepgraph"


def _short(filename: str) -> str:
    path, here = Path(filename), working_directory()
    return str(path.relative_to(here)) if here is not None and path.is_relative_to(here) else path.name


def working_directory() -> Path | None:
    """Where the program runs; None where that folder has been deleted."""
    try:
        return Path.cwd()
    except OSError:
        return None
