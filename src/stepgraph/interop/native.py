"""stepgraph's own layers for PyTorch's modules, where they compute the same numbers.

A row takes modules of exactly one class. What a module has besides its class's settings (hooks, parametrizations, a
forward of its own) keeps it wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from stepgraph.layers.activation import ActivationLayer
from stepgraph.layers.convolution import ConvolutionDescriptor, ConvolutionLayer
from stepgraph.layers.dropout import DropoutLayer
from stepgraph.layers.embedding import EmbeddingDescriptor, EmbeddingLayer
from stepgraph.layers.layer import Layer
from stepgraph.layers.layer_normalization import (
    GroupNormalizationLayer,
    LayerNormalizationLayer,
    RMSNormalizationLayer,
)
from stepgraph.layers.linear import FullyConnectedLayer
from stepgraph.layers.pooling import PoolingLayer
from stepgraph.layers.shape import ReshapeLayer
from stepgraph.layers.softmax import SoftmaxLayer
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import PaddingPolicy

Tensors = Mapping[str, Tensor]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def native_layer(
    module: nn.Module, tensors: Tensors, sources: Sequence[Tensor], is_plain: bool, label: str, is_fixed: bool
) -> Layer | str:
    """The layer for a module, or why there is none.

    Args:
        module: the module.
        tensors: its tensors, by name.
        sources: what it reads.
        is_plain: whether it is called with one source and nothing else.
        label: the layer's label.
        is_fixed: whether the module stays in eval mode.
    """
    if is_parametrized(module):
        return "its parameters are computed"
    kind = type(module)
    make = _TABLE.get(kind) or _BY_NAME.get(f"{kind.__module__}.{kind.__qualname__}")
    if make is None:
        return "no layer of its class"
    if not is_plain or len(sources) != 1:
        return "it is called with more than one array"
    if any(vars(module).get(name) for name in _HOOKS):
        return "it has hooks"
    if "forward" in vars(module):
        return "its forward was replaced"
    return make(module, tensors, sources[0], label, is_fixed)


def _linear(module: Any, tensors: Tensors, x: Tensor, label: str, _: bool) -> Layer | str:
    inputs, outputs = module.in_features, module.out_features
    if x.shape[1:] == (inputs, 1, 1) and len(x.shape) == 4:
        return "the layer would read its source as pixels"
    if x.data_type is not tensors["weight"].data_type:
        return "its source has another type"
    descriptor = ConvolutionDescriptor(1, inputs, outputs)
    return FullyConnectedLayer(tensors["weight"], tensors.get("bias"), descriptor, label=label)


def _convolution(module: Any, tensors: Tensors, x: Tensor, label: str, _: bool) -> Layer | str:
    dimensions = len(module.kernel_size)
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return f"its padding is {module.padding if isinstance(module.padding, str) else module.padding_mode}"
    if len(x.shape) != dimensions + 2 or x.data_type is not tensors["weight"].data_type:
        return "its source has no batch, or another type"
    descriptor = ConvolutionDescriptor(
        module.kernel_size,
        module.in_channels,
        module.out_channels,
        group_count=module.groups,
        strides=module.stride,
        dilation_rates=module.dilation,
        padding_policy=PaddingPolicy.USE_PADDING_SIZE,
        padding_sizes=module.padding,
        dimensions=dimensions,
    )
    return ConvolutionLayer(tensors["weight"], tensors.get("bias"), descriptor, label=label)


def _embedding(module: Any, tensors: Tensors, x: Tensor, label: str, _: bool) -> Layer | str:
    if module.max_norm is not None or module.scale_grad_by_freq:
        return "it changes its rows, or has scaled gradients"
    if module.padding_idx is not None:
        return "its row of padding_idx may hold numbers"
    if x.data_type.is_floating or len(x.shape) > 4:
        return "its source is not an index of up to 4 dimensions"
    descriptor = EmbeddingDescriptor(module.num_embeddings, module.embedding_dim)
    return EmbeddingLayer(descriptor, tensors["weight"], label=label)


def _layer_norm(module: Any, tensors: Tensors, x: Tensor, label: str, _: bool) -> Layer | str:
    if "weight" not in tensors or "bias" not in tensors:
        return "it has no scale or no offset"
    if x.data_type is not tensors["weight"].data_type:
        return "its source has another type"
    shape = tuple(module.normalized_shape)
    return LayerNormalizationLayer(shape, tensors["bias"], tensors["weight"], module.eps, label=label)


def _group_norm(module: Any, tensors: Tensors, x: Tensor, label: str, _: bool) -> Layer | str:
    if "weight" not in tensors or "bias" not in tensors:
        return "it has no scale or no offset"
    if x.data_type is not tensors["weight"].data_type or len(x.shape) < 3:
        return "its source has another type, or no pixels"
    sizes = module.num_channels, module.num_groups
    return GroupNormalizationLayer(*sizes, tensors["bias"], tensors["weight"], module.eps, label=label)


def _rms_norm(module: Any, tensors: Tensors, x: Tensor, label: str, _: bool) -> Layer | str:
    if "weight" not in tensors or module.eps is None:
        return "it has no scale, or an epsilon that depends on the type"
    if x.data_type is not tensors["weight"].data_type:
        return "its source has another type"
    return RMSNormalizationLayer(tuple(module.normalized_shape), tensors["weight"], module.eps, label=label)


def _pooling(dimensions: int, is_max: bool) -> Callable[..., Layer | str]:
    def row(module: Any, _: Tensors, x: Tensor, label: str, _fixed: bool) -> Layer | str:
        if module.ceil_mode or getattr(module, "return_indices", False) or getattr(module, "divisor_override", None):
            return "it rounds sizes up, returns indices, or divides by another number"
        if len(x.shape) != dimensions + 2 or not x.data_type.is_floating:
            return "its source has no batch, or is not floating-point"
        settings: dict[str, Any] = {"padding_sizes": module.padding, "dimensions": dimensions, "label": label}
        if is_max:
            return PoolingLayer.max(module.kernel_size, module.stride, dilation_rates=module.dilation, **settings)
        settings["count_includes_padding"] = module.count_include_pad
        return PoolingLayer.average(module.kernel_size, module.stride, **settings)

    return row


def _softmax(make: Callable[..., Layer]) -> Callable[..., Layer | str]:
    def row(module: Any, _: Tensors, x: Tensor, label: str, _fixed: bool) -> Layer | str:
        if module.dim is None or not x.data_type.is_floating:
            return "it has no dimension, or its source is not floating-point"
        return make(module.dim % len(x.shape), label=label)

    return row


def _flatten(module: Any, _: Tensors, x: Tensor, label: str, _fixed: bool) -> Layer | str:
    if module.start_dim != 1 or module.end_dim % len(x.shape) != len(x.shape) - 1:
        return "it flattens some dimensions only"
    return ReshapeLayer((x.shape[0], -1), label=label)


def _dropout(module: Any, _: Tensors, x: Tensor, label: str, is_fixed: bool) -> Layer | str:
    if is_fixed:
        return "it stays in eval mode"
    if not 0 <= module.p < 1 or not x.data_type.is_floating:
        return f"its rate is {module.p}"
    return DropoutLayer(module.p, label=label)


def _activation(make: Callable[..., Layer], *settings: str) -> Callable[..., Layer | str]:
    def row(module: Any, _: Tensors, x: Tensor, label: str, _fixed: bool) -> Layer | str:
        if not x.data_type.is_floating:
            return "its source is not floating-point"
        return make(*(getattr(module, name) for name in settings), label=label)

    return row


def _gelu(module: Any, tensors: Tensors, x: Tensor, label: str, is_fixed: bool) -> Layer | str:
    make = ActivationLayer.gelu if module.approximate == "tanh" else ActivationLayer.gelu_erf
    return _activation(make)(module, tensors, x, label, is_fixed)


_TABLE: dict[type[nn.Module], Callable[..., Layer | str]] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.RMSNorm: _rms_norm,
    nn.MaxPool1d: _pooling(1, is_max=True),
    nn.MaxPool2d: _pooling(2, is_max=True),
    nn.MaxPool3d: _pooling(3, is_max=True),
    nn.AvgPool1d: _pooling(1, is_max=False),
    nn.AvgPool2d: _pooling(2, is_max=False),
    nn.AvgPool3d: _pooling(3, is_max=False),
    nn.Flatten: _flatten,
    nn.Softmax: _softmax(SoftmaxLayer.softmax),
    nn.LogSoftmax: _softmax(SoftmaxLayer.log_softmax),
    nn.Dropout: _dropout,
    nn.ReLU: _activation(ActivationLayer.relu),
    nn.ReLU6: _activation(ActivationLayer.relu6),
    nn.LeakyReLU: _activation(ActivationLayer.leaky_relu, "negative_slope"),
    nn.Sigmoid: _activation(ActivationLayer.sigmoid),
    nn.Tanh: _activation(ActivationLayer.tanh),
    nn.ELU: _activation(ActivationLayer.elu, "alpha"),
    nn.CELU: _activation(ActivationLayer.celu, "alpha"),
    nn.SELU: _activation(ActivationLayer.selu),
    nn.SiLU: _activation(ActivationLayer.silu),
    nn.GELU: _gelu,
    nn.LogSigmoid: _activation(ActivationLayer.log_sigmoid),
    nn.Softsign: _activation(ActivationLayer.soft_sign),
    nn.Hardswish: _activation(ActivationLayer.hard_swish),
    nn.Hardtanh: _activation(ActivationLayer.clamp, "min_val", "max_val"),
    nn.Threshold: _activation(ActivationLayer.threshold, "threshold", "value"),
    nn.Hardshrink: _activation(ActivationLayer.hard_shrink, "lambd"),
    nn.Softshrink: _activation(ActivationLayer.soft_shrink, "lambd"),
    nn.Tanhshrink: _activation(ActivationLayer.tanh_shrink),
}
_BY_NAME: dict[str, Callable[..., Layer | str]] = {  # of packages that need not be installed
    "transformers.activations.NewGELUActivation": _activation(ActivationLayer.gelu),
}
