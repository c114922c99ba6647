"""Rows of the losses: `weight · reduction(w · loss(y, t))`, and the YOLO loss."""

from __future__ import annotations

from collections.abc import Callable

import torch

import stepgraph as sg
from tests.fuzz.draw import Draw
from tests.fuzz.recipe import Settings
from tests.fuzz.row import Array, Arrays, Context, Drawn, Row, Tensors

# Kinds with one loss per element: what the prediction must be, what labels hold, the formula of y, t and settings.
ELEMENTS: dict[str, tuple[str, str, Callable[[Array, Array, Settings], Array]]] = {
    "MEAN_ABSOLUTE_ERROR": ("any", "float32", lambda y, t, s: (y - t).abs()),
    "MEAN_SQUARED_ERROR": ("any", "float32", lambda y, t, s: (y - t) ** 2),
    "SIGMOID_CROSS_ENTROPY": ("any", "binary", lambda y, t, s: _sigmoid_cross_entropy(y, _smooth(t, s, 2))),
    "HINGE": ("any", "binary", lambda y, t, s: torch.relu(1 - (2 * t - 1) * y)),
    "HUBER": ("any", "float32", lambda y, t, s: _huber(y - t, s.get("delta", 1.0))),
    "LOG": (
        "probability",
        "binary",
        lambda y, t, s: -t * (y + s["epsilon"]).log() - (1 - t) * (1 - y + s["epsilon"]).log(),
    ),
}
CLASSES = {"SOFTMAX_CROSS_ENTROPY": "any", "CATEGORICAL_CROSS_ENTROPY": "classes"}
SAMPLES = {"COSINE_DISTANCE": "any"}
LOSSES = (*ELEMENTS, *CLASSES, *SAMPLES)
REDUCTIONS = ("NONE", "SUM", "MEAN")


def _smooth(t: Array, settings: Settings, count: int) -> Array:
    s = settings.get("label_smoothing", 0.0)
    return t * (1 - s) + s / count


def _sigmoid_cross_entropy(y: Array, t: Array) -> Array:
    return y.clamp(min=0) - y * t + torch.log(1 + torch.exp(-y.abs()))


def _huber(d: Array, delta: float) -> Array:
    return torch.where(d.abs() <= delta, d * d / 2, delta * (d.abs() - delta / 2))


def _draw_loss(draw: Draw) -> Drawn | None:
    kind = draw.choose(LOSSES)
    y = draw.floating(least=2 if kind in CLASSES else 1)
    if y is None:
        return None
    axis = draw.whole(1, draw.values[y].ndim - 1) if kind in CLASSES and draw.chance(0.5) else 1
    wanted = ELEMENTS[kind][0] if kind in ELEMENTS else (CLASSES | SAMPLES)[kind]
    if wanted == "probability":
        y = draw.activated(draw.activated(y, "SIGMOID"), "LINEAR", 0.9, 0.05)
    elif wanted == "classes":
        shares = draw.needed("softmax", Drawn((y,), {"operation": "SOFTMAX", "dimension": axis}))
        y = draw.activated(shares, "LINEAR", 0.9, 0.02)
    shape = draw.symbolic(draw.values[y].shape)
    settings: Settings = {"type": kind, "reduction": draw.choose(REDUCTIONS)}
    settings |= {"weight": draw.choose([0.5, 2.0])} if draw.chance(0.3) else {}
    settings |= {"delta": draw.choose([0.3, 1.5])} if kind == "HUBER" and draw.chance(0.6) else {}
    settings |= {"epsilon": 1e-3} if kind == "LOG" else {}
    if kind.endswith(("SOFTMAX_CROSS_ENTROPY", "SIGMOID_CROSS_ENTROPY")) and draw.chance(0.4):
        settings["label_smoothing"] = 0.1
    settings |= {"axis": draw.choose([axis, axis - len(shape)])} if axis > 1 else {}
    if kind in CLASSES and shape[axis] > 1 and draw.chance(0.5):  # indices of one class would be one-hot labels
        settings |= {"ignored_label": draw.whole(0, shape[axis] - 1)} if draw.chance(0.4) else {}
        whole = draw.choose(["int64", "int32"])
        labels = draw.input(shape[:axis] + shape[axis + 1 :], whole, high=shape[axis], role="label")
    else:
        labels = _labels(draw, kind, shape)
    sources = [y, labels]
    if draw.chance(0.35):
        sources.append(draw.input(_weights(draw, kind, shape, axis), "positive", role="weight"))
        # A mean of distances divides by the weights of samples only.
        by_weights = settings["reduction"] == "MEAN" and kind not in SAMPLES and draw.chance(0.5)
        settings |= {"divides_by_weights": True} if by_weights else {}
    return Drawn(tuple(sources), settings)


def _labels(draw: Draw, kind: str, shape: tuple[int, ...]) -> int:
    what = ELEMENTS[kind][1] if kind in ELEMENTS else "one_hot" if kind in CLASSES else "unit"
    return draw.input(shape, what, role="label")


def _weights(draw: Draw, kind: str, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """One number, one per sample, one per element, or for classes one per label."""
    choices = [(1,), shape[:1], shape]
    return draw.choose([*choices, (*shape[:axis], 1, *shape[axis + 1 :])] if kind in CLASSES else choices)


def _build_loss(settings: Settings, _: Tensors) -> sg.Layer:
    rest = {k: v for k, v in settings.items() if k not in ("type", "reduction")}
    kind, reduction = sg.LossType[settings["type"]], sg.ReductionType[settings["reduction"]]
    return sg.LossLayer(sg.LossDescriptor(kind, reduction, **rest))


def _fit(w: Array, y: Array, axis: int | None) -> Array:
    """Weights in a shape that broadcasts: one, per element, per sample, or per label."""
    long = [n for n in w.shape if n != 1]
    ones = (1,) * (y.ndim - 1)
    shapes = [(1, *ones), tuple(y.shape), (y.shape[0], *ones)]
    shapes += [] if axis is None else [(*y.shape[:axis], 1, *y.shape[axis + 1 :])]
    return w.reshape(next(s for s in shapes if [n for n in s if n != 1] == long))


def _lose(_: Context, settings: Settings, __: Arrays, y: Array, t: Array, w: Array | None = None) -> Array:
    kind = settings["type"]
    axis = settings.get("axis", 1) % y.ndim if kind in CLASSES else None
    w = None if w is None else _fit(w, y, axis)
    counted = None  # what a mean divides by, if not the number of losses
    if kind in ELEMENTS:
        losses = ELEMENTS[kind][2](y, t.reshape(y.shape).to(y.dtype), settings)
        losses = losses if w is None else losses * w
        counted = w.expand_as(losses).sum() if w is not None and settings.get("divides_by_weights") else None
    elif kind in SAMPLES:
        products = t.reshape(y.shape) * y
        by_element = w is not None and w.numel() == y.numel() and y.numel() > y.shape[0]
        losses = 1 - (products * w if by_element else products).flatten(1).sum(1) if y.ndim > 1 else 1 - products
        losses = losses * w.reshape(-1) if w is not None and not by_element else losses
    else:
        last = [one if one is None or one.ndim < y.ndim else one.movedim(axis or 0, -1) for one in (t, w)]
        shape = y.shape[:axis] + y.shape[(axis or 0) + 1 :]
        losses, counted = _class_losses(kind, settings, y.movedim(axis or 0, -1), last[0], last[1], shape)
    match settings["reduction"]:
        case "SUM":
            losses = losses.sum().reshape(1)
        case "MEAN":
            total = losses.numel() if counted is None else counted
            losses = (losses.sum() / total).reshape(1) if counted is None or counted != 0 else losses.sum().reshape(1)
    return losses * settings.get("weight", 1.0)


def _class_losses(
    kind: str, settings: Settings, y: Array, t: Array, w: Array | None, shape: torch.Size
) -> tuple[Array, Array | None]:
    """The losses of labels with their classes last, and what their mean divides by."""
    ignored, counts = settings.get("ignored_label"), torch.ones(shape, dtype=torch.bool, device=y.device)
    if not t.is_floating_point():
        places = t.long().reshape(shape)
        counts = counts if ignored is None else places != ignored
        known = places.where(counts, 0)  # the ignored label need not be a class
        t = torch.nn.functional.one_hot(known, y.shape[-1]).to(y.dtype)
    hot = t = t.reshape(y.shape)
    if kind == "SOFTMAX_CROSS_ENTROPY":
        t = _smooth(t, settings, y.shape[-1])
        logarithms = y - torch.logsumexp(y, -1, keepdim=True)
    else:
        logarithms = torch.where(t == 0, 1.0, y).log()
    losses = torch.where(counts, -(t * logarithms * (1.0 if w is None else w)).sum(-1), 0.0)
    if w is not None and settings.get("divides_by_weights"):
        each = w.squeeze(-1).expand(shape) if w.shape[-1] == 1 else (hot * w).sum(-1)
        return losses, each[counts].sum()
    return losses, None if ignored is None else counts.sum()


# YOLO

ANCHORS = ((1.0, 1.5), (2.2, 1.2))


def _draw_yolo(draw: Draw) -> Drawn | None:
    y = draw.pick(
        lambda x: x.is_floating_point() and x.ndim == 4 and x.shape[0] == draw.batch and x.shape[2:].numel() <= 30
    )
    if y is None:
        return None
    inputs, classes = draw.values[y].shape[1], draw.whole(1, 3)
    channels = len(ANCHORS) * (5 + classes)
    window = {"kernel_sizes": (1, 1), "strides": (1, 1), "dilation_rates": (1, 1), "padding_policy": "VALID"}
    head = {"type": "STANDARD", "inputs": inputs, "outputs": channels, "groups": 1, **window}
    boxes = draw.needed("convolution", Drawn((y,), head, {"weights": ((channels, inputs, 1, 1), "weight")}))
    shape = (0, *draw.values[boxes].shape[1:])
    labels = draw.input(shape, "yolo", high=len(ANCHORS), role="label")
    sources = [boxes, labels]
    if draw.chance(0.3):
        sources.append(draw.input((0,), "positive", role="weight"))
    return Drawn(tuple(sources), {"should_rescore": draw.chance(0.5), "scale_object_confidence_loss": 3.0})


def _yolo(_: Context, settings: Settings, __: Arrays, y: Array, t: Array, w: Array | None = None) -> Array:
    count = len(ANCHORS)
    p, q = (x.reshape(len(x), count, -1, *x.shape[2:]).unbind(2) for x in (y, t.to(y.dtype)))
    aw, ah = (torch.tensor([a[i] for a in ANCHORS], dtype=y.dtype, device=y.device)[:, None, None] for i in (0, 1))
    x, z = torch.sigmoid(p[0]), torch.sigmoid(p[1])
    common = torch.minimum(aw, q[2]) * torch.minimum(ah, q[3])
    fit = common / (aw * ah + q[2] * q[3] - common)
    best = fit >= fit.amax(1, keepdim=True) * (1 - 1e-6)
    present = (q[4] == 1) & (best | (fit > 0.7))
    absent = ~present & (fit < 0.3)
    target = torch.ones_like(fit)
    if settings["should_rescore"]:
        target = _overlap(x, z, p[2].exp() * aw, p[3].exp() * ah, q).detach()
    position = (x - q[0]) ** 2 + (z - q[1]) ** 2
    size = _huber(p[2] - (q[2] / aw + 1e-5).log(), 1.0) + _huber(p[3] - (q[3] / ah + 1e-5).log(), 1.0)
    logits = torch.stack(p[5:])
    category = -(torch.stack(q[5:]) * (logits - torch.logsumexp(logits, 0))).sum(0)
    sure = 3.0 * _sigmoid_cross_entropy(p[4], target)
    losses = torch.where(present, 10 * position + 10 * size + sure + 2 * category, 0.0)
    losses = losses + torch.where(absent, 5 * _sigmoid_cross_entropy(p[4], torch.zeros_like(target)), 0.0)
    losses = losses.flatten(1).sum(1)
    return losses if w is None else losses * w.reshape(-1)


def _overlap(x: Array, y: Array, w: Array, h: Array, q: tuple[Array, ...]) -> Array:
    def common(a: Array, m: Array, b: Array, n: Array) -> Array:
        return (torch.minimum(a + m / 2, b + n / 2) - torch.maximum(a - m / 2, b - n / 2)).clamp(min=0)

    both = common(x, w, q[0], q[2]) * common(y, h, q[1], q[3])
    return both / (w * h + q[2] * q[3] - both)


ROWS = {
    "loss": Row(sg.LossLayer, _draw_loss, _build_loss, _lose),
    "yolo": Row(
        sg.YOLOLossLayer,
        _draw_yolo,
        lambda settings, _: sg.YOLOLossLayer.create(ANCHORS, **settings),
        _yolo,
    ),
}
