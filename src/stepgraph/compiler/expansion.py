"""A fused step as PyTorch's compiler lowers it: composed operators taken apart, nothing changed in place.

PyTorch gets there by running all operators twice without memory, first to learn what they change, then to record what
each is composed of. A network repeats its blocks, so most operators occur many times with equal shapes and settings.
Here, each different operator is recorded once, by PyTorch's own rules; the others like it are copies.

Arrays that some operator changes are left to PyTorch: views of them, operators that write to them, and the final copies
into inputs are recorded one by one. What PyTorch would only finish around the compiled function, such as results that
share memory with inputs, is not expanded here at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph.compiler.alike import SIMPLE
from stepgraph.compiler.program import derive, fake, mutates, refresh, remove_dead, set_fake, storages, writes
from stepgraph.errors import reason
from stepgraph.system import torch_private

aten = torch.ops.aten


class Unexpandable(Exception):
    """The operators cannot be expanded here; PyTorch's own way remains."""


class ExpansionFailed(Unexpandable):
    """Expanding raised an error that is no known limit: a defect, here or in PyTorch."""


class _Changes(Exception):
    """A function changes arrays in some of its arguments, which only running it has shown."""

    def __init__(self, function: Any, places: set[int | str]) -> None:
        super().__init__()
        self.function = function
        self.places = places


def expand(graph: fx.Graph, arrays: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The operators as the compiler lowers them, with notes as tags.

    Args:
        graph: recorded operators, with tags.
        arrays: its inputs, arrays without memory.

    Raises:
        Unexpandable: an operator, an input or a result needs more than that.
        ExpansionFailed: an operator raised an error.
    """
    _require_simple(graph, arrays)
    changing = set(filter(mutates, graph.nodes))
    changed = {one for node in changing for array in writes(node) for one in _known_storages(array)}
    known: dict[Any, _Recorded] = {}
    while True:
        work = _Work(graph, changing, changed, known)
        try:
            module = torch_private.functional_trace(work.run, arrays)
        except _Changes as found:
            more = graph.find_nodes(op="call_function", target=found.function)
            changing.update(more)
            changed.update(one for node in more for one in storages(node))
            sources = (source for node in more for source in _sources(node.args, node.kwargs, found.places))
            changed.update(one for source in sources for one in _known_storages(source))
            continue
        except Unexpandable:
            raise
        except Exception as error:  # whatever PyTorch raises for one operator, it may record the whole graph
            raise ExpansionFailed(reason(error)) from error
        work.complete()
        remove_dead(module.graph)
        return module


def _known_storages(node: fx.Node) -> list[int]:
    found = storages(node)
    if not found:
        raise Unexpandable(f"{node.name} is changed, and nothing is known about its memory")
    return found


def _require_simple(graph: fx.Graph, arrays: Sequence[torch.Tensor]) -> None:
    """Requires inputs and results in memory of their own, and operators without constants."""
    (end,) = graph.find_nodes(op="output")
    given = [one for node in graph.find_nodes(op="placeholder") for one in storages(node)]
    returned = [one for node in end.args[0] for one in storages(node)]
    if len({*given, *returned}) != len(arrays) + len(end.args[0]):
        raise Unexpandable("inputs or results share memory")
    if any(array.requires_grad for array in arrays) or any(node.op == "get_attr" for node in graph.nodes):
        raise Unexpandable("there are constants, or arrays with gradients")


class _Recorded(NamedTuple):
    """What an operator was recorded as.

    Args:
        sources: the arrays it reads, each once.
        nodes: what it is composed of.
        views: those of them whose results share memory with others.
        results: its results: sources, nodes, or numbers.
    """

    sources: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    views: frozenset[fx.Node]
    results: Any


@dataclass
class _Work:
    """One pass over the operators, while PyTorch records."""

    graph: fx.Graph
    changing: set[fx.Node]
    changed: set[int]
    known: dict[Any, _Recorded]
    values: dict[fx.Node, Any] = field(default_factory=dict)  # a node of the new graph, or an array that is changed
    copied: dict[fx.Node, bool] = field(default_factory=dict)  # copies with the fakes of others; whether they are views

    def run(self, *arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Expands all operators for arrays that PyTorch follows."""
        self.trace = torch_private.current_trace()
        given = list(zip(self.graph.find_nodes(op="placeholder"), arrays, strict=True))
        for node, array in given:
            self.values[node] = self.trace.functional(array) if self._is_changed(node) else self.trace.node(array)
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._expand(node)
        (end,) = self.graph.find_nodes(op="output")
        results = tuple(self._array(self._read(node)) for node in end.args[0])
        for node, array in given:
            self._write_back(self.values[node], array)
        return results

    def complete(self) -> None:
        """Gives every copy a fake of its own."""
        for node in list(self.copied):
            if node in self.copied:
                self._separate(node)

    def _is_changed(self, node: fx.Node) -> bool:
        return not self.changed.isdisjoint(storages(node))

    def _expand(self, node: fx.Node) -> None:
        before = _last(self.trace.graph)
        arguments: Any = node.args
        if self._is_changed(node) or node in self.changing:
            self.values[node] = self._followed(node)
        elif node.target is getitem and isinstance(self.values[arguments[0]], tuple | list):
            self.values[node] = self.values[arguments[0]][arguments[1]]
        else:
            self.values[node] = self._repeated(node)
        derive(_after(self.trace.graph, before), node)

    def _followed(self, node: fx.Node) -> Any:
        """Runs an operator on arrays that PyTorch follows through changes."""
        function: Any = node.target
        given = {one: self._functional(self.values[one]) for one in node.all_input_nodes}
        fixed = {one: self.trace.current(given[one]) for one in given if isinstance(self.values[one], fx.Node)}
        positional, named = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        found = function(*positional, **named)
        if lost := {one for one, array in fixed.items() if self.trace.current(given[one]) is not array}:
            raise _Changes(function, _places(node.args, node.kwargs, lost))
        return found

    def _functional(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(self._functional, value))
        return self.trace.functional(self._array(value)) if isinstance(value, fx.Node) else value

    def _repeated(self, node: fx.Node) -> Any:
        """Copies what an equal operator was recorded as, or records it."""
        sources: dict[fx.Node, int] = {}
        arguments = fx.map_arg((node.args, node.kwargs), self._read)
        key = node.target, _key_of(arguments, sources), tuple(map(_layout, sources))
        if key in self.known:
            return self._copy(self.known[key], tuple(sources))
        return self._record(node, arguments, tuple(sources), key)

    def _read(self, node: fx.Node) -> Any:
        """The value of an operator at this point of the new graph."""
        return self._current(self.values[node])

    def _current(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(self._current, value))
        return self.trace.node(self.trace.current(value)) if isinstance(value, torch.Tensor) else value

    def _record(self, node: fx.Node, arguments: Any, sources: tuple[fx.Node, ...], key: Any) -> Any:
        arrays = {one: self._array(one) for one in sources}
        given = {one: self.trace.functional(array) for one, array in arrays.items()}
        last = _last(self.trace.graph)
        function: Any = node.target
        positional, named = fx.map_arg(arguments, given.__getitem__)
        found = function(*positional, **named)
        if lost := {one for one, array in arrays.items() if self.trace.current(given[one]) is not array}:
            if not self._follow(node, {one: given[one] for one in lost}):
                raise _Changes(function, _places(arguments[0], arguments[1], lost))
            return found
        results = self._current(found)
        nodes = tuple(_after(self.trace.graph, last))
        if _is_closed(nodes, sources):
            self.known[key] = _Recorded(sources, nodes, _views(nodes, sources), results)
        return results

    def _follow(self, node: fx.Node, changed: dict[fx.Node, torch.Tensor]) -> bool:
        """Follows arrays that an operator has changed, if they are inputs and nothing else has their memory yet."""
        owners = {one: value for one, value in self.values.items() if isinstance(value, fx.Node) and value in changed}
        memory = {one for owner in owners for one in storages(owner)}
        sharing = [one for one in self.values if not memory.isdisjoint(storages(one))]
        if len(owners) != len(changed) or sharing != list(owners) or any(one.op != "placeholder" for one in owners):
            return False
        self.changed.update(memory, storages(node))
        self.changing.update(self.graph.find_nodes(op="call_function", target=node.target))
        self.values.update((owner, changed[value]) for owner, value in owners.items())
        return True

    def _copy(self, recorded: _Recorded, sources: tuple[fx.Node, ...]) -> Any:
        new = dict(zip(recorded.sources, sources, strict=True))
        for node in recorded.nodes:
            new[node] = twin = self.trace.graph.node_copy(node, new.__getitem__)
            self.copied[twin] = node in recorded.views
        return fx.map_arg(recorded.results, new.__getitem__)

    def _array(self, node: fx.Node) -> torch.Tensor:
        """The array without memory of a node, which PyTorch follows from now on."""
        if node in self.copied:
            with torch_private.disable_modes():
                self._separate(node)
        return self.trace.array(node, fake(node))

    def _separate(self, node: fx.Node) -> None:
        """Gives a copy a fake of its own; until then, it has that of its original."""
        if self.copied.pop(node):
            for source in node.all_input_nodes:
                if source in self.copied:
                    self._separate(source)
            refresh(node)
        else:
            set_fake(node, fx.node.map_aggregate(fake(node), torch_private.another))

    def _write_back(self, value: Any, array: torch.Tensor) -> None:
        """Copies the last value of an input that was changed into it."""
        if not isinstance(value, torch.Tensor):
            return
        last = self.trace.current(value)
        if last is array:
            return
        if last.shape != array.shape:
            raise Unexpandable("an input changes its shape")
        copied = self.trace.graph.call_function(aten.copy_.default, (self.trace.node(array), self.trace.node(last)))
        set_fake(copied, array)


def _places(positional: Sequence[Any], named: Mapping[str, Any], nodes: set[fx.Node]) -> set[int | str]:
    """The arguments in which some of the nodes occur."""
    every = [*range(len(positional)), *named]
    return {place for place in every if not nodes.isdisjoint(_sources(positional, named, {place}))}


def _sources(positional: Sequence[Any], named: Mapping[str, Any], places: set[int | str]) -> list[fx.Node]:
    """The nodes that occur in some of the arguments."""
    found: list[fx.Node] = []
    given: list[tuple[int | str, Any]] = [*enumerate(positional), *named.items()]
    fx.map_arg([value for place, value in given if place in places], found.append)
    return found


def _last(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))  # in PyTorch 2.11, `reversed` returns no iterator


def _after(graph: fx.Graph, last: fx.Node) -> list[fx.Node]:
    """The nodes behind another."""
    found = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        found.append(node)
    return found[::-1]


def _key_of(value: Any, sources: dict[fx.Node, int]) -> Any:
    """Arguments as a value that can be compared; arrays are numbers, in the order in which they first occur."""
    if isinstance(value, fx.Node):
        return fx.Node, sources.setdefault(value, len(sources))
    if isinstance(value, tuple | list):
        return type(value), *(_key_of(one, sources) for one in value)
    if isinstance(value, dict):
        return dict, *((name, _key_of(one, sources)) for name, one in value.items())
    if isinstance(value, slice):
        return slice, *(_key_of(one, sources) for one in (value.start, value.stop, value.step))
    if not isinstance(value, SIMPLE):
        raise Unexpandable(f"{value!r} is an argument")
    return type(value), repr(value) if isinstance(value, float | complex) else value  # 0.0 equals -0.0


def _layout(node: fx.Node) -> torch_private.Layout:
    return torch_private.layout(fake(node))


def _is_closed(nodes: Sequence[fx.Node], sources: Sequence[fx.Node]) -> bool:
    """Whether nodes read nothing but sources and each other, and give the same in every call."""
    inside = {*nodes, *sources}
    calls = (node.op == "call_function" and inside.issuperset(node.all_input_nodes) for node in nodes)
    return all(calls) and not any(_is_random(node) for node in nodes)


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _views(nodes: Sequence[fx.Node], sources: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The nodes whose results share memory with sources or earlier ones."""
    seen = {one for node in sources for one in storages(node)}
    found = set()
    for node in nodes:
        if not seen.isdisjoint(storages(node)):
            found.add(node)
        seen.update(storages(node))
    return frozenset(found)
