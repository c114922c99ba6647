"""Pads the classes of pixels where a cross entropy reads what a convolution predicts.

The kernel of a cross entropy adds up the classes of a pixel. With 21 of them it reads and writes number by number, and
another kernel copies the gradient into an array with the padding of `pad_channels.py`. Here the cross entropy knows of
the padding: one kernel reads and writes whole vectors, and what is not a class counts for nothing.
"""

from __future__ import annotations

from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph.compiler.passes.absorbed import users_of
from stepgraph.compiler.passes.pad_channels import (
    RESULTS,
    are_unaligned,
    bare_result,
    convolutions,
    is_unaligned,
    read_padded,
    sums,
)
from stepgraph.compiler.passes.stored import write
from stepgraph.compiler.program import call, fake, inherit, remove_dead

aten, ours = torch.ops.aten, torch.ops.stepgraph


class _Predictions(NamedTuple):
    """A convolution, biases `[1, classes, 1, 1]` that are added to its result, and the gradient of the sum."""

    convolution: fx.Node
    biases: fx.Node | None
    gradient: fx.Node


def pad_predictions(graph: fx.Graph) -> None:
    """Pads convolutions whose results only a cross entropy reads, and the gradients that it computes, in place."""
    padded: dict[fx.Node, fx.Node] = {}  # filters, by those without padding
    for both in graph.find_nodes(op="call_function", target=ours.label_losses_with_gradient.default):
        found = _predictions(both)
        if found is not None:
            _pad(both, found, padded)
    remove_dead(graph)
    graph.lint()


def _predictions(both: fx.Node) -> _Predictions | None:
    """What the cross entropy reads, if it is to be padded."""
    y: Any = both.args[0]
    if y.target is not aten.view.default:
        return None
    total = y.args[0]
    found, biases = total.args if total.target is aten.add.Tensor else (total, None)
    if not isinstance(found, fx.Node) or found.target not in RESULTS or total.kwargs:
        return None
    only = all(len(one.users) == 1 for one in (y, total, found))
    known = biases is None or (found.args[2] is None and _are_biases(biases, fake(found).shape[1]))
    gradient = _gradient(both, fake(found).shape)
    if not only or not known or gradient is None or not is_unaligned(found, *found.args[:2]):
        return None
    return _Predictions(found, biases, gradient)


def _are_biases(summand: Any, count: int) -> bool:
    return isinstance(summand, fx.Node) and fake(summand).shape == (1, count, 1, 1)


def _gradient(both: fx.Node, shape: torch.Size) -> fx.Node | None:
    """The gradient as convolutions read it, if only they and sums of biases do."""
    results: dict[Any, fx.Node] = {user.args[1]: user for user in both.users}
    readers = list(results[0].users) if 0 in results else []
    if len(readers) != 1 or readers[0].target is not aten.view.default or fake(readers[0]).shape != shape:
        return None
    (found,) = readers
    backward = convolutions(found)
    known = users_of(found) <= {*backward, *sums(found)}
    return found if backward and known and are_unaligned(backward) else None


def _pad(both: fx.Node, found: _Predictions, padded: dict[fx.Node, fx.Node]) -> None:
    """Pads a convolution, the cross entropy behind it, and the gradient."""
    y, *given = both.args
    count = fake(found.convolution).shape[1]
    with both.graph.inserting_before(both):
        whole = _padded_predictions(y, found, padded)
        images, width, *pixels = fake(whole).shape
        rows = call(both, aten.view.default, (whole, [images, width, -1]))
        new = call(both, both.target, (rows, *given, count))
        inherit(new, both, fake(new))
        gradient, losses = (call(both, getitem, (new, index)) for index in range(2))
        gradient = call(both, aten.view.default, (gradient, [images, width, *pixels]))
    for one in both.users:
        if one.args[1]:
            one.replace_all_uses_with(losses)
    read_padded(found.gradient, gradient, padded)


def _padded_predictions(y: Any, found: _Predictions, padded: dict[fx.Node, fx.Node]) -> fx.Node:
    """The result of a padded convolution with padded biases; in memory, kernels read these as whole vectors too."""
    whole, biases = bare_result(found.convolution, padded), found.biases or found.convolution.args[2]
    if biases is None:
        return whole
    count, width = fake(found.convolution).shape[1], fake(whole).shape[1]
    with y.graph.inserting_before(y):
        each = call(y, aten.view.default, (biases, [1, count, 1, 1]))
        each = write(call(y, aten.constant_pad_nd.default, (each, [0, 0, 0, 0, 0, width - count])))
        return call(y, aten.add.Tensor, (whole, each))
