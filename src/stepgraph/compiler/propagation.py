"""The results of all operators of a graph as arrays without memory, computed once for operators that are alike.

PyTorch's compiler computes them again after it has changed a graph, operator by operator, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.alike import Known
from stepgraph.compiler.program import set_fake
from stepgraph.system import torch_private

SHOWN = (torch.Tensor, int, float)


def propagate(graph: fx.Graph, arrays: Sequence[torch.Tensor]) -> bool:
    """Sets the fakes of all nodes, as PyTorch would; returns False if there are constants.

    Args:
        graph: operators that change nothing but inputs.
        arrays: its inputs, arrays without memory.
    """
    if any(node.op not in ("placeholder", "call_function", "output") for node in graph.nodes):
        return False
    known = Known.of(arrays[0].fake_mode)  # type: ignore[attr-defined]
    placeholders = graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = dict(zip(placeholders, map(torch_private.snapshot, arrays), strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            values[node] = known.result(node.target, *fx.map_arg((node.args, node.kwargs), values.__getitem__))
        elif node.op == "output":
            values[node] = fx.map_arg(node.args[0], values.__getitem__)
        shown = fx.node.map_aggregate(values[node], lambda one: one if isinstance(one, SHOWN) else None)
        if shown is not None:
            set_fake(node, shown)
    return True
