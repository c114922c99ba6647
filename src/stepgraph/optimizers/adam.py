"""Adam, and AdamW with decoupled weight decay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from stepgraph.errors import ArgumentError
from stepgraph.optimizers.base import ML_COMPUTE, TORCH, Arrays, Optimizer, check_formula
from stepgraph.optimizers.settings import OptimizerDescriptor, number
from stepgraph.optimizers.spelling import Alias


class AdamOptimizer(Optimizer):
    """Adam with the bias correction in the step size.

    `m = β₁ m + (1 - β₁) g`, `v = β₂ v + (1 - β₂) g²`, `W -= lr √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)`; with AMSGrad
    the largest `v` so far replaces `v`.

    ε is added to the uncorrected `√v`, as ML Compute and TensorFlow do. `torch.optim.Adam` adds it after the
    correction, which makes it smaller in the first updates; `formula="torch"` does the same.
    State: `momentum`, `velocity`, with AMSGrad also `largest_velocity`.

    Args:
        learning_rate: the step size, or an `OptimizerDescriptor`.
        beta1: β₁, the decay of the average of gradients.
        beta2: β₂, the decay of the average of their squares.
        epsilon: ε.
        amsgrad: whether to use the largest `v` so far.
        formula: `"torch"` for PyTorch's.
        time_step: the `t` of the next update.
        settings: `weight_decay`, `clip_norm`, `clip_value` and `groups`, as in `Optimizer`.

    Example:
        >>> AdamOptimizer(1e-3, clip_norm=1.0).time_step
        1
    """

    is_elementwise = True
    live = (*Optimizer.live, "beta1", "beta2", "epsilon")
    amsgrad = Alias("uses_ams_grad")
    name = "adam"
    beta1: float
    beta2: float
    epsilon: float
    uses_ams_grad: bool
    formula: str

    def __init__(
        self,
        learning_rate: float | OptimizerDescriptor | None = None,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        amsgrad: bool = False,
        formula: str = ML_COMPUTE,
        time_step: int = 1,
        **settings: Any,
    ) -> None:
        (amsgrad,) = self.spelled(settings, amsgrad=amsgrad)
        super().__init__(learning_rate, **settings)
        self.beta1, self.beta2, self.epsilon, self.time_step = beta1, beta2, epsilon, time_step
        self.uses_ams_grad = bool(amsgrad)
        self.formula = check_formula(type(self).__name__, formula)
        self.slots = ("momentum", "velocity", "largest_velocity")[: 3 if amsgrad else 2]
        self.rule = self.name + " amsgrad" * bool(amsgrad) + " torch" * (formula == TORCH)

    def __setattr__(self, name: str, value: Any) -> None:
        where = type(self).__name__
        if name == "time_step" and number(where, name, value) < 1:
            raise ArgumentError(where, f"time_step is {value}", fix="the first update has time_step 1")
        super().__setattr__(name, value)

    def derive(self, n: SimpleNamespace) -> None:
        """The step size with bias correction, ε as it is added to `√v`, and the weights of new values."""
        correct(n, self.formula)

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Arrays, n: SimpleNamespace
    ) -> tuple[torch.Tensor, Arrays]:
        """One step of Adam."""
        return adam(parameter, gradient, state, n, n.added if self.formula == TORCH else n.epsilon)


def correct(n: SimpleNamespace, formula: str) -> None:
    """Adds the step size with bias correction, ε as it is added to `√v`, and the weights of new values."""
    n.share1, n.share2 = 1 - n.beta1, 1 - n.beta2  # in full precision: near 1, a rounded β would matter
    correction = (1 - n.beta2**n.time_step) ** 0.5
    n.rate = n.learning_rate * correction / (1 - n.beta1**n.time_step)
    if formula == TORCH:
        n.added = n.epsilon * correction


def adam(
    parameter: torch.Tensor, gradient: torch.Tensor, state: Arrays, n: SimpleNamespace, added: torch.Tensor
) -> tuple[torch.Tensor, Arrays]:
    """One step of Adam; a third buffer is the largest `v` so far. `added` is ε."""
    momentum = n.beta1 * state[0] + n.share1 * gradient
    velocity = n.beta2 * state[1] + n.share2 * gradient.square()
    if len(state) == 2:
        return parameter - n.rate * momentum / (velocity.sqrt() + added), (momentum, velocity)
    largest = torch.maximum(state[2], velocity)
    return parameter - n.rate * momentum / (largest.sqrt() + added), (momentum, velocity, largest)


class AdamWOptimizer(AdamOptimizer):
    """Adam with decoupled weight decay: `W -= lr λ W`, then the step of `AdamOptimizer` on the plain gradient.

    λ is `weight_decay`, by default 0. With a descriptor it is `regularization_scale`, whatever the regularization
    type. Same as `torch.optim.AdamW` except where ε is added; `formula="torch"` adds it there, too. Arguments and
    state as `AdamOptimizer`.

    Example:
        >>> AdamWOptimizer(3e-4, weight_decay=0.1, clip_norm=1.0, groups=DECAY_MATRICES_ONLY).rule
        'adamw'
    """

    name = "adamw"
    decouples_decay = True

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Arrays, n: SimpleNamespace
    ) -> tuple[torch.Tensor, Arrays]:
        """One step of decay and one of Adam."""
        return super().update(parameter * (1 - n.learning_rate * n.regularization_scale), gradient, state, n)
