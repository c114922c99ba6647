"""Which operators have several implementations, and which function chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels import channels_last, choose_convolution, choose_operator, cross_entropy, half
from stepgraph.compiler.kernels.alternatives import Alternative
from stepgraph.system import torch_private

aten = torch.ops.aten


def choose_kernels(module: fx.GraphModule, offered: Sequence[Alternative]) -> None:
    """Replaces each operator that has several implementations on the CPU with the fastest.

    Args:
        module: the program.
        offered: alternatives for this processor, besides those that `kernels` has.
    """
    choices = _choices(offered)
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if half.applies(node):
            half.choose(node)
        elif node.target in choices:
            choices[node.target](node)


def _choices(offered: Sequence[Alternative]) -> dict[Any, Callable[[fx.Node], None]]:
    """By operator: what chooses among its implementations."""
    operations = {one.operation for one in (*choose_operator.ALTERNATIVES, *offered)}
    return {
        **dict.fromkeys(operations, partial(choose_operator.choose, offered=offered)),
        aten.convolution.default: choose_convolution.choose_forward,
        aten.convolution_backward.default: partial(choose_convolution.choose_backward, offered=offered),
        torch_private.log_softmax_gradient.default: cross_entropy.choose,
        aten.max_pool2d_with_indices_backward.default: channels_last.turn_gradient,
        aten.threshold_backward.default: channels_last.turn_gradient,
    }
