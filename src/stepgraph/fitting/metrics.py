"""Metrics: plain functions of predictions and labels.

A metric is any function `(prediction, labels) → number`, the mean over the rows of a batch; over an epoch, such numbers
are averaged by rows. One with `adds_up = True` returns an array that is summed instead. Both receive torch arrays on
the graph's device, so that a GPU need not synchronize.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError

Metric = Callable[[torch.Tensor, torch.Tensor], Any]
TAKEN = ("epoch", "step", "loss", "rate", "seconds")


def accuracy(prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The fraction of rows (and pixels) whose predicted class, the maximum along dimension 1, matches the label.

    Labels are class indices, or one number per class like the prediction.

    Example:
        >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        tensor(0.5000)
    """
    wanted = _classes("accuracy", prediction, labels)
    return (prediction.argmax(dim=1) == wanted).float().mean()


@dataclass(frozen=True)
class TopK:
    """The fraction of rows (and pixels) whose class is among the `k` largest numbers.

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

    def __call__(self, prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wanted = _classes(self.name, prediction, labels)
        if self.k > prediction.shape[1]:
            raise ArgumentError(
                "TopK", f"k is {self.k}, but there are {prediction.shape[1]} classes", fix="use a smaller k"
            )
        best = prediction.topk(self.k, dim=1).indices
        return (best == wanted.unsqueeze(1)).any(dim=1).float().mean()


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

    def __call__(self, prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if prediction.ndim < 2 or prediction.shape[1] != self.classes:
            shape = tuple(prediction.shape)
            raise ShapeError(
                "ConfusionMatrix", f"it has {self.classes} classes, but the prediction has {shape}", fix="use as many"
            )
        wanted, found = _classes(self.name, prediction, labels), prediction.argmax(dim=1)
        cells = (wanted.long() * self.classes + found).reshape(-1)
        # Counted by adding ones, which needs no synchronization.
        counts = torch.zeros(self.classes**2, dtype=torch.int64, device=cells.device)
        return counts.scatter_add_(0, cells, torch.ones_like(cells)).view(self.classes, self.classes)


def _classes(where: str, prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Labels as class indices, of the prediction's shape without dimension 1."""
    shape = prediction.shape[:1] + prediction.shape[2:]
    if prediction.ndim >= 2 and prediction.shape[1] > 1:
        if labels.shape == prediction.shape:
            return labels.argmax(dim=1)
        if labels.numel() == shape.numel():
            return labels.reshape(shape)
    raise ShapeError(
        where,
        f"the prediction has shape {tuple(prediction.shape)}, but the labels {tuple(labels.shape)}",
        fix="predict one number per class along dimension 1, or write your own function",
    )


def by_name(metrics: Metric | Sequence[Metric] | Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics by the names given by the caller, or by their own."""
    if isinstance(metrics, Mapping):
        found = dict(metrics)
    else:
        several = [metrics] if callable(metrics) else list(metrics)
        names = [str(getattr(one, "name", getattr(one, "__name__", type(one).__name__))) for one in several]
        found = dict(zip(names, several, strict=True))
        if len(found) < len(several):
            raise ArgumentError("metrics", f"two have the same name: {', '.join(names)}", fix="pass a dictionary")
    for name, metric in found.items():
        if not callable(metric) or isinstance(metric, type):
            raise DataTypeError(
                "metrics", f"'{name}' is {metric!r}, not a function", fix="use (prediction, labels) → number"
            )
        if name in TAKEN or name.startswith("validation "):
            raise ArgumentError("metrics", f"'{name}' is reserved for the history", fix="give the metric another name")
    return found


class Tally:
    """The loss and metrics of one pass over data, accumulated on the device."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = metrics
        self.sums: dict[str, torch.Tensor] = {}
        self.rows: dict[str, int] = {}  # seen by each metric: one added in a resumed epoch has not seen all
        self.loss_rows = 0
        self.loss_sum = 0.0

    def add(self, prediction: torch.Tensor, labels: torch.Tensor, rows: int) -> None:
        """Adds a batch, without synchronizing."""
        real = torch.float32 if prediction.device.type == "mps" else torch.float64
        for name, metric in self.metrics.items():
            found = _measured(name, metric(prediction, labels), real)
            part = found if _adds_up(metric) else found.to(real) * rows
            before = self.sums.get(name)
            if before is not None and before.shape != part.shape:
                raise ShapeError(
                    "metrics",
                    f"'{name}' returned shape {tuple(part.shape)}, but {tuple(before.shape)} for earlier batches",
                    fix="return the same shape for every batch",
                )
            self.sums[name] = part if before is None else before.to(part.device) + part
            self.rows[name] = self.rows.get(name, 0) + rows

    def add_loss(self, loss: float, rows: int) -> None:
        """Adds a batch's loss, once it was read."""
        self.loss_sum += loss * rows
        self.loss_rows += rows

    def values(self) -> dict[str, Any]:
        """Means by row, and sums as nested lists."""
        found: dict[str, Any] = {"loss": self.loss_sum / max(self.loss_rows, 1)}
        for name, metric in self.metrics.items():
            if name in self.sums:
                total = self.sums[name] if _adds_up(metric) else self.sums[name] / self.rows[name]
                found[name] = total.tolist()
        return found

    def state(self) -> dict[str, Any]:
        """The whole tally as plain values."""
        sums = {name: array.tolist() for name, array in self.sums.items()}
        return {"sums": sums, "rows": [self.rows, self.loss_rows], "loss": self.loss_sum}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        rows, self.loss_rows = state["rows"]
        self.loss_sum = float(state["loss"])
        for name, metric in self.metrics.items():
            if name in state["sums"]:
                kind = None if _adds_up(metric) else torch.float64
                self.sums[name] = torch.tensor(state["sums"][name], dtype=kind)
                self.rows[name] = rows[name] if isinstance(rows, Mapping) else rows  # one number in earlier versions


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


def _adds_up(metric: Metric) -> bool:
    return bool(getattr(metric, "adds_up", False))
