"""Optimizers: one pure update rule each; clipping, rescaling and regularization once, in the base class.

A rule sees one parameter: `update(parameter, gradient, state, numbers)` returns the new parameter and the new
state. All hyperparameters are live: they enter the compiled step as device scalars, so assigning one takes effect in
the next update and never recompiles anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from stepgraph.errors import ArgumentError, DataTypeError, StateError
from stepgraph.types import RawEnum

Arrays = tuple[torch.Tensor, ...]


class GradientClippingType(RawEnum):
    """What is limited before an update."""

    BY_VALUE = 0, "By Value"
    BY_NORM = 1, "By Norm"
    BY_GLOBAL_NORM = 2, "By Global Norm"


class RegularizationType(RawEnum):
    """The penalty added to the gradient to keep parameters small."""

    NONE = 0, "None"
    L1 = 1, "L1"
    L2 = 2, "L2"


@dataclass(frozen=True)
class OptimizerDescriptor:
    """The settings that all optimizers share.

    The order is: clip, rescale, then add the regularization's gradient (`scale * sign(W)` or `scale * W`),
    which is itself neither clipped nor rescaled.

    Args:
        learning_rate: the step size.
        gradient_rescale: a factor for every gradient.
        applies_gradient_clipping: whether gradients are clipped. By default they are if one of the next
            four settings is passed; False together with them is rejected.
        gradient_clipping_type: by value, by the norm of each gradient, or by the norm of all of them together; by
            default, by value. A norm requires it.
        gradient_clip_max: the largest element, by value; default 1.
        gradient_clip_min: the smallest element, by value; default -1.
        maximum_clipping_norm: the largest norm, by norm and by global norm; default 1.
        custom_global_norm: if not 0, replaces the computed global norm. (The original's short
            factories set it to 1; here it is 0, so that clipping by global norm takes effect.)
        regularization_type: the penalty added to gradients to keep parameters small.
        regularization_scale: its weight; the weight decay of `AdamWOptimizer`.

    Example:
        >>> together = GradientClippingType.BY_GLOBAL_NORM
        >>> clipped = OptimizerDescriptor(1e-3, gradient_clipping_type=together, maximum_clipping_norm=5.0)
        >>> AdamOptimizer(clipped).applies_gradient_clipping
        True
    """

    learning_rate: float
    gradient_rescale: float = 1.0
    # None means "not passed" and is replaced by `_CLIPPING`: it is never read.
    applies_gradient_clipping: bool = None  # type: ignore[assignment]
    gradient_clipping_type: GradientClippingType = None  # type: ignore[assignment]
    gradient_clip_max: float = None  # type: ignore[assignment]
    gradient_clip_min: float = None  # type: ignore[assignment]
    maximum_clipping_norm: float = None  # type: ignore[assignment]
    custom_global_norm: float = 0.0
    regularization_type: RegularizationType = RegularizationType.NONE
    regularization_scale: float = 0.0

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _CLIPPING if getattr(self, name) is not None}
        if self.applies_gradient_clipping is None:
            object.__setattr__(self, "applies_gradient_clipping", bool(given))
        elif self.applies_gradient_clipping is False and given and given != _CLIPPING:  # `replace` passes them all
            raise ArgumentError(
                "OptimizerDescriptor",
                f"applies_gradient_clipping is False, but {', '.join(given)} is set",
                fix="leave one out",
            )
        for name, default in _CLIPPING.items():
            object.__setattr__(self, name, given.get(name, default))
        self._check()
        self._require_used(given)

    @classmethod
    def exact(cls, learning_rate: float, **settings: Any) -> OptimizerDescriptor:
        """Uses every setting literally: only `applies_gradient_clipping`, by default False, decides, as in ML Compute.

        Example:
            >>> OptimizerDescriptor.exact(0.1, gradient_clip_max=0.5).applies_gradient_clipping
            False
        """
        made = cls(learning_rate, **{name: value for name, value in settings.items() if name not in _DECIDING})
        decided = {"applies_gradient_clipping": False, **_CLIPPING, "custom_global_norm": 0.0}
        for name, default in decided.items():
            object.__setattr__(made, name, settings.get(name, default))
        made._check()
        return made

    def _require_used(self, given: Mapping[str, Any]) -> None:
        """Rejects a norm that this kind of clipping does not use."""
        kind = self.gradient_clipping_type
        by_value = "maximum_clipping_norm" in given and "gradient_clipping_type" not in given
        if by_value or (self.custom_global_norm and kind is not GradientClippingType.BY_GLOBAL_NORM):
            name = "maximum_clipping_norm" if by_value else "custom_global_norm"
            norms = "BY_NORM or BY_GLOBAL_NORM" if by_value else "BY_GLOBAL_NORM"
            raise ArgumentError(
                "OptimizerDescriptor",
                f"{name} is {getattr(self, name)}, which clipping {kind.debug_description.lower()} does not use",
                fix=f"pass gradient_clipping_type={norms}",
            )

    def _check(self) -> None:
        for one in fields(self):
            if one.type == "float":
                in_range("OptimizerDescriptor", one.name, getattr(self, one.name))
        member("OptimizerDescriptor", "gradient_clipping_type", self.gradient_clipping_type, GradientClippingType)
        member("OptimizerDescriptor", "regularization_type", self.regularization_type, RegularizationType)
        switch("OptimizerDescriptor", "applies_gradient_clipping", self.applies_gradient_clipping)
        check_bounds("OptimizerDescriptor", self)


_CLIPPING: dict[str, Any] = {
    "gradient_clipping_type": GradientClippingType.BY_VALUE,
    "gradient_clip_max": 1.0,
    "gradient_clip_min": -1.0,
    "maximum_clipping_norm": 1.0,
}
_DECIDING = {"applies_gradient_clipping", "custom_global_norm", *_CLIPPING}


class Optimizer:
    """Base of the optimizers.

    Args:
        descriptor: the shared settings, or just the learning rate.
        learning_rate: instead of a descriptor.

    Example:
        >>> optimizer = SGDOptimizer(learning_rate=0.1)
        >>> optimizer.learning_rate = 0.05  # the next update uses it
    """

    slots: tuple[str, ...] = ()
    rule: str = ""
    live: ClassVar[tuple[str, ...]] = (
        "learning_rate",
        "gradient_rescale",
        "gradient_clip_max",
        "gradient_clip_min",
        "maximum_clipping_norm",
        "custom_global_norm",
        "regularization_scale",
        "time_step",
    )

    learning_rate: float
    gradient_rescale: float
    gradient_clip_max: float
    gradient_clip_min: float
    maximum_clipping_norm: float
    custom_global_norm: float
    regularization_scale: float
    applies_gradient_clipping: bool
    gradient_clipping_type: GradientClippingType
    regularization_type: RegularizationType
    time_step: int
    version: int
    time_version: int

    def __init__(
        self, descriptor: OptimizerDescriptor | float | None = None, *, learning_rate: float | None = None
    ) -> None:
        given = learning_rate if descriptor is None else descriptor
        if given is None or (descriptor is not None and learning_rate is not None):
            raise ArgumentError(
                type(self).__name__,
                "pass either a descriptor or a learning rate",
                fix="write learning_rate=0.1",
            )
        settings = given if isinstance(given, OptimizerDescriptor) else OptimizerDescriptor(given)
        self.time_step = 1
        for one in fields(settings):
            setattr(self, one.name, getattr(settings, one.name))

    def __setattr__(self, name: str, value: Any) -> None:
        where = type(self).__name__
        if name in self.live:
            in_range(where, name, value)
        elif name == "applies_gradient_clipping":
            switch(where, name, value)
        elif name in self.__dict__:
            raise StateError(where, f"{name} cannot change after construction", fix="create a new optimizer")
        elif not hasattr(type(self), name) and name not in _annotated(type(self)):
            known = ", ".join(self.live)
            raise ArgumentError(where, f"there is no hyperparameter {name}", fix=f"assign one of {known}")
        if "maximum_clipping_norm" in self.__dict__:
            check_bounds(where, SimpleNamespace(**{**self.__dict__, name: value}))
        self._require_clipping(name)
        if name == "time_step" and int(value) != value:
            raise ArgumentError(where, f"time_step is {value}, not an integer", fix="count updates from 1")
        self.__dict__[name] = value
        # Graphs compare these counters to detect assignments. Each graph counts its own time steps.
        self.__dict__["version"] = self.__dict__.get("version", 0) + 1
        if name == "time_step":
            self.__dict__["time_version"] = self.version

    def _require_clipping(self, name: str) -> None:
        """Rejects an assigned bound that would have no effect."""
        if name not in self.__dict__ or name not in _CLIPPING:
            return
        by_value = self.gradient_clipping_type is GradientClippingType.BY_VALUE
        if by_value != (name != "maximum_clipping_norm"):
            kind = self.gradient_clipping_type.debug_description.lower()
            raise StateError(
                type(self).__name__, f"it clips {kind}, which does not use {name}", fix="create a new optimizer"
            )
        if not self.applies_gradient_clipping:
            raise StateError(
                type(self).__name__,
                f"{name} is assigned, but clipping is disabled",
                fix="assign applies_gradient_clipping = True first",
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Everything the optimizer was created with or was assigned since, including its time step."""
        derived = ("slots", "rule", "version", "time_version")
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    def adopt(self, other: Optimizer) -> None:
        """Copies the live numbers of an optimizer with the same rule, including its time step."""
        names = (*self.live, "applies_gradient_clipping")
        self.__dict__.update({name: other.__dict__[name] for name in names})
        self.__dict__["version"] += 1  # not the time's version: each graph counts its own steps

    def numbers(self) -> dict[str, float]:
        """The live numbers as the compiled step reads them; disabled clipping becomes infinite bounds."""
        values = {name: float(getattr(self, name)) for name in self.live}
        if not self.applies_gradient_clipping:
            values |= {
                "gradient_clip_max": math.inf,
                "gradient_clip_min": -math.inf,
                "maximum_clipping_norm": math.inf,
            }
        return values

    @property
    def penalty(self) -> RegularizationType:
        """The penalty added to the gradient."""
        return self.regularization_type

    @property
    def needs_global_norm(self) -> bool:
        """Whether an update must wait until every gradient is known."""
        return self.gradient_clipping_type is GradientClippingType.BY_GLOBAL_NORM

    def prepare(
        self, parameter: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor | None, n: SimpleNamespace
    ) -> torch.Tensor:
        """The gradient after clipping, rescaling and regularization. `norm` is the global norm if one is needed."""
        if self.gradient_clipping_type is GradientClippingType.BY_VALUE:
            gradient = torch.clamp(gradient, n.gradient_clip_min, n.gradient_clip_max)
        else:
            size = torch.linalg.vector_norm(gradient) if norm is None else norm
            gradient = gradient * clipping_factor(size, n)
        gradient = gradient * n.gradient_rescale
        if self.penalty is RegularizationType.L1:
            gradient = gradient + n.regularization_scale * parameter.sign()
        elif self.penalty is RegularizationType.L2:
            gradient = gradient + n.regularization_scale * parameter
        return gradient

    def derive(self, n: SimpleNamespace) -> None:
        """Adds derived values that are the same for every parameter to the live numbers."""

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Arrays, n: SimpleNamespace
    ) -> tuple[torch.Tensor, Arrays]:
        """The new parameter and state, from a prepared gradient."""
        raise NotImplementedError(f"{type(self).__name__} has no update rule")

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.live if name in self.__dict__)
        return f"{type(self).__name__}({shown})"


class SGDOptimizer(Optimizer):
    """Stochastic gradient descent.

    Plain `W -= lr g`; with momentum `m = μ m + lr g`, `W -= m`; with Nesterov `m = μ m + g`, `W -= lr (g + μ m)`.

    Plain momentum keeps the learning rate inside the buffer, `torch.optim.SGD` outside: the two agree until the
    learning rate changes. State: `momentum`, none if `momentum_scale` is 0.

    Args:
        descriptor: the shared settings, or just the learning rate.
        learning_rate: instead of a descriptor.
        momentum_scale: μ.
        uses_nesterov_momentum: whether to use Nesterov momentum.

    Example:
        >>> SGDOptimizer(learning_rate=0.1, momentum_scale=0.9).slots
        ('momentum',)
    """

    live = (*Optimizer.live, "momentum_scale")
    momentum_scale: float
    uses_nesterov_momentum: bool

    def __init__(
        self,
        descriptor: OptimizerDescriptor | float | None = None,
        *,
        learning_rate: float | None = None,
        momentum_scale: float = 0.0,
        uses_nesterov_momentum: bool = False,
    ) -> None:
        super().__init__(descriptor, learning_rate=learning_rate)
        self.momentum_scale = momentum_scale
        self.uses_nesterov_momentum = bool(uses_nesterov_momentum and momentum_scale)
        self.slots = ("momentum",) if momentum_scale else ()
        self.rule = "sgd" if not momentum_scale else "sgd nesterov" if uses_nesterov_momentum else "sgd momentum"

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "momentum_scale" and "slots" in self.__dict__ and bool(value) != bool(self.slots):
            raise StateError("SGDOptimizer", "momentum cannot be toggled later", fix="create a new optimizer")
        super().__setattr__(name, value)

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Arrays, n: SimpleNamespace
    ) -> tuple[torch.Tensor, Arrays]:
        """One step of gradient descent."""
        if not state:
            return parameter - n.learning_rate * gradient, ()
        (momentum,) = state
        if self.uses_nesterov_momentum:
            momentum = n.momentum_scale * momentum + gradient
            return parameter - n.learning_rate * (gradient + n.momentum_scale * momentum), (momentum,)
        momentum = n.momentum_scale * momentum + n.learning_rate * gradient
        return parameter - momentum, (momentum,)


class AdamOptimizer(Optimizer):
    """Adam with the bias correction in the step size.

    `m = β₁ m + (1 - β₁) g`, `v = β₂ v + (1 - β₂) g²`, `W -= lr √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)`; with AMSGrad
    the largest `v` so far replaces `v`.

    ε is added to the uncorrected `√v`, as TensorFlow does; `torch.optim.Adam` adds it after the correction.
    State: `momentum`, `velocity`, with AMSGrad also `largest_velocity`.

    Args:
        descriptor: the shared settings, or just the learning rate.
        learning_rate: instead of a descriptor.
        beta1: β₁, the decay of the average of gradients.
        beta2: β₂, the decay of the average of their squares.
        epsilon: ε.
        uses_ams_grad: whether to use the largest `v` so far.
        time_step: the `t` of the next update.

    Example:
        >>> AdamOptimizer(learning_rate=1e-3).time_step
        1
    """

    live = (*Optimizer.live, "beta1", "beta2", "epsilon")
    beta1: float
    beta2: float
    epsilon: float
    uses_ams_grad: bool

    def __init__(
        self,
        descriptor: OptimizerDescriptor | float | None = None,
        *,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        uses_ams_grad: bool = False,
        time_step: int = 1,
    ) -> None:
        super().__init__(descriptor, learning_rate=learning_rate)
        self.beta1, self.beta2, self.epsilon, self.time_step = beta1, beta2, epsilon, time_step
        self.uses_ams_grad = bool(uses_ams_grad)
        self.slots = ("momentum", "velocity", "largest_velocity")[: 3 if uses_ams_grad else 2]
        self.rule = "adam amsgrad" if uses_ams_grad else "adam"

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "time_step" and number("AdamOptimizer", name, value) < 1:
            raise ArgumentError("AdamOptimizer", f"time_step is {value}", fix="the first update has time_step 1")
        super().__setattr__(name, value)

    def derive(self, n: SimpleNamespace) -> None:
        """The step size with bias correction, and the weights of new values in the averages."""
        n.share1, n.share2 = 1 - n.beta1, 1 - n.beta2  # in full precision: near 1, a rounded β would matter
        n.rate = n.learning_rate * (1 - n.beta2**n.time_step) ** 0.5 / (1 - n.beta1**n.time_step)

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Arrays, n: SimpleNamespace
    ) -> tuple[torch.Tensor, Arrays]:
        """One step of Adam."""
        momentum = n.beta1 * state[0] + n.share1 * gradient
        velocity = n.beta2 * state[1] + n.share2 * gradient.square()
        if not self.uses_ams_grad:
            return parameter - n.rate * momentum / (velocity.sqrt() + n.epsilon), (momentum, velocity)
        largest = torch.maximum(state[2], velocity)
        return parameter - n.rate * momentum / (largest.sqrt() + n.epsilon), (momentum, velocity, largest)


class AdamWOptimizer(AdamOptimizer):
    """Adam with decoupled weight decay: `W -= lr λ W`, then the step of `AdamOptimizer` on the plain gradient.

    λ is `regularization_scale`; the regularization type is ignored. Same as `torch.optim.AdamW` except where ε is
    added. State as `AdamOptimizer`.

    Example:
        >>> AdamWOptimizer(OptimizerDescriptor(1e-3, regularization_scale=0.01)).rule
        'adamw'
    """

    def __init__(self, descriptor: OptimizerDescriptor | float | None = None, **settings: Any) -> None:
        super().__init__(descriptor, **settings)
        self.__dict__["rule"] = self.rule.replace("adam", "adamw", 1)

    @property
    def penalty(self) -> RegularizationType:
        """None: the decay does not pass through the moments."""
        return RegularizationType.NONE

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Arrays, n: SimpleNamespace
    ) -> tuple[torch.Tensor, Arrays]:
        """One step of decay and one of Adam."""
        return super().update(parameter * (1 - n.learning_rate * n.regularization_scale), gradient, state, n)


class RMSPropOptimizer(Optimizer):
    """RMSProp.

    `v = α v + (1 - α) g²`, `d = √v + ε`, `W -= lr g / d`. Centered: `a = α a + (1 - α) g`, `d = √(v - a²) + ε`. With
    momentum: `δ = μ δ - lr g / d`, `W += δ`.

    With momentum, `torch.optim.RMSprop` keeps the learning rate outside the buffer: the two agree until it changes.
    State: `velocity`, centered also `average`, with momentum also `momentum`.

    Args:
        descriptor: the shared settings, or just the learning rate.
        learning_rate: instead of a descriptor.
        momentum_scale: μ.
        alpha: α, the decay of the average of squared gradients.
        epsilon: ε.
        is_centered: whether to subtract the mean of gradients.

    Example:
        >>> RMSPropOptimizer(learning_rate=0.01, momentum_scale=0.9).slots
        ('velocity', 'momentum')
    """

    live = (*Optimizer.live, "momentum_scale", "alpha", "epsilon")
    momentum_scale: float
    alpha: float
    epsilon: float
    is_centered: bool

    def __init__(
        self,
        descriptor: OptimizerDescriptor | float | None = None,
        *,
        learning_rate: float | None = None,
        momentum_scale: float = 0.0,
        alpha: float = 0.99,
        epsilon: float = 1e-8,
        is_centered: bool = False,
    ) -> None:
        super().__init__(descriptor, learning_rate=learning_rate)
        self.momentum_scale, self.alpha, self.epsilon = momentum_scale, alpha, epsilon
        self.is_centered = bool(is_centered)
        optional = (("average", is_centered), ("momentum", bool(momentum_scale)))
        self.slots = ("velocity", *(name for name, wanted in optional if wanted))
        self.rule = " ".join(["rmsprop", *self.slots[1:]])

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "momentum_scale" and "slots" in self.__dict__ and bool(value) != ("momentum" in self.slots):
            raise StateError("RMSPropOptimizer", "momentum cannot be toggled later", fix="create a new optimizer")
        super().__setattr__(name, value)

    def derive(self, n: SimpleNamespace) -> None:
        """The weight of new values in averages."""
        n.share = 1 - n.alpha

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Arrays, n: SimpleNamespace
    ) -> tuple[torch.Tensor, Arrays]:
        """One step of RMSProp."""
        slots = dict(zip(self.slots, state, strict=True))
        slots["velocity"] = spread = n.alpha * slots["velocity"] + n.share * gradient.square()
        if self.is_centered:
            slots["average"] = n.alpha * slots["average"] + n.share * gradient
            spread = (spread - slots["average"].square()).clamp_min(0)  # rounding must not make it negative
        change = -n.learning_rate * gradient / (spread.sqrt() + n.epsilon)
        if "momentum" in slots:
            slots["momentum"] = change = n.momentum_scale * slots["momentum"] + change
        return parameter + change, tuple(slots.values())


def global_norm(gradients: Sequence[torch.Tensor], n: SimpleNamespace) -> torch.Tensor:
    """`√Σ‖g‖²` over all gradients, or the custom norm if one is set."""
    computed = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).norm()
    return torch.where(n.custom_global_norm != 0, n.custom_global_norm.to(computed.dtype), computed)


def clipping_factor(norm: torch.Tensor, n: SimpleNamespace) -> torch.Tensor:
    """The factor that limits a gradient of this norm to the maximum."""
    maximum = n.maximum_clipping_norm.to(norm.dtype)
    return torch.where(norm > maximum, maximum / norm, torch.ones_like(norm))


def _annotated(optimizer: type[Optimizer]) -> frozenset[str]:
    """The names that an optimizer's classes declare."""
    return frozenset(name for base in optimizer.__mro__ for name in getattr(base, "__annotations__", {}))


def check_bounds(where: str, settings: Any) -> None:
    """Rejects contradictory clipping bounds."""
    low, high = settings.gradient_clip_min, settings.gradient_clip_max
    if low > high:
        raise ArgumentError(where, f"gradient_clip_min {low} is above gradient_clip_max {high}", fix="swap them")


def member(where: str, name: str, value: Any, kind: type[RawEnum]) -> None:
    """Rejects anything but a member of an enumeration."""
    if not isinstance(value, kind):
        raise ArgumentError(where, f"{name} is {value!r}", fix=f"use a member of {kind.__name__}")


def switch(where: str, name: str, value: Any) -> None:
    """Rejects anything but True and False."""
    if not isinstance(value, bool):
        raise DataTypeError(where, f"{name} is {value!r}", fix="pass True or False")


NOT_NEGATIVE = {
    "learning_rate": 1e-3,
    "regularization_scale": 0.01,
    "maximum_clipping_norm": 1.0,
    "custom_global_norm": 0.0,
    "momentum_scale": 0.9,
    "epsilon": 1e-8,
}
SHARES = {"beta1": 0.9, "beta2": 0.999, "alpha": 0.99}  # decay factors: with 1, nothing would be learned


def in_range(where: str, name: str, value: Any) -> None:
    """Rejects non-finite numbers and values outside the range of this name, as `torch.optim` does."""
    number(where, name, value)
    if name in NOT_NEGATIVE and value < 0:
        raise ArgumentError(where, f"{name} is {value}", fix=f"pass a number ≥ 0, such as {NOT_NEGATIVE[name]:g}")
    if name in SHARES and not 0 <= value < 1:
        raise ArgumentError(where, f"{name} is {value}, not in [0, 1)", fix=f"use {SHARES[name]:g}")


def number(where: str, name: str, value: Any) -> Any:
    """`value` if it is a finite number; otherwise raises an error that names it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DataTypeError(where, f"{name} is {value!r}, not a number", fix="pass a float")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        finite = False
    if not finite:
        raise ArgumentError(where, f"{name} is {value}, not a finite number", fix="check where the value comes from")
    return value
