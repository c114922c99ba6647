"""Forks of the process while its other threads work."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


def wait_for(lock: threading.RLock) -> None:
    """Lets forks wait until a lock is free: a child would inherit it from a thread that does not exist there.

    Forks take the locks that were registered last first, so another call for the same lock lets them take it before
    everything that has been registered since.
    """

    def release() -> None:
        with suppress(RuntimeError):  # an interrupt has ended the wait
            lock.release()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=release, after_in_child=release)
