"""A graph compared with the model it was imported from, on random numbers in inference mode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from stepgraph.errors import ArgumentError, StateError, reason
from stepgraph.interop.example import WHERE, Example
from stepgraph.interop.imported import Imported
from stepgraph.layers.layer import Scope
from stepgraph.layers.torch_answers import Answers
from stepgraph.layers.torch_state import Role, entries, flattened, holding
from stepgraph.system import surroundings, torch_private
from stepgraph.tensors.tensor import Tensor

CLOSE = 1e-5  # of the largest element
FEW_ROWS = 2


def compare(model: nn.Module, example: Example, imported: Imported) -> None:
    """Raises an error that names the first layer whose result differs from the module's."""
    found = _computed(model, example, imported, _few(example))
    for path, tensor in imported.outputs.items():
        apart = _apart(found.expected[path], found.results[tensor])
        if apart is not None:
            raise _error(model, imported, found, path, apart)


def _few(example: Example) -> tuple[int, int]:
    """A small number of rows, and all of the example's."""
    return (min(example.rows, FEW_ROWS) if example.is_open else example.rows), example.rows


def agree_on_one_row(model: nn.Module, example: Example, imported: Imported) -> bool:
    """Whether the graph computes what the model does for a single row, if the model takes one."""
    try:
        found = _computed(model, example, imported, (1,))
    except ArgumentError:
        return True
    except StateError:
        return False
    return all(_apart(found.expected[one], found.results[imported.outputs[one]]) is None for one in imported.outputs)


class _Computed(NamedTuple):
    """What both computed: the model's results, those of its modules that are layers, and those of the graph."""

    expected: dict[str, torch.Tensor]
    modules: dict[str, list[Any]]
    results: dict[Tensor, torch.Tensor]


def _computed(model: nn.Module, example: Example, imported: Imported, sizes: Sequence[int]) -> _Computed:
    """Both on the first of the numbers of rows that the model takes."""
    with surroundings.tracing(), torch_private.nothing_compiled():  # with gradients, since a model may use its own
        rows, values, (expected, modules) = _on_few_rows(
            model, example, sizes, lambda given: _run(model, example, given, imported)
        )
        try:
            results, drew = _results(imported, {imported.inputs[n]: values[n] for n in imported.inputs}, rows, example)
        except (ArgumentError, StateError):  # rows have no part in it
            raise
        except Exception as error:
            raise StateError(
                f"{WHERE} ({type(model).__name__})",
                f"the model runs on {rows} row{'s' * (rows > 1)}, but the graph does not: {reason(error)[:300]}",
                fix="import the module whose code depends on the number of rows as one node: depth=, or whole=True",
            ) from error
        if drew:  # the model with the graph's random numbers; otherwise it answers all calls itself
            with Answers(_SameDraws({}, batch=(rows, rows))):
                expected, modules = _run(model, example, values, imported)
    return _Computed(expected, modules, results)


class _SameDraws(Scope):
    """A scope in which a draw depends only on its shape, not on the node or on earlier draws."""

    def keep_mask(self, x: torch.Tensor, rate: float, seed: int = 0) -> torch.Tensor:
        """The mask of this shape."""
        self.draws[seed] = 0
        return super().keep_mask(x, rate, seed)

    def random(self, shape: Sequence[int]) -> torch.Tensor:
        """The numbers of this shape."""
        self.draws[0] = 0
        return super().random(shape)


def require_repeatable(
    model: nn.Module, example: Example, assigned: Mapping[bool, Sequence[str]], fixed: Collection[str]
) -> None:
    """Raises an error if a second call gives other numbers because of what the first one assigned.

    Args:
        model: the model.
        example: its inputs.
        assigned: attributes that a call assigns, in training and in inference.
        fixed: paths of modules that stay in eval mode.
    """
    for training in (one for one in assigned if assigned[one]):
        modes = {one: {"training": training and path not in fixed} for path, one in model.named_modules()}
        with surroundings.tracing(), torch_private.nothing_compiled():
            _, _, (first, second) = _on_few_rows(model, example, _few(example), partial(_twice, model, example, modes))
        if first.keys() != second.keys() or any(_apart(first[path], second[path]) is not None for path in first):
            raise StateError(
                f"{WHERE} ({type(model).__name__})",
                f"a second call gives other numbers{' in training' * training}, but a graph repeats the first one",
                assigned=", ".join(assigned[training]),
                fix="keep what changes in a buffer, or pass it as an input; check=False accepts the first call",
            )


def _twice(
    model: nn.Module, example: Example, settings: Mapping[nn.Module, Any], values: Mapping[str, torch.Tensor]
) -> list[dict[str, torch.Tensor]]:
    """The results of two calls with the same random numbers and buffers; the second sees what the first one left."""
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    own = {one.name: one.array for one in entries(model) if one.role is not Role.PARAMETER}
    found = []
    with ExitStack() as stack:
        for modes in (settings, {}):
            arguments, named = example.call({name: value.clone().to(device) for name, value in values.items()})
            again = {id(one.array): own[one.name].clone() for one in entries(model) if one.name in own}
            stack.enter_context(holding(model, again, modes))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                output = model(*arguments, **named)
            found.append({path: array.detach().cpu() for path, array in flattened(output).items()})
    return found


def _on_few_rows(
    model: nn.Module, example: Example, sizes: Sequence[int], run: Callable[[Mapping[str, torch.Tensor]], Any]
) -> tuple[int, dict[str, torch.Tensor], Any]:
    """What a function of the inputs returns for the first number of rows: indices in an example may need all of them.

    Models may refuse numbers below 0 or above 1, as a cross entropy with images as targets does. They get such numbers
    next and, if they refuse these, too, the example's own.
    """
    for draw in (torch.randn, torch.rand, None):
        for rows in dict.fromkeys(sizes):
            values = {name: _values(example, name, rows, draw) for name in example.descriptors}
            try:
                return rows, values, run(values)
            except Exception as error:
                failure = error
    problem = f"the model runs neither on random numbers nor on the example: {type(failure).__name__}: "
    fix = "pass an example with valid numbers, or check=False"
    raise ArgumentError(f"{WHERE} ({type(model).__name__})", problem + reason(failure)[:300], fix=fix) from failure


def _values(example: Example, name: str, rows: int, draw: Callable[..., torch.Tensor] | None) -> torch.Tensor:
    """Random numbers, or the example's own; integers and booleans always are, because those are in range."""
    shape, kind = example.shape(name, rows), example.descriptors[name].data_type.torch
    if kind.is_floating_point and draw is not None:
        return draw(shape, generator=torch.Generator().manual_seed(0)).to(kind)
    given = example.arrays[name]
    if given is None:
        return torch.zeros(shape, dtype=kind)
    return given[: shape[0]].to(kind).cpu()


def _run(
    model: nn.Module, example: Example, values: Mapping[str, torch.Tensor], imported: Imported
) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """The model's results in eval mode, and those of each module that is a layer."""
    found: dict[str, list[Any]] = {}
    hooks = []
    own = {path: module for path, module in model.named_modules() if path in imported.layers}
    for path, module in own.items():

        def keep(_: nn.Module, __: Any, output: Any, path: str = path) -> None:
            found.setdefault(path, []).append(list(flattened(output).values()))

        hooks.append(module.register_forward_hook(keep))
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    arguments, settings = example.call({name: value.clone().to(device) for name, value in values.items()})
    buffers = {id(one.array): one.array.clone() for one in entries(model) if one.role is not Role.PARAMETER}
    try:
        with holding(model, buffers, {module: {"training": False} for module in model.modules()}):
            output = model(*arguments, **settings)
    finally:
        for hook in hooks:
            hook.remove()
    return {path or "output": array.cpu() for path, array in flattened(output).items()}, found


def _results(
    imported: Imported, values: Mapping[Tensor, torch.Tensor], rows: int, example: Example
) -> tuple[dict[Tensor, torch.Tensor], bool]:
    """The results of all nodes in inference mode, and whether one drew random numbers."""
    found, drew = dict(values), False
    declared = next(iter(imported.inputs.values())).shape[0] if imported.inputs else rows
    for node in imported.graph.nodes:
        own = {**node.layer.parameters, **node.layer.statistics, **node.layer.constants}.values()
        arrays = {tensor: tensor.array() for tensor in own}
        batch = (declared, rows) if example.is_open else (rows, rows)
        scope = _SameDraws(arrays, training=False, stream=torch.zeros(2, dtype=torch.int64), batch=batch)
        results = node.layer.forward(*(found[tensor] for tensor in node.sources), scope=scope)
        results = results if isinstance(results, tuple | list) else (results,)
        found.update(zip(node.results, results, strict=True))
        drew |= scope.drew
    return found, drew


def _apart(expected: torch.Tensor, found: torch.Tensor) -> float | None:
    """How far two arrays are apart, relative to the largest element; None if they are close."""
    if expected.shape != found.shape and expected.numel() != found.numel():
        return float("inf")
    one, two = expected.detach().reshape(-1).double(), found.detach().cpu().reshape(-1).double()
    same = (one == two) | (one.isnan() & two.isnan())
    if bool(same.all()):
        return None
    largest = one[one.isfinite()].abs().max() if bool(one.isfinite().any()) else one.new_zeros(())
    apart = float((one - two)[~same].abs().max() / largest.clamp_min(1e-30))
    precision = torch.finfo(expected.dtype).eps if expected.dtype.is_floating_point else 0.0
    return apart if not apart <= max(CLOSE, 8 * precision) else None


def _error(
    model: nn.Module,
    imported: Imported,
    found: _Computed,
    path: str,
    apart: float,
) -> StateError:
    calls: dict[str, int] = {}
    by_layer = {row.layer: row.path for row in imported.rows if row.path in found.modules and row.how != "glue"}
    first = "a function between modules"
    for node in imported.graph.nodes:
        name = by_layer.get(node.layer)
        if name is None:
            continue
        call = calls[name] = calls.get(name, -1) + 1
        outputs = found.modules[name]
        expected = outputs[call] if call < len(outputs) else []
        if any(_apart(a, found.results[b]) is not None for a, b in zip(expected, node.results, strict=False)):
            first = f"'{name}'" if name else "the model as one node"
            break
    return StateError(
        f"{WHERE} ({type(model).__name__})",
        f"the graph's '{path}' differs from the model's by {apart:.1e} of its largest element",
        first_that_differs=first,
        fix="import that module as one node: depth=, or whole=True; check=False skips the comparison",
    )
