"""Kernels are prepared where they are traced, and one thread at a time loads them."""

import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from stepgraph.compiler import launch
from stepgraph.system.torch_private import FakeTensorMode


class Kernel:
    """Notes what is done with it, as Triton's kernels would; `loads` says how."""

    def __init__(self, loads: Any = lambda: None) -> None:
        self.loads, self.done = loads, list[Any]()

    def warmup(self, *given: Any, grid: tuple[int, ...], **settings: int) -> Any:
        """Compiles it."""
        self.done.append(("compiled", *given, grid, settings))
        return Compiled(self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given, **settings: self.done.append(("launched", *given, grid, settings))


class Compiled:
    """A compiled kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.kernel.loads()
        self.kernel.done.append(("loaded", grid))


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())


def without_memory() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3)


def test_a_kernel_is_compiled_and_loaded_where_it_is_traced() -> None:
    kernel = Kernel()
    launch.launch(kernel, (7,), without_memory(), 2, num_warps=4)
    assert kernel.done == [("compiled", torch.float32, 2, (7,), {"num_warps": 4}), ("loaded", (7,))]


def test_a_kernel_that_cannot_be_loaded_yet_is_no_error() -> None:
    def loads() -> None:
        raise RuntimeError("no device")

    kernel = Kernel(loads)
    launch.launch(kernel, (7,), without_memory())
    assert [done[0] for done in kernel.done] == ["compiled"]


def test_a_launch_waits_for_a_thread_that_loads_the_kernel() -> None:
    begun = threading.Event()

    def loads() -> None:
        begun.set()
        time.sleep(0.2)

    kernel, array = Kernel(loads), torch.ones(3)
    other = threading.Thread(target=launch.launch, args=(kernel, (7,), without_memory()))
    other.start()
    assert begun.wait(60)
    launch.launch(kernel, (7,), array)
    other.join()
    assert [done[0] for done in kernel.done] == ["compiled", "loaded", "launched"]
