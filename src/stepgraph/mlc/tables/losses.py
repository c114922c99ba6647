"""Loss layers."""

from __future__ import annotations

from typing import Any

import stepgraph as sg
from stepgraph.mlc.table import Row, make, read, reads
from stepgraph.mlc.tables.layers import layer
from stepgraph.mlc.values import FLOAT, INT, REDUCTION, TENSOR, Kind, an, optional

_CLASSES: dict[str, Kind] = {"label_smoothing": FLOAT, "class_count": INT}
_LABELS = {"label_smoothing": "labelSmoothing", "class_count": "classCount", "epsilon": "epsilon", "delta": "delta"}
_FACTORIES: tuple[tuple[str, str, str, dict[str, Kind]], ...] = (
    ("softmaxCrossEntropyLoss", "softmaxCrossEntropy", "softmax_cross_entropy", _CLASSES),
    ("categoricalCrossEntropyLoss", "categoricalCrossEntropy", "categorical_cross_entropy", _CLASSES),
    ("sigmoidCrossEntropyLoss", "sigmoidCrossEntropy", "sigmoid_cross_entropy", {"label_smoothing": FLOAT}),
    ("logLoss", "log", "log", {"epsilon": FLOAT}),
    ("huberLoss", "huberLoss", "huber", {"delta": FLOAT}),
    ("meanAbsoluteErrorLoss", "meanAbsoluteError", "mean_absolute_error", {}),
    ("meanSquaredErrorLoss", "meanSquaredError", "mean_squared_error", {}),
    ("hingeLoss", "hingeLoss", "hinge", {}),
    ("cosineDistanceLoss", "cosineDistance", "cosine_distance", {}),
)


def factories() -> list[Row]:
    """Two for each kind of loss: with one weight, with a tensor of weights."""
    rows = []
    for prefix, swift, member, settings in _FACTORIES:
        labels = "".join(f"{_LABELS[name]}:" for name in settings)
        last: tuple[tuple[str, Any], ...] = (("weight", FLOAT), ("weights", optional(TENSOR)))
        for name, kind in last:
            selector = f"{prefix}WithReductionType:{labels}{name}:"
            takes: dict[str, Any] = {"reduction_type": REDUCTION, **settings, name: kind}
            rows.append(make(selector, member, **takes, swift=f"{swift}(reductionType:{labels}{name}:)"))
    return rows


CLASSES = (
    layer(
        "MLCLossLayer",
        sg.LossLayer,
        *reads("descriptor weights"),
        make("layerWithDescriptor:", descriptor=an(sg.LossDescriptor)),
        make("layerWithDescriptor:weights:", descriptor=an(sg.LossDescriptor), weights=optional(TENSOR)),
        *factories(),
    ),
    layer(
        "MLCYOLOLossLayer",
        sg.YOLOLossLayer,
        read("yoloLossDescriptor"),
        make("layerWithDescriptor:", yolo_loss_descriptor=an(sg.YOLOLossDescriptor), label="Loss"),
        base="MLCLossLayer",
    ),
)
