"""The whole step, its three phases and plain PyTorch give the same training."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import stepgraph as sg
from stepgraph.compiler.program import fake

STEPS, BATCH = 20, 8


class Network:
    """Convolution, batch normalization, dropout, a layer used twice and a tensor that two layers read."""

    def __init__(self) -> None:
        sg.set_seed(5)
        self.x, self.y = sg.Tensor.image(6, 6, 2, BATCH), sg.Tensor((BATCH,), "int64")
        self.convolution = sg.ConvolutionLayer.create(2, 4, 3, biases=False)  # normalization takes them away
        self.normalization = sg.BatchNormalizationLayer.create(4)
        self.dropout = sg.DropoutLayer(0.4)
        self.shared = sg.FullyConnectedLayer.create(144, 144, initializer=sg.RandomInitializerType.XAVIER)
        self.head = sg.FullyConnectedLayer.create(144, 5)
        graph = self.graph = sg.Graph()
        hidden = graph.node(self.normalization, graph.node(self.convolution, self.x))
        hidden = graph.reshape((BATCH, -1), graph.node(sg.ActivationLayer.relu(), hidden))
        self.before = hidden
        hidden = graph.node(self.dropout, hidden)
        once = graph.node(sg.ActivationLayer.tanh(), graph.node(self.shared, hidden))
        twice = graph.node(self.shared, once)
        both = graph.node(sg.ArithmeticLayer.add(), twice, once)  # `once` has two consumers
        graph.node(self.head, both)
        optimizer = sg.AdamOptimizer(learning_rate=1e-2, epsilon=1e-12)
        self.training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), optimizer)
        self.training.add_inputs({"x": self.x}, {"y": self.y})
        self.training.compile(sg.Device.cpu())

    def tensors(self) -> list[sg.Tensor]:
        own = [self.convolution.weights, self.normalization.beta, self.normalization.gamma]
        own += [self.shared.weights, self.shared.biases, self.head.weights, self.head.biases]
        return [*own, self.normalization.mean, self.normalization.variance]

    def phases(self, images: np.ndarray, labels: np.ndarray) -> float:
        names = {"x": self.x, "y": self.y}
        self.training.bind_and_write_data({"x": images, "y": labels}, names, sg.Device.cpu())
        loss = self.training.execute_forward().loss
        self.training.execute_gradient()
        self.training.execute_optimizer_update()
        return loss


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(1)
    images = generator.standard_normal((STEPS, BATCH, 2, 6, 6)).astype(np.float32)
    return list(zip(images, generator.integers(0, 5, (STEPS, BATCH)), strict=True))


def test_whole_step_equals_three_phases_bitwise() -> None:
    whole, parts = Network(), Network()
    for images, labels in batches():
        assert whole.training.execute({"x": images}, {"y": labels}).loss == parts.phases(images, labels)
        for one, other in zip(whole.tensors(), parts.tensors(), strict=True):
            assert one.numpy().tobytes() == other.numpy().tobytes()
            for mine, theirs in zip(one.optimizer_data, other.optimizer_data, strict=True):
                assert bytes(mine.bytes) == bytes(theirs.bytes)


def test_training_equals_a_plain_pytorch_loop() -> None:
    network = Network()
    leaves = [torch.tensor(t.numpy()).requires_grad_() for t in network.tensors()[:7]]
    weights, beta, gamma, shared, shared_bias, head, head_bias = leaves
    mean, variance = torch.zeros(4), torch.ones(4)
    optimizer = torch.optim.Adam(leaves, lr=1e-2, eps=1e-12)
    for images, labels in batches():
        ours = network.phases(images, labels)
        (dropped,) = network.graph.result_tensors(network.dropout)
        mask = torch.tensor(dropped.numpy() != 0) | torch.tensor(network.before.numpy() == 0)
        x = F.conv2d(torch.tensor(images), weights, padding=1)
        batch_mean, batch_variance = x.mean((0, 2, 3)).detach(), x.var((0, 2, 3), unbiased=False).detach()
        mean, variance = 0.99 * mean + 0.01 * batch_mean, 0.99 * variance + 0.01 * batch_variance
        x = F.relu(F.batch_norm(x, None, None, gamma, beta, training=True, eps=1e-5)).flatten(1)
        once = torch.tanh(F.linear(x * mask / 0.6, shared, shared_bias))
        loss = F.cross_entropy(
            F.linear(F.linear(once, shared, shared_bias) + once, head, head_bias), torch.tensor(labels)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert ours == pytest.approx(loss.item(), rel=1e-5)
    for mine, theirs in zip(network.tensors(), [*leaves, mean, variance], strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_traced_step_equals_the_untraced_reference_bitwise() -> None:
    from stepgraph.compiler.phases import whole
    from stepgraph.compiler.step import KeyKind, Step, value
    from stepgraph.compiler.trace import input_keys, trace
    from stepgraph.compiler.walk import run
    from stepgraph.runtime.executable import Executable

    network = Network()
    nodes = network.training.nodes
    settings = {"training": True, "seeded": nodes[-1].results, "chooses_kernels": False}
    step = Step(nodes, (network.x,), torch.device("cpu"), batch=(BATCH, BATCH), **settings)
    generator = torch.Generator().manual_seed(3)
    program = trace(step)
    arrays = {}
    for key in input_keys(step):
        array = fake(program.inputs[key])
        is_stream = key.kind == KeyKind.STREAM
        arrays[key] = torch.tensor([7, 3]) if is_stream else torch.rand(array.shape, generator=generator)
    keys = list(program.outputs)
    first = {key: array.clone() for key, array in arrays.items()}
    second = {key: array.clone() for key, array in arrays.items()}
    executable = Executable(whole(program, keys), step)
    traced = executable(executable.bind(first), {})
    plain = run(step, second)
    assert keys and set(keys) == set(plain)
    for key in keys:
        assert torch.equal(traced[key], plain[key]), key
    assert torch.equal(first[value(network.normalization.mean)], second[value(network.normalization.mean)])


def test_every_operator_knows_its_layer_and_phase() -> None:
    network = Network()
    execution = network.training.execute(*batches_as_data(), options=sg.ExecutionOptions.PER_LAYER_PROFILING)
    rows = {(layer, phase) for layer, phase, _, _ in execution.profile.rows}
    for name in ("Convolution", "BatchNorm", "Dropout", "FullyConnected1", "FullyConnected2", "Loss"):
        assert {(name, "forward"), (name, "gradient")} <= rows
    assert ("optimizer", "update") in rows
    assert all(layer and phase in ("forward", "gradient", "update") for layer, phase in rows)


def batches_as_data() -> tuple[dict, dict]:
    images, labels = batches()[0]
    return {"x": images}, {"y": labels}


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(("width", "parts", "outputs"), [(8, 2, 3), (12, 3, 7), (64, 2, 32), (96, 4, 1), (10, 5, 10)])
def test_parts_of_a_split_are_read_alike_in_whole_steps_and_phases(
    rows: int, width: int, parts: int, outputs: int
) -> None:
    """Phases were handed copies, which lie otherwise in memory, so that products added in another order."""
    generator = np.random.default_rng(rows)
    data = {"x": generator.standard_normal((rows, width)).astype(np.float32)}
    labels = {"y": generator.standard_normal((rows, outputs)).astype(np.float32)}
    learned = []
    for phases in (False, True):
        sg.set_seed(5)
        x, y = sg.Tensor((rows, width)), sg.Tensor((rows, outputs))
        graph = sg.Graph()
        layer = sg.FullyConnectedLayer.create(width // parts, outputs)
        graph.node(layer, graph.split(x, parts, dimension=1)[1])
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
        training.add_inputs({"x": x}, {"y": y})
        training.compile(sg.Device.cpu())
        for _ in range(3):
            if phases:
                training.bind_and_write_data({**data, **labels}, {"x": x, "y": y}, sg.Device.cpu())
                training.execute_forward()
                training.execute_gradient()
                training.execute_optimizer_update()
            else:
                training.execute(data, labels)
        learned.append([tensor.data.copy() for tensor in layer.parameters.values()])
    assert all(np.array_equal(one, other) for one, other in zip(*learned, strict=True))


def test_the_gradient_of_an_input_that_several_layers_read_belongs_to_the_gradient_pass() -> None:
    x, y = sg.Tensor((2, 3)), sg.Tensor((2, 3))
    graph = sg.Graph()
    graph.node(sg.ArithmeticLayer.add(), graph.node(sg.FullyConnectedLayer.create(3, 3), x), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.0))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), sg.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS)
    numbers = np.random.default_rng(0).standard_normal((2, 2, 3)).astype(np.float32)
    training.bind_and_write_data({"x": numbers[0], "y": numbers[1]}, {"x": x, "y": y}, sg.Device.cpu())
    training.execute_forward()
    training.execute_gradient()  # once a KeyError: the sum of two contributions carried no phase
    layer = graph.layers[0]
    weights, biases = (torch.tensor(tensor.data) for tensor in (layer.weights, layer.biases))
    read = torch.tensor(numbers[0], requires_grad=True)
    F.mse_loss(F.linear(read, weights.reshape(3, 3), biases.reshape(3)) + read, torch.tensor(numbers[1])).backward()
    np.testing.assert_allclose(training.gradient_tensor(x).numpy(), read.grad, rtol=1e-5)
    first = training.source_gradient_tensors(layer)[0].numpy()
    second = training.source_gradient_tensors(graph.layers[1])[1].numpy()
    np.testing.assert_allclose(first + second, read.grad, rtol=1e-5)
