"""Rows of layers that move or summarize elements: shapes, parts, indices, reductions, softmax, products."""

from __future__ import annotations

import math
from collections.abc import Callable

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


# Reductions: which sources they take, and the function.
REDUCTIONS: dict[str, tuple[str, Callable[[Array, tuple[int, ...]], Array]]] = {
    "SUM": ("all", lambda x, axes: x.sum(axes, keepdim=True)),
    "MEAN": ("floating", lambda x, axes: x.sum(axes, keepdim=True) / math.prod(x.shape[axis] for axis in axes)),
    "MAX": ("numbers", lambda x, axes: _extreme(x, axes, 1)),
    "MIN": ("numbers", lambda x, axes: _extreme(x, axes, -1)),
    "ARG_MAX": ("numbers", lambda x, axes: _first(x, axes, 1).int()),
    "ARG_MIN": ("numbers", lambda x, axes: _first(x, axes, -1).int()),
    "L1_NORM": ("floating", lambda x, axes: x.abs().sum(axes, keepdim=True)),
    "ANY": ("all", lambda x, axes: (x != 0).sum(axes, keepdim=True) > 0),
    "ALL": ("all", lambda x, axes: (x == 0).sum(axes, keepdim=True) == 0),
}


def _extreme(x: Array, axes: tuple[int, ...], sign: int) -> Array:
    """The largest or smallest, taken from its first place in the order of memory."""
    others = [axis for axis in range(x.ndim) if axis not in axes]
    rows = x.permute(*others, *sorted(axes)).flatten(len(others))
    place = _first(rows, (rows.ndim - 1,), sign)
    found = rows.gather(-1, place).squeeze(-1)
    return found.reshape([1 if axis in axes else extent for axis, extent in enumerate(x.shape)])


def _first(x: Array, axes: tuple[int, ...], sign: int) -> Array:
    (axis,) = axes
    best = (x * sign).amax(axis, keepdim=True)
    return (x * sign == best).to(torch.int8).argmax(axis, keepdim=True)


def _draw_reduction(draw: Draw) -> Drawn | None:
    kind = draw.choose(list(REDUCTIONS))
    wanted = REDUCTIONS[kind][0]
    x = draw.pick(
        lambda x: wanted == "all" or x.is_floating_point() or (wanted == "numbers" and x.dtype is not torch.bool)
    )
    if x is None:
        return None
    axes = list(range(min(1, draw.values[x].ndim - 1), draw.values[x].ndim))
    draw.random.shuffle(axes)
    count = 1 if kind.startswith("ARG") else draw.whole(1, len(axes))
    return Drawn((x,), {"type": kind, "dimensions": tuple(axes[:count])})


def _draw_softmax(draw: Draw) -> Drawn | None:
    x = draw.floating()
    if x is None:
        return None
    rank = draw.values[x].ndim
    operation = draw.choose(["SOFTMAX", "LOG_SOFTMAX"])
    return Drawn((x,), {"operation": operation, "dimension": draw.whole(min(1, rank - 1), rank - 1)})


def _softmax(_: Context, settings: Settings, __: Arrays, x: Array) -> Array:
    axis = settings["dimension"]
    shifted = x - x.detach().amax(axis, keepdim=True)
    total = shifted.exp().sum(axis, keepdim=True)
    return shifted.exp() / total if settings["operation"] == "SOFTMAX" else shifted - total.log()


# Products


def _draw_product(draw: Draw) -> Drawn | None:
    x = draw.floating(least=2)
    if x is None:
        return None
    shape = draw.values[x].shape
    across, back = draw.chance(0.3) and len(shape) > 2, draw.chance(0.5)
    inner = shape[-2] if across else shape[-1]
    same = draw.pick(
        lambda y: y.is_floating_point()
        and y.ndim >= 2
        and y.shape[-1 if back else -2] == inner
        and y.shape[:-2] in (shape[:-2], torch.Size())
    )
    columns = draw.choose([1, 2, 3])
    if same is None or draw.chance(0.3):
        leading = draw.choose([(), *([(1,) * (len(shape) - 2)] if len(shape) > 2 else [])])
        same = draw.input((*leading, *((columns, inner) if back else (inner, columns))), role="trained")
    alpha = draw.choose([1.0, 0.5, -0.7])
    return Drawn((x, same), {"alpha": alpha, "transposes_x": across, "transposes_y": back})


def _multiply(_: Context, settings: Settings, __: Arrays, x: Array, y: Array) -> Array:
    x = x.transpose(-1, -2) if settings["transposes_x"] else x
    y = y.transpose(-1, -2) if settings["transposes_y"] else y
    return settings["alpha"] * (x.unsqueeze(-1) * y.unsqueeze(-3)).sum(-2)


def _draw_gram(draw: Draw) -> Drawn | None:
    x = draw.floating(4)
    return None if x is None else Drawn((x,), {"scale": draw.real(0.05, 0.5)})


def _gram(_: Context, settings: Settings, __: Arrays, x: Array) -> Array:
    return settings["scale"] * torch.einsum("nfhw,nchw->ncf", x, x).unsqueeze(2)


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
    "reduction": Row(
        sg.ReductionLayer,
        _draw_reduction,
        lambda settings, _: sg.ReductionLayer(sg.ReductionType[settings["type"]], settings["dimensions"]),
        lambda _, settings, __, x: REDUCTIONS[settings["type"]][1](x, settings["dimensions"]),
        weight=1.5,
    ),
    "softmax": Row(
        sg.SoftmaxLayer,
        _draw_softmax,
        lambda settings, _: sg.SoftmaxLayer(sg.SoftmaxOperation[settings["operation"]], settings["dimension"]),
        _softmax,
        image=True,
    ),
    "matmul": Row(
        sg.MatMulLayer,
        _draw_product,
        lambda settings, _: sg.MatMulLayer(sg.MatMulDescriptor(**settings)),
        _multiply,
    ),
    "gram": Row(
        sg.GramMatrixLayer,
        _draw_gram,
        lambda settings, _: sg.GramMatrixLayer(settings["scale"]),
        _gram,
        image=True,
        weight=0.5,
    ),
}
