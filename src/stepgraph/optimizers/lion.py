"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from stepgraph.optimizers.base import Arrays, Optimizer
from stepgraph.optimizers.settings import OptimizerDescriptor


class LionOptimizer(Optimizer):
    """Lion: every element moves by the learning rate, in the direction of a momentum.

    `c = β₁ m + (1 - β₁) g`, `W -= lr (sign(c) + λ W)`, `m = β₂ m + (1 - β₂) g`.

    λ is `weight_decay`, decoupled from the gradient. Learning rates are usually 3 to 10 times smaller than those of
    AdamW, and λ larger by the same factor. State: `momentum`, half of what Adam keeps.

    Args:
        learning_rate: the step size, or an `OptimizerDescriptor`.
        beta1: β₁, the share of the momentum in a step.
        beta2: β₂, the decay of the momentum.
        settings: `weight_decay`, `clip_norm`, `clip_value` and `groups`, as in `Optimizer`.

    Example:
        >>> LionOptimizer(1e-4, weight_decay=1.0).slots
        ('momentum',)
    """

    is_elementwise = True
    live = (*Optimizer.live, "beta1", "beta2")
    decouples_decay = True
    slots = ("momentum",)
    rule = "lion"
    beta1: float
    beta2: float

    def __init__(
        self,
        learning_rate: float | OptimizerDescriptor | None = None,
        *,
        beta1: float = 0.9,
        beta2: float = 0.99,
        **settings: Any,
    ) -> None:
        super().__init__(learning_rate, **settings)
        self.beta1, self.beta2 = beta1, beta2

    def derive(self, n: SimpleNamespace) -> None:
        """The weights of new gradients."""
        n.share1, n.share2 = 1 - n.beta1, 1 - n.beta2

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Arrays, n: SimpleNamespace
    ) -> tuple[torch.Tensor, Arrays]:
        """One step of Lion."""
        (momentum,) = state
        direction = (n.beta1 * momentum + n.share1 * gradient).sign()
        decayed = parameter * (1 - n.learning_rate * n.regularization_scale)
        return decayed - n.learning_rate * direction, (n.beta2 * momentum + n.share2 * gradient,)
