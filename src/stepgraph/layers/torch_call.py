"""The code of a PyTorch module as a pure function of arrays.

The module's Python code runs, on arrays that stand for its own. What it would change in itself (running statistics,
counters, caches) is returned, and the module is as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from stepgraph.errors import (
    ArgumentError,
    DataTypeError,
    ShapeError,
    StateError,
    StepgraphError,
    UnknownNameError,
    raised_line,
    reason,
)
from stepgraph.layers.failures import explained
from stepgraph.layers.layer import Scope
from stepgraph.layers.torch_answers import Answers
from stepgraph.layers.torch_state import Entry, Role, entries, flattened, holding, is_supported, kind_of, type_names
from stepgraph.random import Drawn, Refusals
from stepgraph.system import torch_private
from stepgraph.tensors.tensor import MAX_DIMENSIONS

# A module holds other arrays while its code runs: one call at a time.
_running = threading.RLock()

Arrays = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Source:
    """In the call of a `TorchLayer`, the place of a source.

    Args:
        index: the position of the source among those of the node.

    Example:
        >>> TorchLayer(torch.nn.MultiheadAttention(8, 2), call=([Source(0)] * 3, {"need_weights": False})).label
        'MultiheadAttention'
    """

    index: int


class Ran(NamedTuple):
    """What a call returned, and new values of arrays that the module changed or assigned, by name."""

    results: tuple[torch.Tensor, ...]
    moved: dict[str, torch.Tensor]


class ModuleCall:
    """A module with a way to call it, and what was seen of it in calls so far.

    Args:
        module: the module.
        call: arguments, with a `Source` in the place of each source; None passes sources by position.
        evaluated: paths of submodules that stay in eval mode.
        returned: paths of the results to return; None for all.

    Attributes:
        entries: the arrays of the module.
        moving: names of arrays that calls change in place or assign.
    """

    def __init__(
        self, module: nn.Module, call: Any, evaluated: Collection[str], returned: Sequence[str] | None = None
    ) -> None:
        self.module, self.entries = module, entries(module)
        self.moving: set[str] = set()
        self._call, self._evaluated, self._returned = call, frozenset(evaluated), returned
        self._in_place: set[str] = set()  # those of the moving ones that change in place
        self._written: set[int] = set()  # positions of sources that change in place

    def run(self, where: str, arrays: Sequence[torch.Tensor], state: Arrays, scope: Scope) -> Ran:
        """Calls the module; neither the module nor `arrays` and `state` change.

        Args:
            where: the layer, for messages.
            arrays: the sources.
            state: what the module holds, by name; arrays without elements may be missing.
            scope: the mode, the compute type, and where random numbers come from.
        """
        given = [array.clone() if i in self._written else array for i, array in enumerate(arrays)]
        held = self._held(given, state)
        versions = {name: torch_private.version(array) for name, array in held.items()}
        entered = [torch_private.version(array) for array in given]
        try:
            with _running:
                output, moved = self._called(where, given, held, versions, scope)
        except StepgraphError:
            raise
        except Exception as error:  # whatever the module's code raises, the error names the layer and the line
            raise _failure(where, self.module, arrays, error) from error
        self._written |= {i for i, array in enumerate(given) if torch_private.version(array) != entered[i]}
        self._in_place |= {name for name in moved if torch_private.version(held[name]) != versions[name]}
        self.moving |= moved.keys()
        return Ran(_results(where, output, held.values(), self._returned), moved)

    def writes_into(self, name: str) -> bool:
        """Whether a call changed an array in place, as opposed to assigning another one."""
        return name in self._in_place

    def places(self) -> list[int] | None:
        """The sources that the call has places for; None if it takes any number."""
        return None if self._call is None else sorted(set(_places(self._call)))

    def _held(self, given: Sequence[torch.Tensor], state: Arrays) -> dict[str, torch.Tensor]:
        """The arrays that the module holds during a call; those that it changes in place are copies."""
        found = {}
        for one in self.entries:
            if one.name in state:
                array = state[one.name].reshape(one.array.shape)
                found[one.name] = array.clone() if one.name in self._in_place else array
            elif given:  # without elements, only its device matters
                found[one.name] = torch.empty(one.array.shape, dtype=one.array.dtype, device=given[0].device)
        return found

    def _called(
        self,
        where: str,
        given: Sequence[torch.Tensor],
        held: Arrays,
        versions: Mapping[str, int],
        scope: Scope,
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        by_id = {id(one.array): held[one.name] for one in self.entries if one.name in held}
        settings = {
            one: {"training": scope.training and path not in self._evaluated}
            for path, one in self.module.named_modules()
        }
        args, kwargs = _arguments(self._call, given)
        answers = Answers(scope)
        with holding(self.module, by_id, settings):
            with ExitStack() as stack:
                stack.enter_context(torch_private.without_checkpointing())
                stack.enter_context(torch_private.nothing_compiled())
                stack.enter_context(torch_private.nothing_validated())
                stack.enter_context(answers)
                stack.enter_context(Refusals())
                if scope.compute_type is not None:  # a cast that autocast remembered would outlive the recording
                    kind = given[0].device.type if given else "cpu"
                    stack.enter_context(torch.autocast(kind, scope.compute_type, cache_enabled=False))
                output = self.module(*args, **kwargs)
            moved = {
                one.name: new
                for one in self.entries
                if one.name in held and (new := _moved(where, one, held[one.name], versions, answers)) is not None
            }
        return output, moved


def _moved(
    where: str, one: Entry, ours: torch.Tensor, versions: Mapping[str, int], answers: Answers
) -> torch.Tensor | None:
    """The new value of an array that a call changed in place or assigned; None if it did neither."""
    changed = torch_private.version(ours) != versions[one.name]
    if one.role is Role.PARAMETER:
        if changed:
            problem = f"its module changes the parameter '{one.name}' in place, which only an optimizer may do"
            raise StateError(where, problem, fix="make it a buffer, or create an embedding without max_norm")
        return None
    if id(ours) in answers.moved:
        return answers.moved[id(ours)]
    now = one.now()
    if not isinstance(now, torch.Tensor) or now is ours:
        return ours if changed else None
    if now.shape == ours.shape:
        return now
    if one.role is Role.BUFFER:
        problem = f"its module gives the buffer '{one.name}' the shape {list(now.shape)}"
        raise ShapeError(where, problem, was=list(ours.shape), fix="create the buffer in its final shape")
    return None  # a result that the module remembers, of another batch


# Arguments


def _arguments(call: Any, given: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if call is None:
        return given, {}
    args, kwargs = ((), call) if isinstance(call, Mapping) else call
    return _placed(args, given), _placed(kwargs, given)


def _placed(value: Any, given: Sequence[torch.Tensor]) -> Any:
    """A tree of arguments with arrays in the places of sources."""
    if isinstance(value, Source):
        return given[value.index]
    if isinstance(value, Mapping):
        return {key: _placed(one, given) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_placed(one, given) for one in value)
    return value


def _places(value: Any) -> Iterator[int]:
    if isinstance(value, Source):
        yield value.index
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _places(one)
    elif type(value) in (list, tuple):
        for one in value:
            yield from _places(one)


# Results


def _results(
    where: str, output: Any, held: Collection[torch.Tensor], returned: Sequence[str] | None
) -> tuple[torch.Tensor, ...]:
    """The arrays of a module's result, as a node can return them."""
    found = flattened(output)
    if not found:
        raise DataTypeError(where, f"its module returns {type(output).__name__} without any array", fix="return one")
    if returned is not None:
        found = {path: _chosen(where, found, path) for path in returned}
    memory = {torch_private.identity(array.untyped_storage()) for array in held}
    return tuple(_result(where, path, array, memory) for path, array in found.items())


def _chosen(where: str, found: Arrays, path: str) -> torch.Tensor:
    if path not in found:
        known = ", ".join(one or "''" for one in found)
        raise UnknownNameError(where, f"its module returns no '{path}'", results=known, fix="use one of these paths")
    return found[path]


def _result(where: str, path: str, array: torch.Tensor, memory: Collection[int]) -> torch.Tensor:
    name = f"result '{path}'" if path else "result"
    if not is_supported(array):
        raise DataTypeError(where, f"its {name} is {kind_of(array)}", fix=f"return one of {type_names()}")
    if array.ndim > MAX_DIMENSIONS or not array.numel():
        fix = f"return 1 to {MAX_DIMENSIONS} dimensions, with at least one element"
        raise ShapeError(where, f"its {name} has shape {list(array.shape)}", fix=fix)
    array = array.reshape(1) if array.ndim == 0 else array
    # An update writes into the memory of parameters, which a result must not show.
    return array.clone() if torch_private.identity(array.untyped_storage()) in memory else array


# Failures


def _failure(where: str, module: nn.Module, arrays: Sequence[torch.Tensor], error: Exception) -> StepgraphError:
    """What to raise for an exception of the module's code; the submodule and the line of the model are facts."""
    line, path = raised_line(error, "torch"), _path(module, error)
    facts = {"line": line} if line else {}
    facts |= {"module": f"{path} ({type(module.get_submodule(path)).__name__})"} if path else {}
    if isinstance(error, Drawn):
        problem = f"its module calls PyTorch's random operator {error}, which a step cannot reproduce"
        fix = "use torch.rand, torch.randn or F.dropout, which draw from the graph's stream"
        return ArgumentError(where, problem, fix=fix, **facts)
    known = explained(where, module.forward, error) if not isinstance(error, TypeError) else None
    if known is not None:
        known.facts.update(facts)
        return known
    shapes = ", ".join(f"{list(array.shape)} {kind_of(array)}" for array in arrays)
    problem = f"its module does not accept these sources: {reason(error)}"
    return ShapeError(where, problem, sources=shapes, fix="pass sources that its forward accepts", **facts)


def _path(module: nn.Module, error: Exception) -> str:
    """The path of the innermost submodule that an exception passed through."""
    paths = {id(one): path for path, one in module.named_modules()}
    found, trace = "", error.__traceback__
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self"))) or found
        trace = trace.tb_next
    return found
