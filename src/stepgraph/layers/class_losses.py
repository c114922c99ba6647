"""Cross entropies: losses over the classes of a prediction, which may be along any axis.

Inside, classes are dimension 1: `[batch, steps, classes]` becomes the rows `[batch · steps, classes]`, of the same
memory. Labels `t` are like the prediction `y`, or class indices without the classes; weights `w` broadcast against `y`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

Array = torch.Tensor
NO_CLASS = torch.iinfo(torch.int64).min  # PyTorch ignores labels of -100; here every label counts unless one is ignored


def softmax_cross_entropy(
    y: Array, t: Array, w: Array | None, *, ignored: int | None, smoothing: float, how: str, by_weights: bool
) -> Array:
    """`-Σ w t log softmax(y)` over dimension 1, with `t` smoothed."""
    if _has_label_weights(y, t, w):
        is_plain, left_out = w is None and ignored is None, NO_CLASS if ignored is None else ignored
        each = how if is_plain else "none"
        losses = F.cross_entropy(y, t, reduction=each, label_smoothing=smoothing, ignore_index=left_out)
        return losses if is_plain else _reduced_labels(losses, t, w, ignored, how, by_weights)
    target = smooth(_target(t, y, ignored), smoothing, y.shape[1])
    return _over_classes(target * torch.log_softmax(y, 1), t, w, ignored, how, by_weights)


def categorical_cross_entropy(
    y: Array, t: Array, w: Array | None, *, ignored: int | None, how: str, by_weights: bool
) -> Array:
    """`-Σ w t log y` over dimension 1. Classes with `t = 0` contribute nothing, even where `y` is 0."""
    if _has_label_weights(y, t, w):
        chosen = y.gather(1, _known(t, ignored).unsqueeze(1)).squeeze(1)
        # The logarithm of an ignored 0 would be infinite, and its gradient NaN.
        losses = -(chosen if ignored is None else torch.where(t != ignored, chosen, 1.0)).log()
        return _reduced_labels(losses, t, w, ignored, how, by_weights)
    target = _target(t, y, ignored)
    return _over_classes(target * torch.where(target == 0, 1.0, y).log(), t, w, ignored, how, by_weights)


def along(
    axis: int, losses: Callable[..., Array], y: Array, t: Array, w: Array | None, how: str, **how_else: object
) -> Array:
    """A loss whose classes are along another axis than 1."""
    rows, shape = _rows(y, axis, y.shape), y.shape[:axis] + y.shape[axis + 1 :]
    found = losses(rows, _rows(t, axis, y.shape), None if w is None else _rows(w, axis, y.shape), how=how, **how_else)
    return found.reshape(shape) if how == "none" else found


def _rows(array: Array, axis: int, shape: torch.Size) -> Array:
    """An array with the dimensions before the classes as one; weights first get one number for each of them."""
    if axis < 2:
        return array if axis else array.unsqueeze(0)
    return array.expand(*shape[:axis], *array.shape[axis:]).flatten(0, axis - 1)


def smooth(t: Array, smoothing: float, count: int) -> Array:
    """`t (1 - s) + s / count`."""
    return t * (1 - smoothing) + smoothing / count if smoothing else t


def reduce(losses: Array, how: str, counted: Array | None = None) -> Array:
    """All losses, their sum, or their mean: the sum divided by what `counted` adds up to, by default one per loss.

    If nothing counts, the losses are 0, and so is their mean.
    """
    if how == "none":
        return losses
    if how == "sum" or counted is None:
        return losses.sum() if how == "sum" else losses.mean()
    wide = torch.promote_types(losses.dtype, torch.float32)  # a sum of many losses exceeds the range of float16
    counted = counted.expand_as(losses)
    divisor = counted.sum(dtype=wide) + (counted == 0).all()
    return (losses.sum(dtype=wide) / divisor).to(losses.dtype)


def _has_label_weights(y: Array, t: Array, w: Array | None) -> bool:
    """Whether labels are class indices and weights, if any, are those of labels: the loss of a label is one number."""
    return t.ndim < y.ndim and (w is None or w.shape[1] == 1)


def _reduced_labels(losses: Array, t: Array, w: Array | None, ignored: int | None, how: str, by_weights: bool) -> Array:
    """Losses of class indices, weighted and reduced."""
    counted = None if ignored is None else t != ignored
    if w is None:
        return reduce(losses, how, counted)
    return reduce(losses * w.squeeze(1), how, label_weights(t, w, 1, ignored) if by_weights else counted)


def _over_classes(products: Array, t: Array, w: Array | None, ignored: int | None, how: str, by_weights: bool) -> Array:
    """`-Σ w · products` over the classes, reduced."""
    weighted = products if w is None else products * w
    if ignored is None and not (by_weights and w is not None):
        if how == "none":
            return -weighted.sum(1)
        return weighted.sum() / -(products.numel() // products.shape[1] if how == "mean" else 1)
    losses, counts = -weighted.sum(1), None if ignored is None else t != ignored
    if counts is not None:
        losses = torch.where(counts, losses, 0.0)
    return reduce(losses, how, label_weights(t, w, 1, ignored) if by_weights and w is not None else counts)


def label_weights(t: Array, w: Array, axis: int, ignored: int | None) -> Array:
    """The weight of each label, 0 for ignored ones: where weights belong to elements, that of its class, or `Σ t w`."""
    if w.shape[axis] == 1:
        each = w.squeeze(axis)
    elif t.ndim == w.ndim:
        each = (t * w).sum(axis)
    else:
        each = w.gather(axis, _known(t, ignored).unsqueeze(axis)).squeeze(axis)
    return each if ignored is None else each * (t != ignored)


def _known(t: Array, ignored: int | None) -> Array:
    """Class indices with class 0 in place of ignored ones."""
    return t if ignored is None else torch.where(t == ignored, 0, t)


def _target(t: Array, y: Array, ignored: int | None) -> Array:
    """Labels with one number per class; 0 for ignored ones."""
    if t.ndim == y.ndim:
        return t
    ones = 1.0 if ignored is None else (t != ignored).to(y.dtype).unsqueeze(1)
    return torch.zeros_like(y).scatter(1, _known(t, ignored).unsqueeze(1), ones)
