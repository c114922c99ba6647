"""Loss layers: the distance between a prediction and its labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.labels import label_shape, weight_shape
from stepgraph.layers.layer import Layer, Scope, constant
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import RawEnum, ReductionType


class LossType(RawEnum):
    """Kinds of loss between a prediction y and labels t."""

    MEAN_ABSOLUTE_ERROR = 0, "Absolute Error"  # |y - t|
    MEAN_SQUARED_ERROR = 1, "Mean Squared Error"  # (y - t)²
    SOFTMAX_CROSS_ENTROPY = 2, "Softmax Cross Entropy"  # -Σ t log softmax(y) over the classes
    SIGMOID_CROSS_ENTROPY = 3, "Sigmoid Cross Entropy"  # max(y, 0) - y t + log(1 + exp(-|y|))
    CATEGORICAL_CROSS_ENTROPY = 4, "Categorical Cross Entropy"  # -Σ t log y over the classes; y are probabilities
    HINGE = 5, "Hinge"  # max(0, 1 - (2 t - 1) y)
    HUBER = 6, "Huber"  # (y - t)² / 2 up to |y - t| = delta, then delta (|y - t| - delta / 2)
    COSINE_DISTANCE = 7, "Cosine Distance"  # 1 - Σ t y over a sample; both of unit length
    LOG = 8, "Log"  # -t log(y + epsilon) - (1 - t) log(1 - y + epsilon)


@dataclass(frozen=True)
class LossDescriptor:
    """A kind of loss and its parameters.

    Args:
        type: the kind.
        reduction_type: `MEAN`, `SUM`, or `NONE` for all losses individually.
        weight: a factor for every loss.
        label_smoothing: moves labels towards `1 / classes` (softmax cross entropy) or `1 / 2` (sigmoid cross entropy);
            the other kinds keep the number but do not use it.
        class_count: classes for the smoothing; 1 means as many as the prediction has.
        epsilon: ε of the log loss.
        delta: δ of the Huber loss.

    Example:
        >>> LossDescriptor(LossType.HUBER).delta
        1.0
    """

    type: LossType
    reduction_type: ReductionType = ReductionType.MEAN
    weight: float = 1.0
    label_smoothing: float = 0.0
    class_count: int = 1
    epsilon: float = 1e-7
    delta: float = 1.0

    def __post_init__(self) -> None:
        where = "LossDescriptor"
        if not isinstance(self.type, LossType):
            raise ArgumentError(where, f"the type is {self.type!r}", fix="use a member of LossType")
        if self.reduction_type not in _REDUCTIONS:
            raise ArgumentError(
                where, f"a loss cannot be reduced by {self.reduction_type!s}", fix="use NONE, SUM or MEAN"
            )
        if isinstance(self.class_count, bool) or not isinstance(self.class_count, int) or self.class_count < 1:
            raise ArgumentError(where, f"class_count is {self.class_count!r}", fix="pass an integer ≥ 1")
        ranges = {
            "weight": (-math.inf, math.inf),
            "label_smoothing": (0, 1),
            "epsilon": (0, math.inf),
            "delta": (0, math.inf),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ArgumentError(where, f"{name} is {value!r}", fix="pass a finite number")
            if not low <= value <= high or (name == "delta" and value == 0):
                raise ArgumentError(where, f"{name} is {value}", fix=f"pass a number from {low} to {high}")

    @property
    def loss_type(self) -> LossType:
        """The kind, under its original name."""
        return self.type


class LossLayer(Layer):
    """`loss(prediction, labels)`, optionally with label weights; gradients flow only to the prediction.

    Labels have the prediction's shape; dimensions of 1 do not count. Softmax and categorical cross entropy, whose
    classes are dimension 1, also accept class indices (ours): integer labels without that dimension. Integer
    labels of the full shape are treated as numbers (one-hot).

    Label weights are one number, one per sample, one per sample and pixel (class losses) or one per
    element.

    Results: `NONE` gives one loss per element, per sample and pixel (class losses) or per sample (cosine
    distance); `SUM` and `MEAN` give `[1]`. The mean is the sum divided by the number of those losses, whatever the
    weights are. The gradient is that of the reported value.

    Example:
        >>> labels = TensorDescriptor((8,), "int64")
        >>> LossLayer.softmax_cross_entropy(ReductionType.NONE).infer(TensorDescriptor((8, 10)), labels)[0].shape
        (8,)
    """

    descriptor: LossDescriptor
    weights: Tensor | None = constant(default=None)

    default_label = "Loss"
    source_counts = (2, 3)
    is_loss = True

    @classmethod
    def softmax_cross_entropy(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        label_smoothing: float = 0.0,
        class_count: int = 1,
        weight: float = 1.0,
        weights: Tensor | None = None,
        label: str = "",
    ) -> LossLayer:
        """`-Σ t log softmax(y)` over the classes of each sample; `y` are logits."""
        kind = LossType.SOFTMAX_CROSS_ENTROPY
        return LossLayer(
            LossDescriptor(kind, reduction_type, weight, label_smoothing, class_count), weights, label=label
        )

    @classmethod
    def categorical_cross_entropy(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        label_smoothing: float = 0.0,
        class_count: int = 1,
        weight: float = 1.0,
        weights: Tensor | None = None,
        label: str = "",
    ) -> LossLayer:
        """`-Σ t log y` over the classes of each sample; `y` are probabilities. Smoothing is kept but not used."""
        kind = LossType.CATEGORICAL_CROSS_ENTROPY
        return LossLayer(
            LossDescriptor(kind, reduction_type, weight, label_smoothing, class_count), weights, label=label
        )

    @classmethod
    def sigmoid_cross_entropy(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        label_smoothing: float = 0.0,
        weight: float = 1.0,
        weights: Tensor | None = None,
        label: str = "",
    ) -> LossLayer:
        """`-t log σ(y) - (1 - t) log(1 - σ(y))`; `y` are logits."""
        kind = LossType.SIGMOID_CROSS_ENTROPY
        return LossLayer(LossDescriptor(kind, reduction_type, weight, label_smoothing), weights, label=label)

    @classmethod
    def log(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        epsilon: float = 1e-7,
        weight: float = 1.0,
        weights: Tensor | None = None,
        label: str = "",
    ) -> LossLayer:
        """`-t log(y + epsilon) - (1 - t) log(1 - y + epsilon)`; `y` are probabilities."""
        return LossLayer(LossDescriptor(LossType.LOG, reduction_type, weight, epsilon=epsilon), weights, label=label)

    @classmethod
    def huber(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        delta: float = 1.0,
        weight: float = 1.0,
        weights: Tensor | None = None,
        label: str = "",
    ) -> LossLayer:
        """`(y - t)² / 2` up to a distance of `delta`, linear beyond."""
        return LossLayer(LossDescriptor(LossType.HUBER, reduction_type, weight, delta=delta), weights, label=label)

    @classmethod
    def mean_absolute_error(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        label: str = "",
    ) -> LossLayer:
        """`|y - t|`."""
        return LossLayer(LossDescriptor(LossType.MEAN_ABSOLUTE_ERROR, reduction_type, weight), weights, label=label)

    @classmethod
    def mean_squared_error(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        label: str = "",
    ) -> LossLayer:
        """`(y - t)²`."""
        return LossLayer(LossDescriptor(LossType.MEAN_SQUARED_ERROR, reduction_type, weight), weights, label=label)

    @classmethod
    def hinge(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        label: str = "",
    ) -> LossLayer:
        """`max(0, 1 - (2 t - 1) y)`; labels are 0 and 1."""
        return LossLayer(LossDescriptor(LossType.HINGE, reduction_type, weight), weights, label=label)

    @classmethod
    def cosine_distance(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        label: str = "",
    ) -> LossLayer:
        """`1 - Σ t y` over all elements of a sample; both should have unit length."""
        return LossLayer(LossDescriptor(LossType.COSINE_DISTANCE, reduction_type, weight), weights, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that labels, and weights if any, match the prediction."""
        prediction, labels, *weights = sources
        for real in (prediction, *weights):
            self.require_floating(real)
        has_classes = self.descriptor.type in CLASSES
        if has_classes and prediction.dimension_count < 2:
            raise ShapeError(
                self.where,
                "the prediction has no dimension 1 for the classes",
                prediction=prediction,
                fix="use [batch, classes]",
            )
        if not label_shape(prediction.shape, labels.shape, has_classes and not _is_real(labels)):
            raise ShapeError(
                self.where,
                f"labels {list(labels.shape)} do not match the prediction {list(prediction.shape)}",
                fix="pass labels of the prediction's shape"
                + ", or integer class indices without dimension 1" * has_classes,
            )
        if weights and not weight_shape(prediction.shape, weights[0].shape, has_classes):
            raise ShapeError(
                self.where,
                f"label weights {list(weights[0].shape)} do not match the prediction {list(prediction.shape)}",
                fix="pass one weight, one per sample, or one per element",
            )
        count = self.descriptor.class_count
        if has_classes and self.descriptor.label_smoothing and count not in (1, prediction.shape[1]):
            raise ShapeError(
                self.where,
                f"labels are smoothed over {count} classes, but the prediction has {prediction.shape[1]}",
                fix="leave class_count at 1",
            )

    def index_limits(self, *sources: TensorDescriptor) -> dict[int, int]:
        """Integer labels without dimension 1 are class indices."""
        prediction, labels, *_ = sources
        if self.descriptor.type not in CLASSES or _is_real(labels):
            return {}
        is_index = label_shape(prediction.shape, labels.shape, True) != prediction.shape
        return {1: prediction.shape[1]} if is_index else {}

    def forward(
        self, prediction: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None, *, scope: Scope
    ) -> torch.Tensor:
        """The loss with the descriptor's reduction."""
        shape, kind = tuple(prediction.shape), self.descriptor.type
        whole = kind in CLASSES and not (labels.is_floating_point() or labels.dtype == torch.bool)
        labels = labels.detach().reshape(label_shape(shape, tuple(labels.shape), whole) or shape)
        labels = labels.long() if labels.ndim < prediction.ndim else labels.to(prediction.dtype)
        if weights is not None:
            fitting = weight_shape(shape, tuple(weights.shape), kind in CLASSES) or shape
            weights = weights.detach().to(prediction.dtype).reshape(fitting)
        return loss(prediction, labels, weights, descriptor=self.descriptor)


def loss(y: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None, *, descriptor: LossDescriptor) -> torch.Tensor:
    """`weight · reduction(w · loss(y, t))`, with `t` like `y` or class indices, and `w` broadcast against `y`."""
    how = _REDUCTIONS[descriptor.reduction_type]
    value = LOSSES[descriptor.type](y, t, w, descriptor, how)
    value = value if descriptor.weight == 1 else value * descriptor.weight
    return value if how == "none" else value.reshape(1)


def reduce(losses: torch.Tensor, how: str) -> torch.Tensor:
    """All losses, their sum, or their mean."""
    return losses if how == "none" else losses.sum() if how == "sum" else losses.mean()


def smooth(t: torch.Tensor, smoothing: float, count: int) -> torch.Tensor:
    """`t (1 - s) + s / count`."""
    return t * (1 - smoothing) + smoothing / count if smoothing else t


def hinge(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """`max(0, 1 - T y)` with `T = 2 t - 1`: labels 0 and 1 become -1 and 1."""
    return torch.relu(1 - (2 * t - 1) * y)


def log_loss(y: torch.Tensor, t: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    """`-t log(y + ε) - (1 - t) log(1 - y + ε)`."""
    return -t * torch.log(y + epsilon) - (1 - t) * torch.log(1 - y + epsilon)


def softmax_cross_entropy(
    y: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None, *, smoothing: float, how: str
) -> torch.Tensor:
    """`-Σ w t log softmax(y)` over dimension 1, with `t` smoothed."""
    if t.ndim < y.ndim and (w is None or w.shape[1] == 1):
        each = how if w is None else "none"
        losses = F.cross_entropy(y, t, reduction=each, label_smoothing=smoothing, ignore_index=_NO_CLASS)
        return losses if w is None else reduce(losses * w.squeeze(1), how)
    t = smooth(t if t.ndim == y.ndim else _one_hot(t, y), smoothing, y.shape[1])
    return _over_classes(t * torch.log_softmax(y, 1), w, how)


def categorical_cross_entropy(y: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None, *, how: str) -> torch.Tensor:
    """`-Σ w t log y` over dimension 1. Classes with `t = 0` contribute nothing, even where `y` is 0."""
    if t.ndim < y.ndim and (w is None or w.shape[1] == 1):
        losses = -y.gather(1, t.unsqueeze(1)).squeeze(1).log()
        return reduce(losses if w is None else losses * w.squeeze(1), how)
    t = t if t.ndim == y.ndim else _one_hot(t, y)
    return _over_classes(t * torch.where(t == 0, 1.0, y).log(), w, how)


def cosine_distance(y: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None, *, how: str) -> torch.Tensor:
    """`1 - Σ t y` over each sample; weights of elements multiply the products, weights of samples the distances."""
    products = t * y
    by_element = w is not None and w.numel() == y.numel() and y.numel() > y.shape[0]
    distances = 1 - (products * w if w is not None and by_element else products).reshape(y.shape[0], -1).sum(1)
    return reduce(distances if w is None or by_element else distances * w.reshape(-1), how)


def _over_classes(products: torch.Tensor, w: torch.Tensor | None, how: str) -> torch.Tensor:
    weighted = products if w is None else products * w
    if how == "none":
        return -weighted.sum(1)
    count = products.numel() // products.shape[1] if how == "mean" else 1
    return weighted.sum() / -count


def _one_hot(t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(y).scatter(1, t.unsqueeze(1), 1.0)


Kind = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, LossDescriptor, str], torch.Tensor]
Elements = Callable[[torch.Tensor, torch.Tensor, LossDescriptor, str], torch.Tensor]


def _by_element(losses: Elements) -> Kind:
    """A loss with one value per element, reduced by PyTorch's own operator unless there are weights."""

    def kind(y: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None, d: LossDescriptor, how: str) -> torch.Tensor:
        return losses(y, t, d, how) if w is None else reduce(losses(y, t, d, "none") * w, how)

    return kind


def _sigmoid_cross_entropy(y: torch.Tensor, t: torch.Tensor, d: LossDescriptor, how: str) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(y, smooth(t, d.label_smoothing, 2), reduction=how)


ELEMENTS: dict[LossType, Kind] = {
    LossType.MEAN_ABSOLUTE_ERROR: _by_element(lambda y, t, d, how: F.l1_loss(y, t, reduction=how)),
    LossType.MEAN_SQUARED_ERROR: _by_element(lambda y, t, d, how: F.mse_loss(y, t, reduction=how)),
    LossType.SIGMOID_CROSS_ENTROPY: _by_element(_sigmoid_cross_entropy),
    LossType.HINGE: _by_element(lambda y, t, d, how: reduce(hinge(y, t), how)),
    LossType.HUBER: _by_element(lambda y, t, d, how: F.huber_loss(y, t, reduction=how, delta=d.delta)),
    LossType.LOG: _by_element(lambda y, t, d, how: reduce(log_loss(y, t, epsilon=d.epsilon), how)),
}
CLASSES: dict[LossType, Kind] = {
    LossType.SOFTMAX_CROSS_ENTROPY: lambda y, t, w, d, how: softmax_cross_entropy(
        y, t, w, smoothing=d.label_smoothing, how=how
    ),
    LossType.CATEGORICAL_CROSS_ENTROPY: lambda y, t, w, d, how: categorical_cross_entropy(y, t, w, how=how),
}
SAMPLES: dict[LossType, Kind] = {
    LossType.COSINE_DISTANCE: lambda y, t, w, d, how: cosine_distance(y, t, w, how=how),
}
LOSSES = ELEMENTS | CLASSES | SAMPLES

_REDUCTIONS = {ReductionType.NONE: "none", ReductionType.SUM: "sum", ReductionType.MEAN: "mean"}
_NO_CLASS = torch.iinfo(torch.int64).min  # PyTorch ignores labels of -100; here every label counts


def _is_real(source: TensorDescriptor) -> bool:
    return source.data_type.is_floating or source.data_type.torch == torch.bool
