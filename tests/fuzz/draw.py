"""A recipe while it is drawn: the values so far, with numbers in them, and ways to pick and to add."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.fuzz.data import input_data, parameter_data
from tests.fuzz.recipe import Input, Op, Parameter, Recipe, Settings, Shape
from tests.fuzz.row import Array, Context, Drawn

LARGEST = 40.0  # numbers beyond it make rounding the subject
MOST = 600  # numbers in one sample of a value


class Unfit(Exception):
    """What was drawn would make numbers or arrays too large to go on with."""


class Draw:
    """Draws with a generator of its own; evaluates what it adds, so that only what can be computed is kept."""

    def __init__(self, seed: int, batch: int, table: dict[str, Any]) -> None:
        self.random = random.Random(seed)
        self.recipe = Recipe(seed, batch, (), (), (), {})
        self.table = table
        self.batch = batch
        self.inputs: list[Input] = []
        self.parameters: list[Parameter] = []
        self.ops: list[Op] = []
        self.values: dict[int, Array] = {}
        self.read: set[int] = set()
        self._numbers = 0

    # Chance

    def chance(self, probability: float) -> bool:
        """True so often."""
        return self.random.random() < probability

    def whole(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return self.random.randint(low, high)

    def real(self, low: float, high: float) -> float:
        """A real number with two decimals, for settings that are read by people."""
        return round(self.random.uniform(low, high), 2)

    def choose(self, among: Sequence[Any]) -> Any:
        """One of them."""
        return self.random.choice(among)

    # Picking values

    def pick(self, fits: Callable[[Array], bool]) -> int | None:
        """A value that fits, no label; one that nobody reads yet is more likely."""
        labels = {one.number for one in self.inputs if one.role in ("label", "weight")}
        fitting = [number for number, array in self.values.items() if number not in labels and fits(array)]
        if not fitting:
            return None
        fresh = [number for number in fitting if number not in self.read]
        return self.choose(fresh[-3:] if fresh and self.chance(0.7) else fitting)

    def floating(self, rank: int | tuple[int, ...] | None = None, least: int = 1) -> int | None:
        """A floating value of this rank."""
        ranks = (rank,) if isinstance(rank, int) else rank
        return self.pick(
            lambda x: x.is_floating_point() and x.ndim >= least and (ranks is None or x.ndim in ranks) and x.numel() > 0
        )

    def boolean(self) -> int:
        """A boolean value, made by a comparison where there is none."""
        found = self.pick(lambda x: x.dtype is torch.bool)
        if found is not None and self.chance(0.7):
            return found
        source = self.floating()
        assert source is not None
        other = self.input(self.symbolic(self.values[source].shape))
        return self.needed("comparison", Drawn((source, other), {"operation": "LESS"}))

    def symbolic(self, shape: Sequence[int]) -> Shape:
        """A shape whose first extent is the batch where it has the batch's size."""
        return (0, *shape[1:]) if shape[0] == self.batch else tuple(shape)

    # Adding

    def number(self) -> int:
        """A new number."""
        self._numbers += 1
        return self._numbers - 1

    def input(self, shape: Shape, kind: str = "float32", **settings: Any) -> int:
        """A new input, and its number."""
        one = Input(self.number(), shape, kind, **settings)
        self.inputs.append(one)
        array = torch.from_numpy(input_data(self.recipe, one, 0, self.batch))
        self.values[one.number] = array.double() if array.is_floating_point() else array
        return one.number

    def activated(self, source: int, kind: str, a: float | None = None, b: float | None = None) -> int:
        """An activation of a value, which brings it into a range that another layer needs."""
        settings: Settings = {"type": kind}
        settings |= {} if a is None else {"a": a}
        settings |= {} if b is None else {"b": b}
        return self.needed("activation", Drawn((source,), settings))

    def positive(self, source: int) -> int:
        """A value above 0.3 that follows `source`."""
        return self.activated(self.activated(source, "SOFT_PLUS"), "LINEAR", 1.0, 0.3)

    def needed(self, kind: str, drawn: Drawn) -> int:
        """Adds a node that another one needs, and gives its first result."""
        made = self.add(kind, drawn)
        if made is None:
            raise Unfit(kind)
        return made[0]

    def add(self, kind: str, drawn: Drawn) -> tuple[int, ...] | None:
        """Adds a node and its results; None, and nothing added, where its results are not fit for further use."""
        row = self.table[kind]
        made = [Parameter(self.number(), shape, what) for shape, what in drawn.parameters.values()]
        chosen = [self._shared(one, row.packs) for one in made]
        arrays = {
            name: torch.from_numpy(parameter_data(self.recipe, one)).double().reshape(drawn.parameters[name][0])
            for name, one in zip(drawn.parameters, chosen, strict=True)
        }
        context = Context(True, self.batch, self.batch)
        found = row.evaluate(context, drawn.settings, arrays, *(self.values[number] for number in drawn.sources))
        results = found if isinstance(found, tuple) else (found,)
        if not all(_is_fit(array, self.batch) for array in results):
            return None
        numbers = tuple(self.number() for _ in results)
        self.values |= dict(zip(numbers, results, strict=True))
        self.read |= set(drawn.sources)
        self.parameters += [one for one in chosen if one not in self.parameters]
        held = {name: one.number for name, one in zip(drawn.parameters, chosen, strict=True)}
        others = zip(drawn.parameters.items(), chosen, strict=True)
        shapes = {name: shape for (name, (shape, _)), one in others if shape != one.shape}
        self.ops.append(Op(kind, drawn.sources, numbers, drawn.settings, held, shapes=shapes))
        return numbers

    def _shared(self, one: Parameter, packs: bool) -> Parameter:
        """Now and then a parameter that another layer has already, of as many elements and the same kind."""
        size = torch.Size(one.shape).numel()
        fitting = [p for p in self.parameters if torch.Size(p.shape).numel() == size and p.kind == one.kind]
        fitting = [p for p in fitting if packs or p.shape == one.shape]
        return self.choose(fitting) if fitting and one.kind in ("weight", "bias") and self.chance(0.15) else one


def _is_fit(array: Array, batch: int) -> bool:
    if array.ndim > 5 or array.ndim == 0 or array.numel() > MOST * batch:
        return False
    return not array.is_floating_point() or bool(array.isfinite().all() and array.abs().max() < LARGEST)
