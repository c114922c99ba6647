"""A graph from a plan: one node per module, and one per stretch of functions between modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stepgraph.graph import Graph
from stepgraph.interop.capture import state_of
from stepgraph.interop.native import native_layer
from stepgraph.interop.plan import GlueNode, ModuleNode, Plan, Wire, is_exact
from stepgraph.layers.glue import Call, GlueLayer, Origin, Program, Slice, Value
from stepgraph.layers.layer import Layer
from stepgraph.layers.torch_call import Source
from stepgraph.layers.torch_layer import TorchLayer
from stepgraph.tensors.tensor import Tensor

NATIVE, WRAPPED, GLUE = "native", "wrapped", "glue"


@dataclass(frozen=True)
class Row:
    """One node, for tables.

    Args:
        layer: the layer.
        path: the path of the module.
        kind: the module's class, or the functions of a stretch.
        how: `"native"`, `"wrapped"` or `"glue"`.
        why: why it is that.
    """

    layer: Layer
    path: str
    kind: str
    how: str
    why: str


@dataclass
class Wired:
    """A wired graph.

    Args:
        graph: the graph.
        outputs: the tensors of the model's results.
        rows: one per node.
        values: the tensor of each wire.
        origins: what wires depend on, if not on layers.
    """

    graph: Graph
    outputs: dict[str, Tensor] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    values: dict[Wire, Tensor] = field(default_factory=dict)
    origins: dict[Wire, Origin] = field(default_factory=dict)


class Wiring:
    """Wires a plan.

    Args:
        model: the model.
        tensors: the tensor of each of its arrays, by the identity of the array.
        held: arrays that it keeps elsewhere.
        evaluated: paths of modules that stay in eval mode.
        forced: why modules are one node that would be several.
        native: whether to use stepgraph's own layers.
        rows: the batch size of the recording.
        frozen: parameters that the graph does not train.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: Mapping[int, Tensor],
        held: list[torch.Tensor],
        evaluated: tuple[str, ...],
        forced: Mapping[str, str],
        native: bool,
        rows: int,
        frozen: frozenset[Tensor],
    ) -> None:
        self._model, self._tensors, self._held = model, tensors, held
        self._evaluated, self._forced, self._native, self._rows = evaluated, forced, native, rows
        self._frozen = frozen
        self._state = state_of(model)
        self._parameters = {id(one) for one in model.parameters()}
        self._layers: dict[Any, tuple[Layer, str, str]] = {}  # a module that is called again is the same layer

    def wire(self, plan: Plan, inputs: Mapping[str, Tensor]) -> Wired:
        """The graph of a plan."""
        values = {Wire("input", name): tensor for name, tensor in inputs.items()}
        found = Wired(Graph(), values=values, origins=dict.fromkeys(values, Origin.INPUT))
        for wire, node in plan.nodes.items():
            if isinstance(node, ModuleNode):
                self._module(found, wire, node)
            else:
                self._glue(found, wire, node)
        for path, wire in plan.outputs.items():
            found.outputs[path] = found.values[wire]
        self._end(found)
        return found

    def _node(self, found: Wired, wire: Wire, layer: Layer, node: GlueNode | ModuleNode, frozen: bool = False) -> None:
        sources = [found.values[one] for one in node.sources]
        if isinstance(layer, TorchLayer) and len(layer.tensors) > len(layer.parameters):
            layer.infer(*(tensor.descriptor for tensor in sources))  # finds which buffers it changes
        own = self._frozen.intersection(layer.parameters.values())
        results = found.graph.known_node(layer, sources, node.results, disable_update=frozen, frozen=own)
        for position, result in enumerate(results):
            found.values[Wire(wire.kind, wire.owner, position)] = result

    def _glue(self, found: Wired, wire: Wire, node: GlueNode) -> None:
        named = [(name, self._tensors[id(self._state[name])]) for name in node.tensors]
        parameters = [tensor for name, tensor in named if id(self._state[name]) in self._parameters]
        buffers = [tensor for name, tensor in named if id(self._state[name]) not in self._parameters]
        buffers += [self._held_tensor(number) for number in node.held]
        order = self._order(node, len(node.sources))
        programs = [one if one is None else _reordered(one, order) for one in (node.training, node.inference)]
        assert programs[0] is not None
        label = node.path or type(self._model).__name__
        exact = any(one is not None and is_exact(one) for one in programs)
        origins = tuple(int(found.origins.get(source, Origin.LAYER)) for source in node.sources)
        own = tuple(parameters), tuple(buffers)
        layer = GlueLayer(programs[0], programs[1], *own, self._rows, exact, origins, label=label)
        self._node(found, wire, layer, node)
        found.origins.update(
            (Wire(wire.kind, wire.owner, position), layer.origin(position)) for position in range(len(node.results))
        )
        called = dict.fromkeys(call.function.rpartition(".")[2].strip("_") for call in node.training.calls)
        found.rows.append(Row(layer, node.path, ", ".join(called), GLUE, _why_glue(node)))

    def _order(self, node: GlueNode, first: int) -> dict[int, int]:
        """New numbers of own tensors: parameters before buffers."""
        is_parameter = [id(self._state[name]) in self._parameters for name in node.tensors]
        old = [n for n, yes in enumerate(is_parameter) if yes] + [n for n, yes in enumerate(is_parameter) if not yes]
        return {first + before: first + after for after, before in enumerate(old)}

    def _held_tensor(self, number: int) -> Tensor:
        array = self._held[number]
        if id(array) not in self._tensors:
            shape = tuple(array.shape) or (1,)
            return Tensor(shape, array.dtype, data=array.detach().clone().reshape(shape), label=f"array{number}")
        return self._tensors[id(array)]

    def _module(self, found: Wired, wire: Wire, node: ModuleNode) -> None:
        if node.path not in self._forced and type(node.module) is nn.Identity and len(node.sources) == 1:
            found.values[wire] = found.values[node.sources[0]]
            return
        layer, how, why = self._layer(node, found)
        self._node(found, wire, layer, node, frozen=not node.differentiable)
        found.rows.append(Row(layer, node.path, type(node.module).__name__, how, why))
        if not node.differentiable:
            self._stop(found, wire, node)

    def _stop(self, found: Wired, wire: Wire, node: ModuleNode) -> None:
        """Lets no gradient pass to a module that was called inside `no_grad`."""
        for position in range(len(node.results)):
            result = Wire(wire.kind, wire.owner, position)
            if found.values[result].data_type.is_floating:
                program = Program((Call("Tensor.detach", (Value(0),), results=(1,)),), (1,))
                layer = GlueLayer(program, label=f"{node.path} (no_grad)")
                found.values[result] = found.graph.node(layer, found.values[result])
                found.rows.append(Row(layer, node.path, "detach", GLUE, "the module runs inside no_grad"))

    def _layer(self, node: ModuleNode, found: Wired) -> tuple[Layer, str, str]:
        args, kwargs = node.arguments
        key = (node.module, repr(node.arguments))
        if key not in self._layers:
            self._layers[key] = self._new_layer(node, [found.values[one] for one in node.sources], args, kwargs)
        return self._layers[key]

    def _new_layer(self, node: ModuleNode, sources: list[Tensor], args: Any, kwargs: Any) -> tuple[Layer, str, str]:
        module, label = node.module, node.path or type(self._model).__name__
        own = {name: self._tensors[id(array)] for name, array in state_of(module).items() if array.numel()}
        if node.path in self._forced:
            why = self._forced[node.path]
        elif not self._native:
            why = "native=False"
        else:
            found = native_layer(module, own, sources, args == (Value(0),) and not kwargs, label, self._is_fixed(node))
            if isinstance(found, Layer):
                return found, NATIVE, "the same numbers"
            why = found
        prefix = f"{node.path}." if node.path else ""
        evaluated = [
            path.removeprefix(prefix) if path != node.path else ""
            for path in self._evaluated
            if path == node.path or path.startswith(prefix)
        ]
        call = None if args == tuple(map(Value, range(len(sources)))) and not kwargs else _call((args, kwargs))
        frozen = [name for name, tensor in own.items() if tensor in self._frozen]
        layer = TorchLayer(
            module, call=call, tensors=own, evaluated=evaluated, results=node.returned, frozen=frozen, label=label
        )
        return layer, WRAPPED, why

    def _is_fixed(self, node: ModuleNode) -> bool:
        return node.path in self._evaluated

    def _end(self, found: Wired) -> None:
        """Makes the first output the first result of the last node, which a loss compares."""
        path, tensor = next(iter(found.outputs.items()))
        nodes = found.graph.nodes
        if not nodes or nodes[-1].results[0] is not tensor:
            program = Program((Call("Tensor.view_as", (Value(0), Value(0)), results=(1,)),), (1,))
            layer = GlueLayer(program, label=path)
            found.outputs[path] = found.graph.node(layer, tensor)
            found.rows.append(Row(layer, "", "view_as", GLUE, "the first output is the last result"))


def _why_glue(node: GlueNode) -> str:
    modes = "" if node.inference is None else "; another program in inference"
    count = len(node.training.calls)
    return f"{count} function{'s' * (count != 1)} between modules{modes}"


def _reordered(program: Program, order: Mapping[int, int]) -> Program:
    """A program whose values have other numbers."""

    def new(number: int) -> int:
        return order.get(number, number)

    def walk(tree: Any) -> Any:
        if isinstance(tree, Value):
            return Value(new(tree.number))
        if isinstance(tree, list | tuple):
            return type(tree)(map(walk, tree))
        if isinstance(tree, dict):
            return {name: walk(one) for name, one in tree.items()}
        return Slice(walk(tree.start), walk(tree.stop), walk(tree.step)) if isinstance(tree, Slice) else tree

    if all(before == after for before, after in order.items()):
        return program
    calls = tuple(
        Call(
            call.function,
            walk(call.arguments),
            walk(dict(call.settings)),
            tuple(map(new, call.results)),
            tuple((new(old), new(changed)) for old, changed in call.changed),
            call.differentiable,
            call.autocast,
        )
        for call in program.calls
    )
    numbers = (tuple(map(new, one)) for one in (program.results, program.written, program.scalars))
    return Program(calls, *numbers)


def _call(tree: Any) -> Any:
    """A module's arguments with the places of its sources."""
    if isinstance(tree, Value):
        return Source(tree.number)
    if isinstance(tree, list | tuple):
        return type(tree)(map(_call, tree))
    if isinstance(tree, dict):
        return {name: _call(one) for name, one in tree.items()}
    return _plain(tree)


def _plain(value: Any) -> Any:
    """A setting as the module takes it."""
    from stepgraph.layers.glue import read

    return read(value, {}, 1, torch.device("cpu"))
