"""Operators of PyTorch that give wrong numbers for some arrays, kept from seeing such arrays.

Each entry says what is wrong and where it was seen; it can go when every supported PyTorch is right.
"""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


def correct(graph: fx.Graph, device: torch.device) -> None:
    """Puts copies in the usual order before operators that go wrong with channels last."""
    if device.type != "cuda":
        return
    for node in list(graph.nodes):
        # CUDA, PyTorch 2.11: with channels last and any padding, gradients of average pools are those of other pixels.
        if node.target is aten.avg_pool2d_backward.default and any(node.args[4]):
            _read_channels_first(node, 1)


def _read_channels_first(node: fx.Node, position: int) -> None:
    source = node.args[position]
    assert isinstance(source, fx.Node)
    images = source.meta["val"]
    if not images.is_contiguous(memory_format=torch.channels_last):
        return
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
    with images.fake_mode:
        val = torch.empty(images.shape, dtype=images.dtype, device=images.device)
    copy.meta = {**node.meta, "val": val}
    node.update_arg(position, copy)
