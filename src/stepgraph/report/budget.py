"""How long looking into a run may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.005  # of the time a run takes
START = 0.1  # seconds on top: a small network is looked into as often as one likes, also in a short run


class Budget:
    """Time that was spent on looking, against the time since training began.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.began, self.spent = clock(), 0.0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time inside."""
        began = self.clock()
        try:
            yield
        finally:
            self.spent += self.clock() - began

    def has_room(self, seconds: float) -> bool:
        """Whether something that takes so long may be done now."""
        return self.spent + seconds <= START + SHARE * (self.clock() - self.began)
