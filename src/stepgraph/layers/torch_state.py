"""The arrays of a PyTorch module: what it holds, and other arrays in their place for the time of a call.

A module keeps arrays as parameters, as buffers, and as plain attributes, alone or in lists and dictionaries. During a
call of `holding` it holds other arrays everywhere; afterwards every attribute is as it was, whatever the call did.
"""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from types import CellType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stepgraph.errors import ArgumentError, DataTypeError, StateError
from stepgraph.system import torch_private
from stepgraph.types import DataType

_EMPTY = CellType()
_CONTAINERS = (dict, OrderedDict, list, tuple, set, deque)


class Role(Enum):
    """How a module holds an array."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True)
class Entry:
    """One array of a module.

    Args:
        name: its first path, as in a `state_dict`.
        array: the module's own array.
        role: how it is held.
        owner: the submodule that holds it first.
        key: its name there.
    """

    name: str
    array: torch.Tensor
    role: Role
    owner: nn.Module
    key: str

    def now(self) -> Any:
        """What the owner holds under this name at the moment."""
        return getattr(self.owner, self.key, None)


def entries(module: nn.Module) -> list[Entry]:
    """Every array of a module once, by its first name: parameters, then buffers, then plain attributes."""
    found: dict[int, Entry] = {}
    everywhere = [*module.named_modules()]
    for role, read in _READERS.items():
        for path, owner in everywhere:
            for key, array in read(owner):
                name = f"{path}.{key}" if path else key
                found.setdefault(id(array), Entry(name, array, role, owner, key))
    return list(found.values())


def _attributes(owner: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain attributes that are arrays; one that was computed from others is left from an earlier call."""
    for key, value in owner.__dict__.items():
        for path, array in _within(key, value):
            if array.grad_fn is None:
                yield path, array


def _within(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif type(value) in (dict, OrderedDict):
        for key, one in value.items():
            yield from _within(f"{path}.{key}", one)
    elif type(value) in (list, tuple, deque):
        for i, one in enumerate(value):
            yield from _within(f"{path}.{i}", one)


_READERS: Mapping[Role, Callable[[nn.Module], Iterator[tuple[str, torch.Tensor]]]] = {
    Role.PARAMETER: lambda one: one.named_parameters(recurse=False, remove_duplicate=False),
    Role.BUFFER: lambda one: one.named_buffers(recurse=False, remove_duplicate=False),
    Role.ATTRIBUTE: _attributes,
}


@contextmanager
def holding(module: nn.Module, arrays: Mapping[int, torch.Tensor], settings: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Lets a module hold other arrays, and attributes of submodules have other values, until the end of the block.

    The module works on copies of its lists and dictionaries, and every attribute is restored: what it assigns,
    appends or removes meanwhile has no effect later, nor has what its functions cache.

    Args:
        module: the module.
        arrays: the arrays to hold, by the `id` of those they stand for.
        settings: further attributes of its submodules.
    """
    everywhere = list(module.modules())
    before = [dict(one.__dict__) for one in everywhere]
    copies: dict[int, Any] = {}
    try:
        for one, attributes in zip(everywhere, before, strict=True):
            one.__dict__.update({name: _replaced(value, arrays, copies) for name, value in attributes.items()})
            one.__dict__.update(settings.get(one, {}))
        with _forgetting(everywhere):
            yield
    finally:
        for one, attributes in zip(everywhere, before, strict=True):
            one.__dict__.clear()
            one.__dict__.update(attributes)


_caches: WeakKeyDictionary[type, list[Any]] = WeakKeyDictionary()


@contextmanager
def _forgetting(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Clears what `functools` caches in the block for code of modules: later calls must find no array of this one."""
    caches = [one for kind in {parent for one in modules for parent in type(one).__mro__} for one in _caches_of(kind)]
    before = [one.cache_info().misses for one in caches]
    try:
        yield
    finally:
        for one, misses in zip(caches, before, strict=True):
            if one.cache_info().misses != misses:
                one.cache_clear()


def _caches_of(kind: type) -> list[Any]:
    """The caches of a module's methods, and of the functions in its file."""
    if kind not in _caches:
        is_own = issubclass(kind, nn.Module) and not kind.__module__.startswith("torch.")
        beside = vars(sys.modules[kind.__module__]).values() if is_own and kind.__module__ in sys.modules else ()
        values = [*vars(kind).values(), *(one for one in beside if getattr(one, "__module__", "") == kind.__module__)]
        _caches[kind] = [cache for value in values if is_own for cache in _cached(value)]
    return _caches[kind]


def _cached(value: Any) -> Iterator[Any]:
    """The cache that a function is, or that a decorator has put inside of it."""
    function = getattr(value, "__func__", value)  # of a static method
    cells = getattr(function, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in cells if cell != _EMPTY]
    yield from (one for one in (function, *inside) if isinstance(one, type(_example)))


@lru_cache
def _example() -> None:
    """Has the type of all cached functions."""


Assigned = dict[nn.Module, dict[str, Any]]


@contextmanager
def noting_assigned(module: nn.Module) -> Iterator[Assigned]:
    """Finds the attributes that a call gives another value, without arrays, which are statistics."""
    before = {one: dict(vars(one)) for one in module.modules() if not type(one).__module__.startswith("torch.")}
    found: Assigned = {}
    yield found
    for one, attributes in before.items():
        new = {name: value for name, value in vars(one).items() if value is not attributes.get(name)}
        kept = {name: new[name] for name in new if not isinstance(attributes.get(name), torch.Tensor)}
        if kept:
            found[one] = kept


def names_of(module: nn.Module, assigned: Assigned) -> tuple[str, ...]:
    """Paths of attributes."""
    paths = [(f"{path}." if path else "", assigned.get(one, {})) for path, one in module.named_modules()]
    return tuple(prefix + name for prefix, values in paths for name in values)


def _replaced(value: Any, arrays: Mapping[int, torch.Tensor], copies: dict[int, Any]) -> Any:
    """A value with other arrays; containers are copied, and one that is held twice stays one."""
    if isinstance(value, torch.Tensor):
        return arrays.get(id(value), value)
    kind = type(value)
    if kind not in _CONTAINERS:
        return value
    if id(value) not in copies:
        if kind in (dict, OrderedDict):
            copies[id(value)] = kind((key, _replaced(one, arrays, copies)) for key, one in value.items())
        else:
            copies[id(value)] = kind(_replaced(one, arrays, copies) for one in value)
    return copies[id(value)]


def evaluating(module: nn.Module) -> tuple[str, ...]:
    """The paths of submodules that are in eval mode."""
    return tuple(path for path, one in module.named_modules() if not one.training)


def flattened(output: Any, path: str = "") -> dict[str, torch.Tensor]:
    """The arrays in a module's result by their path, in order; whatever is not an array is dropped.

    Example:
        >>> list(flattened({"logits": torch.ones(2), "cache": None, "hidden": (torch.ones(3), torch.ones(4))}))
        ['logits', 'hidden.0', 'hidden.1']
    """
    if isinstance(output, torch.Tensor):
        return {path: output}
    found: dict[str, torch.Tensor] = {}
    for key, one in _parts(output):
        found |= flattened(one, f"{path}.{key}" if path else str(key))
    return found


def _parts(output: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(output, Mapping):
        yield from output.items()
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        yield from zip(output._fields, output, strict=True)
    elif isinstance(output, list | tuple):
        yield from zip(itertools.count(), output, strict=False)
    elif hasattr(output, "__dataclass_fields__") and not isinstance(output, type):
        yield from ((name, getattr(output, name)) for name in output.__dataclass_fields__)


# What a layer cannot hold


def require_usable(where: str, module: nn.Module) -> None:
    """Rejects modules without code or without numbers, and arrays that no tensor can hold."""
    if isinstance(module, torch.jit.ScriptModule):
        problem = "a scripted module has no Python code to record"
        raise DataTypeError(where, problem, fix="pass the module that it was made from")
    for one in entries(module):
        _require_array(where, f"{one.role.value} '{one.name}'", one.array)
        hooks = torch_private.gradient_hooks(one.array), torch_private.later_gradient_hooks(one.array)
        if one.role is Role.PARAMETER and any(hooks):
            raise StateError(
                where,
                f"its parameter '{one.name}' has a hook on its gradient, which a step would not call",
                fix="remove the hook; gradients can be changed between execute_gradient and execute_optimizer_update",
            )
    for path, part in module.named_modules():
        if getattr(part, "track_running_stats", False) and getattr(part, "momentum", 0.1) is None:
            name = f"'{path}' ({type(part).__name__})" if path else type(part).__name__
            problem = f"{name} has momentum=None: a cumulative average reads the number of batches"
            raise ArgumentError(where, problem, fix="pass a momentum, such as 0.1")


def _require_array(where: str, name: str, array: torch.Tensor) -> None:
    if is_lazy(array):
        raise StateError(where, f"its {name} has no shape yet", fix="call the module once: module(example)")
    if array.is_meta:
        fix = "give it memory first: module.to_empty(device='cpu'), then load its weights"
        raise StateError(where, f"its {name} is on the meta device and holds no numbers", fix=fix)
    if not is_supported(array):
        fix = "hold torch.view_as_real of it, and call torch.view_as_complex in forward"
        fix = fix if array.is_complex() else f"convert it to one of {type_names()}"
        raise DataTypeError(where, f"its {name} is {kind_of(array)}", fix=fix)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous arrays have memory in common."""
    if one.device != other.device:
        return False
    ends = one.data_ptr() + one.nbytes, other.data_ptr() + other.nbytes
    return max(one.data_ptr(), other.data_ptr()) < min(ends)


def is_supported(array: torch.Tensor) -> bool:
    """Whether a tensor can hold an array: dense, of a type that stepgraph has."""
    return array.layout is torch.strided and array.dtype in {one.torch for one in DataType}


def kind_of(array: torch.Tensor) -> str:
    """The type of an array or, if it is not dense, its layout."""
    return str(array.dtype if array.layout is torch.strided else array.layout).removeprefix("torch.")


def type_names() -> str:
    """The types that stepgraph has."""
    return ", ".join(one.debug_description for one in DataType)
