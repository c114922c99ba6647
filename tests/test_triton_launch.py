"""Kernels are prepared where they are traced, or beside it, and one thread at a time loads each."""

import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from stepgraph.compiler import triton_launch
from stepgraph.system.torch_private import FakeTensorMode


class Kernel:
    """Notes what is done with it, as Triton's kernels would; `loads` and `compiles` say how."""

    def __init__(self, loads: Any = lambda: None, compiles: Any = lambda: None) -> None:
        self.loads, self.compiles, self.done = loads, compiles, list[Any]()

    def warmup(self, *given: Any, grid: tuple[int, ...], **settings: int) -> Any:
        """Compiles it."""
        self.compiles()
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
    triton_launch.launch(kernel, (7,), without_memory(), 2, num_warps=4)
    assert kernel.done == [("compiled", torch.float32, 2, (7,), {"num_warps": 4}), ("loaded", (7,))]


def test_a_kernel_that_cannot_be_loaded_yet_is_no_error() -> None:
    def loads() -> None:
        raise RuntimeError("no device")

    kernel = Kernel(loads)
    triton_launch.launch(kernel, (7,), without_memory())
    assert [done[0] for done in kernel.done] == ["compiled"]


def test_a_launch_waits_for_a_thread_that_loads_the_kernel() -> None:
    begun = threading.Event()

    def loads() -> None:
        begun.set()
        time.sleep(0.2)

    kernel, array = Kernel(loads), torch.ones(3)
    other = threading.Thread(target=triton_launch.launch, args=(kernel, (7,), without_memory()))
    other.start()
    assert begun.wait(60)
    triton_launch.launch(kernel, (7,), array)
    other.join()
    assert [done[0] for done in kernel.done] == ["compiled", "loaded", "launched"]


def test_kernels_are_prepared_beside_the_thread_that_traces_them() -> None:
    traced, threads = threading.Event(), list[threading.Thread]()

    def compiles() -> None:
        assert traced.wait(60)
        threads.append(threading.current_thread())

    first, second = Kernel(compiles=compiles), Kernel(compiles=compiles)
    with triton_launch.prepared_beside():
        for kernel in (first, second, first):
            triton_launch.launch(kernel, (7,), without_memory(), 2, num_warps=4)
        traced.set()
    for kernel in (first, second):  # each once
        assert kernel.done == [("compiled", torch.float32, 2, (7,), {"num_warps": 4}), ("loaded", (7,))]
    assert threading.current_thread() not in threads
    assert all(one.daemon for one in threads)


def test_kernels_are_prepared_for_each_set_of_arguments() -> None:
    kernel = Kernel()
    with triton_launch.prepared_beside():
        for number in (1, True, 1.0, 16):
            triton_launch.launch(kernel, (7,), without_memory(), number)
        triton_launch.launch(kernel, (7,), without_memory(), 16, num_warps=8)
    assert [done[0] for done in kernel.done] == 5 * ["compiled", "loaded"]


def test_one_kernel_is_prepared_at_a_time() -> None:
    running, most = list[int](), list[int]()

    def compiles() -> None:
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()

    with triton_launch.prepared_beside():
        for _ in range(4):
            triton_launch.launch(Kernel(compiles=compiles), (7,), without_memory())
    assert most == [1, 1, 1, 1]


def test_a_kernel_that_cannot_be_compiled_beside_is_an_error_of_what_traced_it() -> None:
    def compiles() -> None:
        raise ValueError("no such instruction")

    good = Kernel()
    with pytest.raises(ValueError, match="no such instruction"), triton_launch.prepared_beside():
        triton_launch.launch(Kernel(compiles=compiles), (7,), without_memory())
        triton_launch.launch(good, (7,), without_memory())
    assert [done[0] for done in good.done] == ["compiled", "loaded"]
    with triton_launch.prepared_beside():
        pass  # nothing is left of it


def test_an_error_while_tracing_comes_first_and_leaves_no_thread() -> None:
    slow = Kernel(compiles=lambda: time.sleep(0.1))
    with pytest.raises(RuntimeError, match="while tracing"), triton_launch.prepared_beside():
        triton_launch.launch(slow, (7,), without_memory())
        raise RuntimeError("while tracing")
    assert [done[0] for done in slow.done] == ["compiled", "loaded"]
    triton_launch.launch(slow, (8,), without_memory())  # by this thread again
    assert slow.done[-1] == ("loaded", (8,))


def test_a_launch_waits_for_its_own_kernel_only() -> None:
    begun, go = threading.Event(), threading.Event()

    def compiles() -> None:
        begun.set()
        assert go.wait(60)

    slow, ready = Kernel(compiles=compiles), Kernel()
    with triton_launch.prepared_beside():
        triton_launch.launch(slow, (7,), without_memory())
        assert begun.wait(60)
        triton_launch.launch(ready, (7,), torch.ones(3))
        threading.Timer(0.1, go.set).start()
        triton_launch.launch(slow, (7,), torch.ones(3))
    assert [done[0] for done in ready.done] == ["launched"]
    assert [done[0] for done in slow.done] == ["compiled", "loaded", "launched"]


def test_other_threads_prepare_what_they_trace_themselves() -> None:
    kernel, names = Kernel(), list[str]()
    kernel.compiles = lambda: names.append(threading.current_thread().name)
    with triton_launch.prepared_beside():
        other = threading.Thread(target=triton_launch.launch, args=(kernel, (7,), without_memory()), name="other")
        other.start()
        other.join()
    assert names == ["other"]


ENDS = """
import threading, time, torch
from contextlib import nullcontext
from stepgraph.compiler import triton_launch
from tests.test_triton_launch import Kernel, without_memory

torch.cuda.device = lambda _: nullcontext()
begun = threading.Event()

def compiles():
    begun.set()
    time.sleep(600)

def fuse():
    with triton_launch.prepared_beside():
        triton_launch.launch(Kernel(compiles=compiles), (7,), without_memory())

threading.Thread(target=fuse, daemon=True).start()
assert begun.wait(60)
print("ends")
"""


def test_a_process_ends_while_a_kernel_is_prepared() -> None:
    ran = subprocess.run([sys.executable, "-c", ENDS], check=False, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "ends\n"), ran.stderr
