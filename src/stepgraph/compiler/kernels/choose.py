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
Choosers = dict[Any, Callable[[fx.Node], None]]  # by operator: what chooses among its implementations


def choose_kernels(module: fx.GraphModule, device: torch.device, offered: Sequence[Alternative]) -> None:
    """Replaces each operator that has several implementations with the fastest.

    Args:
        module: the program.
        device: where it will run.
        offered: alternatives for this device, besides those that `kernels` has.
    """
    choices = _choices(device, offered)
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if device.type == "cpu" and half.applies(node):
            half.choose(node)
        elif node.target in choices:
            choices[node.target](node)
    module.recompile()


def _choices(device: torch.device, offered: Sequence[Alternative]) -> Choosers:
    """What chooses on a device."""
    on_any: Choosers = {
        aten.convolution.default: choose_convolution.choose_forward,
        aten.convolution_backward.default: partial(choose_convolution.choose_backward, offered=offered),
    }
    operations = {one.operation for one in (*choose_operator.ALTERNATIVES, *offered)}
    on_cpu: Choosers = {  # a GPU fuses these
        **dict.fromkeys(operations, partial(choose_operator.choose, offered=offered)),
        torch_private.log_softmax_gradient.default: cross_entropy.choose,
        aten.max_pool2d_with_indices_backward.default: channels_last.turn_gradient,
        aten.threshold_backward.default: channels_last.turn_gradient,
        **on_any,
    }
    by_device = {"cpu": on_cpu, "cuda": on_any}
    return by_device.get(device.type, {})
