"""The handle an execute call returns.

Calls on one device run in the order they were made. On the CPU the work is done when the call returns, so the
caller's arrays may be changed at once; on a GPU the call returns when the work is queued, and reading a result
waits for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch

from stepgraph.device import Device
from stepgraph.runtime.profile import Profile
from stepgraph.tensor import Tensor

Completion = Callable[[Tensor | None, Exception | None, float], object]


_turns: dict[torch.device, threading.RLock] = defaultdict(threading.RLock)


def turn(device: Device) -> threading.RLock:
    """A device runs one call at a time, also when several threads make them."""
    return _turns[device.torch]


class Execution:
    """One accepted execute call: can be waited for, awaited, and asked for its loss, result and time.

    Attributes:
        result: the loss, or the last result of a graph without one.
        error: what made the work fail, or None.
        profile: time and memory by layer and phase, where `PER_LAYER_PROFILING` was asked for.
    """

    def __init__(self, device: Device, timed: bool) -> None:
        self.result: Tensor | None = None
        self.error: Exception | None = None
        self.profile: Profile | None = None
        self._loss: torch.Tensor | None = None
        self._timed = timed
        self._elapsed: float | None = None
        # The first tells when the work began, the last when it ended.
        count = 0 if device.torch.type != "cuda" else 2 if timed else 1
        self._events = [torch.cuda.Event(enable_timing=timed) for _ in range(count)]
        self._started = time.perf_counter()
        if timed and self._events:
            self._events[0].record()

    def finish(self, result: Tensor | None, loss: torch.Tensor | None) -> None:
        """Records what the call gave; on a GPU the work may still be under way."""
        self.result = result
        self._loss = loss
        if self._events:
            self._events[-1].record()
        else:
            self._elapsed = time.perf_counter() - self._started

    def fail(self, error: Exception) -> None:
        """Records that the work failed."""
        self.error = error
        self._events = []
        self._elapsed = time.perf_counter() - self._started

    def announce(self, completion: Completion | None, waited: bool = False) -> None:
        """Calls `completion` exactly once, when the work is done; at once if the caller has waited for that."""
        if completion is None:
            return
        if self._events and not waited:
            threading.Thread(target=self._announce, args=(completion,), daemon=True).start()
        else:
            self._announce(completion)

    def _announce(self, completion: Completion) -> None:
        try:
            self._synchronize()
        except RuntimeError as error:
            self.error = error
        completion(None if self.error else self.result, self.error, self.time or 0.0)

    def _synchronize(self) -> None:
        if self._events:
            self._events[-1].synchronize()

    def wait(self) -> Execution:
        """Returns when the work is done; raises what made it fail."""
        self._synchronize()
        if self.error is not None:
            raise self.error
        return self

    @property
    def done(self) -> bool:
        """Whether the work is done."""
        return not self._events or self._events[-1].query()

    @property
    def time(self) -> float | None:
        """Seconds on the device, where `PROFILING` was asked for."""
        if not self._timed:
            return None
        if self._events:
            self._events[-1].synchronize()
            return self._events[0].elapsed_time(self._events[-1]) / 1e3
        return self._elapsed

    @property
    def loss(self) -> float | np.ndarray | None:
        """The loss before this call's update: a number, an array where it was not reduced, None without a loss."""
        self.wait()
        if self._loss is None:
            return None
        return self._loss.item() if self._loss.numel() == 1 else self._loss.cpu().numpy()

    def __await__(self) -> Generator[Any, None, Execution]:
        if self._events and not self.done:
            yield from asyncio.get_running_loop().run_in_executor(None, self._synchronize).__await__()
        return self.wait()

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "running"
        return f"<Execution {state}>"
