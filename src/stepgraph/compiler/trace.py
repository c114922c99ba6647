"""A step as one function of arrays, and its recording as a graph of operators.

`run` is the whole iteration in plain PyTorch: forward through the nodes, the reverse walk, the update. It is the
reference. `trace` records that very function once with `make_fx`, so that the traced program is the reference by
construction. Every recorded operator knows its layer and its phase.

The reverse walk is ours, the local derivative is autograd's: each node runs on detached sources, and going backwards
autograd differentiates that one node. A node's source gradient is therefore its own contribution.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler import kernels
from stepgraph.compiler.step import (
    NUMBERS,
    STREAM,
    Key,
    Step,
    gradient,
    layer_tensors,
    source_gradient,
    state,
    user_gradient,
    value,
)
from stepgraph.errors import ExecutionError, StepgraphError
from stepgraph.graph import Node
from stepgraph.layer import Scope
from stepgraph.optimizers import global_norm
from stepgraph.tensor import Tensor, TensorDescriptor

Arrays = dict[Key, torch.Tensor]

FORWARD, GRADIENT, UPDATE = "forward", "gradient", "update"
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass(frozen=True, eq=False)
class Program:
    """A traced step: operators with their layer and phase, and which array is which."""

    module: fx.GraphModule
    inputs: dict[Key, fx.Node]
    outputs: dict[Key, fx.Node]
    step: Step

    @property
    def nodes(self) -> list[fx.Node]:
        """The operators, in order."""
        return [node for node in self.module.graph.nodes if node.op not in ("placeholder", "output")]


def layer_of(node: fx.Node) -> str:
    """Name of the layer an operator belongs to."""
    return str(node.meta.get("custom", {}).get("layer", ""))


def phase_of(node: fx.Node) -> str:
    """Phase an operator belongs to."""
    return str(node.meta.get("custom", {}).get("phase", FORWARD))


def trace(step: Step) -> Program:
    """Records `run(step, …)` on arrays without memory."""
    shapes = step.check()
    keys = input_keys(step)
    outputs: list[Key] = []

    def function(*arrays: torch.Tensor) -> list[torch.Tensor]:
        results = run(step, dict(zip(keys, arrays, strict=True)))
        outputs[:] = results
        return list(results.values())

    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [
            torch.empty(shape, dtype=dtype, device=step.device)
            for shape, dtype in (_signature(step, shapes, k) for k in keys)
        ]
    with traceback.preserve_node_meta(), torch.autograd.set_multithreading_enabled(False):
        module = make_fx(function, tracing_mode="fake")(*fakes)
    _drop_aliases(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    (returned,) = next(node for node in module.graph.nodes if node.op == "output").args
    return Program(
        module,
        dict(zip(keys, placeholders, strict=True)),
        dict(zip(outputs, returned, strict=True)),
        step,
    )


def input_keys(step: Step) -> list[Key]:
    """What a step reads, in a fixed order."""
    keys = [value(tensor) for tensor in (*step.feeds, *step.held)] + [STREAM]
    if step.differentiates:
        keys += [user_gradient(tensor) for tensor in step.seeded]
        if step.optimizer is not None:
            keys += [state(tensor, i) for tensor in step.trainable for i in range(len(step.optimizer.slots))]
            keys.append(NUMBERS)
    return keys


def run(step: Step, arrays: Arrays) -> Arrays:
    """The whole iteration on arrays. Everything found comes back; parameters and statistics change in place."""
    walk = _Walk(step, arrays)
    for index, node in enumerate(step.nodes):
        walk.forward(index, node)
    if step.training:
        with _tagged("random stream", FORWARD):
            arrays[STREAM][1].add_(1)
    if step.differentiates:
        walk.seed()
        for index in reversed(range(len(step.nodes))):
            walk.backward(index, step.nodes[index])
        walk.finish()
    return walk.found


@dataclass
class _Visit:
    """What the reverse walk needs of one node's forward: leaves by which it is differentiated, and its results."""

    sources: tuple[torch.Tensor, ...]
    parameters: dict[Tensor, torch.Tensor]
    results: tuple[torch.Tensor, ...]


@dataclass
class _Walk:
    """The state of one run: values found so far, and contributions to gradients that are still open."""

    step: Step
    arrays: Arrays
    found: Arrays = field(default_factory=dict)
    visits: list[_Visit] = field(default_factory=list)
    open: dict[Tensor, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))

    def value(self, tensor: Tensor) -> torch.Tensor:
        key = value(tensor)
        return self.found[key] if key in self.found else self.arrays[key]

    def forward(self, index: int, node: Node) -> None:
        step = self.step
        sources = tuple(self._leaf(t, t in step.active and t not in node.labels) for t in node.arguments)
        by_parameter = set(step.differentiated(node)) if step.training else set()
        own = {t: self._leaf(t, t in by_parameter and t not in step.stopped) for t in layer_tensors(node)}
        scope = Scope(own, step.training, self.arrays[STREAM], salt=index, batch=step.batch)
        with self._tag(node, FORWARD):
            results = _called(node, sources, scope)
            for statistic, new in scope.updates.items():
                old = self.value(statistic)
                old.copy_(new.reshape(old.shape))
        self.found |= {value(t): array.detach() for t, array in zip(node.results, results, strict=True)}
        self.visits.append(_Visit(sources, {t: own[t] for t in own if own[t].requires_grad}, results))

    def seed(self) -> None:
        for node in self.step.losses:
            with self._tag(node, GRADIENT):
                self.open[node.results[0]].append(torch.ones_like(self.value(node.results[0])))
        for tensor in self.step.seeded:
            self.open[tensor].append(self.arrays[user_gradient(tensor)])

    def backward(self, index: int, node: Node) -> None:
        visit = self.visits[index]
        self.visits[index] = _Visit((), {}, ())  # the layer's own graph is not needed again
        with self._tag(node, GRADIENT):
            cotangents = {i: self._total(t) for i, t in enumerate(node.results) if t in self.open}
            reached = [i for i in cotangents if visit.results[i].requires_grad]
            if reached:
                self._differentiate(node, visit, reached, cotangents)
        for tensor in self._complete(index, node):
            self._total_parameter(tensor)

    def _differentiate(
        self, node: Node, visit: _Visit, reached: list[int], cotangents: dict[int, torch.Tensor]
    ) -> None:
        sources = {i: leaf for i, leaf in enumerate(visit.sources) if leaf.requires_grad}
        leaves = [*sources.values(), *visit.parameters.values()]
        derivatives = torch.autograd.grad(
            [visit.results[i] for i in reached], leaves, [cotangents[i] for i in reached], allow_unused=True
        )
        for i, derivative in zip(sources, derivatives, strict=False):
            if derivative is not None:
                self.found[source_gradient(node, i)] = derivative
                self.open[node.arguments[i]].append(derivative)
        for tensor, derivative in zip(visit.parameters, derivatives[len(sources) :], strict=True):
            if derivative is not None:
                self.open[tensor].append(derivative)

    def finish(self) -> None:
        """Closes gradients of inputs, and updates what had to wait for the global norm."""
        for tensor in (*self.step.feeds, *self.step.held):
            if tensor in self.open and gradient(tensor) not in self.found:
                self._total(tensor)
        optimizer = self.step.optimizer
        waiting = [t for t in self.step.trainable if gradient(t) in self.found]
        if optimizer is not None and optimizer.needs_global_norm and waiting:
            with _tagged("optimizer", UPDATE):
                norm = global_norm([self.found[gradient(t)] for t in waiting], self._numbers())
            for tensor in waiting:
                self._update(tensor, norm)
        if optimizer is not None and waiting:
            with _tagged("optimizer", UPDATE):
                self.arrays[NUMBERS][optimizer.live.index("time_step")].add_(1)

    def _total(self, tensor: Tensor) -> torch.Tensor:
        contributions = self.open[tensor]
        total = contributions[0]
        for further in contributions[1:]:
            total = total + further
        self.found[gradient(tensor)] = total
        return total

    def _complete(self, index: int, node: Node) -> list[Tensor]:
        """Trainable tensors whose last contribution came from this node."""
        first_use, trainable = self.step.first_use, self.step.trainable_set
        touched = dict.fromkeys((*node.sources, *layer_tensors(node)))
        return [t for t in touched if t in trainable and t in self.open and first_use[t] == index]

    def _total_parameter(self, tensor: Tensor) -> None:
        with _tagged(self.step.names.get(tensor, tensor.label), GRADIENT):
            self._total(tensor)
        optimizer = self.step.optimizer
        if optimizer is not None and not optimizer.needs_global_norm:
            self._update(tensor, None)

    def _update(self, tensor: Tensor, norm: torch.Tensor | None) -> None:
        optimizer = self.step.optimizer
        assert optimizer is not None
        states = [self.arrays[state(tensor, i)] for i in range(len(optimizer.slots))]
        with _tagged(self.step.names.get(tensor, tensor.label), UPDATE), torch.no_grad():
            kernels.update(
                optimizer, self.arrays[value(tensor)], self.found[gradient(tensor)], states, norm, self.arrays[NUMBERS]
            )

    def _numbers(self) -> SimpleNamespace:
        assert self.step.optimizer is not None
        return kernels.named(self.step.optimizer, self.arrays[NUMBERS])

    def _leaf(self, tensor: Tensor, differentiable: bool) -> torch.Tensor:
        leaf = self.value(tensor).detach()
        return leaf.requires_grad_() if differentiable and self.step.differentiates else leaf

    def _tag(self, node: Node, phase: str) -> Any:
        return _tagged(self.step.names.get(node.layer, node.layer.label), phase)


def _called(node: Node, sources: Sequence[torch.Tensor], scope: Scope) -> tuple[torch.Tensor, ...]:
    try:
        results = node.layer.forward(*sources, scope=scope)
    except StepgraphError:
        raise
    except Exception as error:  # whatever a layer's torch code raises, the user must see which layer it was
        shapes = ", ".join(str(list(source.shape)) for source in sources)
        raise ExecutionError(node.where, f"its forward failed: {error}", sources=shapes) from error
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _tagged(layer: str, phase: str) -> Any:
    return traceback.annotate({"layer": layer, "phase": phase})


def _signature(step: Step, shapes: Mapping[Tensor, TensorDescriptor], key: Key) -> tuple[tuple[int, ...], torch.dtype]:
    match key.kind:
        case "value" | "user gradient":
            return shapes[key.owner].shape, key.owner.data_type.torch
        case "state":
            return key.owner.shape, key.owner.data_type.torch
        case "numbers":
            assert step.optimizer is not None
            return (len(step.optimizer.live),), kernels.number_type(step.device)
        case _:
            return (2,), torch.int64


def _drop_aliases(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
