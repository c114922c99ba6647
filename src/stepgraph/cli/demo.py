"""`stepgraph demo`: a small network, wired, compiled and trained in seconds."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stepgraph.cli import device_argument, opening
from stepgraph.errors import StorageError

if TYPE_CHECKING:
    import numpy as np

    from stepgraph.graphs.training import TrainingGraph

HELP = "train a small network in seconds, as a demonstration"
BATCH, SEEN, UNSEEN, RATE = 64, 3000, 1000, 1e-2

EXAMPLES = """
examples:
  stepgraph demo
  stepgraph demo --save run/demo
  stepgraph demo --device gpu:bfloat16 --epochs 10
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `demo`."""
    parser.epilog = f"{device_argument.SYNTAX}{EXAMPLES}"
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        type=device_argument.parse,
        default=device_argument.parse("any"),
        help="where to train (any)",
    )
    parser.add_argument("--epochs", metavar="NUMBER", type=_count, default=5, help="passes over all pictures (5)")
    parser.add_argument(
        "--seed", metavar="NUMBER", type=opening.seed, default=0, help="the seed of all random numbers (0)"
    )
    parser.add_argument(
        "--save",
        metavar="FOLDER",
        type=Path,
        help="keep the trained graph and the record of its training in this new folder",
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of epochs: use a number ≥ 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Draws, wires, compiles, trains and tests, and reports each step."""
    import stepgraph as sg
    from stepgraph.cli import screen, shapes

    device = arguments.device.device()
    _require_new(arguments.save)
    began = time.perf_counter()
    seen, unseen = shapes.draw(SEEN, arguments.seed), shapes.draw(UNSEEN, arguments.seed + 1)
    first = [int((seen[1] == kind).argmax()) for kind in range(len(shapes.NAMES))]
    count, side = f"{SEEN + UNSEEN:,}", shapes.SIZE
    screen.show(f"{count} pictures of {side}×{side} pixels, drawn by formula and noisy. Which shape is it?", "")
    screen.show(shapes.as_text(seen[0][first], list(shapes.NAMES), screen.width()), "")
    sg.set_seed(arguments.seed)
    training = network()
    training.compile(device, **arguments.device.compilation)
    screen.show(training, "", f"Training on {SEEN:,} of them:")
    schedule = sg.WarmupCosine(RATE, warmup=20)
    settings = {"epochs": arguments.epochs, "metrics": [sg.accuracy], "schedule": schedule, "run": arguments.save}
    history = sg.fit(training, seen, validation=unseen, **settings)
    if history.stopped == "interrupted":
        raise KeyboardInterrupt
    right = history["validation accuracy"][-1]
    screen.show("", f"It recognizes {right:.1%} of the other {UNSEEN:,}, unseen in training. Four of them:", "")
    screen.show(_guesses(training, unseen), "", f"{time.perf_counter() - began:.1f} s in total, on {device}.")
    _show_next(training, arguments.save)
    return 0


def network() -> TrainingGraph:
    """Two convolutions and a dense layer, with a loss and an optimizer; not compiled."""
    import stepgraph as sg
    from stepgraph.cli import shapes

    picture = sg.Tensor.image(shapes.SIZE, shapes.SIZE, channels=1, batch_size=BATCH, label="picture")
    shape = sg.Tensor((BATCH,), "int64", label="shape")
    graph = sg.Graph()
    x: sg.Tensor = picture
    for inputs, outputs in ((1, 8), (8, 16)):
        x = graph.node(sg.ConvolutionLayer.create(inputs, outputs, kernel_sizes=3), x)
        x = graph.node(sg.PoolingLayer.max(2), graph.node(sg.ActivationLayer.relu(), x))
    flat = graph.reshape((BATCH, -1), x)
    graph.node(sg.FullyConnectedLayer.create(flat.shape[1], len(shapes.NAMES)), flat)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=RATE))
    training.add_inputs({"picture": picture}, loss_labels={"shape": shape})
    return training


def _guesses(training: TrainingGraph, unseen: tuple[np.ndarray, np.ndarray]) -> str:
    """A few pictures and the network's predictions: an inference graph shares the parameters."""
    import stepgraph as sg
    from stepgraph.cli import screen, shapes

    inference = sg.InferenceGraph([training])
    inference.add_inputs(training.inputs)
    inference.compile(training.device)
    found = inference.execute({"picture": unseen[0][:4]}, batch_size=4).result
    assert found is not None
    names = [f"{shapes.NAMES[kind]}?" for kind in found.torch().argmax(dim=1).tolist()]
    return shapes.as_text(unseen[0][:4], names, screen.width())


def _require_new(folder: Path | None) -> None:
    """Rejects, before training, a path that is not a new or empty folder."""
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StorageError(f"{folder}", "it exists and is not an empty folder", fix="use a new folder")


def _show_next(training: TrainingGraph, folder: Path | None) -> None:
    from stepgraph.cli import screen

    if folder is None:
        screen.show("", "Next: `stepgraph demo --save FOLDER` keeps the graph for other commands.")
        return
    saved = training.save(folder, notes={"made by": "stepgraph demo"})
    commands = {
        f"stepgraph inspect {saved}": "its layers, parameters and memory by batch size",
        f"stepgraph inspect {saved} --no-plan --svg demo.svg": "a drawing for your browser",
        f"stepgraph report {saved} --open": "how training went: curves, gradients, time and memory by layer",
        f"stepgraph compare --devices cpu:deterministic,cpu:default {saved}": "chosen kernels against PyTorch's own",
    }
    screen.show("", f"Saved in {saved}. Next:", *(f"  {command}\n      {what}" for command, what in commands.items()))
