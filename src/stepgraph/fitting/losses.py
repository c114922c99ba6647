"""The losses of a graph as a loop uses them: their names, what a mean divides by, and the metrics of each."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from stepgraph.errors import ArgumentError, UnknownNameError
from stepgraph.fitting.metrics import TAKEN, Metric, by_name, is_object
from stepgraph.fitting.named_metrics import Task, named
from stepgraph.layers.layer import Layer
from stepgraph.layers.loss import LossLayer
from stepgraph.layers.node import Node
from stepgraph.runtime.amounts import Amount, Given, amount, reduction
from stepgraph.runtime.loss_slots import Loss
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import ReductionType

ASSUMED = {"axis": 1, "ignored_label": None}  # by metrics, unless they are told otherwise


@dataclass(frozen=True)
class TrainedLoss:
    """One loss of a graph.

    Args:
        name: its name in a history.
        node: the loss layer with its prediction and labels.
    """

    name: str
    node: Node

    @property
    def layer(self) -> Layer:
        """The loss layer."""
        return self.node.layer

    @property
    def prediction(self) -> Tensor:
        """What it compares with the labels."""
        return self.node.sources[0]

    @property
    def labels(self) -> Tensor | None:
        """The labels."""
        return (*self.node.labels, None)[0]

    @property
    def reduction(self) -> ReductionType:
        """How it is reduced; a custom loss is taken for a mean."""
        return reduction(self.node)

    @property
    def is_mean(self) -> bool:
        """Whether its gradient weights each row by its share of the batch; others are already sums."""
        return self.reduction is ReductionType.MEAN

    @property
    def adds_up(self) -> bool:
        """Whether the loss of a batch is the sum of those of its parts, not their mean."""
        return self.reduction is ReductionType.SUM

    @property
    def task(self) -> Task:
        """What metrics of it compare."""
        return Task.of(self.layer, self.prediction, self.labels)

    def amount(self, rows: int, given: Given) -> Amount:
        """What its mean over a batch divides by, up to a factor; for other losses, the rows.

        Args:
            rows: the rows of the batch.
            given: the array of a label tensor in the batch.
        """
        return amount(self.node, rows, given)

    def settings(self) -> dict[str, Any]:
        """What a metric should know of it, unless it is what metrics assume."""
        descriptor = self.layer.descriptor if isinstance(self.layer, LossLayer) else None
        if descriptor is None:
            return {}
        found = {"axis": descriptor.axis, "ignored_label": descriptor.ignored_label}
        return {name: value for name, value in found.items() if value != ASSUMED[name]}


@dataclass(frozen=True)
class Measured:
    """The losses of a batch or a part of one, still on the device, with what each mean divides by."""

    losses: tuple[torch.Tensor | Loss, ...]
    amounts: tuple[Amount, ...]
    rows: int


@dataclass(frozen=True)
class Read:
    """The losses of a batch or a part of one as numbers, with what each mean divides by."""

    losses: tuple[float, ...]
    amounts: tuple[float, ...]
    rows: int


def read_losses(batches: Sequence[Measured]) -> list[Read]:
    """Losses as numbers, with one synchronization and one transfer for all. Unreduced losses give their mean."""
    arrays = [loss.array if isinstance(loss, Loss) else loss for one in batches for loss in one.losses]
    numbers = [loss.reshape(()) if loss.numel() == 1 else loss.float().mean() for loss in arrays]
    counted = [one for batch in batches for one in batch.amounts if isinstance(one, torch.Tensor)]
    values, amounts = iter(_transferred(numbers)), iter(_transferred(counted))
    return [
        Read(
            tuple(next(values) for _ in one.losses),
            tuple(next(amounts) if isinstance(amount, torch.Tensor) else amount for amount in one.amounts),
            one.rows,
        )
        for one in batches
    ]


def _transferred(numbers: Sequence[torch.Tensor]) -> list[float]:
    return torch.stack([*numbers]).tolist() if numbers else []


def joined(parts: Sequence[Read], losses: Sequence[TrainedLoss]) -> Read:
    """The losses of a batch from those of its parts, or of an update from those of its batches."""
    if len(parts) == 1:
        return parts[0]
    found, amounts = [], []
    for index, loss in enumerate(losses):
        pairs = [(one.losses[index], one.amounts[index]) for one in parts]
        amounts.append(sum(amount for _, amount in pairs))
        if loss.adds_up:
            found.append(sum(value for value, _ in pairs))
        else:
            found.append(sum(value * amount for value, amount in pairs) / (amounts[-1] or 1))
    return Read(tuple(found), tuple(amounts), sum(one.rows for one in parts))


@dataclass(frozen=True)
class MetricOf:
    """A metric of one loss, which passes on what it should know of the loss.

    Args:
        metric: the metric.
        settings: keywords for the metric.
    """

    metric: Metric
    settings: Mapping[str, Any]

    @property
    def adds_up(self) -> bool:
        """Whether its results are summed."""
        return bool(getattr(self.metric, "adds_up", False))

    def __call__(self, prediction: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.metric(prediction, labels, **self.settings)

    def weight_of_batch(self, labels: torch.Tensor, rows: int) -> Amount:
        """How much a batch counts in the mean: its rows or, if labels are ignored, the others."""
        ignored = self.settings.get("ignored_label")
        return rows if ignored is None else (labels != ignored).sum()


def assigned(
    metrics: Any, losses: Sequence[TrainedLoss], outputs: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, TrainedLoss]]:
    """Metrics by name, and the loss of each.

    Those under the name of a loss, or of the output it reads, belong to it; others belong to the last loss.
    """
    several = {one.name for one in losses} if len(losses) > 1 else set()
    own = {}
    if isinstance(metrics, Mapping) and not is_object(metrics):
        own = {name: one for name, one in metrics.items() if name in several or _is_group(one)}
    rest = {name: one for name, one in metrics.items() if name not in own} if own else metrics
    found, owners = {}, {}
    for prefix, group, loss in (
        ("", rest, losses[-1]),
        *((f"{name} ", group, _named(name, losses, outputs)) for name, group in own.items()),
    ):
        for name, metric in by_name(group, partial(named, task=loss.task)).items():
            found[prefix + name], owners[prefix + name] = _of(metric, loss), loss
    _check(losses, found)
    return found, owners


def _is_group(given: Any) -> bool:
    return isinstance(given, Mapping | list | tuple) and not callable(given) and not is_object(given)


def _of(metric: Any, loss: TrainedLoss) -> Any:
    """A function with what it should know of the loss; objects are as they are."""
    settings = {} if is_object(metric) else _settings(metric, loss)
    return MetricOf(metric, settings) if settings else metric


def _settings(metric: Metric, loss: TrainedLoss) -> dict[str, Any]:
    """What the loss sets and the metric takes as keywords, unless the caller has set them."""
    try:
        takes = inspect.signature(metric).parameters
    except (TypeError, ValueError):  # functions of C have none
        return {}
    fixed = metric.keywords if isinstance(metric, partial) else {}
    return {name: value for name, value in loss.settings().items() if name in takes and name not in fixed}


def _named(name: str, losses: Sequence[TrainedLoss], outputs: Mapping[str, Tensor]) -> TrainedLoss:
    by_label = {one.name: one for one in losses}
    if name in by_label:
        return by_label[name]
    found = next((one for one in losses if outputs.get(name) is one.prediction), None)
    if found is None:
        known = ", ".join(by_label)
        raise UnknownNameError(
            "metrics", f"there is no loss '{name}'", known=known, fix="name a loss, or an output that a loss reads"
        )
    return found


def _check(losses: Sequence[TrainedLoss], metrics: Mapping[str, Metric]) -> None:
    """Rejects losses whose names a history needs for something else."""
    for one in losses if len(losses) > 1 else ():
        if one.name in TAKEN or one.name in metrics or one.name.startswith("validation "):
            owner = "a metric has too" if one.name in metrics else "the history uses for something else"
            fix = "pass another label= to the loss layer"
            raise ArgumentError("fit", f"the loss '{one.name}' has a name that {owner}", fix=fix)
