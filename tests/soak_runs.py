"""Small networks that run for long, and what is left of each call: bytes and objects.

Each `soak_…` works, looks at the memory of the process after a warm-up, works on, and says how much has been added.
"""

import collections
import ctypes
import gc
import json
import linecache
import os
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import fx

import stepgraph as sg

torch.set_num_threads(1)
BATCH, FEATURES = 8, 12
KINDS = (torch.Tensor, fx.Node, fx.Graph, fx.GraphModule, types.FunctionType, type)
MEBIBYTE = 2**20


def network(device: sg.Device, options: sg.GraphCompilationOptions, width: int = 16) -> sg.TrainingGraph:
    """Two fully connected layers with dropout between them, compiled."""
    x, y = sg.Tensor((BATCH, FEATURES)), sg.Tensor((BATCH,), "int64")
    graph = sg.Graph()
    h = graph.node(sg.ActivationLayer.tanh(), graph.node(sg.FullyConnectedLayer.create(FEATURES, width), x))
    graph.node(sg.FullyConnectedLayer.create(width, 3), graph.node(sg.DropoutLayer(0.2), h))
    optimizer = sg.AdamOptimizer(learning_rate=1e-3)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), optimizer)
    training.add_inputs({"x": x}, {"y": y})
    training.compile(device, options)
    return training


def small() -> sg.TrainingGraph:
    """On the CPU; never fused, for PyTorch's compiler, once loaded, stays in memory."""
    return network(sg.Device.cpu(), sg.GraphCompilationOptions.DISABLE_LAYER_FUSION)


def batch(rows: int = BATCH, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    dice = np.random.default_rng(seed)
    return {"x": dice.standard_normal((rows, FEATURES)).astype(np.float32)}, {"y": dice.integers(0, 3, rows)}


def resident() -> int:
    """Bytes of memory this process has now, on Linux, less what its allocator keeps of memory that was given back."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def objects() -> dict[str, int]:
    """How many objects of each kind are alive that a compilation makes, and how much source PyTorch remembers."""
    gc.collect()
    alive = collections.Counter(map(type, gc.get_objects()))
    found = {kind.__name__: sum(n for one, n in alive.items() if issubclass(one, kind)) for kind in KINDS}
    ours = sum(n for one, n in alive.items() if str(getattr(one, "__module__", "")).startswith("stepgraph."))
    return {**found, "stepgraph": ours, "sources": len(linecache.cache)}


def left(before: dict[str, int]) -> dict[str, int]:
    """What there is more of than before."""
    now = objects()
    return {name: count - before[name] for name, count in now.items() if count > before[name]}


def steps(training: sg.TrainingGraph, count: int, rows: int = BATCH) -> None:
    """One data set again and again, as a program that reads each loss does."""
    data = batch(rows)
    for _ in range(count):
        assert training.execute(*data, batch_size=rows).loss >= 0


def soak_steps(_: Path) -> int:
    """20,000 steps."""
    training = small()
    steps(training, 2_000)
    before = resident()
    steps(training, 18_000)
    return resident() - before


def soak_phases(_: Path) -> int:
    """20,000 steps in three passes each."""
    training, (inputs, labels) = small(), batch()

    def phases(count: int) -> None:
        for _ in range(count):
            training.bind_and_write_data(inputs | labels, training.inputs | training.loss_labels, sg.Device.cpu())
            assert training.execute_forward().loss >= 0
            training.execute_gradient()
            training.execute_optimizer_update()

    phases(2_000)
    before = resident()
    phases(18_000)
    return resident() - before


def soak_batch_sizes(_: Path) -> int:
    """20,000 steps with 60 batch sizes in rotation, more than stay compiled."""
    training = small()

    def rotations(count: int) -> None:
        for number in range(60 * count):
            steps(training, 56, rows=1 + number % 60)

    rotations(2)
    before = resident()
    rotations(4)
    return resident() - before


def soak_fit(folder: Path) -> int:
    """20,000 updates of `fit` in two recorded runs with short last batches; the second needs no more than the first."""
    inputs, labels = batch(BATCH * 1_000 - 3)
    training = small()

    def fitted(epochs: int, run: str) -> None:
        sg.fit(training, (inputs, labels), epochs=epochs, run=folder / run, progress="quiet")

    fitted(10, "first")
    before = resident()
    fitted(10, "second")
    return resident() - before


def soak_compiling_again(_: Path) -> int:
    """500 compilations of one graph, with a step each."""
    training = small()
    return _grown(500, lambda: (training.compile(), steps(training, 1)))


def soak_new_graphs(_: Path) -> int:
    """500 graphs, each built, compiled, used and dropped."""
    return _grown(500, lambda: steps(small(), 1))


def soak_leak(_: Path) -> int:
    """500 times 8 KiB that stay, beside garbage in cycles that does not: the bounds of compilations must refuse it."""
    kept = []

    def leak() -> None:
        kept.append(os.urandom(8 * 1024))
        for _ in range(1_000):  # about as much as a compilation leaves
            cycle: list[object] = []
            cycle.append(cycle)

    return _grown(500, leak)


def _grown(times: int, work: Callable[[], object]) -> int:
    _again(times // 10, work)
    before, there = resident(), objects()
    _again(times - times // 10, work)
    grown = resident() - before
    assert not left(there), f"{times} compilations left {left(there)}"
    return grown


def _again(times: int, work: Callable[[], object]) -> None:
    """Works and collects garbage after every tenth time.

    Operators refer to each other in cycles, and Python collects all generations only when garbage is a quarter of what
    lives: about every 75 compilations, later than the warm-up ends. It then keeps the pages in which anything else is.
    """
    for number in range(times):
        work()
        if number % 10 == 9:
            gc.collect()


def tell(soak: Callable[[Path], int], folder: Path) -> None:
    """Soaks in a process of its own and writes down how many bytes it has grown by."""
    (folder / "grown.json").write_text(json.dumps(soak(folder)))
