"""Saved graphs for the tests of the command line, and the command line itself, run in this process."""

from pathlib import Path

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.cli.main import main
from tests.checkpoint_runs import compiled, network, train

CPU = sg.Device.cpu()


class Called:
    """What a command printed, and its exit code."""

    def __init__(self, capture: pytest.CaptureFixture[str], *given: str | Path) -> None:
        capture.readouterr()
        try:
            self.code = main([str(one) for one in given])
        except SystemExit as ended:  # how argparse ends
            self.code = int(ended.code or 0)
        self.out, self.err = capture.readouterr()


def saved_network(folder: Path) -> Path:
    """A trained graph with a statistic, dropout and a layer that is used twice."""
    training = compiled(network())
    train(training, 0, 3)
    return training.save(folder, notes={"step": 3, "who": ["a", "b"]})


def saved_inference(folder: Path) -> Path:
    """An embedding and a bias, for inference; never compiled."""
    sg.set_seed(1)
    words = sg.Tensor((4, 5), "int64", label="words")
    graph = sg.InferenceGraph()
    x = graph.node(sg.EmbeddingLayer.create(7, 3, label="words"), words)
    graph.node(sg.ActivationLayer.tanh(label="squash"), x)
    graph.add_inputs({"words": words})
    return graph.save(folder)


def saved_dense(folder: Path) -> Path:
    """One dense layer and a loss."""
    sg.set_seed(4)
    x, y = sg.Tensor((4, 3), label="x"), sg.Tensor((4, 2), label="y")
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(3, 2, label="dense"), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    return training.save(folder)


def saved_linked(folder: Path) -> Path:
    """Two linked graphs, the first of which reads what the second makes."""
    sg.set_seed(2)
    x, y = sg.Tensor((4, 3), label="x"), sg.Tensor((4, 2), label="y")
    head, tail = sg.Graph(), sg.Graph()
    hidden = head.node(sg.FullyConnectedLayer.create(3, 5, label="head"), x)
    tail.node(sg.FullyConnectedLayer.create(5, 2, label="tail"), hidden)
    one = sg.TrainingGraph([head], None, sg.SGDOptimizer(learning_rate=0.1))
    two = sg.TrainingGraph([tail], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    one.add_inputs({"x": x})
    two.add_inputs({"hidden": hidden}, {"y": y})
    for graph in (one, two):
        graph.compile(CPU, sg.GraphCompilationOptions.LINK_GRAPHS)
    two.link([one])
    return two.save(folder)


class Swish(sg.Layer):
    beta: float = 1.0

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * torch.sigmoid(self.beta * x)


SWISH = """
import torch
import stepgraph as sg


class Swish(sg.Layer):
    beta: float = 1.0

    def forward(self, x, *, scope):
        return x * torch.sigmoid(self.beta * x)
"""


def saved_custom(folder: Path) -> Path:
    """A graph with a layer of the user's own, without a loss."""
    sg.set_seed(3)
    x = sg.Tensor((4, 3), label="x")
    graph = sg.Graph()
    graph.node(Swish(2.0, label="swish"), graph.node(sg.FullyConnectedLayer.create(3, 3, label="dense"), x))
    training = sg.TrainingGraph([graph], None, sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x})
    training.compile(CPU)
    return training.save(folder)


def batch_file(path: Path, rows: int = 6) -> Path:
    """A batch for `saved_network`."""
    generator = np.random.default_rng(7)
    image = generator.standard_normal((rows, 1, 4, 4)).astype(np.float32)
    np.savez(path, image=image, label=generator.integers(0, 3, rows))
    return path
