"""How much time observing a run may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.005  # of the duration of a run
START = 0.1  # additional seconds: a small network can be observed freely even in a short run


class Budget:
    """Time spent on observation, relative to the time since training began.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.began, self.spent = clock(), 0.0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time spent inside."""
        began = self.clock()
        try:
            yield
        finally:
            self.spent += self.clock() - began

    def has_room(self, seconds: float) -> bool:
        """Whether there is time now for something that takes this long."""
        return self.spent + seconds <= START + SHARE * (self.clock() - self.began)
