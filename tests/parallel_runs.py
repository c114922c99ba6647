"""Networks that train in shards, and processes that train them together as torchrun would start them."""

import faulthandler
import hashlib
import os
import signal
import socket
import traceback
from collections.abc import Callable, Container
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

import stepgraph as sg
from stepgraph.compiler.program import PartName, notes
from stepgraph.compiler.step import KeyKind
from stepgraph.runtime.sliced import whole
from stepgraph.runtime.world import leave
from tests.forked import forked

SHARDS, STEPS = 8, 20
SIZES = (13, 16, 5)  # rows of a batch: uneven shards, even ones, and fewer rows than shards
Batch = tuple[dict[str, np.ndarray], ...]


def compiled(training: sg.TrainingGraph, shards: int | None = SHARDS, **settings: Any) -> sg.TrainingGraph:
    parallel = None if shards is None else sg.Parallel(shards, timeout=60, **settings.pop("parallel", {}))
    training.compile("cpu", parallel=parallel, **settings)
    return training


def mlp() -> sg.TrainingGraph:
    """Fully connected layers with momentum; some labels are ignored."""
    x, y, graph = sg.Tensor((sg.BATCH, 6), label="x"), sg.Tensor((sg.BATCH,), "int64", label="y"), sg.Graph()
    graph.dense(graph.tanh(graph.dense(x, 16)), 3)
    loss = sg.LossLayer.softmax_cross_entropy(ignored_label=-1)
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(0.1, momentum=0.9))
    training.add_inputs({"x": x}, {"y": y})
    return training


def cnn() -> sg.TrainingGraph:
    """Convolutions with batch normalization and dropout, for a declared batch size."""
    x, y, graph = sg.Tensor((16, 3, 8, 8), label="x"), sg.Tensor((16,), "int64", label="y"), sg.Graph()
    h = graph.relu(graph.batch_normalization(graph.convolution(x, 4, 3)))
    h = graph.dropout(h, 0.25)
    h = graph.node(sg.GlobalPoolingLayer.average(), graph.convolution(h, 8, 3))
    graph.dense(graph.reshape((16, 8), h), 3)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(0.01))
    training.add_inputs({"x": x}, {"y": y})
    return training


def transformer() -> sg.TrainingGraph:
    """Attention with tied weights, dropout, parameter groups, clipping by the global norm, and averages."""
    words, width = 11, 8
    x, y = sg.Tensor((sg.BATCH, 5), "int64", label="x"), sg.Tensor((sg.BATCH, 5), "int64", label="y")
    embedding, graph = sg.EmbeddingLayer.create(words, width), sg.Graph()
    h = graph.node(embedding, x)
    h = h + graph.dropout(graph.attention(graph.rms_normalization(h), 2, causal=True), 0.1)
    h = h + graph.gated_feed_forward(graph.rms_normalization(h), hidden=12)
    graph.node(sg.FullyConnectedLayer(embedding.weights, None, sg.ConvolutionDescriptor(1, width, words)), h)
    loss = sg.LossLayer.softmax_cross_entropy(axis=-1, ignored_label=-1)
    optimizer = sg.AdamWOptimizer(0.01, weight_decay=0.1, clip_norm=0.5, groups=sg.DECAY_MATRICES_ONLY)
    training = sg.TrainingGraph([graph], loss, optimizer, average=0.9)
    training.add_inputs({"x": x}, {"y": y})
    return training


def heads() -> sg.TrainingGraph:
    """Two losses that divide by different things: labels that count, and weights."""
    x, graph = sg.Tensor((sg.BATCH, 6), label="x"), sg.Graph()
    classes, target = sg.Tensor((sg.BATCH,), "int64", label="y"), sg.Tensor((sg.BATCH, 2), label="t")
    weights = sg.Tensor((sg.BATCH,), label="w")
    h = graph.tanh(graph.dense(x, 8))
    training = sg.TrainingGraph([graph], optimizer=sg.SGDOptimizer(0.1))
    loss = sg.LossLayer.softmax_cross_entropy(ignored_label=-1, label="classes")
    training.node(loss, graph.dense(h, 3), loss_labels=[classes])
    loss = sg.LossLayer.mean_squared_error(divides_by_weights=True, label="target")
    training.node(loss, graph.dense(h, 2), loss_labels=[target, weights])
    training.add_inputs({"x": x}, {"y": classes, "t": target}, {"w": weights})
    return training


def wide(optimizer: sg.Optimizer | None = None) -> sg.TrainingGraph:
    """Parameters of several blocks, of which ranks update slices, with clipping by the global norm and averages."""
    x, y, graph = sg.Tensor((sg.BATCH, 6), label="x"), sg.Tensor((sg.BATCH,), "int64", label="y"), sg.Graph()
    graph.dense(graph.tanh(graph.dense(x, 1400)), 3)
    rule = optimizer or sg.AdamWOptimizer(0.01, clip_norm=0.1, groups=sg.DECAY_MATRICES_ONLY, weight_decay=0.1)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(ignored_label=-1), rule, average=0.9)
    training.add_inputs({"x": x}, {"y": y})
    return training


def orthogonal() -> sg.TrainingGraph:
    """Matrices that ranks update whole, since their rule needs all of one; biases that they cut."""
    return wide(sg.MuonOptimizer(0.01))


class Module(torch.nn.Module):
    """A PyTorch model with a residual connection, normalization and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scores = torch.nn.Linear(6, 12), torch.nn.Linear(12, 12), torch.nn.Linear(12, 3)
        self.rows, self.dropout = torch.nn.LayerNorm(12), torch.nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(self.first(x))
        hidden = hidden + self.dropout(self.second(self.rows(hidden)))
        return self.scores(hidden)


def imported() -> sg.TrainingGraph:
    """A PyTorch model, with parameter groups, clipping by the global norm, and averages."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = Module()
    found = sg.from_torch(model, {"x": torch.zeros(4, 6)}, check=False)
    optimizer = sg.AdamWOptimizer(0.01, weight_decay=0.1, clip_norm=0.5, groups=sg.DECAY_MATRICES_ONLY)
    training = sg.TrainingGraph(
        [found.graph], sg.LossLayer.softmax_cross_entropy(ignored_label=-1), optimizer, average=0.9
    )
    training.add_inputs(found.inputs, {"y": sg.Tensor((sg.BATCH,), "int64", label="y")})
    return training


NETWORKS: dict[str, Callable[[], sg.TrainingGraph]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "heads": heads,
    "wide": wide,
    "orthogonal": orthogonal,
    "imported": imported,
}


def batch(name: str, rows: int, seed: int) -> Batch:
    """Data of a network; some labels are ignored."""
    random = np.random.default_rng(seed)
    if name == "transformer":
        words = random.integers(0, 11, (rows, 6))
        return {"x": words[:, :-1]}, {"y": np.where(random.random((rows, 5)) < 0.3, -1, words[:, 1:])}
    shape = (rows, 3, 8, 8) if name == "cnn" else (rows, 6)
    x = random.standard_normal(shape).astype(np.float32)
    y = x.reshape(rows, -1)[:, :3].argmax(1)
    counted = y if name == "cnn" else np.where(np.arange(rows) % 4 == 1, -1, y)
    if name != "heads":
        return {"x": x}, {"y": counted}
    target = x[:, :2] * 2
    return {"x": x}, {"y": counted, "t": target}, {"w": random.random(rows).astype(np.float32)}


def new(name: str, **settings: Any) -> sg.TrainingGraph:
    """A network that starts with the same numbers each time."""
    sg.set_seed(5)
    return compiled(NETWORKS[name](), **settings)


def trained(name: str, steps: int = STEPS) -> dict[str, str]:
    """Trains a network in shards; the bits of everything it has then, and of its losses and predictions."""
    training = new(name)
    training.keep_predictions()
    losses, predictions = [], hashlib.sha256()
    for step in range(steps):
        rows = SIZES[step % len(SIZES)]
        losses.append(training.execute(*batch(name, rows, step), batch_size=rows).losses)
        for tensor in training.require_session("test").compilation.compared:
            assert tensor.torch().shape[0] == rows
            predictions.update(tensor.torch().numpy().tobytes())
    if name == "cnn":  # an inference graph chooses kernels by itself
        predictions.update(sg.predict(training, batch(name, 9, 0)[0])["output"].tobytes())
    return {
        **marks(training),
        "losses": repr(losses),
        "predictions": predictions.hexdigest(),
        "kernels": kernels(training),
    }


def kernels(training: sg.TrainingGraph) -> str:
    """The implementations that shards run, which are the same on every rank."""
    programs = training.require_session("test").compilation.programs
    part = next(one.part for (name, _), one in programs.executables.items() if name is PartName.SHARD)
    return repr([notes(node).implementation for node in part.nodes if notes(node).implementation])


def marks(training: sg.TrainingGraph) -> dict[str, str]:
    """The bits of parameters, statistics, optimizer state and averages, and the position of the random stream.

    Every rank must ask, since each has only a part of the optimizer state and the averages.
    """
    session = training.require_session("test")
    found: dict[str, Any] = {}
    sliced = (KeyKind.STATE, KeyKind.AVERAGE)
    arrays = [(key.kind, array) for key, array in session.arrays().items() if key.kind not in sliced]
    for buffers in training.progress().buffers.values():
        arrays += [(KeyKind.STATE, whole(one, "state")) for one in buffers]
    if training.average is not None:
        arrays += [(KeyKind.AVERAGE, one) for one in training.averages.values()]
    for kind, array in arrays:
        found.setdefault(kind, hashlib.sha256()).update(array.contiguous().numpy().tobytes())
    assert KeyKind.VALUE in found and KeyKind.STREAM in found
    return {kind: one.hexdigest() for kind, one in found.items()}


REFUSED = {
    "label": ["row 11 holds the class index 99", "found by      rank 1 of 2"],
    "batch": ["ranks 0 and 1 have different batches, of 13 and 13 rows"],
    "failure": ["rank 1 failed in this step; nothing has changed"],
    "write": ["rank 1 has written to 'Convolution1.weights' since the last update, and rank 0 has not"],
}


def first_weights(training: sg.TrainingGraph) -> sg.Tensor:
    return next(layer.parameters["weights"] for layer in training.layers if "weights" in layer.parameters)


def expect_refusal(kind: str, first: str, second: str) -> None:
    """Two ranks have refused an update: both say why, but for the one that failed, which has an error of its own."""
    for text in REFUSED[kind]:
        assert text in first, first
        assert kind == "failure" or text in second, second
    assert kind != "failure" or "out of order" in second


# fit


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    (inputs, labels) = batch("mlp", count, 9)
    return inputs["x"], labels["y"]


def fitted(folder: str, epochs: int, **settings: Any) -> dict[str, Any]:
    """Trains up to an epoch, from the latest checkpoint if there is one; other ranks begin with other numbers."""
    sg.set_seed(3 + int(os.environ.get("RANK", "0")))
    training = compiled(NETWORKS[settings.pop("network", "mlp")]())
    data = {"validation": rows(9), "batch_size": 13, "metrics": ["accuracy"], "progress": "plain", **settings}
    history = sg.fit(training, rows(44), epochs=epochs, checkpoints=folder, resume=True, **data)
    times = ("seconds", "waiting")
    timeless = [{name: one for name, one in row.items() if name not in times} for row in history.epochs]
    return {"epochs": timeless, "steps": history.steps, "marks": marks(training), "stopped": history.stopped}


# Several processes


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _rank(rank: int, world: int, port: int, job: Callable[..., Any], given: tuple[Any, ...], back: Connection) -> None:
    faulthandler.enable()  # says where it was if it crashes
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the process it is forked from ignores it
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in places.items()} | {"MASTER_ADDR": "127.0.0.1"}
    try:
        back.send((job(*given), None))
    except BaseException as error:  # the test shows it
        back.send((f"{type(error).__name__}: {error}", traceback.format_exc()))
    leave()  # a process of this kind ends without what is registered for its end


def together(
    world: int, job: Callable[..., Any], *given: Any, lost: Container[int] = (), timeout: float = 300
) -> list[Any]:
    """What a function returns on each rank; what it raised is text. Ranks that are `lost` give no answer."""
    context = forked()
    port, ends = _free_port(), [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(target=_rank, args=(rank, world, port, job, given, ends[rank][1]), daemon=True)
        for rank in range(world)
    ]
    for one in ranks:
        one.start()
    answering = [(end, ranks[rank]) for rank, (end, _) in enumerate(ends) if rank not in lost]
    for end, one in answering:
        wait([end, one.sentinel], timeout)  # whichever comes first: it may crash
    found = [end.recv() if end.poll() else ("silent", "no answer") for end, _ in answering]
    for rank, one in enumerate(ranks):
        one.join(0 if rank in lost else 30)
        one.kill()
        assert rank in lost or one.exitcode == 0, f"a rank ended with {one.exitcode}"
    return [answer for answer, _ in found]
