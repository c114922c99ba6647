"""Metrics by name: ours, or those of torchmetrics set up for the graph's own loss.

The loss says what a prediction means: one number per class, yes or no, or a quantity. torchmetrics is optional and
imported only when a name needs it.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any

import torch

from stepgraph.errors import ArgumentError, StateError, UnknownNameError, reason
from stepgraph.fitting.metrics import ConfusionMatrix, TopK, accuracy, class_indices
from stepgraph.layers.layer import Layer
from stepgraph.layers.loss import LossLayer, LossType
from stepgraph.tensors.tensor import Tensor


class Kind(Enum):
    """What a prediction says about a row."""

    CLASS = "multiclass"
    YES_OR_NO = "binary"
    LABELS = "multilabel"
    QUANTITY = "regression"


_CLASSES = (LossType.SOFTMAX_CROSS_ENTROPY, LossType.CATEGORICAL_CROSS_ENTROPY)
_LABELS = (LossType.SIGMOID_CROSS_ENTROPY, LossType.LOG, LossType.HINGE)
_LINKS: Mapping[LossType, Callable[[torch.Tensor], torch.Tensor]] = {  # from what a loss takes to probabilities
    LossType.SOFTMAX_CROSS_ENTROPY: lambda scores: scores.softmax(dim=1),
    LossType.SIGMOID_CROSS_ENTROPY: torch.sigmoid,
    LossType.HINGE: torch.sigmoid,
}
_SHORT = {
    "f1": "F1Score",
    "auc": "AUROC",
    "iou": "JaccardIndex",
    "kappa": "CohenKappa",
    "mcc": "MatthewsCorrCoef",
    "mae": "MeanAbsoluteError",
    "mape": "MeanAbsolutePercentageError",
    "mse": "MeanSquaredError",
    "r2": "R2Score",
    "pearson": "PearsonCorrCoef",
    "spearman": "SpearmanCorrCoef",
}


@dataclass(frozen=True)
class Task:
    """What the metrics of a graph compare.

    Args:
        kind: what a prediction says.
        width: the numbers of a prediction: classes, labels or quantities.
        link: makes probabilities of a prediction.
        axis: the dimension of these numbers.
        ignored: the label that does not count, if there is one.
    """

    kind: Kind
    width: int
    link: Callable[[torch.Tensor], torch.Tensor]
    axis: int = 1
    ignored: int | None = None

    @classmethod
    def of(cls, layer: Layer, prediction: Tensor, labels: Tensor | None) -> Task:
        """The task of a loss; for a custom loss, integer labels are classes."""
        descriptor = layer.descriptor if isinstance(layer, LossLayer) else None
        axis, ignored = (1, None) if descriptor is None else (descriptor.axis, descriptor.ignored_label)
        width = prediction.shape[axis] if len(prediction.shape) > 1 else 1
        loss = None if descriptor is None else descriptor.type
        whole = labels is not None and not labels.data_type.torch.is_floating_point
        if loss in _CLASSES or (loss is None and whole and width > 1):
            kind = Kind.CLASS
        elif loss in _LABELS:
            kind = Kind.LABELS if width > 1 else Kind.YES_OR_NO
        else:
            kind = Kind.QUANTITY
        return cls(kind, width, _LINKS.get(loss, _same) if loss is not None else _same, axis, ignored)

    def prepared(self, prediction: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A prediction and its labels in the form that torchmetrics takes."""
        found = prediction.float() if prediction.dtype.itemsize < 4 else prediction
        found = self.link(found.movedim(self.axis, 1) if found.ndim > 2 else found)
        if self.kind is Kind.CLASS:
            return found, class_indices("metrics", prediction, labels, self.axis).long()
        if self.kind is Kind.QUANTITY:
            rows = found.shape[0]
            flat = (rows,) if found.numel() == rows else (rows, -1)
            return found.reshape(flat), labels.reshape(flat).to(found.dtype)
        if self.kind is Kind.LABELS:
            return found, labels.reshape(found.shape).long()
        return found.reshape(-1), labels.reshape(-1).long()


class Measured:
    """A metric of torchmetrics that is given what the task makes of predictions and labels."""

    def __init__(self, metric: Any, task: Task) -> None:
        self.metric, self.task = metric, task

    def __deepcopy__(self, memo: dict[int, Any]) -> Measured:
        return Measured(copy.deepcopy(self.metric, memo), self.task)

    def update(self, prediction: torch.Tensor, labels: torch.Tensor) -> None:
        """Adds a batch."""
        self.metric.update(*self.task.prepared(prediction, labels))

    def __getattr__(self, name: str) -> Any:
        if name == "metric":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.metric, name)


def named(name: str, task: Task | None) -> Any:
    """The metric with a name."""
    short = re.sub(r"[^a-z0-9]", "", name.lower())
    if task is None:
        raise ArgumentError("metrics", f"'{name}' is a name, but there is no graph it is for", fix="pass a function")
    if task.kind is Kind.CLASS:
        if short == "accuracy":
            return accuracy
        if short in ("confusion", "confusionmatrix"):
            return ConfusionMatrix(task.width)
        if top := re.fullmatch(r"top(\d+)", short):
            return TopK(int(top[1]))
    return Measured(_made(name, short, task), task)


def _made(name: str, short: str, task: Task) -> Any:
    """The metric of torchmetrics with a name, for a task."""
    kind = "regression" if task.kind is Kind.QUANTITY else "classification"
    offered = _offered(f"torchmetrics.{kind}", name)
    wanted = _SHORT.get(short, short).lower()
    if wanted not in offered:
        known = [*offered, *(one for one, full in _SHORT.items() if full.lower() in offered)]
        close = difflib.get_close_matches(short, known, 3)
        example = "mae" if task.kind is Kind.QUANTITY else "f1"
        raise UnknownNameError(
            "metrics",
            f"there is no metric '{name}' for {kind}",
            **({"similar": ", ".join(close)} if close else {}),
            fix=f"use a class of torchmetrics.{kind}, such as '{example}', or pass a function",
        )
    metric = offered[wanted]
    try:
        return metric(**_settings(metric, task))
    except (TypeError, ValueError) as error:
        problem = f"'{name}' needs settings of its own: {reason(error)}"
        raise ArgumentError("metrics", problem, fix=f"pass torchmetrics.{kind}.{metric.__name__}(…)") from error


def _settings(metric: type, task: Task) -> dict[str, Any]:
    """The settings of a metric for a task: classes count alike, and nothing waits for a GPU to be checked."""
    if task.kind is Kind.QUANTITY:
        many = task.width > 1 and metric.__name__.endswith("CorrCoef")
        return {"num_outputs": task.width} if many else {}
    found: dict[str, Any] = {"task": task.kind.value, "validate_args": False}
    if task.kind is Kind.CLASS:
        found["num_classes"] = task.width
        found |= {} if task.ignored is None else {"ignore_index": task.ignored}
    elif task.kind is Kind.LABELS:
        found["num_labels"] = task.width
    average = inspect.signature(metric.__new__).parameters.get("average")
    return {**found, "average": "macro"} if average is not None and average.default == "micro" else found


def _offered(module: str, name: str) -> dict[str, type]:
    """The classes of a part of torchmetrics, by lower-case name; of classification those that serve every task."""
    try:
        found = import_module(module)
    except ImportError as error:
        problem = f"'{name}' needs torchmetrics, which is not installed"
        raise StateError("metrics", problem, fix="pip install 'stepgraph[metrics]', or torchmetrics") from error
    classes = {one.lower(): getattr(found, one) for one in found.__all__}
    if module.endswith("regression"):
        return classes
    return {key: one for key, one in classes.items() if "task" in inspect.signature(one.__new__).parameters}


def _same(prediction: torch.Tensor) -> torch.Tensor:
    return prediction
