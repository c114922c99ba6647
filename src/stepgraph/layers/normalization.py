"""Normalization: `y = γ (x - mean) / sqrt(variance + ε) + β`; layers differ in the axes of mean and variance."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layer import Layer, ParameterOf, Scope, statistic
from stepgraph.tensor import Tensor, TensorDescriptor


class BatchNormalizationLayer(Layer):
    """`y = γ (x - mean) / sqrt(variance + ε) + β`, channel by channel, with the statistics of the whole batch.

    Training uses the mean and the (biased) variance of the batch and hands back

        running = momentum * running + (1 - momentum) * batch

    for both; inference uses `mean` and `variance` as they are. Without `gamma` it is 1, without `beta` 0.

    Shapes: `[batch, channels, ...] → ` the same, rank 2 to 5. `mean`, `variance`, `beta` and `gamma` hold `channels`
    numbers each, in any shape (`[channels]`, Apple's `[1, channels, 1, 1]`).

    Unlike `torch.nn.BatchNorm2d` the momentum is the share that is kept, and the running variance is the biased one.

    Example:
        >>> layer = BatchNormalizationLayer.create(16)
        >>> sorted(layer.parameters), sorted(layer.statistics)
        (['beta', 'gamma'], ['mean', 'variance'])
    """

    feature_channel_count: int
    mean: Tensor = statistic()
    variance: Tensor = statistic()
    beta: Tensor | None = None
    gamma: Tensor | None = None
    variance_epsilon: float = 1e-5
    momentum: float = 0.99

    default_label = "BatchNorm"
    beta_parameter = ParameterOf("beta")
    gamma_parameter = ParameterOf("gamma")

    def __post_init__(self) -> None:
        _check_settings(self, self.variance_epsilon, self.momentum)
        tensors = {"mean": self.mean, "variance": self.variance, "beta": self.beta, "gamma": self.gamma}
        _check_counts(self, self.feature_channel_count, tensors)

    @classmethod
    def create(
        cls,
        feature_channel_count: int,
        *,
        variance_epsilon: float = 1e-5,
        momentum: float = 0.99,
        label: str = "",
    ) -> BatchNormalizationLayer:
        """A layer that starts with mean 0, variance 1, beta 0 and gamma 1, each of shape `[channels]`."""
        mean, variance, beta, gamma = (Tensor((feature_channel_count,), fill=value) for value in (0.0, 1.0, 0.0, 1.0))
        settings = variance_epsilon, momentum
        return cls(feature_channel_count, mean, variance, beta, gamma, *settings, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """The source must have its channels on axis 1."""
        super().check(*sources)
        source, channels = sources[0], self.feature_channel_count
        if source.dimension_count < 2 or source.shape[1] != channels:
            raise ShapeError(
                self.where,
                f"the layer normalizes {channels} channels, the source {list(source.shape)} has other extents",
                source=source,
                fix=f"give a source [batch, {channels}, ...]",
            )

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """Normalizes with the batch's statistics in training, with the running ones otherwise."""
        channels, epsilon = self.feature_channel_count, self.variance_epsilon
        gamma, beta = (None if t is None else scope.array(t, channels) for t in (self.gamma, self.beta))
        if not scope.training:
            mean, variance = scope.array(self.mean, channels), scope.array(self.variance, channels)
            return F.batch_norm(x, mean, variance, gamma, beta, training=False, eps=epsilon)
        y, mean, variance = batch_normalize(x, gamma, beta, epsilon=epsilon)
        for tensor, batch in ((self.mean, mean), (self.variance, variance)):
            running = scope.array(tensor)
            scope.update(tensor, torch.lerp(batch.to(running.dtype).view_as(running), running, self.momentum))
        return y


def batch_normalize(
    x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, *, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`γ (x - mean) / sqrt(variance + ε) + β`, the mean and the biased variance over all axes but 1, in one pass.

    The operator gives `1 / sqrt(variance + ε)`, from which the variance is taken back instead of being computed again.
    """
    y, mean, inverse_deviation = torch.native_batch_norm(x, gamma, beta, None, None, True, 0.0, epsilon)
    return y, mean.detach(), (inverse_deviation.detach().pow(-2) - epsilon).clamp_min(0)


def _check_settings(layer: Layer, epsilon: float, momentum: float) -> None:
    if not 0 < epsilon < float("inf"):
        raise ArgumentError(layer.where, f"variance_epsilon is {epsilon}", fix="give a number > 0, for example 1e-5")
    if not 0 <= momentum <= 1:
        raise ArgumentError(layer.where, f"momentum is {momentum}, not between 0 and 1", fix="give for example 0.99")


def _check_counts(layer: Layer, channels: int, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.descriptor.element_count != channels:
            raise ShapeError(
                layer.where,
                f"{name} holds {tensor.descriptor.element_count} numbers, {channels} channels need {channels}",
                fix=f"give {name} of shape [{channels}] or [1, {channels}, 1, 1]",
                **{name: tensor.descriptor},
            )
