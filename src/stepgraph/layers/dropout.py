"""Dropout."""

from __future__ import annotations

import torch

from stepgraph.errors import ArgumentError
from stepgraph.layers.layer import Layer, Scope


class DropoutLayer(Layer):
    """`y = x * mask / (1 - rate)` in training, where `mask` is 0 with probability `rate`, else 1; `y = x` in inference.

    Shapes: any, unchanged. The mask is new in every step and the same in the forward and the gradient pass of a step.
    It is a function of the graph's seed, the step, the node and `seed`: a resumed run draws what it would have drawn.

    Same as `torch.nn.Dropout`, without its generator: PyTorch's global one is neither read nor moved.

    Args:
        rate: the share of elements that are dropped, at least 0 and below 1.
        seed: any whole number; nodes with other seeds draw other masks, and so do two nodes with the same seed.

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
                self.where, f"rate is {self.rate!r}, not in [0, 1)", fix="give the share to drop, e.g. 0.5"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ArgumentError(self.where, f"seed is {self.seed!r}, not a whole number", fix="give an int")

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """Drops in training, passes on in inference."""
        if not scope.training or self.rate == 0:
            return x
        return drop(x, scope.keep_mask(x, self.rate, self.seed), rate=self.rate)


def drop(x: torch.Tensor, mask: torch.Tensor, *, rate: float) -> torch.Tensor:
    """`x * mask / (1 - rate)`: what is kept makes up, on average, for what is dropped."""
    return x * (mask.to(x.dtype) * (1 / (1 - rate)))  # one factor, made once for both passes
