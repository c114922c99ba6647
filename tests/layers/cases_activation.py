"""Cases of every activation."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.activation import ActivationDescriptor, ActivationLayer, ActivationType
from tests.layers.case import Bad, Case, uniform

ALPHA, SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
erf = np.vectorize(math.erf)

BAD = (
    Bad((np.zeros((2, 3), np.int64),), DataTypeError, "the source is int64, but a floating type is needed"),
    Bad(((2, 3), (2, 3)), ShapeError, "2 sources were passed, but 1 are needed"),
)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def hard_swish(x: np.ndarray) -> np.ndarray:
    return np.where(x <= -3, 0, np.where(x >= 3, x, x * (x + 3) / 6))


def of(kind: ActivationType, *numbers: float) -> Callable[[], ActivationLayer]:
    return lambda: ActivationLayer(ActivationDescriptor(kind, *numbers))


def row(
    name: str,
    make: Callable[[], ActivationLayer],
    reference: Callable[[np.ndarray], Any],
    twin: Callable[[torch.Tensor], torch.Tensor] | None = None,
    bad: tuple[Bad, ...] = (),
) -> Case:
    """A case whose source lies on both sides of every kink, and on none."""
    return Case(name, make, (uniform(3, 7, low=-5, high=5),), reference, twin, bad=bad)


CASES = [
    row("none", of(ActivationType.NONE), lambda x: x, torch.nn.Identity()),
    row("relu", ActivationLayer.relu, lambda x: np.maximum(x, 0), F.relu, BAD),
    row("relu6", ActivationLayer.relu6, lambda x: np.minimum(np.maximum(x, 0), 6), F.relu6),
    row("leaky relu", ActivationLayer.leaky_relu, lambda x: np.where(x >= 0, x, 0.01 * x), F.leaky_relu),
    row(
        "leaky relu, negative slope",
        lambda: ActivationLayer.leaky_relu(-0.3),
        lambda x: np.where(x >= 0, x, -0.3 * x),
        lambda x: F.leaky_relu(x, -0.3),
    ),
    row("linear", lambda: ActivationLayer.linear(2.5, -1), lambda x: 2.5 * x - 1, lambda x: 2.5 * x - 1),
    row("linear, default numbers", of(ActivationType.LINEAR), lambda x: x),
    row("sigmoid", ActivationLayer.sigmoid, sigmoid, torch.sigmoid),
    row("hard sigmoid", ActivationLayer.hard_sigmoid, lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
    row(
        "hard sigmoid, slope 1/6",
        of(ActivationType.HARD_SIGMOID, 1 / 6, 0.5),
        lambda x: np.clip(x / 6 + 0.5, 0, 1),
        lambda x: torch.clamp(x / 6 + 0.5, 0, 1),  # F.hardsigmoid has a float32 slope in its float64 gradient
    ),
    row("tanh", ActivationLayer.tanh, np.tanh, torch.tanh),
    row("tanh, scaled", of(ActivationType.TANH, 1.7, 0.6), lambda x: 1.7 * np.tanh(0.6 * x)),
    row("absolute", ActivationLayer.absolute, np.abs, torch.abs),
    row("soft plus", ActivationLayer.soft_plus, lambda x: np.log1p(np.exp(x)), F.softplus),
    row(
        "soft plus, beta",
        lambda: ActivationLayer.soft_plus(1.5),
        lambda x: np.log1p(np.exp(1.5 * x)) / 1.5,
        lambda x: F.softplus(x, 1.5),
    ),
    row("soft plus, a and b", of(ActivationType.SOFT_PLUS, 3, -2), lambda x: 3 * np.log1p(np.exp(-2 * x))),
    row("soft sign", ActivationLayer.soft_sign, lambda x: x / (1 + np.abs(x)), F.softsign),
    row(
        "elu",
        lambda: ActivationLayer.elu(0.7),
        lambda x: np.where(x >= 0, x, 0.7 * np.expm1(x)),
        lambda x: F.elu(x, 0.7),
    ),
    row("relun", lambda: ActivationLayer.relun(0.2, 2), lambda x: np.minimum(np.where(x >= 0, x, 0.2 * x), 2)),
    row("log sigmoid", ActivationLayer.log_sigmoid, lambda x: np.log(sigmoid(x)), F.logsigmoid),
    row(
        "selu",
        ActivationLayer.selu,
        lambda x: SCALE * (np.maximum(0, x) + np.minimum(0, ALPHA * np.expm1(x))),
        F.selu,
    ),
    row(
        "celu",
        lambda: ActivationLayer.celu(1.3),
        lambda x: np.maximum(0, x) + np.minimum(0, 1.3 * np.expm1(x / 1.3)),
        lambda x: F.celu(x, 1.3),
    ),
    row("hard shrink", ActivationLayer.hard_shrink, lambda x: np.where(np.abs(x) > 0.5, x, 0), F.hardshrink),
    row(
        "soft shrink",
        lambda: ActivationLayer.soft_shrink(0.8),
        lambda x: np.where(x > 0.8, x - 0.8, np.where(x < -0.8, x + 0.8, 0)),
        lambda x: F.softshrink(x, 0.8),
    ),
    row("tanh shrink", ActivationLayer.tanh_shrink, lambda x: x - np.tanh(x), F.tanhshrink),
    row(
        "threshold",
        lambda: ActivationLayer.threshold(1, -7),
        lambda x: np.where(x > 1, x, -7),
        lambda x: F.threshold(x, 1, -7),
    ),
    row("gelu", ActivationLayer.gelu, gelu, lambda x: F.gelu(x, approximate="tanh")),
    row("gelu erf", ActivationLayer.gelu_erf, lambda x: x * 0.5 * (1 + erf(x / np.sqrt(2))), F.gelu),
    row("silu", ActivationLayer.silu, lambda x: x / (1 + np.exp(-x)), F.silu),
    row("hard swish", ActivationLayer.hard_swish, hard_swish, F.hardswish),
    row("clamp", lambda: ActivationLayer.clamp(-1, 2), lambda x: np.clip(x, -1, 2), lambda x: torch.clamp(x, -1, 2)),
]
