"""Losses: extreme predictions, label weights as a field, descriptor checks, raw values."""

import math
from typing import Any

import pytest
import torch

from stepgraph.errors import ArgumentError
from stepgraph.layers.layer import Scope
from stepgraph.layers.loss import CLASSES, ELEMENTS, LOSSES, SAMPLES, LossDescriptor, LossLayer, LossType
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import ReductionType

SCOPE = Scope({})


def loss_and_slope(layer: LossLayer, y: Any, t: Any) -> tuple[float, list[Any]]:
    leaf = torch.tensor(y, requires_grad=True)
    value = layer.forward(leaf, torch.tensor(t), scope=SCOPE)
    return value.item(), torch.autograd.grad(value, leaf)[0].tolist()


@pytest.mark.parametrize("t", [[[1.0, 0.0]], [0]], ids=["one-hot", "class number"])
def test_softmax_cross_entropy_of_extreme_logits(t: Any) -> None:
    assert loss_and_slope(LossLayer.softmax_cross_entropy(), [[-1000.0, 1000.0]], t) == (2000, [[-1, 1]])


def test_sigmoid_cross_entropy_of_extreme_logits() -> None:
    value, slope = loss_and_slope(LossLayer.sigmoid_cross_entropy(ReductionType.SUM), [-1000.0, 1000.0], [1.0, 1.0])
    assert (value, slope) == (1000, [-1, 0])


@pytest.mark.parametrize("t", [[[1.0, 0.0]], [0]], ids=["one-hot", "class number"])
def test_categorical_cross_entropy_of_a_sure_prediction_is_finite(t: Any) -> None:
    assert loss_and_slope(LossLayer.categorical_cross_entropy(), [[1.0, 0.0]], t) == (0, [[-1, 0]])


def test_gradient_is_that_of_the_reported_mean() -> None:
    assert loss_and_slope(LossLayer.mean_squared_error(), [1.0, 3.0], [0.0, 0.0]) == (5, [1, 3])
    assert loss_and_slope(LossLayer.mean_squared_error(ReductionType.SUM), [1.0, 3.0], [0.0, 0.0]) == (10, [2, 6])


def test_gradient_of_an_exact_prediction_is_zero() -> None:
    assert loss_and_slope(LossLayer.mean_absolute_error(), [2.0], [2.0]) == (0, [0])


def test_every_class_number_counts() -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        LossLayer.softmax_cross_entropy().forward(torch.zeros(2, 3), torch.tensor([0, -100]), scope=SCOPE)


def test_smoothing_uses_the_prediction_for_the_class_count() -> None:
    y, t = torch.randn(4, 5), torch.eye(5)[:4]
    left, given = (LossLayer.softmax_cross_entropy(label_smoothing=0.1, class_count=count) for count in (1, 5))
    assert left.forward(y, t, scope=SCOPE).item() == given.forward(y, t, scope=SCOPE).item()


def test_weights_divide_nothing() -> None:
    y, t, w = torch.ones(4, 2), torch.zeros(4, 2), torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert LossLayer.mean_squared_error().forward(y, t, w, scope=SCOPE).item() == 0.25


def test_weights_of_the_layer_are_a_constant_and_no_parameter() -> None:
    weights = Tensor((4,), fill=0.5)
    layer = LossLayer.softmax_cross_entropy(weights=weights)
    assert layer.constants == {"weights": weights}
    assert layer.parameters == {}


def test_float16_predictions_take_float32_labels() -> None:
    source, labels = TensorDescriptor((4, 3), "float16"), TensorDescriptor((4, 3))
    assert LossLayer.mean_squared_error().infer(source, labels)[0].data_type.debug_description == "float16"


@pytest.mark.parametrize("kind", [kind for kind in ReductionType if kind > ReductionType.MEAN])
def test_other_reductions_are_refused(kind: ReductionType) -> None:
    with pytest.raises(ArgumentError, match=f"a loss cannot be reduced by {kind.name}"):
        LossDescriptor(LossType.HINGE, kind)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("type", 3),
        ("weight", math.nan),
        ("weight", math.inf),
        ("label_smoothing", 1.5),
        ("label_smoothing", -0.1),
        ("class_count", 0),
        ("class_count", 2.0),
        ("epsilon", -1.0),
        ("delta", 0.0),
        ("delta", -1.0),
        ("delta", "1"),
    ],
)
def test_refused_numbers(setting: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{setting} is"):
        LossDescriptor(**{"type": LossType.HUBER, setting: value})


def test_defaults() -> None:
    descriptor = LossDescriptor(LossType.LOG)
    assert descriptor.reduction_type is ReductionType.MEAN
    assert (descriptor.weight, descriptor.label_smoothing, descriptor.class_count) == (1, 0, 1)
    assert (descriptor.epsilon, descriptor.delta) == (1e-7, 1)
    assert descriptor.loss_type is LossType.LOG


def test_factories_build_their_kind() -> None:
    layers = [
        LossLayer.mean_absolute_error(),
        LossLayer.mean_squared_error(),
        LossLayer.softmax_cross_entropy(),
        LossLayer.sigmoid_cross_entropy(),
        LossLayer.categorical_cross_entropy(),
        LossLayer.hinge(),
        LossLayer.huber(),
        LossLayer.cosine_distance(),
        LossLayer.log(),
    ]
    assert [layer.descriptor.type for layer in layers] == list(LossType)
    assert {layer.label for layer in layers} == {"Loss"}
    assert LossLayer.hinge(label="margin").label == "margin"


def test_raw_values_and_descriptions() -> None:
    descriptions = [
        "Absolute Error",
        "Mean Squared Error",
        "Softmax Cross Entropy",
        "Sigmoid Cross Entropy",
        "Categorical Cross Entropy",
        "Hinge",
        "Huber",
        "Cosine Distance",
        "Log",
    ]
    assert [LossType(raw).debug_description for raw in range(9)] == descriptions


def test_tables_cover_the_kinds_once() -> None:
    assert sorted([*ELEMENTS, *CLASSES, *SAMPLES]) == sorted(LossType)
    assert set(LOSSES) == set(LossType)
