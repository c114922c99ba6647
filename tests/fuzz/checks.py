"""What must hold for every recipe. A check raises `Mismatch`, or whatever stepgraph raises by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import stepgraph as sg
from tests.fuzz import reference
from tests.fuzz.build import FED, Built
from tests.fuzz.case import Case, Found, before_step, kept_state, masks, named, whole_steps
from tests.fuzz.compare import Mismatch, near, same
from tests.fuzz.layouts import channels_last as channels_last_inside

Options = sg.GraphCompilationOptions
WIDE = 160  # rows that make results worth computing again


def _equal(check: str, got: list[Found], wanted: list[Found]) -> None:
    for step, (one, other) in enumerate(zip(got, wanted, strict=True)):
        same(f"{check}, step {step}", one, other)


def _like_the_reference(case: Case, check: str, built: Built, step: int, rows: int) -> Found:
    """One step in three phases, compared with the reference; its losses and what it leaves behind."""
    recipe = case.recipe
    before = before_step(built, step, rows, built.snapshot())
    (execution,) = built.forward(step, None if rows == recipe.batch else rows)
    losses, values = built.losses(execution), built.values()
    before.masks = masks(recipe, before.inputs, values)
    built.training.execute_gradient()
    gradients = built.gradients()
    built.training.execute_optimizer_update()
    after = built.snapshot()
    if not recipe.is_random:
        got = {f"value {n}": array for n, array in values.items()} | after
        got |= {f"gradient {n}": array for n, array in gradients.items()}
        wanted = reference.step(recipe, before, present=set(gradients))
        if missing := wanted.reached - set(gradients):
            raise Mismatch(check, f"gradient {min(missing)}", "it was not computed")
        near(check, got, kept_state(before) | wanted.found, case.precision, case.noisy(before, set(gradients)))
    return named(losses) | after


# The checks


def training(case: Case) -> None:
    """Whole steps equal the three phases bit for bit, restored in between; the phases equal the reference."""
    whole, built = case.straight, case.restart()
    for step in range(case.recipe.steps):
        parts = _like_the_reference(case, f"reference, step {step}", built, step, case.recipe.batch)
        same(f"whole and phases, step {step}", whole[step], parts)


def evaluation(case: Case) -> None:
    """Evaluation during training, and an inference graph over the same layers, equal the reference."""
    recipe, built = case.recipe, case.restart()
    built.whole(0)
    start = built.snapshot()
    before = before_step(built, 1, recipe.batch, start)
    leaves = before.parameters | before.inputs

    def evaluate(size: float = 0.0, generator: torch.Generator | None = None) -> dict[str, torch.Tensor]:
        found, _ = reference.forward(recipe, before, leaves, training=False, noise=size, generator=generator)
        return {f"value {n}": array for n, array in found.items()}

    built.training.execute(*built.data(1), options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)
    wanted, got = evaluate(), {f"value {n}": array for n, array in built.values().items()}
    near("evaluation", got, wanted, case.precision, evaluate)
    same("evaluation changes nothing", built.snapshot(), start)
    _infer(built)
    got = {f"value {n}": array for n, array in built.values().items()}
    near("inference", got, wanted, case.precision, evaluate)


def _infer(built: Built) -> None:
    """Runs an inference graph over the layers of a training graph, with all results as outputs."""
    recipe, inference = built.recipe, sg.InferenceGraph([built.graphs[0]])
    read = {tensor for node in inference.nodes for tensor in node.arguments}

    def tensors(*roles: str) -> dict[str, sg.Tensor]:
        found = {f"v{one.number}": built.tensors[one.number] for one in recipe.inputs if one.role in roles}
        return {name: tensor for name, tensor in found.items() if tensor in read}

    fed = [tensors(role) for role in FED]
    inference.add_inputs(*fed)
    made = {n: built.tensors[n] for op in recipe.ops for n in op.results if n in built.tensors}
    inference.add_outputs({f"o{n}": tensor for n, tensor in made.items()})
    fixed = tensors("constant", "trained")
    inference.compile(built.device, input_tensors=fixed, compute_type=recipe.compute_type)
    data = [{k: v for k, v in part.items() if k in names} for part, names in zip(built.data(1), fed, strict=True)]
    inference.execute(*data)


def rows(case: Case) -> None:
    """Another batch size gives what the reference gives, whole as in phases, or is refused."""
    built, count = case.restart(), case.recipe.rows
    try:
        whole = named(built.whole(0, count)) | built.snapshot()
    except sg.StepgraphError:
        same("a refused batch size changes nothing", built.snapshot(), case.start)
        return
    parts = _like_the_reference(case, "another batch size", case.restart(), 0, count)
    same("another batch size, whole and phases", whole, parts)


def memory(case: Case) -> None:
    """A limit that makes the step compute again what it dropped changes no bit."""
    wide = replace(case.recipe, batch=WIDE)
    try:
        plain = Built(wide)
    except sg.ShapeError:  # a layer that fixes the batch
        return
    total, wanted = plain.training.memory_plan.total, whole_steps(plain, 2)
    for share in (0.85, 0.97):
        limit = int(share * total)
        try:
            limited = Built(wide, memory_limit=limit)
        except sg.MemoryLimitError:
            continue
        if limited.training.memory_plan.total > limit:
            raise Mismatch("memory limit", "plan", f"{limited.training.memory_plan.total} bytes, {limit} allowed")
        _equal("memory limit", whole_steps(limited, 2), wanted)
        return


def resume(case: Case) -> None:
    """A run that is saved and goes on in a new graph, or in one loaded from the file alone, is the same run."""
    recipe, straight, built = case.recipe, case.straight, case.restart()
    built.whole(0)
    path = built.training.save(case.folder / "middle")
    second = Built(recipe)
    second.training.restore(path)
    _equal("resumed", whole_steps(second, recipe.steps - 1, 1), straight[1:])
    loaded = _loaded(built, sg.load(path, built.device))
    _equal("loaded", whole_steps(loaded, recipe.steps - 1, 1), straight[1:])


def _loaded(first: Built, graph: Any) -> Built:
    """A loaded graph under the numbers of the recipe it was made from."""
    by_label: dict[str, sg.Tensor] = {}
    for node in graph.nodes:
        layer = node.layer
        for tensor in (*layer.parameters.values(), *layer.statistics.values(), *node.arguments):
            by_label[tensor.label] = tensor
    twin = object.__new__(Built)
    twin.__dict__ |= {**first.__dict__, "trainings": [graph]}
    twin.held = {n: by_label[f"p{n}"] for n in first.held}
    results = [tensor for node in graph.nodes for tensor in node.results]
    made = [n for op in first.recipe.ops for n in op.results if n in first.tensors]
    numbers = [one.number for one in first.recipe.inputs if f"v{one.number}" in by_label]
    twin.tensors = {n: by_label[f"v{n}"] for n in numbers} | dict(zip(made, results, strict=True))
    twin.given = {n: graph.allocate_user_gradient(twin.tensors[n]) for n in first.recipe.user_gradients}
    return twin


def numerics(case: Case) -> None:
    """CHECK_NUMERICS changes no bit, and check_numerics and profile change nothing."""
    wanted, checked = case.straight[:2], Built(case.recipe, Options.CHECK_NUMERICS)
    _equal("CHECK_NUMERICS", whole_steps(checked, 2), wanted)
    start = checked.snapshot()
    report = checked.training.check_numerics()
    if not report.ok:
        raise Mismatch("check_numerics", "report", str(report))
    same("check_numerics changes nothing", checked.snapshot(), start)
    checked.training.profile(repeat=1)
    same("profile changes nothing", checked.snapshot(), start)


def options(case: Case) -> None:
    """Gradients that nobody needs, and layers under debugging, leave the training alone."""
    curious = Built(case.recipe, Options.COMPUTE_ALL_GRADIENTS | Options.DEBUG_LAYERS)
    got = whole_steps(curious, 1)[0]
    case.restart().phases(0)
    case.near_one_step("COMPUTE_ALL_GRADIENTS", case.first.values(), got, case.straight[0])


def input_gradients(case: Case) -> None:
    """With COMPUTE_ALL_GRADIENTS the gradients of inputs are right."""
    recipe, built = case.recipe, Built(case.recipe, Options.COMPUTE_ALL_GRADIENTS)
    before = before_step(built, 0, recipe.batch, built.snapshot())
    built.forward(0)
    before.masks = masks(recipe, before.inputs, built.values())
    built.training.execute_gradient()
    if recipe.is_random:
        return
    expected, got = reference.step(recipe, before).found, {}
    for one in recipe.inputs:
        name = f"input gradient {one.number}"
        handle = built.training.gradient_tensor(built.tensors[one.number])
        if handle is not None and name in expected:
            got[name] = handle.torch().numpy().copy()
        elif name in expected and one.role == "input" and bool((expected[name] != 0).any()):
            raise Mismatch("gradients of inputs", name, "it was not computed")
    near("gradients of inputs", got, expected, case.precision, case.noisy(before))


def deterministic(case: Case) -> None:
    """PyTorch's own kernels give the same first step up to rounding."""
    plain = Built(case.recipe, Options.DETERMINISTIC)
    wanted = named(plain.phases(0)) | plain.snapshot()
    case.near_one_step("DETERMINISTIC", plain.values(), case.straight[0], wanted)


def linked(case: Case) -> None:
    """Two linked graphs learn what one graph learns."""
    drops = any(op.kind == "dropout" and op.settings["rate"] for op in case.recipe.ops)
    if not case.recipe.cut or drops or case.recipe.is_random:  # each graph has a random stream of its own
        return
    two = Built(case.recipe, linked=True)
    got = named(two.phases(0)) | two.snapshot()
    case.near_one_step("linked", two.values(), got, case.straight[0])


def channels_last(case: Case) -> None:
    """Images with their channels last, the order of GPUs, give the same first step up to rounding."""
    if not any(op.kind == "convolution" for op in case.recipe.ops):
        return
    with channels_last_inside():
        built = Built(case.recipe)
        built.training.save(case.folder / "turned")
        whole = named(built.whole(0)) | built.snapshot()
        built.training.restore(case.folder / "turned")
        got = named(built.phases(0)) | built.snapshot()
    same("channels last, whole and phases", whole, got)
    case.near_one_step("channels last", built.values(), got, case.straight[0])


CHECKS: dict[str, Callable[[Case], None]] = {
    "training": training,
    "evaluation": evaluation,
    "rows": rows,
    "memory": memory,
    "resume": resume,
    "numerics": numerics,
    "options": options,
    "input gradients": input_gradients,
    "deterministic": deterministic,
    "linked": linked,
    "channels last": channels_last,
}
