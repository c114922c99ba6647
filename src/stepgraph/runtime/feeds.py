"""Names for data: which tensor a caller's array is for, and the arrays of one call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple

import torch

from stepgraph.compiler.step import Key, value
from stepgraph.device import Device
from stepgraph.errors import (
    ArgumentError,
    DataError,
    DataTypeError,
    ShapeError,
    StateError,
    StepgraphError,
    UnknownNameError,
)
from stepgraph.layers.node import Node
from stepgraph.runtime.indices import Indices
from stepgraph.system import torch_private
from stepgraph.tensors import buffers
from stepgraph.tensors.extents import BATCH, BatchExtent, follows_batch, shape_at
from stepgraph.tensors.tensor import Tensor, row_count
from stepgraph.types import DataType

MOST = 64  # batch sizes whose feeds are remembered
Names = Mapping[str, Tensor]
Data = Mapping[str, Any]
Passed = tuple[Data | None, Data | None, Data | None]  # inputs, loss labels and their weights


class _Wanted(NamedTuple):
    """One array to feed: what it must be, and its name in messages."""

    key: Key
    shape: tuple[int, ...]
    data_type: DataType
    where: str


class Usual(NamedTuple):
    """The data of a call, all of it passed and read as it is: data like it need not be looked at array by array."""

    batch: int
    given: tuple[tuple[int, tuple[str, ...]], ...]  # the places of the dictionaries with arrays, and their names
    others: tuple[int, ...]  # the places of those without
    keys: tuple[Key, ...]
    are_alike: Callable[..., bool]

    @classmethod
    def of(
        cls, passed: Passed, given: Mapping[Tensor, Any], found: Mapping[Key, torch.Tensor], batch: int
    ) -> Usual | None:
        """What the next call is compared with; None if data was bound before, converted, copied or cut.

        Args:
            passed: the data by name.
            given: the same by tensor.
            found: the arrays that were read.
            batch: the batch size.
        """
        names = [tuple(data or ()) for data in passed]
        if not given or not len(given) == len(found) == sum(map(len, names)):
            return None
        keys = tuple(map(value, given))
        if any(found[key] is not array for key, array in zip(keys, given.values(), strict=True)):
            return None
        alike = torch_private.Alike(*given.values(), dynamic_dims_sizes=None, dynamic_dims_strides=None)
        own = tuple((place, one) for place, one in enumerate(names) if one)
        return cls(batch, own, tuple(place for place, one in enumerate(names) if not one), keys, alike.check)

    def arrays(self, passed: Passed) -> dict[Key, torch.Tensor] | None:
        """The arrays of a call that passes the same names, and arrays like these; otherwise None."""
        found: list[Any] = []
        for place, names in self.given:
            data = passed[place]
            if type(data) is not dict or (*data,) != names:
                return None
            found += data.values()
        for place in self.others:
            data = passed[place]
            if data is not None and (type(data) is not dict or data):
                return None
        if not self.are_alike(*found):
            return None
        return dict(zip(self.keys, found))  # noqa: B905 - every call pays for what is always true


@dataclass(frozen=True)
class Feeds:
    """The data that a compiled graph takes. It is immutable: declaring or finding more creates new feeds."""

    inputs: Names = field(default_factory=dict)
    labels: Names = field(default_factory=dict)
    weights: Names = field(default_factory=dict)
    tensors: tuple[Tensor, ...] = ()

    def declare(self, inputs: Names | None, labels: Names | None, weights: Names | None) -> Feeds:
        """These feeds and the new ones."""
        return replace(
            self,
            inputs=merged("input", self.inputs, inputs),
            labels=merged("loss label", self.labels, labels),
            weights=merged("loss label weight", self.weights, weights),
        )

    def find(self, nodes: Sequence[Node], fixed: Collection[Tensor]) -> Feeds:
        """The tensors that `nodes` read but nothing produces or holds; undeclared ones are named by their labels."""
        made = {tensor for node in nodes for tensor in node.results}
        own = {t for node in nodes for t in (*node.layer.parameters.values(), *node.layer.statistics.values())}
        read = list(dict.fromkeys(t for node in nodes for t in node.arguments if t not in made and t not in own))
        for kind, name, tensor in self:
            if tensor not in read and tensor not in fixed:
                raise UnknownNameError(
                    "compile", f"no layer reads the {kind} '{name}' ({tensor!r})", fix="wire it into the graph"
                )
        declared = [tensor for _, _, tensor in self]
        found = {t.label: t for t in read if t not in declared and t not in fixed}
        tensors = tuple(t for t in dict.fromkeys([*declared, *read]) if t not in fixed)
        return replace(self, inputs=merged("input", self.inputs, found), tensors=tensors)

    def __iter__(self) -> Iterator[tuple[str, str, Tensor]]:
        for kind, names in (("input", self.inputs), ("loss label", self.labels), ("loss label weight", self.weights)):
            for name, tensor in names.items():
                yield kind, name, tensor

    @cached_property
    def batch(self) -> int:
        """The declared batch size: the first dimension of the first input, or `BATCH` if any input has it."""
        if any(tensor.descriptor.is_open for tensor in self.tensors):
            return BATCH
        return self.tensors[0].shape[0] if self.tensors else 0

    @cached_property
    def is_open(self) -> bool:
        """Whether the data of a call decides its batch size."""
        return isinstance(self.batch, BatchExtent)

    def is_batched(self, tensor: Tensor) -> bool:
        """Whether a tensor's first dimension is the batch."""
        return follows_batch(tensor.shape[0], self.batch)

    @cached_property
    def _leading(self) -> tuple[Tensor, ...]:
        """The feeds whose data shows the batch size."""
        return tuple(tensor for tensor in self.tensors if isinstance(tensor.shape[0], BatchExtent))

    def rows_in(self, values: Any, tensor: Tensor) -> int:
        """The batch size that the data of one feed shows."""
        count, extent = row_count(values, tensor), tensor.shape[0]
        if not isinstance(extent, BatchExtent):
            return count
        rows = extent.rows(count)
        if rows is None:
            problem = f"the data has {count} rows, but the tensor has {extent}"
            raise DataError(self.titles[tensor], problem, fix="pass data with a fitting number of rows")
        return rows

    def rows(self, given: Mapping[Tensor, Any]) -> int:
        """The batch size that the data of a call shows: passed with it, or bound before."""
        found: dict[Tensor, int] = {}
        for tensor in self._leading:
            values = given.get(tensor)
            if values is None:
                values = _bound_before(tensor, self.titles[tensor])
            found[tensor] = self.rows_in(values, tensor)
        if not found:
            fix = "declare an input whose first extent is BATCH, or pass batch_size="
            raise DataError("execute", "no input shows the number of rows", fix=fix)
        rows = next(iter(found.values()))
        if any(count != rows for count in found.values()):
            facts = {self.titles[tensor]: f"{count} rows" for tensor, count in found.items()}
            raise ShapeError(
                "execute", "the data of one call has different numbers of rows", fix="pass equally many", **facts
            )
        return rows

    def batch_size(self, given: int | None) -> int:
        """The batch size of a call; None and 0 mean the declared one."""
        if isinstance(given, bool) or not (given is None or (isinstance(given, Integral) and given >= 0)):
            raise ArgumentError("execute", f"batch_size is {given!r}", fix="pass an integer number of rows, or None")
        return int(given) if given else self.batch

    def named(self, inputs: Data | None, labels: Data | None, weights: Data | None) -> dict[Tensor, Any]:
        """Data by tensor; rejects undeclared names."""
        found: dict[Tensor, Any] = {}
        given = inputs, labels, weights
        for index, kind, names, fed in self._groups:
            data = given[index]
            if data is None:
                continue
            if type(data) is not dict and not isinstance(data, Mapping):
                raise DataTypeError(
                    "execute", f"the {kind} data is {type(data).__name__}, not a dictionary", fix='pass {"name": array}'
                )
            for name, values in data.items():
                tensor = fed.get(name)
                if tensor is None:
                    raise _not_fed(name, kind, names)
                found[tensor] = values
        return found

    @cached_property
    def _groups(self) -> tuple[tuple[int, str, Names, Names], ...]:
        """The declared names by kind, and those that are fed."""
        groups = (("inputs", self.inputs), ("loss labels", self.labels), ("loss label weights", self.weights))
        fed = ({n: t for n, t in names.items() if t in self.tensors} for _, names in groups)
        return tuple((index, *group, next(fed)) for index, group in enumerate(groups))

    def arrays(
        self,
        given: Mapping[Tensor, Any],
        batch: int,
        device: Device,
        indices: Indices | None = None,
        exact: bool = False,
        channels_last: Collection[Tensor] = (),
    ) -> dict[Key, torch.Tensor]:
        """Arrays of all feeds for one call: passed with it, or bound to their tensors before.

        With `indices`, index feeds are checked at their source, before they are copied to the device. With `exact`,
        arrays with more rows than the call reads are rejected. Those of `channels_last` may have their channels last.
        """
        place, found = device.torch, {}
        for key, shape, data_type, where in self._wanted(batch):
            values = given.get(key.owner)
            if values is None:
                values = _bound_before(key.owner, where)
            array = buffers.read(values, shape, data_type, where, exact, key.owner in channels_last)
            if indices is not None and key in indices.limits:
                indices.require(key, array)
            found[key] = array if array.device == place else array.to(place, non_blocking=True)
        return found

    def _wanted(self, batch: int) -> tuple[_Wanted, ...]:
        """What each feed must be for a batch size; needed in every call, so computed once."""
        if batch not in self._tables:
            if len(self._tables) >= MOST:
                self._tables.clear()
            self._tables[batch] = tuple(
                _Wanted(
                    value(tensor),
                    shape_at(tensor.shape, self.batch, batch),
                    tensor.data_type,
                    self.titles[tensor],
                )
                for tensor in self.tensors
            )
        return self._tables[batch]

    @cached_property
    def _tables(self) -> dict[int, tuple[_Wanted, ...]]:
        return {}

    @cached_property
    def titles(self) -> dict[Tensor, str]:
        """The title of each feed in error messages."""
        return {tensor: f"Tensor '{tensor.label}' ({kind} '{name}')" for kind, name, tensor in self}


def _not_fed(name: str, kind: str, names: Names) -> StepgraphError:
    if name not in names:
        known = ", ".join(f"'{one}'" for one in names) or "none"
        return UnknownNameError(
            "execute", f"'{name}' is not among the {kind} of this graph", known=known, fix="use a declared name"
        )
    return StateError(
        "execute",
        f"'{name}' is constant, trained, or was declared after the graph was compiled",
        fix="leave it out of this call's data, or compile again",
    )


def _bound_before(tensor: Tensor, where: str) -> torch.Tensor:
    if not tensor.has_data:
        raise DataError(
            where, "there is no data for it", needed=tensor.descriptor, fix="pass it by name, or bind it before"
        )
    return tensor.array()


def merged(kind: str, names: Names, new: Names | None) -> Names:
    """`names` and `new`; one name cannot refer to two tensors."""
    if new is not None and not isinstance(new, Mapping):
        raise DataTypeError(
            "graph", f"the {kind}s are {type(new).__name__}, not a dictionary", fix='pass {"name": tensor}'
        )
    for name, tensor in (new or {}).items():
        if not isinstance(tensor, Tensor):
            raise DataTypeError(
                "graph", f"the {kind} '{name}' is {type(tensor).__name__}, not a Tensor", fix="pass a Tensor"
            )
        if names.get(name, tensor) is not tensor:
            raise StateError(
                "graph", f"the {kind} '{name}' already refers to {names[name]!r}", fix="choose another name"
            )
    return {**names, **(new or {})}
