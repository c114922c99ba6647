"""Gradients that an update reads as they were computed, in half precision, without a copy in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels.update import recorded
from stepgraph.compiler.program import Part, fake
from stepgraph.system import torch_private

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)
VIEWS = (aten.view.default, aten.reshape.default, aten.t.default, aten.permute.default, aten.transpose.int)


def read_half(part: Part) -> Part:
    """The part with updates that read gradients in half precision where these were only converted for them.

    The conversion is exact, so the numbers are the same. Sums stay in float32: a compiler that fuses the conversion
    with the sum does not round in between.
    """
    part = part.changeable()
    graph = part.module.graph
    for node in graph.nodes:
        own = recorded(node)
        if own is not None and own.takes_half:
            node.args = tuple(own._replace(gradients=[_before_conversion(one) for one in own.gradients]))
            for one in dict.fromkeys(own.gradients):
                if not one.users:
                    graph.erase_node(one)
    return part


def _before_conversion(gradient: fx.Node) -> fx.Node:
    source: Any = gradient.args[0] if gradient.target is torch_private.to_copy.default else None
    if source is None or fake(source).dtype not in HALVES or _is_sum(source):
        return gradient
    same = (fake(source).shape, fake(source).stride()) == (fake(gradient).shape, fake(gradient).stride())
    return source if same else gradient


def _is_sum(node: fx.Node) -> bool:
    while node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node.target in (aten.sum.default, aten.sum.dim_IntList)
