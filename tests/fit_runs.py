"""A small network with everything that has state, its data, and a process that is interrupted while it trains."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stepgraph as sg

torch.set_num_threads(1)
BATCH, FEATURES, CLASSES, ROWS = 8, 5, 3, 44


def network(optimizer: sg.Optimizer | None = None, loss: sg.Layer | None = None, dropout: float = 0.2) -> Any:
    """Batch normalization and dropout between two fully connected layers; compiled for the CPU."""
    sg.set_seed(3)
    x, y = sg.Tensor((BATCH, FEATURES), label="x"), sg.Tensor((BATCH,), "int64", label="y")
    graph = sg.Graph()
    h = graph.node(sg.FullyConnectedLayer.create(FEATURES, 16, label="first"), x)
    h = graph.node(sg.DropoutLayer(dropout), graph.node(sg.ActivationLayer.tanh(), h))
    graph.node(sg.FullyConnectedLayer.create(16, CLASSES, label="second"), h)
    optimizer = optimizer or sg.AdamOptimizer(learning_rate=0.01)
    training = sg.TrainingGraph([graph], loss or sg.LossLayer.softmax_cross_entropy(), optimizer)
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), sg.GraphCompilationOptions.DETERMINISTIC)
    return training


@cache
def _first(make: Callable[[], Any], which: int) -> tuple[Any, str]:
    """A compiled network and a folder with its first state."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    training = make()
    training.save(folder)
    return training, folder


def renewed(which: int = 0, make: Callable[[], Any] = network) -> Any:
    """A network as `make` makes it, compiled once in a process; each number is another one."""
    training, folder = _first(make, which)
    training.restore(folder)
    return training


def arrays(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows whose class is the largest of three features."""
    x = np.random.default_rng(seed).standard_normal((rows, FEATURES)).astype(np.float32)
    return x, x[:, :CLASSES].argmax(axis=1)


def parameters(training: sg.TrainingGraph) -> list[bytes]:
    """All parameters and optimizer buffers, bit for bit."""
    tensors = [t for layer in training.layers for t in {**layer.parameters, **layer.statistics}.values()]
    return [bytes(t.numpy().tobytes()) for t in tensors] + [
        bytes(one.bytes) for t in tensors for one in t.optimizer_data
    ]


SETTINGS: dict[str, Any] = {"epochs": 4, "metrics": [sg.accuracy, sg.ConfusionMatrix(CLASSES)], "progress": "quiet"}


def interrupted_run(folder: Path, step: int) -> None:
    """Trains until a metric, called in update `step`, sends this very process what Ctrl-C sends."""
    count = 0

    def alarming(prediction: torch.Tensor, labels: torch.Tensor) -> float:
        nonlocal count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGINT)
        return 0.0

    metrics = {"accuracy": sg.accuracy, "confusion": sg.ConfusionMatrix(CLASSES), "alarm": alarming}
    settings = {**SETTINGS, "metrics": metrics, "progress": "plain"}
    history = sg.fit(network(), arrays(), validation=arrays(9, 1), checkpoints=folder, **settings)
    print(history.stopped, signal.getsignal(signal.SIGINT) is signal.default_int_handler)


if __name__ == "__main__":
    interrupted_run(Path(sys.argv[1]), int(sys.argv[2]))
