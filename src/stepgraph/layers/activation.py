"""Activation layers: one function, applied per element."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.types import RawEnum


class ActivationType(RawEnum):
    """Kinds of activation, with their formulas."""

    NONE = 0, "None"  # x
    RELU = 1, "ReLU"  # x where x ≥ 0, else a x
    LINEAR = 2, "Linear"  # a x + b
    SIGMOID = 3, "Sigmoid"  # 1 / (1 + exp(-x))
    HARD_SIGMOID = 4, "Hard Sigmoid"  # a x + b, clamped to [0, 1]
    TANH = 5, "Tanh"  # a tanh(b x)
    ABSOLUTE = 6, "Absolute"  # |x|
    SOFT_PLUS = 7, "Soft Plus"  # a log(1 + exp(b x))
    SOFT_SIGN = 8, "Soft Sign"  # x / (1 + |x|)
    ELU = 9, "ELU"  # x where x ≥ 0, else a (exp(x) - 1)
    RELUN = 10, "ReLUN"  # the smaller of ReLU(x) and b
    LOG_SIGMOID = 11, "Log Sigmoid"  # log(1 / (1 + exp(-x)))
    SELU = 12, "SELU"  # scale (max(0, x) + min(0, alpha (exp(x) - 1)))
    CELU = 13, "CELU"  # max(0, x) + min(0, a (exp(x / a) - 1))
    HARD_SHRINK = 14, "Hard Shrink"  # x outside [-a, a], else 0
    SOFT_SHRINK = 15, "Soft Shrink"  # x moved by a towards 0 outside [-a, a], else 0
    TANH_SHRINK = 16, "Tanh Shrink"  # x - tanh(x)
    THRESHOLD = 17, "Threshold"  # x where x > a, else b
    GELU = 18, "GELU"  # x Φ(x), in its tanh form
    HARD_SWISH = 19, "HardSwish"  # x (x + 3) / 6, with 0 below -3 and x above 3
    CLAMP = 20, "Clamp"  # x clamped to [a, b]
    GELU_ERF = 1001, "GELU erf"  # ours: x Φ(x), exactly
    SILU = 1002, "SiLU"  # ours: x / (1 + exp(-x)), also called Swish


@dataclass(frozen=True)
class ActivationDescriptor:
    """A kind of activation and its parameters, which default to those of the kind.

    Defaults are 1, except for ReLU (a = 0), Linear (b = 0), Hard Sigmoid (a = 0.2, b = 0.5), Hard Shrink and Soft
    Shrink (a = 0.5). No kind uses `c`; it exists for programs that name it.

    Example:
        >>> ActivationDescriptor(ActivationType.HARD_SIGMOID).a
        0.2
    """

    type: ActivationType
    a: float = None  # type: ignore[assignment]  # becomes the kind's default
    b: float = None  # type: ignore[assignment]
    c: float = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not isinstance(self.type, ActivationType):
            raise ArgumentError(
                "ActivationDescriptor", f"the type is {self.type!r}", fix="use a member of ActivationType"
            )
        for name, default in zip("abc", _DEFAULTS.get(self.type, (1.0, 1.0, 1.0)), strict=True):
            given = getattr(self, name)
            object.__setattr__(self, name, self._number(name, default if given is None else given))
        if self.type is ActivationType.SOFT_PLUS and self.b == 0:
            raise ArgumentError("ActivationDescriptor", "b of a Soft Plus is 0: a constant", fix="use another b (beta)")
        if self.type is ActivationType.CELU and self.a == 0:
            raise ArgumentError("ActivationDescriptor", "a of a CELU is 0, but x is divided by it", fix="use another a")
        if self.type is ActivationType.SOFT_SHRINK and self.a < 0:
            raise ArgumentError("ActivationDescriptor", f"a of a Soft Shrink is {self.a}", fix="use a ≥ 0")

    def _number(self, name: str, value: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise ArgumentError(
                "ActivationDescriptor", f"{name} of a {self.type.debug_description} is {value!r}", fix="pass a number"
            )
        return float(value)

    @property
    def activation_type(self) -> ActivationType:
        """The kind, under its original name."""
        return self.type


_DEFAULTS = {
    ActivationType.RELU: (0.0, 1.0, 1.0),
    ActivationType.LINEAR: (1.0, 0.0, 1.0),
    ActivationType.HARD_SIGMOID: (0.2, 0.5, 1.0),
    ActivationType.HARD_SHRINK: (0.5, 1.0, 1.0),
    ActivationType.SOFT_SHRINK: (0.5, 1.0, 1.0),
}


class ActivationLayer(Layer):
    """`y = f(x)`, element by element; the result has the source's shape. For the formulas, see `ActivationType`.

    Same as PyTorch's functions, with its derivatives at the kinks, except that `gelu` is the tanh form (`gelu_erf` is
    PyTorch's default), `hard_sigmoid` has slope 0.2 instead of 1/6 and `soft_plus` never becomes linear early.

    Example:
        >>> ActivationLayer.leaky_relu(0.1).descriptor.a
        0.1
    """

    descriptor: ActivationDescriptor

    default_label = "Activation"

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """`f(x)`."""
        return activate(x, descriptor=self.descriptor)

    @classmethod
    def _of(cls, kind: ActivationType, label: str, a: float | None = None, b: float | None = None) -> ActivationLayer:
        return cls(ActivationDescriptor(kind, a, b), label=label)  # type: ignore[arg-type]

    @classmethod
    def relu(cls, *, label: str = "") -> ActivationLayer:
        """`max(x, 0)`."""
        return cls._of(ActivationType.RELU, label)

    @classmethod
    def relu6(cls, *, label: str = "") -> ActivationLayer:
        """`min(max(x, 0), 6)`."""
        return cls._of(ActivationType.RELUN, label, 0.0, 6.0)

    @classmethod
    def leaky_relu(cls, negative_slope: float = 0.01, *, label: str = "") -> ActivationLayer:
        """`x` where `x ≥ 0`, else `negative_slope x`."""
        return cls._of(ActivationType.RELU, label, negative_slope)

    @classmethod
    def linear(cls, scale: float, bias: float, *, label: str = "") -> ActivationLayer:
        """`scale x + bias`."""
        return cls._of(ActivationType.LINEAR, label, scale, bias)

    @classmethod
    def sigmoid(cls, *, label: str = "") -> ActivationLayer:
        """`1 / (1 + exp(-x))`."""
        return cls._of(ActivationType.SIGMOID, label)

    @classmethod
    def hard_sigmoid(cls, *, label: str = "") -> ActivationLayer:
        """`0.2 x + 0.5`, clamped to [0, 1]."""
        return cls._of(ActivationType.HARD_SIGMOID, label)

    @classmethod
    def tanh(cls, *, label: str = "") -> ActivationLayer:
        """`tanh(x)`."""
        return cls._of(ActivationType.TANH, label)

    @classmethod
    def absolute(cls, *, label: str = "") -> ActivationLayer:
        """`|x|`."""
        return cls._of(ActivationType.ABSOLUTE, label)

    @classmethod
    def soft_plus(cls, beta: float = 1.0, *, label: str = "") -> ActivationLayer:
        """`log(1 + exp(beta x)) / beta`."""
        return cls._of(ActivationType.SOFT_PLUS, label, 1 / beta if beta else 1.0, beta)

    @classmethod
    def soft_sign(cls, *, label: str = "") -> ActivationLayer:
        """`x / (1 + |x|)`."""
        return cls._of(ActivationType.SOFT_SIGN, label)

    @classmethod
    def elu(cls, a: float = 1.0, *, label: str = "") -> ActivationLayer:
        """`x` where `x ≥ 0`, else `a (exp(x) - 1)`."""
        return cls._of(ActivationType.ELU, label, a)

    @classmethod
    def relun(cls, a: float, b: float, *, label: str = "") -> ActivationLayer:
        """The smaller of `b` and a ReLU with slope `a` below 0."""
        return cls._of(ActivationType.RELUN, label, a, b)

    @classmethod
    def log_sigmoid(cls, *, label: str = "") -> ActivationLayer:
        """`log(1 / (1 + exp(-x)))`."""
        return cls._of(ActivationType.LOG_SIGMOID, label)

    @classmethod
    def selu(cls, *, label: str = "") -> ActivationLayer:
        """The self-normalizing unit: a scaled ELU with fixed constants."""
        return cls._of(ActivationType.SELU, label)

    @classmethod
    def celu(cls, a: float = 1.0, *, label: str = "") -> ActivationLayer:
        """`max(0, x) + min(0, a (exp(x / a) - 1))`."""
        return cls._of(ActivationType.CELU, label, a)

    @classmethod
    def hard_shrink(cls, a: float = 0.5, *, label: str = "") -> ActivationLayer:
        """`x` outside `[-a, a]`, else 0."""
        return cls._of(ActivationType.HARD_SHRINK, label, a)

    @classmethod
    def soft_shrink(cls, a: float = 0.5, *, label: str = "") -> ActivationLayer:
        """`x` moved by `a` towards 0 outside `[-a, a]`, else 0."""
        return cls._of(ActivationType.SOFT_SHRINK, label, a)

    @classmethod
    def tanh_shrink(cls, *, label: str = "") -> ActivationLayer:
        """`x - tanh(x)`."""
        return cls._of(ActivationType.TANH_SHRINK, label, 0.0)

    @classmethod
    def threshold(cls, threshold: float, replacement: float, *, label: str = "") -> ActivationLayer:
        """`x` where `x > threshold`, else `replacement`."""
        return cls._of(ActivationType.THRESHOLD, label, threshold, replacement)

    @classmethod
    def gelu(cls, *, label: str = "") -> ActivationLayer:
        """`x Φ(x)` in the form `0.5 x (1 + tanh(a (x + b x³)))` with the usual constants."""
        return cls._of(ActivationType.GELU, label, math.sqrt(2 / math.pi), 0.044715)

    @classmethod
    def gelu_erf(cls, *, label: str = "") -> ActivationLayer:
        """`x Φ(x)` with the exact normal distribution function; ours."""
        return cls._of(ActivationType.GELU_ERF, label)

    @classmethod
    def silu(cls, *, label: str = "") -> ActivationLayer:
        """`x / (1 + exp(-x))`, also called Swish; ours."""
        return cls._of(ActivationType.SILU, label)

    @classmethod
    def hard_swish(cls, *, label: str = "") -> ActivationLayer:
        """`x (x + 3) / 6`, with 0 below -3 and `x` above 3."""
        return cls._of(ActivationType.HARD_SWISH, label)

    @classmethod
    def clamp(cls, minimum: float, maximum: float, *, label: str = "") -> ActivationLayer:
        """`min(max(x, minimum), maximum)`."""
        return cls._of(ActivationType.CLAMP, label, minimum, maximum)


def activate(x: torch.Tensor, *, descriptor: ActivationDescriptor) -> torch.Tensor:
    """`f(x)` for the kind and parameters of `descriptor`."""
    return ACTIVATIONS[descriptor.type](x, descriptor.a, descriptor.b, descriptor.c)


def _relu(x: torch.Tensor, a: float) -> torch.Tensor:
    return torch.relu(x) if a == 0 else F.leaky_relu(x, a)


def _linear(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    scaled = x if a == 1 else a * x
    return scaled if b == 0 else scaled + b


def _tanh(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    return _linear(torch.tanh(_linear(x, b, 0)), a, 0)


def _soft_plus(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    # PyTorch's own is log(1 + exp(b x)) / b, and x itself past the threshold: 40 is exact in float64, its 20 is not.
    return _linear(F.softplus(x, beta=b, threshold=40), a * b, 0)


def _relun(x: torch.Tensor, a: float, b: float) -> torch.Tensor:
    if a == 0 and b > 0:
        return F.hardtanh(x, 0, b)  # no gradient at 0 and b, as with ReLU; `clamp` would pass it
    return torch.clamp(x, 0, b) if a == 0 else F.leaky_relu(x, a).clamp(max=b)


# Each function takes x, a, b, c and uses those in its formula.
ACTIVATIONS: dict[ActivationType, Callable[[torch.Tensor, float, float, float], torch.Tensor]] = {
    ActivationType.NONE: lambda x, a, b, c: x,
    ActivationType.RELU: lambda x, a, b, c: _relu(x, a),
    ActivationType.LINEAR: lambda x, a, b, c: _linear(x, a, b),
    ActivationType.SIGMOID: lambda x, a, b, c: torch.sigmoid(x),
    ActivationType.HARD_SIGMOID: lambda x, a, b, c: _linear(x, a, b).clamp(0, 1),
    ActivationType.TANH: lambda x, a, b, c: _tanh(x, a, b),
    ActivationType.ABSOLUTE: lambda x, a, b, c: torch.abs(x),
    ActivationType.SOFT_PLUS: lambda x, a, b, c: _soft_plus(x, a, b),
    ActivationType.SOFT_SIGN: lambda x, a, b, c: F.softsign(x),
    ActivationType.ELU: lambda x, a, b, c: F.elu(x, a),
    ActivationType.RELUN: lambda x, a, b, c: _relun(x, a, b),
    ActivationType.LOG_SIGMOID: lambda x, a, b, c: F.logsigmoid(x),
    ActivationType.SELU: lambda x, a, b, c: F.selu(x),
    ActivationType.CELU: lambda x, a, b, c: F.celu(x, a),
    ActivationType.HARD_SHRINK: lambda x, a, b, c: F.hardshrink(x, a),
    ActivationType.SOFT_SHRINK: lambda x, a, b, c: F.softshrink(x, a),
    ActivationType.TANH_SHRINK: lambda x, a, b, c: F.tanhshrink(x),
    ActivationType.THRESHOLD: lambda x, a, b, c: F.threshold(x, a, b),
    ActivationType.GELU: lambda x, a, b, c: F.gelu(x, approximate="tanh"),
    ActivationType.HARD_SWISH: lambda x, a, b, c: F.hardswish(x),
    ActivationType.CLAMP: lambda x, a, b, c: torch.clamp(x, a, b),
    ActivationType.GELU_ERF: lambda x, a, b, c: F.gelu(x),
    ActivationType.SILU: lambda x, a, b, c: F.silu(x),
}
