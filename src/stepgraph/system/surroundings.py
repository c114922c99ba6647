"""PyTorch's modes and settings while stepgraph works.

What a program sets around a call (grad mode, inference mode, autocast, a default device or type, deterministic
algorithms, the precision of float32 products) is meant for its own PyTorch code. A graph that picked up such a setting
while it is traced would keep it permanently. So tracing and execution run under stepgraph's own modes, which are
entered here and restored afterwards.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch

from stepgraph.system import forks
from stepgraph.system.torch_private import any_autocast, function_mode_count, rounding

ROUNDED = ("matmul", "conv", "rnn")  # kinds of operators for which PyTorch has such a setting
_EXACT, _TF32 = "ieee", "tf32"
_ALL_BITS = ("ieee", "none")
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
        with _lock, ExitStack() as stack:
            for switch, wanted in zip(_switches(), self, strict=True):
                _set(stack, switch, wanted)
            yield


FULL = Precision()

# Settings belong to the process, and a capture keeps what they are. So one thread at a time launches or captures on
# GPUs, whatever the device, also if they are right already: another one would change them meanwhile. There is one lock
# for all settings, so that no two threads wait for each other.
_lock = threading.RLock()


def hold_forks_first() -> None:
    """Lets forks wait until no other thread has changed settings: a child would inherit them.

    They wait for this before they take the locks that have been registered so far, which such a thread may still need.
    """
    forks.wait_for(_lock)


@contextmanager
def cudnn(precision: Precision, *, tries: bool, deterministic: bool) -> Iterator[None]:
    """Settings of cuDNN, and of cuBLAS, around launches and captures.

    Args:
        precision: what float32 factors are rounded to.
        tries: whether cuDNN tries its algorithms.
        deterministic: whether it uses only those that always give the same bits.
    """
    switch = torch.backends.cudnn
    with precision.applied():
        before = switch.benchmark, switch.deterministic
        switch.benchmark, switch.deterministic = tries, deterministic
        try:
            yield
        finally:
            switch.benchmark, switch.deterministic = before


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


def reach(kind: str, open_to_switches: bool, rounded: Sequence[str] = ()) -> bool:
    """Whether the caller's modes, besides grad and inference mode, would affect recorded operators.

    This is checked in every call, and each query to PyTorch costs about a hundredth of a small step. So a program
    states whether process-wide settings can affect it at all; autocast always would.

    Args:
        kind: the type of the device.
        open_to_switches: whether any operator depends on the default type or device, or on deterministic algorithms.
        rounded: the kinds of operators whose factors oneDNN could round.
    """
    if any_autocast() and torch.is_autocast_enabled(kind):
        return True
    if rounded and _are_rounded(rounded):
        return True
    # A default device is a mode on this stack.
    return open_to_switches and (function_mode_count() > 0 or _is_set_for_all())


def keeps_subnormals() -> bool:
    """Whether this thread computes with numbers too small for full precision; PyTorch sets this, but cannot say it."""
    return _SMALLEST * 1.0 != 0.0


@contextmanager
def neutral(rounded: Sequence[str] = ()) -> Iterator[None]:
    """Modes for operators that the caller's modes would affect.

    Args:
        rounded: the kinds of operators whose factors oneDNN could round.
    """
    with ExitStack() as stack:
        _enter_neutral(stack)
        if rounded and _are_rounded(rounded):
            stack.enter_context(_unrounded())
        yield


def unrounded() -> AbstractContextManager[None]:
    """Lets oneDNN keep all bits of float32 factors."""
    return _unrounded() if _are_rounded(ROUNDED) else nullcontext()


@contextmanager
def _unrounded() -> Iterator[None]:
    mkldnn = torch.backends.mkldnn
    with _for_cpus, ExitStack() as stack:
        for switch in (mkldnn.matmul, mkldnn.conv, mkldnn.rnn):  # type: ignore[attr-defined]
            _set(stack, switch, _EXACT)
        yield


def _are_rounded(kinds: Sequence[str]) -> bool:
    """Whether oneDNN may round factors of such operators, or another thread has it keep them for now."""
    entries = _for_cpus.entries
    if _for_cpus.depth:
        return True
    for one in kinds:
        if rounding("mkldnn", one) not in _ALL_BITS:
            return True
    return _for_cpus.entries != entries


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
    """Lets one thread at a time change process-wide settings: the next waits until they are restored.

    Whoever reads the settings without waiting may read changed ones. It can tell if one thread was in here before or
    after it read them (`depth`), or if one has come meanwhile (`entries`).
    """

    def __init__(self) -> None:
        self.depth = self.entries = 0

    def __enter__(self) -> None:
        _lock.acquire()
        self.depth += 1
        self.entries += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        _lock.release()


_for_all_threads, _for_cpus = _ForAllThreads(), _ForAllThreads()


def _is_set_for_all() -> bool:
    """Whether a process-wide setting must be changed, or is being changed by another thread."""
    entries = _for_all_threads.entries
    return (
        _for_all_threads.depth > 0
        or torch.get_default_dtype() is not torch.float32
        or torch.are_deterministic_algorithms_enabled()
        or _for_all_threads.entries != entries
    )


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type


def _switches() -> tuple[Any, Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn  # type: ignore[attr-defined]


def _current() -> Precision:
    return Precision(*(switch.fp32_precision for switch in _switches()))


def _is_same(found: str, wanted: str) -> bool:
    return found == wanted or {found, wanted} <= {*_ALL_BITS}


def _set(stack: ExitStack, switch: Any, wanted: str) -> None:
    """Changes a setting if necessary, until the stack ends; reading through the old API may raise."""
    found = switch.fp32_precision
    if _is_same(found, wanted):
        return
    # The setting for all of them together: one that inherits it must do so again.
    inherited = torch.backends.fp32_precision == found  # type: ignore[attr-defined]
    stack.callback(setattr, switch, "fp32_precision", "none" if inherited else str(found))
    switch.fp32_precision = wanted
