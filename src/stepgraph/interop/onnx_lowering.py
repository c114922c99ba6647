"""Functions that PyTorch's exporter would translate wrongly, or into a subgraph per step, and what replaces them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from stepgraph.interop import onnx_recurrent
from stepgraph.layers.attending import all_masked, repeat_heads
from stepgraph.layers.gru import gru_direction
from stepgraph.layers.lstm_kernel import one_direction

Array = torch.Tensor


class ForExport(TorchFunctionMode):
    """Replaces these functions while layers are traced for ONNX."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _REPLACED.get(function, function)(*args, **(kwargs or {}))


def _attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """Attention with a mask as products: the exporter returns NaN for a query whose keys are all masked, not 0."""
    if attn_mask is None or dropout_p or is_causal:
        settings: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **settings)
    if enable_gqa:
        key, value = (repeat_heads(one, heads=query.shape[1]) for one in (key, value))
    mask = attn_mask
    if mask.dtype is torch.bool:
        mask = query.new_zeros(mask.shape).masked_fill(~mask, -math.inf)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor @ key.transpose(-2, -1) + mask).clamp_min(torch.finfo(query.dtype).min)
    return (torch.softmax(scores, -1) @ value).masked_fill(all_masked(mask), 0)


def _average_pool(dimensions: int) -> Any:
    pool = {2: F.avg_pool2d, 3: F.avg_pool3d}[dimensions]

    def replaced(
        input: Array,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Array:
        """A pool with its own divisor as a mean over a padded image: the exporter ignores the divisor."""
        if divisor_override is None:
            return pool(input, kernel_size, stride, padding, ceil_mode, count_include_pad)
        kernel = _each(kernel_size, dimensions)
        steps = kernel if stride is None or stride == [] else _each(stride, dimensions)
        pads: list[int] = []
        for size, window, step, pad in zip(
            input.shape[-dimensions:], kernel, steps, _each(padding, dimensions), strict=True
        ):
            pads = [pad, pad + _overhang(size, window, step, pad) if ceil_mode else pad, *pads]
        return pool(F.pad(input, pads), kernel, steps) * (math.prod(kernel) / divisor_override)

    return replaced


def _overhang(size: int, window: int, step: int, pad: int) -> int:
    """How far the last window of `ceil_mode` reaches beyond the padded image."""
    count = -(-(size + 2 * pad - window) // step)  # windows after the first
    if count * step >= size + pad:  # the last one must start in the image, or in the padding before it
        count -= 1
    return max(0, count * step + window - size - 2 * pad)


def _each(given: Any, dimensions: int) -> tuple[int, ...]:
    return tuple(given) if isinstance(given, tuple | list) else (given,) * dimensions


_REPLACED = {
    one_direction: onnx_recurrent.lstm,
    gru_direction: onnx_recurrent.gru,
    torch.lstm: onnx_recurrent.projected_lstm,
    F.scaled_dot_product_attention: _attention,
    F.avg_pool2d: _average_pool(2),
    F.avg_pool3d: _average_pool(3),
}
