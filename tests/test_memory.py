"""Memory is known before the first step, and what is known is true."""

import gc
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function

import stepgraph as sg
from benchmarks.in_stepgraph import Stepgraph
from benchmarks.models import MODELS
from stepgraph.compiler import memory
from stepgraph.compiler.kernels import choose_convolution as convolution
from stepgraph.runtime import executable, programs
from stepgraph.runtime.programs import PASSES

PLAIN = sg.GraphCompilationOptions.NONE


def small_network(batch: int = 32) -> tuple[sg.TrainingGraph, sg.Tensor, sg.Tensor]:
    sg.set_seed(1)
    x, y = sg.Tensor((batch, 64)), sg.Tensor((batch,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.ActivationLayer.relu(), graph.node(sg.FullyConnectedLayer.create(64, 128), x))
    graph.node(sg.FullyConnectedLayer.create(128, 10), graph.node(sg.DropoutLayer(0.2), hidden))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-3))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    return training, x, y


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Frees garbage now and none until the end, so that only what loses its last reference is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measured_peak(run: Callable[[], object], since: str | None = None) -> int:
    """The most bytes that were allocated at once while `run` ran, beyond what was there before.

    With `since`, only from the moment of that name on. Garbage of other tests that is freed meanwhile would count.
    """
    with warnings.catch_warnings(), nothing_collected():
        warnings.simplefilter("ignore")  # the profiler's own
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            run()
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    began = next(event.start_ns() for event in events if event.name() == since) if since else 0
    live = peak = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live) if event.start_ns() >= began else live
    return peak


@pytest.mark.parametrize("name", ["demo", "cnn", "mlp"])
def test_the_plan_is_within_15_percent_of_the_measured_peak(name: str) -> None:
    network = Stepgraph(MODELS[name], "cpu", dropout=True)
    training = network.training
    planned = training.memory_plan.intermediates
    assert planned > 0 and training.device_memory_size >= planned  # known before the first step
    network.step()
    assert planned == pytest.approx(measured_peak(network.step), rel=0.15)


@pytest.mark.parametrize("name", ["demo", "cnn"])
def test_the_plan_counts_the_workspace_of_chosen_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(convolution, "fastest", lambda _, known, __: "gemm" if "gemm" in known else "pytorch")
    network = Stepgraph(MODELS[name], "cpu", dropout=True)
    network.step()
    assert network.training.memory_plan.intermediates == pytest.approx(measured_peak(network.step), rel=0.15)


class Reduced(sg.Layer):
    """A number computed by one of PyTorch's loss functions."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return self.function(x)[None]


REDUCED = {
    "squares": lambda x: F.mse_loss(x, x.detach() / 2),
    "sum of squares": lambda x: F.mse_loss(x, x.detach() / 2, reduction="sum"),
    "smooth": lambda x: F.smooth_l1_loss(x, x.detach() / 2, beta=0.3),
    "entropies": lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid()),
    "weighted entropies": lambda x: F.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid(), x.detach().cos(), None),
    "margins": lambda x: F.soft_margin_loss(x, x.detach().sign(), reduction="sum"),
}


@pytest.mark.parametrize("name", REDUCED)
def test_a_reduced_loss_does_not_keep_the_losses_of_all_elements(name: str) -> None:
    """PyTorch's own result does: it is one number at the beginning of their memory."""
    x, graph, function = sg.Tensor((64, 16)), sg.Graph(), REDUCED[name]
    layer = sg.FullyConnectedLayer.create(16, 16, biases=False)
    first = layer.parameters["weights"].torch().clone()
    result = graph.node(Reduced(function), graph.node(layer, x))
    training = sg.TrainingGraph([graph], optimizer=sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x})
    training.compile(sg.Device.cpu(), deterministic=True)
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    training.execute({"x": data})
    leaf = first.clone().requires_grad_()
    exact = function(data @ leaf.T)
    exact.backward()
    assert exact.untyped_storage().nbytes() > 4 == result.torch().untyped_storage().nbytes()
    assert torch.equal(result.torch()[0], exact)
    torch.testing.assert_close(first - layer.parameters["weights"].torch(), 0.1 * leaf.grad, rtol=1e-4, atol=1e-6)


def on_a_gpu() -> tuple[sg.TrainingGraph, tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """A network that is not compiled yet, and a batch of 128 MiB."""
    x, y, graph = sg.Tensor((1 << 15, 512)), sg.Tensor((1 << 15, 512)), sg.Graph()
    hidden = graph.node(sg.ActivationLayer.gelu(), graph.node(sg.FullyConnectedLayer.create(512, 2048), x))
    graph.node(sg.FullyConnectedLayer.create(2048, 512), hidden)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    data = (torch.randn(1 << 15, 512, device="cuda") for _ in range(2))
    return training, ({"x": next(data)}, {"y": next(data)})


@pytest.mark.gpu
def test_a_fused_step_takes_the_memory_of_the_unfused_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nobody has fused it before
    training, data = on_a_gpu()
    training.compile("cuda")
    for _ in range(3):
        training.execute(*data).wait()
    (one,) = training.compilation.programs.executables.values()
    assert one.mode == "CUDA graph"
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, deadline = torch.cuda.memory_reserved(), time.monotonic() + 120
    while one.mode != "fused CUDA graph" and time.monotonic() < deadline:
        training.execute(*data).wait()
    assert one.mode == "fused CUDA graph"
    assert torch.cuda.max_memory_reserved() - before < training.memory_plan.intermediates / 2


@pytest.mark.gpu
def test_compiling_again_releases_a_captured_graph() -> None:
    training, data = on_a_gpu()
    kept = []
    with nothing_collected():
        for _ in range(2):
            training.compile("cuda", fuse=False)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            kept.append(torch.cuda.memory_reserved())
            for _ in range(3):
                training.execute(*data).wait()
    (one,) = training.compilation.programs.executables.values()
    assert "CUDA graph" in one.mode
    assert kept[1] - kept[0] < training.memory_plan.intermediates / 2  # cuBLAS's workspaces and the prediction stay


@pytest.mark.gpu
def test_adding_outputs_releases_a_captured_graph() -> None:
    training, data = on_a_gpu()
    training.compile("cuda", fuse=False)
    with nothing_collected():
        for _ in range(3):
            training.execute(*data).wait()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        training.add_outputs({"hidden": training.compilation.nodes[0].results[0]})
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert before - torch.cuda.memory_reserved() > training.memory_plan.intermediates / 4
        for _ in range(3):
            training.execute(*data).wait()
    (one,) = training.compilation.programs.executables.values()
    assert "CUDA graph" in one.mode


@pytest.mark.gpu
def test_capturing_again_for_data_elsewhere_takes_no_memory_twice() -> None:
    training, data = on_a_gpu()
    training.compile("cuda", fuse=False)
    for _ in range(2):
        training.execute(*data).wait()
    (one,) = training.compilation.programs.executables.values()
    assert one.mode == "CUDA graph"
    moved = tuple({name: array.clone() for name, array in part.items()} for part in data)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    training.execute(*moved).wait()
    batch = sum(array.nbytes for part in moved for array in part.values())  # the graph's own memory for it
    assert one.mode == "CUDA graph"
    assert torch.cuda.max_memory_reserved() - before < training.memory_plan.intermediates / 2 + batch


def test_a_thousand_steps_leave_memory_flat() -> None:
    training, _, _ = small_network()
    generator = np.random.default_rng(0)
    images = generator.standard_normal((32, 64)).astype(np.float32)
    labels = generator.integers(0, 10, 32)
    for _ in range(100):
        training.execute({"x": images}, {"y": labels})
    gc.collect()
    objects, resident = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1000):
        training.execute({"x": images}, {"y": labels})
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
    assert grown < 4096  # KiB on Linux; a leak of one gradient a step would be forty times as much


def test_accumulating_a_hundred_gradients_leaves_memory_flat() -> None:
    training, x, y = small_network()
    generator = np.random.default_rng(0)
    data = {"x": generator.standard_normal((32, 64)).astype(np.float32), "y": generator.integers(0, 10, 32)}
    training.bind_and_write_data(data, {"x": x, "y": y}, sg.Device.cpu())

    def passes(count: int) -> None:
        for _ in range(count):
            training.execute_forward()
            training.execute_gradient(options=sg.ExecutionOptions.ACCUMULATE_GRADIENTS)

    passes(3)
    once = measured_peak(lambda: passes(1))
    assert measured_peak(lambda: passes(100)) < 2 * once


def test_the_plan_counts_parameters_state_and_statistics() -> None:
    plan = small_network()[0].memory_plan
    parameters = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert plan.parameters == parameters
    assert plan.optimizer_state == 2 * parameters
    assert plan.statistics == 0
    assert plan.total == plan.parameters + plan.optimizer_state + plan.intermediates
    layers = {layer for layer, _, _ in plan.timeline}
    assert {"FullyConnected1", "FullyConnected2", "Dropout", "Loss"} <= layers
    assert max(size for _, _, size in plan.timeline) == plan.intermediates


def test_a_larger_batch_needs_more_memory() -> None:
    assert small_network(64)[0].device_memory_size > small_network(32)[0].device_memory_size


def test_unread_results_are_freed_and_say_so() -> None:
    training, _, _ = small_network()
    hidden = training.nodes[0].results[0]
    zeros = np.zeros((32, 64), np.float32)
    training.execute({"x": zeros}, {"y": np.zeros(32, np.int64)})
    assert hidden.data is None
    with pytest.raises(sg.StateError, match="add_outputs"):
        hidden.numpy()
    training.add_outputs({"hidden": hidden})
    training.execute({"x": zeros}, {"y": np.zeros(32, np.int64)})
    assert hidden.numpy().shape == (32, 128)
    assert torch.equal(hidden.torch(), torch.from_numpy(hidden.data))


def residual_network(
    batch: int = 8, options: sg.GraphCompilationOptions = PLAIN, **settings: object
) -> sg.TrainingGraph:
    """A small ResNet with dropout: normalization, additions, and a mask that cannot be drawn again."""
    sg.set_seed(5)
    x, y = sg.Tensor.image(16, 16, 3, batch), sg.Tensor((batch,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.ConvolutionLayer.create(3, 16, 3), x)
    for _ in range(4):
        inner = hidden
        for _ in range(2):
            inner = graph.node(sg.ConvolutionLayer.create(16, 16, 3, biases=False), inner)
            inner = graph.node(sg.ActivationLayer.relu(), graph.node(sg.BatchNormalizationLayer.create(16), inner))
        hidden = graph.node(sg.ArithmeticLayer.add(), hidden, graph.node(sg.DropoutLayer(0.1), inner))
    graph.node(sg.FullyConnectedLayer.create(16 * 256, 10), graph.reshape((batch, -1), hidden))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.01))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), options, **settings)
    return training


def losses(training: sg.TrainingGraph, batch: int = 8) -> list[float]:
    generator = np.random.default_rng(0)
    data = {"x": generator.standard_normal((batch, 3, 16, 16)).astype(np.float32)}
    return [training.execute(data, {"y": np.arange(batch) % 10}).loss for _ in range(8)]


@pytest.mark.parametrize(
    ("options", "share"),
    [(PLAIN, 0.9), (sg.GraphCompilationOptions.DETERMINISTIC, 0.5)]
    + [pytest.param(sg.GraphCompilationOptions.DETERMINISTIC, share, marks=pytest.mark.deep) for share in (0.8, 0.6)],
)
def test_a_limited_step_computes_the_same_in_less_memory(options: sg.GraphCompilationOptions, share: float) -> None:
    plain = residual_network(options=options)
    limit = int(share * plain.memory_plan.total)
    limited = residual_network(options=options, memory_limit=limit)
    assert limited.memory_plan.total <= limit
    assert losses(limited) == losses(plain)  # the same operators on the same numbers, bit for bit
    images, labels = np.zeros((8, 3, 16, 16), np.float32), np.zeros(8, np.int64)
    measured = measured_peak(lambda: limited.execute({"x": images}, {"y": labels}))
    assert limited.memory_plan.intermediates == pytest.approx(measured, rel=0.15)


@pytest.mark.deep
def test_what_cannot_fit_is_refused_with_the_batch_that_would() -> None:
    fixed = {"options": sg.GraphCompilationOptions.DETERMINISTIC}
    plain = residual_network(16, **fixed)
    limit = plain.memory_plan.total // 4
    with pytest.raises(sg.MemoryLimitError, match="use a batch size of at most") as refused:
        residual_network(16, memory_limit=limit, **fixed)
    largest = int(str(refused.value).split("at most ")[1].rstrip(".\n"))
    assert 1 <= largest < 16
    assert residual_network(largest, memory_limit=limit, **fixed).memory_plan.total <= limit


def test_where_no_batch_fits_a_graph_stays_compiled_as_it_was() -> None:
    training, _, _ = small_network(32)
    before = training.memory_plan
    with pytest.raises(MemoryError, match="no batch size fits"):
        training.compile(sg.Device.cpu(), memory_limit=1000)
    assert training.memory_plan == before
    zeros = np.zeros((32, 64), np.float32)
    assert np.isfinite(training.execute({"x": zeros}, {"y": np.zeros(32, np.int64)}).loss)


@pytest.mark.parametrize("limit", [0, -1, 1.5, "2 GB", True])
def test_a_limit_is_a_number_of_bytes(limit: object) -> None:
    with pytest.raises((sg.ArgumentError, sg.DataTypeError), match="memory_limit"):
        residual_network(memory_limit=limit)


def test_the_plan_for_another_batch_is_that_of_a_graph_declared_so() -> None:
    training, *_ = small_network(32)
    known = training.executables
    for rows in (1, 7, 64):
        assert training.memory_plan_for(rows) == small_network(rows)[0].memory_plan
    assert training.memory_plan_for(32) == training.memory_plan
    assert training.executables == known  # nothing was made to run
    inference = sg.InferenceGraph([training])
    with pytest.raises(sg.StateError, match="not compiled"):
        inference.memory_plan_for(8)
    inference.compile(sg.Device.cpu())
    assert inference.memory_plan_for(32) == inference.memory_plan
    assert inference.memory_plan_for(8).activations < inference.memory_plan.activations
    with pytest.raises(sg.ArgumentError, match="batch_size is -1"):
        training.memory_plan_for(-1)


@pytest.mark.deep
def test_resnet18_trains_the_same_in_60_percent_of_its_memory() -> None:
    plain, limited = (Stepgraph(MODELS["resnet18"], "cpu", dropout=True) for _ in range(2))
    limit = int(0.6 * plain.training.memory_plan.total)
    limited.training.compile(sg.Device.cpu(), memory_limit=limit)
    assert limited.training.memory_plan.total <= limit
    for _ in range(2):
        plain.step()
        limited.step()
        assert limited.loss == plain.loss


# Results that stay readable


def many_rows(rows: int = 1 << 15) -> tuple[sg.TrainingGraph, sg.Tensor, sg.Tensor]:
    """A graph whose results are the largest thing it has."""
    x, y = sg.Tensor((rows, 4)), sg.Tensor((rows,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.ActivationLayer.tanh(), graph.node(sg.FullyConnectedLayer.create(4, 8), x))
    graph.node(sg.FullyConnectedLayer.create(8, 16), hidden)  # rows that no implementation of softmax pads
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    return training, x, y


def rows_of(training: sg.TrainingGraph) -> tuple[dict[str, Any], dict[str, Any]]:
    rows = training.compilation.feeds.batch
    return {"x": np.ones((rows, 4), np.float32)}, {"y": np.zeros(rows, np.int64)}


def peak_of(run: Callable[[], object], warm: int = 2) -> int:
    """The most bytes alive in the last of several calls, from the first one on."""

    def marked() -> None:
        for _ in range(warm):
            run()
        with record_function("the call that counts"):
            run()

    return measured_peak(marked, since="the call that counts")


@pytest.mark.parametrize("evaluates", [False, True], ids=["steps", "evaluations in between"])
def test_results_of_the_last_call_make_room_for_new_ones(evaluates: bool) -> None:
    training, *_ = many_rows()
    data = rows_of(training)

    def run() -> None:
        if evaluates:
            training.execute(*data, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)
        training.execute(*data)

    assert peak_of(run) <= 1.02 * training.memory_plan.total


@pytest.mark.parametrize("accumulates", [False, True], ids=["steps", "accumulated"])
def test_the_plan_of_passes_counts_what_stays_readable(accumulates: bool) -> None:
    training, x, y = many_rows()
    inputs, labels = rows_of(training)
    training.bind_and_write_data(inputs | labels, {"x": x, "y": y}, sg.Device.cpu())
    option = sg.ExecutionOptions.ACCUMULATE_GRADIENTS if accumulates else sg.ExecutionOptions.NONE

    def run() -> None:
        for _ in range(1 + accumulates):
            training.execute_forward()
            training.execute_gradient(options=option)
        training.execute_optimizer_update()

    measured = peak_of(run)  # from the first call on: what was allocated before would be missing
    programs = training.compilation.programs
    parts = {name: programs.executable(name, x.shape[0]).part for name in PASSES}
    planned = memory.plan_passes(programs.program(x.shape[0]).step, parts).total
    assert 0.85 * planned < measured <= 1.02 * planned


def test_inference_makes_room_for_its_results() -> None:
    training, x, _ = many_rows()
    inference = sg.InferenceGraph([training])
    inference.add_inputs({"x": x})
    inference.compile(sg.Device.cpu())
    inputs, _ = rows_of(training)
    assert peak_of(lambda: inference.execute(inputs)) <= 1.02 * inference.memory_plan.total


def test_after_a_failed_call_results_say_that_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    training, *_ = many_rows()
    training.execute(*rows_of(training))
    prediction = training.compilation.losses[-1].sources[0]
    assert prediction.numpy().shape == (1 << 15, 16)

    def fails(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(executable.Executable, "run", fails)
        with pytest.raises(sg.ExecutionError, match="the device is gone"):
            training.execute(*rows_of(training))
    with pytest.raises(sg.StateError, match="the last call failed before it was computed"):
        prediction.numpy()
    training.execute(*rows_of(training))
    assert np.isfinite(prediction.numpy()).all()


# The plan after compile


def wide(rows: int = 64, **settings: Any) -> tuple[sg.TrainingGraph, list[sg.Tensor]]:
    """Several layers whose activations decide what a step needs."""
    sg.set_seed(2)
    x, y = sg.Tensor((rows, 32)), sg.Tensor((rows, 32))
    graph, hidden = sg.Graph(), [x]
    for _ in range(4):
        linear = graph.node(sg.FullyConnectedLayer.create(32, 32), hidden[-1])
        hidden.append(graph.node(sg.ActivationLayer.gelu(), linear))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), **settings)
    return training, hidden


def batch_of(rows: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    return {"x": np.ones((rows, 32), np.float32)}, {"y": np.zeros((rows, 32), np.float32)}


def test_other_batch_sizes_keep_to_the_limit_and_the_plan_covers_them() -> None:
    free, _ = wide()
    training, _ = wide(memory_limit=free.memory_plan.total)
    before = training.memory_plan
    with pytest.raises(sg.MemoryLimitError, match=r"execute \(batch_size=512\): the step needs") as refused:
        training.execute(*batch_of(512), batch_size=512)
    assert "use a batch size of at most" in str(refused.value)
    assert training.memory_plan == before and ("step", 512) not in training.executables
    assert np.isfinite(training.execute(*batch_of(64)).loss)
    assert np.isfinite(training.execute(*batch_of(16), batch_size=16).loss) and training.memory_plan == before
    assert np.isfinite(free.execute(*batch_of(512), batch_size=512).loss)
    assert free.memory_plan == free.memory_plan_for(512) and free.memory_plan.total > before.total


def test_outputs_added_later_keep_to_the_limit_and_are_in_the_plan() -> None:
    free, hidden = wide()
    before = free.memory_plan
    free.add_outputs({f"{i}": tensor for i, tensor in enumerate(hidden[1:])})
    assert free.memory_plan.timeline[-1][2] > before.timeline[-1][2]  # what is alive when a step ends
    limit = before.total * 3 // 4
    training, hidden = wide(memory_limit=limit)
    plan = training.memory_plan
    with pytest.raises(sg.MemoryLimitError):
        training.add_outputs({f"{i}": tensor for i, tensor in enumerate(hidden[1:])})
    assert training.memory_plan == plan and training.outputs == {}
    training.add_outputs({"last": hidden[-1]})
    assert training.memory_plan.total <= limit
    training.execute(*batch_of(64))
    assert hidden[-1].numpy().shape == (64, 32)


def test_separate_passes_keep_to_the_limit() -> None:
    """They keep every result, so that they may need more than a whole step, which computes some again."""
    free, _ = wide()
    for share, fits in ((3.0, True), (0.7, False)):
        training, hidden = wide(memory_limit=int(share * free.memory_plan.total))
        data, labels = batch_of(64)
        names = {"x": hidden[0], "y": training.loss_labels["y"]}
        training.bind_and_write_data({**data, **labels}, names, sg.Device.cpu())
        if fits:
            training.execute_forward()
            training.execute_gradient()
        else:
            with pytest.raises(sg.MemoryLimitError, match=r"'forward' needs .* bytes, the limit is"):
                training.execute_forward()
        assert np.isfinite(training.execute(*batch_of(64)).loss)


def test_an_evaluation_keeps_to_the_limit() -> None:
    free, _ = wide()
    training, _ = wide(memory_limit=int(0.7 * free.memory_plan.total))
    options = sg.ExecutionOptions.FORWARD_FOR_INFERENCE
    assert training.execute(*batch_of(64), options=options).loss == free.execute(*batch_of(64), options=options).loss


def test_batch_sizes_that_were_not_used_for_long_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MOST", 3)
    training, _ = wide(8)
    first = training.execute(*batch_of(8)).loss
    assert np.isfinite(first)
    for rows in (1, 2, 3, 4, 2, 5, 6):
        assert np.isfinite(training.execute(*batch_of(rows), batch_size=rows).loss)
    assert {rows for _, rows in training.executables} == {8, 2, 5, 6}
    assert np.isfinite(training.execute(*batch_of(1), batch_size=1).loss)  # made again
    assert {rows for _, rows in training.executables} == {8, 1, 5, 6}
