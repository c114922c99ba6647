"""Tiny steps run in one thread, and change that number for nobody else."""

import ctypes
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.errors import ExecutionError
from stepgraph.system import openmp

needs_openmp = pytest.mark.skipif(
    openmp.limit() is torch.set_num_threads, reason="this PyTorch has no OpenMP that can be called"
)


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """PyTorch uses three threads, as it would by itself on as many processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def allowed() -> int:
    """How many threads OpenMP would give to operators of this thread."""
    return int(re.search(r"omp_get_max_threads\(\) : (\d+)", torch.__config__.parallel_info())[1])  # type: ignore[index]


@needs_openmp
def test_the_number_is_set_for_this_thread_alone() -> None:
    limit, elsewhere = openmp.limit(), list[int]()
    limit(1)
    try:
        thread = threading.Thread(target=lambda: elsewhere.append((torch.get_num_threads(), allowed())[1]))
        thread.start()
        thread.join()
        assert allowed() == torch.get_num_threads() == 1 and elsewhere == [3]
    finally:
        limit(3)
    assert allowed() == torch.get_num_threads() == 3


@pytest.mark.parametrize("missing", ["the library", "the function", "the system"])
def test_where_openmp_cannot_be_called_pytorch_sets_the_number(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Any:
        raise OSError("no such file")

    match missing:
        case "the library":
            monkeypatch.setattr(ctypes, "PyDLL", refuse)
        case "the function":
            monkeypatch.setattr(ctypes, "PyDLL", lambda _: object())
        case "the system":
            monkeypatch.setattr(sys, "platform", "win32")
    assert openmp.limit.__wrapped__() is torch.set_num_threads


def test_a_build_without_openmp_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts one number, and that would be 1."""
    monkeypatch.setattr(torch.__config__, "parallel_info", lambda: "ATen parallel backend: native thread pool")
    before = torch.get_num_threads()
    openmp.limit.__wrapped__()(before + 1)
    assert torch.get_num_threads() == before


def network() -> sg.TrainingGraph:
    """A tiny step with a convolution."""
    sg.set_seed(0)
    x, y, graph = sg.Tensor((2, 1, 6, 6)), sg.Tensor((2, 3)), sg.Graph()
    graph.dense(graph.reshape((2, -1), graph.relu(graph.convolution(x, 2, 3))), 3)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.01))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", fuse=False)
    return training


BATCH = {"x": np.ones((2, 1, 6, 6), np.float32)}, {"y": np.ones((2, 3), np.float32)}


def test_a_tiny_step_runs_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    training, seen = network(), list[int]()
    (executable,) = training.compilation.programs.executables.values()
    assert executable.runs_alone
    training.execute(*BATCH)
    function = executable._function

    def noted(*given: Any) -> Any:
        seen.append(allowed())
        if len(seen) == 2:
            raise RuntimeError("a kernel has failed")
        return function(*given)

    monkeypatch.setattr(executable, "_function", noted)
    training.execute(*BATCH)
    assert seen == [1] and allowed() == torch.get_num_threads() == 3
    with pytest.raises(ExecutionError, match="a kernel has failed"):
        training.execute(*BATCH)
    assert seen == [1, 1] and allowed() == torch.get_num_threads() == 3


def test_the_number_of_threads_changes_no_bit() -> None:
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        training = network()
        found.append([training.execute(*BATCH).loss for _ in range(4)])
    assert found[0] == found[1]


def test_a_profile_changes_no_bit() -> None:
    """Products in two threads have other bits than in one."""

    def losses(profiled: int) -> list[Any]:
        sg.set_seed(3)
        x, y, graph = sg.Tensor((4, 6)), sg.Tensor((4,), "int64"), sg.Graph()
        hidden = graph.batch_normalization(graph.node(sg.ActivationLayer.gelu(), graph.dense(x, 32)))
        graph.dense(hidden, 5)
        training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(1e-2))
        training.add_inputs({"x": x}, {"y": y})
        training.compile("cpu", fuse=False)
        rng, found = np.random.default_rng(0), []
        for step in range(12):
            options = sg.ExecutionOptions.PER_LAYER_PROFILING if step == profiled else sg.ExecutionOptions.NONE
            data = {"x": rng.standard_normal((4, 6), np.float32)}, {"y": rng.integers(0, 5, 4)}
            found.append(training.execute(*data, options=options).loss)
        return found

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert losses(profiled=2) == losses(profiled=-1) and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
