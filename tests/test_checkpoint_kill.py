"""A training process killed with signal 9 leaves a whole checkpoint, and who goes on from it misses nothing."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.checkpoint import files
from tests.checkpoint_runs import compiled, kill_at_every_file_operation, network, state, train, train_until_killed
from tests.forked import forked

pytestmark = pytest.mark.skipif(os.name == "nt", reason="kills with POSIX signals")


def _kill_again_and_again(folder: Path, times: int) -> None:
    generator, reached = np.random.default_rng(times), []
    for _ in range(times):
        before = sg.latest(folder)
        process = forked().Process(target=train_until_killed, args=(folder,))
        process.start()
        deadline = time.monotonic() + 120
        while sg.latest(folder) == before and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -9
        sg.load(folder)  # every byte is verified
        reached.append(files.read(folder).description["notes"]["step"])
    assert reached == sorted(reached) and reached[-1] >= times  # each life went on where the last one ended
    last, resumed = reached[-1], sg.load(folder, sg.Device.cpu())
    uninterrupted = compiled(network())
    train(uninterrupted, 0, last)
    assert state(resumed) == state(uninterrupted)
    assert train(resumed, last, last + 3) == train(uninterrupted, last, last + 3)
    assert state(resumed) == state(uninterrupted)


@pytest.mark.deep
def test_killed_at_random_moments(tmp_path: Path) -> None:
    _kill_again_and_again(tmp_path, 4)


@pytest.mark.deep
def test_killed_at_many_random_moments(tmp_path: Path) -> None:
    _kill_again_and_again(tmp_path, 30)


def test_killed_at_every_file_operation(tmp_path: Path) -> None:
    process = forked().Process(target=kill_at_every_file_operation, args=(tmp_path,))
    process.start()
    process.join(timeout=300)
    assert process.exitcode == 0
