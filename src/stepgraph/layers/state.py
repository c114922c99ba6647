"""Tensors by name, as PyTorch exchanges them: `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stepgraph.errors import CheckpointError, DataTypeError
from stepgraph.layers.layer import Layer
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import DataType

Named = Mapping[str, Tensor]


class IncompatibleKeys(NamedTuple):
    """The names that only one side has, as `torch.nn.Module.load_state_dict` returns them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Different(NamedTuple):
    """A name whose shape or type differs."""

    name: str
    here: str
    there: str


@dataclass(frozen=True)
class Match:
    """What a state provides for some tensors, before anything is written.

    Args:
        arrays: new values.
        loaded: the names they have in the state.
        missing: names that the state does not have, under any name of the same tensor.
        unexpected: names of the state that no tensor has.
        different: names in both with different shapes or types, or two names of one tensor with different values.
    """

    arrays: Mapping[Tensor, torch.Tensor]
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    different: tuple[Different, ...]

    def write(self) -> None:
        """Writes the new values into the tensors' memory, so that compiled graphs use them from the next call on."""
        for tensor, array in self.arrays.items():
            tensor.overwrite(array)


def named(layers: Mapping[Layer, str], origin: Named) -> dict[str, Tensor]:
    """Parameters and statistics by name: those of `origin` first, then `layer.field` for the others.

    A tensor that several layers share has several names.
    """
    found, known = dict(origin), set(origin.values())
    for layer, name in layers.items():
        for field, tensor in {**layer.parameters, **layer.statistics}.items():
            if tensor not in known:
                add(found, f"{name}.{field}", tensor)
    return found


def add(names: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    """Adds a name, with a number if another tensor has it."""
    free, count = name, 1
    while names.get(free, tensor) is not tensor:
        count += 1
        free = f"{name}#{count}"
    names[free] = tensor


def values(names: Named) -> dict[str, torch.Tensor]:
    """The current values by name, shared, not copied."""
    return {name: tensor.torch().detach() for name, tensor in names.items()}


def aliases(names: Named) -> dict[Tensor, list[str]]:
    """All names of each tensor."""
    found: dict[Tensor, list[str]] = {}
    for name, tensor in names.items():
        found.setdefault(tensor, []).append(name)
    return found


def matched(names: Named, state: Mapping[str, torch.Tensor]) -> Match:
    """Compares a state with tensors; one name of a tensor that has several is enough."""
    arrays, different, missing = {}, [], []
    for tensor, own in aliases(names).items():
        given = [name for name in own if name in state]
        wrong = [one for name in given if (one := _difference(name, tensor, state[name])) is not None]
        if given and not wrong:
            wrong = _untied(given, state)
        if wrong:
            different += wrong
        elif given:
            arrays[tensor] = state[given[0]]
        else:
            missing += own
    loaded = tuple(name for name in names if name in state and names[name] in arrays)
    unexpected = tuple(name for name in state if name not in names)
    return Match(arrays, loaded, tuple(missing), unexpected, tuple(different))


def load(where: str, names: Named, state: Any, strict: bool) -> Match:
    """Checks a state as `load_state_dict` does: everything fits, or nothing is written."""
    if not isinstance(state, Mapping):
        raise DataTypeError(where, f"the state is {type(state).__name__}, not a dictionary", fix="pass {name: array}")
    for name, array in state.items():
        if not isinstance(array, torch.Tensor):
            raise DataTypeError(where, f"'{name}' is {type(array).__name__}", fix="pass a torch.Tensor for each name")
    match = matched(names, state)
    if match.different or (strict and (match.missing or match.unexpected)):
        facts = facts_of(match.missing, match.unexpected, match.different)
        fix = "pass a state of the same model" if match.different else "load what fits: strict=False"
        raise CheckpointError(where, "the state and the graph do not match", **facts, fix=fix)
    return match


def facts_of(missing: Sequence[str], unexpected: Sequence[str], different: Iterable[Different]) -> dict[str, str]:
    """What does not match, one line per kind."""
    shapes = ", ".join(f"{one.name} ({one.here} here, {one.there} there)" for one in different)
    lines = {"missing": ", ".join(missing), "unexpected": ", ".join(unexpected), "mismatched": shapes}
    return {name: line for name, line in lines.items() if line}


def _difference(name: str, tensor: Tensor, array: torch.Tensor) -> Different | None:
    shape = tuple(array.shape) or (1,)  # graphs keep a scalar of a PyTorch module as one element
    if shape == tensor.shape and array.dtype is tensor.data_type.torch:
        return None
    try:
        there = str(TensorDescriptor(tuple(array.shape), DataType.of(array.dtype)))
    except (TypeError, ValueError):  # a scalar, too many dimensions, or a type that graphs do not have
        there = f"{list(array.shape)} {str(array.dtype).removeprefix('torch.')}"
    return Different(name, str(tensor.descriptor), there)


def _untied(given: Sequence[str], state: Mapping[str, torch.Tensor]) -> list[Different]:
    """Names of one tensor with different values."""
    first = state[given[0]]
    return [
        Different(name, f"the same tensor as {given[0]}", "other values")
        for name in given[1:]
        if state[name] is not first and not torch.equal(state[name].cpu(), first.cpu())
    ]
