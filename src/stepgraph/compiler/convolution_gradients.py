"""The gradients of a convolution, one by one: that of its source needs the source's shape, not its values.

One operator computes both gradients. If the source is an activation that the gradient pass computes again, the
activation must be in memory before the gradient of the source is known. Apart, the kernels behind that gradient, which
read what the activation is computed from, write the activation, too; then the gradient of the filters is computed.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from stepgraph.compiler import hidden  # noqa: F401  defines the operators
from stepgraph.compiler.program import call

aten, ours = torch.ops.aten, torch.ops.stepgraph
BOTH = aten.convolution_backward.default
ONE = ours.convolution_backward.default  # of the gradients, by its index
SOURCE = 0  # the index among the gradients of a convolution


def needing(user: fx.Node, source: fx.Node) -> set[fx.Node]:
    """What an operator that reads a source computes from its values, not only from its shape."""
    if not _reads(user, source):
        return {user}
    if user.target is ONE:
        return set() if user.args[10] == SOURCE else {user}
    return {one for one in user.users if one.args[1] != SOURCE}


def separate(source: fx.Node, like: fx.Node) -> None:
    """Lets gradients of a source read its shape from another array, and those of filters be computed apart."""
    for user in [one for one in source.users if _reads(one, source)]:
        if user.target is BOTH:
            _separate(user, like)
        elif user.args[10] == SOURCE:
            user.update_arg(1, like)


def _reads(user: fx.Node, source: fx.Node) -> bool:
    """Whether an operator computes gradients of a convolution that reads this source, and reads it only as such."""
    return user.target in (BOTH, ONE) and user.args[1] is source and source not in (user.args[0], user.args[2])


def _separate(node: fx.Node, like: fx.Node) -> None:
    """Replaces one operator with two, of which the first computes the gradient of the source."""
    gradient, source, filters, *settings, mask = node.args
    assert isinstance(mask, list)
    first = [mask[0], False, False], like
    others = [False, *mask[1:]], source
    for wanted, given in (first, others):
        results = [one for one in node.users if wanted[one.args[1]]]  # type: ignore[call-overload]
        if not results:
            continue
        with node.graph.inserting_before(node):
            new = call(node, BOTH, (gradient, given, filters, *settings, wanted))
            for one in results:
                one.replace_all_uses_with(call(one, getitem, (new, one.args[1])))
    node.graph.eliminate_dead_code()
