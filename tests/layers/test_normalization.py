"""Normalization beyond the table: running statistics, settings, degenerate batches."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepgraph as sg
from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.layer_normalization import GroupNormalizationLayer, LayerNormalizationLayer
from stepgraph.layers.normalization import BatchNormalizationLayer, InstanceNormalizationLayer
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from tests.layers.cases_normalization import by_groups, over_last, with_batch_statistics


def run(layer: Layer, x: torch.Tensor, training: bool = True) -> tuple[torch.Tensor, Scope]:
    tensors = {**layer.parameters, **layer.statistics}.values()
    scope = Scope({tensor: tensor.torch().to(x.dtype) for tensor in tensors}, training=training)
    return layer.forward(x, scope=scope), scope


def images(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3 + 2


def test_create_starts_from_the_standard_normal() -> None:
    layer = BatchNormalizationLayer.create(4, variance_epsilon=1e-3, momentum=0.9, label="norm")
    assert (layer.label, layer.variance_epsilon, layer.momentum) == ("norm", 1e-3, 0.9)
    assert [tensor.numpy().tolist() for tensor in (layer.mean, layer.variance)] == [[0.0] * 4, [1.0] * 4]
    assert layer.beta is not None
    assert layer.gamma is not None
    assert [tensor.numpy().tolist() for tensor in (layer.beta, layer.gamma)] == [[0.0] * 4, [1.0] * 4]
    assert layer.beta_parameter.tensor is layer.beta
    assert layer.gamma_parameter.tensor is layer.gamma
    assert layer.parameter_count == 8
    assert BatchNormalizationLayer.create(2).momentum == 0.99
    assert BatchNormalizationLayer.create(2).label == "BatchNorm"


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (4, 3, 2, 5), (2, 3, 2, 2, 3)], ids=len)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("momentum", [0.99, 0.5, 0.0, 1.0])
def test_running_statistics_keep_the_share_of_momentum(shape: tuple[int, ...], packed: bool, momentum: float) -> None:
    packing = (1, 3, 1, 1) if packed else (3,)
    mean, variance = (Tensor(packing, data=np.full(packing, value, np.float32)) for value in (0.5, 2.0))
    layer = BatchNormalizationLayer(3, mean, variance, momentum=momentum)
    x = images(*shape)
    _, scope = run(layer, x)
    channels = x.transpose(0, 1).reshape(3, -1).numpy()
    wanted = {mean: (0.5, channels.mean(1)), variance: (2.0, channels.var(1))}  # NumPy's variance is the biased one
    assert scope.updates.keys() == wanted.keys()
    for tensor, (running, batch) in wanted.items():
        assert scope.updates[tensor].shape == packing
        expected = momentum * running + (1 - momentum) * batch
        np.testing.assert_allclose(scope.updates[tensor].numpy().reshape(-1), expected, rtol=1e-12)


def test_statistics_approach_those_of_the_data_and_inference_uses_them() -> None:
    layer = BatchNormalizationLayer.create(3, momentum=0.5)
    x = images(8, 3, 4, 4)
    for _ in range(40):
        _, scope = run(layer, x)
        for tensor, value in scope.updates.items():
            tensor.torch().copy_(value)
    trained, _ = run(layer, x)
    inferred, scope = run(layer, x, training=False)
    assert not scope.updates
    torch.testing.assert_close(inferred, trained, rtol=1e-4, atol=1e-4)


def test_updates_carry_no_gradient() -> None:
    layer = BatchNormalizationLayer.create(3)
    _, scope = run(layer, images(4, 3).requires_grad_())
    assert not any(value.requires_grad for value in scope.updates.values())


def test_variance_taken_back_from_the_operator_is_accurate_in_float32() -> None:
    for scale in (1e-3, 1.0, 1e3):
        layer = BatchNormalizationLayer.create(3, momentum=0.0)
        x = (images(16, 3, 8, 8) * scale).float()
        _, scope = run(layer, x)
        wanted = x.double().var((0, 2, 3), unbiased=False)
        torch.testing.assert_close(scope.updates[layer.variance].double(), wanted, rtol=1e-5, atol=1e-10)


def test_constant_channel_and_single_value_have_variance_zero() -> None:
    layer = BatchNormalizationLayer.create(2, momentum=0.0)
    for x in (torch.full((4, 2, 3), 7.0), torch.tensor([[3.0, -5.0]])):
        y, scope = run(layer, x)
        torch.testing.assert_close(y, torch.zeros_like(x), rtol=0, atol=1e-3)
        torch.testing.assert_close(scope.updates[layer.variance], torch.zeros(2), rtol=0, atol=1e-9)
        assert (scope.updates[layer.variance] >= 0).all()


def test_low_precision_sources_keep_float32_statistics() -> None:
    layer = BatchNormalizationLayer.create(3)
    x = images(8, 3, 4).to(torch.bfloat16)
    tensors = {**layer.parameters, **layer.statistics}.values()
    scope = Scope({tensor: tensor.torch() for tensor in tensors}, training=True)
    assert layer.forward(x, scope=scope).dtype == torch.bfloat16
    assert {value.dtype for value in scope.updates.values()} == {torch.float32}


@pytest.mark.parametrize("epsilon", [0.0, -1e-5, float("inf"), float("nan")])
def test_epsilon_outside_its_range_is_refused(epsilon: float) -> None:
    with pytest.raises(ArgumentError, match=f"variance_epsilon is {epsilon}"):
        BatchNormalizationLayer.create(3, variance_epsilon=epsilon)


@pytest.mark.parametrize("momentum", [-0.1, 1.1, float("nan")])
def test_momentum_outside_its_range_is_refused(momentum: float) -> None:
    with pytest.raises(ArgumentError, match=f"momentum is {momentum}"):
        BatchNormalizationLayer.create(3, momentum=momentum)


@pytest.mark.parametrize("name", ["mean", "variance", "beta", "gamma"])
def test_tensor_of_another_size_is_refused_by_name(name: str) -> None:
    tensors = {key: Tensor((3,), fill=1.0) for key in ("mean", "variance", "beta", "gamma")}
    with pytest.raises(ShapeError, match=f"{name} holds 4 numbers, but 3 channels need 3"):
        BatchNormalizationLayer(3, **{**tensors, name: Tensor((4,), fill=1.0)})


def test_rank_and_channels_of_the_source_are_checked() -> None:
    layer = BatchNormalizationLayer.create(3)
    assert layer.infer(TensorDescriptor((5, 3)))[0].shape == (5, 3)
    with pytest.raises(ShapeError, match="normalizes 3 channels"):
        layer.infer(TensorDescriptor((3, 5)))


def test_instance_statistics_are_averages_over_the_batch() -> None:
    for packing in ((3,), (1, 3, 1, 1)):
        mean, variance = (Tensor(packing, fill=value) for value in (0.5, 2.0))
        layer = InstanceNormalizationLayer(3, mean, variance, momentum=0.9)
        x = images(4, 3, 2, 5)
        _, scope = run(layer, x)
        flat = x.reshape(4, 3, 10).numpy()
        for tensor, running, found in ((mean, 0.5, flat.mean(2)), (variance, 2.0, flat.var(2))):
            assert scope.updates[tensor].shape == packing
            assert not scope.updates[tensor].requires_grad
            expected = 0.9 * running + 0.1 * found.mean(0)
            np.testing.assert_allclose(scope.updates[tensor].numpy().ravel(), expected, rtol=1e-12)
        assert not run(layer, x, training=False)[1].updates


def test_instance_without_statistics_tracks_none() -> None:
    layer, x = InstanceNormalizationLayer.create(3), images(2, 3, 4)
    trained, scope = run(layer, x)
    inferred, _ = run(layer, x, training=False)
    assert not scope.updates
    assert torch.equal(trained, inferred)


def test_instance_takes_sources_that_lie_otherwise_in_memory() -> None:
    layer, x = InstanceNormalizationLayer.create(3), images(2, 3, 4, 5)
    turned = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(run(layer, turned)[0], run(layer, x)[0])
    torch.testing.assert_close(run(layer, x.transpose(2, 3))[0], run(layer, x)[0].transpose(2, 3))


@pytest.mark.parametrize("given", ["mean", "variance"])
def test_instance_refuses_half_of_the_statistics(given: str) -> None:
    with pytest.raises(ArgumentError, match=f"{given} was passed without"):
        InstanceNormalizationLayer(3, **{given: Tensor((3,), fill=1.0)})


def test_instance_create_tracks_if_asked() -> None:
    layer = InstanceNormalizationLayer.create(4, tracks_running_statistics=True, momentum=0.5, label="norm")
    assert (layer.label, layer.momentum, InstanceNormalizationLayer.create(4).momentum) == ("norm", 0.5, 0.99)
    assert sorted(layer.statistics) == ["mean", "variance"]
    values = [tensor.numpy().tolist() for tensor in (layer.mean, layer.variance, layer.beta, layer.gamma) if tensor]
    assert values == [[0.0] * 4, [1.0] * 4, [0.0] * 4, [1.0] * 4]
    assert layer.gamma_parameter.tensor is layer.gamma
    assert InstanceNormalizationLayer(4).beta_parameter is None


def test_group_and_layer_create() -> None:
    group = GroupNormalizationLayer.create(6, 2, variance_epsilon=1e-3, label="groups")
    layer = LayerNormalizationLayer.create((2, 3), variance_epsilon=1e-3, label="rows")
    assert (group.label, group.group_count, group.variance_epsilon) == ("groups", 2, 1e-3)
    assert (layer.label, layer.normalized_shape, layer.variance_epsilon) == ("rows", (2, 3), 1e-3)
    for one, shape in ((group, (6,)), (layer, (2, 3))):
        assert one.beta is not None
        assert one.gamma is not None
        assert one.beta.shape == one.gamma.shape == shape
        assert not one.beta.numpy().any()
        assert (one.gamma.numpy() == 1).all()
        assert one.beta_parameter.tensor is one.beta
        assert one.gamma_parameter.tensor is one.gamma
    assert LayerNormalizationLayer.create(5).normalized_shape == (5,)
    labels = (
        GroupNormalizationLayer(6, 2).label,
        LayerNormalizationLayer([5]).label,
        InstanceNormalizationLayer(2).label,
    )
    assert labels == ("GroupNorm", "LayerNorm", "InstanceNorm")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: GroupNormalizationLayer(6, 4), ArgumentError, "group_count is 4, which does not divide 6 channels"),
        (lambda: GroupNormalizationLayer(6, 0), ArgumentError, "group_count is 0"),
        (lambda: GroupNormalizationLayer(0, 1), ArgumentError, "feature_channel_count is 0"),
        (
            lambda: GroupNormalizationLayer(6, 2, Tensor((5,), fill=0.0)),
            ShapeError,
            "beta holds 5 numbers, but 6",
        ),
        (lambda: GroupNormalizationLayer(6, 2, variance_epsilon=0.0), ArgumentError, "variance_epsilon is 0.0"),
        (lambda: InstanceNormalizationLayer(3, gamma=Tensor((4,), fill=1.0)), ShapeError, "gamma holds 4 numbers"),
        (lambda: InstanceNormalizationLayer(3, momentum=2.0), ArgumentError, "momentum is 2.0"),
        (lambda: InstanceNormalizationLayer(3, variance_epsilon=-1.0), ArgumentError, "variance_epsilon is -1.0"),
        (lambda: LayerNormalizationLayer(()), ArgumentError, r"normalized_shape is \(\)"),
        (lambda: LayerNormalizationLayer((3, 0)), ArgumentError, r"normalized_shape is \(3, 0\)"),
        (lambda: LayerNormalizationLayer((3, 2), Tensor((3,), fill=0.0)), ShapeError, r"shape \[3, 2\] needs 6"),
        (lambda: LayerNormalizationLayer((3,), variance_epsilon=0.0), ArgumentError, "variance_epsilon is 0.0"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_training_normalizes_and_inference_uses_what_was_learned() -> None:
    x, y = sg.Tensor((4, 2, 3, 3)), sg.Tensor((4, 2, 3, 3))
    layers = [
        InstanceNormalizationLayer.create(2, tracks_running_statistics=True, momentum=0.5),
        GroupNormalizationLayer.create(2, 2),
        LayerNormalizationLayer.create((3, 3)),
    ]
    graph = sg.Graph()
    last = x
    for layer in layers:
        last = graph.node(layer, last)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    generator = np.random.default_rng(0)
    image = 3 + 2 * generator.standard_normal((4, 2, 3, 3)).astype(np.float32)
    target = generator.standard_normal((4, 2, 3, 3)).astype(np.float32)
    losses = [training.execute({"x": image}, {"y": target}).loss for _ in range(30)]
    assert losses[-1] < losses[0]
    found = image.astype(np.float64).reshape(4, 2, 9)
    assert layers[0].statistics["mean"].numpy() == pytest.approx(found.mean(2).mean(0), rel=1e-5)
    assert layers[0].statistics["variance"].numpy() == pytest.approx(found.var(2).mean(0), rel=1e-5)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Layer, torch.Tensor, Any]:
    """Any normalization, a source for it and its reference."""
    kind = draw(st.sampled_from(["batch", "instance", "group", "layer"]))
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    groups, epsilon = draw(st.integers(1, 3)), draw(st.sampled_from([1e-5, 1e-2, 1.0]))
    channels = groups * draw(st.integers(1, 2))
    pixels = draw(st.lists(st.integers(2, 4), min_size=1 if kind == "instance" else 0, max_size=3))
    shape = (draw(st.integers(2, 3)), channels, *pixels)
    axes = draw(st.integers(1, len(shape) - 1))
    held = shape[-axes:] if kind == "layer" else draw(st.sampled_from([(channels,), (1, channels, 1, 1)]))
    values = (Tensor(held, data=generator.uniform(0.5, 2, held).astype(np.float32)) for _ in range(4))
    mean, variance, beta, gamma = values
    scale = {name: one for name, one in (("beta", beta), ("gamma", gamma)) if draw(st.booleans())}
    scale["variance_epsilon"] = epsilon
    x = torch.from_numpy(1 + 2 * generator.standard_normal(shape))
    match kind:
        case "batch":
            return BatchNormalizationLayer(channels, mean, variance, **scale), x, with_batch_statistics(epsilon)
        case "instance":
            tracked = {"mean": mean, "variance": variance} if draw(st.booleans()) else {}
            return InstanceNormalizationLayer(channels, **tracked, **scale), x, by_groups(None, epsilon)
        case "group":
            return GroupNormalizationLayer(channels, groups, **scale), x, by_groups(groups, epsilon)
    return LayerNormalizationLayer(shape[-axes:], **scale), x, over_last(axes, epsilon)


def check_any(layer: Layer, x: torch.Tensor, reference: Any) -> None:
    assert layer.infer(TensorDescriptor(tuple(x.shape)))[0].shape == tuple(x.shape)
    y, _ = run(layer, x)
    parameters = {name: tensor.numpy().astype(np.float64) for name, tensor in layer.parameters.items()}
    np.testing.assert_allclose(y.numpy(), reference(x.numpy(), **parameters), rtol=1e-9, atol=1e-10)


@given(drawn())
@settings(max_examples=25, deadline=None)
def test_any_setting(one: tuple[Layer, torch.Tensor, Any]) -> None:
    check_any(*one)


@pytest.mark.deep
@given(drawn())
@settings(max_examples=300, deadline=None)
def test_any_setting_deep(one: tuple[Layer, torch.Tensor, Any]) -> None:
    check_any(*one)
