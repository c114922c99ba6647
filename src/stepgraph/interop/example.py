"""The example of a model's inputs: their names, shapes and types, and how they are passed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from stepgraph.errors import ArgumentError, DataTypeError
from stepgraph.tensors.extents import PROBES, BatchExtent, is_open
from stepgraph.tensors.tensor import MAX_DIMENSIONS, Tensor, TensorDescriptor
from stepgraph.types import DataType

WHERE = "from_torch"


@dataclass(frozen=True)
class Hole:
    """Where an input stands among the arguments."""

    name: str


@dataclass(frozen=True)
class Example:
    """Inputs of a model.

    Args:
        arguments: positional arguments, with a `Hole` for each input.
        settings: keyword arguments, likewise.
        arrays: values by the name of the input; None where only the shape is known.
        descriptors: shapes and types; those that follow the batch have a `BatchExtent`.
        rows: the batch size of the arrays.
    """

    arguments: tuple[Any, ...]
    settings: dict[str, Any]
    arrays: dict[str, torch.Tensor | None]
    descriptors: dict[str, TensorDescriptor]
    rows: int

    @property
    def is_open(self) -> bool:
        """Whether the batch is free."""
        return any(one.is_open for one in self.descriptors.values())

    def fixed(self) -> Example:
        """The same with the batch size of the arrays."""
        return replace(self, descriptors={name: one.at(self.rows) for name, one in self.descriptors.items()})

    def only_first(self) -> Example:
        """The same with a free batch only in the first input that has one."""
        first = next(name for name, one in self.descriptors.items() if one.is_open)
        fixed = self.fixed().descriptors
        return replace(self, descriptors={**fixed, first: self.descriptors[first]})

    def call(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with the values in them."""
        return _filled(self.arguments, values), _filled(self.settings, values)

    def shape(self, name: str, rows: int) -> tuple[int, ...]:
        """The shape of an input for a number of rows."""
        return self.descriptors[name].at(rows).shape


def read_example(model: nn.Module, example: Any) -> Example:
    """Arguments from what a user passed: a dictionary by name, a tuple by position, or one array."""
    if isinstance(example, Mapping):
        arguments: tuple[Any, ...] = ()
        settings = dict(example)
    else:
        arguments, settings = example if isinstance(example, tuple) else (example,), {}
    found: dict[str, Any] = {}
    names = _positions(model)
    positional = tuple(_opened(one, next(names), found) for one in arguments)
    keywords = {name: _opened(one, name, found) for name, one in settings.items()}
    if not found:
        raise ArgumentError(WHERE, "the example holds no array", fix='pass {"x": torch.zeros(4, 3)}, or a tuple')
    arrays = {name: _array(one) for name, one in found.items()}
    declared = {name: _descriptor(name, one) for name, one in found.items()}
    rows = _rows(arrays, declared)
    free = any(isinstance(one, Tensor) and one.descriptor.is_open for one in found.values())
    descriptors = {
        name: one if free or isinstance(found[name], Tensor) else _freed(one, rows) for name, one in declared.items()
    }
    return Example(positional, keywords, arrays, descriptors, rows)


def _rows(arrays: Mapping[str, torch.Tensor | None], declared: Mapping[str, TensorDescriptor]) -> int:
    first = next(iter(declared))
    array = arrays[first]
    extent = declared[first].shape[0]
    if isinstance(extent, BatchExtent):
        return PROBES[0]
    return int(extent) if array is None else array.shape[0]


def _freed(descriptor: TensorDescriptor, rows: int) -> TensorDescriptor:
    if descriptor.shape[0] != rows:
        return descriptor
    return replace(descriptor, shape=(BatchExtent(), *descriptor.shape[1:]))


def _descriptor(name: str, array: Any) -> TensorDescriptor:
    if isinstance(array, Tensor):
        return array.descriptor
    found = torch.as_tensor(array)
    if not 1 <= found.ndim <= MAX_DIMENSIONS:
        problem = f"the input '{name}' has {found.ndim} dimensions"
        raise ArgumentError(WHERE, problem, fix=f"pass one with 1 to {MAX_DIMENSIONS}, or a number")
    return TensorDescriptor(tuple(found.shape), DataType.of(found.dtype))


def _array(given: Any) -> torch.Tensor | None:
    if isinstance(given, Tensor):
        return None
    return torch.as_tensor(given).detach()


def _positions(model: nn.Module) -> Iterator[str]:
    """The names of a forward's positional parameters."""
    rest = "inputs"
    for one in inspect.signature(model.forward).parameters.values():
        if one.kind is one.VAR_POSITIONAL:
            rest = one.name
        elif one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD):
            yield one.name
    count = 0
    while True:
        yield f"{rest}.{count}"
        count += 1


def _opened(tree: Any, name: str, found: dict[str, Any]) -> Any:
    """A tree of arguments with a hole in the place of each array, which is noted under its path."""
    if isinstance(tree, torch.Tensor | np.ndarray | Tensor):
        if name in found:
            raise ArgumentError(WHERE, f"two inputs are named '{name}'", fix="rename one of them")
        if isinstance(tree, Tensor) and is_open(tree.shape[1:]):
            raise ArgumentError(WHERE, f"'{name}' has BATCH after its first extent", fix="use it for the first only")
        found[name] = tree
        return Hole(name)
    if isinstance(tree, Mapping):
        return {key: _opened(one, f"{name}.{key}", found) for key, one in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_opened(one, f"{name}.{index}", found) for index, one in enumerate(tree))
    if tree is None or isinstance(tree, bool | int | float | str | torch.dtype | torch.device):
        return tree
    fix = "pass arrays, numbers, texts, and lists of them"
    raise DataTypeError(WHERE, f"the example's '{name}' is a {type(tree).__name__}", fix=fix)


def _filled(tree: Any, values: Mapping[str, Any]) -> Any:
    return mapped(tree, lambda one: values[one.name] if isinstance(one, Hole) else one)


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree of lists, tuples and dictionaries with every leaf changed."""
    if isinstance(tree, Mapping):
        return {key: mapped(one, change) for key, one in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(mapped(one, change) for one in tree)
    return change(tree)
