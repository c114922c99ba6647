"""RMSProp, plain or centered, with and without momentum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from stepgraph.errors import StateError
from stepgraph.optimizers.base import ML_COMPUTE, TORCH, Arrays, Optimizer, check_formula
from stepgraph.optimizers.settings import OptimizerDescriptor
from stepgraph.optimizers.spelling import Alias


class RMSPropOptimizer(Optimizer):
    """RMSProp.

    `v = α v + (1 - α) g²`, `d = √v + ε`, `W -= lr g / d`. Centered: `a = α a + (1 - α) g`, `d = √(v - a²) + ε`. With
    momentum: `δ = μ δ - lr g / d`, `W += δ`.

    With momentum, `torch.optim.RMSprop` keeps the learning rate outside the buffer, `δ = μ δ + g / d`, `W -= lr δ`. The
    two agree until it changes; `formula="torch"` computes the second.
    State: `velocity`, centered also `average`, with momentum also `momentum`.

    Args:
        learning_rate: the step size, or an `OptimizerDescriptor`.
        momentum: μ.
        alpha: α, the decay of the average of squared gradients.
        epsilon: ε.
        centered: whether to subtract the mean of gradients.
        formula: `"torch"` for PyTorch's.
        settings: `weight_decay`, `clip_norm`, `clip_value` and `groups`, as in `Optimizer`.

    Example:
        >>> RMSPropOptimizer(0.01, momentum=0.9).slots
        ('velocity', 'momentum')
    """

    is_elementwise = True
    live = (*Optimizer.live, "momentum_scale", "alpha", "epsilon")
    momentum = Alias("momentum_scale")
    centered = Alias("is_centered")
    momentum_scale: float
    alpha: float
    epsilon: float
    is_centered: bool
    formula: str

    def __init__(
        self,
        learning_rate: float | OptimizerDescriptor | None = None,
        *,
        momentum: float = 0.0,
        alpha: float = 0.99,
        epsilon: float = 1e-8,
        centered: bool = False,
        formula: str = ML_COMPUTE,
        **settings: Any,
    ) -> None:
        momentum, centered = self.spelled(settings, momentum=momentum, centered=centered)
        super().__init__(learning_rate, **settings)
        self.momentum_scale, self.alpha, self.epsilon = momentum, alpha, epsilon
        self.is_centered = bool(centered)
        self.formula = check_formula(type(self).__name__, formula)
        optional = (("average", centered), ("momentum", bool(momentum)))
        self.slots = ("velocity", *(name for name, wanted in optional if wanted))
        differs = bool(momentum) and formula == TORCH
        self.rule = " ".join(["rmsprop", *self.slots[1:], *(["torch"] if differs else [])])
        self.require_momentum()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "momentum_scale" and "slots" in self.__dict__ and bool(value) != ("momentum" in self.slots):
            raise StateError(type(self).__name__, "momentum cannot be toggled later", fix="create a new optimizer")
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
        if "momentum" in slots and self.formula == TORCH:
            slots["momentum"] = n.momentum_scale * slots["momentum"] + gradient / (spread.sqrt() + n.epsilon)
            return parameter - n.learning_rate * slots["momentum"], tuple(slots.values())
        change = -n.learning_rate * gradient / (spread.sqrt() + n.epsilon)
        if "momentum" in slots:
            slots["momentum"] = change = n.momentum_scale * slots["momentum"] + change
        return parameter + change, tuple(slots.values())
