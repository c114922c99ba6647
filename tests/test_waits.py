"""How long a GPU waits for other ranks, with events whose times are known."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from stepgraph.runtime.waits import Waits
from stepgraph.runtime.world import World


class Gpu:
    """A clock that tests set, and whether the GPU has come to what was recorded last."""

    def __init__(self) -> None:
        self.now, self.is_there = 0.0, True

    def event(self) -> Recorded:
        return Recorded(self)


class Recorded:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.time = gpu, 0.0

    def record(self) -> None:
        self.time = self.gpu.now

    def query(self) -> bool:
        return self.gpu.is_there

    def elapsed_time(self, end_event: Recorded) -> float:
        return end_event.time - self.time


def wait(gpu: Gpu, waits: Waits, what: str, milliseconds: float) -> None:
    gpu.now += 1
    with waits.around(what):
        gpu.now += milliseconds


def test_waits_of_an_update_are_added() -> None:
    gpu = Gpu()
    waits = Waits(gpu.event)
    assert waits.next() is None
    for _ in range(3):
        wait(gpu, waits, "bucket 0", 5)
        wait(gpu, waits, "bucket 1", 2)
        assert waits.next() == pytest.approx(0.007)


def test_a_wait_counts_once() -> None:
    gpu = Gpu()
    waits = Waits(gpu.event)
    waits.next()
    wait(gpu, waits, "bucket 0", 5)
    wait(gpu, waits, "of another graph", 3)
    assert waits.next() == pytest.approx(0.008)
    wait(gpu, waits, "bucket 0", 5)
    assert waits.next() == pytest.approx(0.005)
    gpu.now += 1
    assert waits.next() is None


def test_what_the_gpu_has_not_passed_is_left_out() -> None:
    gpu = Gpu()
    waits = Waits(gpu.event)
    waits.next()
    wait(gpu, waits, "bucket 0", 5)
    gpu.is_there = False
    assert waits.next() is None


def test_an_event_without_a_time_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    waits = Waits(gpu.event)
    waits.next()
    wait(gpu, waits, "bucket 0", 5)

    def refuse(self: Recorded, end_event: Recorded) -> float:
        raise RuntimeError("invalid resource handle")

    monkeypatch.setattr(Recorded, "elapsed_time", refuse)
    assert waits.next() is None


def test_a_rank_counts_what_its_gpu_waits_and_not_what_this_program_does() -> None:
    gpu = Gpu()
    world = World(waits=Waits(gpu.event))
    world.count_waits()
    with ExitStack() as stack:
        stack.enter_context(world.measured("bucket 0"))
        stack.enter_context(world.explained("bucket 0", 1))
        gpu.now += 250
    assert world.place.waited == 0
    world.count_waits()
    assert world.place.waited == pytest.approx(0.25)


@pytest.mark.gpu
def test_a_captured_wait_is_measured_in_every_replay() -> None:
    waits, graph, numbers = Waits(), torch.cuda.CUDAGraph(), torch.ones(1 << 26, device="cuda")
    with torch.cuda.graph(graph), waits.around("work"):
        for _ in range(50):
            numbers.mul_(2)
    for _ in range(3):
        waits.next()
        graph.replay()
        torch.cuda.synchronize()
        assert 0.001 < (waits.next() or 0) < 1
