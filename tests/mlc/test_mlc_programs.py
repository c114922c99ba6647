"""Real programs that drove ML Compute, ported line by line (`examples/mlc`), reach the numbers they reached."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph.mlc as MLCompute
from examples.mlc import (
    digits_mlp,
    drawing_classifier,
    image_fitting,
    inference_suite,
    inference_zoo,
    linear_regression,
    q_network,
    rmsprop_training,
)

DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


def device(kind: str) -> Any:
    return MLCompute.MLCDevice.cpuDevice() if kind == "cpu" else MLCompute.MLCDevice.gpuDevice()


@pytest.mark.parametrize("kind", DEVICES)
def test_linear_regression(kind: str) -> None:
    found = linear_regression.fit(device(kind))
    rows = found["rows"]
    assert np.array_equal(rows[0], np.zeros(4))
    assert np.allclose(rows[100], [5.0072, 6.9910, 8.9748, 10.9586], atol=1e-3)
    assert np.allclose(rows[200], [5.0000, 7.0000, 9.0001, 11.0001], atol=1e-3)
    assert np.allclose(found["after"], [2, 5], atol=1e-3)
    assert np.allclose(found["predictions"][0], [13, 15, 17, 19], atol=1e-2)
    if kind == "gpu":  # the host sees the new weights only after synchronizeUpdates
        assert found["before"] == [0, 0]


def test_digits_mlp() -> None:
    found = digits_mlp.run(MLCompute.MLCDevice.cpuDevice())
    losses = np.array(found["losses"])
    assert losses.min() > 1.4612 - 1e-4 and losses.max() < 2.4612  # two softmaxes confine it
    assert found["accuracies"][0] > 0.85 and found["test"] > 0.95


def test_digits_mlp_reads_the_softmax_of_its_own_step() -> None:
    x, y, _, _ = digits_mlp.digits()
    network = digits_mlp.Network(MLCompute.MLCDevice.cpuDevice())
    hidden, last = (layer.native for layer in network.training.layers() if "Fully" in layer.label())
    w1, b1, w2, b2 = (
        torch.tensor(t.numpy().copy()) for t in (hidden.weights, hidden.biases, last.weights, last.biases)
    )
    images = torch.from_numpy(x[:32])
    wanted = torch.softmax(
        F.linear(torch.relu(F.linear(images, w1.view(128, 784), b1.view(-1))), w2.view(10, 128), b2.view(-1)), 1
    )
    loss, _ = network.train(x[:32], y[:32])
    assert np.allclose(network.seen, wanted, atol=1e-5)
    assert math.isclose(loss, float(F.cross_entropy(wanted, torch.from_numpy(y[:32]))), rel_tol=1e-5)


@pytest.mark.parametrize("kind", DEVICES)
def test_inference_suite(kind: str) -> None:
    where = device(kind)
    sums = inference_suite.added(where)
    assert np.allclose(sums, [[[8, 10, 12]], [[14, 16, 18]], [[29, 31, 33]]], atol=1e-4)
    assert np.allclose(inference_suite.chained(where), [[3, 3, 3]], atol=1e-4)
    pixels = np.array([[0.3, 0.6, 0.9], [1.2, 1.5, 1.8]])
    first, last = inference_suite.channels_first(where), inference_suite.channels_last(where)
    assert first.shape == (1, 1, 2, 3) and np.allclose(first[0, 0], pixels, atol=1e-4)
    assert last.shape == (1, 2, 3, 1) and np.allclose(last[0, ..., 0], pixels, atol=1e-4)
    assert np.allclose(inference_suite.dense(2, where), [[5]], atol=1e-4)
    assert np.allclose(inference_suite.dense(1, where), [[4]], atol=1e-4)


@pytest.mark.deep
@pytest.mark.parametrize("offset", list(rmsprop_training.CASES))
def test_rmsprop_training_from_twenty_starts(offset: float) -> None:
    for start in np.random.default_rng(3).random(20):
        found = rmsprop_training.fit(offset, float(start))
        assert abs(found["weight"] - 0.47) < 0.01 and abs(found["bias"] - offset) < 0.01, start
    assert found["shapes"] == [[2, 1]] * 100 and found["sources"] == [found["x"]]


class Reference:
    """The drawing classifier in plain PyTorch: TensorFlow's Adam, each drawing's weighted softmax cross entropy."""

    def __init__(self, weights: dict[str, np.ndarray]) -> None:
        self.p = {name: torch.tensor(values.copy(), requires_grad=True) for name, values in weights.items()}
        self.m = {name: torch.zeros_like(one) for name, one in self.p.items()}
        self.v = {name: torch.zeros_like(one) for name, one in self.p.items()}
        self.t, self.rate = 0, 1e-3

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            x = F.max_pool2d(F.relu(F.conv2d(x, self.p[f"conv{i}_weight"], self.p[f"conv{i}_bias"], padding=1)), 2)
        x = F.relu(F.linear(x.flatten(1), self.p["dense0_weight"], self.p["dense0_bias"]))
        return F.linear(x, self.p["dense1_weight"], self.p["dense1_bias"])

    def step(self, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        losses = F.cross_entropy(self.logits(x), y, reduction="none") * w
        gradients = dict(zip(self.p, torch.autograd.grad(losses.sum(), list(self.p.values())), strict=True))
        self.t += 1
        rate = self.rate * math.sqrt(1 - 0.999**self.t) / (1 - 0.9**self.t)
        with torch.no_grad():
            for name, g in gradients.items():
                self.m[name].mul_(0.9).add_(0.1 * g)
                self.v[name].mul_(0.999).add_(0.001 * g * g)
                self.p[name] -= rate * self.m[name] / (self.v[name].sqrt() + 1e-8)
            return losses.numpy(), torch.softmax(self.logits(x), 1).numpy()


def test_drawing_classifier() -> None:
    batch, classes = 16, 10
    weights = drawing_classifier.first_weights(classes)
    reference = Reference(weights)
    classifier = drawing_classifier.DrawingClassifier(weights, batch, classes, MLCompute.MLCDevice.cpuDevice())
    assert sum(one.size for one in weights.values()) == 160 + 4640 + 18496 + 73856 + 129 * classes
    images, labels = drawing_classifier.drawings(10 * batch)
    # Enlarged digits have plateaus, where the last bit of a convolution decides which of equal pixels max pooling picks.
    images = (images + 0.1 * np.random.default_rng(1).random(images.shape)).astype(np.float32)
    importance = np.random.default_rng(0).uniform(0.5, 1.5, batch).astype(np.float32)
    for i in range(10):
        if i == 5:
            classifier.set_learning_rate(5e-4)
            reference.rate = 5e-4
        rows = slice(i * batch, (i + 1) * batch)
        losses, probabilities = classifier.step(images[rows], labels[rows], importance)
        classifier.wait()
        wanted, after = reference.step(*map(torch.from_numpy, (images[rows], labels[rows], importance)))
        assert np.allclose(losses[0], wanted, rtol=1e-4)
        assert np.allclose(probabilities[0], after, atol=1e-4)  # queued behind the step, inference sees its weights
    classifier.training.synchronizeUpdates()
    for name, values in weights.items():  # the caller's own arrays
        assert np.allclose(values, reference.p[name].detach(), atol=1e-3), name
    assert [layer.label() for layer in classifier.inference.layers()][-1] == "Softmax"
    assert "Softmax" not in [layer.label() for layer in classifier.training.layers()]


@pytest.mark.deep
def test_drawing_classifier_repeats_with_its_seed() -> None:
    images, labels = drawing_classifier.drawings(10)
    runs = []
    for _ in range(2):
        made = drawing_classifier.DrawingClassifier(
            drawing_classifier.first_weights(10), 10, 10, MLCompute.MLCDevice.cpuDevice()
        )
        for _ in range(3):
            _, found = made.step(images, labels, np.ones(10))
            made.wait()
        runs.append(found[0])
    assert np.array_equal(*runs)


def test_q_network() -> None:
    found = q_network.learn(200)
    network = found["network"]
    assert network.joined.descriptor().shape() == [1, 2]
    assert network.leaky.descriptor().a() == float(np.float32(0.3))
    assert found["after"] < 0.75 * found["before"]
    state, wanted = (300.0, 100.0), np.array([0.5, -0.5], np.float32)
    before = network.predict(state)
    assert math.isclose(network.update(state, wanted), float(np.square(before - wanted).mean()), rel_tol=1e-4)
    assert not np.array_equal(network.predict(state), before)


def test_q_network_environment() -> None:
    assert q_network.step(900, 0, 0) == (1000, 100, 1.0, True)
    assert q_network.step(500, 200, 0) == (0, 0, -0.1, False)
    assert q_network.step(0, -500, 1) == (0, 0, -1.0, True)


def test_inference_zoo() -> None:
    columns = [range(1, 7), range(7, 13), range(6, 0, -1)]
    debug = MLCompute.MLCGraphCompilationOptionsDebugLayers
    assert inference_zoo.sum_of_three(columns, [6, 1], debug).ravel().tolist() == [14, 15, 16, 17, 18, 19]
    assert inference_zoo.sum_of_three([[1] * 3, [2] * 3, [3] * 3], [1, 3]).tolist() == [[6, 6, 6]]
    tenths = [[0, 1, 2, 3, 4, 5], [1] * 6, [0, 0.1, 0.2, 0.3, 0.4, 0.5]]
    assert np.allclose(inference_zoo.sum_of_three(tenths, [6, 1]).ravel(), [1, 2.1, 3.2, 4.3, 5.4, 6.5])
    assert inference_zoo.dense().tolist() == [[2, 2], [4, 4]]
    numbers = np.arange(18, dtype=np.float32).reshape(1, 2, 3, 3)
    assert np.array_equal(inference_zoo.there_and_back(numbers), numbers)
    assert inference_zoo.product([[11, 2], [3, 4]], [[1, 2], [3, 4]]).tolist() == [[17, 30], [15, 22]]


def test_sums_in_one_growing_graph() -> None:
    graph = MLCompute.MLCGraph.graph()
    assert inference_zoo.evaluate([4], [2], graph).tolist() == [6]
    assert inference_zoo.evaluate([123, 234, 345, 456], [321, 432, 543, 654], graph).tolist() == [444, 666, 888, 1110]


def test_matrix_products_into_their_own_input() -> None:
    a, c = np.array([[1, 2], [3, 4]], np.float32), np.ones((2, 2), np.float32)
    inference_zoo.sgemm(a, a, c)
    assert c.tolist() == [[8, 11], [16, 23]]
    i, j = np.indices((6, 6)).astype(np.float32)
    large = np.ones((6, 6), np.float32)
    inference_zoo.sgemm(0.1 * j + 0.4 * i, 0.2 * j + 0.3 * i, large)
    assert np.allclose(large[0], [2.65, 2.95, 3.25, 3.55, 3.85, 4.15], atol=1e-4)
    assert np.allclose(large[-1], [11.65, 14.35, 17.05, 19.75, 22.45, 25.15], atol=1e-4)


@pytest.mark.deep
def test_image_fitting_begins_well() -> None:
    found = image_fitting.run(MLCompute.MLCDevice.cpuDevice(), epochs=20)
    assert found["errors"][0] > 0.3 and found["errors"][9] < 0.136 and found["errors"][-1] < 0.1
    row = np.abs(found["learned"][-1] - found["image"][-1]).sum()
    assert 0.3 < found["last row"] / row < 3  # the handler's tensor is the sum over the row


@pytest.mark.deep
def test_image_fitting() -> None:
    found = image_fitting.run(MLCompute.MLCDevice.cpuDevice())
    assert found["errors"][-1] < 0.05 and np.abs(found["learned"] - found["image"]).mean() < 0.05


@pytest.mark.deep
@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[2] / "examples" / "mlc").glob("*.py")), ids=lambda p: p.stem
)
def test_examples_run_as_scripts(example: Path) -> None:
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr
