"""Rows of layers that move elements: shapes, parts, indices."""

from __future__ import annotations

import math

import torch

import stepgraph as sg
from tests.fuzz.draw import Draw
from tests.fuzz.recipe import Settings, filled
from tests.fuzz.row import Array, Arrays, Context, Drawn, Row, Tensors


def _draw_reshape(draw: Draw) -> Drawn | None:
    x = draw.pick(lambda x: x.ndim >= 1)
    if x is None:
        return None
    shape = list(draw.values[x].shape)
    if shape[0] != draw.batch:
        return Drawn((x,), {"shape": (math.prod(shape),) if draw.chance(0.5) else (1, *shape)[:5]})
    rest = math.prod(shape[1:])
    extents = [0, *_factors(draw, rest)]
    if len(extents) > 1 and draw.chance(0.3):
        extents[draw.whole(1, len(extents) - 1)] = -1
    return Drawn((x,), {"shape": tuple(extents)})


def _factors(draw: Draw, count: int) -> list[int]:
    """Up to three extents with this product."""
    found: list[int] = []
    for _ in range(draw.whole(0, 2)):
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        found.append(draw.choose(divisors))
        count //= found[-1]
    return [*found, count]


def _reshape(context: Context, settings: Settings, _: Arrays, x: Array) -> Array:
    return x.reshape(filled(settings["shape"], context.rows))


def _draw_transpose(draw: Draw) -> Drawn | None:
    x = draw.pick(lambda x: x.ndim >= 2)
    if x is None:
        return None
    axes = list(range(draw.values[x].ndim))
    first, rest = (axes[:1], axes[1:]) if draw.chance(0.85) else ([], axes)
    draw.random.shuffle(rest)
    return Drawn((x,), {"dimensions": (*first, *rest)})


def _draw_concatenation(draw: Draw) -> Drawn | None:
    x = draw.floating()
    if x is None:
        return None
    shape = draw.values[x].shape
    dimension = draw.whole(min(1, len(shape) - 1), len(shape) - 1)

    def fits(y: Array) -> bool:
        same = y.is_floating_point() and y.ndim == len(shape)
        return same and all(m == n for axis, (m, n) in enumerate(zip(y.shape, shape, strict=True)) if axis != dimension)

    others = [draw.pick(fits) for _ in range(draw.whole(0, 2))]
    return Drawn((x, *(y for y in others if y is not None)), {"dimension": dimension})


def _draw_split(draw: Draw) -> Drawn | None:
    x = draw.pick(lambda x: x.ndim >= 2 and max(x.shape[1:]) > 1)
    if x is None:
        return None
    shape = draw.values[x].shape
    dimension = draw.choose([axis for axis in range(1, len(shape)) if shape[axis] > 1])
    extent = shape[dimension]
    if draw.chance(0.5):
        return Drawn((x,), {"count": draw.whole(2, min(extent, 4)), "dimension": dimension})
    first = draw.whole(1, extent - 1)
    return Drawn((x,), {"lengths": (first, extent - first), "dimension": dimension})


def _build_split(settings: Settings, _: Tensors) -> sg.Layer:
    return sg.SplitLayer(settings.get("count"), settings.get("lengths"), dimension=settings["dimension"])


def _split(_: Context, settings: Settings, __: Arrays, x: Array) -> tuple[Array, ...]:
    axis, extent = settings["dimension"], x.shape[settings["dimension"]]
    if "lengths" in settings:
        ends = [sum(settings["lengths"][: i + 1]) for i in range(len(settings["lengths"]))]
    else:
        size = -(-extent // settings["count"])
        ends = [min(end, extent) for end in range(size, extent + size, size)]
    starts = [0, *ends[:-1]]
    return tuple(x.narrow(axis, start, end - start) for start, end in zip(starts, ends, strict=True))


def _draw_slice(draw: Draw) -> Drawn | None:
    x = draw.pick(lambda x: x.ndim >= 1)
    if x is None:
        return None
    start, end, stride = [], [], []
    for axis, extent in enumerate(draw.values[x].shape):
        whole = axis == 0 or draw.chance(0.4)
        start.append(0 if whole else draw.whole(0, extent - 1))
        end.append(extent if whole else draw.whole(start[-1] + 1, extent))
        stride.append(1 if whole else draw.whole(1, 2))
    batched = draw.values[x].shape[0] == draw.batch
    return Drawn((x,), {"start": tuple(start), "end": (0 if batched else end[0], *end[1:]), "stride": tuple(stride)})


def _slice(context: Context, settings: Settings, _: Arrays, x: Array) -> Array:
    for axis, (first, last, step) in enumerate(zip(*(settings[k] for k in ("start", "end", "stride")), strict=True)):
        last = context.rows if axis == 0 and last == 0 else last
        x = x.index_select(axis, torch.arange(first, last, step, device=x.device))
    return x


# Indices


def _draw_gather(draw: Draw) -> Drawn | None:
    x = draw.floating(least=2)
    if x is None:
        return None
    shape = draw.values[x].shape
    dimension = draw.whole(1, len(shape) - 1)
    extent, kind = shape[dimension], draw.choose(["int32", "int64"])
    if draw.chance(0.3):  # indices that another layer has found
        found = draw.pick(lambda i: _is_index(i, shape, dimension))
        if found is not None:
            return Drawn((x, found), {"dimension": dimension})
    if draw.chance(0.5):
        indices = draw.input((draw.choose([1, 2, 3, 5]),), kind, high=extent)
    else:
        picked = [*draw.symbolic(shape)]
        picked[dimension] = draw.choose([1, 2, 3])
        indices = draw.input(tuple(picked), kind, high=extent)
    return Drawn((x, indices), {"dimension": dimension})


def _is_index(i: Array, shape: torch.Size, dimension: int) -> bool:
    if i.dtype not in (torch.int32, torch.int64) or i.ndim != len(shape) or int(i.max()) >= shape[dimension]:
        return False
    return all(m == n for axis, (m, n) in enumerate(zip(i.shape, shape, strict=True)) if axis != dimension)


def _gather(_: Context, settings: Settings, __: Arrays, x: Array, indices: Array) -> Array:
    axis = settings["dimension"]
    if indices.ndim == 1 and x.ndim > 1:
        return torch.stack([x.select(axis, int(i)) for i in indices], axis)
    return torch.take_along_dim(x, indices.long(), axis)


def _draw_scatter(draw: Draw) -> Drawn | None:
    target = draw.floating(least=2)
    if target is None:
        return None
    shape = draw.values[target].shape
    dimension, sums = draw.whole(1, len(shape) - 1), draw.chance(0.5)
    count = draw.whole(1, shape[dimension])
    extents = [*draw.symbolic(shape)]
    extents[dimension] = count
    updates = draw.pick(lambda u: u.is_floating_point() and list(draw.symbolic(u.shape)) == extents)
    if updates is None:
        updates = draw.input(tuple(extents))
    settings = {"kind": draw.choose(["int32", "int64"]), "high": shape[dimension]}
    if draw.chance(0.5):
        indices = draw.input((count,), distinct=None if sums else 0, **settings)
    else:
        indices = draw.input(tuple(extents), distinct=None if sums else dimension, **settings)
    return Drawn((updates, indices, target), {"dimension": dimension, "reduction": "SUM" if sums else "NONE"})


def _scatter(_: Context, settings: Settings, __: Arrays, updates: Array, indices: Array, copy_from: Array) -> Array:
    """By one-hot matrices: `z = x (1 - hit) + Σ hit u`."""
    axis, extent = settings["dimension"], copy_from.shape[settings["dimension"]]
    places = indices.long()
    if places.ndim == 1:
        shape = [1] * updates.ndim
        shape[axis] = -1
        places = places.reshape(shape).expand(updates.shape)
    hits = (places.unsqueeze(-1) == torch.arange(extent, device=places.device)).to(updates.dtype)
    written = (updates.unsqueeze(-1) * hits).sum(axis).movedim(-1, axis)
    if settings["reduction"] == "SUM":
        return copy_from + written
    return copy_from * (1 - hits.sum(axis).movedim(-1, axis)) + written


def _permute(_: Context, settings: Settings, __: Arrays, x: Array) -> Array:
    return x.permute(settings["dimensions"])


ROWS = {
    "reshape": Row(
        sg.ReshapeLayer,
        _draw_reshape,
        lambda settings, _: sg.ReshapeLayer(settings["shape"]),
        _reshape,
        image=True,
        weight=1.5,
    ),
    "transpose": Row(
        sg.TransposeLayer,
        _draw_transpose,
        lambda settings, _: sg.TransposeLayer(settings["dimensions"]),
        _permute,
        image=True,
    ),
    "concatenation": Row(
        sg.ConcatenationLayer,
        _draw_concatenation,
        lambda settings, _: sg.ConcatenationLayer(settings["dimension"]),
        lambda _, settings, __, *sources: torch.cat(sources, settings["dimension"]),
        image=True,
    ),
    "split": Row(sg.SplitLayer, _draw_split, _build_split, _split, image=True),
    "slice": Row(
        sg.SliceLayer,
        _draw_slice,
        lambda settings, _: sg.SliceLayer(settings["start"], settings["end"], settings["stride"]),
        _slice,
        image=True,
    ),
    "gather": Row(sg.GatherLayer, _draw_gather, lambda settings, _: sg.GatherLayer(settings["dimension"]), _gather),
    "scatter": Row(
        sg.ScatterLayer,
        _draw_scatter,
        lambda settings, _: sg.ScatterLayer(settings["dimension"], sg.ReductionType[settings["reduction"]]),
        _scatter,
    ),
}
