"""Loss layers: the distance between a prediction and its labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.class_losses import (
    along,
    categorical_cross_entropy,
    label_weights,
    reduce,
    smooth,
    softmax_cross_entropy,
)
from stepgraph.layers.labels import Shape, label_shape, weight_shape
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
        axis: the dimension of the classes in a prediction (softmax and categorical cross entropy); -1 is the last.
        ignored_label: a class index that marks labels without a loss, such as padding. Any integer, also outside the
            range of the classes. A mean divides by the number of the other labels; if there are none, it is 0.
        divides_by_weights: a mean divides by the sum of the label weights, not by the number of losses; if all
            weights are 0, it is 0.

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
    axis: int = 1
    ignored_label: int | None = None
    divides_by_weights: bool = False

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
        self._check_classes(where)
        if not isinstance(self.divides_by_weights, bool):
            raise ArgumentError(where, f"divides_by_weights is {self.divides_by_weights!r}", fix="pass True or False")
        if self.divides_by_weights and self.reduction_type is not ReductionType.MEAN:
            problem = f"divides_by_weights is for a mean, but the reduction is {self.reduction_type!s}"
            raise ArgumentError(where, problem, fix="use ReductionType.MEAN")

    def _check_classes(self, where: str) -> None:
        if isinstance(self.axis, bool) or not isinstance(self.axis, int):
            raise ArgumentError(where, f"axis is {self.axis!r}", fix="pass an integer, such as -1")
        ignored = self.ignored_label
        if ignored is not None and (isinstance(ignored, bool) or not isinstance(ignored, int)):
            raise ArgumentError(where, f"ignored_label is {ignored!r}", fix="pass an integer, such as -100, or None")
        if ignored is not None and not -(2**63) <= ignored < 2**63:
            raise ArgumentError(where, f"ignored_label is {ignored}", fix="pass an integer of at most 64 bits")
        if self.type not in CLASSES and (self.axis != 1 or ignored is not None):
            raise ArgumentError(
                where,
                f"{self.type.debug_description} has no classes, but axis is {self.axis} and ignored_label {ignored}",
                fix="leave axis and ignored_label out, or use label weights of 0",
            )

    @property
    def loss_type(self) -> LossType:
        """The kind, under its original name."""
        return self.type


class LossLayer(Layer):
    """`loss(prediction, labels)`, optionally with label weights; gradients flow only to the prediction.

    Labels have the prediction's shape; dimensions of 1 do not count. Softmax and categorical cross entropy, whose
    classes are dimension 1 unless `axis` says otherwise, also accept class indices (ours): integer labels without that
    dimension. Integer labels of the full shape are treated as numbers (one-hot).

    Label weights are one number, one per sample, one per label (class losses) or one per element.

    Results: `NONE` gives one loss per element, per label (class losses) or per sample (cosine distance); `SUM` and
    `MEAN` give `[1]`. The mean is the sum divided by the number of those losses, ignored labels not counted. It
    divides by the sum of the label weights only with `divides_by_weights`. The gradient is that of the reported value.

    Example:
        >>> labels = TensorDescriptor((8,), "int64")
        >>> LossLayer.softmax_cross_entropy(ReductionType.NONE).infer(TensorDescriptor((8, 10)), labels)[0].shape
        (8,)
        >>> words = LossLayer.softmax_cross_entropy(axis=-1, ignored_label=-100)
        >>> words.infer(TensorDescriptor((8, 20, 1000)), TensorDescriptor((8, 20), "int64"))[0].shape
        (1,)
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
        axis: int = 1,
        ignored_label: int | None = None,
        label_smoothing: float = 0.0,
        class_count: int = 1,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> LossLayer:
        """`-Σ t log softmax(y)` over the classes along `axis`; `y` are logits."""
        descriptor = LossDescriptor(
            LossType.SOFTMAX_CROSS_ENTROPY,
            reduction_type,
            weight,
            label_smoothing,
            class_count,
            axis=axis,
            ignored_label=ignored_label,
            divides_by_weights=divides_by_weights,
        )
        return LossLayer(descriptor, weights, label=label)

    @classmethod
    def categorical_cross_entropy(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        axis: int = 1,
        ignored_label: int | None = None,
        label_smoothing: float = 0.0,
        class_count: int = 1,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> LossLayer:
        """`-Σ t log y` over the classes along `axis`; `y` are probabilities. Smoothing is kept but not used."""
        descriptor = LossDescriptor(
            LossType.CATEGORICAL_CROSS_ENTROPY,
            reduction_type,
            weight,
            label_smoothing,
            class_count,
            axis=axis,
            ignored_label=ignored_label,
            divides_by_weights=divides_by_weights,
        )
        return LossLayer(descriptor, weights, label=label)

    @classmethod
    def sigmoid_cross_entropy(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        label_smoothing: float = 0.0,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> LossLayer:
        """`-t log σ(y) - (1 - t) log(1 - σ(y))`; `y` are logits."""
        kind, by_weights = LossType.SIGMOID_CROSS_ENTROPY, divides_by_weights
        descriptor = LossDescriptor(kind, reduction_type, weight, label_smoothing, divides_by_weights=by_weights)
        return LossLayer(descriptor, weights, label=label)

    @classmethod
    def log(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        epsilon: float = 1e-7,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> LossLayer:
        """`-t log(y + epsilon) - (1 - t) log(1 - y + epsilon)`; `y` are probabilities."""
        kind, by_weights = LossType.LOG, divides_by_weights
        descriptor = LossDescriptor(kind, reduction_type, weight, epsilon=epsilon, divides_by_weights=by_weights)
        return LossLayer(descriptor, weights, label=label)

    @classmethod
    def huber(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        delta: float = 1.0,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> LossLayer:
        """`(y - t)² / 2` up to a distance of `delta`, linear beyond."""
        kind, by_weights = LossType.HUBER, divides_by_weights
        descriptor = LossDescriptor(kind, reduction_type, weight, delta=delta, divides_by_weights=by_weights)
        return LossLayer(descriptor, weights, label=label)

    @classmethod
    def mean_absolute_error(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> LossLayer:
        """`|y - t|`."""
        kind, by_weights = LossType.MEAN_ABSOLUTE_ERROR, divides_by_weights
        return LossLayer(
            LossDescriptor(kind, reduction_type, weight, divides_by_weights=by_weights), weights, label=label
        )

    @classmethod
    def mean_squared_error(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> LossLayer:
        """`(y - t)²`."""
        kind, by_weights = LossType.MEAN_SQUARED_ERROR, divides_by_weights
        return LossLayer(
            LossDescriptor(kind, reduction_type, weight, divides_by_weights=by_weights), weights, label=label
        )

    @classmethod
    def hinge(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> LossLayer:
        """`max(0, 1 - (2 t - 1) y)`; labels are 0 and 1."""
        kind, by_weights = LossType.HINGE, divides_by_weights
        return LossLayer(
            LossDescriptor(kind, reduction_type, weight, divides_by_weights=by_weights), weights, label=label
        )

    @classmethod
    def cosine_distance(
        cls,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> LossLayer:
        """`1 - Σ t y` over all elements of a sample; both should have unit length."""
        kind, by_weights = LossType.COSINE_DISTANCE, divides_by_weights
        return LossLayer(
            LossDescriptor(kind, reduction_type, weight, divides_by_weights=by_weights), weights, label=label
        )

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that labels, and weights if any, match the prediction."""
        prediction, labels, *weights = sources
        for real in (prediction, *weights):
            self.require_floating(real)
        axis = self._class_axis(prediction)
        fitting = label_shape(prediction.shape, labels.shape, None if _is_real(labels) else axis)
        if not fitting:
            raise ShapeError(
                self.where,
                f"labels {list(labels.shape)} do not match the prediction {list(prediction.shape)}",
                fix=self._fix_of_labels(prediction, labels, axis),
            )
        if self.descriptor.ignored_label is not None and fitting == prediction.shape:
            raise ShapeError(
                self.where,
                f"ignored_label is {self.descriptor.ignored_label}, but labels {labels} are not class indices",
                fix=f"pass integer labels without dimension {axis}, or give labels to ignore a weight of 0",
            )
        if weights:
            self._check_weights(prediction.shape, weights[0].shape, axis)
        count = self.descriptor.class_count
        if axis is not None and self.descriptor.label_smoothing and count not in (1, prediction.shape[axis]):
            raise ShapeError(
                self.where,
                f"labels are smoothed over {count} classes, but the prediction has {prediction.shape[axis]}",
                fix="leave class_count at 1",
            )

    def _class_axis(self, prediction: TensorDescriptor) -> int | None:
        """The dimension of the classes, from 0 on; None for losses without classes."""
        axis, count = self.descriptor.axis, prediction.dimension_count
        if self.descriptor.type not in CLASSES:
            return None
        if count < 2 or not -count <= axis < count:
            raise ShapeError(
                self.where,
                f"the prediction has no dimension {axis} for the classes",
                prediction=prediction,
                fix="use [batch, classes]" if axis in (1, -1) else f"pass axis={count - 1} or less",
            )
        return axis % count

    def _fix_of_labels(self, prediction: TensorDescriptor, labels: TensorDescriptor, axis: int | None) -> str:
        if axis is None:
            return "pass labels of the prediction's shape"
        others = range(prediction.dimension_count - 1, 0, -1)
        is_index = not _is_real(labels)
        fitting = [one for one in others if is_index and label_shape(prediction.shape, labels.shape, one)]
        if fitting:
            return f"pass axis={fitting[0] - prediction.dimension_count} if the classes are dimension {fitting[0]}"
        return f"pass labels of the prediction's shape, or integer class indices without dimension {axis}"

    def _check_weights(self, prediction: Shape, weights: Shape, axis: int | None) -> None:
        fitting = weight_shape(prediction, weights, axis)
        if not fitting:
            raise ShapeError(
                self.where,
                f"label weights {list(weights)} do not match the prediction {list(prediction)}",
                fix="pass one weight, one per sample, " + "one per label, " * (axis is not None) + "or one per element",
            )
        d = self.descriptor
        if d.type in SAMPLES and d.divides_by_weights and _weighs_elements(prediction, fitting):
            raise ShapeError(
                self.where,
                f"label weights {list(weights)} belong to elements, but distances are means over samples",
                fix="pass one weight per sample, or leave divides_by_weights out",
            )

    def index_limits(self, *sources: TensorDescriptor) -> dict[int, int]:
        """Integer labels without the dimension of the classes are class indices."""
        prediction, labels, *_ = sources
        axis = self._class_axis(prediction)
        if axis is None or _is_real(labels):
            return {}
        is_index = label_shape(prediction.shape, labels.shape, axis) != prediction.shape
        return {1: prediction.shape[axis]} if is_index else {}

    def ignored_indices(self) -> frozenset[int]:
        """The ignored label."""
        ignored = self.descriptor.ignored_label
        return frozenset() if ignored is None else frozenset({ignored})

    def forward(
        self, prediction: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None, *, scope: Scope
    ) -> torch.Tensor:
        """The loss with the descriptor's reduction."""
        labels, weights = self._aligned(tuple(prediction.shape), labels, weights)
        labels = labels.long() if labels.ndim < prediction.ndim else labels.to(prediction.dtype)
        weights = None if weights is None else weights.to(prediction.dtype)
        return loss(prediction, labels, weights, descriptor=self.descriptor)

    @property
    def counts_labels(self) -> bool:
        """Whether a mean divides by something else than the number of labels, which `divisor` finds."""
        d = self.descriptor
        return d.reduction_type is ReductionType.MEAN and (d.ignored_label is not None or d.divides_by_weights)

    def divisor(self, prediction: Shape, labels: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """What the mean over a batch divides by: labels that count, or their weights. 0 if nothing counts."""
        d = self.descriptor
        labels, weights = self._aligned(prediction, labels, weights)
        if weights is None or not d.divides_by_weights:
            counted = (
                torch.ones_like(labels, dtype=torch.bool) if d.ignored_label is None else labels != d.ignored_label
            )
            return counted.sum()
        wide = torch.promote_types(weights.dtype, torch.float32)
        if d.type in CLASSES:
            axis = d.axis % len(prediction)
            each = label_weights(labels, weights, axis, d.ignored_label)
            return each.expand(prediction[:axis] + prediction[axis + 1 :]).sum(dtype=wide)
        each = weights if d.type in ELEMENTS else weights.reshape(-1)
        return each.expand(prediction if d.type in ELEMENTS else prediction[:1]).sum(dtype=wide)

    def _aligned(
        self, prediction: Shape, labels: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Labels with the prediction's dimensions, or all but the classes, and weights that broadcast against it."""
        axis = self.descriptor.axis % len(prediction) if self.descriptor.type in CLASSES else None
        is_index = not (labels.is_floating_point() or labels.dtype == torch.bool)
        fitting = label_shape(prediction, tuple(labels.shape), axis if is_index else None) or prediction
        labels = labels.detach().reshape(fitting)
        if weights is not None:
            weights = weights.detach().reshape(weight_shape(prediction, tuple(weights.shape), axis) or prediction)
        return labels, weights


def loss(y: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None, *, descriptor: LossDescriptor) -> torch.Tensor:
    """`weight · reduction(w · loss(y, t))`, with `t` like `y` or class indices, and `w` broadcast against `y`."""
    how = _REDUCTIONS[descriptor.reduction_type]
    value = LOSSES[descriptor.type](y, t, w, descriptor, how)
    value = value if descriptor.weight == 1 else value * descriptor.weight
    return value if how == "none" else value.reshape(1)


def hinge(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """`max(0, 1 - T y)` with `T = 2 t - 1`: labels 0 and 1 become -1 and 1."""
    return torch.relu(1 - (2 * t - 1) * y)


def log_loss(y: torch.Tensor, t: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    """`-t log(y + ε) - (1 - t) log(1 - y + ε)`."""
    return -t * torch.log(y + epsilon) - (1 - t) * torch.log(1 - y + epsilon)


def cosine_distance(
    y: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None, *, how: str, by_weights: bool
) -> torch.Tensor:
    """`1 - Σ t y` over each sample; weights of elements multiply the products, weights of samples the distances."""
    products = t * y
    by_element = w is not None and _weighs_elements(tuple(y.shape), tuple(w.shape))
    distances = 1 - (products * w if w is not None and by_element else products).reshape(y.shape[0], -1).sum(1)
    if w is None or by_element:
        return reduce(distances, how)
    each = w.reshape(-1)
    return reduce(distances * each, how, each if by_weights else None)


def _weighs_elements(prediction: Shape, weights: Shape) -> bool:
    """Whether weights belong to the elements of samples, not to the samples."""
    return math.prod(weights) == math.prod(prediction) > prediction[0]


Kind = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, LossDescriptor, str], torch.Tensor]
Elements = Callable[[torch.Tensor, torch.Tensor, LossDescriptor, str], torch.Tensor]


def _by_element(losses: Elements) -> Kind:
    """A loss with one value per element, reduced by PyTorch's own operator unless there are weights."""

    def kind(y: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None, d: LossDescriptor, how: str) -> torch.Tensor:
        if w is None:
            return losses(y, t, d, how)
        return reduce(losses(y, t, d, "none") * w, how, w if d.divides_by_weights else None)

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
    LossType.SOFTMAX_CROSS_ENTROPY: lambda y, t, w, d, how: along(
        d.axis % y.ndim,
        partial(softmax_cross_entropy, smoothing=d.label_smoothing),
        y,
        t,
        w,
        how,
        ignored=d.ignored_label,
        by_weights=d.divides_by_weights,
    ),
    LossType.CATEGORICAL_CROSS_ENTROPY: lambda y, t, w, d, how: along(
        d.axis % y.ndim,
        categorical_cross_entropy,
        y,
        t,
        w,
        how,
        ignored=d.ignored_label,
        by_weights=d.divides_by_weights,
    ),
}
SAMPLES: dict[LossType, Kind] = {
    LossType.COSINE_DISTANCE: lambda y, t, w, d, how: cosine_distance(y, t, w, how=how, by_weights=d.divides_by_weights)
}
LOSSES = ELEMENTS | CLASSES | SAMPLES

_REDUCTIONS = {ReductionType.NONE: "none", ReductionType.SUM: "sum", ReductionType.MEAN: "mean"}


def _is_real(source: TensorDescriptor) -> bool:
    return source.data_type.is_floating or source.data_type.torch == torch.bool
