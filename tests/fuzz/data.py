"""What inputs and parameters hold: a function of the recipe's seed, the number and the step."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.fuzz.recipe import Input, Parameter, Recipe, filled

PARAMETERS, GRADIENTS = 1 << 20, 1 << 21  # keep streams of parameters and user gradients apart from those of inputs


def input_data(recipe: Recipe, one: Input, step: int, rows: int) -> np.ndarray:
    """An input's data in one step, with so many rows. What is constant or trained is the same in every step."""
    rng = np.random.default_rng([recipe.seed, one.number, step if one.role not in ("constant", "trained") else 0])
    return KINDS[one.kind](rng, filled(one.shape, rows), one)


def parameter_data(recipe: Recipe, one: Parameter) -> np.ndarray:
    """A parameter's first values."""
    rng = np.random.default_rng([recipe.seed, PARAMETERS + one.number])
    match one.kind:
        case "scale":
            values = rng.uniform(0.6, 1.4, one.shape)
        case "variance":
            values = rng.uniform(0.5, 1.5, one.shape)
        case "bias":
            values = 0.2 * rng.standard_normal(one.shape)
        case _:
            fan = max(1, int(np.prod(one.shape[1:])))
            values = rng.standard_normal(one.shape) / np.sqrt(fan)
    return values.astype(np.float32)


def user_gradient_data(recipe: Recipe, number: int, step: int, shape: tuple[int, ...]) -> np.ndarray:
    """What outside code would hand over for a value."""
    rng = np.random.default_rng([recipe.seed, GRADIENTS + number, step])
    return (0.3 * rng.standard_normal(shape)).astype(np.float32)


def _real(rng: np.random.Generator, shape: tuple[int, ...], _: Input) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _positive(rng: np.random.Generator, shape: tuple[int, ...], _: Input) -> np.ndarray:
    return rng.uniform(0.2, 1.8, shape).astype(np.float32)


def _whole(rng: np.random.Generator, shape: tuple[int, ...], one: Input) -> np.ndarray:
    dtype: Any = np.int32 if one.kind == "int32" else np.int64
    if one.distinct is None:
        return rng.integers(one.low, one.high, shape).astype(dtype)
    longest = list(shape)
    longest[one.distinct] = one.high
    order = np.argsort(rng.random(longest), axis=one.distinct)
    return np.take(order, range(shape[one.distinct]), axis=one.distinct).astype(dtype)


def _boolean(rng: np.random.Generator, shape: tuple[int, ...], _: Input) -> np.ndarray:
    return rng.random(shape) < 0.4


def _one_hot(rng: np.random.Generator, shape: tuple[int, ...], _: Input) -> np.ndarray:
    """Classes along dimension 1, most of the time one, sometimes a mixture."""
    chosen = rng.integers(0, shape[1], (shape[0], *shape[2:]))
    hard = np.moveaxis(np.eye(shape[1])[chosen], -1, 1)
    soft = rng.dirichlet(np.ones(shape[1]), (shape[0], *shape[2:])).reshape(*chosen.shape, shape[1])
    mixed = np.where(rng.random(chosen.shape)[..., None] < 0.7, np.moveaxis(hard, 1, -1), soft)
    return np.ascontiguousarray(np.moveaxis(mixed, -1, 1)).astype(np.float32)


def _binary(rng: np.random.Generator, shape: tuple[int, ...], _: Input) -> np.ndarray:
    return (rng.random(shape) < 0.5).astype(np.float32)


def _unit(rng: np.random.Generator, shape: tuple[int, ...], _: Input) -> np.ndarray:
    """Samples of unit length."""
    values = rng.standard_normal(shape)
    norms = np.sqrt((values.reshape(shape[0], -1) ** 2).sum(1)).reshape(-1, *[1] * (len(shape) - 1))
    return (values / norms).astype(np.float32)


def _yolo(rng: np.random.Generator, shape: tuple[int, ...], one: Input) -> np.ndarray:
    """True boxes: in a third of the cells an object, told to every anchor."""
    rows, channels, height, width = shape
    classes = channels // one.high - 5
    labels = np.zeros((rows, one.high, 5 + classes, height, width), np.float32)
    labels[:, :, 5:] = 1 / max(1, classes)
    for row, y, x in np.argwhere(rng.random((rows, height, width)) < 0.35):
        box = [*rng.uniform(0.1, 0.9, 2), *rng.uniform(0.5, 3.0, 2), 1.0, *np.eye(max(1, classes))[0][:classes]]
        box[5:] = np.roll(box[5:], rng.integers(0, max(1, classes))).tolist()
        labels[row, :, :, y, x] = np.array(box, np.float32)
    return labels.reshape(shape)


KINDS = {
    "float32": _real,
    "positive": _positive,
    "int64": _whole,
    "int32": _whole,
    "boolean": _boolean,
    "one_hot": _one_hot,
    "binary": _binary,
    "unit": _unit,
    "yolo": _yolo,
}
DTYPES = {"int64": "int64", "int32": "int32", "boolean": "boolean"}  # of tensors; float32 for all others
