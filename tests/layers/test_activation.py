"""Activations and softmax: measured values, defaults, raw values, refusals."""

import math

import numpy as np
import pytest
import torch

from stepgraph.errors import ArgumentError
from stepgraph.layers.activation import ACTIVATIONS, ActivationDescriptor, ActivationLayer, ActivationType
from stepgraph.layers.layer import Scope
from stepgraph.layers.softmax import SOFTMAX, SoftmaxLayer, SoftmaxOperation

A = ActivationLayer


def of(kind: ActivationType, *numbers: float) -> ActivationLayer:
    return ActivationLayer(ActivationDescriptor(kind, *numbers))


def forward(layer: ActivationLayer, *values: float) -> np.ndarray:
    return layer.forward(torch.tensor(values, dtype=torch.float32), scope=Scope({})).numpy()


@pytest.mark.parametrize(
    ("layer", "wanted"),
    [
        (A.hard_sigmoid(), (0.7, 0.9, 1, 1)),
        (A.soft_plus(), (1.313262, 2.126928, 3.048587, 4.01815)),
        (A.soft_sign(), (0.5, 0.6666667, 0.75, 0.8)),
        (of(ActivationType.RELUN), (1, 1, 1, 1)),
        (A.relu6(), (1, 2, 3, 4)),
        (A.log_sigmoid(), (-0.3132617, -0.126928, -0.04858733, -0.01815)),
        (A.soft_shrink(), (0.5, 1.5, 2.5, 3.5)),
        (of(ActivationType.THRESHOLD), (1, 2, 3, 4)),
        (of(ActivationType.CLAMP), (1, 1, 1, 1)),
        (A.clamp(-1, 2), (1, 2, 2, 2)),
        (A.gelu(), (0.841192, 1.9546, 2.99636, 3.99993)),
        (A.tanh_shrink(), (0.2384059, 1.035972, 2.004945, 3.000671)),
        (A.selu(), (1.050701, 2.101402, 3.152103, 4.202804)),
        (A.hard_swish(), (0.6666667, 1.6666667, 3, 4)),
    ],
    ids=lambda value: value.descriptor.type.name if isinstance(value, ActivationLayer) else "",
)
def test_values_measured_on_the_original(layer: ActivationLayer, wanted: tuple[float, ...]) -> None:
    np.testing.assert_allclose(forward(layer, 1, 2, 3, 4), wanted, rtol=2e-6, atol=1e-7)


def test_relu_measured_on_the_original() -> None:
    assert forward(A.relu(), -1, 2, -3, 4).tolist() == [0, 2, 0, 4]


def test_values_at_the_kinks() -> None:
    assert forward(A.threshold(1, 7), 1).item() == 7  # only above the threshold x stays
    assert forward(A.hard_shrink(), 0.5, -0.5).tolist() == [0, 0]
    assert forward(A.soft_shrink(), 0.5, -0.5).tolist() == [0, 0]
    assert forward(A.clamp(2, 1), 0, 3).tolist() == [1, 1]  # min(max(x, 2), 1)


def test_large_sources_stay_finite() -> None:
    for layer in (A.soft_plus(), A.log_sigmoid(), A.elu(), A.celu(), A.selu(), A.gelu(), A.soft_plus(3)):
        assert np.isfinite(forward(layer, -1e4, 1e4)).all(), layer


def test_soft_plus_is_exact_in_float64_beyond_the_bound_of_torch() -> None:
    x = torch.tensor([25.0], dtype=torch.float64)
    assert A.soft_plus().forward(x, scope=Scope({})).item() == pytest.approx(25 + math.log1p(math.exp(-25)), rel=1e-15)


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (ActivationType.SIGMOID, (1, 1, 1)),
        (ActivationType.RELU, (0, 1, 1)),
        (ActivationType.LINEAR, (1, 0, 1)),
        (ActivationType.HARD_SIGMOID, (0.2, 0.5, 1)),
        (ActivationType.HARD_SHRINK, (0.5, 1, 1)),
        (ActivationType.SOFT_SHRINK, (0.5, 1, 1)),
    ],
)
def test_default_numbers(kind: ActivationType, numbers: tuple[float, ...]) -> None:
    descriptor = ActivationDescriptor(kind)
    assert (descriptor.a, descriptor.b, descriptor.c) == numbers
    assert descriptor.activation_type is kind


def test_given_numbers_are_kept_and_the_rest_are_defaults() -> None:
    descriptor = ActivationDescriptor(ActivationType.HARD_SIGMOID, 0.3)
    assert (descriptor.a, descriptor.b, descriptor.c) == (0.3, 0.5, 1)
    assert A.soft_plus(4).descriptor == ActivationDescriptor(ActivationType.SOFT_PLUS, 0.25, 4)
    assert A.leaky_relu().descriptor == ActivationDescriptor(ActivationType.RELU, 0.01)
    assert A.relu6().descriptor == ActivationDescriptor(ActivationType.RELUN, 0, 6)
    assert A.gelu().descriptor.a == pytest.approx(0.7978845608)


@pytest.mark.parametrize(
    ("kind", "numbers", "words"),
    [
        (ActivationType.RELU, (math.nan,), "a of a ReLU is nan"),
        (ActivationType.CLAMP, (0, math.nan), "b of a Clamp is nan"),
        (ActivationType.RELU, ("1",), "a of a ReLU is '1'"),
        (ActivationType.RELU, (True,), "a of a ReLU is True"),
        (ActivationType.SOFT_PLUS, (1, 0), "b of a Soft Plus is 0"),
        (ActivationType.CELU, (0,), "a of a CELU is 0"),
        (ActivationType.SOFT_SHRINK, (-1,), "a of a Soft Shrink is -1.0"),
        (1, (), "the type is 1"),
    ],
)
def test_refused_numbers(kind: ActivationType, numbers: tuple[float, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ActivationDescriptor(kind, *numbers)
    with pytest.raises(ArgumentError, match="b of a Soft Plus is 0"):
        A.soft_plus(0)


def test_raw_values_and_descriptions() -> None:
    descriptions = [
        "None",
        "ReLU",
        "Linear",
        "Sigmoid",
        "Hard Sigmoid",
        "Tanh",
        "Absolute",
        "Soft Plus",
        "Soft Sign",
        "ELU",
        "ReLUN",
        "Log Sigmoid",
        "SELU",
        "CELU",
        "Hard Shrink",
        "Soft Shrink",
        "Tanh Shrink",
        "Threshold",
        "GELU",
        "HardSwish",
        "Clamp",
    ]
    assert [ActivationType(raw).debug_description for raw in range(21)] == descriptions
    assert [kind.value for kind in ActivationType if kind.value > 20] == [1001, 1002]
    assert [(kind.value, kind.debug_description) for kind in SoftmaxOperation] == [(0, "Softmax"), (1, "Log Softmax")]


def test_tables_cover_the_kinds() -> None:
    assert set(ACTIVATIONS) == set(ActivationType)
    assert set(SOFTMAX) == set(SoftmaxOperation)


def test_labels() -> None:
    assert A.tanh().label == "Activation"
    assert A.clamp(0, 1, label="box").label == "box"
    assert SoftmaxLayer.softmax().label == "Softmax"


@pytest.mark.parametrize(
    ("operation", "dimension"), [(0, 1), (SoftmaxOperation.SOFTMAX, -1), (SoftmaxOperation.SOFTMAX, 1.5)]
)
def test_softmax_refuses(operation: SoftmaxOperation, dimension: int) -> None:
    with pytest.raises(ArgumentError):
        SoftmaxLayer(operation, dimension)


@pytest.mark.parametrize("layer", [A.relu(), A.relu6(), A.relun(0, 2)])
def test_rectifiers_pass_no_gradient_at_their_kinks(layer: ActivationLayer) -> None:
    x = torch.tensor([-1.0, 0.0, 1.0, 2.0, 6.0], requires_grad=True)
    layer.forward(x, scope=Scope({})).sum().backward()
    bound = layer.descriptor.b if layer.descriptor.type is ActivationType.RELUN else torch.inf
    assert x.grad.tolist() == [float(0 < one < bound) for one in x.tolist()]
