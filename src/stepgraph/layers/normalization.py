"""Normalization per channel: `y = γ (x - mean) / sqrt(variance + ε) + β`, over the batch or over each image."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.found import channels, found_at_node
from stepgraph.layers.layer import Layer, ParameterOf, Scope, statistic
from stepgraph.tensors.tensor import Tensor, TensorDescriptor


class BatchNormalizationLayer(Layer):
    """`y = γ (x - mean) / sqrt(variance + ε) + β`, per channel, with the statistics of the whole batch.

    Training uses the mean and the (biased) variance of the batch and updates

        running = momentum * running + (1 - momentum) * batch

    for both; inference uses `mean` and `variance`. `gamma` defaults to 1, `beta` to 0.

    Shapes: `[batch, channels, ...] → ` the same, rank 2 to 5. `mean`, `variance`, `beta` and `gamma` hold `channels`
    numbers each, in any shape (`[channels]`, Apple's `[1, channels, 1, 1]`).

    Unlike in `torch.nn.BatchNorm2d`, the momentum is the fraction that is kept, and the running variance is biased.

    A batch that `Parallel` cuts into shards is normalized shard by shard. With `synchronized`, which needs as many
    shards as ranks, the statistics are those of the whole batch, also in the gradient.

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
    synchronized: bool = False

    default_label = "BatchNorm"
    full_precision = True
    beta_parameter = ParameterOf("beta")
    gamma_parameter = ParameterOf("gamma")

    def __post_init__(self) -> None:
        require_epsilon(self, self.variance_epsilon)
        _require_momentum(self, self.momentum)
        tensors = {"mean": self.mean, "variance": self.variance, "beta": self.beta, "gamma": self.gamma}
        require_channel_counts(self, self.feature_channel_count, tensors)

    @classmethod
    @found_at_node("feature_channel_count", channels)
    def create(
        cls,
        feature_channel_count: int,
        *,
        variance_epsilon: float = 1e-5,
        momentum: float = 0.99,
        synchronized: bool = False,
        label: str = "",
    ) -> BatchNormalizationLayer:
        """A layer that starts with mean 0, variance 1, beta 0 and gamma 1, each of shape `[channels]`."""
        mean, variance, beta, gamma = (Tensor((feature_channel_count,), fill=value) for value in (0.0, 1.0, 0.0, 1.0))
        settings = variance_epsilon, momentum, synchronized
        return cls(feature_channel_count, mean, variance, beta, gamma, *settings, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source has its channels on axis 1."""
        super().check(*sources)
        require_channels(self, self.feature_channel_count, sources[0])

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """Normalizes with the batch's statistics in training, with the running ones otherwise."""
        channels, epsilon = self.feature_channel_count, self.variance_epsilon
        gamma, beta = (None if t is None else scope.array(t, channels) for t in (self.gamma, self.beta))
        if not scope.training:
            mean, variance = scope.array(self.mean, channels), scope.array(self.variance, channels)
            return F.batch_norm(x, mean, variance, gamma, beta, training=False, eps=epsilon)
        if self.synchronized and scope.shards > 1:
            y, mean, variance = synchronized_normalize(x, gamma, beta, epsilon=epsilon, total=scope.sum_over_ranks)
        else:
            y, mean, variance = batch_normalize(x, gamma, beta, epsilon=epsilon)
        _track(scope, self.momentum, {self.mean: mean, self.variance: variance})
        return y

    @property
    def is_synchronized(self) -> bool:
        """Whether its statistics are those of all ranks."""
        return self.synchronized


def batch_normalize(
    x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, *, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`γ (x - mean) / sqrt(variance + ε) + β`, the mean and the biased variance over all axes but 1, in one pass.

    The operator returns `1 / sqrt(variance + ε)`, from which the variance is recovered instead of recomputed.
    """
    gamma = gamma_beside(beta, gamma)
    y, mean, inverse_deviation = torch.native_batch_norm(x, gamma, beta, None, None, True, 0.0, epsilon)
    return y, mean.detach(), _variance(inverse_deviation, epsilon)


def synchronized_normalize(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    *,
    epsilon: float,
    total: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with the mean and the variance of the rows of all ranks, which may have different numbers of rows.

    The mean comes first and the variance from the distances to it: a sum of squares would lose digits.

    Args:
        x: the rows of this rank.
        gamma: γ, or None for 1.
        beta: β, or None for 0.
        epsilon: ε.
        total: the sum of an array over all ranks.
    """
    axes = [axis for axis in range(x.ndim) if axis != 1]
    channels = [1, -1, *[1] * (x.ndim - 2)]
    count = x.new_full((1,), x.numel() // x.shape[1])
    sums, counts = total(torch.cat([x.sum(axes), count])).split([x.shape[1], 1])
    mean = sums / counts
    centered = x - mean.view(channels)
    variance = total(centered.square().sum(axes)) / counts
    y = centered * (variance + epsilon).rsqrt().view(channels)
    y = y if gamma is None else y * gamma.view(channels)
    return y if beta is None else y + beta.view(channels), mean.detach(), variance.detach()


class InstanceNormalizationLayer(Layer):
    """`y = γ (x - mean) / sqrt(variance + ε) + β`, with the statistics of each channel of each image.

    With `mean` and `variance`, training updates

        running = momentum * running + (1 - momentum) * average over the batch

    for the instances' means and (biased) variances, and inference normalizes with them. Without, training and inference
    both use the statistics of the instance. `gamma` defaults to 1, `beta` to 0.

    Shapes: `[batch, channels, pixels...] → ` the same, rank 3 to 5. `mean`, `variance`, `beta` and `gamma` hold
    `channels` numbers each, in any shape (`[channels]`, Apple's `[1, channels, 1, 1]`).

    Unlike in `torch.nn.InstanceNorm2d`, the momentum is the fraction that is kept, and the running variance is biased.

    Example:
        >>> layer = InstanceNormalizationLayer.create(16)
        >>> sorted(layer.parameters), sorted(layer.statistics)
        (['beta', 'gamma'], [])
    """

    feature_channel_count: int
    mean: Tensor | None = statistic(default=None)
    variance: Tensor | None = statistic(default=None)
    beta: Tensor | None = None
    gamma: Tensor | None = None
    variance_epsilon: float = 1e-5
    momentum: float = 0.99

    default_label = "InstanceNorm"
    full_precision = True
    beta_parameter = ParameterOf("beta")
    gamma_parameter = ParameterOf("gamma")

    def __post_init__(self) -> None:
        require_epsilon(self, self.variance_epsilon)
        _require_momentum(self, self.momentum)
        tensors = {"mean": self.mean, "variance": self.variance, "beta": self.beta, "gamma": self.gamma}
        require_channel_counts(self, self.feature_channel_count, tensors)
        if (self.mean is None) != (self.variance is None):
            given, missing = ("variance", "mean") if self.mean is None else ("mean", "variance")
            raise ArgumentError(self.where, f"{given} was passed without {missing}", fix="pass both, or neither")

    @classmethod
    @found_at_node("feature_channel_count", channels)
    def create(
        cls,
        feature_channel_count: int,
        *,
        tracks_running_statistics: bool = False,
        variance_epsilon: float = 1e-5,
        momentum: float = 0.99,
        label: str = "",
    ) -> InstanceNormalizationLayer:
        """A layer that starts with beta 0 and gamma 1 and, if it tracks statistics, mean 0 and variance 1."""
        mean, variance, beta, gamma = (Tensor((feature_channel_count,), fill=value) for value in (0.0, 1.0, 0.0, 1.0))
        settings = beta, gamma, variance_epsilon, momentum
        if not tracks_running_statistics:
            return cls(feature_channel_count, None, None, *settings, label=label)
        return cls(feature_channel_count, mean, variance, *settings, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source has its channels on axis 1, followed by pixels."""
        super().check(*sources)
        require_channels(self, self.feature_channel_count, sources[0], least=3)

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """Normalizes with each instance's statistics or, in inference, with the running ones if there are any."""
        channels, epsilon = self.feature_channel_count, self.variance_epsilon
        gamma, beta = (None if t is None else scope.array(t, channels) for t in (self.gamma, self.beta))
        if self.mean is None or self.variance is None:
            return instance_normalize(x, gamma, beta, epsilon=epsilon)[0]
        if not scope.training:
            mean, variance = scope.array(self.mean, channels), scope.array(self.variance, channels)
            return F.batch_norm(x, mean, variance, gamma, beta, training=False, eps=epsilon)
        y, mean, variance = instance_normalize(x, gamma, beta, epsilon=epsilon)
        _track(scope, self.momentum, {self.mean: mean.mean(0), self.variance: variance.mean(0)})
        return y


def instance_normalize(
    x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, *, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`γ (x - mean) / sqrt(variance + ε) + β`, mean and biased variance `[batch, channels]` over all other axes.

    It is group normalization with one channel per group: one pass, where PyTorch's own function repeats γ and β.
    """
    rows, channels = x.shape[:2]
    sizes = rows, channels, x[0, 0].numel(), channels
    gamma = gamma_beside(beta, gamma)
    y, mean, inverse_deviation = torch.native_group_norm(x.contiguous(), gamma, beta, *sizes, epsilon)
    return y, mean.detach(), _variance(inverse_deviation, epsilon)


def gamma_beside(beta: torch.Tensor | None, gamma: torch.Tensor | None) -> torch.Tensor | None:
    """γ, or ones if there is only β: PyTorch's gradients (groups; on CUDA also the batch) fail with β alone."""
    return torch.ones_like(beta) if gamma is None and beta is not None else gamma


def _variance(inverse_deviation: torch.Tensor, epsilon: float) -> torch.Tensor:
    return (inverse_deviation.detach().pow(-2) - epsilon).clamp_min(0)


def _track(scope: Scope, momentum: float, found: dict[Tensor, torch.Tensor]) -> None:
    """Updates each statistic to `momentum * running + (1 - momentum) * found`."""
    for tensor, value in found.items():
        running = scope.array(tensor)
        scope.update(tensor, torch.lerp(value.to(running.dtype).view_as(running), running, momentum))


def require_epsilon(layer: Layer, epsilon: float) -> None:
    """Rejects an ε that would not prevent a division by zero."""
    if not 0 < epsilon < float("inf"):
        raise ArgumentError(layer.where, f"variance_epsilon is {epsilon}", fix="use a number > 0, for example 1e-5")


def require_channels(layer: Layer, channels: int, source: TensorDescriptor, least: int = 2) -> None:
    """Rejects a source without `channels` on axis 1, or with fewer than `least` axes."""
    if source.dimension_count < least or source.shape[1] != channels:
        raise ShapeError(
            layer.where,
            f"the layer normalizes {channels} channels, but the source {list(source.shape)} has a different shape",
            source=source,
            fix=f"pass a source [batch, {channels}, {'...' if least == 2 else 'pixels...'}]",
        )


def require_channel_counts(layer: Layer, channels: int, tensors: dict[str, Tensor | None]) -> None:
    """Rejects an invalid number of channels, and tensors that do not hold one number per channel."""
    if isinstance(channels, bool) or not isinstance(channels, int) or channels < 1:
        raise ArgumentError(layer.where, f"feature_channel_count is {channels!r}", fix="pass an integer ≥ 1")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.descriptor.element_count != channels:
            raise ShapeError(
                layer.where,
                f"{name} holds {tensor.descriptor.element_count} numbers, but {channels} channels need {channels}",
                fix=f"pass {name} of shape [{channels}] or [1, {channels}, 1, 1]",
                **{name: tensor.descriptor},
            )


def _require_momentum(layer: Layer, momentum: float) -> None:
    if not 0 <= momentum <= 1:
        raise ArgumentError(layer.where, f"momentum is {momentum}, not between 0 and 1", fix="use for example 0.99")
