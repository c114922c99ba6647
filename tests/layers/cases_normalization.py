"""Rows of the conformance table: normalization."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.layer_normalization import (
    GroupNormalizationLayer,
    LayerNormalizationLayer,
    RMSNormalizationLayer,
)
from stepgraph.layers.normalization import BatchNormalizationLayer, InstanceNormalizationLayer
from stepgraph.tensors.tensor import Tensor
from tests.layers.case import Bad, Case, Source

CHANNELS = 3


def batch_normalization(packed: bool = False, scaled: bool = True, epsilon: float = 1e-5) -> BatchNormalizationLayer:
    """A layer with statistics and parameters that are none of the defaults."""
    generator = np.random.default_rng(5)
    shape = (1, CHANNELS, 1, 1) if packed else (CHANNELS,)
    values = [generator.uniform(0.5, 2.0, shape).astype(np.float32) for _ in range(4)]
    mean, variance, beta, gamma = (Tensor(shape, data=value) for value in values)
    if not scaled:
        return BatchNormalizationLayer(CHANNELS, mean, variance, variance_epsilon=epsilon)
    return BatchNormalizationLayer(CHANNELS, mean, variance, beta, gamma, epsilon, 0.9)


def normalize(
    x: np.ndarray, mean: np.ndarray, variance: np.ndarray, beta: object, gamma: object, epsilon: float
) -> np.ndarray:
    def by_channel(value: object) -> np.ndarray:
        return np.asarray(value).reshape(1, -1, *[1] * (x.ndim - 2))

    deviation = np.sqrt(by_channel(variance) + epsilon)
    return by_channel(gamma) * (x - by_channel(mean)) / deviation + by_channel(beta)


def with_batch_statistics(epsilon: float) -> Callable[..., np.ndarray]:
    """The equation with mean and biased variance of each channel over the batch."""

    def reference(x: np.ndarray, *, beta: object = 0.0, gamma: object = 1.0, **_: np.ndarray) -> np.ndarray:
        channels = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
        count = channels.shape[1]
        mean = channels.sum(1) / count
        variance = ((channels - mean[:, None]) ** 2).sum(1) / count
        return normalize(x, mean, variance, beta, gamma, epsilon)

    return reference


def with_running_statistics(
    x: np.ndarray, *, mean: np.ndarray, variance: np.ndarray, beta: object = 0.0, gamma: object = 1.0
) -> np.ndarray:
    return normalize(x, mean, variance, beta, gamma, 1e-5)


def training_twin(x: torch.Tensor, *, beta: torch.Tensor, gamma: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, gamma.reshape(-1), beta.reshape(-1), training=True)


def inference_twin(
    x: torch.Tensor, *, mean: torch.Tensor, variance: torch.Tensor, beta: torch.Tensor, gamma: torch.Tensor
) -> torch.Tensor:
    return F.batch_norm(x, mean.reshape(-1), variance.reshape(-1), gamma.reshape(-1), beta.reshape(-1))


def shifted(*shape: int) -> Source:
    """Normal values around 1 with a spread of 2."""
    return lambda generator: 1 + 2 * generator.standard_normal(shape)


def tensors(count: int, *shape: int) -> list[Tensor]:
    """Tensors with numbers that are none of the defaults."""
    generator = np.random.default_rng(6)
    return [Tensor(shape, data=generator.uniform(0.5, 2.0, shape).astype(np.float32)) for _ in range(count)]


def instance_normalization(
    packed: bool = False, tracks: bool = True, scaled: bool = True, epsilon: float = 1e-5
) -> InstanceNormalizationLayer:
    mean, variance, beta, gamma = tensors(4, *((1, CHANNELS, 1, 1) if packed else (CHANNELS,)))
    running = {"mean": mean, "variance": variance} if tracks else {}
    scale = {"beta": beta, "gamma": gamma} if scaled else {}
    return InstanceNormalizationLayer(CHANNELS, **running, **scale, variance_epsilon=epsilon)


def group_normalization(groups: int, channels: int = 6, given: str = "beta gamma", packed: bool = False) -> Any:
    named = dict(zip(("beta", "gamma"), tensors(2, *((1, channels, 1, 1) if packed else (channels,))), strict=True))
    return GroupNormalizationLayer(channels, groups, **{name: named[name] for name in given.split()})


def layer_normalization(*shape: int, given: str = "beta gamma", epsilon: float = 1e-5) -> LayerNormalizationLayer:
    named = dict(zip(("beta", "gamma"), tensors(2, *shape), strict=True))
    return LayerNormalizationLayer(shape, **{name: named[name] for name in given.split()}, variance_epsilon=epsilon)


def by_groups(groups: int | None, epsilon: float = 1e-5) -> Callable[..., np.ndarray]:
    """Mean and biased variance of each group of channels of each sample, one after the other; None: each channel."""

    def reference(x: np.ndarray, *, beta: Any = 0.0, gamma: Any = 1.0, **_: np.ndarray) -> np.ndarray:
        y, width = np.empty_like(x), x.shape[1] // (groups or x.shape[1])
        for sample in range(x.shape[0]):
            for first in range(0, x.shape[1], width):
                values = x[sample, first : first + width]
                mean = values.sum() / values.size
                deviation = np.sqrt(((values - mean) ** 2).sum() / values.size + epsilon)
                y[sample, first : first + width] = (values - mean) / deviation
        return normalize(y, np.zeros(1), np.ones(1), beta, gamma, 0.0)

    return reference


def over_last(axes: int, epsilon: float = 1e-5) -> Callable[..., np.ndarray]:
    """Mean and biased variance of the last axes, row by row."""

    def reference(x: np.ndarray, *, beta: Any = 0.0, gamma: Any = 1.0) -> np.ndarray:
        rows = x.reshape(int(np.prod(x.shape[: x.ndim - axes])), -1)
        y = np.stack([(row - row.mean()) / np.sqrt(((row - row.mean()) ** 2).mean() + epsilon) for row in rows])
        return (np.ravel(gamma) * y + np.ravel(beta)).reshape(x.shape)

    return reference


def rms_normalization(*shape: int, scaled: bool = True, epsilon: float = 1e-6) -> RMSNormalizationLayer:
    values = np.random.default_rng(6).uniform(0.5, 2.0, shape).astype(np.float32)
    return RMSNormalizationLayer(shape, Tensor(shape, data=values) if scaled else None, epsilon)


def by_root_mean_square(axes: int, epsilon: float = 1e-6) -> Callable[..., np.ndarray]:
    """Row by row: divided by the root of the mean square."""

    def reference(x: np.ndarray, *, gamma: Any = 1.0) -> np.ndarray:
        rows = x.reshape(int(np.prod(x.shape[: x.ndim - axes])), -1)
        y = np.stack([row / np.sqrt(row @ row / len(row) + epsilon) for row in rows])
        return (np.ravel(gamma) * y).reshape(x.shape)

    return reference


def rms_twin(*shape: int, epsilon: float = 1e-6) -> Callable[..., torch.Tensor]:
    def call(x: torch.Tensor, *, gamma: torch.Tensor | None = None) -> torch.Tensor:
        module = torch.nn.RMSNorm(shape, eps=epsilon, elementwise_affine=gamma is not None, dtype=x.dtype)
        return torch.func.functional_call(module, {} if gamma is None else {"weight": gamma}, (x,))

    return call


def instance_twin(x: torch.Tensor, *, beta: Any = None, gamma: Any = None, **_: torch.Tensor) -> torch.Tensor:
    beta, gamma = (None if one is None else one.reshape(-1) for one in (beta, gamma))
    return F.instance_norm(x, weight=gamma, bias=beta)


def group_twin(groups: int) -> Callable[..., torch.Tensor]:
    def twin(x: torch.Tensor, *, beta: Any = None, gamma: Any = None) -> torch.Tensor:
        beta, gamma = (None if one is None else one.reshape(-1) for one in (beta, gamma))
        return F.group_norm(x, groups, gamma, beta)

    return twin


def layer_twin(*shape: int, epsilon: float = 1e-5) -> Callable[..., torch.Tensor]:
    return lambda x, beta=None, gamma=None: F.layer_norm(x, shape, gamma, beta, epsilon)


BAD = (
    Bad(((2, 4, 5, 5),), ShapeError, "normalizes 3 channels"),
    Bad(((3,),), ShapeError, "normalizes 3 channels"),
    Bad((np.zeros((2, 3, 4, 4), np.int32),), DataTypeError, "int32"),
)

TRAINING = with_batch_statistics(1e-5)
CASES: list[Case] = [
    Case("batch-normalization", batch_normalization, (shifted(4, 3, 2, 3),), TRAINING, training_twin, bad=BAD),
    Case("batch-normalization-rank-2", batch_normalization, (shifted(5, 3),), TRAINING, training_twin),
    Case("batch-normalization-rank-3", batch_normalization, (shifted(4, 3, 4),), TRAINING, training_twin),
    Case("batch-normalization-rank-5", batch_normalization, (shifted(2, 3, 2, 2, 2),), TRAINING, training_twin),
    Case(
        "batch-normalization-packed",
        lambda: batch_normalization(packed=True),
        (shifted(4, 3, 2, 3),),
        TRAINING,
        training_twin,
    ),
    Case(
        "batch-normalization-without-parameters",
        lambda: batch_normalization(scaled=False),
        (shifted(4, 3, 2, 3),),
        TRAINING,
        lambda x, **_: F.batch_norm(x, None, None, training=True),
    ),
    Case(
        "batch-normalization-large-epsilon",
        lambda: batch_normalization(scaled=False, epsilon=0.5),
        (shifted(4, 3, 2, 3),),
        with_batch_statistics(0.5),
        lambda x, **_: F.batch_norm(x, None, None, training=True, eps=0.5),
    ),
    Case(
        "batch-normalization-inference",
        batch_normalization,
        (shifted(4, 3, 2, 3),),
        with_running_statistics,
        inference_twin,
        training=False,
    ),
    Case(
        "batch-normalization-inference-packed",
        lambda: batch_normalization(packed=True),
        (shifted(3, 3),),
        with_running_statistics,
        inference_twin,
        training=False,
    ),
    Case(
        "batch-normalization-inference-without-parameters",
        lambda: batch_normalization(scaled=False),
        (shifted(4, 3, 2, 3),),
        with_running_statistics,
        training=False,
    ),
    Case(
        "instance-normalization",
        instance_normalization,
        (shifted(2, 3, 3, 4),),
        by_groups(None),
        instance_twin,
        bad=(
            Bad(((2, 4, 5, 5),), ShapeError, "normalizes 3 channels"),
            Bad(((2, 3),), ShapeError, "pass a source [batch, 3, pixels...]"),
            Bad((np.zeros((2, 3, 4, 4), np.int32),), DataTypeError, "int32"),
        ),
    ),
    Case("instance-normalization-rank-3", instance_normalization, (shifted(2, 3, 5),), by_groups(None), instance_twin),
    Case(
        "instance-normalization-rank-5",
        instance_normalization,
        (shifted(2, 3, 2, 2, 2),),
        by_groups(None),
        instance_twin,
    ),
    Case(
        "instance-normalization-packed",
        lambda: instance_normalization(packed=True),
        (shifted(2, 3, 3, 4),),
        by_groups(None),
        instance_twin,
    ),
    Case(
        "instance-normalization-without-parameters",
        lambda: instance_normalization(scaled=False, tracks=False, epsilon=0.5),
        (shifted(2, 3, 3, 4),),
        by_groups(None, 0.5),
        lambda x: F.instance_norm(x, eps=0.5),
    ),
    Case(
        "instance-normalization-inference",
        instance_normalization,
        (shifted(2, 3, 3, 4),),
        with_running_statistics,
        inference_twin,
        training=False,
    ),
    Case(
        "instance-normalization-inference-packed",
        lambda: instance_normalization(packed=True),
        (shifted(2, 3, 3, 4),),
        with_running_statistics,
        inference_twin,
        training=False,
    ),
    Case(
        "instance-normalization-inference-without-statistics",
        lambda: instance_normalization(tracks=False),
        (shifted(2, 3, 3, 4),),
        by_groups(None),
        instance_twin,
        training=False,
    ),
    Case(
        "group-normalization",
        lambda: group_normalization(3),
        (shifted(2, 6, 2, 3),),
        by_groups(3),
        group_twin(3),
        bad=(
            Bad(((2, 3, 5, 5),), ShapeError, "normalizes 6 channels"),
            Bad(((6,),), ShapeError, "normalizes 6 channels"),
            Bad((np.zeros((2, 6), bool),), DataTypeError, "boolean"),
        ),
    ),
    Case("group-normalization-one", lambda: group_normalization(1), (shifted(2, 6, 2),), by_groups(1), group_twin(1)),
    Case("group-normalization-each", lambda: group_normalization(6), (shifted(2, 6, 4),), by_groups(6), group_twin(6)),
    Case("group-normalization-rank-2", lambda: group_normalization(2), (shifted(3, 6),), by_groups(2), group_twin(2)),
    Case(
        "group-normalization-rank-5",
        lambda: group_normalization(2, packed=True),
        (shifted(2, 6, 2, 1, 2),),
        by_groups(2),
        group_twin(2),
        training=False,
    ),
    *(
        Case(
            f"group-normalization-with-{given or 'nothing'}",
            lambda given=given: group_normalization(3, given=given),
            (shifted(2, 6, 2, 3),),
            by_groups(3),
            None if given == "beta" else group_twin(3),  # PyTorch 2.13 has no gradient for that
        )
        for given in ("beta", "gamma", "")
    ),
    *(
        Case(
            f"{name}-normalization-with-{field}",
            lambda make=make, field=field: make(CHANNELS, *tensors(2, CHANNELS), **{field: tensors(3, CHANNELS)[2]}),
            (shifted(3, 3, 2, 2),),
            reference,
        )
        for name, make, reference in (
            ("batch", BatchNormalizationLayer, TRAINING),
            ("instance", InstanceNormalizationLayer, by_groups(None)),
        )
        for field in ("beta", "gamma")
    ),
    Case(
        "layer-normalization",
        lambda: layer_normalization(5),
        (shifted(2, 3, 5),),
        over_last(1),
        layer_twin(5),
        bad=(
            Bad(((2, 3, 4),), ShapeError, "the layer normalizes [5], but the source ends in [4]"),
            Bad((np.zeros((2, 5), np.int64),), DataTypeError, "int64"),
        ),
    ),
    Case(
        "layer-normalization-two-axes",
        lambda: layer_normalization(3, 4),
        (shifted(2, 2, 3, 4),),
        over_last(2),
        layer_twin(3, 4),
        bad=(Bad(((4,),), ShapeError, "the layer normalizes [3, 4], but the source ends in [4]"),),
    ),
    Case(
        "layer-normalization-three-axes",
        lambda: layer_normalization(2, 3, 2),
        (shifted(3, 2, 3, 2),),
        over_last(3),
        layer_twin(2, 3, 2),
        training=False,
    ),
    Case(
        "layer-normalization-large-epsilon",
        lambda: layer_normalization(5, given="", epsilon=0.5),
        (shifted(2, 3, 5),),
        over_last(1, 0.5),
        layer_twin(5, epsilon=0.5),
    ),
    *(
        Case(
            f"layer-normalization-with-{given}",
            lambda given=given: layer_normalization(5, given=given),
            (shifted(4, 5),),
            over_last(1),
            layer_twin(5),
        )
        for given in ("beta", "gamma")
    ),
    Case(
        "rms-normalization",
        lambda: rms_normalization(5),
        (shifted(2, 3, 5),),
        by_root_mean_square(1),
        rms_twin(5),
        bad=(
            Bad(((2, 3, 4),), ShapeError, "RMSNormalizationLayer 'RMSNorm'"),
            Bad(((2, 3, 4),), ShapeError, "the layer normalizes [5], but the source ends in [4]"),
            Bad((np.zeros((2, 5), np.int64),), DataTypeError, "int64"),
        ),
    ),
    Case(
        "rms-normalization-two-axes-large-epsilon",
        lambda: rms_normalization(3, 4, scaled=False, epsilon=0.5),
        (shifted(2, 2, 3, 4),),
        by_root_mean_square(2, 0.5),
        rms_twin(3, 4, epsilon=0.5),
        training=False,
    ),
]
