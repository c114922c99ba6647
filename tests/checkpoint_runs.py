"""A small network with everything that has state, and the processes that train it until they are killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stepgraph as sg
from stepgraph.checkpoint import files

torch.set_num_threads(1)  # processes fork from one that has imported this
CPU = sg.Device.cpu()
BATCH, CLASSES = 6, 3


def network(optimizer: sg.Optimizer | None = None, seed: int = 5, classes: int = CLASSES) -> sg.TrainingGraph:
    """Convolution, batch normalization, dropout and a layer used twice; not compiled."""
    sg.set_seed(seed)
    image, label = sg.Tensor((BATCH, 1, 4, 4), label="image"), sg.Tensor((BATCH,), "int64", label="label")
    graph = sg.Graph()
    x = graph.node(sg.ConvolutionLayer.create(1, 2, kernel_sizes=3, label="conv"), image)
    x = graph.node(sg.BatchNormalizationLayer.create(2, label="norm"), x)
    x = graph.node(sg.DropoutLayer(0.2, label="drop"), graph.node(sg.ActivationLayer.tanh(), x))
    square = sg.FullyConnectedLayer.create(32, 32, label="square")
    x = graph.node(square, graph.node(square, graph.reshape((BATCH, -1), x)))
    graph.node(sg.FullyConnectedLayer.create(32, classes, label="out"), x)
    optimizer = optimizer or sg.AdamOptimizer(learning_rate=0.01, uses_ams_grad=True)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), optimizer)
    training.add_inputs({"image": image}, {"label": label})
    return training


def compiled(training: sg.TrainingGraph, **settings: Any) -> sg.TrainingGraph:
    training.compile(CPU, sg.GraphCompilationOptions.DETERMINISTIC, **settings)
    return training


def batch(step: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    generator = np.random.default_rng(step)
    images = generator.standard_normal((BATCH, 1, 4, 4)).astype(np.float32)
    return {"image": images}, {"label": generator.integers(0, CLASSES, BATCH)}


def train(training: sg.TrainingGraph, start: int, stop: int) -> list[float]:
    return [training.execute(*batch(step)).loss for step in range(start, stop)]


def state(training: sg.TrainingGraph) -> dict[str, Any]:
    """Everything a user can read of a training graph's state, as bytes and numbers."""
    optimizer, found = training.optimizer, {"scale": training.loss_scale}
    for i, layer in enumerate(training.layers):
        for name, tensor in {**layer.parameters, **layer.statistics, **layer.constants}.items():
            buffers = [bytes(data.bytes) for data in tensor.optimizer_data]
            found[f"{i}.{name}"] = tensor.torch().contiguous().view(torch.uint8).numpy().tobytes(), buffers
    return found | ({} if optimizer is None else {**optimizer.numbers(), "clips": optimizer.applies_gradient_clipping})


def train_until_killed(folder: Path) -> None:
    """What a user's program does: go on from the latest checkpoint, save after each step."""
    training, step = compiled(network()), 0
    if sg.latest(folder) is not None:
        step = training.restore(folder).notes["step"]
    while True:
        train(training, step, step + 1)
        step += 1
        training.save(folder, keep=2, notes={"step": step})


def kill_at_every_file_operation(folder: Path) -> None:
    """Replaces a checkpoint again and again, killed before and after each thing it does to the file system."""
    series, single = folder / "series", folder / "single"
    training = compiled(network())
    for save in (lambda: training.save(single), lambda: training.save(series, keep=1)):
        save()
        train(training, 0, 1)
        deaths = 0
        for operation in range(1000):
            before = {one: files.read(one).description["graphs"] for one in (single, series) if one.exists()}
            died = _killed_at(operation, save)
            for one, old in before.items():
                after = sg.load(one)._pending.stream  # every byte is verified
                assert after in (old[0]["progress"]["stream"], training.progress().stream), operation
            if not died:
                break
            deaths += 1
        assert deaths >= 16, deaths
        assert len(list(series.iterdir())) == 1 if series.exists() else True
        assert len(list(single.iterdir())) == 2


def _killed_at(operation: int, save: Callable[[], object]) -> bool:
    """Runs `save` in a fork that kills itself at one moment; whether it came to that."""
    process = os.fork()
    if process == 0:
        count = 0

        def deadly(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **settings: Any) -> Any:
                nonlocal count
                for run in (None, function):
                    found = run(*arguments, **settings) if run else None
                    if count == operation:
                        os.kill(os.getpid(), signal.SIGKILL)
                    count += 1
                return found

            return call

        os.fsync, files.save_file = deadly(os.fsync), deadly(files.save_file)
        for name in ("mkdir", "replace", "unlink", "rmdir"):
            setattr(Path, name, deadly(getattr(Path, name)))
        save()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
