"""How layers are recorded for a device and a layout: a layer's forward is its equation and knows of neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from stepgraph.compiler.lstm_cudnn import by_cudnn, supports
from stepgraph.compiler.step import Step
from stepgraph.compiler.tuned import MANIFEST
from stepgraph.layers.attention import MultiheadAttentionLayer, attention_weights, weighted
from stepgraph.layers.convolution import ConvolutionLayer
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.lstm_kernel import one_direction
from stepgraph.layers.recurrent import LSTMLayer

SHORT = 512  # keys up to which plain float32 products are faster on a GPU than PyTorch's single operator
LAST = torch.channels_last
Forward = Callable[[Sequence[torch.Tensor], Scope], tuple[torch.Tensor, ...]]


def lowered(step: Step, layer: Layer, forward: Forward) -> Forward:
    """A layer's forward as it is recorded for a step."""
    if step.channels_last and isinstance(layer, ConvolutionLayer):
        return _channels_last(layer, forward)
    if step.device.type == "cuda" and isinstance(layer, MultiheadAttentionLayer):
        return _under(_WrittenOut(step), forward)
    if step.device.type == "cuda" and isinstance(layer, LSTMLayer):
        return _under(_ByCudnn(), forward)
    return forward


def _channels_last(layer: ConvolutionLayer, forward: Forward) -> Forward:
    """Images and filters have their channels last in memory."""

    def run(sources: Sequence[torch.Tensor], scope: Scope) -> tuple[torch.Tensor, ...]:
        (x,) = sources
        weights = scope.array(layer.weights, *layer.descriptor.weights_shape).contiguous(memory_format=LAST)
        laid_out = replace(scope, arrays={**scope.arrays, layer.weights: weights})
        (y,) = forward([x.contiguous(memory_format=LAST)], laid_out)
        # Images with one channel have both layouts, and libraries accept either, so the layout is made explicit.
        return (y.clone(memory_format=LAST) if x.shape[1] == 1 else y,)

    return run


def _under(mode: TorchFunctionMode, forward: Forward) -> Forward:
    """Some of the functions that a layer calls are replaced by others."""

    def run(sources: Sequence[torch.Tensor], scope: Scope) -> tuple[torch.Tensor, ...]:
        with mode:
            return forward(sources, scope)

    return run


class _ByCudnn(TorchFunctionMode):
    """Records cuDNN's LSTM in the place of our own, where cuDNN has one."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is one_direction and supports(args[0].dtype, lengths=args[6]):
            return by_cudnn(*args)
        return function(*args, **(kwargs or {}))


class _WrittenOut(TorchFunctionMode):
    """Records products and a softmax in the place of PyTorch's attention over few keys, where they are faster.

    Tuned code may take attention as one operator instead.
    """

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._taken = [row.takes_attention for row in MANIFEST if row.takes_attention is not None and row.applies(step)]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention and self._is_faster(*args):
            q, k, v, mask = args
            return weighted(attention_weights(q, k, mask), v, mask)
        return function(*args, **(kwargs or {}))

    def _is_faster(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
        as_one = mask is None and any(takes(q, k, v) for takes in self._taken)
        return not as_one and q.dtype is torch.float32 and k.shape[2] <= SHORT
