"""Cuts a traced step into the parts that run on their own, and says what one hands to the next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import getitem

import torch
from torch import fx

from stepgraph.compiler.modules import Module
from stepgraph.compiler.passes import mutates, writes
from stepgraph.compiler.step import Key, gradient, value
from stepgraph.compiler.trace import Program, phase_of
from stepgraph.compiler.walk import FORWARD, GRADIENT, UPDATE
from stepgraph.torch_private import OpOverload, identity

TINY = 1 << 16  # numbers


@dataclass(frozen=True, eq=False)
class Part:
    """A program's operators of some phases: what it reads, what it gives, and bytes it holds for results in between."""

    module: fx.GraphModule
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    held: int = 0

    @property
    def nodes(self) -> list[fx.Node]:
        """The operators, in order."""
        return [node for node in self.module.graph.nodes if node.op not in ("placeholder", "output")]

    @property
    def placeholders(self) -> list[fx.Node]:
        """What stands for its inputs, in their order."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @cached_property
    def is_tiny(self) -> bool:
        """Whether one thread has computed it before others would have woken up."""
        found = (node.meta.get("val") for node in self.nodes)
        arrays = (one for result in found for one in (result if isinstance(result, tuple | list) else (result,)))
        return sum(one.numel() for one in arrays if isinstance(one, torch.Tensor)) < TINY

    @cached_property
    def is_open_to_switches(self) -> bool:
        """Whether PyTorch's process-wide switches can reach an operator: default type or device, determinism."""
        return any(_asks_switches(node) for node in self.nodes)

    @cached_property
    def written(self) -> tuple[Key, ...]:
        """The arrays given to it that a run changes: parameters, statistics, optimizer state, random stream.

        They are read off the operators: a list of its own could miss something. Whoever runs a part to look at it
        gives copies of these; whoever must take a run back keeps copies of them.
        """
        changed = {storage(array) for node in self.nodes for array in writes(node)}
        given = zip(self.inputs, self.placeholders, strict=True)
        return tuple(key for key, node in given if storage(node) in changed)

    @property
    def results(self) -> dict[Key, torch.Tensor]:
        """What it gives, as arrays without memory."""
        (returned,) = next(node for node in self.module.graph.nodes if node.op == "output").args
        return {key: node.meta["val"] for key, node in zip(self.outputs, returned, strict=True)}


@dataclass(frozen=True, eq=False)
class Phases:
    """The three parts of a step. `forward` gives, besides results, what `gradient` needs of it."""

    forward: Part
    gradient: Part
    update: Part


def whole(program: Program, wanted: Sequence[Key]) -> Part:
    """The step in one part; only `wanted` outlives it."""
    return extract(program, {FORWARD, GRADIENT, UPDATE}, [key for key in wanted if key in program.outputs])


def split(program: Program) -> Phases:
    """The step in three parts; every result and every gradient that is computed stays readable."""
    names = _crossing_names(program)
    computed = [key for key in program.outputs if key.kind in ("gradient", "source gradient")]
    backward = extract(program, {GRADIENT}, computed, names)
    step = program.step
    results = [value(tensor) for node in step.nodes for tensor in node.results]
    handed_on = [key for key in backward.inputs if key not in program.inputs]
    forward = extract(program, {FORWARD}, list(dict.fromkeys([*results, *handed_on])), names)
    return Phases(forward, backward, extract(program, {UPDATE}, [], names))


def extract(
    program: Program, phases: Collection[str], wanted: Sequence[Key], names: dict[fx.Node, Key] | None = None
) -> Part:
    """The operators of `phases` that `wanted` depends on, and all that change arrays in place."""
    crossing = names or {}
    by_key = {key: node for node, key in crossing.items()}
    ends = [program.outputs[key] if key in program.outputs else by_key[key] for key in wanted]
    chosen = _needed(program, phases, ends)
    graph, copies, inputs = fx.Graph(), {}, []
    keys = {node: key for key, node in program.inputs.items()}
    outside = _outside(program, chosen, ends)
    for node in outside:
        inputs.append(keys[node] if node in keys else crossing[node])
        copies[node] = graph.placeholder(f"{_spoken(inputs[-1])}_{len(inputs)}")
        copies[node].meta = dict(node.meta)
    for node in program.module.graph.nodes:
        if node in chosen:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_function" and phase_of(node) not in phases:  # a view, seen again by this part
                copies[node].meta = {**node.meta, "custom": {**node.meta["custom"], "phase": next(iter(phases))}}
    graph.output([_owned(graph, copies[end]) for end in ends])
    return Part(Module(program.module, graph), tuple(inputs), tuple(wanted))


def arrays(node: fx.Node) -> list[torch.Tensor]:
    """All results of an operator."""
    values = node.meta.get("val")
    values = values if isinstance(values, tuple | list) else [values]
    return [array for array in values if isinstance(array, torch.Tensor)]


def storages(node: fx.Node) -> list[int]:
    """Identities of the memory behind all of an operator's results."""
    return [identity(array.untyped_storage()) for array in arrays(node)]


def storage(node: fx.Node) -> int | None:
    """Identity of the memory behind an operator's result; views share it."""
    array = node.meta.get("val")
    return identity(array.untyped_storage()) if isinstance(array, torch.Tensor) else None


def _needed(program: Program, phases: Collection[str], ends: Sequence[fx.Node]) -> set[fx.Node]:
    changing = [node for node in program.nodes if mutates(node)]
    stack = [*ends, *(node for node in changing if phase_of(node) in phases)]
    before = [node for node in changing if phase_of(node) not in (*phases, UPDATE)]
    changed = {storage(one) for node in before for one in writes(node)}
    chosen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        belongs = node.op == "get_attr" or phase_of(node) in phases or _is_free(node, changed)
        if node not in chosen and node.op != "placeholder" and belongs:
            chosen.add(node)
            stack += node.all_input_nodes
    return chosen


def _asks_switches(node: fx.Node) -> bool:
    """Whether an operator may do something else for another default type or device, or deterministically.

    Those are operators of others, those that write where indices say, and those that make real numbers of none.
    """
    target = node.target
    if isinstance(target, OpOverload):
        if target.namespace not in ("aten", "stepgraph", "prims"):
            return True
        if any(word in target.name() for word in ("index", "scatter", "put", "cum", "embedding")):
            return True
    makes_real = any(array.is_floating_point() for array in arrays(node)) and node.kwargs.get("dtype") is None
    read = [array for source in node.all_input_nodes for array in arrays(source)]
    return makes_real and not any(array.is_floating_point() for array in read)


def _is_free(node: fx.Node, changed: Collection[int | None]) -> bool:
    """Whether the gradient looks at an array of the forward pass itself, rather than being handed a view of it.

    A view costs nothing, and a copy of it would lie otherwise in memory: products would add in another order than
    in the whole step. What changes between the parts must be handed on as it was.
    """
    if node.op != "call_function" or phase_of(node) != FORWARD or mutates(node):
        return False
    source = node.args[0] if node.args else None
    if node.target is getitem:
        return isinstance(source, fx.Node) and _is_free(source, changed)
    seen = {one for source in node.all_input_nodes for one in storages(source)}
    own = set(storages(node))
    return bool(own) and own <= seen and own.isdisjoint(changed)


def _outside(program: Program, chosen: set[fx.Node], ends: Sequence[fx.Node]) -> list[fx.Node]:
    read = {node for inside in chosen for node in inside.all_input_nodes} | set(ends)
    return [node for node in program.module.graph.nodes if node in read and node not in chosen]


def _crossing_names(program: Program) -> dict[fx.Node, Key]:
    """Keys for what one part may hand to another: the gradient it is, the result it is, or just a number."""
    known = {node: key for key, node in reversed(program.outputs.items()) if key.kind == "value"}
    known |= {
        program.outputs[gradient(t)]: gradient(t) for t in program.step.trainable if gradient(t) in program.outputs
    }
    return {node: known.get(node, Key("handed on", index)) for index, node in enumerate(program.nodes)}


def _owned(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A result that shares memory with an input is copied: the input may change while the result is read."""
    entering = {storage(one) for one in graph.nodes if one.op == "placeholder"}
    if node.op != "placeholder" and storage(node) not in entering:
        return node
    with graph.inserting_after(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    with node.meta["val"].fake_mode:
        copy.meta = {**node.meta, "val": node.meta["val"].clone()}
    return copy


def _spoken(key: Key) -> str:
    label = getattr(key.owner, "label", key.owner)
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in f"{key.kind}_{label}_{key.position}")
