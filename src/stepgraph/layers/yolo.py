"""The YOLO loss: position, size, confidence and class of objects, on a grid of cells with anchor boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, DataError, ShapeError
from stepgraph.layers.labels import label_shape, weight_shape
from stepgraph.layers.layer import Scope, constant
from stepgraph.layers.loss import LossDescriptor, LossLayer, LossType
from stepgraph.tensors.buffers import TensorData
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import ReductionType

BOX = 5  # channels of an anchor before its classes: x, y, width, height, confidence
Boxes = Sequence[tuple[float, float]] | np.ndarray | TensorData | bytes | bytearray | memoryview

_WHERE = "YOLOLossDescriptor"
_SUM = LossDescriptor(LossType.MEAN_SQUARED_ERROR, ReductionType.SUM)


@dataclass(frozen=True)
class YOLOLossDescriptor:
    """Anchor boxes, and the weight of each kind of error.

    Args:
        anchor_boxes: pairs of width and height in units of a grid cell, or raw float32 memory `w0 h0 w1 h1 …`.
        anchor_box_count: the number of boxes; 0 counts them. Raw memory may be longer: the first boxes are used.
        should_rescore: whether the target confidence is the overlap with the true box instead of 1.
        scale_spatial_position_loss: weight of the center's error.
        scale_spatial_size_loss: weight of the error of width and height.
        scale_no_object_confidence_loss: weight of the confidence if there is no object.
        scale_object_confidence_loss: weight of missing confidence if there is one.
        scale_class_loss: weight of a wrong class.
        minimum_iou_for_object_presence: all anchors that overlap a true box more than this are responsible for it, in
            addition to the best one.
        maximum_iou_for_object_absence: anchors that overlap less than this must have low confidence.

    Example:
        >>> YOLOLossDescriptor([(1.0, 2.0), (4.0, 3.0)]).anchor_box_count
        2
        >>> YOLOLossDescriptor(np.array([1, 2, 4, 3], np.float32).tobytes(), 2).anchor_boxes
        ((1.0, 2.0), (4.0, 3.0))
    """

    anchor_boxes: Boxes
    anchor_box_count: int = 0
    should_rescore: bool = True
    scale_spatial_position_loss: float = 10.0
    scale_spatial_size_loss: float = 10.0
    scale_no_object_confidence_loss: float = 5.0
    scale_object_confidence_loss: float = 100.0
    scale_class_loss: float = 2.0
    minimum_iou_for_object_presence: float = 0.7
    maximum_iou_for_object_absence: float = 0.3

    def __post_init__(self) -> None:
        count = self.anchor_box_count
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
            raise ArgumentError(_WHERE, f"anchor_box_count is {count!r}", fix="pass an integer, or 0 to count them")
        boxes = _pairs(self.anchor_boxes, int(count))
        object.__setattr__(self, "anchor_boxes", boxes)
        object.__setattr__(self, "anchor_box_count", len(boxes))
        if not isinstance(self.should_rescore, bool):
            raise ArgumentError(_WHERE, f"should_rescore is {self.should_rescore!r}", fix="pass True or False")
        for name in self.__dataclass_fields__:
            most = math.inf if name.startswith("scale") else 1.0 if "iou" in name else None
            value = getattr(self, name)
            if most is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ArgumentError(_WHERE, f"{name} is {value!r}", fix="pass a finite number")
            if not 0 <= value <= most:
                raise ArgumentError(_WHERE, f"{name} is {value}", fix=f"pass a number from 0 to {most}")


class YOLOLossLayer(LossLayer):
    """The error of the boxes in a `[batch, anchors * (5 + classes), height, width]` prediction.

    Channels of an anchor are adjacent: `x y w h confidence class…`. For one anchor `A` in one cell, with
    prediction p and label q:

        xy, wh   = σ(p_xy), exp(p_wh) A
        fit      = IOU of A and q_wh, both around one center
        present  = q_confidence is 1, and fit is the largest of the cell's anchors or above the minimum
        absent   = not present, and fit is below the maximum
        overlap  = IOU of the boxes (xy, wh) and (q_xy, q_wh), a constant; 1 without rescoring

        loss     = position Σ (xy - q_xy)² + size Σ huber(p_wh - log(q_wh / A + 1e-5))
                 + object bce(p_confidence, overlap) - class Σ q_class log softmax(p_class)       where present
                 = no_object bce(p_confidence, 0)                                                 where absent
                 = 0                                                                              elsewhere

    The result is `[batch]`: each sample's sum over its cells and anchors, without division. `overlap` gets no
    gradient, so with rescoring the gradient is not the derivative of the reported number.

    Labels have the prediction's shape: in the cell with an object's center, and for every anchor, the center inside the
    cell, the size in cells, confidence 1 and the class one-hot; elsewhere 0 and, for classes, anything. Label weights
    are one number, one per sample, or one per sample and cell.

    The inherited `descriptor` only states that the loss is a sum.

    Example:
        >>> layer = YOLOLossLayer(YOLOLossDescriptor([(1.0, 2.0), (4.0, 3.0)]))
        >>> layer.infer(TensorDescriptor((8, 2 * (5 + 20), 13, 13)), TensorDescriptor((8, 50, 13, 13)))[0].shape
        (8,)
    """

    descriptor: LossDescriptor = field(init=False, default_factory=lambda: _SUM)
    weights: Tensor | None = constant(default=None, kw_only=True)
    yolo_loss_descriptor: YOLOLossDescriptor
    anchor_boxes: Tensor = constant(init=False)

    default_label = "YOLOLoss"

    def __post_init__(self) -> None:
        settings = self.yolo_loss_descriptor
        boxes = np.array(settings.anchor_boxes, np.float32)
        self.anchor_boxes = Tensor(boxes.shape, data=boxes, label="anchor boxes")

    @classmethod
    def create(
        cls, anchor_boxes: Boxes, *, weights: Tensor | None = None, label: str = "", **settings: Any
    ) -> YOLOLossLayer:
        """A layer for these boxes; other settings are those of `YOLOLossDescriptor`, by name."""
        return cls(YOLOLossDescriptor(anchor_boxes, **settings), weights=weights, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the prediction's channels match the anchors; labels and weights must match it."""
        for source in sources:
            self.require_floating(source)
        prediction, labels, *weights = sources
        count, shape = self.yolo_loss_descriptor.anchor_box_count, prediction.shape
        if len(shape) != 4 or shape[1] % count or shape[1] < BOX * count:
            raise ShapeError(
                self.where,
                f"the prediction {list(shape)} does not have {count} anchors of {BOX} channels plus classes",
                fix=f"use [batch, {count} * ({BOX} + classes), height, width]",
            )
        if not label_shape(shape, labels.shape, None):
            raise ShapeError(
                self.where,
                f"labels {list(labels.shape)} do not match the prediction {list(shape)}",
                fix="pass labels of the prediction's shape",
            )
        if weights and (weight_shape(shape, weights[0].shape, 1) or shape)[1] != 1:
            raise ShapeError(
                self.where,
                f"label weights {list(weights[0].shape)} do not match the prediction {list(shape)}",
                fix="pass one weight, one per sample, or one per sample and cell",
            )

    def forward(
        self, prediction: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None, *, scope: Scope
    ) -> torch.Tensor:
        """The loss of each sample, computed in float32 or wider."""
        shape, settings = tuple(prediction.shape), self.yolo_loss_descriptor
        wide = torch.promote_types(prediction.dtype, torch.float32)
        anchors = scope.array(self.anchor_boxes, settings.anchor_box_count, 2, 1, 1).to(wide)
        labels = labels.detach().to(wide).reshape(shape)
        losses = yolo_loss(prediction.to(wide), labels, anchors, settings=settings)
        if weights is not None:
            losses = losses * weights.detach().to(wide).reshape(weight_shape(shape, tuple(weights.shape), 1) or shape)
        return losses.sum((1, 2, 3)).to(prediction.dtype)


def yolo_loss(p: torch.Tensor, q: torch.Tensor, anchors: torch.Tensor, *, settings: YOLOLossDescriptor) -> torch.Tensor:
    """The loss of each anchor in each cell, `[batch, anchors, height, width]`; `anchors` is `[anchors, 2, 1, 1]`."""
    p_xy, p_wh, p_confidence, p_class = _parts(p, len(anchors))
    q_xy, q_wh, q_confidence, q_class = _parts(q, len(anchors))
    xy = torch.sigmoid(p_xy)
    present, absent = responsible(q_wh, q_confidence, anchors, settings=settings)
    target = present.to(p.dtype)
    if settings.should_rescore:
        target = target * overlap(xy.detach(), p_wh.detach().exp() * anchors, q_xy, q_wh)

    position = F.mse_loss(xy, q_xy, reduction="none").sum(2)
    size = F.huber_loss(p_wh, torch.log(q_wh / anchors + 1e-5), reduction="none").sum(2)
    confidence = F.binary_cross_entropy_with_logits(p_confidence, target, reduction="none")
    category = -(q_class * torch.log_softmax(p_class, 2)).sum(2)
    here = (
        settings.scale_spatial_position_loss * position
        + settings.scale_spatial_size_loss * size
        + settings.scale_object_confidence_loss * confidence
        + settings.scale_class_loss * category
    )
    return torch.where(present, here, settings.scale_no_object_confidence_loss * confidence * absent)


def responsible(
    q_wh: torch.Tensor, q_confidence: torch.Tensor, anchors: torch.Tensor, *, settings: YOLOLossDescriptor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which anchors must detect the object of their cell, and which must detect nothing; the others are ignored."""
    fit = _iou(torch.minimum(anchors, q_wh).prod(2), anchors.prod(1), q_wh.prod(2))
    # A fused kernel may compute `fit` twice with different rounding: the best one equals the largest up to that.
    best = fit >= fit.amax(1, keepdim=True) * (1 - 8 * torch.finfo(fit.dtype).eps)
    present = (q_confidence == 1) & (best | (fit > settings.minimum_iou_for_object_presence))
    return present, (fit < settings.maximum_iou_for_object_absence) & ~present


def overlap(xy: torch.Tensor, wh: torch.Tensor, q_xy: torch.Tensor, q_wh: torch.Tensor) -> torch.Tensor:
    """Intersection over union of boxes with these centers and sizes, along dimension 2."""
    low = torch.maximum(xy - wh / 2, q_xy - q_wh / 2)
    high = torch.minimum(xy + wh / 2, q_xy + q_wh / 2)
    return _iou((high - low).clamp_min(0).prod(2), wh.prod(2), q_wh.prod(2))


def _iou(common: torch.Tensor, area: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Boxes without a common area need no quotient, which would be 0 / 0 for empty boxes.
    return torch.where(common > 0, common / (area + other - common), 0.0)


def _parts(x: torch.Tensor, anchors: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Center, size, confidence and classes of each anchor: `[batch, anchors, …, height, width]`."""
    classes = x.shape[1] // anchors - BOX
    xy, wh, confidence, category = x.unflatten(1, (anchors, -1)).split([2, 2, 1, classes], 2)
    return xy, wh, confidence.squeeze(2), category


def _pairs(boxes: Any, count: int) -> tuple[tuple[float, float], ...]:
    raw = isinstance(boxes, TensorData | bytes | bytearray | memoryview)
    if raw:
        memory = memoryview(boxes.bytes if isinstance(boxes, TensorData) else boxes).cast("B")
        usable = count or memory.nbytes // 8
        if memory.nbytes < 8 * usable or (not count and memory.nbytes % 8):
            raise DataError(
                _WHERE,
                f"anchor_boxes has {memory.nbytes} bytes, but {usable or 1} boxes need {8 * (usable or 1)}",
                fix="pass width and height of each box as float32",
            )
        boxes = np.frombuffer(memory[: 8 * usable], np.float32).reshape(-1, 2)
    try:
        values = np.asarray(boxes, np.float64)
    except (TypeError, ValueError):
        values = np.empty(0)
    if values.ndim != 2 or values.shape[1] != 2 or not len(values):
        raise ShapeError(_WHERE, f"anchor_boxes is {boxes!r}", fix="pass pairs (width, height)")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ArgumentError(_WHERE, f"anchor_boxes has non-positive sizes: {values.tolist()}", fix="pass cells")
    if count not in (0, len(values)):
        raise ArgumentError(
            _WHERE, f"anchor_box_count is {count}, but there are {len(values)} boxes", fix="leave out the count"
        )
    return tuple((float(width), float(height)) for width, height in values)
