"""Normalization within one sample: by groups of channels, by layer, or by the root mean square of a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.found import channels, found_at_node, last_extent
from stepgraph.layers.layer import Layer, ParameterOf, Scope
from stepgraph.layers.normalization import gamma_beside, require_channel_counts, require_channels, require_epsilon
from stepgraph.tensors.tensor import Tensor, TensorDescriptor


class GroupNormalizationLayer(Layer):
    """`y = γ (x - mean) / sqrt(variance + ε) + β`, with the statistics of each group of channels of each sample.

    Mean and (biased) variance are taken over `channels / groups` adjacent channels and all their pixels; γ and β
    belong to single channels. Training and inference are the same. `gamma` defaults to 1, `beta` to 0.

    Shapes: `[batch, channels, ...] → ` the same, rank 2 to 5. `beta` and `gamma` hold `channels` numbers each, in any
    shape (`[channels]`, Apple's `[1, channels, 1, 1]`).

    Same as `torch.nn.GroupNorm`.

    Args:
        feature_channel_count: channels of the source.
        group_count: the number of groups; it must divide the channels.
        beta: added per channel.
        gamma: multiplied per channel.
        variance_epsilon: prevents division by zero.

    Example:
        >>> GroupNormalizationLayer.create(16, 4).infer(TensorDescriptor((8, 16, 5, 5)))[0].shape
        (8, 16, 5, 5)
    """

    feature_channel_count: int
    group_count: int
    beta: Tensor | None = None
    gamma: Tensor | None = None
    variance_epsilon: float = 1e-5

    default_label = "GroupNorm"
    full_precision = True
    beta_parameter = ParameterOf("beta")
    gamma_parameter = ParameterOf("gamma")

    def __post_init__(self) -> None:
        require_epsilon(self, self.variance_epsilon)
        require_channel_counts(self, self.feature_channel_count, {"beta": self.beta, "gamma": self.gamma})
        groups, channels = self.group_count, self.feature_channel_count
        if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or channels % groups:
            raise ArgumentError(
                self.where,
                f"group_count is {groups!r}, which does not divide {channels} channels",
                fix=f"pass an integer that divides {channels}",
            )

    @classmethod
    @found_at_node("feature_channel_count", channels)
    def create(
        cls, feature_channel_count: int, group_count: int, *, variance_epsilon: float = 1e-5, label: str = ""
    ) -> GroupNormalizationLayer:
        """A layer that starts with beta 0 and gamma 1, each of shape `[channels]`."""
        beta, gamma = (Tensor((feature_channel_count,), fill=value) for value in (0.0, 1.0))
        return cls(feature_channel_count, group_count, beta, gamma, variance_epsilon, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source has its channels on axis 1."""
        super().check(*sources)
        require_channels(self, self.feature_channel_count, sources[0])

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """Normalizes each group."""
        channels = self.feature_channel_count
        gamma, beta = (None if t is None else scope.array(t, channels) for t in (self.gamma, self.beta))
        return group_normalize(x, gamma, beta, groups=self.group_count, epsilon=self.variance_epsilon)


def group_normalize(
    x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, *, groups: int, epsilon: float
) -> torch.Tensor:
    """`γ (x - mean) / sqrt(variance + ε) + β`, mean and biased variance of each group of channels of each sample."""
    return torch.group_norm(x, groups, gamma_beside(beta, gamma), beta, epsilon)


class LayerNormalizationLayer(Layer):
    """`y = γ (x - mean) / sqrt(variance + ε) + β`, with the statistics of the last axes of each sample.

    Mean and (biased) variance are taken over the axes of `normalized_shape`, the last ones of the source: `[width]`,
    `[height, width]`, `[channels, height, width]`, `[features]`. γ and β have one number per element of that shape.
    Training and inference are the same. `gamma` defaults to 1, `beta` to 0.

    Shapes: `[..., *normalized_shape] → ` the same. `beta` and `gamma` hold as many numbers as `normalized_shape`.

    Same as `torch.nn.LayerNorm`.

    Args:
        normalized_shape: the last dimensions of the source; an int means one dimension.
        beta: added per element.
        gamma: multiplied per element.
        variance_epsilon: prevents division by zero.

    Example:
        >>> LayerNormalizationLayer.create(16).infer(TensorDescriptor((8, 5, 16)))[0].shape
        (8, 5, 16)
    """

    normalized_shape: Sequence[int]
    beta: Tensor | None = None
    gamma: Tensor | None = None
    variance_epsilon: float = 1e-5

    default_label = "LayerNorm"
    full_precision = True
    beta_parameter = ParameterOf("beta")
    gamma_parameter = ParameterOf("gamma")

    def __post_init__(self) -> None:
        require_epsilon(self, self.variance_epsilon)
        object.__setattr__(self, "normalized_shape", _extents(self, self.normalized_shape))
        _require_counts(self, self.normalized_shape, {"beta": self.beta, "gamma": self.gamma})

    @classmethod
    @found_at_node("normalized_shape", last_extent)
    def create(
        cls, normalized_shape: int | Sequence[int], *, variance_epsilon: float = 1e-5, label: str = ""
    ) -> LayerNormalizationLayer:
        """A layer that starts with beta 0 and gamma 1, each of shape `normalized_shape`."""
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        beta, gamma = (Tensor(shape, fill=value) for value in (0.0, 1.0))
        return cls(shape, beta, gamma, variance_epsilon, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source ends in the normalized shape."""
        super().check(*sources)
        _require_end(self, tuple(self.normalized_shape), sources[0])

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """Normalizes over the last axes."""
        gamma, beta = (None if t is None else scope.array(t, *self.normalized_shape) for t in (self.gamma, self.beta))
        return layer_normalize(x, gamma, beta, shape=self.normalized_shape, epsilon=self.variance_epsilon)


def layer_normalize(
    x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, *, shape: Sequence[int], epsilon: float
) -> torch.Tensor:
    """`γ (x - mean) / sqrt(variance + ε) + β`, mean and biased variance over the last axes, those of `shape`."""
    return F.layer_norm(x, list(shape), gamma, beta, epsilon)


class RMSNormalizationLayer(Layer):
    """`y = γ x / sqrt(mean(x²) + ε)`, with the mean square of the last axes of each sample.

    The mean square is taken over the axes of `normalized_shape`, the last ones of the source; γ has one number per
    element of that shape, by default 1. Nothing is subtracted and nothing added, which transformers rarely miss.
    Training and inference are the same. In mixed precision, the layer computes in float32.

    Shapes: `[..., *normalized_shape] → ` the same. `gamma` holds as many numbers as `normalized_shape`.

    Same as `torch.nn.RMSNorm`, whose default ε is the smallest number that changes 1; 1e-6 is that of Llama.

    Args:
        normalized_shape: the last dimensions of the source; an int means one dimension.
        gamma: multiplied per element.
        variance_epsilon: prevents division by zero.

    Example:
        >>> RMSNormalizationLayer.create(16).infer(TensorDescriptor((8, 5, 16)))[0].shape
        (8, 5, 16)
    """

    normalized_shape: Sequence[int]
    gamma: Tensor | None = None
    variance_epsilon: float = 1e-6

    default_label = "RMSNorm"
    full_precision = True
    gamma_parameter = ParameterOf("gamma")

    def __post_init__(self) -> None:
        require_epsilon(self, self.variance_epsilon)
        object.__setattr__(self, "normalized_shape", _extents(self, self.normalized_shape))
        _require_counts(self, self.normalized_shape, {"gamma": self.gamma})

    @classmethod
    @found_at_node("normalized_shape", last_extent)
    def create(
        cls, normalized_shape: int | Sequence[int], *, variance_epsilon: float = 1e-6, label: str = ""
    ) -> RMSNormalizationLayer:
        """A layer that starts with gamma 1, of shape `normalized_shape`."""
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        return cls(shape, Tensor(shape, fill=1.0), variance_epsilon, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source ends in the normalized shape."""
        super().check(*sources)
        _require_end(self, tuple(self.normalized_shape), sources[0])

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """Normalizes over the last axes."""
        gamma = None if self.gamma is None else scope.array(self.gamma, *self.normalized_shape)
        return rms_normalize(x, gamma, shape=self.normalized_shape, epsilon=self.variance_epsilon)


def rms_normalize(x: torch.Tensor, gamma: torch.Tensor | None, *, shape: Sequence[int], epsilon: float) -> torch.Tensor:
    """`γ x / sqrt(mean(x²) + ε)`, the mean over the last axes, those of `shape`."""
    return F.rms_norm(x, list(shape), gamma, epsilon)


def _require_counts(layer: Layer, normalized: Sequence[int], tensors: dict[str, Tensor | None]) -> None:
    """Rejects tensors that do not hold one number per normalized element."""
    shape, count = list(normalized), math.prod(normalized)
    for name, tensor in tensors.items():
        if tensor is not None and tensor.descriptor.element_count != count:
            raise ShapeError(
                layer.where,
                f"{name} holds {tensor.descriptor.element_count} numbers, but the shape {shape} needs {count}",
                fix=f"pass {name} of shape {shape}",
                **{name: tensor.descriptor},
            )


def _require_end(layer: Layer, shape: tuple[int, ...], source: TensorDescriptor) -> None:
    """Rejects a source that does not end in the normalized shape."""
    if source.shape[-len(shape) :] != shape:
        raise ShapeError(
            layer.where,
            f"the layer normalizes {list(shape)}, but the source ends in {list(source.shape[-len(shape) :])}",
            source=source,
            fix=f"pass a source [..., {', '.join(map(str, shape))}]",
        )


def _extents(layer: Layer, shape: int | Sequence[int]) -> tuple[int, ...]:
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    if not extents or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in extents):
        raise ArgumentError(layer.where, f"normalized_shape is {shape!r}", fix="pass one or more integers ≥ 1")
    return extents
