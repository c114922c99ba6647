"""A number that the graph computes, as its loss."""

from __future__ import annotations

from typing import ClassVar

import torch

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Layer, Scope
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import ReductionType


class ComputedLossLayer(Layer):
    """`loss = x` for one number that the graph itself computes: the loss that a model returns, a variational bound.

    There are no labels: whatever the number is compared with is an input of the graph. `reduction_type` says how the
    graph got it from the rows of a batch, which decides how parts of a batch are combined, with `Parallel`, with
    `fit(accumulate=…)` and for the loss of an epoch: means are weighted by their rows, sums are added up. If the number
    is a mean over labels some of which are ignored, such a combination is not exactly that of the whole batch.

    Shapes: `x` has one element; the result is `[1]`.

    Args:
        reduction_type: `MEAN` or `SUM`.

    Example:
        >>> graph = Graph()
        >>> energy = graph.mean(graph.dense(Tensor((8, 3)), 1), 0)
        >>> graph.node(ComputedLossLayer(), energy).shape
        (1,)
    """

    reduction_type: ReductionType = ReductionType.MEAN

    default_label: ClassVar[str] = "Loss"
    source_counts: ClassVar[tuple[int, int | None]] = (1, 1)
    is_loss: ClassVar[bool] = True
    takes_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.reduction_type not in (ReductionType.MEAN, ReductionType.SUM):
            problem = f"a computed loss cannot be reduced by {self.reduction_type!s}"
            raise ArgumentError(self.where, problem, fix="use MEAN or SUM")

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source is one floating-point number."""
        (source,) = sources
        self.require_floating(source)
        if source.is_open or source.element_count != 1:
            fix = "reduce it to one number, by a mean or a sum over the batch, or use a loss with labels"
            raise ShapeError(self.where, f"the loss has shape {list(source.shape)}, but must be one number", fix=fix)

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """The number."""
        return x.reshape(1)
