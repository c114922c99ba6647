"""The gradient of a softmax cross entropy in one pass.

PyTorch fills an array of zeros with one number per row, and another operator exponentiates the log softmax. The
gradient is `(softmax(x) - onehot(t)) s`, with `s` the weight of the row's loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.kernels import short_rows
from stepgraph.compiler.kernels.measure import Pick, fastest
from stepgraph.compiler.program import fake, note
from stepgraph.system import torch_private

aten = torch.ops.aten
Array = torch.Tensor
OPERATOR = "cross entropy"  # as the file of choices calls it
LARGE = 1 << 14  # elements from which an alternative can matter
MEAN = 1  # how PyTorch numbers reductions; 0 is none, 2 the sum
NO_LABEL = torch.iinfo(torch.int64).min  # the ignored label: no label has this value
LOGARITHMS = (torch_private.log_softmax.default, short_rows.log_softmax)  # whichever was chosen
FORWARD = {
    aten.nll_loss_backward.default: aten.nll_loss_forward.default,
    aten.nll_loss2d_backward.default: aten.nll_loss2d_forward.default,
}


@dataclass(frozen=True)
class _Loss:
    """The logarithms of one cross entropy, and the two operators of its gradient, `inner → outer`."""

    logarithms: fx.Node
    inner: fx.Node
    outer: fx.Node

    @property
    def x(self) -> fx.Node:
        return cast(fx.Node, self.logarithms.args[0])

    @property
    def settings(self) -> tuple[Any, ...]:
        """Labels, class weights, reduction, and the ignored label."""
        return self.inner.args[2:6]


def choose(node: fx.Node, pick: Pick | None = None) -> None:
    """Replaces a cross entropy whose gradient ends at this operator with its fastest implementation."""
    found = _match(node)
    if found is None or fake(node).numel() < LARGE:
        return
    x, labels = fake(found.x), fake(found.settings[0])
    seed = fake(cast(fx.Node, found.inner.args[0]))
    seed = torch.empty(seed.shape, dtype=seed.dtype, device="meta")  # it may be a single expanded number
    arguments = (x, seed, labels, None, *found.settings[2:])
    name = (pick or fastest)(OPERATOR, IMPLEMENTATIONS, arguments, below=x.shape[1])
    note(node, implementation=(OPERATOR, name))
    if name != "pytorch":
        _replace_gradient(found)


def _match(outer: fx.Node) -> _Loss | None:
    """The cross entropy that this operator belongs to, if nothing else reads the gradient in between."""
    inner, logarithms, axis, kind = cast(Any, outer.args)
    if not isinstance(inner, fx.Node) or inner.target not in FORWARD or set(inner.users) != {outer}:
        return None
    same = logarithms.target in LOGARITHMS and inner.args[1] is logarithms
    total: Any = inner.args[6]
    if not same or total.target is not getitem:
        return None
    x, *how = logarithms.args
    loss = total.args[0]
    pair = loss.target is FORWARD[inner.target] and loss.args == (logarithms, *inner.args[2:6])
    plain = axis == 1 and how == [1, False] and fake(x).dtype is kind and kind in (torch.float32, torch.float64)
    return _Loss(logarithms, inner, outer) if pair and plain else None


def _replace_gradient(found: _Loss) -> None:
    outer = found.outer
    outer.target, outer.args = gradient_of_logarithms, (found.inner.args[0], found.logarithms, *found.settings)
    note(outer, workspace=_scratch(found))
    outer.graph.erase_node(found.inner)


def _scratch(found: _Loss) -> int:
    """Workspace in bytes besides arguments and results: a few numbers per label."""
    labels = fake(found.settings[0])
    return labels.numel() * (4 * fake(found.x).element_size() + 2 * labels.element_size())


# Building blocks, with x [n, classes, …] and labels t [n, …]


def gradient_of_logarithms(
    g: Array, logarithms: Array, t: Array, weights: Array | None, reduction: int, left_out: int
) -> Array:
    """`(p - onehot(t)) s`, from `log p`."""
    classes, scale = _scale(g, logarithms, t, weights, reduction, left_out)
    return torch.exp(logarithms).mul_(scale).scatter_add_(1, classes, (-scale).expand_as(classes))


def _scale(g: Array, x: Array, t: Array, weights: Array | None, reduction: int, left_out: int) -> tuple[Array, Array]:
    """The labels along the class axis, and the weight of each row's loss: one number if all are equal."""
    classes, counts = _classes(t, left_out)
    factors = _factors(x, classes, counts, weights)
    g = g / _total(t, factors) if reduction == MEAN else g
    g = g if factors is None else g * factors
    return classes, g.unsqueeze(1) if g.ndim else g


def _classes(t: Array, left_out: int) -> tuple[Array, Array | None]:
    """The labels along the class axis, and which of them count, unless all do."""
    if left_out == NO_LABEL:
        return t.unsqueeze(1), None
    counts = t != left_out
    return torch.where(counts, t, 0).unsqueeze(1), counts


def _factors(x: Array, classes: Array, counts: Array | None, weights: Array | None) -> Array | None:
    """The weight of each label; None if all are 1."""
    if weights is None:
        return None if counts is None else counts.to(x.dtype)
    factors = weights[classes.squeeze(1)]
    return factors if counts is None else factors * counts


def _total(t: Array, factors: Array | None) -> Array | int:
    return t.numel() if factors is None else factors.sum()


# Implementations: functions of (x, gradient of the loss, labels, class weights, reduction, ignored label)


def _pytorch(x: Array, g: Array, t: Array, *settings: Any) -> tuple[Array, Array]:
    logarithms = torch_private.log_softmax.default(x, 1, False)
    back = aten.nll_loss_backward.default if x.ndim == 2 else aten.nll_loss2d_backward.default
    loss, total = FORWARD[back](logarithms, t, *settings)
    inner = back(g, logarithms, t, *settings, total)
    return loss, torch_private.log_softmax_gradient.default(inner, logarithms, 1, x.dtype)


def _by_gradient(x: Array, g: Array, t: Array, *settings: Any) -> tuple[Array, Array]:
    logarithms = torch_private.log_softmax.default(x, 1, False)
    forward = aten.nll_loss_forward.default if x.ndim == 2 else aten.nll_loss2d_forward.default
    return forward(logarithms, t, *settings)[0], gradient_of_logarithms(g, logarithms, t, *settings)


IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array]]] = {"pytorch": _pytorch, "gradient": _by_gradient}
