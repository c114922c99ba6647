"""Work whose warnings nobody sees, and no filter of the program turns into errors.

Filters are one list for the whole process, so `warnings.catch_warnings` in one thread would change what others see and,
when two threads leave it in another order than they entered it, leave its filters behind. The filter here is in the
list while a thread needs it, and applies to that thread alone.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_users: list[threading.Thread] = []
_here = threading.local()


class _Here:
    """In the place of a pattern: matches every text in the threads that are inside."""

    def match(self, _: str) -> bool:
        return getattr(_here, "is_inside", False)


_FILTER: Any = ("ignore", _Here(), Warning, None, 0)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignores warnings in this thread, whatever the program's filters say."""
    before, _here.is_inside = getattr(_here, "is_inside", False), True
    with _lock:
        _users.append(threading.current_thread())
        _move(is_first=True)
    try:
        yield
    finally:
        with _lock:
            _users.remove(threading.current_thread())
            _move(is_first=bool(_users))
        _here.is_inside = before


def _move(is_first: bool) -> None:
    """Puts the filter before all others, or takes it out; where a copy of the list brings it back, nothing matches."""
    filters: Any = warnings.filters
    filters[:] = [_FILTER] * is_first + [one for one in filters if one is not _FILTER]
