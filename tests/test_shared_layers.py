"""Tied weights, layers in two graphs and graphs trained in turn, against the same networks in PyTorch."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph as sg

CPU = sg.Device.cpu()
ROWS, CLASSES, WIDTH = 8, 6, 4


def tied() -> tuple[sg.TrainingGraph, sg.EmbeddingLayer]:
    """Words to vectors and back with one dictionary."""
    sg.set_seed(1)
    words, following, graph = sg.Tensor((ROWS,), "int64"), sg.Tensor((ROWS,), "int64"), sg.Graph()
    embedding = sg.EmbeddingLayer.create(CLASSES, WIDTH)
    scores = sg.FullyConnectedLayer(embedding.weights, None, sg.ConvolutionDescriptor(1, WIDTH, CLASSES), label="out")
    graph.node(scores, graph.node(sg.ActivationLayer.tanh(), graph.node(embedding, words)))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.5))
    training.add_inputs({"words": words}, {"following": following})
    training.compile(CPU)
    return training, embedding


def test_tied_weights_train_as_in_pytorch_and_stay_tied_in_files(tmp_path: Path) -> None:
    training, embedding = tied()
    table = embedding.weights.torch().clone().requires_grad_()
    words = np.arange(ROWS) % CLASSES
    following = (words + 1) % CLASSES
    data = {"words": words}, {"following": following}
    for _ in range(10):
        scores = torch.tanh(F.embedding(torch.from_numpy(words), table)) @ table.T
        loss = F.cross_entropy(scores, torch.from_numpy(following))
        (gradient,) = torch.autograd.grad(loss, table)
        table = (table - 0.5 * gradient).detach().requires_grad_()
        assert training.execute(*data).loss == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(embedding.weights.numpy(), table.detach(), rtol=1e-4, atol=1e-6)
    (total,) = (line for line in str(training).splitlines() if re.match(r" *\d+ nodes", line))
    assert total.split()[-1] == f"{CLASSES * WIDTH}"  # the dictionary counts once
    sg.save(tmp_path / "model", training)
    loaded = sg.load(tmp_path / "model", CPU)
    assert loaded.layers[0].weights is loaded.layers[2].weights
    assert loaded.execute(*data).loss == training.execute(*data).loss


class Pair:
    """A generator's graph that reads a discriminator it does not train, and the discriminator's own."""

    def __init__(self) -> None:
        sg.set_seed(3)
        self.maker = sg.FullyConnectedLayer.create(3, 2, label="maker")
        self.judge = [sg.FullyConnectedLayer.create(2, 8, label="seen"), sg.FullyConnectedLayer.create(8, 1)]
        noise, seen = sg.Tensor((ROWS, 3)), sg.Tensor((2 * ROWS, 2))
        made, judged = sg.Graph(), sg.Graph()
        self.image = made.node(self.maker, noise)
        self._judge(made, self.image, frozen=True)
        self._judge(judged, seen, frozen=False)
        self.generator = self._training(made, {"noise": noise})
        self.generator.add_outputs({"image": self.image})
        self.discriminator = self._training(judged, {"seen": seen})

    def _judge(self, graph: sg.Graph, x: sg.Tensor, frozen: bool) -> sg.Tensor:
        first, second = self.judge
        hidden = graph.node(sg.ActivationLayer.tanh(), graph.node(first, x, disable_update=frozen))
        return graph.node(second, hidden, disable_update=frozen)

    def _training(self, graph: sg.Graph, inputs: dict[str, sg.Tensor]) -> sg.TrainingGraph:
        (x,) = inputs.values()
        optimizer = sg.AdamOptimizer(learning_rate=0.01)
        training = sg.TrainingGraph([graph], sg.LossLayer.sigmoid_cross_entropy(), optimizer)
        training.add_inputs(inputs, {"real": sg.Tensor((x.shape[0], 1))})
        training.compile(CPU)
        return training

    @property
    def layers(self) -> list[sg.FullyConnectedLayer]:
        return [self.maker, *self.judge]


def data(round_: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(round_)
    return generator.standard_normal((ROWS, 3), np.float32), generator.standard_normal((ROWS, 2), np.float32) + 2


def test_two_graphs_over_the_same_layers_train_in_turn_as_in_pytorch(tmp_path: Path) -> None:
    pair = Pair()
    modules = [torch.nn.Linear(3, 2), torch.nn.Linear(2, 8), torch.nn.Linear(8, 1)]
    for layer, module in zip(pair.layers, modules, strict=True):
        assert layer.biases is not None
        module.weight.data.copy_(layer.weights.torch())
        module.bias.data.copy_(layer.biases.torch())
    maker, judge = modules[0], torch.nn.Sequential(modules[1], torch.nn.Tanh(), modules[2])
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.01) for part in (maker, judge)]
    labels = np.repeat(np.float32([[1], [0]]), ROWS, 0)
    for round_ in range(6):
        noise, real = data(round_)
        loss = F.binary_cross_entropy_with_logits(judge(maker(torch.from_numpy(noise))), torch.ones(ROWS, 1))
        optimizers[0].zero_grad()
        loss.backward()
        image = maker(torch.from_numpy(noise)).detach()
        optimizers[0].step()
        assert pair.generator.execute({"noise": noise}, {"real": labels[:ROWS]}).loss == pytest.approx(
            loss.item(), rel=1e-4
        )
        np.testing.assert_allclose(pair.image.numpy(), image, rtol=1e-3, atol=1e-5)
        seen = np.concatenate([real, pair.image.numpy()])
        loss = F.binary_cross_entropy_with_logits(judge(torch.from_numpy(seen)), torch.from_numpy(labels))
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        assert pair.discriminator.execute({"seen": seen}, {"real": labels}).loss == pytest.approx(loss.item(), rel=1e-4)


def test_a_frozen_use_of_a_layer_trains_nothing_and_sees_every_update() -> None:
    pair = Pair()
    noise, real = data(0)
    ones, before = np.ones((ROWS, 1), np.float32), [layer.weights.numpy().copy() for layer in pair.layers]
    pair.generator.execute({"noise": noise}, {"real": ones})
    changed = [not np.array_equal(a, layer.weights.numpy()) for a, layer in zip(before, pair.layers, strict=True)]
    assert changed == [True, False, False]
    before = [layer.weights.numpy().copy() for layer in pair.layers]
    pair.discriminator.execute({"seen": np.concatenate([real, real])}, {"real": np.concatenate([ones, ones])})
    changed = [not np.array_equal(a, layer.weights.numpy()) for a, layer in zip(before, pair.layers, strict=True)]
    assert changed == [False, True, True]


def test_each_of_two_graphs_is_saved_and_restored_with_the_layers_they_share(tmp_path: Path) -> None:
    pair, again = Pair(), Pair()
    noise, real = data(0)
    ones = np.ones((ROWS, 1), np.float32)
    for one in (pair.generator, pair.discriminator):
        name = "noise" if one is pair.generator else "seen"
        given = noise if one is pair.generator else np.concatenate([real, real])
        one.execute({name: given}, {"real": ones if one is pair.generator else np.concatenate([ones, ones])})
    pair.generator.save(tmp_path / "generator")
    pair.discriminator.save(tmp_path / "discriminator")
    again.generator.restore(tmp_path / "generator")
    again.discriminator.restore(tmp_path / "discriminator")
    for one, other in zip(pair.layers, again.layers, strict=True):
        assert np.array_equal(one.weights.numpy(), other.weights.numpy())
    call = {"noise": noise}, {"real": ones}
    assert again.generator.execute(*call).loss == pair.generator.execute(*call).loss


def test_an_inference_graph_of_its_own_reads_a_trained_layer() -> None:
    pair = Pair()
    noise = sg.Tensor((ROWS, 3))
    graph = sg.Graph()
    image = graph.node(pair.maker, noise)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"noise": noise})
    inference.add_outputs({"image": image})
    inference.compile(CPU)
    given = data(0)[0]
    pair.generator.execute({"noise": given}, {"real": np.ones((ROWS, 1), np.float32)})
    inference.execute({"noise": given})
    assert pair.maker.biases is not None
    wanted = given @ pair.maker.weights.numpy().T + pair.maker.biases.numpy()
    np.testing.assert_allclose(image.numpy(), wanted, rtol=1e-5, atol=1e-6)
