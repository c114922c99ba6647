"""PyTorch's modes and settings while stepgraph works.

What a program sets around a call (grad mode, inference mode, autocast, a default device or type, deterministic
algorithms, the precision of float32 products) is meant for its own PyTorch code. A graph that picked up such a setting
while it is traced would keep it permanently. So tracing and execution run under stepgraph's own modes, which are
entered here and restored afterwards.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch

from stepgraph.system.torch_private import any_autocast, function_mode_count

_EXACT, _TF32 = "ieee", "tf32"
_SMALLEST = math.ulp(0.0)  # positive number


class Precision(NamedTuple):
    """What a GPU may round float32 factors to, in PyTorch's terms: `"ieee"` keeps all bits, `"tf32"` 10 of them.

    `"none"` is PyTorch's term for a setting that was never changed, which also keeps all bits.
    """

    products: str = _EXACT
    convolutions: str = _EXACT
    recurrent: str = _EXACT

    @classmethod
    def of(cls, tf32: bool | None) -> Precision:
        """The same for all or, with None, PyTorch's current settings, whichever API was used to set them."""
        return _current() if tf32 is None else cls(*[_TF32 if tf32 else _EXACT] * 3)

    @property
    def tf32(self) -> tuple[bool, bool]:
        """Whether matrix products, and whether convolutions, may be rounded to TF32."""
        return self.products == _TF32, self.convolutions == _TF32

    @property
    def changes_products(self) -> bool:
        """Whether applying it changes PyTorch's current setting for matrix products."""
        return not _is_same(_current().products, self.products)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """PyTorch reads its settings when a kernel is launched, including during a capture."""
        changed = [(one, found) for one, wanted in zip(_switches(), self, strict=True) if (found := _set(one, wanted))]
        try:
            yield
        finally:
            for switch, found in changed:
                switch.fp32_precision = found


FULL = Precision()


@contextmanager
def tracing() -> Iterator[None]:
    """Modes for shape inference, recording and creating arrays: the defaults of a program that changes none."""
    with ExitStack() as stack:
        _enter_neutral(stack)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.is_anomaly_enabled():  # it would check arrays without memory for NaN
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        _let_autograd_count_devices()
        yield


@cache
def _let_autograd_count_devices() -> None:
    """Differentiates once, before arrays without memory make a CUDA build without a GPU believe that it has eight.

    Autograd counts devices when it first runs and starts a thread for each, and after that no forked process can
    differentiate.
    """
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        one = torch.ones((), requires_grad=True)
        torch.autograd.grad(one * one, one)


def reach(kind: str, open_to_switches: bool) -> bool:
    """Whether the caller's modes, besides grad and inference mode, would affect recorded operators.

    This is checked in every call, and each query to PyTorch costs about a hundredth of a small step. So a program
    states whether process-wide settings can affect it at all; autocast always would.

    Args:
        kind: the type of the device.
        open_to_switches: whether any operator depends on the default type or device, or on deterministic algorithms.
    """
    if any_autocast() and torch.is_autocast_enabled(kind):
        return True
    # A default device is a mode on this stack.
    return open_to_switches and (function_mode_count() > 0 or _is_set_for_all())


def keeps_subnormals() -> bool:
    """Whether this thread computes with numbers too small for full precision; PyTorch sets this, but cannot say it."""
    return _SMALLEST * 1.0 != 0.0


@contextmanager
def neutral() -> Iterator[None]:
    """Modes for operators that the caller's modes would affect."""
    with ExitStack() as stack:
        _enter_neutral(stack)
        yield


def _enter_neutral(stack: ExitStack) -> None:
    for kind in {"cpu", _accelerator()}:
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    if torch.get_default_device().type != "cpu":
        stack.enter_context(torch.device("cpu"))
    if _is_set_for_all():
        stack.enter_context(_for_all_threads)
    if torch.get_default_dtype() is not torch.float32:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        stack.callback(torch.use_deterministic_algorithms, True, warn_only=warns)
        torch.use_deterministic_algorithms(False)


class _ForAllThreads:
    """Lets one thread at a time change process-wide settings: the next waits until they are restored."""

    def __init__(self) -> None:
        self._lock, self.depth = threading.RLock(), 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self._lock.release()


_for_all_threads = _ForAllThreads()


def _is_set_for_all() -> bool:
    """Whether a process-wide setting must be changed, or is being changed by another thread."""
    return (
        torch.get_default_dtype() is not torch.float32
        or torch.are_deterministic_algorithms_enabled()
        or _for_all_threads.depth > 0
    )


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type


def _switches() -> tuple[Any, Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn  # type: ignore[attr-defined]


def _current() -> Precision:
    return Precision(*(switch.fp32_precision for switch in _switches()))


def _is_same(found: str, wanted: str) -> bool:
    return found == wanted or {found, wanted} <= {_EXACT, "none"}


def _set(switch: Any, wanted: str) -> str | None:
    """Changes a setting if necessary and returns the value to restore; reading through the old API may raise."""
    found = switch.fp32_precision
    if _is_same(found, wanted):
        return None
    # The setting for all of them together: one that inherits it must do so again.
    inherited = torch.backends.fp32_precision == found  # type: ignore[attr-defined]
    switch.fp32_precision = wanted
    return "none" if inherited else str(found)
