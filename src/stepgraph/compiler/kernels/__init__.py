"""Faster implementations of what a step does, beside the reference; tests compare the two."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels.choose import choose_kernels
from stepgraph.compiler.kernels.measure import WAY
from stepgraph.compiler.kernels.update import (
    named,
    note_workspace,
    number_type,
    take_apart,
    update,
    update_by_rule,
    update_on_cpu,
)
from stepgraph.random import draw_mask, draw_uniform

__all__ = [
    "WAY",
    "call_directly",
    "choose_kernels",
    "named",
    "note_workspace",
    "number_type",
    "take_apart",
    "update",
]

# Operators of our own that are Python functions: a compiled step calls them without going through PyTorch's dispatcher,
# which would take longer than most of them.
DIRECT: dict[Any, Callable[..., Any]] = {
    torch.ops.stepgraph.update_.default: update_on_cpu,
    torch.ops.stepgraph.update_by_rule_.default: update_by_rule,
    torch.ops.stepgraph.keep_mask.default: draw_mask,
    torch.ops.stepgraph.uniform.default: draw_uniform,
}


def call_directly(graph: fx.Graph) -> fx.Graph:
    """The same operators, with the functions behind our own in their places."""
    direct = copy.deepcopy(graph)
    for node in direct.nodes:
        if node.op == "call_function":
            node.target = DIRECT.get(node.target, node.target)
    return direct
