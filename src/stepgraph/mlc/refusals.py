"""How errors are handled at this boundary: nil or NO for the caller, a reason to read, one line in the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from stepgraph import errors

logger = logging.getLogger("stepgraph.mlc")

_MOST_REMEMBERED = 10_000
_logged: dict[str, None] = {}


class _Last(threading.local):
    """The outcome of the thread's last call."""

    error: MLCError | None = None


_last = _Last()


class Wording(Protocol):
    """How an error is worded."""

    def message(self, error: errors.StepgraphError, call: str = "") -> str:
        """The whole message."""


_wordings: list[Wording] = []


def speak(wording: Wording) -> None:
    """Uses this wording for errors from now on."""
    _wordings[:] = [wording]


class MLCError:
    """Why a call was rejected or its work failed, with the interface of an `NSError`. Ours.

    `native` is the stepgraph exception itself, in stepgraph's wording.
    """

    __slots__ = ("_call", "native")

    def __init__(self, native: BaseException, call: str = "") -> None:
        self.native, self._call = native, call

    def domain(self) -> str:
        """The origin of the error."""
        return "stepgraph"

    def code(self) -> int:
        """The kind of error; 0 for one that is not stepgraph's."""
        return next((i for i, kind in enumerate(KINDS, start=1) if isinstance(self.native, kind)), 0)

    def localizedDescription(self) -> str:
        """What is wrong, the values, and what to do about it."""
        if isinstance(self.native, errors.StepgraphError):
            return _wordings[0].message(self.native, self._call) if _wordings else str(self.native)
        return f"{type(self.native).__name__}: {shown(self.native)}"  # foreign, perhaps broken

    def __str__(self) -> str:
        return self.localizedDescription()

    def __repr__(self) -> str:
        return f"<MLCError {type(self.native).__name__}: {self.localizedDescription()}>"


# A code is a position in this list, so new kinds go to the end.
KINDS = (
    errors.ArgumentError,
    errors.ShapeError,
    errors.DataTypeError,
    errors.DataError,
    errors.UnknownNameError,
    errors.StateError,
    errors.DeviceError,
    errors.ExecutionError,
    errors.MemoryLimitError,
    errors.NumericsError,
    errors.CheckpointError,
    errors.RunError,
    errors.StorageError,
)


def lastError() -> MLCError | None:
    """Why this thread's last call was rejected; None if it was accepted."""
    return _last.error


def accept() -> None:
    """Records that a call succeeded."""
    _last.error = None


def refuse(call: str, error: Exception) -> None:
    """Keeps the reason of a rejected call, and logs each distinct one once."""
    last = _last.error = MLCError(error, call)
    reason = " ".join(line.strip() for line in str(last).splitlines())
    _log_once(f"rejected {reason}" if reason.startswith(f"{call}: ") else f"rejected {call}: {reason}")


def guarded(function: Callable[..., Any], name: str) -> Callable[..., None]:
    """The program's own function, called from here. Exceptions it raises are logged: the work is done anyway."""

    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            logger.error("a %s raised", name, exc_info=error)

    return call


def shown(value: Any) -> str:
    """A value for a message: short, and safe even if its own `__repr__` fails."""
    try:
        text = repr(value)
    except Exception:  # foreign code
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _log_once(message: str) -> None:
    if message in _logged:
        return
    if len(_logged) >= _MOST_REMEMBERED:
        _logged.clear()
    _logged[message] = None
    logger.warning(message)
