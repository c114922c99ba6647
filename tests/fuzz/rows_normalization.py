"""Rows of the normalizations, written as `γ (x - mean) / sqrt(variance + ε) + β`."""

from __future__ import annotations

from collections.abc import Sequence

import stepgraph as sg
from tests.fuzz.draw import Draw
from tests.fuzz.recipe import Settings
from tests.fuzz.row import Array, Arrays, Context, Drawn, Row, Tensors

EPSILON = 1e-2  # large enough that samples that are all alike do not blow rounding up


def _draw_channels(draw: Draw, least: int, statistics: bool) -> Drawn | None:
    x = draw.floating(least=least)
    if x is None:
        return None
    shape = draw.values[x].shape
    if shape[0] * shape[2:].numel() < 3 and statistics:  # the variance of one number is rounding
        return None
    if least == 3 and shape[2:].numel() < 2:
        return None
    channels = shape[1]
    settings: Settings = {"channels": channels}
    if statistics:
        settings["momentum"] = draw.choose([0.9, 0.99, 0.5])
    parameters = {}
    if statistics:
        parameters |= {"mean": ((channels,), "mean"), "variance": ((channels,), "variance")}
    return Drawn((x,), settings, parameters | _beta_gamma(draw, (channels,)))


def _beta_gamma(draw: Draw, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {"beta": (shape, "bias")} if draw.chance(0.7) else {}
    return found | ({"gamma": (shape, "scale")} if draw.chance(0.7) else {})


def _normalized(x: Array, mean: Array, variance: Array, parameters: Arrays, shape: Sequence[int]) -> Array:
    y = (x - mean) / (variance + EPSILON) ** 0.5
    gamma, beta = parameters.get("gamma"), parameters.get("beta")
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


def _moments(x: Array, axes: Sequence[int]) -> tuple[Array, Array]:
    mean = x.mean(tuple(axes), keepdim=True)
    return mean, ((x - mean) ** 2).mean(tuple(axes), keepdim=True)


def _track(context: Context, settings: Settings, parameters: Arrays, mean: Array, variance: Array) -> None:
    kept = settings["momentum"]
    for name, new in (("mean", mean), ("variance", variance)):
        old = parameters[name]
        context.updates[name] = kept * old + (1 - kept) * new.detach().reshape(old.shape)


def _normalize_batch(context: Context, settings: Settings, parameters: Arrays, x: Array) -> Array:
    shape = (1, -1, *[1] * (x.ndim - 2))
    if not context.training:
        mean, variance = parameters["mean"].reshape(shape), parameters["variance"].reshape(shape)
    else:
        mean, variance = _moments(x, [axis for axis in range(x.ndim) if axis != 1])
        _track(context, settings, parameters, mean, variance)
    return _normalized(x, mean, variance, parameters, shape)


def _build_batch(settings: Settings, tensors: Tensors) -> sg.Layer:
    return sg.BatchNormalizationLayer(
        settings["channels"],
        tensors["mean"],
        tensors["variance"],
        tensors.get("beta"),
        tensors.get("gamma"),
        EPSILON,
        settings["momentum"],
    )


def _draw_instance(draw: Draw) -> Drawn | None:
    return _draw_channels(draw, 3, draw.chance(0.5))


def _normalize_instance(context: Context, settings: Settings, parameters: Arrays, x: Array) -> Array:
    shape = (1, -1, *[1] * (x.ndim - 2))
    if "mean" in parameters and not context.training:
        mean, variance = parameters["mean"].reshape(shape), parameters["variance"].reshape(shape)
    else:
        mean, variance = _moments(x, range(2, x.ndim))
        if "mean" in parameters:
            _track(context, settings, parameters, mean.mean(0), variance.mean(0))
    return _normalized(x, mean, variance, parameters, shape)


def _build_instance(settings: Settings, tensors: Tensors) -> sg.Layer:
    names = {name: tensors.get(name) for name in ("mean", "variance", "beta", "gamma")}
    momentum = {k: v for k, v in settings.items() if k == "momentum"}
    return sg.InstanceNormalizationLayer(settings["channels"], **names, variance_epsilon=EPSILON, **momentum)


def _draw_group(draw: Draw) -> Drawn | None:
    drawn = _draw_channels(draw, 2, statistics=False)
    if drawn is None:
        return None
    channels, (source,) = drawn.settings["channels"], drawn.sources
    pixels = draw.values[source].shape[2:].numel()
    fitting = [g for g in range(1, channels + 1) if channels % g == 0 and channels // g * pixels > 1]
    if not fitting:
        return None
    drawn.settings["groups"] = draw.choose(fitting)
    return drawn


def _normalize_group(_: Context, settings: Settings, parameters: Arrays, x: Array) -> Array:
    grouped = x.reshape(x.shape[0], settings["groups"], -1)
    mean, variance = _moments(grouped, [2])
    flat = (grouped - mean) / (variance + EPSILON) ** 0.5
    shape = (1, -1, *[1] * (x.ndim - 2))
    y = flat.reshape(x.shape)
    gamma, beta = parameters.get("gamma"), parameters.get("beta")
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


def _build_group(settings: Settings, tensors: Tensors) -> sg.Layer:
    return sg.GroupNormalizationLayer(
        settings["channels"], settings["groups"], tensors.get("beta"), tensors.get("gamma"), EPSILON
    )


def _draw_layer(draw: Draw) -> Drawn | None:
    x = draw.floating(least=2)
    if x is None:
        return None
    shape = tuple(draw.values[x].shape)
    first = draw.whole(1, len(shape) - 1)
    normalized = shape[first:]
    if len([n for n in normalized if n > 1]) == 0:
        return None
    return Drawn((x,), {"shape": normalized}, _beta_gamma(draw, normalized))


def _normalize_layer(_: Context, settings: Settings, parameters: Arrays, x: Array) -> Array:
    count = len(settings["shape"])
    mean, variance = _moments(x, range(x.ndim - count, x.ndim))
    return _normalized(x, mean, variance, parameters, settings["shape"])


def _draw_rms(draw: Draw) -> Drawn | None:
    x = draw.floating(least=2)
    if x is None:
        return None
    shape = tuple(draw.values[x].shape)
    normalized = shape[draw.whole(1, len(shape) - 1) :]
    return Drawn((x,), {"shape": normalized}, {"gamma": (normalized, "scale")} if draw.chance(0.7) else {})


def _normalize_rms(_: Context, settings: Settings, parameters: Arrays, x: Array) -> Array:
    axes = tuple(range(x.ndim - len(settings["shape"]), x.ndim))
    y = x / ((x * x).mean(axes, keepdim=True) + EPSILON) ** 0.5
    return y * parameters["gamma"].reshape(settings["shape"]) if "gamma" in parameters else y


ROWS = {
    "batch normalization": Row(
        sg.BatchNormalizationLayer,
        lambda draw: _draw_channels(draw, 2, statistics=True),
        _build_batch,
        _normalize_batch,
        image=True,
        statistics=("mean", "variance"),
    ),
    "instance normalization": Row(
        sg.InstanceNormalizationLayer,
        _draw_instance,
        _build_instance,
        _normalize_instance,
        image=True,
        weight=0.7,
        statistics=("mean", "variance"),
    ),
    "group normalization": Row(
        sg.GroupNormalizationLayer, _draw_group, _build_group, _normalize_group, image=True, weight=0.7
    ),
    "RMS normalization": Row(
        sg.RMSNormalizationLayer,
        _draw_rms,
        lambda settings, tensors: sg.RMSNormalizationLayer(settings["shape"], tensors.get("gamma"), EPSILON),
        _normalize_rms,
        image=True,
        weight=0.7,
    ),
    "layer normalization": Row(
        sg.LayerNormalizationLayer,
        _draw_layer,
        lambda settings, tensors: sg.LayerNormalizationLayer(
            settings["shape"], tensors.get("beta"), tensors.get("gamma"), EPSILON
        ),
        _normalize_layer,
        image=True,
        weight=0.7,
    ),
}
