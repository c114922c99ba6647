"""Which operators have several implementations, and which function chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels import (
    channels_last,
    choose_convolution,
    choose_operator,
    cross_entropy,
    emulated,
    half,
    lstm_onednn,
)
from stepgraph.compiler.kernels.alternatives import Alternative
from stepgraph.compiler.kernels.choices import Question
from stepgraph.compiler.kernels.measure import Implementations, Pick
from stepgraph.system import torch_private

aten = torch.ops.aten


def choose_kernels(module: fx.GraphModule, offered: Sequence[Alternative], pick: Pick | None = None) -> None:
    """Replaces each operator that has several implementations on the CPU with the fastest.

    Args:
        module: the program.
        offered: alternatives for this processor, besides those that `kernels` has.
        pick: chooses one by its name; by default, they are measured.
    """
    choices = _choices(offered, pick)
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if half.applies(node):
            half.choose(node, pick)
        elif node.target in choices:
            choices[node.target](node)


def implementations(question: Question, offered: Sequence[Alternative]) -> Implementations | None:
    """What a question asked to choose from; None if this needs the graph, or if one no longer exists or works.

    Args:
        question: an earlier question.
        offered: alternatives for any processor, besides those that `kernels` has.
    """
    known = _functions(question.operator, offered)
    found = {name: known[name] for name in question.implementations if name in known}
    if found.keys() & choose_convolution.BY_NNPACK and not choose_convolution.has_nnpack():
        return None
    return found if len(found) == len(question.implementations) else None


def _functions(operator: str, offered: Sequence[Alternative]) -> Implementations:
    """The implementations of an operator by name, whatever arguments they support."""
    tables = {
        **choose_convolution.TABLES,
        cross_entropy.OPERATOR: cross_entropy.IMPLEMENTATIONS,
        lstm_onednn.OPERATOR: lstm_onednn.IMPLEMENTATIONS,
        **{emulated.operator(kind): emulated.implementations(kind) for kind in half.HALF},
        **{str(one): {"pytorch": one, "float32": function} for one, function in half.IMPLEMENTATIONS.items()},
    }
    found = dict(tables.get(operator, {}))
    for one in (*choose_operator.ALTERNATIVES, *offered):
        if str(one.operation) == operator.removesuffix(choose_convolution.LAST_SUFFIX):
            found = {"pytorch": one.operation, **found, one.name: one.function}
    return found


def _choices(offered: Sequence[Alternative], pick: Pick | None) -> dict[Any, Callable[[fx.Node], None]]:
    """By operator: what chooses among its implementations."""
    operations = {one.operation for one in (*choose_operator.ALTERNATIVES, *offered)}
    return {
        **dict.fromkeys(operations, partial(choose_operator.choose, offered=offered, pick=pick)),
        aten.convolution.default: partial(choose_convolution.choose_forward, pick=pick),
        aten.convolution_backward.default: partial(choose_convolution.choose_backward, offered=offered, pick=pick),
        torch.ops.stepgraph.lstm_onednn.default: lstm_onednn.say,
        torch_private.log_softmax_gradient.default: partial(cross_entropy.choose, pick=pick),
        aten.max_pool2d_with_indices_backward.default: channels_last.turn_gradient,
        aten.threshold_backward.default: channels_last.turn_gradient,
    }
