"""Where the system allows no more threads, work that only saves time is done where it is needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import stepgraph as sg
from stepgraph.compiler import triton_launch
from stepgraph.fitting.data import Batch, ahead
from stepgraph.runtime import algorithms
from stepgraph.system import background
from stepgraph.tensors import arrivals
from tests.fit_runs import BATCH, arrays, network
from tests.test_algorithms import CPU, part
from tests.test_triton_launch import Kernel, without_gpu, without_memory

__all__ = ["without_gpu"]  # a fixture of all tests here, too
X, Y = arrays()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that could not be started."""
    found = list[str]()

    def refuse(thread: threading.Thread) -> None:
        found.append(thread.name)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return found


def test_work_is_done_in_the_calling_thread(refused: list[str]) -> None:
    did = list[threading.Thread]()
    background.do("test", lambda: did.append(threading.current_thread()))
    assert did == [threading.current_thread()] and refused == ["test"]


def test_what_the_work_raises_is_raised_alone(refused: list[str]) -> None:
    def work() -> None:
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own") as caught:
        background.do("test", work)
    assert caught.value.__context__ is None and refused == ["test"]


def test_values_are_copied_before_the_step_is_recorded(refused: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "SENT", {"cpu"})
    training = network()
    assert refused == ["stepgraph arrivals"]
    assert training.execute({"x": X[:BATCH]}, {"y": Y[:BATCH]}).loss > 0


def test_kernels_are_prepared_where_they_are_traced(refused: list[str]) -> None:
    kernel = Kernel()
    with triton_launch.prepared_beside():
        triton_launch.launch(kernel, (7,), without_memory())
        assert [done[0] for done in kernel.done] == ["compiled", "loaded"]
    assert refused == ["stepgraph kernels"]


def test_a_kernel_that_cannot_be_prepared_is_an_error_at_the_end(refused: list[str]) -> None:
    def compiles() -> None:
        raise ValueError("no such instruction")

    with pytest.raises(ValueError, match="no such instruction"), triton_launch.prepared_beside():
        triton_launch.launch(Kernel(compiles=compiles), (7,), without_memory())
    assert refused == ["stepgraph kernels"]


def test_batches_are_made_when_they_are_needed(refused: list[str]) -> None:
    seen, closed = list[int](), list[bool]()

    def made() -> Iterator[Batch]:
        try:
            for number in range(9):
                seen.append(number)
                yield Batch(({"i": number}, {}, {}), 1)
        finally:
            closed.append(True)

    coming = ahead(made(), 2)
    assert [next(coming).parts[0]["i"] for _ in range(3)] == seen == [0, 1, 2]
    coming.close()
    assert closed == [True] and refused == ["stepgraph data"]


def test_fit_learns_the_same(refused: list[str]) -> None:
    plain, other = network(), network()
    expected = sg.fit(plain, (X, Y), epochs=2, prefetch=0, progress="quiet")
    assert refused == []
    found = sg.fit(other, (X, Y), epochs=2, prefetch=2, progress="quiet")
    assert refused == ["stepgraph data"] * 2
    assert found["loss"] == expected["loss"]


def test_a_completion_is_called_once_the_work_is_done(refused: list[str]) -> None:
    class Event:
        waited = False

        def synchronize(self) -> None:
            self.waited = True

    calls, last = list[Any](), Event()
    execution = sg.Execution(sg.Device.cpu(), timed=False)
    execution._events = (Event(), last)  # type: ignore[assignment]
    execution.announce(lambda *given: calls.append((last.waited, given[1])), waited=False)
    assert calls == [(True, None)] and refused == ["stepgraph completion"]


def test_algorithms_are_not_loaded_ahead(refused: list[str]) -> None:
    algorithms.load(part(), CPU)
    assert refused == ["stepgraph convolutions"]
