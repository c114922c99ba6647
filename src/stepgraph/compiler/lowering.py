"""How layers are recorded for a device and a layout: a layer's forward is its equation and knows of neither."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from stepgraph.compiler.filters import LAST, are_laid_out, laid_out
from stepgraph.compiler.kernels import label_losses, lstm_onednn, preferred
from stepgraph.compiler.kernels.measure import are_large, fastest
from stepgraph.compiler.rnn_cudnn import gru_by_cudnn, lstm_by_cudnn, supports
from stepgraph.compiler.step import Step
from stepgraph.compiler.tuned import MANIFEST
from stepgraph.compiler.tuned.row import on_x86
from stepgraph.layers.attending import attention_weights, position_mask, repeat_heads, weighted
from stepgraph.layers.attention import MultiheadAttentionLayer
from stepgraph.layers.convolution import ConvolutionLayer
from stepgraph.layers.gru import GRULayer, gru_direction
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.loss import LossLayer
from stepgraph.layers.lstm_kernel import one_direction
from stepgraph.layers.recurrent import LSTMLayer
from stepgraph.layers.torch_layer import TorchLayer
from stepgraph.system import torch_private

SHORT = 512  # keys up to which plain float32 products are faster on a GPU than PyTorch's single operator
WIDEST_FLASH = 256  # the widest head of PyTorch's flash attention
HALF = torch.float16, torch.bfloat16
Forward = Callable[[Sequence[torch.Tensor], Scope], tuple[torch.Tensor, ...]]


def lowered(step: Step, layer: Layer, forward: Forward, computed: Sequence[torch.Tensor] = ()) -> Forward:
    """A layer's forward as it is recorded for a step.

    Args:
        step: what is recorded.
        layer: the layer.
        forward: its forward, a function of sources in the type that the layer computes in.
        computed: the sources in the types in which they were computed.
    """
    reads_half = step.compute_type in HALF and step.chooses_kernels and computed and computed[0].dtype in HALF
    if reads_half and isinstance(layer, LossLayer):
        return _under(_HalfPredictions(computed[0]), forward)
    if isinstance(layer, ConvolutionLayer) and are_laid_out(step, layer):
        return _channels_last(layer, forward)
    if step.device.type == "cuda" and isinstance(layer, MultiheadAttentionLayer):
        return _under(_Attention(step), forward)
    if step.device.type == "cuda" and isinstance(layer, LSTMLayer | GRULayer | TorchLayer):
        return _under(_ByCudnn(), forward)
    if on_x86(step) and isinstance(layer, LSTMLayer | TorchLayer) and lstm_onednn.applies(step):
        return _under(_ByOnednn(step), forward)
    return forward


def _channels_last(layer: ConvolutionLayer, forward: Forward) -> Forward:
    """Images and filters have their channels last in memory."""

    def run(sources: Sequence[torch.Tensor], scope: Scope) -> tuple[torch.Tensor, ...]:
        (x,) = sources
        weights = laid_out(layer, scope.array(layer.weights, *layer.descriptor.weights_shape))
        own = replace(scope, arrays={**scope.arrays, layer.weights: weights})
        (y,) = forward([x.contiguous(memory_format=LAST)], own)
        # Images with one channel have both layouts, and libraries accept either, so the layout is made explicit.
        return (y.clone(memory_format=LAST) if x.shape[1] == 1 else y,)

    return run


def _under(mode: TorchFunctionMode, forward: Forward) -> Forward:
    """Some of the functions that a layer calls are replaced by others."""

    def run(sources: Sequence[torch.Tensor], scope: Scope) -> tuple[torch.Tensor, ...]:
        with mode:
            return forward(sources, scope)

    return run


class _HalfPredictions(TorchFunctionMode):
    """Records large cross entropies with class indices that read predictions in half precision, not a copy."""

    def __init__(self, prediction: torch.Tensor) -> None:
        super().__init__()
        self._prediction = prediction

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.cross_entropy and self._prediction.numel() >= label_losses.LARGE:
            return self._losses(*args, **kwargs)
        return function(*args, **kwargs)

    def _losses(
        self, y: torch.Tensor, t: torch.Tensor, *, reduction: str, label_smoothing: float, ignore_index: int, **_: Any
    ) -> torch.Tensor:
        """`F.cross_entropy` as `class_losses.py` calls it: without class weights. `y` is the prediction as rows."""
        samples, classes = y.shape[:2]
        half = self._prediction.reshape(samples, classes, -1)
        losses, _ = label_losses.label_losses(half, t.reshape(samples, -1), ignore_index, label_smoothing)
        return losses.reshape(t.shape) if reduction == "none" else getattr(losses, reduction)()


class _ByCudnn(TorchFunctionMode):
    """Records cuDNN's LSTM or GRU in the place of our own, where cuDNN has one."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is one_direction and supports(args[0].dtype, lengths=args[6]):
            return lstm_by_cudnn(*args)
        if function is gru_direction:
            x, *_, lengths, _, reset_after = args
            if reset_after and supports(x.dtype, lengths):
                return gru_by_cudnn(*args)
        return function(*args, **(kwargs or {}))


class _ByOnednn(TorchFunctionMode):
    """Records oneDNN's LSTM in the place of our own where it is faster."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._trains, self._measures = step.differentiates, step.measures_kernels

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is one_direction and lstm_onednn.supports(args[0], lengths=args[6]) and self._is_faster(args):
            return lstm_onednn.lstm_by_onednn(*args, keeps=self._trains)
        return function(*args, **(kwargs or {}))

    def _is_faster(self, given: Sequence[Any]) -> bool:
        with torch_private.disable_modes():
            arguments = lstm_onednn.compared(given, trains=self._trains)
            pick = fastest if self._measures and not are_large(arguments) else preferred
            return lstm_onednn.is_faster(pick, arguments)


class _Attention(TorchFunctionMode):
    """Records attention on a GPU as what is fastest there: as products and a softmax, or as one of PyTorch's kernels.

    Tuned code may take attention as one operator instead.
    """

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._taken = [row.takes_attention for row in MANIFEST if row.takes_attention is not None and row.applies(step)]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        is_causal: bool = False,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        as_one = mask is None and not is_causal and any(takes(q, k, v) for takes in self._taken)
        if q.dtype is torch.float32 and k.shape[2] <= SHORT and not as_one:
            seen = position_mask(q.shape[2], k.shape[2], causal=True, window=None, like=q) if is_causal else mask
            return weighted(attention_weights(q, k, seen), v, mask)
        if enable_gqa and not _shares_heads(q, v, mask):
            k, v, enable_gqa = repeat_heads(k, heads=q.shape[1]), repeat_heads(v, heads=q.shape[1]), False
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=enable_gqa)


def _shares_heads(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a GPU kernel supports fewer key and value heads: only flash attention does, in half precision.

    For others, PyTorch would compute the scores of all heads in memory; repeated heads need less.
    """
    return q.dtype in HALF and mask is None and q.shape[-1] == v.shape[-1] <= WIDEST_FLASH
