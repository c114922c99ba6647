"""Rows of layers for images, sequences and volumes: convolution, pooling, upsampling, padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

import stepgraph as sg
from tests.fuzz.draw import Draw
from tests.fuzz.recipe import Settings
from tests.fuzz.row import Array, Arrays, Context, Drawn, Row, Tensors

Pair = tuple[int, int]
CONVOLUTIONS = ("STANDARD", "TRANSPOSED", "DEPTHWISE")
POOLINGS = ("MAX", "AVERAGE", "L2_NORM")
SAMPLES = ("NEAREST", "LINEAR")
PADDINGS = {"ZERO": "constant", "CONSTANT": "constant", "REFLECT": "reflect", "SYMMETRIC": "symmetric"}


def _draw_window(draw: Draw, sizes: Sequence[int]) -> Settings:
    """Kernel sizes, strides, dilation rates and padding whose window fits an image."""
    policy = draw.choose(["SAME", "VALID", "USE_PADDING_SIZE"])

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.whole(low, high) for _ in sizes)

    still = (1,) * len(sizes)
    settings: Settings = {
        "kernel_sizes": still if draw.chance(0.2) else each(1, 4),
        "strides": each(1, 3) if draw.chance(0.5) else still,
        "dilation_rates": each(1, 2) if draw.chance(0.3) else still,
        "padding_policy": policy,
    }
    if policy == "USE_PADDING_SIZE":
        settings["padding_sizes"] = each(0, 2)
    return settings


def _draw_source(draw: Draw) -> int | None:
    """An image, a sequence `[batch, channels, steps]` or, seldom, a new volume."""
    if draw.chance(0.1):
        return draw.input((0, draw.choose([1, 2]), draw.choose([2, 3]), draw.choose([2, 3]), draw.choose([3, 4])))
    return draw.floating((4, 4, 3) if draw.chance(0.3) else 4)


def _fits(settings: Settings, sizes: Sequence[int], pooling: bool) -> bool:
    """Whether the window fits the padded image, and in pooling finds a pixel of the image everywhere."""
    for axis, size in enumerate(sizes):
        kernel, stride, dilation = (settings[k][axis] for k in ("kernel_sizes", "strides", "dilation_rates"))
        before, after = _padding(settings, axis, size)
        span = (kernel - 1) * dilation + 1
        if size + before + after < span:
            return False
        starts = range(-before, size + after - span + 1, stride)
        if pooling and any(not any(0 <= s + k * dilation < size for k in range(kernel)) for s in starts):
            return False
    return True


def _padding(settings: Settings, axis: int, size: int) -> Pair:
    """Pixels before and after one axis."""
    kernel, stride, dilation = (settings[k][axis] for k in ("kernel_sizes", "strides", "dilation_rates"))
    match settings["padding_policy"]:
        case "VALID":
            return 0, 0
        case "USE_PADDING_SIZE":
            return (settings["padding_sizes"][axis],) * 2
    span = (kernel - 1) * dilation + 1
    total = max((-(-size // stride) - 1) * stride + span - size, 0)
    return total // 2, total - total // 2


def _window(settings: Settings) -> Settings:
    """The settings as stepgraph's descriptors take them."""
    chosen = {k: v for k, v in settings.items() if k in ("strides", "dilation_rates", "padding_sizes")}
    policy = sg.PaddingPolicy[settings["padding_policy"]]
    return chosen | {"padding_policy": policy, "dimensions": len(settings["kernel_sizes"])}


# Convolution


def _draw_convolution(draw: Draw) -> Drawn | None:
    x = _draw_source(draw)
    if x is None:
        return None
    _, inputs, *sizes = draw.values[x].shape
    kind = draw.choose(["STANDARD", "STANDARD", "TRANSPOSED", "DEPTHWISE"])
    settings = {"type": kind, "inputs": inputs} | _draw_window(draw, sizes)
    if kind == "DEPTHWISE":
        settings |= {"outputs": inputs * draw.whole(1, 2), "groups": 1}
    else:
        groups = draw.choose([g for g in (1, 1, 2, 3) if inputs % g == 0])
        settings |= {"outputs": groups * draw.whole(1, 3), "groups": groups}
    if kind == "TRANSPOSED":
        lost = [sum(_lost(settings, axis)) for axis in range(len(sizes))]
        left = [(n - 1) * settings["strides"][i] + _span(settings, i) - lost[i] for i, n in enumerate(sizes)]
        if min(left) < 1:
            return None
    elif not _fits(settings, sizes, pooling=False):
        return None
    parameters = {"weights": (_weights_shape(settings), "weight")}
    if draw.chance(0.6):
        parameters["biases"] = ((settings["outputs"],), "bias")
    return Drawn((x,), settings, parameters)


def _weights_shape(settings: Settings) -> tuple[int, ...]:
    per_group = 1 if settings["type"] == "DEPTHWISE" else settings["inputs"] // settings["groups"]
    return settings["outputs"], per_group, *settings["kernel_sizes"]


def _span(settings: Settings, axis: int) -> int:
    return (settings["kernel_sizes"][axis] - 1) * settings["dilation_rates"][axis] + 1


def _lost(settings: Settings, axis: int) -> Pair:
    """Pixels that a transposed result loses before and after; a negative number is a gain."""
    if settings["padding_policy"] != "SAME":
        return _padding(settings, axis, 0)
    total = _span(settings, axis) - settings["strides"][axis]
    return max(total, 0) // 2, total - max(total, 0) // 2


def _build_convolution(settings: Settings, tensors: Tensors) -> sg.Layer:
    descriptor = sg.ConvolutionDescriptor(
        settings["kernel_sizes"],
        settings["inputs"],
        settings["outputs"],
        type=sg.ConvolutionType[settings["type"]],
        group_count=settings["groups"],
        **_window(settings),
    )
    return sg.ConvolutionLayer(tensors["weights"], tensors.get("biases"), descriptor)


def _convolve(_: Context, settings: Settings, parameters: Arrays, x: Array) -> Array:
    weights = parameters["weights"].reshape(_weights_shape(settings))
    stride, dilation = settings["strides"], settings["dilation_rates"]
    groups = settings["inputs"] if settings["type"] == "DEPTHWISE" else settings["groups"]
    if settings["type"] == "TRANSPOSED":
        outputs = settings["outputs"]
        turned = weights.reshape(groups, outputs // groups, -1, *weights.shape[2:]).transpose(1, 2)
        turned = turned.reshape(settings["inputs"], outputs // groups, *weights.shape[2:])
        function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(stride) - 1]
        y = function(x, turned, None, stride, 0, 0, groups, dilation)
        y = F.pad(y, [-n for axis in reversed(range(len(stride))) for n in _lost(settings, axis)])
    else:
        function = (F.conv1d, F.conv2d, F.conv3d)[len(stride) - 1]
        y = function(F.pad(x, _sides(settings, x)), weights, None, stride, 0, dilation, groups)
    biases = parameters.get("biases")
    return y if biases is None else y + biases.reshape(1, -1, *[1] * len(stride))


def _sides(settings: Settings, x: Array) -> list[int]:
    """Pixels added before and after each axis, the last axis first, as PyTorch takes them."""
    axes = reversed(range(x.ndim - 2))
    return [n for axis in axes for n in _padding(settings, axis, x.shape[2 + axis])]


# Pooling


def _draw_pooling(draw: Draw) -> Drawn | None:
    x = _draw_source(draw)
    if x is None:
        return None
    settings = {"type": draw.choose(POOLINGS)} | _draw_window(draw, draw.values[x].shape[2:])
    if settings["type"] == "AVERAGE":
        settings["count_includes_padding"] = draw.chance(0.5)
    return Drawn((x,), settings) if _fits(settings, draw.values[x].shape[2:], pooling=True) else None


def _build_pooling(settings: Settings, _: Tensors) -> sg.Layer:
    counts = {k: v for k, v in settings.items() if k == "count_includes_padding"}
    kind = sg.PoolingType[settings["type"]]
    window = _window(settings)
    return sg.PoolingLayer(
        sg.PoolingDescriptor(kind, settings["kernel_sizes"], window.pop("strides"), **window, **counts)
    )


def _pool(_: Context, settings: Settings, __: Arrays, x: Array) -> Array:
    sides = _sides(settings, x)
    outside = -torch.inf if settings["type"] == "MAX" else 0.0
    taps = _taps(F.pad(x, sides, value=outside), settings)
    match settings["type"]:
        case "MAX":
            place = (taps == taps.amax(-1, keepdim=True)).to(torch.int8).argmax(-1, keepdim=True)
            return taps.gather(-1, place).squeeze(-1)
        case "AVERAGE":
            inside = torch.ones_like(x[:1, :1])
            count = _taps(F.pad(inside, sides), settings).sum(-1)
            return taps.sum(-1) / (taps.shape[-1] if settings["count_includes_padding"] else count)
    total = (taps * taps).sum(-1)
    return torch.where(total == 0, 0.0, torch.where(total == 0, 1.0, total).sqrt())


def _taps(x: Array, settings: Settings) -> Array:
    """All that a window reads, along a new last axis, row by row."""
    sizes = [(n - _span(settings, i)) // settings["strides"][i] + 1 for i, n in enumerate(x.shape[2:])]
    found = []
    for tap in np.ndindex(settings["kernel_sizes"]):
        taken = x
        for axis, (k, size) in enumerate(zip(tap, sizes, strict=True)):
            places = torch.arange(size, device=x.device) * settings["strides"][axis]
            taken = taken.index_select(2 + axis, places + k * settings["dilation_rates"][axis])
        found.append(taken)
    return torch.stack(found, -1)


# Global pooling


def _draw_global(draw: Draw) -> Drawn | None:
    x = draw.floating(least=3)
    return None if x is None else Drawn((x,), {"type": draw.choose(POOLINGS), "keeps": draw.chance(0.3)})


def _pool_globally(_: Context, settings: Settings, __: Arrays, x: Array) -> Array:
    pixels = x.reshape(*x.shape[:2], -1)
    match settings["type"]:
        case "MAX":
            first = (pixels == pixels.amax(-1, keepdim=True)).to(torch.int8).argmax(-1, keepdim=True)
            y = pixels.gather(-1, first).squeeze(-1)
        case "AVERAGE":
            y = pixels.sum(-1) / pixels.shape[-1]
        case _:
            total = (pixels * pixels).sum(-1)
            y = torch.where(total == 0, 0.0, torch.where(total == 0, 1.0, total).sqrt())
    return y.reshape(*y.shape, *[1] * (x.ndim - 2)) if settings["keeps"] else y


# Upsampling


def _draw_upsample(draw: Draw) -> Drawn | None:
    x = draw.floating(4)
    if x is None:
        return None
    shape = (draw.whole(1, 8), draw.whole(1, 8)) if draw.chance(0.7) else (draw.whole(1, 8),)
    settings: Settings = {"shape": shape, "mode": draw.choose(SAMPLES)}
    if settings["mode"] == "LINEAR":
        settings["aligns_corners"] = draw.chance(0.4)
    return Drawn((x,), settings)


def _build_upsample(settings: Settings, _: Tensors) -> sg.Layer:
    mode = sg.SampleMode[settings["mode"]]
    return sg.UpsampleLayer(settings["shape"], mode, settings.get("aligns_corners", False))


def _upsample(_: Context, settings: Settings, __: Arrays, x: Array) -> Array:
    height = settings["shape"][0] if len(settings["shape"]) == 2 else x.shape[2]
    down, across = (
        torch.from_numpy(_interpolation(n, m, settings)).to(x.dtype).to(x.device)
        for n, m in ((x.shape[2], height), (x.shape[3], settings["shape"][-1]))
    )
    return down @ x @ across.T


def _interpolation(n: int, m: int, settings: Settings) -> np.ndarray:
    """A matrix `[m, n]`: how much each result pixel takes of each source pixel."""
    taken = np.zeros((m, n))
    for p in range(m):
        if settings["mode"] == "NEAREST":
            taken[p, p * n // m] = 1
            continue
        if settings["aligns_corners"]:
            q = p * (n - 1) / (m - 1) if m > 1 else 0.0
        else:
            q = min(max((p + 0.5) * n / m - 0.5, 0.0), n - 1)
        low = min(int(q), n - 1)
        taken[p, low] += 1 - (q - low)
        taken[p, min(low + 1, n - 1)] += q - low
    return taken


# Padding


def _draw_padding(draw: Draw) -> Drawn | None:
    x = draw.floating(4)
    if x is None:
        return None
    kind = draw.choose(list(PADDINGS))
    rows, columns = draw.values[x].shape[2:]
    most = [2, 2] if PADDINGS[kind] == "constant" else [min(2, n - (kind == "REFLECT")) for n in (rows, columns)]
    sides = {f"padding_{side}": draw.whole(0, most[0]) for side in ("top", "bottom")}
    sides |= {f"padding_{side}": draw.whole(0, most[1]) for side in ("left", "right")}
    return Drawn((x,), {"type": kind, **sides} | ({"constant_value": draw.real(-1, 1)} if kind == "CONSTANT" else {}))


def _build_padding(settings: Settings, _: Tensors) -> sg.Layer:
    rest = {k: v for k, v in settings.items() if k != "type"}
    return sg.PaddingLayer(sg.PaddingType[settings["type"]], **rest)


def _pad(_: Context, settings: Settings, __: Arrays, x: Array) -> Array:
    sides = [(settings[f"padding_{a}"], settings[f"padding_{b}"]) for a, b in (("top", "bottom"), ("left", "right"))]
    mode = PADDINGS[settings["type"]]
    if mode == "constant":
        return F.pad(x, (*sides[1], *sides[0]), value=settings.get("constant_value", 0.0))
    for axis, side in zip((2, 3), sides, strict=True):
        order = np.pad(np.arange(x.shape[axis]), side, mode=mode)  # type: ignore[call-overload]
        x = x.index_select(axis, torch.from_numpy(order).to(x.device))
    return x


ROWS = {
    "convolution": Row(sg.ConvolutionLayer, _draw_convolution, _build_convolution, _convolve, image=True, weight=3),
    "pooling": Row(sg.PoolingLayer, _draw_pooling, _build_pooling, _pool, image=True, weight=2),
    "global pooling": Row(
        sg.GlobalPoolingLayer,
        _draw_global,
        lambda settings, _: sg.GlobalPoolingLayer(sg.PoolingType[settings["type"]], settings["keeps"]),
        _pool_globally,
        weight=0.5,
    ),
    "upsample": Row(sg.UpsampleLayer, _draw_upsample, _build_upsample, _upsample, image=True),
    "padding": Row(sg.PaddingLayer, _draw_padding, _build_padding, _pad, image=True),
}
