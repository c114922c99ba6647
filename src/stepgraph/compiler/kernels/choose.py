"""Which operators have several implementations, and which function chooses among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels import channels_last, convolution, cross_entropy, half, operators
from stepgraph.system import torch_private

aten = torch.ops.aten

CHOICES: dict[Any, Callable[[fx.Node], None]] = {
    aten.convolution.default: convolution.choose_forward,
    aten.convolution_backward.default: convolution.choose_backward,
}
ON_CPU = {  # a GPU fuses these
    **CHOICES,
    **dict.fromkeys(operators.IMPLEMENTATIONS, operators.choose),
    torch_private.log_softmax_gradient.default: cross_entropy.choose,
    aten.max_pool2d_with_indices_backward.default: channels_last.turn_gradient,
    aten.threshold_backward.default: channels_last.turn_gradient,
}


def choose_kernels(module: fx.GraphModule, device: torch.device) -> None:
    """Replaces each operator that has several implementations with the fastest."""
    choices = {"cpu": ON_CPU, "cuda": CHOICES}.get(device.type, {})
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if device.type == "cpu" and half.applies(node):
            half.choose(node)
        elif node.target in choices:
            choices[node.target](node)
    module.recompile()
