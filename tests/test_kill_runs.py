"""A recorded run, killed with signal 9 again and again and resumed each time, is the run that nobody killed."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.report import record as records
from stepgraph.report.run import Run
from tests.forked import forked
from tests.kill_runs import UPDATES, record, recorded

pytestmark = pytest.mark.skipif(os.name == "nt", reason="kills with POSIX signals")
SEED = 16


def _life(folder: Path, epochs: int, lines: int | None = None, wait: float = 0.0) -> int | None:
    """One process that trains, killed a moment after so many lines of its record; its exit status."""
    process = forked().Process(target=recorded, args=(folder / "run", folder / "results.json", epochs))
    before = _lines(folder)
    process.start()
    deadline = time.monotonic() + 120
    if lines is not None:
        while _lines(folder) < before + lines and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(wait)
        process.kill()
    process.join()
    return process.exitcode


def _lines(folder: Path) -> int:
    file = folder / "run" / records.FILE
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def _kill_again_and_again(folder: Path, times: int, epochs: int) -> None:
    whole, killed = folder / "whole", folder / "killed"
    for one in (whole, killed):
        one.mkdir()
    assert _life(whole, epochs) == 0
    dice, reached = np.random.default_rng(SEED), []
    for number in range(times):
        status = _life(killed, epochs, int(dice.integers(1, 20)), dice.uniform(0, 0.02))
        assert status == -9, f"the run ended with {status} after {number} of {times} kills"
        reached.append(max((step for step, _, _ in Run(killed / "run").steps), default=0))  # readable at once
    assert _life(killed, epochs) == 0
    print(f"{times} kills with seed {SEED}, at steps {reached} of {UPDATES * epochs}")
    assert _results(killed) == _results(whole) and _results(whole)["stopped"] == "finished"
    assert record(killed / "run") == record(whole / "run")
    assert [step for step, _, _ in record(killed / "run")["steps"]] == list(range(1, UPDATES * epochs + 1))
    assert len(Run(killed / "run").begins) == times + 1


class _Killed(BaseException):
    pass


@pytest.mark.parametrize("number", [1, 3, 4], ids=["within an epoch", "at its end", "after the next update"])
def test_ended_right_after_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int) -> None:
    """What a checkpoint knows is in the record before it: a resumed run does not write it again."""
    whole, ended, save, left = tmp_path / "whole", tmp_path / "ended", sg.TrainingGraph.save, iter(range(number - 1))
    recorded(whole, tmp_path / "whole.json", 2)

    def saves(*given: Any, **settings: Any) -> Path:
        found = save(*given, **settings)
        if next(left, None) is None:
            raise _Killed
        return found

    with monkeypatch.context() as patch, pytest.raises(_Killed):
        patch.setattr(sg.TrainingGraph, "save", saves)
        recorded(ended, tmp_path / "ended.json", 2)
    recorded(ended, tmp_path / "ended.json", 2)
    assert record(ended) == record(whole)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    _kill_again_and_again(tmp_path, 4, epochs=14)


@pytest.mark.deep
def test_killed_at_many_random_moments(tmp_path: Path) -> None:
    _kill_again_and_again(tmp_path, 60, epochs=250)
