"""A PyTorch model as a graph: record it, divide it at its modules, wire it, compare the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from stepgraph.errors import ArgumentError, DataTypeError, StateError, StepgraphError, UnknownNameError
from stepgraph.interop.batch import Differs, joined, require_calls, transferred
from stepgraph.interop.capture import Capture, capture, enclosing, state_of
from stepgraph.interop.check import agree_on_one_row, compare, require_repeatable
from stepgraph.interop.example import WHERE, Example, read_example
from stepgraph.interop.imported import Imported
from stepgraph.interop.masks import without_constant_masks
from stepgraph.interop.plan import Plan, plan
from stepgraph.interop.wiring import Wired, Wiring
from stepgraph.layers.torch_layer import TorchLayer
from stepgraph.layers.torch_state import entries, evaluating
from stepgraph.tensors.extents import BATCH
from stepgraph.tensors.tensor import Tensor

MANY = 4099  # more rows than the sizes at which models divide a batch; a prime, so that what they round shows


def from_torch(
    model: nn.Module,
    example: Any,
    *,
    outputs: Sequence[str] | None = None,
    native: bool = True,
    whole: bool = False,
    depth: int | None = None,
    share: bool = True,
    check: bool = True,
) -> Imported:
    """A PyTorch model as a graph, with the model's own names, tensors and numbers.

    The model runs a few times without memory. Every module that has no submodules, or has tensors of its own, becomes
    a node; so does each stretch of functions between modules. Where that is not possible, the module around it
    becomes one node. Training and inference are recorded apart, and the number of rows stays free.

    Args:
        model: any module; it is not changed.
        example: arrays for one call: a dictionary by name, a tuple by position, or one array. Only shapes and types
            count. A `Tensor` in the place of an array declares a fixed batch size, or `BATCH`.
        outputs: paths of the results to compute, such as `["logits"]` or `["hidden_states.3"]`; the first one is what
            a loss compares. By default, all floating-point results.
        native: whether to use stepgraph's own layers where they compute the same numbers.
        whole: whether the whole model becomes one node.
        depth: modules at this depth become one node each: 1 for the model's own children.
        share: whether to use the model's memory on the CPU, so that the model sees every update.
        check: whether to compare the results with the model's, in inference mode on random numbers.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.BatchNorm1d(8))
        >>> imported = from_torch(model, torch.zeros(4, 3, 4))
        >>> [(row.path, row.how) for row in imported.rows]
        [('0', 'native'), ('1', 'native'), ('2', 'wrapped')]
        >>> imported.training(LossLayer.mean_squared_error(), SGDOptimizer(0.1), Tensor((BATCH, 8)))
        <TrainingGraph with 3 nodes>
    """
    if not isinstance(model, nn.Module):
        raise DataTypeError(WHERE, f"{type(model).__name__} is not a torch.nn.Module", fix="pass a module")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise ArgumentError(WHERE, f"depth is {depth!r}", fix="pass an integer ≥ 0, or None")
    every = TorchLayer(model, share=share)  # refuses modules that cannot be layers, and makes their tensors
    found = read_example(model, example)
    with _settings(model):
        fixed = evaluating(model) if model.training else ()
        cut = _Cut(model, {"": "whole=True"} if whole else {}, depth)
        recorded = _recorded(model, found, outputs, cut, fixed)
        imported = _wired(model, recorded, every, cut, fixed, native)
        if check:
            while recorded.for_one_row is not None and not agree_on_one_row(model, recorded.example, imported):
                cut.widen(dict([recorded.for_one_row.args]))
                recorded = _recorded(model, found, outputs, cut, fixed)
                imported = _wired(model, recorded, every, cut, fixed, native)
            compare(model, recorded.example, imported)
            assigned = {True: recorded.training.assigned, False: recorded.inference.assigned}
            require_repeatable(model, recorded.example, assigned, fixed)
    return imported


def _wired(
    model: nn.Module, recorded: _Recorded, every: TorchLayer, cut: _Cut, fixed: tuple[str, ...], native: bool
) -> Imported:
    """The graph of a plan, with the tensors of a layer that holds all of the model's."""
    tensors = {id(one.array): every.tensors[one.name] for one in entries(model) if one.name in every.tensors}
    rows = BATCH if recorded.example.is_open else recorded.example.rows
    reached = _reached(recorded, tensors, model)
    frozen = {tensors[id(one)] for one in model.parameters() if id(one) in tensors}.difference(*reached.values())
    wiring = Wiring(model, tensors, recorded.training.held, fixed, cut.forced, native, rows, frozenset(frozen))
    inputs = {name: Tensor(one, label=name) for name, one in recorded.example.descriptors.items()}
    wired = wiring.wire(recorded.plan, inputs)
    names = {name: tensors[id(array)] for name, array in state_of(model).items() if id(array) in tensors}
    wired.graph.set_origin({name: names[name] for name in model.state_dict() if name in names})
    return Imported(wired.graph, _used(inputs, wired), wired.outputs, names, tuple(wired.rows), model, reached)


@dataclass
class _Cut:
    """Which modules become one node.

    Args:
        model: the model.
        forced: paths of modules that must, and why.
        depth: the depth at which all do.
    """

    model: nn.Module
    forced: dict[str, str]
    depth: int | None

    def __call__(self, path: str, module: nn.Module) -> bool:
        if path in self.forced:
            return True
        if not path:
            return self.depth == 0
        if self.depth is not None and path.count(".") + 1 >= self.depth:
            return True
        owns = any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False))
        return owns or not any(True for _ in module.children())

    def widen(self, problems: dict[str, str]) -> None:
        """Makes the modules with a problem one node each: the one at the path, or the next one around it."""
        called = {path: module for path, module in self.model.named_modules()}
        for path, why in problems.items():
            around = [one for one in enclosing(path) if one not in self.forced and _is_called(called.get(one))]
            if not around:
                raise StateError(f"{WHERE} ({type(self.model).__name__})", f"the model cannot become a graph: {why}")
            self.forced[around[0]] = why


def _is_called(module: nn.Module | None) -> bool:
    return module is not None and not isinstance(module, nn.ModuleList | nn.ModuleDict)


class _Modes(NamedTuple):
    """A model's recordings in both modes, and how the calls for a single row differ from them."""

    example: Example
    training: Capture
    inference: Capture
    for_one_row: Differs | None = None


@dataclass
class _Recorded:
    """A model's recordings in both modes, as a plan."""

    example: Example
    training: Capture
    inference: Capture
    plan: Plan
    wanted: Sequence[str]
    for_one_row: Differs | None


def _recorded(
    model: nn.Module, example: Example, outputs: Sequence[str] | None, cut: _Cut, fixed: tuple[str, ...]
) -> _Recorded:
    """Records until everything can be wired; each time, modules that could not be divided become one node."""
    start = dict(cut.forced)
    while True:
        try:
            example, training, inference, for_one_row = _both(model, example, cut, fixed)
        except Differs as differs:
            path, why = differs.args
            if "" in cut.forced:  # not even the whole model takes another number of rows
                example, cut.forced = example.fixed(), dict(start)
            else:
                cut.widen({path: why})
            continue
        wanted = _wanted(model, outputs, training, inference)
        training, inference = without_constant_masks(training), without_constant_masks(inference)
        made = plan(training, inference, wanted)
        if not made.problems:
            return _Recorded(example, training, inference, made, wanted, for_one_row)
        cut.widen(made.problems)


def _both(model: nn.Module, example: Example, cut: _Cut, fixed: tuple[str, ...]) -> _Modes:
    """The recordings in training and in inference, with numbers that follow the batch, and which inputs do."""
    with _mode(model, True, fixed):
        example, first, more = _of_two_sizes(model, example, cut)
        training = first if more is None else joined(first, more)
        in_training = None if more is None else _for_one_row(model, example, cut, training)
        _require_for_many_rows(model, example, cut, training, more)
    with _mode(model, False, fixed):
        second = capture(model, example, first.rows, cut)
        if more is None:
            return _Modes(example, training, second)
        inference = transferred(training, first, second)
        if inference is None:
            inference = joined(second, capture(model, example, more.rows, cut))
        _require_for_many_rows(model, example, cut, inference, more)
        in_inference = _for_one_row(model, example, cut, inference)
    if in_training is not None and in_inference is None:  # a comparison, in inference mode, would not see it
        raise in_training
    return _Modes(example, training, inference, in_inference)


def _of_two_sizes(model: nn.Module, example: Example, cut: _Cut) -> tuple[Example, Capture, Capture | None]:
    """A recording, and one with more rows, in all inputs or in the first; None for a fixed number of rows.

    Models often treat a single row apart, so an example of one row is recorded with two. The other number is odd and
    far from the first, so that what Python rounds or limits shows, unless the model only takes multiples.
    """
    rows = max(example.rows, 2)
    for one in (example, example.only_first()) if example.is_open else ():
        with suppress(StepgraphError):
            first = capture(model, one, rows, cut)
            for more in (16 * rows + 1, 2 * rows):
                with suppress(StepgraphError):
                    return one, first, capture(model, one, more, cut)
    example = example.fixed()
    return example, capture(model, example, example.rows, cut), None


def _for_one_row(model: nn.Module, example: Example, cut: _Cut, found: Capture) -> Differs | None:
    """How the calls for a single row differ from what a joined recording says; None if the model refuses one."""
    try:
        require_calls(found, capture(model, example, 1, cut))
    except Differs as differs:
        return differs
    except StepgraphError:
        pass
    return None


def _require_for_many_rows(model: nn.Module, example: Example, cut: _Cut, found: Capture, more: Capture | None) -> None:
    """Raises `Differs` if the calls for many rows differ from what a joined recording says.

    Models may treat large batches in another way, as `min(256, len(x))` does.
    """
    for many in (MANY, -(-MANY // found.rows) * found.rows) if more is not None and more.rows < MANY else ():
        with suppress(StepgraphError):
            return require_calls(found, capture(model, example, many, cut))


def _wanted(model: nn.Module, outputs: Sequence[str] | None, training: Capture, inference: Capture) -> list[str]:
    """The paths of the results to compute."""
    where = f"{WHERE} ({type(model).__name__})"
    both = [path for path in training.output if path in inference.output]
    if outputs is None:
        floating = [path for path in both if _is_floating(training, path)]
        if not floating:
            known = ", ".join(training.output) or "none"
            raise ArgumentError(where, "the model returns no floating-point array", arrays=known, fix="return one")
        return floating
    if isinstance(outputs, str) or not outputs:
        raise DataTypeError(where, f"outputs is {outputs!r}", fix='pass a list of paths: ["logits"]')
    for path in outputs:
        if path not in both:
            raise UnknownNameError(
                where,
                f"the model returns no array at '{path}'" + (" in both modes" if path in training.output else ""),
                arrays=", ".join(both) or "none",
                fix="use one of these paths",
            )
    return list(dict.fromkeys(outputs))


def _is_floating(found: Capture, path: str) -> bool:
    value = found.output[path]
    return hasattr(value, "number") and found.known[value.number].dtype.is_floating_point


def _reached(recorded: _Recorded, tensors: dict[int, Tensor], model: nn.Module) -> dict[str, frozenset[Tensor]]:
    """By output, the parameters that a gradient reaches: not those with `requires_grad=False`, or behind a `detach`."""
    found = recorded.training
    own = [(name, one) for name, one in model.named_parameters(remove_duplicate=False) if id(one) in tensors]
    trained = {found.state[name]: tensors[id(one)] for name, one in own if one.requires_grad}
    return {
        path: frozenset(trained[number] for number in found.reached[path] if number in trained)
        for path in recorded.wanted
    }


def _used(inputs: dict[str, Tensor], wired: Wired) -> dict[str, Tensor]:
    """The inputs that a node reads."""
    read = {tensor for node in wired.graph.nodes for tensor in node.sources}
    return {name: tensor for name, tensor in inputs.items() if tensor in read}


@contextmanager
def _mode(model: nn.Module, training: bool, fixed: tuple[str, ...]) -> Iterator[None]:
    """Training or inference mode, but for modules that stay in eval mode."""
    modules = dict(model.named_modules())
    before = {path: module.training for path, module in modules.items()}
    try:
        for path, module in modules.items():
            module.training = training and path not in fixed
        yield
    finally:
        for path, module in modules.items():
            module.training = before[path]


@contextmanager
def _settings(model: nn.Module) -> Iterator[None]:
    """Switches off caches of keys and values, which a step has no use for."""
    with ExitStack() as stack:
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False) is True:
                stack.callback(setattr, config, "use_cache", True)
                config.use_cache = False
        yield
