"""Softmax cross entropy of half-precision predictions with class indices: an operator, and one for its gradient.

PyTorch's would first copy all predictions to float32, keep their logarithms in float32 for the gradient, and compute
that in two more such arrays. With a large vocabulary these need more memory than the rest of the network. These
operators read the predictions in their own type, compute in float32, and keep two numbers per row: the greatest
prediction, and the logarithm of the sum of `exp(y - greatest)`. The gradient may overwrite the predictions.

Predictions `y` are `[n, classes, inner]` in any layout, labels `t` are `[n, inner]`; a row is the classes of one label.
With a smoothing of `s`, the loss of a row is `-(1 - s) log p[t] - s mean(log p)`, with `p = softmax(y)`.

A whole step needs both, so one operator computes a row's loss and then its gradient while the row is still in a cache
(`loss_with_gradient.py` puts it there). Behind the classes of a row there may be padding (`pad_classes.py`): it has no
part in the loss, and its gradient is 0.

On NVIDIA's GPUs each operator is one kernel (`label_loss_kernels.py`). Elsewhere, PyTorch's operators compute some rows
at a time. A compiler that fuses gets the formula for all rows, unless rows are long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.program import call, fake, storage, storages
from stepgraph.compiler.triton_launch import run_on

Array = torch.Tensor
LARGE = 1 << 20  # numbers from which these operators are worthwhile: copies of fewer cost nothing
BLOCK, SHARE = 1 << 20, 32  # without kernels, so many numbers are in float32 at a time, or this part of all
WIDE = 1024  # classes up to which a compiler that fuses reads a row at once, and needs no kernels of ours
LOG2E = 1 / math.log(2)


# Operators


@torch.library.custom_op("stepgraph::label_losses", mutates_args=())
def label_losses(y: Array, t: Array, left_out: int, smoothing: float) -> tuple[Array, Array]:
    """The loss of each row in float32, and what the gradient needs.

    Args:
        y: predictions, `[n, classes, inner]`.
        t: class indices, `[n, inner]`.
        left_out: the label whose rows have a loss of 0.
        smoothing: the share of each label that is distributed over all classes.
    """
    return run(y, t, left_out, smoothing)


@label_losses.register_fake
def _(y: Array, t: Array, left_out: int, smoothing: float) -> tuple[Array, Array]:
    return _new(y), _new(y, 2)


@torch.library.custom_op("stepgraph::label_losses_gradient", mutates_args=())
def label_losses_gradient(y: Array, t: Array, g: Array, kept: Array, left_out: int, smoothing: float) -> Array:
    """`(p - (1 - s) onehot(t) - s / classes) g`, in the type and layout of `y`.

    Args:
        y: predictions, `[n, classes, inner]`.
        t: class indices, `[n, inner]`.
        g: the gradients of the losses, `[n, inner]`.
        kept: the second result of `label_losses`.
        left_out: the label whose rows have a gradient of 0.
        smoothing: as in `label_losses`.
    """
    return run_gradient(y, t, g, kept, left_out, smoothing)


@label_losses_gradient.register_fake
def _(y: Array, t: Array, g: Array, kept: Array, left_out: int, smoothing: float) -> Array:
    return torch.empty_like(y)


@torch.library.custom_op("stepgraph::label_losses_gradient_", mutates_args=("y",))
def label_losses_gradient_(y: Array, t: Array, g: Array, kept: Array, left_out: int, smoothing: float) -> None:
    """`label_losses_gradient` in the memory of the predictions."""
    run_gradient_in_place(y, t, g, kept, left_out, smoothing)


@label_losses_gradient_.register_fake
def _(y: Array, t: Array, g: Array, kept: Array, left_out: int, smoothing: float) -> None:
    return None


@torch.library.custom_op("stepgraph::label_losses_with_gradient", mutates_args=())
def label_losses_with_gradient(
    y: Array, t: Array, g: Array, left_out: int, smoothing: float, classes: int | None = None
) -> tuple[Array, Array]:
    """The gradient of the predictions, as `label_losses_gradient`, and the losses.

    Args:
        y: predictions, `[n, classes and padding, inner]`.
        t: class indices, `[n, inner]`.
        g: the gradients of the losses, `[n, inner]`.
        left_out: the label whose rows have a loss and a gradient of 0.
        smoothing: as in `label_losses`.
        classes: how many of the predictions of a row are not padding, by default all.
    """
    return run_with_gradient(y, t, g, left_out, smoothing, classes)


@label_losses_with_gradient.register_fake
def _(y: Array, t: Array, g: Array, left_out: int, smoothing: float, classes: int | None = None) -> tuple[Array, Array]:
    return torch.empty_like(y), _new(y)


@torch.library.custom_op("stepgraph::label_losses_with_gradient_", mutates_args=("y",))
def label_losses_with_gradient_(
    y: Array, t: Array, g: Array, left_out: int, smoothing: float, classes: int | None = None
) -> Array:
    """The losses of `label_losses_with_gradient`, with the gradient in the memory of the predictions."""
    _, losses = run_with_gradient_in_place(y, t, g, left_out, smoothing, classes)
    return losses


@label_losses_with_gradient_.register_fake
def _(y: Array, t: Array, g: Array, left_out: int, smoothing: float, classes: int | None = None) -> Array:
    return _new(y)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    y, t, ctx.left_out, ctx.smoothing = inputs
    _, kept = output
    ctx.mark_non_differentiable(kept)
    ctx.save_for_backward(y, t, kept)


def _differentiate(ctx: Any, g: Array, _: Array) -> tuple[Array | None, ...]:
    y, t, kept = ctx.saved_tensors
    gradient = torch.ops.stepgraph.label_losses_gradient(y, t, g, kept, ctx.left_out, ctx.smoothing)
    return gradient, None, None, None


label_losses.register_autograd(_differentiate, setup_context=_save)


# Without PyTorch's dispatcher


def run(y: Array, t: Array, left_out: int, smoothing: float) -> tuple[Array, Array]:
    """`label_losses`."""
    losses, kept = _new(y), _new(y, 2)
    if _has_kernels(y):
        from stepgraph.compiler.kernels import label_loss_kernels

        label_loss_kernels.write_losses(y, t, losses, kept, left_out, smoothing)
        return losses, kept
    for rows in _blocks(y):
        _write_block(losses[rows], kept[:, rows], y[rows].to(torch.float32, copy=True), t[rows], left_out, smoothing)
    return losses, kept


def run_gradient(y: Array, t: Array, g: Array, kept: Array, left_out: int, smoothing: float) -> Array:
    """`label_losses_gradient`."""
    found = torch.empty_like(y)
    _write_gradient(found, y, t, g, kept, left_out, smoothing)
    return found


def run_gradient_in_place(y: Array, t: Array, g: Array, kept: Array, left_out: int, smoothing: float) -> Array:
    """`label_losses_gradient_`; returns `y`."""
    _write_gradient(y, y, t, g, kept, left_out, smoothing)
    return y


def run_with_gradient(
    y: Array, t: Array, g: Array, left_out: int, smoothing: float, classes: int | None = None
) -> tuple[Array, Array]:
    """`label_losses_with_gradient`."""
    found = torch.empty_like(y)
    return found, _write_both(found, y, t, g, left_out, smoothing, classes)


def run_with_gradient_in_place(
    y: Array, t: Array, g: Array, left_out: int, smoothing: float, classes: int | None = None
) -> tuple[Array, Array]:
    """`label_losses_with_gradient_`; also returns `y`."""
    return y, _write_both(y, y, t, g, left_out, smoothing, classes)


def _write_both(
    found: Array, y: Array, t: Array, g: Array, left_out: int, smoothing: float, classes: int | None
) -> Array:
    """Writes the gradient and returns the losses; `found` may be `y`."""
    losses = _new(y)
    count = y.shape[1] if classes is None else classes
    if _has_kernels(y):
        from stepgraph.compiler.kernels import label_loss_kernels

        label_loss_kernels.write_both(found, y, t, g, losses, left_out, smoothing, count)
        return losses
    found[:, count:] = 0
    found, y, kept = found[:, :count], y[:, :count], _new(y, 2)
    for rows in _blocks(y):
        block = y[rows].to(torch.float32, copy=True)
        _write_block(losses[rows], kept[:, rows], block, t[rows], left_out, smoothing)
        found[rows] = _block_of_gradient(block.copy_(y[rows]), t[rows], g[rows], kept[:, rows], left_out, smoothing)
    return losses


def _write_gradient(found: Array, y: Array, t: Array, g: Array, kept: Array, left_out: int, smoothing: float) -> None:
    if _has_kernels(y):
        from stepgraph.compiler.kernels import label_loss_kernels

        label_loss_kernels.write_gradient(found, y, t, g, kept, left_out, smoothing)
        return
    for rows in _blocks(y):
        found[rows] = _block_of_gradient(
            y[rows].to(torch.float32, copy=True), t[rows], g[rows], kept[:, rows], left_out, smoothing
        )


def _write_block(losses: Array, kept: Array, y: Array, t: Array, left_out: int, smoothing: float) -> None:
    """`formula` with few arrays; overwrites `y`, in float32."""
    classes, counts = _classes(t, left_out)
    base, logarithm = kept
    greatest = y.amax(1)
    base.copy_(greatest.masked_fill_(greatest == -torch.inf, 0.0))
    torch.sub(base, y.gather(1, classes).squeeze(1), out=losses)
    if smoothing:
        losses.mul_(1 - smoothing).add_(base - y.mean(1), alpha=smoothing)
    torch.sum(y.sub_(base.unsqueeze(1)).exp_(), 1, out=logarithm).log_()
    losses.add_(logarithm).masked_fill_(~counts, 0.0)


def _block_of_gradient(y: Array, t: Array, g: Array, kept: Array, left_out: int, smoothing: float) -> Array:
    """`formula_of_gradient` with few arrays; overwrites `y`, in float32."""
    classes, counts = _classes(t, left_out)
    base, logarithm = kept.unsqueeze(2)
    shares = y.sub_(base).sub_(logarithm).exp_()
    if smoothing:
        shares.sub_(smoothing / y.shape[1])
    shares.scatter_add_(1, classes, shares.new_full((), smoothing - 1).expand_as(classes))
    return shares.mul_(torch.where(counts, g, 0.0).unsqueeze(1))


def _has_kernels(y: Array) -> bool:
    return run_on(y.device)


def _new(y: Array, *numbers: int) -> Array:
    """Memory for one number per row, or so many."""
    n, _, inner = y.shape
    return y.new_empty(*numbers, n, inner, dtype=torch.float32)


# The formulas for all rows at once


def formula(y: Array, t: Array, left_out: int, smoothing: float) -> tuple[Array, Array]:
    """`label_losses`, as operators that a compiler fuses."""
    classes, counts = _classes(t, left_out)
    greatest = y.amax(1).float()
    base = torch.where(greatest == -torch.inf, 0.0, greatest)  # a row of nothing but -∞ gives NaN, as in PyTorch
    logarithm = (y.float() - base.unsqueeze(1)).exp().sum(1).log()
    # Small differences of large predictions are exact; the logarithm of a probability would not be.
    losses = base - y.gather(1, classes).squeeze(1).float()
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (base - y.mean(1, dtype=torch.float32))
    return torch.where(counts, losses + logarithm, 0.0), torch.stack([base, logarithm])


def formula_of_gradient(y: Array, t: Array, g: Array, kept: Iterable[Array], left_out: int, smoothing: float) -> Array:
    """`label_losses_gradient`, as operators that a compiler fuses; `kept` are two arrays."""
    classes, counts = _classes(t, left_out)
    base, logarithm = (one.unsqueeze(1) for one in kept)
    shares = (y.float() - base - logarithm).exp()
    is_label = torch.arange(y.shape[1], device=y.device)[:, None] == classes
    wanted = torch.where(is_label, 1 - smoothing, 0.0) + smoothing / y.shape[1]
    return ((shares - wanted) * torch.where(counts, g, 0.0).unsqueeze(1)).to(y.dtype)


def formula_with_gradient(
    y: Array, t: Array, g: Array, left_out: int, smoothing: float, classes: int | None = None
) -> tuple[Array, Array]:
    """`label_losses_with_gradient`, as operators that a compiler fuses into one kernel.

    It reads a row once: losses and gradient share the exponentials, and the label's prediction is a sum too.
    """
    count = y.shape[1] if classes is None else classes
    labels, counts = _classes(t, left_out)
    at = torch.arange(y.shape[1], dtype=torch.int32, device=y.device)[:, None]
    is_label, is_class = at == labels.to(torch.int32), at < count
    wide = y.float() if count == y.shape[1] else torch.where(is_class, y.float(), -torch.inf)
    greatest = wide.amax(1, keepdim=True)
    below = wide - torch.where(greatest == -torch.inf, 0.0, greatest)  # a row of -∞ gives NaN, as in PyTorch
    powers = torch.exp2(below * LOG2E)
    total, factors = powers.sum(1), torch.where(counts, g, 0.0)
    losses = -torch.where(is_label, below, 0.0).sum(1)
    gradient = powers * (factors / total).unsqueeze(1)
    gradient = gradient - torch.where(is_label, ((1 - smoothing) * factors).unsqueeze(1), 0.0)
    if smoothing:
        share = smoothing / count
        losses = (1 - smoothing) * losses - share * torch.where(is_class, below, 0.0).sum(1)
        gradient = gradient - torch.where(is_class, (share * factors).unsqueeze(1), 0.0)
    return gradient.to(y.dtype), torch.where(counts, losses + total.log(), 0.0)


def _classes(t: Array, left_out: int) -> tuple[Array, Array]:
    """Labels along the class axis, 0 for those left out, and which of them count."""
    counts = t != left_out
    return torch.where(counts, t, 0).unsqueeze(1), counts


# What passes need to know


def workspace(given: Any, _: int) -> int:
    """What an operator needs besides its results, in bytes: a block of rows in float32, and its labels."""
    y, t = given[0], given[1]
    return 0 if _has_kernels(y) else 4 * _samples(y) * y[0].numel() + 2 * t.nbytes


def expand(graph: fx.Graph) -> None:
    """Gives a compiler that fuses the formulas or, where a row is long, the kernels, with the gradient in place."""
    for node in list(graph.nodes):
        if node.target in _OVERWRITING and stays_one(fake(node.args[0])) and _is_needed_after(node):
            with graph.inserting_before(node):
                node.update_arg(0, call(node, torch.ops.aten.clone.default, (node.args[0],)))
        if node.target in _EXPANDED:
            node.target = _EXPANDED[node.target]


def _is_needed_after(node: fx.Node) -> bool:
    """Whether an operator must not overwrite its first argument: it was passed in, or something reads it later."""
    memory = storage(node.args[0])  # type: ignore[arg-type]
    others = (one for one in node.graph.nodes if memory in storages(one) and one is not node)
    return any(one.op == "placeholder" or any(node < user for user in one.users) for one in others)


def _expanded(y: Array, t: Array, left_out: int, smoothing: float) -> tuple[Array, Array]:
    losses = torch.ops.stepgraph.label_losses.default if stays_one(y) else formula
    return losses(y, t, left_out, smoothing)


def _expanded_gradient(y: Array, t: Array, g: Array, kept: Array, left_out: int, smoothing: float) -> Array:
    if not stays_one(y):
        return formula_of_gradient(y, t, g, kept.unbind(), left_out, smoothing)
    torch.ops.stepgraph.label_losses_gradient_.default(y, t, g, kept, left_out, smoothing)
    return y


def _expanded_both(
    y: Array, t: Array, g: Array, left_out: int, smoothing: float, classes: int | None = None
) -> tuple[Array, Array]:
    if not stays_one(y):
        return formula_with_gradient(y, t, g, left_out, smoothing, classes)
    return y, torch.ops.stepgraph.label_losses_with_gradient_.default(y, t, g, left_out, smoothing, classes)


_EXPANDED: dict[Any, Any] = {
    torch.ops.stepgraph.label_losses.default: _expanded,
    torch.ops.stepgraph.label_losses_gradient.default: _expanded_gradient,
    torch.ops.stepgraph.label_losses_with_gradient.default: _expanded_both,
}


_OVERWRITING = {
    torch.ops.stepgraph.label_losses_gradient.default,
    torch.ops.stepgraph.label_losses_with_gradient.default,
}


def stays_one(y: Array) -> bool:
    """Whether a compiler that fuses gets the operators themselves for such predictions."""
    return y.shape[1] > WIDE and _has_kernels(y)


def _samples(y: Array) -> int:
    """The samples of a block."""
    return max(1, min(len(y), max(BLOCK, y.numel() // SHARE) // max(1, y[0].numel())))


def _blocks(y: Array) -> Iterator[slice]:
    step = _samples(y) if len(y) else 1
    return (slice(first, min(first + step, len(y))) for first in range(0, len(y), step))
