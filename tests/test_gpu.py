"""The same training on a CUDA device: numbers of the CPU, replayed graphs, live scalars, nothing lost between calls."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import fusion
from stepgraph.runtime import loss_slots as losses

pytestmark = pytest.mark.gpu
BATCH = 16
UNFUSED = sg.GraphCompilationOptions.DISABLE_LAYER_FUSION  # most of what follows is not about fusing


class Digits:
    """A small convolutional network with dropout and batch normalization, always from the same numbers."""

    def __init__(self, device: sg.Device, rate: float = 0.3, options: sg.GraphCompilationOptions = UNFUSED) -> None:
        sg.set_seed(11)
        self.x, self.y = sg.Tensor.image(8, 8, 1, BATCH), sg.Tensor((BATCH,), "int64")
        self.layers = [sg.ConvolutionLayer.create(1, 8, 3, biases=False), sg.BatchNormalizationLayer.create(8)]
        self.layers += [sg.FullyConnectedLayer.create(128, 32), sg.FullyConnectedLayer.create(32, 10)]
        graph = self.graph = sg.Graph()
        hidden = graph.node(self.layers[1], graph.node(self.layers[0], self.x))
        hidden = graph.node(sg.PoolingLayer.max(2), graph.node(sg.ActivationLayer.relu(), hidden))
        hidden = graph.node(sg.DropoutLayer(rate), graph.reshape((BATCH, -1), hidden))
        hidden = graph.node(sg.ActivationLayer.relu(), graph.node(self.layers[2], hidden))
        self.logits = graph.node(self.layers[3], hidden)
        self.optimizer = sg.AdamOptimizer(learning_rate=1e-2)
        self.training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), self.optimizer)
        self.training.add_inputs({"x": self.x}, {"y": self.y})
        self.training.compile(device, options)
        self.device = device

    def parameters(self) -> list[np.ndarray]:
        self.training.synchronize_updates()
        return [tensor.data.copy() for layer in self.layers for tensor in layer.parameters.values()]

    def phases(self, x: np.ndarray, y: np.ndarray) -> float:
        self.training.bind_and_write_data({"x": x, "y": y}, {"x": self.x, "y": self.y}, self.device)
        loss = self.training.execute_forward().loss
        self.training.execute_gradient()
        self.training.execute_optimizer_update()
        return loss


def batches(count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(2)
    images = generator.standard_normal((count, BATCH, 1, 8, 8)).astype(np.float32)
    return list(zip(images, generator.integers(0, 10, (count, BATCH)), strict=True))


def gpu() -> sg.Device:
    device = sg.Device.gpu()
    assert device is not None
    return device


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def test_twenty_steps_equal_the_cpu() -> None:
    on_gpu, on_cpu = Digits(gpu()), Digits(sg.Device.cpu())
    for x, y in batches(20):
        one, other = (net.training.execute({"x": x}, {"y": y}).loss for net in (on_gpu, on_cpu))
        assert one == pytest.approx(other, rel=2e-3)  # dropout masks agree exactly; sums are ordered differently
    for one, other in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-3)


def test_phases_equal_the_whole_step() -> None:
    whole, parts = Digits(gpu()), Digits(gpu())
    for x, y in batches(8):
        assert whole.training.execute({"x": x}, {"y": y}).loss == pytest.approx(parts.phases(x, y), rel=1e-5)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_replay_sees_a_new_learning_rate() -> None:
    net, data = Digits(gpu()), batches(6)
    for x, y in data[:4]:
        net.training.execute({"x": x}, {"y": y})
    before = net.parameters()
    net.optimizer.learning_rate = 0.0
    compiled = list(net.training.executables)
    net.training.execute({"x": data[4][0]}, {"y": data[4][1]})
    for one, other in zip(before, net.parameters(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert net.training.executables == compiled
    assert net.optimizer.time_step == 6


def test_replay_draws_a_new_mask_each_step() -> None:
    net = Digits(gpu(), rate=0.5)
    (x, y), *_ = batches(1)
    net.optimizer.learning_rate = 0.0
    found = {net.training.execute({"x": x}, {"y": y}).loss for _ in range(6)}
    assert len(found) == 6


@pytest.mark.parametrize("stream", ["default", "another"])
def test_waiting_waits_for_the_work(stream: str) -> None:
    net, (x, y) = Digits(gpu()), batches(1)[0]
    current = torch.cuda.default_stream() if stream == "default" else torch.cuda.Stream()
    with torch.cuda.stream(current):
        for _ in range(3):
            net.training.execute({"x": x}, {"y": y})
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)  # clock cycles, in front of the next step
        execution = net.training.execute({"x": x}, {"y": y})
    assert not execution.done and not current.query()
    execution.wait()
    assert execution.done and current.query()


def test_losses_stay_when_their_places_on_the_device_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "SLOTS", 4)
    net, again = Digits(gpu()), Digits(gpu())
    executions = [net.training.execute({"x": x}, {"y": y}) for x, y in batches(15)]
    early = [again.training.execute({"x": x}, {"y": y}).loss for x, y in batches(15)]
    assert [execution.loss for execution in executions] == pytest.approx(early, rel=1e-4)


def test_losses_stay_what_they_were_after_later_steps() -> None:
    net = Digits(gpu())
    executions = [net.training.execute({"x": x}, {"y": y}) for x, y in batches(6)]
    late = [execution.loss for execution in executions]
    again = Digits(gpu())
    early = [again.training.execute({"x": x}, {"y": y}).loss for x, y in batches(6)]
    assert late == pytest.approx(early, rel=1e-4)


def test_short_batch_and_back() -> None:
    on_gpu, on_cpu = Digits(gpu(), rate=0.0), Digits(sg.Device.cpu(), rate=0.0)
    for index, (x, y) in enumerate(batches(9)):
        rows = 5 if index % 3 == 2 else BATCH
        one, other = (
            net.training.execute({"x": x[:rows]}, {"y": y[:rows]}, batch_size=rows).loss for net in (on_gpu, on_cpu)
        )
        assert one == pytest.approx(other, rel=2e-3)


def test_accumulated_gradients_are_the_sum() -> None:
    net = Digits(gpu(), rate=0.0)
    layer, data = net.layers[3], batches(4)

    def gradient(x: np.ndarray, y: np.ndarray, options: sg.ExecutionOptions) -> np.ndarray:
        net.training.bind_and_write_data({"x": x, "y": y}, {"x": net.x, "y": net.y}, net.device)
        net.training.execute_forward()
        net.training.execute_gradient(options=options)
        return net.training.gradient_data(layer.weights, layer).copy()

    total = sum(gradient(x, y, sg.ExecutionOptions.NONE) for x, y in data)
    gradient(*data[0], sg.ExecutionOptions.NONE)
    for x, y in data[1:]:
        accumulated = gradient(x, y, sg.ExecutionOptions.ACCUMULATE_GRADIENTS)
    np.testing.assert_allclose(accumulated, total, rtol=1e-4, atol=1e-6)


def test_inference_sees_the_trained_parameters() -> None:
    net = Digits(gpu(), rate=0.0)
    inference = sg.InferenceGraph([net.graph])
    inference.add_inputs({"x": net.x})
    inference.compile(net.device)
    (x, y), *_ = batches(1)
    before = inference.execute({"x": x}).result.numpy()
    for _ in range(4):
        net.training.execute({"x": x}, {"y": y})
    after = inference.execute({"x": x}).result.numpy()
    evaluated = net.training.execute({"x": x}, {"y": y}, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_allclose(net.logits.numpy(), after, rtol=1e-4, atol=1e-5)
    assert evaluated.loss > 0


def test_host_memory_changes_only_when_synchronized() -> None:
    net = Digits(gpu())
    weights = net.layers[3].weights
    before = weights.data.copy()
    for x, y in batches(3):
        net.training.execute({"x": x}, {"y": y}, options=sg.ExecutionOptions.SYNCHRONOUS)
    np.testing.assert_array_equal(weights.data, before)
    net.training.synchronize_updates()
    assert np.abs(weights.data - before).max() > 1e-3


def test_completion_is_called_once_after_the_work() -> None:
    net, called, results = Digits(gpu()), threading.Event(), []

    def completion(result: sg.Tensor, error: Exception | None, seconds: float) -> None:
        results.append((result, error, seconds))
        called.set()

    (x, y), *_ = batches(1)
    execution = net.training.execute({"x": x}, {"y": y}, options=sg.ExecutionOptions.PROFILING, completion=completion)
    assert called.wait(30)
    assert len(results) == 1 and results[0][1] is None and results[0][2] > 0
    assert execution.wait().done and execution.time > 0


def test_a_synchronous_call_has_called_its_completion() -> None:
    net, threads = Digits(gpu()), []
    (x, y), *_ = batches(1)
    options = sg.ExecutionOptions.SYNCHRONOUS
    for _ in range(3):
        net.training.execute(
            {"x": x}, {"y": y}, options=options, completion=lambda *_: threads.append(threading.get_ident())
        )
    assert threads == [threading.get_ident()] * 3


def test_memory_is_flat_over_steps() -> None:
    net, data = Digits(gpu()), batches(4)
    for x, y in data:
        net.training.execute({"x": x}, {"y": y})
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        for x, y in data:
            net.training.execute({"x": x}, {"y": y})
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 64 * 1024


def test_per_layer_profile_has_all_phases() -> None:
    net = Digits(gpu())
    (x, y), *_ = batches(1)
    execution = net.training.execute({"x": x}, {"y": y}, options=sg.ExecutionOptions.PER_LAYER_PROFILING)
    assert {phase for _, phase, _, _ in execution.profile.rows} == {"forward", "gradient", "update"}


def test_fused_steps_equal_unfused_ones() -> None:
    fused, plain = Digits(gpu(), options=sg.GraphCompilationOptions.FUSE_LAYERS), Digits(gpu())
    for x, y in batches(20):
        one, other = (net.training.execute({"x": x}, {"y": y}).loss for net in (fused, plain))
        assert one == pytest.approx(other, rel=1e-4)
    (executable,) = fused.training.compilation.programs.executables.values()
    assert executable.mode == "fused CUDA graph"


@pytest.mark.parametrize("size", [(4, 7), (6, 12)])
def test_fused_gradients_of_nearest_upsampling_are_those_of_the_cpu(size: tuple[int, int]) -> None:
    """Where the new size is no multiple of the old one, NVIDIA's assembler gets some block sizes wrong."""
    x, y = sg.Tensor((2, 3, 3, 6)), sg.Tensor((2, 3, *size))
    numbers = np.random.default_rng(4)
    data = {name: numbers.standard_normal(one.shape).astype(np.float32) for name, one in (("x", x), ("y", y))}

    def trained(device: sg.Device) -> list[np.ndarray]:
        layer, graph = sg.LayerNormalizationLayer.create((3, 3, 6)), sg.Graph()
        hidden = graph.node(sg.GroupNormalizationLayer(3, 1), graph.node(layer, x))
        graph.node(sg.UpsampleLayer.nearest(size), hidden)
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=1.0))
        training.add_inputs({"x": x}, {"y": y})
        training.compile(device, sg.GraphCompilationOptions.FUSE_LAYERS)
        training.execute({"x": data["x"]}, {"y": data["y"]})
        training.synchronize_updates()
        return [tensor.data.copy() for tensor in layer.parameters.values()]

    for on_gpu, on_cpu in zip(trained(gpu()), trained(sg.Device.cpu()), strict=True):
        np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-5, atol=1e-6)


def test_a_fused_step_is_swapped_in_between_two_steps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nobody has fused it before
    later, plain = Digits(gpu(), options=sg.GraphCompilationOptions.NONE), Digits(gpu())
    (executable,) = later.training.compilation.programs.executables.values()
    data, modes = batches(20), set()
    deadline = time.monotonic() + 120
    while not executable.is_fused and time.monotonic() < deadline:
        for x, y in data:
            assert later.training.execute({"x": x}, {"y": y}).loss == pytest.approx(
                plain.training.execute({"x": x}, {"y": y}).loss, rel=1e-3
            )
            modes.add(executable.mode)
        time.sleep(0.2)
    assert executable.is_fused
    assert "CUDA graph" in modes
    assert "fused" in caplog.text
    later.optimizer.learning_rate = plain.optimizer.learning_rate = 1e-4
    for x, y in data[:5]:
        one, other = (net.training.execute({"x": x}, {"y": y}).loss for net in (later, plain))
        assert one == pytest.approx(other, rel=1e-3)
    assert executable.mode == "fused CUDA graph"


@pytest.mark.parametrize("is_fusing", [True, False])
def test_waiting_leaves_the_processor_to_the_compiler(monkeypatch: pytest.MonkeyPatch, is_fusing: bool) -> None:
    monkeypatch.setattr(fusion, "is_under_way", lambda: is_fusing)
    net, (x, y) = Digits(gpu()), batches(1)[0]
    for _ in range(3):  # to capture a step is to wait
        net.training.execute({"x": x}, {"y": y}).wait()
    square = torch.rand(8192, 8192, device="cuda")
    for _ in range(60):  # about a second
        square = square @ square
    execution = net.training.execute({"x": x}, {"y": y})
    began, worked = time.perf_counter(), time.thread_time()
    execution.wait()
    waited, worked = time.perf_counter() - began, time.thread_time() - worked
    assert waited > 0.2
    assert (worked < 0.2 * waited) == is_fusing


@pytest.mark.parametrize("kind", [sg.LSTMLayer, sg.GRULayer])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_cudnn_computes_recurrent_layers(kind: type[sg.LSTMLayer | sg.GRULayer], bidirectional: bool) -> None:
    def trained(device: sg.Device) -> list[float]:
        sg.set_seed(3)
        x, y = sg.Tensor((4, 7, 5)), sg.Tensor((4, 7, 12 if bidirectional else 6))
        graph = sg.Graph()
        layer = kind.create(5, 6, layer_count=2, is_bidirectional=bidirectional, batch_first=True)
        graph.node(layer, x)
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.5))
        training.add_inputs({"x": x}, {"y": y})
        training.compile(device, UNFUSED)
        generator = np.random.default_rng(0)
        data = [generator.standard_normal(shape).astype(np.float32) for shape in (x.shape, y.shape)]
        compiled = training.compilation
        nodes = compiled.programs.executable("step", compiled.feeds.batch).part.module.graph.nodes
        by_cudnn = torch.ops.stepgraph.rnn_cudnn.default in [node.target for node in nodes]
        assert by_cudnn == device.is_cuda
        return [training.execute({"x": data[0]}, {"y": data[1]}).loss for _ in range(10)]

    np.testing.assert_allclose(trained(gpu()), trained(sg.Device.cpu()), rtol=1e-5)


def test_tf32_is_a_switch() -> None:
    generator = np.random.default_rng(0)
    a = generator.standard_normal((256, 256)).astype(np.float32)
    errors = {}
    for tf32 in (False, True):
        x = sg.Tensor((256, 256))
        graph = sg.Graph()
        graph.node(sg.FullyConnectedLayer.create(256, 256, biases=False), x)
        inference = sg.InferenceGraph([graph])
        inference.add_inputs({"x": x})
        inference.compile(gpu(), UNFUSED, tf32=tf32)
        weights = graph.nodes[0].layer.weights.numpy().astype(np.float64)
        found = inference.execute({"x": a}).result.numpy()
        errors[tf32] = np.abs(found - a @ weights.T).max()
    assert errors[False] < 1e-4 < errors[True]
    assert not torch.backends.cuda.matmul.allow_tf32  # the caller's own setting is untouched
