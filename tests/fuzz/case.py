"""A recipe under test: its graph, what whole steps make of it, and what the reference starts a step from."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from tests.fuzz import reference
from tests.fuzz.build import Built
from tests.fuzz.compare import PRECISIONS, Noisy, Precision, near
from tests.fuzz.data import input_data, user_gradient_data
from tests.fuzz.recipe import Recipe
from tests.fuzz.reference import Before

Found = dict[str, np.ndarray]


class Case:
    """What several checks share, made once: compiling takes most of their time."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @property
    def folder(self) -> Path:
        """A place for checkpoints."""
        return Path(self._folder.name)

    @property
    def precision(self) -> Precision:
        """How far results may be off."""
        return PRECISIONS[self.recipe.compute_type]

    @cached_property
    def first(self) -> Built:
        """The recipe as it is compiled by default; `restart` brings it back to its beginning."""
        built = Built(self.recipe)
        built.training.save(self.folder / "start")
        return built

    def restart(self) -> Built:
        """The default graph at its beginning."""
        self.first.training.restore(self.folder / "start")
        return self.first

    @cached_property
    def start(self) -> Found:
        """Parameters and state before the first step."""
        return self.restart().snapshot()

    @cached_property
    def straight(self) -> list[Found]:
        """Losses, parameters and state after each whole step."""
        return whole_steps(self.restart(), self.recipe.steps)

    def noisy(self, before: Before, present: set[int] | None = None) -> Noisy:
        """The reference's training step, with noise."""

        def evaluate(size: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
            found = reference.step(self.recipe, before, present=present, noise=size, generator=generator)
            return kept_state(before) | found.found

        return evaluate

    def near_one_step(self, check: str, values: dict[int, np.ndarray], got: Found, wanted: Found) -> None:
        """Losses and state of one step, and those of another graph, agree up to what rounding may do.

        `values` are the results of the first one, of which dropout's masks are taken.
        """
        before = before_step(self.first, 0, self.recipe.batch, self.start, values)
        before.time = 1
        exact = reference.step(self.recipe, before).found
        wide = {name: double(array) for name, array in wanted.items()}
        numbers = [n for op in self.recipe.losses for n in op.results]

        def noisy(size: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
            moved = reference.step(self.recipe, before, noise=size, generator=generator).found
            change = {name: moved[name] - exact[name] for name in moved if moved[name].is_floating_point()}
            change |= {f"loss {i}": change[f"value {n}"].reshape(-1) for i, n in enumerate(numbers)}
            return {name: array + change[name] if name in change else array for name, array in wide.items()}

        near(check, got, wide, self.precision, noisy)


def whole_steps(built: Built, steps: int, first: int = 0) -> list[Found]:
    """Losses, parameters and state after each of some whole steps."""
    return [named(built.whole(step)) | built.snapshot() for step in range(first, first + steps)]


def named(losses: list[np.ndarray]) -> Found:
    """Losses by name."""
    return {f"loss {i}": loss for i, loss in enumerate(losses)}


def double(array: np.ndarray) -> torch.Tensor:
    """The array in float64 where it holds real numbers."""
    found = torch.from_numpy(np.array(array))
    return found.double() if found.is_floating_point() else found


def before_step(
    built: Built, step: int, rows: int, snapshot: Found, values: dict[int, np.ndarray] | None = None
) -> Before:
    """What the reference starts from: the numbers that the graph has now."""
    recipe, optimizer = built.recipe, built.trainings[0].optimizer
    assert optimizer is not None
    inputs = {one.number: double(input_data(recipe, one, step, rows)) for one in recipe.inputs}
    inputs |= {n: double(snapshot[f"parameter {n}"]) for n in built.trained_inputs()}
    parameters = {n: double(snapshot[f"parameter {n}"]) for n in built.held}
    before = Before(parameters, inputs, _state(snapshot), optimizer.time_step, rows)
    for number in recipe.user_gradients:
        shape = built.tensors[number].shape
        shape = (rows, *shape[1:]) if shape[0] == recipe.batch else shape
        before.user_gradients[number] = double(user_gradient_data(recipe, number, step, shape))
    before.masks = {} if values is None else masks(recipe, inputs, values)
    return before


def _state(snapshot: Found) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for name, array in snapshot.items():
        if name.startswith("state "):
            found.setdefault(int(name[6:].split(".")[0]), []).append(double(array))
    return found


def kept_state(before: Before) -> dict[str, torch.Tensor]:
    """The optimizer state as it was, by name: it stays where a parameter gets no gradient."""
    return {f"state {n}.{i}": array for n, arrays in before.state.items() for i, array in enumerate(arrays)}


def masks(recipe: Recipe, inputs: dict[int, torch.Tensor], values: dict[int, np.ndarray]) -> dict[int, torch.Tensor]:
    """What dropout kept: where its result is not zero although its source is not."""
    found = {}
    for op in recipe.ops:
        if op.kind == "dropout":
            (source,) = op.sources
            given = inputs[source].numpy() if source in inputs else values[source]
            found[op.results[0]] = torch.from_numpy((values[op.results[0]] != 0) | (given == 0))
    return found
