"""Arrays that are converted to another type and then copied into another order in memory, in one operator.

Images that are fed in float32 with their channels first would otherwise be written twice.
"""

from __future__ import annotations

import torch
from torch import fx

from stepgraph.compiler.program import fake
from stepgraph.system import torch_private

aten, to_copy = torch.ops.aten, torch_private.to_copy.default


def convert_in_order(graph: fx.Graph) -> None:
    """Lets a conversion write in the order of the copy that is its only reader."""
    for node in list(graph.nodes):
        order = node.kwargs.get("memory_format")
        source = node.args[0] if node.target is aten.clone.default else None
        if order is None or not isinstance(source, fx.Node) or source.target is not to_copy or len(source.users) > 1:
            continue
        node.target, node.args = to_copy, source.args
        node.kwargs = {**source.kwargs, "dtype": fake(source).dtype, "memory_format": order}
        graph.erase_node(source)
