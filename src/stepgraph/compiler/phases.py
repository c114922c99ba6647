"""Splits a traced step into parts that run separately, and determines what each passes to the next."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from stepgraph.compiler.modules import Module
from stepgraph.compiler.program import Part, Phase, Program, fake, inherit, mutates, notes, storage, storages, writes
from stepgraph.compiler.step import Key, KeyKind, gradient, value


@dataclass(frozen=True, eq=False)
class Phases:
    """The three parts of a step. `forward` returns, besides results, what `gradient` needs from it."""

    forward: Part
    gradient: Part
    update: Part


def whole(program: Program, wanted: Sequence[Key]) -> Part:
    """The step as one part; only `wanted` outlives it."""
    return extract(program, set(Phase), [key for key in wanted if key in program.outputs])


def split(program: Program) -> Phases:
    """The step as three parts; every result and every computed gradient stays readable."""
    names = _crossing_names(program)
    computed = [key for key in program.outputs if key.kind in (KeyKind.GRADIENT, KeyKind.SOURCE_GRADIENT)]
    backward = extract(program, {Phase.GRADIENT}, computed, names)
    step = program.step
    results = [value(tensor) for node in step.nodes for tensor in node.results]
    passed_on = [key for key in backward.inputs if key not in program.inputs]
    forward = extract(program, {Phase.FORWARD}, list(dict.fromkeys([*results, *passed_on])), names)
    return Phases(forward, backward, extract(program, {Phase.UPDATE}, [], names))


def extract(
    program: Program, phases: Collection[Phase], wanted: Sequence[Key], names: dict[fx.Node, Key] | None = None
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
        copies[node] = graph.placeholder(f"{_argument_name(inputs[-1])}_{len(inputs)}")
        inherit(copies[node], node)
    for node in program.module.graph.nodes:
        if node in chosen:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op == "call_function" and notes(node).phase not in phases:  # a view, recreated by this part
                inherit(copies[node], node, phase=next(iter(phases)))
    graph.output([_owned(graph, copies[end]) for end in ends])
    return Part(Module(program.module, graph), tuple(inputs), tuple(wanted))


def _needed(program: Program, phases: Collection[Phase], ends: Sequence[fx.Node]) -> set[fx.Node]:
    changing = [node for node in program.nodes if mutates(node)]
    stack = [*ends, *(node for node in changing if notes(node).phase in phases)]
    before = [node for node in changing if notes(node).phase not in (*phases, Phase.UPDATE)]
    changed = {storage(one) for node in before for one in writes(node)}
    chosen: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        belongs = node.op == "get_attr" or notes(node).phase in phases or _is_free(node, changed)
        if node not in chosen and node.op != "placeholder" and belongs:
            chosen.add(node)
            stack += node.all_input_nodes
    return chosen


def _is_free(node: fx.Node, changed: Collection[int | None]) -> bool:
    """Whether the gradient pass recreates a view of a forward array itself instead of receiving it.

    A view is free, and a copy of it would have another layout: products would sum in another order than
    in the whole step. Arrays that change between the parts must be passed on as they were.
    """
    if node.op != "call_function" or notes(node).phase != Phase.FORWARD or mutates(node):
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
    """Keys for what one part may pass to another: the gradient it is, the result it is, or just a number."""
    known = {node: key for key, node in reversed(program.outputs.items()) if key.kind == KeyKind.VALUE}
    known |= {
        program.outputs[gradient(t)]: gradient(t) for t in program.step.trainable if gradient(t) in program.outputs
    }
    known |= {node: key for key, node in program.outputs.items() if key.kind == KeyKind.PIECE}
    return {node: known.get(node, Key(KeyKind.HANDED_ON, index)) for index, node in enumerate(program.nodes)}


def _owned(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Copies a result that shares memory with an input: the input may change while the result is read."""
    entering = {storage(one) for one in graph.nodes if one.op == "placeholder"}
    if node.op != "placeholder" and storage(node) not in entering:
        return node
    with graph.inserting_after(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    with fake(node).fake_mode:
        return inherit(copy, node, fake(node).clone(), layer=notes(node).layer or "copies of inputs")


def _argument_name(key: Key) -> str:
    label = getattr(key.owner, "label", key.owner)
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in f"{key.kind}_{label}_{key.position}")
