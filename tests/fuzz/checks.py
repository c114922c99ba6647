"""What must hold for every recipe. A check raises `Mismatch`, or whatever stepgraph raises by itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import stepgraph as sg
from tests.fuzz import reference
from tests.fuzz.build import FED, Built
from tests.fuzz.compare import PRECISIONS, Mismatch, near, same
from tests.fuzz.data import input_data, user_gradient_data
from tests.fuzz.generate import may_construct
from tests.fuzz.recipe import Recipe, is_loss
from tests.fuzz.reference import Before

Options = sg.GraphCompilationOptions
Found = dict[str, np.ndarray]
LARGE = 160  # rows that make results worth computing again


def _double(array: np.ndarray) -> torch.Tensor:
    found = torch.from_numpy(np.array(array))
    return found.double() if found.is_floating_point() else found


def _before(built: Built, step: int, rows: int, snapshot: Found, values: dict[int, np.ndarray] | None = None) -> Before:
    """What the reference starts from: the numbers that the graph has now."""
    recipe = built.recipe
    trained = built.trained_inputs()
    inputs = {one.number: _double(input_data(recipe, one, step, rows)) for one in recipe.inputs}
    inputs |= {n: _double(snapshot[f"parameter {n}"]) for n in trained}
    optimizer = built.trainings[0].optimizer
    assert optimizer is not None
    before = Before(
        {n: _double(snapshot[f"parameter {n}"]) for n in built.held},
        inputs,
        _state(snapshot),
        optimizer.time_step,
        rows,
    )
    for number in recipe.user_gradients:
        shape = built.tensors[number].shape
        shape = (rows, *shape[1:]) if shape[0] == recipe.batch else shape
        before.user_gradients[number] = _double(user_gradient_data(recipe, number, step, shape))
    if values is not None:
        before.masks = _masks(recipe, inputs, values)
    return before


def _state(snapshot: Found) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for name, array in snapshot.items():
        if name.startswith("state "):
            found.setdefault(int(name[6:].split(".")[0]), []).append(_double(array))
    return found


def _masks(recipe: Recipe, inputs: dict[int, torch.Tensor], values: dict[int, np.ndarray]) -> dict[int, torch.Tensor]:
    """What dropout kept: where its result is not zero although its source is not."""
    found = {}
    for op in recipe.ops:
        if op.kind == "dropout":
            (source,) = op.sources
            given = inputs[source].numpy() if source in inputs else values[source]
            found[op.results[0]] = torch.from_numpy((values[op.results[0]] != 0) | (given == 0))
    return found


def _whole(built: Built, steps: int, first: int = 0) -> list[Found]:
    """Losses, parameters and state after each of some whole steps."""
    found = []
    for step in range(first, first + steps):
        losses = built.whole(step)
        found.append({f"loss {i}": loss for i, loss in enumerate(losses)} | built.snapshot())
    return found


def _equal(check: str, one: list[Found], other: list[Found]) -> None:
    for step, (got, wanted) in enumerate(zip(one, other, strict=True)):
        same(f"{check}, step {step}", got, wanted)


# The checks


def training(recipe: Recipe) -> None:
    """Whole steps equal the three phases bit for bit, restored in between; the phases equal the reference."""
    built = Built(recipe)
    with tempfile.TemporaryDirectory() as folder:
        saved = built.training.save(Path(folder) / "start")
        whole = _whole(built, recipe.steps)
        built.training.restore(saved)
    for step in range(recipe.steps):
        start = built.snapshot()
        before = _before(built, step, recipe.batch, start)
        losses = _phases_like_reference(built, step, before, start)
        parts = {f"loss {i}": loss for i, loss in enumerate(losses)} | built.snapshot()
        same(f"whole and phases, step {step}", whole[step], parts)


def _phases_like_reference(built: Built, step: int, before: Before, start: Found) -> list[np.ndarray]:
    recipe = built.recipe
    (execution,) = built.forward(step)
    losses = built.losses(execution)
    values = built.values()
    before.masks = _masks(recipe, before.inputs, values)
    built.training.execute_gradient()
    gradients = built.gradients()
    built.training.execute_optimizer_update()
    after = built.snapshot()
    if recipe.is_random:
        return losses
    got = {f"value {n}": array for n, array in values.items()}
    got |= {f"gradient {n}": array for n, array in gradients.items()}
    got |= after
    present = set(gradients)
    wanted = reference.step(recipe, before, present=present)
    if missing := wanted.reached - present:
        raise Mismatch("reference", f"gradient {min(missing)}", "it was not computed")
    state = {f"state {n}.{i}": array for n, arrays in before.state.items() for i, array in enumerate(arrays)}
    expected = state | wanted.found

    def noisy(size: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return state | reference.step(recipe, before, present=present, noise=size, generator=generator).found

    near(f"reference, step {step}", got, expected, PRECISIONS[recipe.compute_type], noisy)
    return losses


def evaluation(recipe: Recipe) -> None:
    """Evaluation during training and an inference graph over the same layers equal the reference."""
    built = Built(recipe)
    built.whole(0)
    start = built.snapshot()
    before = _before(built, 1, recipe.batch, start)
    leaves = before.parameters | before.inputs
    wanted, _ = reference.forward(recipe, before, leaves, training=False)

    def noisy(size: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        values, _ = reference.forward(recipe, before, leaves, training=False, noise=size, generator=generator)
        return {f"value {n}": array for n, array in values.items()}

    expected = {f"value {n}": array for n, array in wanted.items()}
    precision = PRECISIONS[recipe.compute_type]
    built.training.execute(*built.data(1), options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)
    evaluated = {f"value {n}": array for n, array in built.values().items()}
    near("evaluation", evaluated, expected, precision, noisy)
    same("evaluation changes nothing", built.snapshot(), start)
    inference = sg.InferenceGraph([built.graphs[0]])
    read = {t for node in inference.nodes for t in node.arguments}
    roles = {r: {f"v{one.number}": one for one in recipe.inputs if one.role == r} for r in (*FED, "constant", "trained")}
    fed = [{k: built.tensors[v.number] for k, v in roles[r].items() if built.tensors[v.number] in read} for r in FED]
    fixed = {k: built.tensors[v.number] for r in ("constant", "trained") for k, v in roles[r].items()}
    inference.add_inputs(*fed)
    made = {f"o{n}": built.tensors[n] for op in recipe.ops for n in op.results if n in built.tensors}
    inference.add_outputs(made)
    fixed = {k: t for k, t in fixed.items() if t in read}
    inference.compile(built.device, input_tensors=fixed, compute_type=recipe.compute_type)
    data = [{k: v for k, v in part.items() if k in names} for part, names in zip(built.data(1), fed, strict=True)]
    inference.execute(*data)
    got = {f"value {n}": array for n, array in built.values().items()}
    near("inference", got, expected, precision, noisy)


def rows(recipe: Recipe) -> None:
    """Another batch size gives what the reference gives, or is refused."""
    built, count = Built(recipe), recipe.rows
    start = built.snapshot()
    before = _before(built, 0, count, start)
    try:
        (execution,) = built.forward(0, count)
    except sg.StepgraphError:
        same("a refused batch size changes nothing", built.snapshot(), start)
        return
    losses, values = built.losses(execution), built.values()
    before.masks = _masks(recipe, before.inputs, values)
    built.training.execute_gradient()
    gradients = built.gradients()
    built.training.execute_optimizer_update()
    parts = {f"loss {i}": loss for i, loss in enumerate(losses)} | built.snapshot()
    whole = Built(recipe)
    found = {f"loss {i}": loss for i, loss in enumerate(whole.whole(0, count))} | whole.snapshot()
    same("whole and phases, another batch size", found, parts)
    if recipe.is_random:
        return
    got = {f"value {n}": array for n, array in values.items()} | {f"gradient {n}": a for n, a in gradients.items()}
    wanted = reference.step(recipe, before, present=set(gradients))
    if wanted.reached - set(gradients):
        raise Mismatch("another batch size", "gradients", f"{wanted.reached - set(gradients)} are missing")

    def noisy(size: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return reference.step(recipe, before, present=set(gradients), noise=size, generator=generator).found

    near("another batch size", got, wanted.found, PRECISIONS[recipe.compute_type], noisy)


def memory(recipe: Recipe) -> None:
    """A limit that makes the step compute again what it dropped changes no bit."""
    wide = replace(recipe, batch=LARGE, steps=2)
    try:
        plain = Built(wide)
    except sg.ShapeError:  # a layer that fixes the batch
        return
    total = plain.training.memory_plan.total
    wanted = _whole(plain, wide.steps)
    for share in (0.5, 0.75, 0.9):
        try:
            limited = Built(wide, memory_limit=int(share * total))
        except sg.MemoryLimitError:
            continue
        if limited.training.memory_plan.total > share * total:
            raise Mismatch("memory", "plan", f"{limited.training.memory_plan.total} bytes, {share} of {total} allowed")
        _equal("memory limit", _whole(limited, wide.steps), wanted)
        return


def resume(recipe: Recipe) -> None:
    """A run that is saved and goes on in a new graph, or in one loaded from the file alone, is the same run."""
    straight = _whole(Built(recipe), recipe.steps)
    first = Built(recipe)
    _whole(first, 1)
    with tempfile.TemporaryDirectory() as folder:
        path = first.training.save(Path(folder) / "middle")
        second = Built(replace(recipe))
        second.training.restore(path)
        _equal("resumed", _whole(second, recipe.steps - 1, 1), straight[1:])
        loaded = sg.load(path, first.device)
        _equal("loaded", _loaded(first, loaded, recipe.steps - 1), straight[1:])


def _loaded(first: Built, loaded: Any, steps: int) -> list[Found]:
    """Whole steps of a loaded graph, read under the numbers of the recipe."""
    recipe = first.recipe
    layers: dict[str, sg.Tensor] = {}
    for node in loaded.nodes:
        for tensor in (*node.layer.parameters.values(), *node.layer.statistics.values(), *node.sources):
            layers[tensor.label] = tensor
    twin = object.__new__(Built)
    twin.__dict__ |= {**first.__dict__, "trainings": [loaded], "given": {}}
    twin.held = {n: layers[f"p{n}"] for n in first.held}
    results = [t for node in loaded.nodes for t in node.results]
    made = [n for op in recipe.ops for n in op.results if n in first.tensors]
    twin.tensors = {one.number: layers[f"v{one.number}"] for one in recipe.inputs if f"v{one.number}" in layers}
    twin.tensors |= dict(zip(made, results, strict=True))
    twin.given = {n: loaded.allocate_user_gradient(twin.tensors[n]) for n in recipe.user_gradients}
    return _whole(twin, steps, 1)


def numerics(recipe: Recipe) -> None:
    """CHECK_NUMERICS changes no bit, and check_numerics and profile change nothing."""
    wanted = _whole(Built(recipe), 2)
    checked = Built(recipe, Options.CHECK_NUMERICS)
    _equal("CHECK_NUMERICS", _whole(checked, 2), wanted)
    start = checked.snapshot()
    report = checked.training.check_numerics()
    if not report.ok:
        raise Mismatch("check_numerics", "report", str(report))
    same("check_numerics changes nothing", checked.snapshot(), start)
    checked.training.profile(repeat=1)
    same("profile changes nothing", checked.snapshot(), start)


def options(recipe: Recipe) -> None:
    """Gradients that nobody needs, and layers under debugging, change no bit; gradients of inputs are right."""
    wanted = _whole(Built(recipe), 2)
    curious = Built(recipe, Options.COMPUTE_ALL_GRADIENTS | Options.DEBUG_LAYERS)
    start = curious.snapshot()
    _equal("COMPUTE_ALL_GRADIENTS and DEBUG_LAYERS", _whole(curious, 2), wanted)
    again = Built(recipe, Options.COMPUTE_ALL_GRADIENTS)
    before = _before(again, 0, recipe.batch, start)
    again.forward(0)
    before.masks = _masks(recipe, before.inputs, again.values())
    again.training.execute_gradient()
    if recipe.is_random:
        return
    expected = reference.step(recipe, before).found
    got = {}
    for one in recipe.inputs:
        name = f"input gradient {one.number}"
        handle = again.training.gradient_tensor(again.tensors[one.number])
        if handle is not None and name in expected:
            got[name] = handle.torch().numpy().copy()
        elif name in expected and one.role == "input" and bool((expected[name] != 0).any()):
            raise Mismatch("COMPUTE_ALL_GRADIENTS", name, "it was not computed")

    def noisy(size: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return reference.step(recipe, before, noise=size, generator=generator).found

    near("gradients of inputs", got, expected, PRECISIONS[recipe.compute_type], noisy)


def deterministic(recipe: Recipe) -> None:
    """PyTorch's own kernels give the same first step up to rounding."""
    chosen, plain = Built(recipe), Built(recipe, Options.DETERMINISTIC)
    start = chosen.snapshot()
    _near_one_step("DETERMINISTIC", recipe, chosen, start, [b.phases(0) for b in (chosen, plain)], plain.snapshot())


def _near_one_step(
    check: str, recipe: Recipe, built: Built, start: Found, losses: list[list[np.ndarray]], other: Found
) -> None:
    """One step of `built` and of another graph, whose parameters are `other`, agree up to rounding."""
    values = built.values()
    before = _before(built, 0, recipe.batch, start, values)
    before.time = 1
    got = built.snapshot() | {f"value {i}": loss for i, loss in enumerate(losses[0])}
    wanted = {name: _double(array) for name, array in other.items()}
    wanted |= {f"value {i}": _double(loss) for i, loss in enumerate(losses[1])}
    numbers = [n for op in recipe.losses for n in op.results]

    def noisy(size: float, generator: torch.Generator) -> dict[str, torch.Tensor]:
        exact = reference.step(recipe, before).found
        moved = reference.step(recipe, before, noise=size, generator=generator).found
        found = {n: a + (moved[n].reshape(a.shape) - exact[n].reshape(a.shape)) if n in moved else a for n, a in wanted.items()}
        for i, number in enumerate(numbers):
            change = moved[f"value {number}"] - exact[f"value {number}"]
            found[f"value {i}"] = wanted[f"value {i}"] + change.reshape(-1)
        return found

    near(check, got, wanted, PRECISIONS[recipe.compute_type], noisy)


def linked(recipe: Recipe) -> None:
    """Two linked graphs learn what one graph learns."""
    if not recipe.cut:
        return
    recipe = replace(recipe, by_constructor=recipe.by_constructor and may_construct(recipe))
    one, two = Built(recipe), Built(recipe, linked=True)
    start = one.snapshot()
    _near_one_step("linked", recipe, one, start, [b.phases(0) for b in (one, two)], two.snapshot())


def channels_last(recipe: Recipe) -> None:
    """Images with their channels last, the order of GPUs, give the same first step up to rounding."""
    if not any(op.kind == "convolution" for op in recipe.ops):
        return
    from tests.fuzz.layouts import channels_last as last

    with last():
        turned = Built(recipe)
        phases = Built(recipe)
    plain = Built(recipe, Options.DETERMINISTIC)
    start = plain.snapshot()
    whole = turned.whole(0)
    losses = [phases.phases(0), plain.phases(0)]
    found, wanted = turned.snapshot(), phases.snapshot()
    same("channels last, whole and phases", found | _named(whole), wanted | _named(losses[0]))
    _near_one_step("channels last", recipe, plain, start, losses[::-1], wanted)


def _named(losses: list[np.ndarray]) -> Found:
    return {f"loss {i}": loss for i, loss in enumerate(losses)}


CHECKS: dict[str, Callable[[Recipe], None]] = {
    "training": training,
    "evaluation": evaluation,
    "rows": rows,
    "memory": memory,
    "resume": resume,
    "numerics": numerics,
    "options": options,
    "deterministic": deterministic,
    "linked": linked,
    "channels last": channels_last,
}
