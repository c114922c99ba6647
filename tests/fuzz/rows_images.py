"""Rows of layers for images: convolution, pooling, upsampling, padding."""

from __future__ import annotations

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


def _draw_window(draw: Draw, height: int, width: int) -> Settings:
    """Kernel sizes, strides, dilation rates and padding whose window fits an image."""
    policy = draw.choose(["SAME", "VALID", "USE_PADDING_SIZE"])
    one = draw.chance(0.2)
    settings: Settings = {
        "kernel_sizes": (1, 1) if one else (draw.whole(1, 4), draw.whole(1, 4)),
        "strides": (draw.whole(1, 3), draw.whole(1, 3)) if draw.chance(0.5) else (1, 1),
        "dilation_rates": (draw.whole(1, 2), draw.whole(1, 2)) if draw.chance(0.3) else (1, 1),
        "padding_policy": policy,
    }
    if policy == "USE_PADDING_SIZE":
        settings["padding_sizes"] = (draw.whole(0, 2), draw.whole(0, 2))
    return settings


def _fits(settings: Settings, height: int, width: int, pooling: bool) -> bool:
    """Whether the window fits the padded image, and in pooling finds a pixel of the image everywhere."""
    for axis, size in enumerate((height, width)):
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
    return chosen | {"padding_policy": sg.PaddingPolicy[settings["padding_policy"]]}


# Convolution


def _draw_convolution(draw: Draw) -> Drawn | None:
    x = draw.floating(4)
    if x is None:
        return None
    _, inputs, height, width = draw.values[x].shape
    kind = draw.choose(["STANDARD", "STANDARD", "TRANSPOSED", "DEPTHWISE"])
    settings = {"type": kind, "inputs": inputs} | _draw_window(draw, height, width)
    if kind == "DEPTHWISE":
        settings |= {"outputs": inputs * draw.whole(1, 2), "groups": 1}
    else:
        groups = draw.choose([g for g in (1, 1, 2, 3) if inputs % g == 0])
        settings |= {"outputs": groups * draw.whole(1, 3), "groups": groups}
    if kind == "TRANSPOSED":
        lost = [sum(_lost(settings, axis)) for axis in (0, 1)]
        sizes = [(n - 1) * settings["strides"][i] + _span(settings, i) - lost[i] for i, n in enumerate((height, width))]
        if min(sizes) < 1:
            return None
    elif not _fits(settings, height, width, pooling=False):
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
        y = F.conv_transpose2d(x, turned, None, stride, 0, 0, groups, dilation)
        (top, bottom), (left, right) = _lost(settings, 0), _lost(settings, 1)
        y = F.pad(y, (-left, -right, -top, -bottom))
    else:
        (top, bottom), (left, right) = (_padding(settings, axis, x.shape[2 + axis]) for axis in (0, 1))
        y = F.conv2d(F.pad(x, (left, right, top, bottom)), weights, None, stride, 0, dilation, groups)
    biases = parameters.get("biases")
    return y if biases is None else y + biases.reshape(1, -1, 1, 1)


# Pooling


def _draw_pooling(draw: Draw) -> Drawn | None:
    x = draw.floating(4)
    if x is None:
        return None
    settings = {"type": draw.choose(POOLINGS)} | _draw_window(draw, *draw.values[x].shape[2:])
    if settings["type"] == "AVERAGE":
        settings["count_includes_padding"] = draw.chance(0.5)
    return Drawn((x,), settings) if _fits(settings, *draw.values[x].shape[2:], pooling=True) else None


def _build_pooling(settings: Settings, _: Tensors) -> sg.Layer:
    counts = {k: v for k, v in settings.items() if k == "count_includes_padding"}
    kind = sg.PoolingType[settings["type"]]
    window = _window(settings)
    return sg.PoolingLayer(
        sg.PoolingDescriptor(kind, settings["kernel_sizes"], window.pop("strides"), **window, **counts)
    )


def _pool(_: Context, settings: Settings, __: Arrays, x: Array) -> Array:
    sides = [_padding(settings, axis, x.shape[2 + axis]) for axis in (1, 0)]
    outside = -torch.inf if settings["type"] == "MAX" else 0.0
    taps = _taps(F.pad(x, (*sides[0], *sides[1]), value=outside), settings)
    match settings["type"]:
        case "MAX":
            place = (taps == taps.amax(-1, keepdim=True)).to(torch.int8).argmax(-1, keepdim=True)
            return taps.gather(-1, place).squeeze(-1)
        case "AVERAGE":
            inside = torch.ones_like(x[:1, :1])
            count = _taps(F.pad(inside, (*sides[0], *sides[1])), settings).sum(-1)
            return taps.sum(-1) / (taps.shape[-1] if settings["count_includes_padding"] else count)
    total = (taps * taps).sum(-1)
    return torch.where(total == 0, 0.0, torch.where(total == 0, 1.0, total).sqrt())


def _taps(x: Array, settings: Settings) -> Array:
    """All that a window reads, along a new last axis, row by row."""
    sizes = [(x.shape[2 + i] - _span(settings, i)) // settings["strides"][i] + 1 for i in (0, 1)]
    found = []
    for i in range(settings["kernel_sizes"][0]):
        for j in range(settings["kernel_sizes"][1]):
            (top, left) = i * settings["dilation_rates"][0], j * settings["dilation_rates"][1]
            rows = torch.arange(sizes[0], device=x.device) * settings["strides"][0] + top
            columns = torch.arange(sizes[1], device=x.device) * settings["strides"][1] + left
            found.append(x[:, :, rows][:, :, :, columns])
    return torch.stack(found, -1)


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
    "upsample": Row(sg.UpsampleLayer, _draw_upsample, _build_upsample, _upsample, image=True),
    "padding": Row(sg.PaddingLayer, _draw_padding, _build_padding, _pad, image=True),
}
