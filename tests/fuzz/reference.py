"""One step of a recipe in plain PyTorch: forward, autograd, update. Nothing here calls stepgraph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from tests.fuzz.generate import trainable
from tests.fuzz.recipe import Recipe, is_loss
from tests.fuzz.row import Array, Context, shaped
from tests.fuzz.table import TABLE
from tests.fuzz.update import updated

Numbered = Mapping[int, Array]


@dataclass
class Before:
    """What a step starts from: parameters and trained inputs, optimizer state, number of the step, data, masks."""

    parameters: dict[int, Array]
    inputs: dict[int, Array]
    state: dict[int, list[Array]] = field(default_factory=dict)
    time: int = 1
    rows: int = 0
    user_gradients: dict[int, Array] = field(default_factory=dict)
    masks: dict[int, Array] = field(default_factory=dict)


@dataclass
class After:
    """What a step finds, as flat names with arrays: `value 3`, `gradient 5`, `parameter 5`, `state 5.0`."""

    found: dict[str, Array]
    reached: set[int]


def step(
    recipe: Recipe,
    before: Before,
    *,
    present: set[int] | None = None,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
) -> After:
    """A training step. `present` are the parameters that got a gradient in the run that is checked."""
    given = before.parameters | before.inputs
    leaves = {n: array.clone().requires_grad_(array.is_floating_point()) for n, array in given.items()}
    values, rewritten = forward(recipe, before, leaves, training=True, noise=noise, generator=generator)
    total = torch.stack([values[n].sum() for op in recipe.losses for n in op.results]).sum()
    for number, outside in before.user_gradients.items():
        total = total + (values[number] * outside).sum()
    wanted = [n for n, leaf in leaves.items() if leaf.requires_grad]
    asked = [leaves[n] for n in wanted]
    gradients = torch.autograd.grad(total, asked, allow_unused=True) if total.requires_grad else [None] * len(asked)
    by_number = dict(zip(wanted, gradients, strict=True))
    found = {f"value {n}": a.detach() for n, a in values.items()}
    trained = [*trainable(recipe), *(one.number for one in recipe.inputs if one.role == "trained")]
    reached = {n for n in trained if by_number.get(n) is not None}
    chosen = reached if present is None else present
    zeros = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in by_number.items()}
    found |= {f"gradient {n}": zeros[n] for n in chosen}
    found |= {f"input gradient {n}": g for n, g in by_number.items() if n in before.inputs and g is not None}
    current = given | rewritten
    found |= updated(recipe.optimizer, {n: current[n].detach() for n in chosen}, zeros, before.state, before.time)
    found |= {f"parameter {n}": a.detach() for n, a in current.items() if f"parameter {n}" not in found}
    return After(found, {n for n in reached if bool((zeros[n] != 0).any())})


def forward(
    recipe: Recipe,
    before: Before,
    leaves: Numbered,
    *,
    training: bool,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
) -> tuple[dict[int, Array], dict[int, Array]]:
    """All values, and what statistics and rewritten dictionaries are afterwards.

    With noise, everything is computed in float32: what happens inside a layer is then rounded as well.
    """
    dropped = before.masks
    if noise:
        leaves, dropped = _single(leaves), _single(dropped)
    values: dict[int, Array] = {n: leaves[n] for n in before.inputs}
    rewritten: dict[int, Array] = {}
    stopped, trained = set(recipe.stops), set(trainable(recipe))
    values = {n: a.detach() if n in stopped else a for n, a in values.items()}
    for op in recipe.ops:
        row = TABLE[op.kind]
        arrays = {}
        for name, number in op.parameters.items():
            leaf = leaves[number]
            if number in rewritten:  # the changed numbers, with the gradient of the parameter
                leaf = leaf + (rewritten[number] - leaf).detach()
            # A frozen layer may share a tensor with one that is not: one parameter, with the sum over all its uses.
            arrays[name] = shaped(op, name, _noisy(leaf if number in trained else leaf.detach(), noise, generator))
        context = Context(training, before.rows, recipe.batch, dropped.get(op.results[0]))
        context.rounded = partial(_noisy, noise=noise, generator=generator)
        rounded = set(before.inputs) if recipe.compute_type is not None else set()  # a layer converts what it reads
        sources = [_noisy(values[n], noise, generator) if n in rounded else values[n] for n in op.sources]
        if is_loss(op):  # gradients flow to the prediction only
            sources[1:] = [array.detach() for array in sources[1:]]
        found = row.evaluate(context, op.settings, arrays, *sources)
        results = found if isinstance(found, tuple) else (found,)
        for number, result in zip(op.results, results, strict=True):
            values[number] = _noisy(result, noise, generator)
            if number in stopped:
                values[number] = values[number].detach()
        for name, new in context.updates.items():
            number = op.parameters[name]
            rewritten[number] = new.reshape(leaves[number].shape)
    return values, rewritten


def _single(arrays: Numbered) -> dict[int, Array]:
    return {n: array.float() if array.is_floating_point() else array for n, array in arrays.items()}


def _noisy(array: Array, noise: float, generator: torch.Generator | None) -> Array:
    """The array as rounding might have left it, and its gradient as well."""
    if not noise or not array.is_floating_point():
        return array

    def moved(exact: Array) -> Array:
        drawn = torch.randn(exact.shape, dtype=exact.dtype, generator=generator)
        return exact * (1 + noise * drawn.to(exact.device))

    result = moved(array)
    if result.requires_grad:
        result.register_hook(moved)
    return result
