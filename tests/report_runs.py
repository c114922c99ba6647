"""Networks and runs for the tests of reports; as a program, a training that takes its time and may be killed."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.report import budget

BATCH, ROWS = 8, 44
QUIET: dict[str, Any] = {"progress": "quiet", "metrics": [sg.accuracy]}


def network(options: Any = sg.GraphCompilationOptions.DETERMINISTIC, memory_limit: int | None = None) -> Any:
    """Everything that has state: statistics, a random layer, optimizer buffers; a frozen layer at the start."""
    sg.set_seed(3)
    x, y = sg.Tensor((BATCH, 1, 6, 6), label="x"), sg.Tensor((BATCH,), "int64", label="y")
    graph = sg.Graph()
    h = graph.node(sg.ConvolutionLayer.create(1, 4, kernel_sizes=3, label="fixed"), x, disable_update=True)
    h = graph.node(sg.BatchNormalizationLayer.create(4, label="norm"), h)
    h = graph.node(sg.DropoutLayer(0.2, label="drop"), graph.node(sg.ActivationLayer.relu(label="relu"), h))
    graph.node(sg.FullyConnectedLayer.create(144, 3, label="last"), graph.reshape((BATCH, -1), h))
    training = sg.TrainingGraph(
        [graph], sg.LossLayer.softmax_cross_entropy(label="loss"), sg.AdamOptimizer(learning_rate=0.01)
    )
    training.add_inputs({"picture": x}, {"class": y})
    training.compile(sg.Device.cpu(), options, memory_limit=memory_limit)
    return training


def arrays(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Pictures with one bright row; the class is which."""
    random = np.random.default_rng(seed)
    classes = random.integers(0, 3, rows)
    pictures = random.standard_normal((rows, 1, 6, 6)).astype(np.float32)
    pictures[np.arange(rows), 0, 2 * classes] += 2
    return pictures, classes


def state(training: sg.TrainingGraph) -> list[bytes]:
    """Everything a step changes, bit for bit."""
    tensors = [t for layer in training.layers for t in {**layer.parameters, **layer.statistics}.values()]
    progress = training.progress()
    buffers = [one.numpy().tobytes() for some in progress.buffers.values() for one in some]
    return [t.numpy().tobytes() for t in tensors] + buffers + [repr((progress.stream, progress.time_step)).encode()]


@contextmanager
def time_to_look(seconds: float) -> Iterator[None]:
    """Runs inside may spend so long on looking, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "START", seconds)
        yield


def deep(layers: int) -> Any:
    """A long chain with short cuts, and names that a page must not take for markup."""
    x, y = sg.Tensor((4, 8), label="x"), sg.Tensor((4, 8), label="y")
    graph = sg.Graph()
    h = graph.node(sg.FullyConnectedLayer.create(8, 8, label=NASTY), x)
    for i in range((layers - 2) // 3):
        wide = graph.node(sg.FullyConnectedLayer.create(8, 8, label=f"block {i} wide"), h)
        h = graph.node(sg.ArithmeticLayer(sg.ArithmeticOperation.ADD), h, graph.node(sg.ActivationLayer.tanh(), wide))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=1e-3))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), sg.GraphCompilationOptions.DETERMINISTIC)
    return training


NASTY = "</script><img src=x onerror=alert(1)> \"q\" 'a' & ü→💡 {{style}}"


def slow_training(folder: Path, pause: float, resume: bool) -> None:
    """Trains with a pause in each update, until the end or until somebody kills it."""

    def pausing(prediction: torch.Tensor, labels: torch.Tensor) -> float:
        time.sleep(pause)
        return 0.0

    metrics = {"accuracy": sg.accuracy, "pause": pausing}
    settings = {"epochs": 6, "save_every": 5, "metrics": metrics, "progress": "quiet"}
    sg.fit(network(), arrays(), validation=arrays(9, 1), run=folder, resume=resume, **settings)


if __name__ == "__main__":
    torch.set_num_threads(1)
    slow_training(Path(sys.argv[1]), float(sys.argv[2]), "resume" in sys.argv[3:])
