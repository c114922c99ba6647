"""A graph as an `nn.Module`: one submodule per layer, under the layers' names, in plain PyTorch.

Parameters and buffers are registered under the names of `Graph.state_dict`. A layer reads those below its own name; a
tensor that belongs elsewhere (a weight of another layer, or of an imported model's parent module) is passed to it.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from stepgraph import draw
from stepgraph.errors import StateError
from stepgraph.layers import state
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.node import Node, untrained
from stepgraph.runtime.declaration import Declaration
from stepgraph.tensors.extents import BatchExtent
from stepgraph.tensors.tensor import Tensor

Array = torch.Tensor
Paths = Mapping[Tensor, Sequence[str]]  # where the parameter or buffer of each tensor is, in dotted form


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a graph computes without its losses, as a value.

    Args:
        nodes: in order.
        inputs: the tensors that receive data, by name.
        outputs: the results that are asked for, by name.
        batch: the declared number of rows, or `BATCH`.
        constants: inputs that hold data.
        names: parameters and statistics by name.
    """

    nodes: tuple[Node, ...]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    batch: int
    constants: Mapping[Tensor, Array]
    names: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, declared: Declaration, constants: Mapping[Tensor, Array], names: Mapping[str, Tensor], call: str
    ) -> Prediction:
        """The part of a declaration that predicts."""
        if not declared.nodes:
            raise StateError(call, "the graph has no layers", fix="add nodes first")
        feeds = declared.feeds.find(declared.nodes, {*constants, *declared.parameters})
        nodes = declared.predicting
        read = {tensor for node in nodes for tensor in node.arguments}
        made = {tensor for node in nodes for tensor in node.results}
        inputs = {name: t for _, name, t in feeds if t in read and t in feeds.tensors}
        outputs = {name: t for name, t in replace(declared, feeds=feeds).predictions.items() if t in made}
        fixed = {tensor: array for tensor, array in constants.items() if tensor in read}
        return cls(nodes, inputs, outputs, feeds.batch, fixed, names)

    @property
    def layers(self) -> dict[Layer, str]:
        """Each layer's name."""
        return draw.unique_names(node.layer for node in self.nodes)

    def rows(self, arrays: Mapping[Tensor, Array]) -> int:
        """The number of rows of a call; symbolic while PyTorch exports."""
        for tensor in self.inputs.values():
            extent = tensor.shape[0]
            if isinstance(extent, BatchExtent):
                share = extent.multiple
                return (arrays[tensor].shape[0] - extent.offset) * share.denominator // share.numerator
            if extent == self.batch:
                return arrays[tensor].shape[0]
        return self.batch

    def __deepcopy__(self, memory: Any) -> Prediction:
        return self  # nothing in it changes, and its tensors are only names here


class GraphModule(nn.Module):
    """What an inference graph computes, as a module with one submodule per layer.

    It takes the graph's inputs in their order, or by name, and returns its output, or a tuple of its outputs. In
    training mode, dropout draws from PyTorch's generator and statistics are updated.

    Attributes:
        input_names: the graph's names of the inputs, in order.
        output_names: the graph's names of the outputs, in order.
    """

    def __init__(self, prediction: Prediction) -> None:
        super().__init__()
        self.prediction = prediction
        self.input_names, self.output_names = tuple(prediction.inputs), tuple(prediction.outputs)
        modules = {layer: LayerModule(layer) for layer in prediction.layers}
        layers = {layer: _put(self, name, modules[layer]) for layer, name in _parents_first(prediction.layers)}
        tensors = _register(self, prediction, layers)
        for layer, module in modules.items():
            module.find(layers[layer], tensors)
        self._layers, self._tensors = _Fixed(layers), _Fixed({t: paths[0] for t, paths in tensors.items()})

    def results(self, *arrays: Array) -> dict[Tensor, Array]:
        """Every result, by its tensor."""
        prediction = self.prediction
        values = dict(zip(prediction.inputs.values(), arrays, strict=True))
        batch = prediction.batch, prediction.rows(values)
        stream = torch.randint(2**62, (2,)) if self.training else None
        for index, node in enumerate(prediction.nodes):
            module: Any = self.get_submodule(self._layers.value[node.layer])
            elsewhere = {tensor: self._held(tensor) for tensor in module.elsewhere}
            scope = Scope(elsewhere, self.training, stream, index, batch)
            found = module(*(values[t] if t in values else self._held(t) for t in node.arguments), scope=scope)
            values.update(zip(node.results, found if isinstance(found, tuple) else (found,), strict=True))
        return values

    def _held(self, tensor: Tensor) -> Array:
        return _at(self, self._tensors.value[tensor])

    def extra_repr(self) -> str:
        """The names of inputs and outputs."""
        return f"{', '.join(self.input_names)} → {', '.join(self.output_names)}"


class LayerModule(nn.Module):
    """One layer with its own parameters and buffers.

    Attributes:
        elsewhere: the layer's tensors that are not below this module.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._layer, self._own = _Fixed(layer), _Fixed({})
        self.elsewhere: tuple[Tensor, ...] = ()

    def find(self, path: str, tensors: Paths) -> None:
        """Notes which tensors are below this module, which is at `path`."""
        layer: Layer = self._layer.value
        own: dict[Tensor, str] = {}
        for tensor in _tensors(layer):
            below = [one.removeprefix(f"{path}.") for one in tensors[tensor] if one.startswith(f"{path}.")]
            own |= {tensor: below[0]} if below else {}
        self._own = _Fixed(own)
        self.elsewhere = tuple(t for t in _tensors(layer) if t not in own)

    def forward(self, *sources: Array, scope: Scope | None = None) -> Any:
        """The layer's equation; called by itself, in inference mode."""
        layer, own = self._layer.value, {tensor: _at(self, path) for tensor, path in self._own.value.items()}
        given = Scope({}) if scope is None else scope
        if given.training:  # the gradient may need the values that a statistic had
            own |= {tensor: own[tensor].clone() for tensor in layer.statistics.values() if tensor in own}
        given = replace(given, arrays={**given.arrays, **own})
        found = layer.forward(*sources, scope=given)
        if given.training:
            self._update(given.updates)
        return tuple(found) if isinstance(found, list) else found

    @torch.no_grad()
    def _update(self, updates: Mapping[Tensor, Array]) -> None:
        for tensor, new in updates.items():
            _at(self, self._own.value[tensor]).copy_(new.reshape(tensor.shape))

    def extra_repr(self) -> str:
        """The class of the layer."""
        return type(self._layer.value).__name__


@dataclass(frozen=True)
class _Fixed:
    """A value that copies of a module share: layers and tensors, which serve as names."""

    value: Any

    def __deepcopy__(self, memory: Any) -> _Fixed:
        return self


def module_of(prediction: Prediction, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> GraphModule:
    """The module, in inference mode, with copies of the current values; layers run inside `around`."""
    names = "self", *identifiers(prediction.inputs)
    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])

    def forward(self: GraphModule, *arrays: Array, **by_name: Array) -> Any:
        """The graph's output, or a tuple of its outputs."""
        given = signature.bind(self, *arrays, **by_name).args[1:]
        with around():
            values = self.results(*given)
        found = tuple(values[tensor] for tensor in self.prediction.outputs.values())
        return found[0] if len(found) == 1 else found

    # Tools such as torch.export read the names of the inputs from the signature.
    forward.__signature__ = signature  # type: ignore[attr-defined]
    kind = type(GraphModule.__name__, (GraphModule,), {"forward": forward, "__doc__": GraphModule.__doc__})
    found: GraphModule = kind(prediction)
    return found.eval()


def identifiers(names: Iterable[str]) -> list[str]:
    """Names of arguments that resemble other names.

    Example:
        >>> identifiers(["x", "input ids", "class", "2nd"])
        ['x', 'input_ids', 'class_', '_2nd']
    """
    found: list[str] = []
    for name in names:
        one = re.sub(r"\W", "_", name)
        one = f"_{one}" if not one.isidentifier() and not keyword.iskeyword(one) else one
        while one in found or keyword.iskeyword(one) or one == "self":
            one += "_"
        found.append(one)
    return found


def _parents_first(layers: Mapping[Layer, str]) -> list[tuple[Layer, str]]:
    """Layers in order, except that `block` comes before `block.conv`, which goes into it."""
    above = {name[:end] for name in layers.values() for end, letter in enumerate(name) if letter == "."}
    return sorted(layers.items(), key=lambda item: item[1].count(".") - len(item[1]) if item[1] in above else 0)


def _register(root: nn.Module, prediction: Prediction, layers: Mapping[Layer, str]) -> dict[Tensor, list[str]]:
    """Registers copies of what the graph holds, and returns where; parameters under their names."""
    nodes, found = prediction.nodes, dict[Tensor, list[str]]()
    fixed = {t for layer in layers for t in (*layer.statistics.values(), *layer.constants.values())}
    frozen = untrained(nodes)
    for tensor, names in state.aliases(prediction.names).items():
        value = tensor.array().detach().clone()
        if tensor not in fixed and value.is_floating_point():
            value = nn.Parameter(value, requires_grad=tensor.is_updatable and tensor not in frozen)
        found[tensor] = [_put(root, name, value) for name in names]
    for layer, path in layers.items():
        for field, tensor in layer.constants.items():
            if tensor not in found:
                found[tensor] = [_put(root, f"{path}.{field}", tensor.array().detach().clone(), persistent=False)]
    for tensor, array in prediction.constants.items():
        found[tensor] = [_put(root, tensor.label, array.clone(), persistent=False)]
    return found


def _put(root: nn.Module, path: str, value: Any, *, persistent: bool = True) -> str:
    """Registers a module, parameter or buffer at a dotted path, and returns the path it got.

    PyTorch reserves some names, such as `type`; these get an underscore.
    """
    *parents, last = (part or "_" for part in path.split("."))
    names: list[str] = []
    for part in parents:
        while not isinstance(getattr(root, part, nn.Module()), nn.Module):
            part += "_"
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
        names.append(part)
    while hasattr(root, last):
        last += "_"
    if isinstance(value, nn.Module):
        root.add_module(last, value)
    elif isinstance(value, nn.Parameter):
        root.register_parameter(last, value)
    else:
        root.register_buffer(last, value, persistent=persistent)
    return ".".join((*names, last))


def _at(module: nn.Module, path: str) -> Array:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _tensors(layer: Layer) -> tuple[Tensor, ...]:
    return tuple({**layer.parameters, **layer.statistics, **layer.constants}.values())
