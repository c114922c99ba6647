"""Gradients of convolution weights in tiles, in fused steps, replacing cuDNN's where those are slow.

With few channels, cuDNN reaches a quarter of Hopper's TF32 throughput. From 128 channels on it is as fast as tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels.choose_convolution import bias_gradient, separate
from stepgraph.compiler.program import fake
from stepgraph.compiler.step import Fusion, Step
from stepgraph.compiler.triton_launch import run_on
from stepgraph.compiler.tuned.gpus import HOPPER
from stepgraph.compiler.tuned.row import Tuned

aten = torch.ops.aten
Array = torch.Tensor
BACKWARD = aten.convolution_backward.default
STRIDE, PADDING, DILATION, TRANSPOSED, FURTHER_PADDING, GROUPS = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
CHANNELS = (32, 64)


def tile_weight_gradients(graph: fx.Graph) -> None:
    """Replaces the gradients that tiles support: 3×3 taps with stride 1 over images in float32, channels last."""
    for node in list(graph.nodes):
        if node.target is BACKWARD and _fits(*node.args):
            g, x, *others, _ = node.args
            separate(node, {0: (_of_source, (g, x, *others)), 1: (of_weights, (g, x)), 2: (bias_gradient, (g,))})


def of_weights(g: Array, x: Array) -> Array:
    """`dw[o, c, i, j] = Σ g[n, o, r, s] x[n, c, r + i - 1, s + j - 1]`."""
    from stepgraph.compiler.tuned.weight_gradient_kernels import weight_gradient_sums

    return weight_gradient_sums(g, x).sum(0).permute(2, 3, 0, 1)


def _of_source(*arguments: Any) -> Array:
    return BACKWARD(*arguments, [True, False, False])[0]


def _fits(g: Any, x: Any, w: Any, biases: Any, *others: Any) -> bool:
    *settings, mask = others
    source, (outputs, inputs, *taps) = fake(x), fake(w).shape
    plain = mask[1] and settings == [STRIDE, PADDING, DILATION, TRANSPOSED, FURTHER_PADDING, GROUPS]
    known = source.dtype is torch.float32 and taps == [3, 3] and source.is_contiguous(memory_format=torch.channels_last)
    return plain and known and outputs in CHANNELS and inputs in CHANNELS


def _condition(step: Step) -> bool:
    """The kernels multiply in TF32, with a 10-bit mantissa."""
    _, allowed = step.precision.tf32
    return allowed and step.fusion is not Fusion.NEVER and run_on(step.device, HOPPER)


ROW = Tuned(
    name="weight gradients in tiles",
    hardware="NVIDIA Hopper, TF32",
    pattern=f"3×3 convolutions with stride 1 from and to {' or '.join(map(str, CHANNELS))} channels",
    gains={"cnn": 1.12, "resnet18": 1.06},
    results="rent-h200-tf32",
    condition=_condition,
    run=tile_weight_gradients,
)
