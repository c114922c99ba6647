"""Nothing is left behind: neither by many steps, nor by many batch sizes, nor by many compilations."""

import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import stepgraph as sg
from tests import soak_runs
from tests.soak_runs import BATCH, MEBIBYTE, batch, left, network, objects, small, steps, tell


def _left(work: Callable[[], object], times: int, warm: int) -> dict[str, int]:
    """Objects that some work leaves behind when it is done again and again."""
    for _ in range(warm):
        work()
    before = objects()
    for _ in range(times):
        work()
    return left(before)


def test_steps_leave_nothing_behind() -> None:
    training = small()
    assert not _left(lambda: [steps(training, 25, rows) for rows in (BATCH, 5, 1)], times=4, warm=2)


@pytest.mark.deep
def test_compiling_again_leaves_nothing_behind() -> None:
    training = small()
    assert not _left(lambda: (training.compile(), steps(training, 1)), times=12, warm=3)


@pytest.mark.deep
def test_graphs_that_are_dropped_leave_nothing_behind() -> None:
    assert not _left(lambda: steps(small(), 1), times=12, warm=3)


def test_batch_sizes_that_are_given_up_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepgraph.runtime.programs.MOST", 2)
    training = small()
    # In the first round the arena grows, and what was in the smaller one is created again when it is needed.
    assert not _left(lambda: [steps(training, 2, rows) for rows in (3, 4, 5, 6)], times=2, warm=2)


# A little for each step or compilation would be seen: 64 bytes for each of 18,000 steps are 1.1 MiB, 3 KiB for each of
# 450 compilations 1.3 MiB.
BOUNDS = {
    "steps": 1 * MEBIBYTE,
    "phases": 1 * MEBIBYTE,
    "batch_sizes": 4 * MEBIBYTE,
    "fit": 2 * MEBIBYTE,
    "compiling_again": 1 * MEBIBYTE,
    "new_graphs": 1 * MEBIBYTE,
}


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", BOUNDS)
def test_memory_stays_flat(name: str, tmp_path: Path) -> None:
    assert _grown(name, tmp_path) < BOUNDS[name]


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_leak_would_be_seen(tmp_path: Path) -> None:
    assert _grown("leak", tmp_path) > BOUNDS["compiling_again"]


def _grown(name: str, folder: Path) -> int:
    """In a process of its own, in which nothing else comes and goes."""
    processes = multiprocessing.get_context("spawn")
    process = processes.Process(target=tell, args=(getattr(soak_runs, f"soak_{name}"), folder))
    process.start()
    process.join()
    assert process.exitcode == 0
    grown: int = json.loads((folder / "grown.json").read_text())
    print(f"{name}: {grown / MEBIBYTE:.2f} MiB more after the warm-up")
    return grown


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["DISABLE_LAYER_FUSION", "FUSE_LAYERS"])
def test_many_steps_on_a_gpu_leave_memory_flat_and_results_alone(options: str) -> None:
    """2,000 replays of a captured graph; what the first ones gave is read at the end only."""
    device = sg.Device.gpu()
    assert device is not None
    chosen = sg.GraphCompilationOptions[options]
    sg.set_seed(4)
    losses = [step.loss for step in _early(network(device, chosen))]
    sg.set_seed(4)
    training = network(device, chosen)
    early = _early(training)
    steps(training, 1_180)  # past the moment when the places of losses are used again
    torch.cuda.synchronize()
    before, there = torch.cuda.memory_allocated(), objects()
    for number in range(2_000):
        training.execute(*batch(seed=number % 7))
    assert training.optimizer is not None and training.optimizer.time_step == 3_201
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before and left(there) == {}
    np.testing.assert_allclose([step.loss for step in early], losses, rtol=1e-5)
    np.testing.assert_array_equal([step.result.numpy().item() for step in early], [step.loss for step in early])


def _early(training: sg.TrainingGraph) -> list[sg.Execution]:
    """The first steps, with data of their own each; nothing of them is read."""
    return [training.execute(*batch(seed=seed)) for seed in range(20)]
