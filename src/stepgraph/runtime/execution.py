"""The handle an execute call returns.

Calls on one device run in order. On the CPU the work is done when the call returns, so arrays passed to `execute`
can be changed immediately (those bound for separate passes once the gradient pass has read them). On a GPU the
call returns when the work is queued, and reading a result synchronizes.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from stepgraph.compiler import fusion
from stepgraph.device import Device
from stepgraph.errors import UnknownNameError
from stepgraph.runtime.loss_slots import Loss, Total
from stepgraph.runtime.profile import Profile
from stepgraph.runtime.refusal import Check
from stepgraph.runtime.results import Lent
from stepgraph.system import torch_private
from stepgraph.tensors.tensor import Tensor, TensorDescriptor

Completion = Callable[[Tensor | None, Exception | None, float], object]
Found = torch.Tensor | Loss | Total | Lent  # an array, or where it is kept until it is read
Outputs = Mapping[str, tuple[Tensor, Found]]
NO_OUTPUTS: Outputs = MappingProxyType({})


class _Turns(dict[torch.device | None, threading.RLock]):
    """One lock per device, for the whole process: graphs share a device's memory and streams.

    `setdefault` keeps one lock where two threads ask for a device at the same time.
    """

    def __missing__(self, device: torch.device | None) -> threading.RLock:
        return self.setdefault(device, threading.RLock())


_turns = _Turns()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.clear)  # a thread that is not there may have had its turn


def turn(device: Device | None) -> AbstractContextManager[Any]:
    """A device runs one call at a time, even from several threads; None for a graph without a device.

    Streams and events belong to the current device, so another GPU is made current.
    """
    if device is None:
        return _turns[None]
    if device.is_cuda and _has_several_gpus() and device.torch.index != torch.cuda.current_device():
        return _elsewhere(device.torch)
    return _turns[device.torch]


@cache
def _has_several_gpus() -> bool:
    return torch.cuda.device_count() > 1


@contextmanager
def _elsewhere(device: torch.device) -> Iterator[None]:
    with _turns[device], torch.cuda.device(device):
        yield


class Execution:
    """One accepted execute call: wait for it, await it, or read its loss, result, outputs and time.

    `execution["name"]` is an output that `add_outputs` declared. Results are the call's own: later calls, including
    those of other threads, do not change them.

    Attributes:
        error: the error that made the work fail, or None.
        profile: time and memory by layer and phase, if `PER_LAYER_PROFILING` was set.
    """

    # Every call makes one of these, and most of them keep these values.
    error: Exception | None = None
    profile: Profile | None = None
    _like: Tensor | None = None
    _found: Found | None = None
    _loss: torch.Tensor | Loss | Total | None = None
    _names: tuple[str, ...] = ()
    _result: Tensor | None = None
    _outputs: Outputs = NO_OUTPUTS
    _elapsed: float | None = None
    _events: tuple[torch.cuda.Event, ...] = ()
    # An event costs as much as a small step, so by default the stream is queried, which includes later calls.
    _stream: int | None = None
    _started = 0.0

    def __init__(self, device: Device, timed: bool, announced: bool = False, refusal: Check | None = None) -> None:
        self._timed, self._refusal, self._device = timed, refusal, device.torch
        self._announced = announced
        if device.is_cuda:
            if timed or announced:  # the first marks when the work began, the last when it ended
                self._events = torch.cuda.Event(enable_timing=timed), torch.cuda.Event(enable_timing=timed)
                self._events[0].record()
            else:
                self._stream = torch_private.raw_stream(self._device.index)
        if timed:
            self._started = time.perf_counter()

    def check(self, refusal: Check) -> None:
        """Lets whoever reads results learn whether the device has refused the call."""
        self._refusal = refusal

    def finish(
        self,
        like: Tensor | None,
        found: Found | None,
        loss: torch.Tensor | Loss | Total | None,
        names: tuple[str, ...] = (),
        outputs: Outputs = NO_OUTPUTS,
    ) -> None:
        """Records the result of the call with its tensor, and the outputs; on a GPU the work may still be running."""
        self._like, self._found, self._loss, self._names, self._outputs = like, found, loss, names, outputs
        if self._events:
            self._events[-1].record()
        elif self._timed:
            self._elapsed = time.perf_counter() - self._started

    def fail(self, error: Exception) -> None:
        """Records that the work failed."""
        self.error = error
        self._events, self._stream = (), None
        self._elapsed = time.perf_counter() - self._started if self._timed else None

    def announce(self, completion: Completion, waited: bool) -> None:
        """Calls `completion` exactly once, when the work is done; immediately if the caller has waited for that."""
        if not self._events or waited or not self._announce_later(completion):
            self._announce(completion)

    def _announce_later(self, completion: Completion) -> bool:
        """Announces in a thread, which is not a daemon: the program ends after the last completion."""
        thread = threading.Thread(target=self._announce, args=(completion,), name="stepgraph completion")
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads
            return False
        return True

    def _announce(self, completion: Completion) -> None:
        try:
            self._synchronize()
            self._require_accepted()
        except Exception as error:  # whatever it is, the handler is the one to be told
            self.error = error
        completion(None if self.error else self.result, self.error, self.time or 0.0)

    def _synchronize(self) -> None:
        waited_for = self._waited_for()
        if waited_for is not None:
            if isinstance(waited_for, torch.cuda.Stream) and fusion.is_under_way():
                _sleep_until_done(waited_for)
            else:
                waited_for.synchronize()
            self._stream = None

    def _waited_for(self) -> torch.cuda.Event | torch.cuda.Stream | None:
        if self._events:
            return self._events[-1]
        if self._stream is None:
            return None
        # PyTorch treats 0, the default stream, as no stream and creates a new one.
        named = torch.cuda.ExternalStream(self._stream, self._device) if self._stream else None
        return named or torch.cuda.default_stream(self._device)

    def wait(self) -> Execution:
        """Waits until the work is done, on a GPU including later calls so far; raises the error that made it fail."""
        self._finish()
        self._require_accepted()
        return self

    def _finish(self) -> None:
        """Waits until the work is done; a call that the device has refused shows that in its loss."""
        self._synchronize()
        if self.error is not None:
            raise self.error

    def _require_accepted(self) -> None:
        """Raises if the device has refused this call, or an earlier one."""
        if self._refusal is not None:
            with _turns[self._device]:
                self._refusal.require_none()

    @property
    def is_announced(self) -> bool:
        """Whether a completion handler is told of its result or error."""
        return self._announced

    @property
    def done(self) -> bool:
        """Whether the work is done, on a GPU including later calls so far."""
        waited_for = self._waited_for()
        return waited_for is None or waited_for.query()

    @property
    def time(self) -> float | None:
        """Seconds on the device, if `PROFILING` was set."""
        if not self._timed:
            return None
        if self._events:
            self._events[-1].synchronize()
            return self._events[0].elapsed_time(self._events[-1]) / 1e3
        return self._elapsed

    @property
    def result(self) -> Tensor | None:
        """The loss, or the last result of a graph without one; None if the call failed or returns none."""
        if self._result is None and self._like is not None and self._found is not None and self.error is None:
            self._result = self._owned(self._like, self._found)
        return self._result

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs that this call has computed."""
        return tuple(self._outputs)

    def __getitem__(self, name: str) -> Tensor:
        """An output of this call, by the name that `add_outputs` gave it."""
        if self.error is not None:
            raise self.error
        if name not in self._outputs:
            known = ", ".join(f"'{one}'" for one in self._outputs) or "none"
            raise UnknownNameError(
                "Execution", f"this call has kept no output '{name}'", known=known, fix="declare it with add_outputs"
            )
        return self._owned(*self._outputs[name])

    def _owned(self, like: Tensor, found: Found) -> Tensor:
        """A result in memory that no later call overwrites, as a tensor."""
        with _turns[self._device]:
            array = found.own() if isinstance(found, Loss | Total | Lent) else found
        tensor = Tensor(TensorDescriptor(tuple(array.shape), like.data_type), label=like.label)
        tensor.hold(array)
        tensor.device, tensor.tensor_id = like.device, like.tensor_id
        return tensor

    @property
    def loss(self) -> float | np.ndarray | None:
        """The loss before this call's update: a number, an array if it was not reduced, None without a loss.

        Of several losses, their sum.
        """
        self._finish()
        return None if self._loss is None else self._read(self._loss)

    @property
    def losses(self) -> dict[str, float | np.ndarray]:
        """Every loss before this call's update, by the name of its layer; empty without a loss."""
        self._finish()
        return {name: self._read(loss) for name, loss in zip(self._names, self.losses_on_device, strict=True)}

    def _read(self, loss: torch.Tensor | Loss | Total) -> float | np.ndarray:
        with _turns[self._device]:  # another thread's call may overwrite it
            found = _number(loss)
            if self._refusal is not None and _has_nan(found):
                self._refusal.require_none()
            return found

    @property
    def losses_on_device(self) -> tuple[torch.Tensor | Loss, ...]:
        """Every loss on the device, without synchronizing."""
        loss = self._loss
        return loss.parts if isinstance(loss, Total) else () if loss is None else (loss,)

    def __await__(self) -> Generator[Any, None, Execution]:
        if not self.done:
            yield from asyncio.get_running_loop().run_in_executor(None, self._synchronize).__await__()
        return self.wait()

    def __repr__(self) -> str:
        state = "failed" if self.error else "done" if self.done else "running"
        return f"<Execution {state}>"


def _sleep_until_done(stream: torch.cuda.Stream) -> None:
    """Waits for a stream asleep. CUDA would ask again and again, on a processor that the compiler could use."""
    done = torch.cuda.Event(blocking=True)
    done.record(stream)
    done.synchronize()


def _has_nan(number: float | np.ndarray) -> bool:
    return bool(np.isnan(number).any()) if isinstance(number, np.ndarray) else math.isnan(number)


def _number(loss: torch.Tensor | Loss | Total) -> float | np.ndarray:
    array = loss if isinstance(loss, torch.Tensor) else loss.array
    return array.item() if array.numel() == 1 else array.cpu().numpy()
