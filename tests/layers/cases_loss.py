"""Cases of every loss, its reductions, label forms and label weights."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.computed_loss import ComputedLossLayer
from stepgraph.layers.loss import LossLayer
from stepgraph.types import ReductionType
from tests.layers.case import Bad, Case, Source, normal, uniform

NONE, SUM, MEAN = ReductionType.NONE, ReductionType.SUM, ReductionType.MEAN
TORCH = {NONE: "none", SUM: "sum", MEAN: "mean"}
Reference = Callable[..., np.ndarray]


def binary(*shape: int) -> Source:
    """Labels 0 and 1."""
    return lambda generator: generator.integers(0, 2, shape).astype(np.float64)


def probabilities(*shape: int) -> Source:
    """Numbers that add up to 1 along dimension 1."""

    def draw(generator: np.random.Generator) -> np.ndarray:
        values = generator.uniform(0.1, 1, shape)
        return values / values.sum(1, keepdims=True)

    return draw


def classes(count: int, *shape: int, dtype: type = np.int64) -> Source:
    """Class numbers."""
    return lambda generator: generator.integers(0, count, shape).astype(dtype)


def one_hot(count: int, rows: int, dtype: type = np.float64) -> Source:
    return lambda generator: np.eye(count, dtype=dtype)[generator.integers(0, count, rows)]


def unit(*shape: int) -> Source:
    """Rows of length 1."""

    def draw(generator: np.random.Generator) -> np.ndarray:
        rows = generator.standard_normal((shape[0], int(np.prod(shape[1:]))))
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).reshape(shape)

    return draw


def reduced(losses: np.ndarray, how: ReductionType) -> np.ndarray:
    if how is NONE:
        return losses
    return np.array([losses.sum() if how is SUM else losses.sum() / losses.size])


def log_softmax(y: np.ndarray) -> np.ndarray:
    shifted = y - y.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def spread(t: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Labels with a class dimension: class numbers become one-hot."""
    if t.ndim == y.ndim:
        return t.astype(np.float64)
    return np.moveaxis(np.eye(y.shape[1])[t], -1, 1)


def softmax_cross_entropy(how: ReductionType, smoothing: float = 0.0, scale: float = 1.0) -> Reference:
    def reference(y: np.ndarray, t: np.ndarray, w: Any = 1.0, **_: Any) -> np.ndarray:
        target = spread(t, y) * (1 - smoothing) + smoothing / y.shape[1]
        return scale * reduced(-(w * target * log_softmax(y)).sum(1), how)

    return reference


def categorical(how: ReductionType) -> Reference:
    return lambda y, t, w=1.0: reduced(-(w * spread(t, y) * np.log(y)).sum(1), how)


def elementwise(losses: Callable[[np.ndarray, np.ndarray], np.ndarray], how: ReductionType = MEAN) -> Reference:
    return lambda y, t, w=1.0: reduced(w * losses(y, t), how)


def squared(y: np.ndarray, t: np.ndarray) -> np.ndarray:
    return (y - t) ** 2


def sigmoid_cross_entropy(y: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.maximum(y, 0) - y * t + np.log(1 + np.exp(-np.abs(y)))


def huber(delta: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def losses(y: np.ndarray, t: np.ndarray) -> np.ndarray:
        d = np.abs(y - t)
        return np.where(d <= delta, 0.5 * d**2, delta * (d - 0.5 * delta))

    return losses


def hinge(y: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.maximum(0, np.where(t == 1, 1 - y, 1 + y))


def log_loss(y: np.ndarray, t: np.ndarray, epsilon: float) -> np.ndarray:
    return -t * np.log(y + epsilon) - (1 - t) * np.log(1 - y + epsilon)


def cosine(y: np.ndarray, t: np.ndarray) -> np.ndarray:
    return 1 - np.array([np.vdot(one, other) for one, other in zip(y, t, strict=True)])


def twin(
    function: Callable[..., torch.Tensor], how: ReductionType = MEAN, **settings: Any
) -> Callable[..., torch.Tensor]:
    """PyTorch's function, with its scalar as an array of one element."""

    def call(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        value = function(y, t, reduction=TORCH[how], **settings)
        return value if how is NONE else value.reshape(1)

    return call


PIXELS = (normal(2, 3, 2, 2), probabilities(2, 3, 2, 2))
INT64 = np.zeros((4, 3), np.int64)


def softmax_cases() -> list[Case]:
    make, reference = LossLayer.softmax_cross_entropy, softmax_cross_entropy
    logits, soft = normal(4, 3), probabilities(4, 3)
    bad = (
        Bad(((4, 3), (4,)), ShapeError, "labels [4] do not match the prediction [4, 3]"),
        Bad(((4, 3), (3, 4)), ShapeError, "labels [3, 4] do not match the prediction [4, 3]"),
        Bad(((4, 3), np.zeros(5, np.int32)), ShapeError, "labels [5] do not match the prediction [4, 3]"),
        Bad(((4,), (4,)), ShapeError, "the prediction has no dimension 1 for the classes"),
        Bad((INT64, (4, 3)), DataTypeError, "the source is int64"),
        Bad(((4, 3), (4, 3), (3,)), ShapeError, "label weights [3] do not match the prediction [4, 3]"),
        Bad(((4, 3), (4, 3), INT64), DataTypeError, "the source is int64"),
        Bad(((4, 3),), ShapeError, "1 sources were passed, but 2 to 3 are needed"),
    )
    numbers = classes(3, 4)
    return [
        Case("softmax cross entropy", make, (logits, soft), reference(MEAN), twin(F.cross_entropy), bad=bad),
        *(
            Case(
                f"softmax cross entropy, {how}",
                lambda how=how: make(how),  # type: ignore[misc]
                (logits, soft),
                reference(how),
                twin(F.cross_entropy, how),
            )
            for how in (NONE, SUM)
        ),
        Case("softmax cross entropy, one-hot int32", make, (logits, one_hot(3, 4, np.int32)), reference(MEAN)),
        Case("softmax cross entropy, pixels", make, PIXELS, reference(MEAN), twin(F.cross_entropy)),
        Case(
            "softmax cross entropy, pixels, NONE",
            lambda: make(NONE),
            PIXELS,
            reference(NONE),
            twin(F.cross_entropy, NONE),
        ),
        *(
            Case(
                f"softmax cross entropy, class numbers, {how}",
                lambda how=how: make(how),  # type: ignore[misc]
                (logits, numbers),
                reference(how),
                twin(F.cross_entropy, how),
            )
            for how in (NONE, SUM, MEAN)
        ),
        Case(
            "softmax cross entropy, class numbers of pixels",
            make,
            (normal(2, 3, 2, 2), classes(3, 2, 2, 2, dtype=np.int32)),
            reference(MEAN),
        ),
        Case(
            "softmax cross entropy, class numbers in a column",
            make,
            (normal(4, 3, 1, 1), classes(3, 4, 1)),
            lambda y, t: reference(MEAN)(y, t.reshape(4, 1, 1)),
        ),
        Case(
            "softmax cross entropy, smoothed",
            lambda: make(label_smoothing=0.2, class_count=3, weight=0.7),
            (logits, soft),
            reference(MEAN, 0.2, 0.7),
            lambda y, t: 0.7 * F.cross_entropy(y, t, label_smoothing=0.2).reshape(1),
            bad=(Bad(((4, 5), (4, 5)), ShapeError, "labels are smoothed over 3 classes, but the prediction has 5"),),
        ),
        Case(
            "softmax cross entropy, smoothed class numbers",
            lambda: make(label_smoothing=0.2),
            (logits, numbers),
            reference(MEAN, 0.2),
            twin(F.cross_entropy, label_smoothing=0.2),
        ),
        Case(
            "softmax cross entropy, weights of samples",
            make,
            (logits, soft, uniform(4)),
            lambda y, t, w: reference(MEAN)(y, t, w[:, None]),
        ),
        Case("softmax cross entropy, weights of elements", make, (logits, soft, uniform(4, 3)), reference(MEAN)),
        Case(
            "softmax cross entropy, weights of class numbers",
            lambda: make(SUM),
            (logits, numbers, uniform(4, 1)),
            reference(SUM),
        ),
        Case(
            "softmax cross entropy, weights of elements of smoothed class numbers",
            lambda: make(NONE, label_smoothing=0.1),
            (logits, numbers, uniform(4, 3)),
            reference(NONE, 0.1),
        ),
        Case(
            "softmax cross entropy, weights of pixels",
            make,
            (normal(2, 3, 2, 2), classes(3, 2, 2, 2), uniform(2, 2, 2)),
            lambda y, t, w: reference(MEAN)(y, t, w[:, None]),
        ),
        Case(
            "softmax cross entropy of steps",
            lambda: make(axis=-1),
            (normal(2, 4, 3), classes(3, 2, 4)),
            lambda y, t: reference(MEAN)(np.moveaxis(y, -1, 1), t),
            lambda y, t: F.cross_entropy(y.reshape(-1, 3), t.reshape(-1)).reshape(1),
            bad=(
                Bad(((2, 4, 3), np.zeros((2, 3), np.int64)), ShapeError, "labels [2, 3] do not match"),
                Bad(((2, 4, 3), (2, 4, 3), (4, 3)), ShapeError, "label weights [4, 3] do not match"),
            ),
        ),
        Case(
            "softmax cross entropy of steps, ignored labels and weights",
            lambda: make(axis=-1, ignored_label=1, divides_by_weights=True),
            (normal(2, 4, 3), classes(3, 2, 4), uniform(2, 4)),
            _mean_over_known,
        ),
    ]


def _mean_over_known(y: np.ndarray, t: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The weighted mean over labels that are not class 1."""
    each = softmax_cross_entropy(NONE)(np.moveaxis(y, -1, 1), t) * w * (t != 1)
    return np.array([each.sum() / w[t != 1].sum()])


def categorical_cases() -> list[Case]:
    make, chances, numbers = LossLayer.categorical_cross_entropy, probabilities(4, 3), classes(3, 4)
    return [
        Case("categorical cross entropy", make, (chances, probabilities(4, 3)), categorical(MEAN)),
        Case("categorical cross entropy, NONE", lambda: make(NONE), (chances, one_hot(3, 4)), categorical(NONE)),
        Case("categorical cross entropy, SUM", lambda: make(SUM), (chances, one_hot(3, 4)), categorical(SUM)),
        Case(
            "categorical cross entropy, class numbers",
            make,
            (chances, numbers),
            categorical(MEAN),
            lambda y, t: F.nll_loss(y.log(), t).reshape(1),
        ),
        Case(
            "categorical cross entropy, weights of class numbers",
            make,
            (chances, numbers, uniform(4)),
            lambda y, t, w: categorical(MEAN)(y, t, w[:, None]),
        ),
        Case(
            "categorical cross entropy, weights of elements", make, (chances, numbers, uniform(4, 3)), categorical(MEAN)
        ),
        Case(
            "categorical cross entropy of pixels",
            lambda: make(NONE),
            (probabilities(2, 3, 2, 2), probabilities(2, 3, 2, 2)),
            categorical(NONE),
        ),
    ]


def elementwise_cases() -> list[Case]:
    y, t, zero_one = normal(4, 3), normal(4, 3), binary(4, 3)
    chances = uniform(4, 3, low=0.1, high=0.9)
    return [
        Case(
            "mean absolute error",
            LossLayer.mean_absolute_error,
            (y, t),
            elementwise(lambda y, t: np.abs(y - t)),
            twin(F.l1_loss),
            bad=(
                Bad(((4, 3), (4,)), ShapeError, "labels [4] do not match the prediction [4, 3]"),
                Bad(((4, 3), np.zeros(4, np.int64)), ShapeError, "labels [4] do not match the prediction [4, 3]"),
                Bad(((4, 3, 2), (4, 3, 2), (4, 2)), ShapeError, "label weights [4, 2] do not match"),
            ),
        ),
        *(
            Case(
                f"mean squared error, {how}",
                lambda how=how: LossLayer.mean_squared_error(how),  # type: ignore[misc]
                (y, t),
                elementwise(squared, how),
                twin(F.mse_loss, how),
            )
            for how in (NONE, SUM, MEAN)
        ),
        Case(
            "mean squared error, flat labels",
            LossLayer.mean_squared_error,
            (normal(4, 1, 1, 1), normal(4, 1)),
            lambda y, t: reduced(squared(y.ravel(), t.ravel()), MEAN),
        ),
        Case(
            "mean squared error of one row", LossLayer.mean_squared_error, (normal(4), normal(4)), elementwise(squared)
        ),
        Case(
            "mean squared error, weights of samples",
            LossLayer.mean_squared_error,
            (normal(4, 3, 2), normal(4, 3, 2), uniform(4)),
            lambda y, t, w: reduced(w[:, None, None] * squared(y, t), MEAN),
        ),
        Case(
            "mean squared error, one weight",
            lambda: LossLayer.mean_squared_error(NONE, weight=2),
            (y, t, uniform(1)),
            lambda y, t, w: 2 * w * squared(y, t),
        ),
        Case(
            "sigmoid cross entropy",
            LossLayer.sigmoid_cross_entropy,
            (y, zero_one),
            elementwise(sigmoid_cross_entropy),
            twin(F.binary_cross_entropy_with_logits),
        ),
        Case(
            "sigmoid cross entropy, boolean labels",
            LossLayer.sigmoid_cross_entropy,
            (y, lambda generator: generator.random((4, 3)) < 0.5),
            elementwise(sigmoid_cross_entropy),
        ),
        Case(
            "sigmoid cross entropy, smoothed",
            lambda: LossLayer.sigmoid_cross_entropy(SUM, label_smoothing=0.3),
            (y, zero_one),
            lambda y, t: reduced(sigmoid_cross_entropy(y, 0.7 * t + 0.15), SUM),
        ),
        Case(
            "sigmoid cross entropy, weights of elements",
            lambda: LossLayer.sigmoid_cross_entropy(NONE),
            (y, zero_one, uniform(4, 3)),
            elementwise(sigmoid_cross_entropy, NONE),
        ),
        Case("hinge", LossLayer.hinge, (y, zero_one), elementwise(hinge)),
        Case("hinge, NONE", lambda: LossLayer.hinge(NONE), (y, zero_one), elementwise(hinge, NONE)),
        Case("huber", LossLayer.huber, (y, t), elementwise(huber(1)), twin(F.huber_loss)),
        Case(
            "huber, delta",
            lambda: LossLayer.huber(SUM, delta=0.4),
            (y, t),
            elementwise(huber(0.4), SUM),
            twin(F.huber_loss, SUM, delta=0.4),
        ),
        Case("log", LossLayer.log, (chances, zero_one), elementwise(lambda y, t: log_loss(y, t, 1e-7))),
        Case(
            "log, epsilon",
            lambda: LossLayer.log(SUM, epsilon=0.05),
            (chances, uniform(4, 3)),
            elementwise(lambda y, t: log_loss(y, t, 0.05), SUM),
        ),
    ]


def cosine_cases() -> list[Case]:
    make, sources = LossLayer.cosine_distance, (unit(4, 3), unit(4, 3))
    return [
        Case(
            "cosine distance",
            make,
            sources,
            lambda y, t: reduced(cosine(y, t), MEAN),
            lambda y, t: (1 - torch.linalg.vecdot(y, t)).mean().reshape(1),
        ),
        Case("cosine distance, NONE", lambda: make(NONE), sources, cosine),
        Case("cosine distance, all dimensions", lambda: make(NONE), (unit(4, 3, 2), unit(4, 3, 2)), cosine),
        Case(
            "cosine distance, weights of samples",
            lambda: make(SUM, weight=3),
            (*sources, uniform(4)),
            lambda y, t, w: reduced(3 * w * cosine(y, t), SUM),
        ),
        Case(
            "cosine distance, weights of elements",
            lambda: make(NONE),
            (*sources, uniform(4, 3)),
            lambda y, t, w: cosine(y, w * t),
        ),
    ]


def computed_cases() -> list[Case]:
    bad = (
        Bad(((2,),), ShapeError, "the loss has shape [2], but must be one number"),
        Bad((np.zeros(1, np.int64),), DataTypeError, "the source is int64"),
        Bad(((1,), (1,)), ShapeError, "2 sources were passed, but 1 are needed"),
    )
    return [
        Case("computed loss", ComputedLossLayer, (normal(1),), lambda x: x, lambda x: x, bad=bad),
        Case("computed loss, SUM", lambda: ComputedLossLayer(SUM), (normal(1, 1),), lambda x: x.reshape(1)),
    ]


CASES = [*softmax_cases(), *categorical_cases(), *elementwise_cases(), *cosine_cases(), *computed_cases()]
