"""Settings as JSON and back, for any dataclass: layers, descriptors, enumerations, tensors by number.

Plain values are written directly; everything else is an object with one identifying key:

    {"tensor": 3}  {"layer": 1}  {"array": key}  {"tuple": […]}  {"mapping": [[key, value], …]}  {"float": "inf"}
    {"batch": [3, 2, 0]}  an extent that follows the batch: 3 / 2 of its rows, plus 0
    {"enum": "PaddingPolicy", "member": "SAME"}  {"class": "PoolingDescriptor", "fields": {…}}
    {"module": 0, "class": "models:Net", "arguments": {…}}  a PyTorch module, which a loading program hands over
    {"opaque": "function"}  which a file cannot hold: it is saved anyway, but only `restore` can use the file

A stepgraph class is named as it is exported, a user's own as `module:Class`. Nothing is ever imported by such a
name: a loading program passes its own classes.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import sys
from collections.abc import Container, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from stepgraph.checkpoint.modules import HandedOver, constructor_arguments, is_factory, known_class
from stepgraph.errors import CheckpointError, DataTypeError, StepgraphError, reason
from stepgraph.layers.layer import Layer
from stepgraph.optimizers import Optimizer
from stepgraph.runtime.state import Buffer
from stepgraph.tensors.extents import BatchExtent
from stepgraph.tensors.tensor import Tensor, TensorDescriptor

_OURS = "stepgraph"
Kind = TypeVar("Kind")
Item = TypeVar("Item")


def class_name(kind: type) -> str:
    """The name of a class in a file."""
    is_ours = kind.__module__.split(".")[0] == _OURS
    return kind.__qualname__ if is_ours else f"{kind.__module__}:{kind.__qualname__}"


def unique(name: str, taken: Container[str]) -> str:
    """`name`, with a number if it is taken."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}#{count}"
    return found


def of_kind(kind: type[Kind], given: Any) -> Kind:
    """A value of a description, after a type check; a bool is not an integer."""
    if type(given) is not kind:
        raise ValueError(f"{given!r:.100} instead of a {kind.__name__}")
    return given


def described_extent(extent: int) -> Any:
    """JSON for an extent of a shape."""
    if not isinstance(extent, BatchExtent):
        return extent
    return {"batch": [extent.multiple.numerator, extent.multiple.denominator, extent.offset]}


def read_extent(described: Any) -> Any:
    """The extent of a shape that JSON describes."""
    if not isinstance(described, dict):
        return described
    times, share, offset = (of_kind(int, number) for number in of_kind(list, described["batch"]))
    if not (0 < times < 2**31 and 0 < share < 2**31 and -(2**31) < offset < 2**31):
        raise ValueError(f"the extent {described!r:.100} follows no batch")
    return BatchExtent(Fraction(times, share), offset)


class Numbered(list[Item]):
    """A list that numbers in a file refer to: from 0 on, without negative indices."""

    def __getitem__(self, number: Any) -> Any:
        if of_kind(int, number) < 0:
            raise ValueError(f"the number {number} is negative")
        return super().__getitem__(number)


class Encoder:
    """Numbers tensors and layers in the order of their first use, and collects arrays."""

    def __init__(self) -> None:
        self.tensors: dict[Tensor, int] = {}
        self.layers: dict[Layer, int] = {}
        self.modules: dict[nn.Module, int] = {}
        self.described: list[dict[str, Any]] = []
        self.arrays: dict[str, Buffer] = {}

    def tensor(self, tensor: Tensor) -> int:
        """The number of a tensor."""
        return self.tensors.setdefault(tensor, len(self.tensors))

    def array(self, key: str, array: Buffer) -> str:
        """Adds an array to the tensors file, under `key` or a similar name."""
        # A lone surrogate, which a label may contain, cannot be stored as UTF-8.
        name = unique(key.encode("utf-8", "backslashreplace").decode("utf-8"), self.arrays)
        self.arrays[name] = array
        return name

    def layer(self, layer: Layer) -> int:
        """The number of a layer, which is described on first use."""
        if layer not in self.layers:
            self.layers[layer] = number = len(self.described)
            self.described.append({})
            self.described[number] = {
                "class": class_name(type(layer)),
                "layer_id": layer.layer_id,
                "line": layer.line,
                "fields": self.fields(layer),
            }
        return self.layers[layer]

    def fields(self, one: Any) -> dict[str, Any]:
        """The constructor fields of a dataclass."""
        return {f.name: self.value(getattr(one, f.name)) for f in dataclasses.fields(one) if f.init}

    def value(self, value: Any) -> Any:
        """JSON for any setting."""
        if isinstance(value, enum.Enum):  # before numbers, because our enums are numbers too
            return {"enum": class_name(type(value)), "member": value.name or value.value}
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if isinstance(value, BatchExtent):
            return described_extent(value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [self.value(one) for one in value]
        if isinstance(value, tuple):
            return {"tuple": [self.value(one) for one in value]}
        if isinstance(value, Mapping):
            return {"mapping": [[self.value(key), self.value(one)] for key, one in value.items()]}
        return self._object(value)

    def _object(self, value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return {"tensor": self.tensor(value)}
        if isinstance(value, Layer):
            return {"layer": self.layer(value)}
        if isinstance(value, nn.Module):
            arguments = constructor_arguments(value)
            number = self.modules.setdefault(value, len(self.modules))
            described = None if arguments is None else {name: self.value(one) for name, one in arguments.items()}
            return {"module": number, "class": class_name(type(value)), "arguments": described}
        if isinstance(value, torch.Tensor):
            return {"array": self.array("setting", value)}
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"array": self.array("setting", torch.from_numpy(np.array(value))), "numpy": True}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {"class": class_name(type(value)), "fields": self.fields(value)}
        return {"opaque": type(value).__name__}


class Decoder:
    """Builds objects from a description.

    Args:
        where: the checkpoint, for messages.
        layers: descriptions of the layers.
        tensors: the tensors, by number; None for those that the graph does not have.
        arrays: the arrays of the tensors file.
        custom: classes that are not part of stepgraph, and PyTorch modules or functions that create them.
    """

    def __init__(
        self,
        where: str,
        layers: Sequence[Mapping[str, Any]],
        tensors: Sequence[Tensor | None],
        arrays: Mapping[str, torch.Tensor],
        custom: Sequence[Any] = (),
    ) -> None:
        self.where, self._layers, self._tensors, self._arrays = where, Numbered(layers), Numbered(tensors), arrays
        self._known = frozenset(tensors)
        self._made: dict[int, Layer] = {}
        self._making: set[int] = set()
        self._custom, self._handed_over = by_name(custom), HandedOver(custom)
        self._label = ""  # of the layer that is being made

    @cached_property
    def _own(self) -> dict[str, type]:
        return _own_kinds()  # once: it looks at all modules of the process

    def kind(self, name: str, base: type = object) -> type:
        """The class with a name: one of stepgraph's, or one passed by the caller."""
        module, _, qualified = name.rpartition(":")
        found = self._custom.get(qualified) if module else self._own.get(name)
        if found is None:
            short = qualified.rpartition(".")[2]
            raise CheckpointError(
                self.where,
                f"it holds a {name}, which is not a stepgraph class",
                fix=f"pass the class: load(path, custom=[{short}])",
            )
        if not issubclass(found, base):
            raise CheckpointError(self.where, f"{name} is not a {base.__name__}", fix="use another checkpoint")
        return found

    def layer(self, number: int) -> Layer:
        """The layer with a number, the same object each time."""
        description = self._layers[number]
        if number in self._making:
            raise ValueError(f"the layer {number} contains itself")
        if number not in self._made:
            self._making.add(number)
            kind, label = self.kind(description["class"], Layer), of_kind(str, description["fields"].get("label", ""))
            around, self._label = self._label, label
            layer = self._construct(kind, description["fields"], label or kind.__name__)
            self._label = around
            line, layer_id = of_kind(str, description["line"]), of_kind(int, description["layer_id"])
            layer.__dict__.update(_line=line, layer_id=layer_id)
            self._require_saved(layer)
            self._made[number] = layer
            self._making.remove(number)
        return self._made[number]

    def value(self, described: Any) -> Any:
        """The setting that JSON describes."""
        if isinstance(described, list):
            return [self.value(one) for one in described]
        if not isinstance(described, dict):
            return described
        match described:
            case {"enum": name, "member": member}:
                kind = self.kind(name, enum.Enum)
                return kind[member] if isinstance(member, str) else kind(member)  # type: ignore[index]
            case {"float": text}:
                return float(text)
            case {"batch": _}:
                return read_extent(described)
            case {"tuple": items}:
                return tuple(self.value(one) for one in items)
            case {"mapping": pairs}:
                return {self.value(key): self.value(one) for key, one in pairs}
            case {"tensor": number}:
                return self._tensors[number]
            case {"layer": number}:
                return self.layer(number)
            case {"array": key}:
                return self._arrays[key].numpy() if described.get("numpy") else self._arrays[key]
            case {"class": name, "fields": fields}:
                return self._construct(self.kind(name), fields, name)
            case {"module": number, "class": name, "arguments": arguments}:
                return self._module(of_kind(int, number), of_kind(str, name), arguments)
            case {"opaque": name}:
                raise CheckpointError(
                    self.where,
                    f"a layer's setting is a {name}, which cannot be stored in a file",
                    fix="build the graph in your program and restore into it",
                )
        raise CheckpointError(self.where, f"its description holds {described!r:.100}", fix="use another checkpoint")

    def _module(self, number: int, name: str, arguments: Mapping[str, Any] | None) -> nn.Module:
        """A PyTorch module that the loading program handed over, or that its class creates."""

        def create() -> nn.Module | None:
            kind = known_class(name, self._custom)
            if kind is None or arguments is None:
                return None
            return self._construct(kind, arguments, name)

        found = self._handed_over.module(number, name.rpartition(":")[2], self._label, create)
        if found is None:
            raise CheckpointError(
                self.where,
                f"it holds the arrays of a PyTorch module {name}, but no code",
                fix="hand it over: load(path, custom=[module]), a model that has it, or a function that creates it",
            )
        return found

    def _require_saved(self, layer: Layer) -> None:
        """Rejects a layer with tensors that the file does not have: its class or module is another one now."""
        extra = [name for name, tensor in layer.given_tensors.items() if tensor not in self._known]
        if extra:
            problem = f"{layer.label} has tensors that were not saved: {', '.join(extra)}"
            raise CheckpointError(self.where, problem, fix="use the version of the class that was saved")

    def _construct(self, kind: type, fields: Mapping[str, Any], name: str) -> Any:
        settings = {field: self.value(value) for field, value in fields.items()}
        try:
            return kind(**settings)
        except Exception as error:  # a user's class can raise anything if its fields have changed
            problem = error.problem if isinstance(error, StepgraphError) else reason(error)
            raise CheckpointError(
                self.where,
                f"{kind.__name__} '{name}' cannot be created from its saved settings: {problem}",
                saved=", ".join(fields),
                fix="use the version of the class that was saved",
            ) from error


def by_name(custom: Sequence[Any]) -> dict[str, type]:
    """The classes passed by the caller, by name."""
    found: dict[str, type] = {}
    for kind in custom:
        if isinstance(kind, nn.Module) or is_factory(kind):
            continue
        if not isinstance(kind, type):
            raise DataTypeError("load", f"custom holds {kind!r}, which is not a class", fix="pass classes: [MyLayer]")
        if found.setdefault(kind.__qualname__, kind) is not kind:
            raise DataTypeError("load", f"custom holds two classes named {kind.__qualname__}", fix="rename one")
    return found


def _own_kinds() -> dict[str, type]:
    """stepgraph's layers, descriptors, enumerations and optimizers by name, from the modules that define them."""
    found: dict[str, type] = {}
    for path, module in list(sys.modules.items()):
        if path.startswith((f"{_OURS}.layers.", f"{_OURS}.types", f"{_OURS}.tensor", f"{_OURS}.optimizers")):
            for kind in vars(module).values():
                if isinstance(kind, type) and kind.__module__ == path and _is_setting(kind):
                    found[kind.__qualname__] = kind
    return found


def _is_setting(kind: type) -> bool:
    return issubclass(kind, Layer | Optimizer | enum.Enum | TensorDescriptor) or dataclasses.is_dataclass(kind)
