"""Metrics: plain functions of predictions and labels, or objects that collect them.

A metric is any function `(prediction, labels) → number`, the mean over the rows of a batch; over an epoch, such numbers
are averaged by rows. One with `adds_up = True` returns an array that is summed instead. An object with `update`,
`compute` and `reset`, such as those of torchmetrics, collects what it likes. All receive torch arrays on the graph's
device, so that a GPU need not synchronize.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError

Metric = Callable[[torch.Tensor, torch.Tensor], Any]
METHODS = ("update", "compute", "reset")
TAKEN = ("epoch", "step", "loss", "rate", "seconds", "waiting")


def accuracy(
    prediction: torch.Tensor, labels: torch.Tensor, *, axis: int = 1, ignored_label: int | None = None
) -> torch.Tensor:
    """The fraction of labels whose predicted class, the maximum along `axis`, is right.

    Labels are class indices, or one number per class like the prediction. `fit` and `evaluate` pass the axis and the
    ignored label of the loss; ignored labels do not count.

    Example:
        >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        tensor(0.5000)
    """
    wanted = class_indices("accuracy", prediction, labels, axis)
    return _fraction(prediction.argmax(dim=axis) == wanted, wanted, ignored_label)


@dataclass(frozen=True)
class TopK:
    """The fraction of labels whose class is among the `k` largest numbers; ignored labels do not count.

    Example:
        >>> TopK(2)(torch.tensor([[0.1, 0.5, 0.4], [0.7, 0.2, 0.1]]), torch.tensor([2, 2]))
        tensor(0.5000)
    """

    k: int

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ArgumentError("TopK", f"k is {self.k!r}", fix="pass an integer ≥ 1")

    @property
    def name(self) -> str:
        """Its name in a history."""
        return f"top-{self.k}"

    def __call__(
        self, prediction: torch.Tensor, labels: torch.Tensor, *, axis: int = 1, ignored_label: int | None = None
    ) -> torch.Tensor:
        wanted = class_indices(self.name, prediction, labels, axis)
        if self.k > prediction.shape[axis]:
            raise ArgumentError(
                "TopK", f"k is {self.k}, but there are {prediction.shape[axis]} classes", fix="use a smaller k"
            )
        best = prediction.topk(self.k, dim=axis).indices
        return _fraction((best == wanted.unsqueeze(axis)).any(dim=axis), wanted, ignored_label)


@dataclass(frozen=True)
class ConfusionMatrix:
    """How often rows of class i (down) were predicted as class j (across): `[classes, classes]` counts.

    Example:
        >>> ConfusionMatrix(2)(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        tensor([[0, 0],
                [1, 1]])
    """

    classes: int

    adds_up: ClassVar[bool] = True
    name: ClassVar[str] = "confusion"

    def __post_init__(self) -> None:
        if isinstance(self.classes, bool) or not isinstance(self.classes, int) or self.classes < 2:
            raise ArgumentError("ConfusionMatrix", f"classes is {self.classes!r}", fix="pass an integer ≥ 2")

    def __call__(
        self, prediction: torch.Tensor, labels: torch.Tensor, *, axis: int = 1, ignored_label: int | None = None
    ) -> torch.Tensor:
        if prediction.ndim < 2 or prediction.shape[axis] != self.classes:
            shape = tuple(prediction.shape)
            raise ShapeError(
                "ConfusionMatrix", f"it has {self.classes} classes, but the prediction has {shape}", fix="use as many"
            )
        wanted, found = class_indices(self.name, prediction, labels, axis).long(), prediction.argmax(dim=axis)
        counts = torch.ones_like(wanted) if ignored_label is None else (wanted != ignored_label).long()
        cells = (torch.where(counts == 1, wanted, 0) * self.classes + found).reshape(-1)
        # Counted by adding ones, which needs no synchronization.
        table = torch.zeros(self.classes**2, dtype=torch.int64, device=cells.device)
        return table.scatter_add_(0, cells, counts.reshape(-1)).view(self.classes, self.classes)


def class_indices(where: str, prediction: torch.Tensor, labels: torch.Tensor, axis: int) -> torch.Tensor:
    """Labels as class indices, of the prediction's shape without the classes."""
    if prediction.ndim >= 2 and -prediction.ndim <= axis < prediction.ndim and prediction.shape[axis] > 1:
        place = axis % prediction.ndim
        shape = prediction.shape[:place] + prediction.shape[place + 1 :]
        if labels.shape == prediction.shape:
            return labels.argmax(dim=axis)
        if labels.numel() == shape.numel():
            return labels.reshape(shape)
    raise ShapeError(
        where,
        f"the prediction has shape {tuple(prediction.shape)}, but the labels {tuple(labels.shape)}",
        fix=f"predict one number per class along dimension {axis}, or write your own function",
    )


def _fraction(right: torch.Tensor, labels: torch.Tensor, ignored: int | None) -> torch.Tensor:
    """The fraction of labels that are right, of those that count; NaN if none does."""
    if ignored is None:
        return right.float().mean()
    counts = labels != ignored
    return (right & counts).sum() / counts.sum()


def by_name(metrics: Any, named: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Metrics by the names given by the caller, or by their own.

    Args:
        metrics: one metric, several, or a dictionary by name.
        named: returns the metric with a name.
    """
    if isinstance(metrics, Mapping) and not is_object(metrics):
        found = {name: one for given, metric in metrics.items() for name, one in _members(f"{given} ", given, metric)}
    else:
        alone = isinstance(metrics, str) or callable(metrics) or is_object(metrics)
        several = [pair for one in ([metrics] if alone else metrics) for pair in _members("", _own_name(one), one)]
        names, found = [name for name, _ in several], dict(several)
        if len(found) < len(several):
            raise ArgumentError("metrics", f"two have the same name: {', '.join(names)}", fix="pass a dictionary")
    for name, metric in found.items():
        if name in TAKEN or name.startswith("validation "):
            raise ArgumentError("metrics", f"'{name}' is reserved for the history", fix="give the metric another name")
        if isinstance(metric, str) and named is not None:
            found[name] = metric = named(metric)
        if isinstance(metric, type) or not (callable(metric) or is_object(metric)):
            raise DataTypeError(
                "metrics", f"'{name}' is {metric!r}, not a function", fix="use (prediction, labels) → number"
            )
    return found


def _own_name(metric: Any) -> str:
    if isinstance(metric, str):
        return metric
    return str(getattr(metric, "name", getattr(metric, "__name__", type(metric).__name__)))


def _members(prefix: str, name: str, metric: Any) -> list[tuple[str, Any]]:
    """A metric with its name; those of a collection of torchmetrics with theirs."""
    if is_object(metric) and hasattr(metric, "keys"):
        return [(f"{prefix}{one}", member) for one, member in metric.items()]
    return [(name, metric)]


def is_object(metric: Any) -> bool:
    """Whether a metric collects batches itself, as those of torchmetrics do."""
    return not isinstance(metric, type) and all(callable(getattr(metric, one, None)) for one in METHODS)


def has_one_number(metric: Any) -> bool:
    """Whether a metric has one number in a history, under its own name; other objects tell after the first epoch."""
    wraps = is_object(metric) and not type(metric).__module__.startswith("stepgraph.")
    return not wraps or (hasattr(metric, "metric_state") and "wrappers" not in type(metric).__module__)


class Collected:
    """An object that collects batches, on its own copy: training and validation do not share one."""

    def __init__(self, name: str, metric: Any) -> None:
        self.name, self.metric = name, copy.deepcopy(metric)
        self.metric.reset()
        self.device: torch.device | None = None

    def add(self, prediction: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds a batch."""
        if self.device != prediction.device and hasattr(self.metric, "to"):
            self.metric.to(prediction.device)
            self.device = prediction.device
        try:
            self.metric.update(prediction, labels)
        except Exception as error:  # whatever the metric raises is raised again, and says which metric it was
            shapes = f"prediction {tuple(prediction.shape)}, labels {tuple(labels.shape)}"
            error.add_note(f"in the metric '{self.name}', called with {shapes}")
            raise

    def values(self) -> dict[str, Any]:
        """The result as numbers and nested lists; one that is a dictionary gives several."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a resumed metric does not count its updates
            found = self.metric.compute()
        several = {self.name: found} if not isinstance(found, Mapping) else _prefixed(self.name, found)
        return {name: _measured(name, one, torch.float64).tolist() for name, one in several.items()}

    def state(self) -> dict[str, Any] | None:
        """What it has collected as JSON values; None for an object that cannot say."""
        if not hasattr(self.metric, "persistent"):
            return None
        self.metric.persistent(True)
        return {name: _packed(one) for name, one in self.metric.state_dict().items()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        if not hasattr(self.metric, "persistent"):
            return
        self.metric.persistent(True)
        self.metric.load_state_dict({name: _unpacked(one) for name, one in state.items()})


def _prefixed(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name} {one}": value for one, value in found.items()}


def _packed(value: Any) -> Any:
    """An array, or a list of them, as JSON values."""
    if isinstance(value, list):
        return [_packed(one) for one in value]
    return {str(value.dtype).removeprefix("torch."): value.tolist()}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(one) for one in value]
    ((kind, numbers),) = value.items()
    return torch.tensor(numbers, dtype=getattr(torch, kind))


class Tally:
    """The loss and metrics of one pass over data, accumulated on the device."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self.functions = {name: metric for name, metric in metrics.items() if not is_object(metric)}
        self.objects = {name: Collected(name, metric) for name, metric in metrics.items() if is_object(metric)}
        self.names = tuple(metrics)
        self.sums: dict[str, torch.Tensor] = {}
        # What each metric has seen: rows, or labels that count. One added in a resumed epoch has not seen all.
        self.rows: dict[str, torch.Tensor | float] = {}
        self.loss_rows = 0.0
        self.loss_sum = 0.0
        self.losses: dict[str, list[float]] = {}  # of several, by name: the weighted sum, and the weights' sum

    def add(
        self, prediction: torch.Tensor, labels: torch.Tensor, rows: int, only: Collection[str] | None = None
    ) -> None:
        """Adds a batch to all metrics, or `only` to some, without synchronizing."""
        real = torch.float32 if prediction.device.type == "mps" else torch.float64
        for name in self.names if only is None else only:
            if name in self.objects:
                self.objects[name].add(prediction, labels)
                self.rows[name] = self.rows.get(name, 0) + rows
                continue
            metric = self.functions[name]
            found = _measured(name, metric(prediction, labels), real)
            weight = _weight(metric, labels, rows)
            part = found if _adds_up(metric) else _times(found.to(real), weight)
            before = self.sums.get(name)
            if before is not None and before.shape != part.shape:
                raise ShapeError(
                    "metrics",
                    f"'{name}' returned shape {tuple(part.shape)}, but {tuple(before.shape)} for earlier batches",
                    fix="return the same shape for every batch",
                )
            self.sums[name] = part if before is None else before.to(part.device) + part
            self.rows[name] = self.rows.get(name, 0) + weight

    def add_loss(self, loss: float, rows: float | None) -> None:
        """Adds a batch's loss, once it was read, with what its mean divides by; None for a loss that is a sum."""
        self.loss_sum, self.loss_rows = _with(loss, rows, self.loss_sum, self.loss_rows)

    def add_losses(self, losses: Mapping[str, tuple[float, float | None]]) -> None:
        """Adds a batch's losses by name, as `add_loss` does; a single loss needs no name."""
        if len(losses) == 1:
            [(loss, rows)] = losses.values()
            self.add_loss(loss, rows)
            return
        for name, (loss, rows) in losses.items():
            self.losses[name] = [*_with(loss, rows, *self.losses.get(name, (0.0, 0.0)))]

    def values(self) -> dict[str, Any]:
        """The numbers of all batches as of one: means by row, and sums, of which some are nested lists."""
        each = {name: total / (rows or 1) for name, (total, rows) in self.losses.items()}
        found: dict[str, Any] = {"loss": sum(each.values()) if each else self.loss_sum / (self.loss_rows or 1), **each}
        for name in self.names:
            if name in self.sums:
                adds_up = _adds_up(self.functions[name])
                found[name] = (self.sums[name] if adds_up else self.sums[name] / self.rows[name]).tolist()
            elif name in self.objects and self.rows.get(name):
                found |= self.objects[name].values()
        return found

    def state(self) -> dict[str, Any]:
        """The whole tally as plain values."""
        sums = {name: array.tolist() for name, array in self.sums.items()}
        rows = {name: one.item() if isinstance(one, torch.Tensor) else one for name, one in self.rows.items()}
        found: dict[str, Any] = {"sums": sums, "rows": [rows, self.loss_rows], "loss": self.loss_sum}
        found["losses"] = self.losses
        objects = {name: state for name, one in self.objects.items() if (state := one.state()) is not None}
        return {**found, "objects": objects} if objects else found

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        rows, self.loss_rows = state["rows"]
        self.loss_sum = float(state["loss"])
        self.losses = {name: [float(one) for one in pair] for name, pair in state.get("losses", {}).items()}
        for name, kept in state.get("objects", {}).items():
            if name in self.objects:
                self.objects[name].resume(kept)
                self.rows[name] = rows[name]
        for name, metric in self.functions.items():
            if name in state["sums"]:
                kind = None if _adds_up(metric) else torch.float64
                self.sums[name] = torch.tensor(state["sums"][name], dtype=kind)
                self.rows[name] = rows[name] if isinstance(rows, Mapping) else rows  # one number in earlier versions


def _with(loss: float, rows: float | None, total: float, all_rows: float) -> tuple[float, float]:
    """A weighted sum of losses and the sum of the weights with one more loss; sums are divided by nothing."""
    return (total + loss, 1.0) if rows is None else (total + loss * rows, all_rows + rows)


def _measured(name: str, given: Any, real: torch.dtype) -> torch.Tensor:
    """The return value of a metric, as an array."""
    try:
        return torch.as_tensor(given, dtype=real if isinstance(given, float) else None).detach()
    except Exception as error:  # whatever torch raises for an object that is not a number
        raise DataTypeError(
            "metrics",
            f"'{name}' returned {type(given).__name__} ({given!r:.80}), not a number",
            fix="return a number or an array from every call",
        ) from error


def _weight(metric: Metric, labels: torch.Tensor, rows: int) -> torch.Tensor | int:
    """How much a batch counts in the mean of a metric."""
    weight = getattr(metric, "weight_of_batch", None)
    return rows if weight is None else weight(labels, rows)


def _times(mean: torch.Tensor, weight: torch.Tensor | int) -> torch.Tensor:
    """A mean times its weight; the mean over nothing is not a number, and counts nothing."""
    return mean * weight if isinstance(weight, int) else torch.where(weight == 0, 0.0, mean * weight)


def _adds_up(metric: Metric) -> bool:
    return bool(getattr(metric, "adds_up", False))
