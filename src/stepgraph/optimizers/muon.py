"""Muon: orthogonalized momentum for matrices, AdamW for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from stepgraph.errors import ArgumentError
from stepgraph.optimizers.adam import adam, correct
from stepgraph.optimizers.base import TORCH, Arrays, Optimizer
from stepgraph.optimizers.groups import ParameterGroup, Selector
from stepgraph.optimizers.settings import OptimizerDescriptor
from stepgraph.optimizers.spelling import Alias
from stepgraph.tensors.tensor import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, steepest at 0
ITERATIONS = 5
SMALLEST_NORM = 1e-7
SCALES = ("adamw", "original")


class MuonOptimizer(Optimizer):
    """Muon: matrices move along their orthogonalized momentum, everything else by AdamW.

    For a matrix `m = μ m + (1 - μ) g`, with Nesterov `u = (1 - μ) g + μ m`, otherwise `u = m`, and
    `W -= lr (s O(u) + λ W)`. `O` brings all singular values close to 1, with five Newton–Schulz iterations. Convolution
    weights are matrices with one row per output channel. With `scale="adamw"`, `s = 0.2 √max(rows, columns)`: a step is
    then as large as one of AdamW, and one learning rate and weight decay suit both. With `scale="original"`,
    `s = √max(1, rows / columns)`. `torch.optim.Muon` computes the same, in bfloat16.

    AdamW, as `torch.optim.AdamW` computes it, updates parameters with fewer than 2 dimensions and those that `adamw`
    selects: usually embeddings and the last layer. State: `momentum`; for AdamW also `velocity`.

    Args:
        learning_rate: the step size, or an `OptimizerDescriptor`.
        momentum: μ.
        nesterov: whether to use Nesterov momentum.
        adamw: matrices that AdamW updates: patterns, functions or tensors, as in `ParameterGroup`.
        scale: `"adamw"` or `"original"`.
        beta1: β₁ of AdamW.
        beta2: β₂ of AdamW.
        epsilon: ε of AdamW.
        settings: `weight_decay`, `clip_norm`, `clip_value` and `groups`, as in `Optimizer`.

    Example:
        >>> MuonOptimizer(3e-4, weight_decay=0.1, adamw=["Embedding.*", "head.*"]).rule
        'muon nesterov'
    """

    is_elementwise = True
    live = (*Optimizer.live, "momentum_scale", "beta1", "beta2", "epsilon")
    momentum = Alias("momentum_scale")
    nesterov = Alias("uses_nesterov_momentum")
    decouples_decay = True
    slots = ("momentum", "velocity")
    selecting = ("adamw",)
    momentum_scale: float
    uses_nesterov_momentum: bool
    beta1: float
    beta2: float
    epsilon: float
    adamw: tuple[Selector, ...]
    scale: str

    def __init__(
        self,
        learning_rate: float | OptimizerDescriptor | None = None,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        adamw: Selector | Sequence[Selector] = (),
        scale: str = "adamw",
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        **settings: Any,
    ) -> None:
        momentum = settings.pop("momentum_scale", momentum)
        nesterov = settings.pop("uses_nesterov_momentum", nesterov)
        super().__init__(learning_rate, **settings)
        if scale not in SCALES:
            raise ArgumentError(type(self).__name__, f"scale is {scale!r}", fix=f"use one of {', '.join(SCALES)}")
        self.momentum_scale, self.uses_nesterov_momentum = momentum, bool(nesterov)
        self.beta1, self.beta2, self.epsilon, self.scale = beta1, beta2, epsilon, scale
        self.adamw = ParameterGroup(adamw).parameters
        self.rule = "muon nesterov" if nesterov else "muon"

    def slots_of(self, tensor: Tensor, names: Sequence[str]) -> tuple[str, ...]:
        """`momentum` for matrices, also `velocity` for what AdamW updates."""
        by_adamw = len(tensor.shape) < 2 or ParameterGroup(self.adamw).selects(tensor, names)
        return self.slots if by_adamw else self.slots[:1]

    def cuts(self, slots: Sequence[str]) -> bool:
        """Not for matrices, whose singular values are all needed at once."""
        return super().cuts(slots) and slots == self.slots

    def derive(self, n: SimpleNamespace) -> None:
        """What AdamW derives, and the weight of a new gradient in the momentum."""
        correct(n, TORCH)
        n.share = 1 - n.momentum_scale

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Arrays, n: SimpleNamespace
    ) -> tuple[torch.Tensor, Arrays]:
        """One step of decay, then one of Muon, or of Adam if there are two buffers."""
        decayed = parameter * (1 - n.learning_rate * n.regularization_scale)
        if len(state) == 2:
            return adam(decayed, gradient, state, n, n.added)
        momentum = n.momentum_scale * state[0] + n.share * gradient
        used = n.momentum_scale * momentum + n.share * gradient if self.uses_nesterov_momentum else momentum
        step = orthogonalized(used.flatten(1))
        rate = n.learning_rate * _scale(self.scale, *step.shape)
        return decayed - rate * step.view(parameter.shape), (momentum,)


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix with the same singular vectors and with singular values near 1.

    Normalized, then five times `x = a x + (b x xᵀ + c (x xᵀ)²) x`.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix  # the smaller of the two squares
    x = x / torch.linalg.vector_norm(x).clamp_min(SMALLEST_NORM)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return (x.T if is_tall else x).contiguous()


def _scale(scale: str, rows: int, columns: int) -> float:
    return 0.2 * max(rows, columns) ** 0.5 if scale == "adamw" else max(1.0, rows / columns) ** 0.5
