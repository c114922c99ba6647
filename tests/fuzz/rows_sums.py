"""Rows of layers that sum over elements without parameters: reductions, softmax, products."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import stepgraph as sg
from tests.fuzz.draw import Draw
from tests.fuzz.recipe import Settings
from tests.fuzz.row import Array, Arrays, Context, Drawn, Row

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
        lambda y: (
            y.is_floating_point()
            and y.ndim >= 2
            and y.shape[-1 if back else -2] == inner
            and y.shape[:-2] in (shape[:-2], torch.Size())
        )
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


ROWS = {
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
