"""The gradients of a convolution, one by one: that of its source needs the source's shape, not its values.

One operator computes both gradients. If the source is an activation that the gradient pass computes again, the
activation must be in memory before the gradient of the source is known. Apart, the kernels behind that gradient, which
read what the activation is computed from, write the activation, too; then the gradient of the filters is computed.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.passes import hidden  # noqa: F401  defines the operators
from stepgraph.compiler.program import call

aten, ours = torch.ops.aten, torch.ops.stepgraph
BOTH = aten.convolution_backward.default
ONE = ours.convolution_backward.default  # of the gradients, by its index
SOURCE = 0  # the index among the gradients of a convolution


def needing(user: fx.Node, source: fx.Node) -> set[fx.Node]:
    """What an operator that reads a source computes from its values, not only from its shape."""
    if not _reads(user, source):
        return {user}
    if user.target is BOTH:
        return {one for one in user.users if one.args[1] != SOURCE}
    return set() if _wanted(user)[SOURCE] else {user}


def separate(source: fx.Node, like: fx.Node) -> None:
    """Lets gradients of a source read its shape from another array, and those of filters be computed apart."""
    for user in [one for one in source.users if _reads(one, source)]:
        wanted = _wanted(user)
        if wanted[SOURCE] and any(wanted[1:]):
            _separate(user, like)
        elif wanted[SOURCE]:
            user.update_arg(1, like)


def _wanted(node: fx.Node) -> list[bool]:
    """Which gradients an operator computes: of source, filters and biases."""
    which = cast("Any", node.args[10])
    return list(which) if node.target is BOTH else [which == index for index in range(3)]


def _reads(user: fx.Node, source: fx.Node) -> bool:
    """Whether an operator computes gradients of a convolution that reads this source, and reads it only as such."""
    return user.target in (BOTH, ONE) and user.args[1] is source and source not in (user.args[0], user.args[2])


def _separate(node: fx.Node, like: fx.Node) -> None:
    """Replaces one operator with two, of which the first computes the gradient of the source."""
    gradient, source, filters, *settings, _ = node.args
    with node.graph.inserting_before(node):
        first = call(node, BOTH, (gradient, like, filters, *settings, [True, False, False]))
        others = call(node, BOTH, (gradient, source, filters, *settings, [False, *_wanted(node)[1:]]))
    for one in list(node.users):  # `getitem`, one per gradient
        one.update_arg(0, first if one.args[1] == SOURCE else others)
    node.graph.erase_node(node)
