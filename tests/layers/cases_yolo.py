"""Cases of the YOLO loss, with a reading of its definition in loops over samples, cells and anchors."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.yolo import YOLOLossDescriptor, YOLOLossLayer
from tests.layers.case import Bad, Case, Source, normal, uniform

ANCHORS = ((1.0, 1.5), (2.5, 2.0), (1.2, 3.5))


def scene(batch: int, anchors: int, classes: int, height: int, width: int, *, objects: int = 2) -> Source:
    """Labels with up to `objects` boxes in each sample, encoded for every anchor."""

    def draw(generator: np.random.Generator) -> np.ndarray:
        labels = np.zeros((batch, anchors, 5 + classes, height, width))
        labels[:, :, 5:] = 1 / max(classes, 1)
        for sample in range(batch):
            for _ in range(objects):
                row, column = generator.integers(height), generator.integers(width)
                box = [*generator.uniform(0, 1, 2), *generator.uniform(0.5, 4, 2), 1]
                category = np.eye(classes)[generator.integers(classes)] if classes else []
                labels[sample, :, :, row, column] = [*box, *category]
        return labels.reshape(batch, -1, height, width)

    return draw


def differing(batch: int, anchors: int, classes: int, height: int, width: int) -> Source:
    """Labels whose box is another one for each anchor, half of them objects, with soft classes."""

    def draw(generator: np.random.Generator) -> np.ndarray:
        labels = generator.uniform(0.05, 0.95, (batch, anchors, 5 + classes, height, width))
        labels[:, :, 2:4] *= 4
        labels[:, :, 4] = generator.integers(0, 2, (batch, anchors, height, width))
        return labels.reshape(batch, -1, height, width)

    return draw


def box_iou(one: list[float], other: list[float]) -> float:
    """Of boxes x, y, w, h around their centers."""
    sides = []
    for center, size in ((0, 2), (1, 3)):
        left = max(box[center] - box[size] / 2 for box in (one, other))
        right = min(box[center] + box[size] / 2 for box in (one, other))
        sides.append(max(0.0, right - left))
    common = sides[0] * sides[1]
    union = one[2] * one[3] + other[2] * other[3] - common
    return common / union if common else 0.0


def predicted_iou(p: np.ndarray, q: np.ndarray, anchor: np.ndarray) -> float:
    center = [1 / (1 + math.exp(-x)) for x in p[:2]]
    return box_iou([*center, *(math.exp(x) * side for x, side in zip(p[2:4], anchor, strict=True))], list(q[:4]))


def cross_entropy(logit: float, target: float) -> float:
    """-t log σ(y) - (1 - t) log(1 - σ(y)), by log(1 + eʸ)."""
    return float(target * np.logaddexp(0, -logit) + (1 - target) * np.logaddexp(0, logit))


def huber(distance: float) -> float:
    return distance**2 / 2 if abs(distance) <= 1 else abs(distance) - 0.5


def object_loss(p: np.ndarray, q: np.ndarray, anchor: np.ndarray, target: float, d: YOLOLossDescriptor) -> float:
    position = sum((1 / (1 + math.exp(-p[i])) - q[i]) ** 2 for i in (0, 1))
    size = sum(huber(p[2 + i] - math.log(q[2 + i] / anchor[i] + 1e-5)) for i in (0, 1))
    logits = p[5:]
    category = -sum(q[5:] * (logits - np.log(np.exp(logits).sum()))) if len(logits) else 0.0
    return (
        d.scale_spatial_position_loss * position
        + d.scale_spatial_size_loss * size
        + d.scale_object_confidence_loss * cross_entropy(p[4], target)
        + d.scale_class_loss * category
    )


def cell_losses(
    p: np.ndarray, q: np.ndarray, anchors: np.ndarray, d: YOLOLossDescriptor, frozen: np.ndarray | None
) -> list[float]:
    """The loss of each anchor in one cell; `p`, `q` and `frozen` are `[anchors, channels]`."""
    fits = [box_iou([0, 0, *anchor], [0, 0, *truth[2:4]]) for anchor, truth in zip(anchors, q, strict=True)]
    losses = []
    for a, fit in enumerate(fits):
        is_best = fit == max(fits) or fit > d.minimum_iou_for_object_presence
        if q[a, 4] == 1 and is_best:
            seen = p[a] if frozen is None else frozen[a]
            target = predicted_iou(seen, q[a], anchors[a]) if d.should_rescore else 1.0
            losses.append(object_loss(p[a], q[a], anchors[a], target, d))
        elif fit < d.maximum_iou_for_object_absence:
            losses.append(d.scale_no_object_confidence_loss * cross_entropy(p[a, 4], 0.0))
        else:
            losses.append(0.0)
    return losses


def yolo(d: YOLOLossDescriptor) -> Callable[..., np.ndarray]:
    """Sums of each sample. `frozen` is the prediction that the overlaps are taken from, where it is another one."""

    def reference(
        p: np.ndarray, q: np.ndarray, w: Any = 1.0, *, anchor_boxes: np.ndarray, frozen: np.ndarray | None = None
    ) -> np.ndarray:
        batch, _, height, width = p.shape
        by_anchor = [x if x is None else x.reshape(batch, len(anchor_boxes), -1, height, width) for x in (p, q, frozen)]
        weights = np.broadcast_to(w, (batch, height, width))
        sums = np.zeros(batch)
        for n, i, j in np.ndindex(batch, height, width):
            cells = [x if x is None else x[n, :, :, i, j] for x in by_anchor]
            sums[n] += weights[n, i, j] * sum(cell_losses(cells[0], cells[1], anchor_boxes, d, cells[2]))  # type: ignore[arg-type]
        return sums

    return reference


def row(
    name: str, labels: Source, shape: tuple[int, ...], *, boxes: Any = ANCHORS, bad: Any = (), **settings: Any
) -> Case:
    d = YOLOLossDescriptor(boxes, **settings)
    return Case(
        f"yolo loss, {name}",
        lambda: YOLOLossLayer(d),
        (normal(*shape), labels),
        yolo(d),
        differentiable=not d.should_rescore,  # the overlap is a constant for the gradient: see test_yolo.py
        bad=bad,
    )


def weighted(name: str, shape: tuple[int, ...], expand: Callable[[np.ndarray], np.ndarray]) -> Case:
    d = YOLOLossDescriptor(ANCHORS, should_rescore=False)

    def reference(p: np.ndarray, q: np.ndarray, w: np.ndarray, *, anchor_boxes: np.ndarray) -> np.ndarray:
        return yolo(d)(p, q, expand(w), anchor_boxes=anchor_boxes)

    sources = normal(3, 21, 2, 3), scene(3, 3, 2, 2, 3), uniform(*shape, low=0.2, high=2.0)
    return Case(f"yolo loss, {name}", lambda: YOLOLossLayer(d), sources, reference)


BAD = (
    Bad(((2, 20, 3, 3), (2, 20, 3, 3)), ShapeError, "prediction [2, 20, 3, 3] does not have 3 anchors of 5 channels"),
    Bad(((2, 12, 3, 3), (2, 12, 3, 3)), ShapeError, "use [batch, 3 * (5 + classes), height, width]"),
    Bad(((2, 21, 9), (2, 21, 9)), ShapeError, "the prediction [2, 21, 9] does not have 3 anchors"),
    Bad(((2, 21, 3, 3), (2, 21, 3, 2)), ShapeError, "labels [2, 21, 3, 2] do not match the prediction [2, 21, 3, 3]"),
    Bad(((2, 21, 3, 3), np.zeros((2, 21, 3, 3), np.int64)), DataTypeError, "the source is int64"),
    Bad(((2, 21, 3, 3), (2, 21, 3, 3), (3,)), ShapeError, "weights [3] do not match the prediction [2, 21, 3, 3]"),
    Bad(((2, 21, 3, 3), (2, 21, 3, 3), (2, 21, 3, 3)), ShapeError, "one per sample and cell"),
    Bad(((2, 21, 3, 3),), ShapeError, "1 sources were passed, but 2 to 3 are needed"),
)
SIZES = {
    "scale_spatial_position_loss": 3.0,
    "scale_spatial_size_loss": 0.5,
    "scale_no_object_confidence_loss": 0.25,
    "scale_object_confidence_loss": 1.5,
    "scale_class_loss": 7.0,
    "minimum_iou_for_object_presence": 0.35,
    "maximum_iou_for_object_absence": 0.6,
}

CASES: list[Case] = [
    row("rescored", scene(2, 3, 4, 3, 4), (2, 27, 3, 4)),
    row("not rescored", scene(2, 3, 4, 3, 4), (2, 27, 3, 4), should_rescore=False, bad=BAD),
    row("other numbers, rescored", scene(2, 3, 2, 3, 3), (2, 21, 3, 3), **SIZES),
    row("other numbers", scene(2, 3, 2, 3, 3), (2, 21, 3, 3), should_rescore=False, **SIZES),
    row("labels differing by anchor", differing(2, 3, 3, 2, 3), (2, 24, 2, 3), should_rescore=False),
    row("labels differing by anchor, rescored", differing(2, 3, 3, 2, 3), (2, 24, 2, 3)),
    row("no object", scene(2, 3, 4, 3, 3, objects=0), (2, 27, 3, 3), should_rescore=False),
    row("no classes", scene(2, 3, 0, 3, 3), (2, 15, 3, 3), should_rescore=False),
    row("one anchor, one class", scene(2, 1, 1, 3, 3), (2, 6, 3, 3), boxes=[(2.0, 1.0)], should_rescore=False),
    row("equal anchors", scene(1, 2, 2, 2, 2), (1, 14, 2, 2), boxes=[(1.5, 1.5)] * 2, should_rescore=False),
    weighted("one weight", (1,), lambda w: w),
    weighted("a weight for each sample", (3, 1), lambda w: w[:, :, None]),
    weighted("a weight for each cell", (3, 1, 2, 3), lambda w: w[:, 0]),
]
