"""Indices of max pools, kept for the gradient pass in as few bytes as they need.

PyTorch's pools return where each maximum was as a number of 8 bytes, four times as much as the maximum itself in half
precision. An index counts the pixels of one image, so 2 or 4 bytes are enough. To convert them takes a GPU as long as
to read and write them once, so only those are converted that exist when a step needs the most memory.
"""

from __future__ import annotations

from math import prod
from operator import getitem
from typing import Any

import torch
from torch import fx

from stepgraph.compiler import memory
from stepgraph.compiler.program import Part, call, fake, storage
from stepgraph.system import torch_private

aten = torch.ops.aten
GRADIENTS = {
    aten.max_pool2d_with_indices.default: aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d_with_indices_backward.default,
}
TYPES = torch.int16, torch.int32
CONVERT = torch_private.to_copy.default


def keep_narrow(part: Part) -> Part:
    """The part with narrow copies of the indices that its gradient pass needs."""
    if not any(node.target in GRADIENTS for node in part.nodes):
        return part
    part = part.changeable()
    large = memory.alive_at_peak(part)
    for node in list(part.module.graph.nodes):
        kind = _kind(node)
        if kind is not None and storage(node) in large:
            _narrow(node, kind)
    return part


def restore(graph: fx.Graph) -> None:
    """Lets gradients read the indices themselves, as passes for fused steps expect; a compiler plans its own memory."""
    for wide in list(graph.nodes):
        narrow = _converted(wide)
        indices = _converted(narrow)
        if narrow is not None and _kind(indices) is fake(narrow).dtype and fake(wide).dtype is fake(indices).dtype:
            wide.replace_all_uses_with(indices)
            graph.erase_node(wide)
            if not narrow.users:
                graph.erase_node(narrow)


def _converted(node: fx.Node | None) -> Any:
    """What an operator converts to another type, if it does."""
    return node.args[0] if node is not None and node.target is CONVERT else None


def _kind(node: fx.Node | None) -> torch.dtype | None:
    """The type in which these fit, if they are indices that only gradients of their pool read, converted or not."""
    pool: Any = node.args[0] if node is not None and node.target is getitem and node.args[1] == 1 else None
    if node is None or pool is None or pool.target not in GRADIENTS:
        return None
    if not all(user.target in (GRADIENTS[pool.target], CONVERT) for user in node.users):
        return None
    axes = 3 if pool.target is aten.max_pool3d_with_indices.default else 2
    largest = prod(fake(pool.args[0]).shape[-axes:]) - 1
    return next((one for one in TYPES if largest <= torch.iinfo(one).max), None)


def _narrow(indices: fx.Node, kind: torch.dtype) -> None:
    """Converts indices where they are computed, and back in front of each gradient."""
    readers = list(indices.users)
    with indices.graph.inserting_after(indices):
        kept = call(indices, CONVERT, (indices,), dtype=kind)
    for reader in readers:
        with reader.graph.inserting_before(reader):
            wide = call(reader, CONVERT, (kept,), dtype=fake(indices).dtype)
        reader.replace_input_with(indices, wide)
