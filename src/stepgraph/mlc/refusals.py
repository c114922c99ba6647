"""What becomes of an error at this boundary: nil or NO for the caller, a reason to read, one line in the log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from stepgraph import errors

logger = logging.getLogger("stepgraph.mlc")

_MOST_REMEMBERED = 10_000
_logged: dict[str, None] = {}
_last = threading.local()


class MLCError:
    """Why a call was refused or its work failed, read as a Python program reads an `NSError`. Ours.

    `native` is the stepgraph exception itself.
    """

    __slots__ = ("native",)

    def __init__(self, native: BaseException) -> None:
        self.native = native

    def domain(self) -> str:
        """Whose error it is."""
        return "stepgraph"

    def code(self) -> int:
        """The kind of error; 0 for one that is not stepgraph's."""
        return next((i for i, kind in enumerate(_KINDS, start=1) if isinstance(self.native, kind)), 0)

    def localizedDescription(self) -> str:
        """What is wrong, the values, and what to do about it."""
        if self.code() > 0:
            return str(self.native)
        return f"{type(self.native).__name__}: {shown(self.native)}"  # somebody else's, perhaps broken

    def __str__(self) -> str:
        return self.localizedDescription()

    def __repr__(self) -> str:
        return f"<MLCError {type(self.native).__name__}: {self.localizedDescription()}>"


_KINDS = (
    errors.ArgumentError,
    errors.ShapeError,
    errors.DataTypeError,
    errors.DataError,
    errors.UnknownNameError,
    errors.StateError,
    errors.DeviceError,
    errors.ExecutionError,
)


def lastError() -> MLCError | None:
    """Why the last refused call of this thread was refused; None if none was. A call that is accepted leaves it."""
    return getattr(_last, "error", None)


def refuse(call: str, error: Exception) -> None:
    """Keeps the reason of a refused call, and logs each distinct one once."""
    _last.error = MLCError(error)
    reason = " ".join(line.strip() for line in str(_last.error).splitlines())
    _log_once(f"refused {reason}" if reason.startswith(f"{call}: ") else f"refused {call}: {reason}")


def guarded(function: Callable[..., Any], name: str) -> Callable[..., None]:
    """The program's own function, called from here. What it raises is logged: the work is done all the same."""

    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            _last.error = MLCError(error)
            logger.error("a %s raised", name, exc_info=error)

    return call


def shown(value: Any) -> str:
    """A value for a message: short, and safe even where its own `__repr__` fails."""
    try:
        text = repr(value)
    except Exception:  # somebody else's code
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _log_once(message: str) -> None:
    if message in _logged:
        return
    if len(_logged) >= _MOST_REMEMBERED:
        _logged.clear()
    _logged[message] = None
    logger.warning(message)
