"""Dropout."""

from __future__ import annotations

import torch

from stepgraph.errors import ArgumentError
from stepgraph.layers.layer import Layer, Scope


class DropoutLayer(Layer):
    """`y = x * mask / (1 - rate)` in training, where `mask` is 0 with probability `rate`, else 1; `y = x` in inference.

    Shapes: any, unchanged. The mask is new in every step and the same in the forward and the gradient pass of a step.
    It is a function of the graph's seed, the step, the node and `seed`, so a resumed run draws the same masks.

    Same as `torch.nn.Dropout`, without its generator: PyTorch's global one is neither read nor advanced.

    Args:
        rate: the fraction of elements to drop, at least 0 and below 1.
        seed: any integer; nodes with different seeds draw different masks, and so do two nodes with the same seed.

    Example:
        >>> DropoutLayer(0.5).rate
        0.5
    """

    rate: float
    seed: int = 0

    default_label = "Dropout"

    def __post_init__(self) -> None:
        if not isinstance(self.rate, int | float) or not 0 <= self.rate < 1:
            raise ArgumentError(
                self.where, f"rate is {self.rate!r}, not in [0, 1)", fix="pass the fraction to drop, e.g. 0.5"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ArgumentError(self.where, f"seed is {self.seed!r}, not an integer", fix="pass an int")

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """Drops elements in training; returns `x` in inference."""
        if not scope.training or self.rate == 0:
            return x
        return drop(x, scope.keep_mask(x, self.rate, self.seed), rate=self.rate)


def drop(x: torch.Tensor, mask: torch.Tensor, *, rate: float) -> torch.Tensor:
    """`x * mask / (1 - rate)`: the scaling preserves the expected value."""
    return x * (mask.to(x.dtype) * (1 / (1 - rate)))  # one factor, computed once for both passes
