"""The smallest recipe that still fails in the same way.

    python -m tests.fuzz.shrink 154              the first check that seed 154 fails, shrunk
    python -m tests.fuzz.shrink 154 training     this check
    python -m tests.fuzz.shrink --images 12      a graph of images

What is printed is a program: it runs the check on the recipe.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.fuzz.case import Case
from tests.fuzz.checks import CHECKS
from tests.fuzz.compare import Mismatch
from tests.fuzz.data import input_data, parameter_data
from tests.fuzz.generate import generate, may_construct, may_cut
from tests.fuzz.recipe import Input, Op, Recipe, cleaned, is_loss
from tests.fuzz.reference import Before, forward

Check = Callable[[Case], None]
TRIES = 300


def failure(check: Check, recipe: Recipe) -> str | None:
    """What the check finds wrong, without the numbers that shrinking changes; None where it passes."""
    try:
        with Case(recipe) as case:
            check(case)
    except Mismatch as error:
        return f"{error.check.split(',')[0]}: {error.what.split(' ')[0]}"
    except Exception as error:  # whatever a check meets is a failure of its own kind
        text = str(error).splitlines()[0] if str(error) else ""
        return f"{type(error).__name__}: {re.sub(r'/[^ ]*|[0-9]+', '#', text)}"
    return None


def shrink(check: Check, recipe: Recipe) -> Recipe:
    """A recipe with as little as possible that fails like this one."""
    wanted, tries = failure(check, recipe), 0
    assert wanted is not None, "the recipe does not fail"
    smaller = True
    while smaller and tries < TRIES:
        smaller = False
        for candidate in candidates(recipe):
            tries += 1
            if candidate != recipe and failure(check, candidate) == wanted:
                recipe, smaller = candidate, True
                break
            if tries >= TRIES:
                break
    return recipe


def candidates(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes with one thing less, the largest cuts first."""
    yield from _consistent(_without_ops(recipe))
    yield from _consistent(_plainer(recipe))
    yield from _consistent(_without_settings(recipe))


def _consistent(recipes: Iterator[Recipe]) -> Iterator[Recipe]:
    """Recipes whose cut and constructor still mean something."""
    for one in recipes:
        if not one.losses or not any(i.role == "input" for i in one.inputs):
            continue
        cut = one.cut if 0 < one.cut < len(one.ops) and may_cut(one, one.cut) else 0
        yield replace(one, cut=cut, by_constructor=one.by_constructor and may_construct(one))


def _without_ops(recipe: Recipe) -> Iterator[Recipe]:
    values = _values(recipe)
    for index in reversed(range(len(recipe.ops))):
        op = recipe.ops[index]
        rest = recipe.ops[:index] + recipe.ops[index + 1 :]
        cut = recipe.cut - (index < recipe.cut)
        if is_loss(op):
            yield cleaned(replace(recipe, ops=rest, cut=cut))
            continue
        if any(other.layer == op.results[0] for other in rest):
            continue
        given = tuple(_input(n, values[n], recipe.batch) for n in op.results)
        yield cleaned(replace(recipe, ops=rest, inputs=(*recipe.inputs, *given), cut=cut))
        for source in op.sources:
            if all(
                (values[source].shape, values[source].dtype) == (values[n].shape, values[n].dtype) for n in op.results
            ):
                stand_in = dict.fromkeys(op.results, source)
                yield cleaned(replace(recipe, ops=tuple(_reading(one, stand_in) for one in rest), cut=cut))


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _reading(op: Op, stand_in: dict[int, int]) -> Op:
    return replace(op, sources=tuple(stand_in.get(n, n) for n in op.sources))


def _input(number: int, array: torch.Tensor, batch: int) -> Input:
    shape = (0, *array.shape[1:]) if array.shape[0] == batch else tuple(array.shape)
    if array.dtype is torch.bool:
        return Input(number, shape, "boolean")
    if array.is_floating_point():
        return Input(number, shape)
    return Input(number, shape, "int32" if array.dtype is torch.int32 else "int64", high=max(1, int(array.max()) + 1))


def _values(recipe: Recipe) -> dict[int, torch.Tensor]:
    def double(array: np.ndarray) -> torch.Tensor:
        found = torch.from_numpy(array)
        return found.double() if found.is_floating_point() else found

    parameters = {one.number: double(parameter_data(recipe, one)) for one in recipe.parameters}
    inputs = {one.number: double(input_data(recipe, one, 0, recipe.batch)) for one in recipe.inputs}
    before = Before(parameters, inputs, rows=recipe.batch)
    values, _ = forward(recipe, before, parameters | inputs, training=True)
    return values


def _plainer(recipe: Recipe) -> Iterator[Recipe]:
    """Without what is special about the wiring and the training."""
    yield replace(recipe, optimizer={"kind": "SGD", "learning_rate": 0.05, "momentum_scale": 0.0})
    for name, plain in (("stops", ()), ("user_gradients", ()), ("compute_type", None), ("cut", 0), ("steps", 1)):
        if getattr(recipe, name) != plain:
            yield replace(recipe, **{name: plain})
    yield replace(recipe, by_constructor=False)
    for batch in (2, 3):
        if batch < recipe.batch and recipe.rows != batch:
            yield replace(recipe, batch=batch)
    yield replace(recipe, ops=tuple(replace(op, frozen=False) for op in recipe.ops))
    yield replace(recipe, parameters=tuple(replace(one, updatable=True) for one in recipe.parameters))
    for role in ("trained", "constant"):
        inputs = (replace(one, role="input") if one.role == role else one for one in recipe.inputs)
        yield replace(recipe, inputs=tuple(inputs))
    for name in list(recipe.optimizer):
        if name not in ("kind", "learning_rate"):
            yield replace(recipe, optimizer={k: v for k, v in recipe.optimizer.items() if k != name})


def _without_settings(recipe: Recipe) -> Iterator[Recipe]:
    """Without one setting or one parameter of one op, where the layer does without."""
    for index, op in enumerate(recipe.ops):
        smaller: list[Op] = [replace(op, settings=_less(op.settings, name)) for name in op.settings]
        smaller += [replace(op, parameters=_less(op.parameters, name)) for name in op.parameters]
        if is_loss(op) and len(op.sources) > 2:
            smaller.append(replace(op, sources=op.sources[:2]))
        if is_loss(op) and op.settings.get("reduction") not in (None, "SUM"):
            smaller.append(replace(op, settings=op.settings | {"reduction": "SUM"}))
        for one in smaller:
            yield cleaned(replace(recipe, ops=(*recipe.ops[:index], one, *recipe.ops[index + 1 :])))


def _less(settings: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in settings.items() if k != name}


def program(check: str, recipe: Recipe) -> str:
    """A program that runs the check on the recipe."""
    return (
        "from tests.fuzz.case import Case\n"
        "from tests.fuzz.checks import CHECKS\n"
        "from tests.fuzz.recipe import Input, Op, Parameter, Recipe\n\n"
        f"with Case({recipe}) as case:\n    CHECKS[{check!r}](case)"
    )


def main() -> None:
    """Shrinks the recipe of a seed and prints it."""
    parser = argparse.ArgumentParser(description="Shrink a failing random graph.")
    parser.add_argument("seed", type=int)
    parser.add_argument("check", nargs="?", choices=CHECKS)
    parser.add_argument("--images", action="store_true", help="a graph of images")
    given = parser.parse_args()
    torch.set_num_threads(1)
    recipe = generate(given.seed, images=given.images)
    names = [given.check] if given.check else [name for name, check in CHECKS.items() if failure(check, recipe)]
    for name in names[:1]:
        small = shrink(CHECKS[name], recipe)
        print(program(name, small))
        print(f"# {failure(CHECKS[name], small)}")
        return
    print(f"# seed {given.seed} passes")


if __name__ == "__main__":
    main()
