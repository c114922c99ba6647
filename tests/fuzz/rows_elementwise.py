"""Rows of layers that work element by element: activations, arithmetic, comparisons, selection, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

import stepgraph as sg
from tests.fuzz.draw import Draw
from tests.fuzz.recipe import Settings, Shape
from tests.fuzz.row import Array, Arrays, Context, Drawn, Row, Tensors

# Activations: ranges of a and b (None: the kind has none) and the formula. Kinks have PyTorch's derivatives.
Range = tuple[float, float] | None
Formula = Callable[[Array, float, float], Array]
ACTIVATIONS: dict[str, tuple[Range, Range, Formula]] = {
    "NONE": (None, None, lambda x, a, b: x),
    "RELU": ((0, 0.3), None, lambda x, a, b: F.leaky_relu(x, a)),
    "LINEAR": ((-1.5, 1.5), (-1, 1), lambda x, a, b: a * x + b),
    "SIGMOID": (None, None, lambda x, a, b: 1 / (1 + torch.exp(-x))),
    "HARD_SIGMOID": ((0.1, 0.4), (0.3, 0.7), lambda x, a, b: (a * x + b).clamp(0, 1)),
    "TANH": ((0.5, 1.5), (0.5, 1.5), lambda x, a, b: a * torch.tanh(b * x)),
    "ABSOLUTE": (None, None, lambda x, a, b: torch.abs(x)),
    "SOFT_PLUS": ((0.5, 1.5), (0.5, 2), lambda x, a, b: a * torch.logaddexp(torch.zeros_like(x), b * x)),
    "SOFT_SIGN": (None, None, lambda x, a, b: x / (1 + torch.abs(x))),
    "ELU": ((0.3, 1.5), None, lambda x, a, b: F.elu(x, a)),
    "RELUN": ((0, 0.3), (0.5, 2), lambda x, a, b: torch.where(x > b, b, F.leaky_relu(x, a))),
    "LOG_SIGMOID": (None, None, lambda x, a, b: -torch.logaddexp(torch.zeros_like(x), -x)),
    "SELU": (None, None, lambda x, a, b: F.selu(x)),
    "CELU": ((0.5, 1.5), None, lambda x, a, b: F.celu(x, a)),
    "HARD_SHRINK": ((0.1, 0.8), None, lambda x, a, b: torch.where(x.abs() > a, x, 0.0)),
    "SOFT_SHRINK": ((0.1, 0.8), None, lambda x, a, b: torch.where(x.abs() > a, x - a * x.detach().sign(), 0.0)),
    "TANH_SHRINK": (None, None, lambda x, a, b: x - torch.tanh(x)),
    "THRESHOLD": ((-0.5, 0.5), (-1, 1), lambda x, a, b: torch.where(x > a, x, b)),
    "GELU": (
        None,
        None,
        lambda x, a, b: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "HARD_SWISH": (None, None, lambda x, a, b: F.hardswish(x)),
    "CLAMP": ((-1, -0.3), (0.3, 1), torch.clamp),
    "GELU_ERF": (None, None, lambda x, a, b: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
    "SILU": (None, None, lambda x, a, b: x * torch.sigmoid(x)),
}
_DEFAULT_A = {"RELU": 0.0, "HARD_SIGMOID": 0.2, "HARD_SHRINK": 0.5, "SOFT_SHRINK": 0.5}
_DEFAULT_B = {"LINEAR": 0.0, "HARD_SIGMOID": 0.5}


def _draw_activation(draw: Draw) -> Drawn | None:
    source = draw.floating()
    kind = draw.choose(list(ACTIVATIONS))
    settings: Settings = {"type": kind}
    for name, limits in zip("ab", ACTIVATIONS[kind], strict=False):
        if limits and draw.chance(0.7):
            settings[name] = 0.0 if kind == "RELU" and draw.chance(0.6) else draw.real(*limits)
    return None if source is None else Drawn((source,), settings)


def _build_activation(settings: Settings, _: Tensors) -> sg.Layer:
    numbers = {name: settings[name] for name in "ab" if name in settings}
    return sg.ActivationLayer(sg.ActivationDescriptor(sg.ActivationType[settings["type"]], **numbers))


def activated(x: Array, settings: Settings) -> Array:
    """The activation with these settings."""
    kind = settings["type"]
    a, b = settings.get("a", _DEFAULT_A.get(kind, 1.0)), settings.get("b", _DEFAULT_B.get(kind, 1.0))
    return ACTIVATIONS[kind][2](x, a, b)


def _activate(_: Context, settings: Settings, __: Arrays, x: Array) -> Array:
    return activated(x, settings)


# Arithmetic of one source: the range it needs, and the function.
UNARY: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "FLOOR": ("any", torch.floor),
    "ROUND": ("any", torch.round),
    "CEIL": ("any", torch.ceil),
    "SQRT": ("positive", lambda x: x**0.5),
    "RSQRT": ("positive", lambda x: x**-0.5),
    "SIN": ("any", torch.sin),
    "COS": ("any", torch.cos),
    "TAN": ("unit", lambda x: torch.sin(x) / torch.cos(x)),
    "ASIN": ("unit", lambda x: torch.atan2(x, (1 - x * x) ** 0.5)),
    "ACOS": ("unit", lambda x: math.pi / 2 - torch.asin(x)),
    "ATAN": ("any", torch.atan),
    "SINH": ("unit", lambda x: (torch.exp(x) - torch.exp(-x)) / 2),
    "COSH": ("unit", lambda x: (torch.exp(x) + torch.exp(-x)) / 2),
    "TANH": ("any", torch.tanh),
    "ASINH": ("any", torch.asinh),
    "ACOSH": ("above one", lambda x: torch.log(x + (x * x - 1) ** 0.5)),
    "ATANH": ("unit", lambda x: 0.5 * torch.log((1 + x) / (1 - x))),
    "EXP": ("unit", torch.exp),
    "EXP2": ("unit", lambda x: 2.0**x),
    "LOG": ("positive", torch.log),
    "LOG2": ("positive", lambda x: torch.log(x) / math.log(2)),
}
# Arithmetic of two: the ranges they need, and the function.
BINARY: dict[str, tuple[str, str, Callable[[Array, Array], Array]]] = {
    "ADD": ("any", "any", lambda x, y: x + y),
    "SUBTRACT": ("any", "any", lambda x, y: x - y),
    "MULTIPLY": ("any", "any", lambda x, y: x * y),
    "DIVIDE": ("any", "positive", lambda x, y: x / y),
    "POW": ("positive", "unit", lambda x, y: torch.exp(y * torch.log(x))),
    "MULTIPLY_NO_NAN": ("any", "some zeros", lambda x, y: x * y),
    "DIVIDE_NO_NAN": ("any", "some zeros", lambda x, y: torch.where(y == 0, 0.0, x / torch.where(y == 0, 1.0, y))),
    "MIN": ("any", "any", lambda x, y: torch.where(x <= y, x, y)),
    "MAX": ("any", "any", lambda x, y: torch.where(x >= y, x, y)),
}
RANGES: dict[str, Callable[[Draw, int], int]] = {
    "any": lambda draw, x: x,
    "positive": lambda draw, x: draw.positive(x),
    "unit": lambda draw, x: draw.activated(x, "TANH", 0.9, 1.0),
    "above one": lambda draw, x: draw.activated(draw.activated(x, "SOFT_PLUS"), "LINEAR", 1.0, 1.2),
    "some zeros": lambda draw, x: draw.activated(x, "THRESHOLD", 0.4, 0.0),
}


def _draw_arithmetic(draw: Draw) -> Drawn | None:
    x = draw.floating()
    if x is None:
        return None
    operation = draw.choose([*UNARY, *BINARY, *BINARY])
    if operation in UNARY:
        return Drawn((RANGES[UNARY[operation][0]](draw, x),), {"operation": operation})
    y = _partner(draw, x)
    first, second, _ = BINARY[operation]
    return Drawn((RANGES[first](draw, x), RANGES[second](draw, y)), {"operation": operation})


def _partner(draw: Draw, x: int) -> int:
    """A value that broadcasts against `x`: one that is there, or a new input."""
    shape = draw.values[x].shape
    if draw.chance(0.6):
        found = draw.pick(lambda y: y.is_floating_point() and _broadcasts(y.shape, shape))
        if found is not None:
            return found
    extents = list(draw.symbolic(shape))
    extents = [1 if draw.chance(0.25) else extent for extent in extents]
    if draw.chance(0.3) and len(extents) > 1:
        extents = extents[draw.whole(1, len(extents) - 1) :]
    role = draw.choose(["input", "input", "constant", "trained"])
    batched = extents[0] in (0, draw.batch)
    return draw.input(tuple(extents), role="input" if batched else role)


def _broadcasts(first: Shape, second: Shape) -> bool:
    try:
        return torch.broadcast_shapes(first, second) in (tuple(first), tuple(second))
    except RuntimeError:
        return False


def _calculate(_: Context, settings: Settings, __: Arrays, *sources: Array) -> Array:
    operation = settings["operation"]
    return (UNARY[operation][1] if operation in UNARY else BINARY[operation][2])(*sources)


# Comparison: relations of two numbers, logic of booleans.
COMPARISONS: dict[str, Callable[..., Array]] = {
    "EQUAL": lambda x, y: x == y,
    "NOT_EQUAL": lambda x, y: x != y,
    "LESS": lambda x, y: x < y,
    "GREATER": lambda x, y: x > y,
    "LESS_OR_EQUAL": lambda x, y: x <= y,
    "GREATER_OR_EQUAL": lambda x, y: x >= y,
    "LOGICAL_AND": lambda x, y: x & y,
    "LOGICAL_OR": lambda x, y: x | y,
    "LOGICAL_NOT": lambda x: ~x,
    "LOGICAL_NAND": lambda x, y: ~(x & y),
    "LOGICAL_NOR": lambda x, y: ~(x | y),
    "LOGICAL_XOR": lambda x, y: x ^ y,
}


def _draw_comparison(draw: Draw) -> Drawn | None:
    operation = draw.choose(list(COMPARISONS))
    if operation == "LOGICAL_NOT":
        return Drawn((draw.boolean(),), {"operation": operation})
    if operation.startswith("LOGICAL"):
        x = draw.boolean()
        y = draw.pick(lambda y: y.dtype is torch.bool and _broadcasts(y.shape, draw.values[x].shape))
        return None if y is None else Drawn((x, y), {"operation": operation})
    is_whole = draw.chance(0.3)
    x = draw.pick(lambda x: x.dtype in (torch.int32, torch.int64)) if is_whole else draw.floating()
    if x is None:
        return None
    kind, shape = draw.values[x].is_floating_point(), draw.values[x].shape
    y = draw.pick(lambda y: y.dtype is not torch.bool and y.is_floating_point() == kind and _broadcasts(y.shape, shape))
    return None if y is None else Drawn((x, y), {"operation": operation})


def _compare(_: Context, settings: Settings, __: Arrays, *sources: Array) -> Array:
    return COMPARISONS[settings["operation"]](*sources)


def _draw_selection(draw: Draw) -> Drawn | None:
    condition = draw.boolean()
    shape = draw.values[condition].shape
    fits = [n for n, x in draw.values.items() if x.is_floating_point() and _selects(shape, x.shape)]
    if not fits:
        return None
    x = draw.choose(fits)
    y = draw.pick(lambda y: y.is_floating_point() and y.shape == draw.values[x].shape)
    if y is None or draw.chance(0.3):
        y = draw.input(draw.symbolic(draw.values[x].shape))
    return Drawn((condition, *draw.choose([(x, y), (y, x)])))


def _selects(condition: Shape, shape: Shape) -> bool:
    return len(condition) <= len(shape) and all(m in (1, n) for m, n in zip(condition, shape, strict=False))


def _select(_: Context, __: Settings, ___: Arrays, condition: Array, x: Array, y: Array) -> Array:
    first = condition.reshape(*condition.shape, *[1] * (x.ndim - condition.ndim)).expand(x.shape)
    chosen = first.to(x.dtype)
    return x * chosen + y * (1 - chosen)


def _draw_dropout(draw: Draw) -> Drawn | None:
    source = draw.floating()
    rate = draw.choose([0.0, 0.2, 0.5])
    return None if source is None else Drawn((source,), {"rate": rate, "seed": draw.whole(0, 3)})


def _drop(context: Context, settings: Settings, _: Arrays, x: Array) -> Array:
    if not context.training or context.mask is None:  # while drawing there is no mask: the mean is as good
        return x
    return x * context.mask.to(x.dtype) / (1 - settings["rate"])


ROWS = {
    "activation": Row(sg.ActivationLayer, _draw_activation, _build_activation, _activate, image=True, weight=2.5),
    "arithmetic": Row(
        sg.ArithmeticLayer,
        _draw_arithmetic,
        lambda settings, _: sg.ArithmeticLayer(sg.ArithmeticOperation[settings["operation"]]),
        _calculate,
        weight=3,
    ),
    "comparison": Row(
        sg.ComparisonLayer,
        _draw_comparison,
        lambda settings, _: sg.ComparisonLayer(sg.ComparisonOperation[settings["operation"]]),
        _compare,
    ),
    "selection": Row(sg.SelectionLayer, _draw_selection, lambda *_: sg.SelectionLayer(), _select),
    "dropout": Row(
        sg.DropoutLayer,
        _draw_dropout,
        lambda settings, _: sg.DropoutLayer(settings["rate"], settings["seed"]),
        _drop,
    ),
}
