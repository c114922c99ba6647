"""Metrics: plain functions of predictions and labels.

A metric is any function `(prediction, labels) → number`, the mean over the rows of a batch; over an epoch such numbers
are averaged by rows. One with `adds_up = True` gives an array that is summed instead. Both get torch arrays where the
graph runs, so that a GPU need not wait.
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
    """The share of rows (and pixels) whose class, the largest number along dimension 1, is that of the label.

    Labels are class indices, or numbers for each class like the prediction's.

    Example:
        >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        tensor(0.5000)
    """
    wanted = _classes("accuracy", prediction, labels)
    return (prediction.argmax(dim=1) == wanted).float().mean()


@dataclass(frozen=True)
class TopK:
    """The share of rows (and pixels) whose class is among the `k` largest numbers.

    Example:
        >>> TopK(2)(torch.tensor([[0.1, 0.5, 0.4], [0.7, 0.2, 0.1]]), torch.tensor([2, 2]))
        tensor(0.5000)
    """

    k: int

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ArgumentError("TopK", f"k is {self.k!r}", fix="give a whole number ≥ 1")

    @property
    def name(self) -> str:
        """How it is called in a history."""
        return f"top-{self.k}"

    def __call__(self, prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wanted = _classes(self.name, prediction, labels)
        if self.k > prediction.shape[1]:
            raise ArgumentError(
                "TopK", f"k is {self.k}, there are {prediction.shape[1]} classes", fix="give a smaller k"
            )
        best = prediction.topk(self.k, dim=1).indices
        return (best == wanted.unsqueeze(1)).any(dim=1).float().mean()


@dataclass(frozen=True)
class ConfusionMatrix:
    """How often rows of class i (down) were taken for class j (across): `[classes, classes]` counts.

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
            raise ArgumentError("ConfusionMatrix", f"classes is {self.classes!r}", fix="give a whole number ≥ 2")

    def __call__(self, prediction: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if prediction.ndim < 2 or prediction.shape[1] != self.classes:
            shape = tuple(prediction.shape)
            raise ShapeError(
                "ConfusionMatrix", f"it has {self.classes} classes, the prediction {shape}", fix="give as many"
            )
        wanted, found = _classes(self.name, prediction, labels), prediction.argmax(dim=1)
        cells = (wanted.long() * self.classes + found).reshape(-1)
        # Counted by adding ones: the way that needs no number from the device.
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
        f"the prediction has shape {tuple(prediction.shape)}, the labels {tuple(labels.shape)}",
        fix="predict a number for each class along dimension 1, or write a function of your own",
    )


def by_name(metrics: Metric | Sequence[Metric] | Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics by the names they were given, or have."""
    if isinstance(metrics, Mapping):
        found = dict(metrics)
    else:
        several = [metrics] if callable(metrics) else list(metrics)
        names = [str(getattr(one, "name", getattr(one, "__name__", type(one).__name__))) for one in several]
        found = dict(zip(names, several, strict=True))
        if len(found) < len(several):
            raise ArgumentError("metrics", f"two of them are called alike: {', '.join(names)}", fix="give a dictionary")
    for name, metric in found.items():
        if not callable(metric) or isinstance(metric, type):
            raise DataTypeError(
                "metrics", f"'{name}' is {metric!r}, not a function", fix="give (prediction, labels) → number"
            )
        if name in TAKEN or name.startswith("validation "):
            raise ArgumentError("metrics", f"a history has a '{name}' of its own", fix="give the metric another name")
    return found


class Tally:
    """The loss and the metrics of one pass over data, summed up where they are computed."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = metrics
        self.sums: dict[str, torch.Tensor] = {}
        self.rows: dict[str, int] = {}  # that each metric has seen: one that joins a resumed epoch has not seen all
        self.loss_rows = 0
        self.loss_sum = 0.0

    def add(self, prediction: torch.Tensor, labels: torch.Tensor, rows: int) -> None:
        """Takes a batch into account; nothing waits for the device."""
        real = torch.float32 if prediction.device.type == "mps" else torch.float64
        for name, metric in self.metrics.items():
            found = _measured(name, metric(prediction, labels), real)
            part = found if _adds_up(metric) else found.to(real) * rows
            before = self.sums.get(name)
            if before is not None and before.shape != part.shape:
                raise ShapeError(
                    "metrics",
                    f"'{name}' gave shape {tuple(part.shape)}, and {tuple(before.shape)} for the batches before",
                    fix="return the same shape for every batch",
                )
            self.sums[name] = part if before is None else before.to(part.device) + part
            self.rows[name] = self.rows.get(name, 0) + rows

    def add_loss(self, loss: float, rows: int) -> None:
        """Takes a batch's loss into account, once it was read."""
        self.loss_sum += loss * rows
        self.loss_rows += rows

    def values(self) -> dict[str, Any]:
        """Means by row, and sums of what adds up as nested lists."""
        found: dict[str, Any] = {"loss": self.loss_sum / max(self.loss_rows, 1)}
        for name, metric in self.metrics.items():
            if name in self.sums:
                total = self.sums[name] if _adds_up(metric) else self.sums[name] / self.rows[name]
                found[name] = total.tolist()
        return found

    def state(self) -> dict[str, Any]:
        """All of it as plain values."""
        sums = {name: array.tolist() for name, array in self.sums.items()}
        return {"sums": sums, "rows": [self.rows, self.loss_rows], "loss": self.loss_sum}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`."""
        rows, self.loss_rows = state["rows"]
        self.loss_sum = float(state["loss"])
        for name, metric in self.metrics.items():
            if name in state["sums"]:
                kind = None if _adds_up(metric) else torch.float64
                self.sums[name] = torch.tensor(state["sums"][name], dtype=kind)
                self.rows[name] = rows[name] if isinstance(rows, Mapping) else rows  # one number in earlier versions


def _measured(name: str, given: Any, real: torch.dtype) -> torch.Tensor:
    """What a metric gave, as an array."""
    try:
        return torch.as_tensor(given, dtype=real if isinstance(given, float) else None).detach()
    except Exception as error:  # whatever torch says about an object that is no number
        raise DataTypeError(
            "metrics",
            f"'{name}' gave {type(given).__name__} ({given!r:.80}), not a number",
            fix="return a number or an array from every call",
        ) from error


def _adds_up(metric: Metric) -> bool:
    return bool(getattr(metric, "adds_up", False))
