"""A recorded run with everything that could go wrong when it is killed; trained by a process that may be killed."""

import json
from pathlib import Path
from typing import Any

import torch

import stepgraph as sg
from stepgraph.report import page
from stepgraph.report.run import Run
from tests.checkpoint_runs import compiled
from tests.interrupt_runs import BATCH, batch, mark, network

ROWS = 4 * BATCH + 2  # the last batch is short, and so is the last pair of them
UPDATES = 3  # of an epoch


def distance(prediction: torch.Tensor, labels: torch.Tensor) -> float:
    return float((prediction - labels).abs().mean())


def recorded(folder: Path, results: Path, epochs: int) -> None:
    """Trains to the end, from the latest checkpoint if there is one; then writes down what it knows, bit for bit."""
    training = compiled(network())
    settings: dict[str, Any] = {"accumulate": 2, "save_every": 2, "keep": 2, "metrics": [distance]}
    history = sg.fit(
        training,
        batch(0, ROWS),
        validation=batch(1, 9),
        epochs=epochs,
        run=folder,
        resume=True,
        progress="quiet",
        **settings,
    )
    known = {"stopped": history.stopped, "steps": history.steps, "best": history.best_epoch}
    results.write_text(json.dumps({**known, "epochs": timeless(history.epochs), "mark": repr(mark(training))}))


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Epochs without their times, in which two runs that learned the same may differ."""
    return [{name: one for name, one in row.items() if name not in ("seconds", "waiting")} for row in rows]


def record(folder: Path) -> dict[str, Any]:
    """What the record of a run says, as far as two runs that learned the same must agree; a page is made of it."""
    run = Run(folder)
    assert page.page([run]) and (folder / page.FILE).exists()
    looks = [one["step"] for one in run.distributions]
    assert looks == sorted(set(looks))
    return {"status": run.status, "steps": run.steps, "epochs": timeless(run.epochs)}
