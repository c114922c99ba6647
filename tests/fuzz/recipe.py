"""A random graph as plain data: printable, comparable, and small enough to paste into a test.

Every value, parameter and input has a number that stays its own when others are taken out. A first extent of 0 stands
for the batch. What an input or parameter holds follows from the recipe's seed and that number alone, so a recipe that
loses a part keeps the numbers of all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

Shape = tuple[int, ...]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Input:
    """A tensor that no layer makes.

    Args:
        number: the value's number.
        shape: its extents; a first extent of 0 is the batch.
        kind: what it holds: float32, int64, int32, boolean, or the labels of a loss (`one_hot`, `unit`, `yolo`).
        low: the least whole number.
        high: one more than the largest; for `yolo` the number of anchors.
        distinct: the axis along which no whole number comes twice.
        role: fed as an `input`, `label` or `weight`; a `constant` of the compilation; or `trained` like a parameter.
    """

    number: int
    shape: Shape
    kind: str = "float32"
    low: int = 0
    high: int = 0
    distinct: int | None = None
    role: str = "input"


@dataclass(frozen=True)
class Parameter:
    """A tensor that layers hold: weights, biases, scales, running statistics."""

    number: int
    shape: Shape
    kind: str = "weight"
    updatable: bool = True


@dataclass(frozen=True)
class Op:
    """One node: a row of the table, what it reads, what it makes, and the numbers of its parameters by field.

    `layer` is the first result of an earlier op whose layer is used once more. `shapes` has the extents that the layer
    gives to parameters, by field, where they differ from those of the tensor: layers share what has as many elements.
    """

    kind: str
    sources: tuple[int, ...]
    results: tuple[int, ...]
    settings: Settings = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    frozen: bool = False
    layer: int | None = None
    shapes: dict[str, Shape] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A graph and how it is trained.

    Args:
        seed: decides all data.
        batch: the declared batch size.
        inputs: what is fed, constant or trained.
        parameters: what layers hold.
        ops: the nodes in order; losses are among them.
        optimizer: its class and settings.
        rows: the batch size of a call with another one.
        stops: values through which no gradient flows.
        user_gradients: values that get a gradient from outside.
        compute_type: of mixed precision.
        cut: how many ops the first of two linked graphs has; 0 leaves them in one.
        by_constructor: whether the last op, a loss, is given to the training graph's constructor.
        steps: how often it is trained.
    """

    seed: int
    batch: int
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    ops: tuple[Op, ...]
    optimizer: Settings
    rows: int = 3
    stops: tuple[int, ...] = ()
    user_gradients: tuple[int, ...] = ()
    compute_type: str | None = None
    cut: int = 0
    by_constructor: bool = False
    steps: int = 3

    @property
    def losses(self) -> tuple[Op, ...]:
        """The ops that are minimized."""
        return tuple(op for op in self.ops if is_loss(op))

    @property
    def is_random(self) -> bool:
        """Whether training draws random numbers that no result shows."""
        return any(op.settings.get("hidden_dropout") for op in self.ops)

    def input(self, number: int) -> Input | None:
        """The input of this number."""
        return next((one for one in self.inputs if one.number == number), None)

    def parameter(self, number: int) -> Parameter:
        """The parameter of this number."""
        return next(one for one in self.parameters if one.number == number)

    def shape(self, shape: Shape, rows: int | None = None) -> Shape:
        """Extents with the batch filled in."""
        return filled(shape, self.batch if rows is None else rows)

    def __str__(self) -> str:
        return written(self)


def filled(shape: Shape, rows: int) -> Shape:
    """Extents with the batch filled in."""
    return (rows, *shape[1:]) if shape and shape[0] == 0 else shape


def is_loss(op: Op) -> bool:
    """Whether an op is minimized."""
    return op.kind in ("loss", "yolo")


def cleaned(recipe: Recipe) -> Recipe:
    """The recipe without what no loss and no user gradient needs, and without inputs and parameters nobody reads."""
    needed = {number for op in recipe.losses for number in op.results} | set(recipe.user_gradients)
    kept: list[Op] = []
    for op in reversed(recipe.ops):
        if needed & set(op.results):
            needed |= set(op.sources) | ({op.layer} if op.layer is not None else set())
            kept.insert(0, op)
    return pruned(replace(recipe, ops=tuple(kept), cut=min(recipe.cut, max(len(kept) - 1, 0))))


def pruned(recipe: Recipe) -> Recipe:
    """The recipe without inputs and parameters that nobody reads."""
    read = {number for op in recipe.ops for number in op.sources}
    made = {number for op in recipe.ops for number in op.results}
    held = {number for op in recipe.ops for number in op.parameters.values()}
    known = read | made
    return replace(
        recipe,
        inputs=tuple(one for one in recipe.inputs if one.number in read),
        parameters=tuple(one for one in recipe.parameters if one.number in held),
        stops=tuple(number for number in recipe.stops if number in known),
        user_gradients=tuple(number for number in recipe.user_gradients if number in made),
    )


def written(recipe: Recipe) -> str:
    """The recipe as Python, one entry per line, defaults left out."""
    lines = ["Recipe("]
    for one in _given(recipe):
        value = getattr(recipe, one)
        if one in ("inputs", "parameters", "ops"):
            lines += [f"    {one}=(", *(f"        {_short(entry)}," for entry in value), "    ),"]
        else:
            lines.append(f"    {one}={value!r},")
    return "\n".join([*lines, ")"])


def _short(entry: Any) -> str:
    return f"{type(entry).__name__}({', '.join(f'{name}={getattr(entry, name)!r}' for name in _given(entry))})"


def _given(entry: Any) -> Iterator[str]:
    for one in fields(entry):
        value = getattr(entry, one.name)
        empty = one.default_factory() if callable(one.default_factory) else one.default
        if value != empty or type(value) is not type(empty):
            yield one.name
