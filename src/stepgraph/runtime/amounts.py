"""What the mean of a loss divides by, so that the parts of a batch can be combined into the mean of the whole."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stepgraph.layers.computed_loss import ComputedLossLayer
from stepgraph.layers.loss import LossLayer
from stepgraph.layers.node import Node
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import ReductionType

Amount = torch.Tensor | int
Given = Callable[[Tensor], torch.Tensor]


def reduction(loss: Node) -> ReductionType:
    """How a loss is reduced; a custom loss is taken for a mean."""
    layer = loss.layer
    if isinstance(layer, ComputedLossLayer):
        return layer.reduction_type
    return layer.descriptor.reduction_type if isinstance(layer, LossLayer) else ReductionType.MEAN


def counts_labels(loss: Node) -> bool:
    """Whether its mean divides by something that only the labels show: those that count, or their weights."""
    return isinstance(loss.layer, LossLayer) and loss.layer.counts_labels and bool(loss.labels)


def amount(loss: Node, rows: int, given: Given) -> Amount:
    """What its mean over some rows divides by, up to a factor; for other losses, the rows.

    Args:
        loss: the loss layer with its prediction and labels.
        rows: the number of rows.
        given: the array of a label tensor for these rows.
    """
    layer = loss.layer
    if not isinstance(layer, LossLayer) or not counts_labels(loss):
        return rows
    labels, weights = (*loss.labels, None)[:2]
    assert labels is not None
    array = given(labels)
    each = None if weights is None else given(weights).to(array.device)
    # A label tensor has the batch size of the call, which need not be that of the declared prediction.
    shape = loss.sources[0].shape
    is_batched = labels.shape[0] == shape[0]
    return layer.divisor((array.shape[0], *shape[1:]) if is_batched else shape, array, each)
