"""Pads the classes of a classifier, so that each row of its predictions begins at a cache line.

A GPU's matrix units read 16 bytes at a time. If rows are not aligned to that, as those of 30,522 classes, PyTorch's
compiler copies the predictions into a padded array and back, for each of the products around a cross entropy. Here the
weights are padded with zeros instead, and the product, the cross entropy behind it and the products of its gradient all
use one padded array of predictions. Zeros add nothing, so the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels import label_losses
from stepgraph.compiler.program import call, fake, inherit, remove_dead, update_views
from stepgraph.system import torch_private

aten, ours = torch.ops.aten, torch.ops.stepgraph
VIEWS = (aten.view.default, torch_private.unsafe_view.default, aten.reshape.default)
ALIGNED = 16  # numbers; the kernels of the cross entropy load vectors from rows whose length is a multiple of this
LINE = 128  # bytes that a GPU's caches load at a time; rows are padded to a multiple


def pad_classes(graph: fx.Graph) -> None:
    """Pads products whose results are the predictions of a cross entropy, in place."""
    for node in graph.find_nodes(op="call_function", target=ours.label_losses_with_gradient.default):
        product = _product(node.args[0])
        if product is not None:
            _pad(product, node)
    remove_dead(graph)
    graph.lint()


def _product(y: Any) -> fx.Node | None:
    """The product that these predictions are, if it has to be padded: `x Wᵀ` or `x Wᵀ + b`."""
    found = y
    while found.target in VIEWS:
        found = found.args[0]
    if found.target not in (aten.mm.default, aten.addmm.default) or found.kwargs:
        return None
    *biases, _, right = found.args
    known = right.target is aten.t.default and all(fake(one).ndim == 1 for one in biases)
    rows, classes = fake(found).shape
    fits = fake(y).shape == (rows, classes, 1) and label_losses.stays_one(fake(y))
    return found if known and fits and classes % ALIGNED else None


def _pad(product: fx.Node, both: fx.Node) -> None:
    """Pads a product, the cross entropy that reads it, and what reads the gradient."""
    rows, classes = fake(product).shape
    unit = LINE // fake(product).element_size()
    width = -(-classes // unit) * unit
    known = _padded_weights(product, width)
    *_, x, right = product.args
    with product.graph.inserting_before(product):
        whole = call(product, product.target, (*(known[one] for one in product.args[:-2]), x, known[right]))
        inherit(whole, product, fake(whole))
        real = call(product, aten.slice.Tensor, (whole, 1, 0, classes))
    _replace(product, real)
    with both.graph.inserting_before(both):
        y = call(both, aten.view.default, (whole, [rows, width, 1]))
        padded = call(both, both.target, (y, *both.args[1:], classes))
        inherit(padded, both, fake(padded))
        gradient, losses = (call(both, getitem, (padded, index)) for index in range(2))
        flat = call(both, aten.view.default, (gradient, [rows, width]))
        part = call(both, aten.slice.Tensor, (flat, 1, 0, classes))
        shaped = call(both, aten.reshape.default, (part, [rows, classes, 1]))
    for one in list(both.users):
        _replace(one, (shaped, losses)[one.args[1]])  # type: ignore[index]
    for one in list(_views(shaped, fake(part).shape)):
        _use_padding(one, flat, known)


def _padded_weights(product: fx.Node, width: int) -> dict[Any, fx.Node]:
    """Weights and biases with zeros for more classes, by those without; the weights also as the product reads them."""
    *biases, _, right = product.args
    weights: Any = right.args[0]  # type: ignore[union-attr]
    more = width - len(fake(weights))
    with product.graph.inserting_before(product):
        found: dict[Any, fx.Node] = {
            one: call(product, aten.constant_pad_nd.default, (one, [0, 0] * (one is weights) + [0, more]))
            for one in (weights, *biases)
        }
        found[right] = call(product, aten.t.default, (found[weights],))
    return found


def _replace(old: fx.Node, new: fx.Node) -> None:
    """Lets readers of a dense array read part of another: what was a view of it may need a copy."""
    old.replace_all_uses_with(new)
    update_views(new)


def _views(node: fx.Node, shape: Sequence[int]) -> Iterator[fx.Node]:
    """The views of an array that have this shape."""
    for user in node.users:
        if user.target in VIEWS:
            if fake(user).shape == shape:
                yield user
            yield from _views(user, shape)


def _use_padding(gradient: fx.Node, padded: fx.Node, known: Mapping[Any, fx.Node]) -> None:
    """Lets products and the sum over rows read a padded gradient.

    Args:
        gradient: the gradient of the predictions, `[rows, classes]`.
        padded: the same with columns of zeros.
        known: padded weights, by those without.
    """
    classes = fake(gradient).shape[1]
    for user in list(gradient.users):
        with user.graph.inserting_before(user):
            if user.target is aten.mm.default and user.args[1] in known:
                user.replace_all_uses_with(call(user, user.target, (padded, known[user.args[1]])))
            elif user.target is aten.sum.dim_IntList and user.args[1] == [0] and not user.kwargs:
                total = call(user, user.target, (padded, *user.args[1:]))
                _replace(user, call(user, aten.slice.Tensor, (total, -1, 0, classes)))
            elif user.target is aten.t.default:
                turned = call(user, aten.t.default, (padded,))
                _multiply(user, turned)


def _multiply(gradient: fx.Node, padded: fx.Node) -> None:
    """The same for products with the turned gradient, `[classes, rows]`."""
    for user in list(gradient.users):
        if user.target is aten.mm.default and user.args[0] is gradient:
            with user.graph.inserting_before(user):
                whole = call(user, user.target, (padded, user.args[1]))
                user.replace_all_uses_with(call(user, aten.slice.Tensor, (whole, 0, 0, len(fake(gradient)))))
