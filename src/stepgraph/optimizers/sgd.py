"""Stochastic gradient descent, with momentum and Nesterov momentum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from stepgraph.errors import ArgumentError, StateError
from stepgraph.optimizers.base import ML_COMPUTE, TORCH, Arrays, Optimizer, check_formula
from stepgraph.optimizers.settings import OptimizerDescriptor
from stepgraph.optimizers.spelling import Alias


class SGDOptimizer(Optimizer):
    """Stochastic gradient descent.

    Plain `W -= lr g`; with momentum `m = μ m + lr g`, `W -= m`; with Nesterov `m = μ m + g`, `W -= lr (g + μ m)`.

    Plain momentum keeps the learning rate inside the buffer, as ML Compute does. `torch.optim.SGD` keeps it outside:
    `m = μ m + (1 - δ) g`, `W -= lr m`, with `m = g` in the first update. The two agree until the learning rate changes;
    `formula="torch"` computes the second. State: `momentum`, none without momentum.

    Args:
        learning_rate: the step size, or an `OptimizerDescriptor`.
        momentum: μ.
        nesterov: whether to use Nesterov momentum.
        dampening: δ, only with `formula="torch"` and plain momentum.
        formula: `"torch"` for PyTorch's.
        settings: `weight_decay`, `clip_norm`, `clip_value` and `groups`, as in `Optimizer`.

    Example:
        >>> SGDOptimizer(0.1, momentum=0.9, nesterov=True, weight_decay=1e-4).slots
        ('momentum',)
    """

    is_elementwise = True
    live = (*Optimizer.live, "momentum_scale")
    momentum = Alias("momentum_scale")
    nesterov = Alias("uses_nesterov_momentum")
    momentum_scale: float
    uses_nesterov_momentum: bool
    dampening: float
    formula: str

    def __init__(
        self,
        learning_rate: float | OptimizerDescriptor | None = None,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        dampening: float = 0.0,
        formula: str = ML_COMPUTE,
        **settings: Any,
    ) -> None:
        momentum, nesterov = self.spelled(settings, momentum=momentum, nesterov=nesterov)
        is_damped = bool(momentum and not nesterov and formula == TORCH)
        if is_damped:
            self.__dict__["live"] = (*type(self).live, "dampening")
        super().__init__(learning_rate, **settings)
        self.momentum_scale = momentum
        self.uses_nesterov_momentum = bool(nesterov and momentum)
        self.formula = check_formula(type(self).__name__, formula)
        self.slots = ("momentum",) if momentum else ()
        self.rule = "sgd" if not momentum else "sgd nesterov" if nesterov else "sgd momentum"
        self.__dict__["rule"] += " torch" * is_damped
        self.dampening = dampening
        self.require_momentum()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "momentum_scale" and "slots" in self.__dict__ and bool(value) != bool(self.slots):
            raise StateError(type(self).__name__, "momentum cannot be toggled later", fix="create a new optimizer")
        if name == "dampening" and value and self.rule != "sgd momentum torch":
            problem = f"dampening is {value}, which the rule '{self.rule}' does not use"
            raise ArgumentError(type(self).__name__, problem, fix='pass momentum and formula="torch", without nesterov')
        super().__setattr__(name, value)

    def derive(self, n: SimpleNamespace) -> None:
        """The weight of a new gradient in the buffer, which the first one fills."""
        if self.rule == "sgd momentum torch":
            n.share = torch.where(n.time_step > 1, 1 - n.dampening, torch.ones_like(n.dampening))

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
        if self.formula == TORCH:
            momentum = n.momentum_scale * momentum + n.share * gradient
            return parameter - n.learning_rate * momentum, (momentum,)
        momentum = n.momentum_scale * momentum + n.learning_rate * gradient
        return parameter - momentum, (momentum,)
