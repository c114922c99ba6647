"""Kernels in Triton's language: where they run, how they are launched, and as operators of PyTorch.

Triton compiles a kernel when it is launched for the first time, and caches it for later runs. It comes with PyTorch's
CUDA builds for Linux, so modules named `…_kernels` are imported only where `run_on` allows it. Their operators exist
from then on: code that an earlier process compiled calls them by name, and imports nothing.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch

from stepgraph.system import background
from stepgraph.system.torch_private import FakeTensor

GENERATIONS = (8, 9, 10, 12)  # of NVIDIA's GPUs: Ampere, Hopper, Blackwell
# A step may launch a kernel while another is being fused. Triton says that a kernel is loaded before it is, and two
# threads would compile it twice. So each kernel has a lock, under its identity.
_loading = dict[int, threading.RLock]()


class _Here(threading.local):
    """What a thread that traces lets others prepare, if it does."""

    preparations: _Preparations | None = None


_here = _Here()


def run_on(device: torch.device, generations: Collection[int] = GENERATIONS) -> bool:
    """Whether the device is a GPU of these generations and Triton is there."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    if not torch.cuda.is_available():  # a step can be recorded for a GPU on a machine without one
        return False
    return torch.cuda.get_device_capability(device)[0] in generations


def operator(function: Callable[..., Any]) -> Any:
    """The function as an operator that PyTorch's compiler does not look into. To trace it is to compile its kernels."""
    made = torch.library.custom_op(f"stepgraph::{function.__name__}", function, mutates_args=())
    made.register_fake(function)
    return made


def define_operators(device: torch.device) -> None:
    """Defines all operators that fused code for a device may call, whether or not a pass has asked for them."""
    if run_on(device):
        _import_kernels()


@cache
def _import_kernels() -> None:
    package = importlib.import_module(__name__.rpartition(".")[0])
    for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if one.name.endswith("_kernels"):
            importlib.import_module(one.name)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: int) -> None:
    """Runs a kernel. Given arrays without memory it only prepares what such a call will need, which takes seconds."""
    (array, *_) = (one for one in arguments if isinstance(one, torch.Tensor))
    if not isinstance(array, FakeTensor):
        with torch.cuda.device(array.device), _alone(kernel):
            kernel[grid](*arguments, **settings)
        return
    known = [one.dtype if isinstance(one, torch.Tensor) else one for one in arguments]
    prepare = partial(_prepare, kernel, array.device, grid, known, settings)
    if _here.preparations is None:
        prepare()
    else:
        _here.preparations.begin(repr((id(kernel), array.device, known, settings)), prepare)


def _alone(kernel: Any) -> threading.RLock:
    """The lock of a kernel."""
    return _loading.setdefault(id(kernel), threading.RLock())


def _prepare(
    kernel: Any, device: torch.device, grid: tuple[int, ...], known: Sequence[Any], settings: Mapping[str, int]
) -> None:
    with torch.cuda.device(device), _alone(kernel):
        compiled = kernel.warmup(*known, grid=grid, **settings)
        with suppress(Exception):  # it only saves time: a launch loads what is not loaded
            _ = compiled[grid]  # builds Triton's launcher and loads the kernel


@contextmanager
def prepared_beside() -> Iterator[None]:
    """Prepares kernels in another thread while this one traces; at the end, waits for them and raises their errors.

    Triton works without Python's lock for most of the time.
    """
    _here.preparations = preparations = _Preparations()
    try:
        yield
    finally:
        _here.preparations = None
        preparations.wait()
    preparations.require()


class _Preparations:
    """Kernels that are prepared one after another beside the thread that traces them, each once."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._begun = dict[str, Future[None]]()

    def begin(self, name: str, prepare: Callable[[], None]) -> None:
        """Starts to prepare a kernel, unless one of this name has been started."""
        if name not in self._begun:
            self._begun[name] = future = Future[None]()
            work = partial(self._run, future, prepare)
            background.do("stepgraph kernels", work)

    def wait(self) -> None:
        """Waits for all of them."""
        wait(self._begun.values())

    def require(self) -> None:
        """Raises the first error."""
        for one in self._begun.values():
            one.result()

    def _run(self, future: Future[None], prepare: Callable[[], None]) -> None:
        try:
            with self._turn:
                prepare()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)
