"""What `sg.fit` adds to a training step: the CNN's loop written by hand and `fit`, in turns over the same rows.

python -m benchmarks.fit --device cuda
python -m benchmarks.fit --run --steps 1000 --rounds 3

Both go through one epoch of shuffled rows a turn, each with a graph of its own. The loop by hand does the least there
is: take the rows, execute, and wait at the end. `--metrics` lets `fit` compute the accuracy of every step too; `--run`
lets it write a run folder, which looks into few steps of many, so that a turn should have many; it prints what share
of its time `fit` spent on looking too, which other work on the machine disturbs less than the ratio of two turns.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import stepgraph as sg
from benchmarks.in_stepgraph import Stepgraph
from benchmarks.models import MODELS, SMALL, Model
from stepgraph.report.run import Run

MOST = 1.03  # what fit may take, in steps by hand
CHOICES = {name: model for name, model in (SMALL | MODELS).items() if model.label_count == model.batch_size}


def by_hand(training: sg.TrainingGraph, inputs: Any, labels: Any, batch: int, epoch: int) -> None:
    """One epoch, as a user would write it."""
    order = np.random.default_rng(epoch).permutation(len(inputs))
    for rows in np.split(order, range(batch, len(order), batch)):
        execution = training.execute({"inputs": inputs[rows]}, {"labels": labels[rows]}, batch_size=len(rows))
    execution.wait()


def fitted(training: sg.TrainingGraph, inputs: Any, labels: Any, batch: int, recorded: bool, **settings: Any) -> None:
    """The same with `fit`; tells what share of its time a recorded run spent on looking."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) if recorded else None
        sg.fit(training, (inputs, labels), batch_size=batch, run=run, **settings)
        if run is not None:
            end = Run(run).end or {}
            print(f"looking took {end['looking']:.3f} s of {end['at']:.1f} s, {end['looking'] / end['at']:.1%}")


def measure(
    model: Model, device: str, steps: int, rounds: int, recorded: bool, **settings: Any
) -> dict[str, list[float]]:
    """Seconds of a step, by round; the two take turns, and who begins alternates."""
    graphs = [Stepgraph(model, device, dropout=True).training for _ in range(2)]
    inputs, labels = (np.concatenate([array] * steps) for array in model.batch())
    batch = model.batch_size
    runs = {
        "by hand": lambda epoch: by_hand(graphs[0], inputs, labels, batch, epoch),
        "fit": lambda epoch: fitted(graphs[1], inputs, labels, batch, recorded, **settings),
    }
    for run in runs.values():
        run(0)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for epoch in range(1, rounds + 1):
        for name in list(runs)[:: 1 if epoch % 2 else -1]:
            began = time.perf_counter()
            runs[name](epoch)
            times[name].append((time.perf_counter() - began) / steps)
    return times


def main() -> None:
    """Measures what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="cnn", choices=list(CHOICES))
    parser.add_argument("--steps", type=int, default=50, help="steps of a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--metrics", action="store_true", help="with the accuracy of every step")
    parser.add_argument("--run", action="store_true", help="with a run folder")
    parser.add_argument("--progress", default="quiet", choices=["quiet", "plain", "rich"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, metrics = CHOICES[options.model].on(options.device), [sg.accuracy] if options.metrics else []
    settings = {"metrics": metrics, "progress": options.progress}
    times = measure(model, options.device, options.steps, options.rounds, options.run, **settings)
    ratios = [a / b for a, b in zip(times["fit"], times["by hand"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    console = Console(highlight=False)
    for name, seconds in times.items():
        console.print(f"{name:8} {1e3 * statistics.median(seconds):9.3f} ms a step")
    console.print(f"fit / by hand: {middle:.3f} ({low:.3f} to {high:.3f}), at most {MOST} is wanted")
    if options.json:
        facts = {
            "device": options.device,
            "torch": torch.__version__,
            "model": options.model,
            "ratio": [low, middle, high],
        }
        options.json.write_text(json.dumps({**facts, "seconds": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
