"""Mixed precision: layers compute in half the bits, everything a user holds stays float32."""

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.kernels import emulated
from stepgraph.compiler.walk import GROWTH_INTERVAL, _adapt
from stepgraph.runtime.state import Progress

BATCH = 32
GENERATOR = np.random.default_rng(4)
IMAGES = GENERATOR.standard_normal((BATCH, 1, 8, 8)).astype(np.float32)
CLASSES = GENERATOR.integers(0, 5, BATCH)


class Network:
    def __init__(self, compute_type: str | None, options: sg.GraphCompilationOptions = sg.GraphCompilationOptions.NONE):
        sg.set_seed(3)
        self.x, self.y = sg.Tensor.image(8, 8, 1, BATCH), sg.Tensor((BATCH,), "int64")
        self.convolution = sg.ConvolutionLayer.create(1, 8, 3)
        self.normalization = sg.BatchNormalizationLayer.create(8)
        self.head = sg.FullyConnectedLayer.create(512, 5)
        graph = sg.Graph()
        hidden = graph.node(self.normalization, graph.node(self.convolution, self.x))
        hidden = graph.reshape((BATCH, -1), graph.node(sg.ActivationLayer.relu(), hidden))
        self.logits = graph.node(self.head, hidden)
        self.optimizer = sg.SGDOptimizer(learning_rate=0.05)
        self.training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), self.optimizer)
        self.training.add_inputs({"x": self.x}, {"y": self.y})
        self.training.compile(sg.Device.cpu(), options, compute_type=compute_type)

    def step(self) -> float:
        return self.training.execute({"x": IMAGES}, {"y": CLASSES}).loss

    def phases(self) -> float:
        self.training.bind_and_write_data({"x": IMAGES, "y": CLASSES}, {"x": self.x, "y": self.y}, sg.Device.cpu())
        loss = self.training.execute_forward().loss
        self.training.execute_gradient()
        self.training.execute_optimizer_update()
        return loss


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_training_follows_float32(kind: str) -> None:
    mixed, full = Network(kind), Network(None)
    pairs = [(mixed.step(), full.step()) for _ in range(15)]
    assert pairs[0][0] != pairs[0][1]  # it did compute with fewer bits
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs, rel=0.03)
    assert pairs[-1][0] < 0.5 * pairs[0][0]
    assert mixed.head.weights.numpy().dtype == np.float32
    assert mixed.logits.numpy().dtype == np.float32


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_whole_step_equals_phases_bitwise(kind: str) -> None:
    whole, parts = Network(kind), Network(kind)
    for _ in range(5):
        assert whole.step() == parts.phases()
        assert whole.head.weights.numpy().tobytes() == parts.head.weights.numpy().tobytes()


def test_gradients_are_float32_and_unscaled() -> None:
    half, full = Network("float16"), Network(None)
    half.phases(), full.phases()
    ours, theirs = (net.training.gradient_data(net.head.weights, net.head) for net in (half, full))
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, atol=0.02 * np.abs(theirs).max())
    (source,) = half.training.source_gradient_tensors(half.head)
    (reference,) = full.training.source_gradient_tensors(full.head)
    np.testing.assert_allclose(source.numpy(), reference.numpy(), atol=0.02 * np.abs(reference.numpy()).max())


def test_activations_take_half_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # With PyTorch's own kernels: another may need a workspace that moves the peak elsewhere.
    monkeypatch.setattr(emulated, "fails", lambda kind: False)
    same = sg.GraphCompilationOptions.DETERMINISTIC
    half, full = (Network(kind, same).training.memory_plan for kind in ("bfloat16", None))
    assert half.activations < 0.75 * full.activations


def test_a_step_that_overflows_is_skipped_and_the_scale_halved() -> None:
    net = Network("float16")
    before = net.head.weights.numpy().copy()
    net.training.loss_scale = 2.0**40
    net.step()
    np.testing.assert_array_equal(net.head.weights.numpy(), before)
    assert net.training.loss_scale == 2.0**39
    assert net.training.optimizer.time_step == 1
    for _ in range(30):
        net.step()
    assert np.abs(net.head.weights.numpy() - before).max() > 1e-3
    assert net.training.optimizer.time_step > 1
    assert np.isfinite(net.step())


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "phases"])
def test_a_batch_beyond_float16_leaves_no_trace_in_statistics(whole: bool) -> None:
    sg.set_seed(0)
    x, y, graph = sg.Tensor((8, 4)), sg.Tensor((8, 2)), sg.Graph()
    norm = sg.BatchNormalizationLayer.create()
    graph.dense(graph.relu(graph.node(norm, graph.dense(x, 6))), 2)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.05))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", compute_type="float16")
    rows = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    for factor in (1, 1, 1e5, 1):
        data = {"x": rows * np.float32(factor)}, {"y": rows[:, :2]}
        if whole:
            training.execute(*data)
        else:
            training.execute_forward(*data)
            training.execute_gradient()
            training.execute_optimizer_update()
        if factor == 1:
            before = norm.mean.numpy().copy(), norm.variance.numpy().copy()
            assert all(map(np.isfinite, np.concatenate(before).ravel()))
        else:
            assert np.array_equal(np.stack(before), np.stack((norm.mean.numpy(), norm.variance.numpy())))


def test_loss_scale_is_for_float16_alone() -> None:
    net = Network("bfloat16")
    assert net.training.loss_scale is None
    with pytest.raises(sg.StateError, match="float16"):
        net.training.loss_scale = 8.0
    with pytest.raises(sg.ArgumentError, match="positive"):
        Network("float16").training.loss_scale = -1.0


class Line:
    """A weight that a row of data alone decides, in float16."""

    def __init__(self) -> None:
        sg.set_seed(3)
        x, y, graph = sg.Tensor((4, 2)), sg.Tensor((4, 1)), sg.Graph()
        graph.node(sg.FullyConnectedLayer.create(2, 1), x)
        self.training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
        self.training.add_inputs({"x": x}, {"y": y})
        self.training.compile(sg.Device.cpu(), compute_type="float16")

    def step(self, value: float = 1.0) -> float:
        x = np.full((4, 2), value, np.float32)
        return self.training.execute({"x": x}, {"y": np.ones((4, 1), np.float32)}).loss


def test_learning_goes_on_after_any_number_of_bad_batches() -> None:
    line = Line()
    for _ in range(170):  # 2^16 halved that often is 0 in float32
        line.step(np.nan)
    assert line.training.loss_scale == 1.0
    losses = [line.step() for _ in range(30)]
    assert losses[-1] < 0.01 * losses[0]


def test_the_scale_stops_growing_where_float32_still_holds_it() -> None:
    scale = torch.tensor([2.0**22, 0.0])
    for _ in range(130):  # doubled that often, 2^22 is infinite in float32
        scale[1] = GROWTH_INTERVAL - 1
        _adapt(scale, torch.tensor(True))
    assert scale.tolist() == [2.0**24, 0.0]


@pytest.mark.parametrize(
    ("given", "finite", "wanted"), [(2.0**30, True, 2.0**30), (0.25, False, 0.25), (3.0, False, 1.5)]
)
def test_an_assigned_scale_beyond_the_bounds_stays(given: float, finite: bool, wanted: float) -> None:
    scale = torch.tensor([given, GROWTH_INTERVAL - 1.0])
    _adapt(scale, torch.tensor(finite))
    assert scale.tolist() == [wanted, 0.0]


@pytest.mark.parametrize("scale", [np.inf, np.nan, 1e39, 1e-46, 0.0])
def test_a_scale_that_could_never_change_is_refused(scale: float) -> None:
    training = Line().training
    with pytest.raises(sg.ArgumentError, match="scale is"):
        training.loss_scale = scale
    assert training.loss_scale == 2.0**16


@pytest.mark.parametrize("scale", [0.0, np.inf, np.nan])
def test_progress_saved_with_a_scale_that_was_lost_starts_over(scale: float) -> None:
    line = Line()
    line.training.resume(Progress(scale=[scale, 7.0]))
    assert line.training.loss_scale == 2.0**16
    losses = [line.step() for _ in range(30)]
    assert losses[-1] < 0.01 * losses[0]


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_other_compute_types_are_refused(kind: str) -> None:
    with pytest.raises(sg.ArgumentError, match=kind):
        Network(kind)


def test_inference_computes_in_the_same_type() -> None:
    x = sg.Tensor((4, 16))
    graph = sg.Graph()
    sg.set_seed(1)
    graph.node(sg.FullyConnectedLayer.create(16, 8), x)
    data = GENERATOR.standard_normal((4, 16)).astype(np.float32)
    results = []
    for kind in (None, "bfloat16"):
        inference = sg.InferenceGraph([graph])
        inference.add_inputs({"x": x})
        inference.compile(sg.Device.cpu(), compute_type=kind)
        results.append(inference.execute({"x": data}).result.numpy().copy())
    assert results[1].dtype == np.float32 and not np.array_equal(*results)
    np.testing.assert_allclose(results[1], results[0], rtol=0.05, atol=0.05)
