"""What one rank alone does: whatever would let ranks train differently, all of them learn, and say the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.report.run import Run
from tests.parallel_runs import compiled, mlp, rows, together

RANK = "RANK"


# ---------------------------------------------------------------------------------------- one rank ends a run


class Ending(sg.Callback):
    """Ends a run after some steps or epochs, in different ways on different ranks."""

    def __init__(self, ways: dict[int, tuple[str, int, str]]) -> None:
        self.kind, self.at, self.how = ways.get(int(os.environ[RANK]), ("", 0, ""))

    def step(self, moment: sg.Moment) -> None:
        self._end("step", moment.step, moment)

    def epoch(self, moment: sg.Moment) -> None:
        self._end("epoch", moment.epoch, moment)

    def _end(self, kind: str, place: int, moment: sg.Moment) -> None:
        if (kind, place) != (self.kind, self.at):
            return
        if self.how == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        else:
            moment.stop(self.how)


def ended(folder: str, ways: dict[int, tuple[str, int, str]]) -> dict[str, Any]:
    training, said = compiled(mlp()), []

    class Listening(sg.Callback):
        def end(self, moment: sg.Moment) -> None:
            said.append(moment.stopped)

    callbacks = [Ending(ways), Listening()]
    history = sg.fit(training, rows(44), batch_size=13, epochs=3, callbacks=callbacks, run=folder, progress="quiet")
    return {"why": [history.stopped, *said], "notes": history.notes, "steps": len(history.steps), "shown": str(history)}


@pytest.mark.parametrize(
    "world, ways, why, who, steps",
    [
        (2, {1: ("step", 2, "too hot")}, "too hot", "rank 1 asked to stop: too hot", 2),
        (3, {2: ("epoch", 1, "enough")}, "enough", "rank 2 asked to stop: enough", 4),
        (2, {1: ("step", 3, "Ctrl-C")}, "interrupted", "rank 1 received Ctrl-C", 3),
        (2, {0: ("step", 2, "enough"), 1: ("step", 2, "enough")}, "enough", None, 2),
        (
            3,
            {1: ("step", 2, "ein Grund äöü"), 2: ("step", 2, "Ctrl-C")},
            "interrupted",
            "rank 1 asked to stop: ein Grund äöü; rank 2 received Ctrl-C",
            2,
        ),
    ],
)
def test_all_ranks_say_who_has_ended_a_run(
    world: int, ways: dict[int, Any], why: str, who: str | None, steps: int, tmp_path: Path
) -> None:
    for found in together(world, ended, str(tmp_path), ways):
        assert found["why"] == [why, why] and found["steps"] == steps, found
        assert found["notes"] == [] if who is None else [who]
        assert who is None or who in found["shown"]
    end = Run(tmp_path).end
    assert end is not None and (end["stopped"], end.get("who")) == (why, who)


def read_by_one(folder: str) -> list[Any]:
    """One rank looks at the loss in each step, and so finds a NaN before the others do."""

    class Looking(sg.Callback):
        def step(self, moment: sg.Moment) -> None:
            if os.environ[RANK] == "1":
                assert moment.loss != 0

    training, (x, y) = compiled(mlp()), rows(44)
    x[20] = np.nan
    history = sg.fit(
        training, (x, y), batch_size=13, shuffle=False, callbacks=[Looking()], checkpoints=folder, progress="quiet"
    )
    return [history.stopped, len(history.steps), os.listdir(folder)]


def test_a_nan_that_one_rank_reads_first_ends_the_run_of_all(tmp_path: Path) -> None:
    assert together(2, read_by_one, str(tmp_path)) == [["nan", 2, []]] * 2


def judged(folder: str) -> dict[str, Any]:
    """Ranks measure different things: times, and a metric that is random."""
    training, random = compiled(mlp()), np.random.default_rng(int(os.environ[RANK]))

    def noise(prediction: Any, labels: Any) -> float:
        return random.random()

    settings: dict[str, Any] = {"batch_size": 13, "epochs": 6, "metrics": {"noise": noise}, "progress": "quiet"}
    watched = sg.fit(training, rows(44), watch="noise", patience=2, restore_best=True, checkpoints=folder, **settings)
    timed = sg.fit(training, rows(44), watch="seconds", patience=1, checkpoints=f"{folder}/other", **settings)
    return {"epochs": [watched.epochs, timed.epochs], "stopped": [watched.stopped, timed.stopped]}


def test_ranks_judge_epochs_by_the_numbers_of_the_first(tmp_path: Path) -> None:
    first, second = together(2, judged, str(tmp_path))
    assert first == second and isinstance(first, dict), first
