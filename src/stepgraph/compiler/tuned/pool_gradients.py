"""Gradients of max pools whose windows do not overlap, computed per pixel: fused, this needs no scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx

from stepgraph.compiler.passes.pool_first import POOL_GRADIENT, has_separate_windows
from stepgraph.compiler.program import fake
from stepgraph.compiler.tuned.row import Tuned, on_gpu

Array = torch.Tensor


def compare_positions(graph: fx.Graph) -> None:
    """Replaces the gradients of such pools."""
    for node in graph.nodes:
        if node.target is POOL_GRADIENT:
            g, x, window, *settings, places = cast(Any, node.args)
            if has_separate_windows(x, window, *settings):
                node.target, node.args = spread, (g, places, list(fake(x).shape[2:]), window)


def spread(g: Array, places: Array, extents: Sequence[int], window: Sequence[int]) -> Array:
    """The gradient of a non-overlapping max pool: `g` where a pixel is its window's maximum, else 0."""
    (height, width), (rows, columns) = extents, window
    given, taken = (one.permute(0, 2, 3, 1)[:, :, None, :, None] for one in (g, places))
    down, across = (torch.arange(extent, device=g.device) for extent in (g.shape[2] * rows, g.shape[3] * columns))
    pixels = (down[:, None] * width + across).view(g.shape[2], rows, g.shape[3], columns, 1)
    found = torch.where(taken == pixels, given, 0).reshape(len(g), len(down), len(across), g.shape[1])
    found = F.pad(found, (0, 0, 0, width - len(across), 0, height - len(down)))
    return found.permute(0, 3, 1, 2)


ROW = Tuned(
    name="compare positions in pools",
    hardware="GPUs",
    pattern="max pools of images whose windows do not overlap",
    gains={"cnn": 1.10},
    results="rent-h200-tf32",
    condition=on_gpu,
    run=compare_positions,
)
