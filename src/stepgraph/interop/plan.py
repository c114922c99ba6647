"""What becomes a node: modules, and the functions between them, in both modes.

A recording is divided at the calls of modules: before each module, and after the last one, there is a stretch of
functions, which may be empty. Both modes must call the same modules; the functions between them may differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from stepgraph.interop.arguments import held_in, makes, numbers_in
from stepgraph.interop.batch import common_path
from stepgraph.interop.capture import Capture, Event, Held, Known
from stepgraph.interop.returns import with_common_results
from stepgraph.layers.glue import OFF, Call, Named, Program, Slice, Value
from stepgraph.tensors.tensor import MAX_DIMENSIONS, TensorDescriptor
from stepgraph.types import DataType


class Wire(NamedTuple):
    """A value between nodes: an input, or a result of a node.

    Args:
        kind: `"input"`, `"module"` or `"glue"`.
        owner: the name of the input, or the position of the module or of the stretch of functions.
        position: which of its results.
    """

    kind: str
    owner: Any
    position: int = 0


@dataclass(frozen=True)
class GlueNode:
    """A stretch of functions.

    Args:
        path: the module around them.
        training: what to compute in training.
        inference: what to compute in inference; None if it is the same.
        sources: what it reads.
        tensors: the names of the parameters and buffers it reads.
        held: the numbers of other arrays it reads.
        results: shapes and types of its results.
    """

    path: str
    training: Program
    inference: Program | None
    sources: tuple[Wire, ...]
    tensors: tuple[str, ...]
    held: tuple[int, ...]
    results: tuple[TensorDescriptor, ...]


@dataclass(frozen=True)
class ModuleNode:
    """A module.

    Args:
        path: its path.
        module: the module.
        arguments: positional and keyword arguments, with the position of a source in the place of each array.
        sources: what it reads.
        results: shapes and types of its results.
        differentiable: False inside `no_grad`.
        returned: the paths of its results, if it returns others in one of the modes.
    """

    path: str
    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    sources: tuple[Wire, ...]
    results: tuple[TensorDescriptor, ...]
    differentiable: bool = True
    returned: tuple[str, ...] | None = None


@dataclass
class Plan:
    """Nodes in order.

    Args:
        nodes: the nodes by the wire of their first result.
        outputs: the wires of the model's results, by path; those that are parameters are left out.
        problems: paths of modules that must become one node, and why.
    """

    nodes: dict[Wire, GlueNode | ModuleNode] = field(default_factory=dict)
    outputs: dict[str, Wire] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


@dataclass
class Stretch:
    """The functions before one module in one mode.

    Args:
        events: the functions that something later depends on.
        module: the call of the module after them; None at the end, and where nothing depends on the module.
        made: the numbers of what the functions make.
    """

    events: list[Event]
    module: Event | None
    made: set[int] = field(default_factory=set)


def stretches(capture: Capture) -> list[Stretch]:
    """A recording, divided at the calls of modules."""
    found, events = [], list[Event]()
    for event in capture.events:
        if event.is_module:
            found.append(Stretch(events, event))
            events = []
        else:
            events.append(event)
    return [*found, Stretch(events, None)]


class _Side:
    """One mode: where values are made, and what is needed of it.

    Args:
        capture: the recording.
        finals: the numbers of the results to compute.
    """

    def __init__(self, capture: Capture, wanted: Sequence[str]) -> None:
        self.capture = capture
        self.finals = [number for path in wanted for number in numbers_in(capture.output[path])]
        self.stretches = stretches(capture)
        self.state = {number: name for name, number in reversed(capture.state.items())}
        self.made: dict[int, Wire | int] = {n: Wire("input", name) for name, n in capture.inputs.items()}
        for position, one in enumerate(self.stretches):
            for event in one.events:
                self._note(makes(event), lambda _, position=position: position)  # type: ignore[misc]
            if one.module is not None:
                self._note(one.module.results, lambda index, position=position: Wire("module", position, index))  # type: ignore[misc]
        self.numbers = {wire: number for number, wire in self.made.items() if isinstance(wire, Wire)}

    def _note(self, numbers: Sequence[int], where: Callable[[int], Wire | int]) -> None:
        for index, number in enumerate(numbers):
            if number not in self.state:
                self.made.setdefault(number, where(index))

    def prune(self, kept: set[int]) -> set[int]:
        """Drops what nothing depends on. Returns the positions of the modules that are needed, including `kept`."""
        needed, positions = set(self.finals), set[int]()
        for position in reversed(range(len(self.stretches))):
            one = self.stretches[position]
            if one.module is not None and (position in kept or needed & set(one.module.results)):
                positions.add(position)
                needed.update(numbers_in(one.module.arguments))
            events = []
            for event in reversed(one.events):
                if needed & set(makes(event)):
                    needed.update(numbers_in(event.arguments))
                    needed.update(old for old, new in event.changed if new in needed)
                    events.append(event)
            one.events = events[::-1]
            one.made = {n for event in one.events for n in makes(event) if self.made.get(n) == position}
        return positions

    def known(self, number: int) -> Known:
        """What is known of a value."""
        return self.capture.known[number]

    def reads(self, position: int) -> list[int]:
        """The values that a stretch reads from outside, in order."""
        one = self.stretches[position]
        found = dict.fromkeys(n for event in one.events for n in numbers_in(event.arguments))
        return [n for n in found if n not in one.made and n not in self.state]

    def ready(self, number: int) -> int:
        """The first stretch in which a value can be read."""
        where = self.made.get(number, 0)  # parameters can be read anywhere
        return where if isinstance(where, int) else where.owner + 1 if where.kind == "module" else 0


def plan(training: Capture, inference: Capture, wanted: Sequence[str]) -> Plan:
    """Nodes for both modes.

    Args:
        training: the recording in training mode.
        inference: the recording in inference mode.
        wanted: the paths of the results to compute.
    """
    training, inference, others = with_common_results(training, inference, wanted)
    sides = _Side(training, wanted), _Side(inference, wanted)
    found = Plan(problems={**others, **inference.problems, **training.problems})
    paths = [[one.module.path for one in side.stretches if one.module is not None] for side in sides]
    if paths[0] != paths[1]:
        differing = next(((a, b) for a, b in zip(*paths, strict=False) if a != b), ("", ""))
        found.problems.setdefault(common_path(*differing), "calls other modules in training than in inference")
    if found.problems:
        return found
    kept = {position for position, one in enumerate(sides[0].stretches) if _moves(one.module)}
    kept = sides[0].prune(kept) | sides[1].prune(kept)
    for side in sides:
        side.prune(kept)
        for position, one in enumerate(side.stretches):
            one.module = one.module if position in kept else None
    return _Planner(sides, found, wanted).run()


def _moves(event: Event | None) -> bool:
    """Whether a module may change its buffers, which counts as a result."""
    return event is not None and isinstance(event.called, nn.Module) and any(True for _ in event.called.buffers())


Pair = tuple[int, int]  # values that mean the same in training and in inference


class _Planner:
    """Pairs the values of the two modes, and makes nodes."""

    def __init__(self, sides: tuple[_Side, _Side], found: Plan, wanted: Sequence[str]) -> None:
        self.sides, self.found, self.wanted = sides, found, wanted
        self.count = len(sides[0].stretches)
        self.pairs: dict[Pair, None] = {}
        self.paired: tuple[set[int], set[int]] = set(), set()
        self.wires: dict[Pair, Wire] = {}
        self.available: tuple[dict[int, Pair], dict[int, Pair]] = {}, {}  # pairs with a wire, by each of their values

    def run(self) -> Plan:
        """The plan, or the problems."""
        same = [self._is_same(position) for position in range(self.count)]
        for position in range(self.count):
            if same[position]:
                self._pair(self.sides[0].reads(position), self.sides[1].reads(position))
            modules = [side.stretches[position].module for side in self.sides]
            if modules[0] is not None and modules[1] is not None:
                if _call(modules[0]) != _call(modules[1]):
                    self._problem(_parent(modules[0].path), "passes other settings to a module in training")
                    return self.found
                self._pair([*numbers_in(modules[0].arguments)], [*numbers_in(modules[1].arguments)])
        self._pair(self.sides[0].finals, self.sides[1].finals)
        for position in range(self.count):
            if not same[position]:
                self._pair_rest(position)
        placed: dict[int, list[Pair]] = {}
        for pair in self.pairs:
            self._place(pair, placed)
        for position in range(self.count):
            self._glue(position, placed.get(position, []))
            self._module(position)
        if not self.found.problems:
            finals = zip(*(side.finals for side in self.sides), strict=True)
            self.found.outputs = {path: self.wires[pair] for path, pair in zip(self.wanted, finals, strict=True)}
        return self.found

    def _problem(self, path: str, why: str) -> None:
        self.found.problems.setdefault(path, why)

    # Pairs

    def _is_same(self, position: int) -> bool:
        """Whether the functions of a stretch are the same in both modes, up to the numbers of values."""
        one, two = ([*_renamed(side, position)] for side in self.sides)
        return one == two

    def _pair(self, one: Sequence[int], two: Sequence[int]) -> None:
        for pair in zip(one, two, strict=True):
            self.pairs[pair] = None
            for known, number in zip(self.paired, pair, strict=True):
                known.add(number)

    def _pair_rest(self, position: int) -> None:
        """Pairs what only stretches read that differ between the modes, in order."""
        rest = [
            [n for n in side.reads(position) if isinstance(side.made.get(n), int) and n not in known]
            for side, known in zip(self.sides, self.paired, strict=True)
        ]
        shapes = [[side.known(n)[:2] for n in own] for side, own in zip(self.sides, rest, strict=True)]
        if shapes[0] == shapes[1]:
            self._pair(*rest)
        else:
            self._problem(self._path(position), "computes something else in training than in inference")

    def _place(self, pair: Pair, placed: dict[int, list[Pair]]) -> None:
        """Finds the node that a pair is a result of."""
        made = [side.made.get(number) for side, number in zip(self.sides, pair, strict=True)]
        if isinstance(made[0], Wire) and made[0] == made[1]:
            self._connect(pair, made[0])
        else:
            position = max(side.ready(number) for side, number in zip(self.sides, pair, strict=True))
            placed.setdefault(min(position, self.count - 1), []).append(pair)

    def _connect(self, pair: Pair, wire: Wire) -> None:
        self.wires[pair] = wire
        for known, number in zip(self.available, pair, strict=True):
            known.setdefault(number, pair)

    # Nodes

    def _path(self, position: int) -> str:
        events = [event.path for side in self.sides for event in side.stretches[position].events]
        return common_path(*events) if events else ""

    def _glue(self, position: int, own: Sequence[Pair]) -> None:
        if not own or self.found.problems:
            return
        why = self._refusal(position, own)
        sources = self._sources(position, own)
        if why or sources is None:
            self._problem(self._path(position), why or "reads an array that another node changed in place")
            return
        names, held = dict[str, None](), dict[int, None]()
        for index, side in enumerate(self.sides):
            read = [event.arguments for event in side.stretches[position].events]
            numbers = [*numbers_in(read), *(pair[index] for pair in own)]
            names.update(dict.fromkeys(side.state[n] for n in numbers if n in side.state))
            held.update(dict.fromkeys(held_in(read)))
        programs = [self._program(position, index, own, sources, [*names], [*held]) for index in (0, 1)]
        self.found.nodes[Wire("glue", position)] = GlueNode(
            self._path(position),
            programs[0],
            None if programs[0] == programs[1] else programs[1],
            tuple(self.wires[pair] for pair in sources),
            tuple(names),
            tuple(held),
            tuple(_descriptor(self.sides[0].known(pair[0])) for pair in own),
        )
        for index, pair in enumerate(own):
            self._connect(pair, Wire("glue", position, index))

    def _refusal(self, position: int, own: Sequence[Pair]) -> str | None:
        """Why a stretch cannot be one node."""
        for index, side in enumerate(self.sides):
            for pair in own:
                why = _refused_value(side.known(pair[index]))
                if why:
                    return f"passes {why} on"
            one, outside = side.stretches[position], side.reads(position)
            memories = [side.known(n).memory for n in outside]
            used = self.paired[index].union(*(numbers_in(event.arguments) for event in one.events))
            for event in one.events:
                for old, new in event.changed:
                    if old in outside and memories.count(side.known(old).memory) > 1:
                        return "changes an array in place that it also reads through a view"
                    if old not in outside and old not in one.made and new in used:
                        return "changes an array in place that another node has a view of"
        return None

    def _sources(self, position: int, own: Sequence[Pair]) -> list[Pair] | None:
        """What a stretch reads, from earlier nodes; None if there is something that none of them made."""
        found: dict[Pair, None] = {}
        for index, side in enumerate(self.sides):
            made = side.stretches[position].made
            passed = [pair[index] for pair in own if pair[index] not in made and pair[index] not in side.state]
            for number in (*side.reads(position), *passed):
                pair = self.available[index].get(number) or self._from_module(number, index)
                if pair is None:
                    return None
                found[pair] = None
        return list(found)

    def _from_module(self, number: int, index: int) -> Pair | None:
        """The pair of an input, or of a module's result, that only one mode reads."""
        wire = self.sides[index].made.get(number)
        other = self.sides[1 - index].numbers.get(wire) if isinstance(wire, Wire) else None
        if other is None or not isinstance(wire, Wire):
            return None
        pair = (number, other) if index == 0 else (other, number)
        self._connect(pair, wire)
        return pair

    def _program(
        self,
        position: int,
        index: int,
        own: Sequence[Pair],
        sources: Sequence[Pair],
        names: Sequence[str],
        held: Sequence[int],
    ) -> Program:
        side = self.sides[index]
        numbers = {pair[index]: n for n, pair in enumerate(sources)}
        numbers |= {side.capture.state[name]: len(sources) + n for n, name in enumerate(names)}
        keep = {number: len(sources) + len(names) + n for n, number in enumerate(held)}
        count = len(sources) + len(names) + len(held)
        scalars = [n for number, n in numbers.items() if side.known(number).shape == ()]
        scalars += [n for number, n in keep.items() if side.capture.held[number].ndim == 0]
        events = side.stretches[position].events
        written = {numbers[old] for event in events for old, _ in event.changed if old in numbers}
        calls = []
        for event in events:
            arguments, settings = _numbered(event.arguments, numbers, keep)
            for number in makes(event):
                if number not in numbers:
                    numbers[number], count = count, count + 1
            results = tuple(numbers[number] for number in event.results)
            changed = tuple((numbers[old], numbers[new]) for old, new in event.changed if old in numbers)
            calls.append(
                Call(str(event.called), arguments, settings, results, changed, event.differentiable, event.autocast)
            )
        returned = list[int]()
        for pair in own:
            if pair[index] in side.state:  # an update writes into the memory of parameters
                calls.append(Call("Tensor.clone", (Value(numbers[pair[index]]),), results=(count,)))
                returned.append(count)
                count += 1
            else:
                returned.append(numbers[pair[index]])
        return Program(tuple(calls), tuple(returned), tuple(sorted(written)), tuple(sorted(scalars)))

    def _module(self, position: int) -> None:
        one, two = (side.stretches[position].module for side in self.sides)
        if one is None or two is None or self.found.problems:
            return
        parent = _parent(one.path)
        for index, (side, event) in enumerate(zip(self.sides, (one, two), strict=True)):
            if any(new in self.paired[index] for _, new in event.changed if new not in event.results):
                self._problem(parent, f"{_name(one)} changes an array in place that others read")
            if any(side.known(n).shape == () for n in numbers_in(event.arguments)):
                self._problem(parent, f"passes an array without dimensions to {_name(one)}")
            for number in event.results:
                why = _refused_value(side.known(number))
                if why:
                    self._problem(parent, f"{_name(one)} returns {why}")
        pairs = [*zip(numbers_in(one.arguments), numbers_in(two.arguments), strict=True)]
        if not self.found.problems and any(pair not in self.wires for pair in pairs):
            self._problem(parent, f"{_name(one)} reads an array that another node changed in place")
        if self.found.problems:
            return
        assert isinstance(one.called, nn.Module)
        self.found.nodes[Wire("module", position)] = ModuleNode(
            one.path,
            one.called,
            _call(one),
            tuple(self.wires[pair] for pair in pairs),
            tuple(_descriptor(self.sides[0].known(number)) for number in one.results),
            one.differentiable,
            one.names if one.returns_more or two.returns_more else None,
        )


def _descriptor(known: Known) -> TensorDescriptor:
    return TensorDescriptor(known.shape or (1,), DataType.of(known.dtype))


def _name(event: Event) -> str:
    return f"'{event.path}' ({type(event.called).__name__})"


def _refused_value(known: Known) -> str | None:
    """Why a value cannot pass from one node to another."""
    if len(known.shape) > MAX_DIMENSIONS:
        return f"an array with {len(known.shape)} dimensions"
    if 0 in known.shape:
        return "an array without elements"
    if known.dtype not in {one.torch for one in DataType}:
        return f"an array of type {str(known.dtype).removeprefix('torch.')}"
    return None


def _call(event: Event) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A module's arguments, with the positions of its sources."""
    positions = itertools.count()

    def walk(tree: Any) -> Any:
        if isinstance(tree, Value):
            return Value(next(positions))
        if isinstance(tree, list | tuple):
            return type(tree)(map(walk, tree))
        return {name: walk(one) for name, one in tree.items()} if isinstance(tree, dict) else tree

    arguments, settings = event.arguments
    return walk(arguments), walk(settings)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _numbered(tree: Any, numbers: Mapping[int, int], held: Mapping[int, int]) -> Any:
    """Arguments with the numbers of a program."""
    if isinstance(tree, Value):
        return Value(numbers[tree.number])
    if isinstance(tree, Held):
        return Value(held[tree.number])
    if isinstance(tree, list | tuple):
        return type(tree)(_numbered(one, numbers, held) for one in tree)
    if isinstance(tree, dict):
        return {name: _numbered(one, numbers, held) for name, one in tree.items()}
    if isinstance(tree, Slice):
        return Slice(*(_numbered(one, numbers, held) for one in (tree.start, tree.stop, tree.step)))
    return tree


def _renamed(side: _Side, position: int) -> Iterator[Any]:
    """The calls of a stretch with numbers in the order of their first use, to compare them."""
    numbers: dict[int, int] = {}

    def name(number: int) -> Any:
        return side.state[number] if number in side.state else numbers.setdefault(number, len(numbers))

    def walk(tree: Any) -> Any:
        if isinstance(tree, Value):
            return "value", name(tree.number)
        if isinstance(tree, list | tuple):
            return type(tree)(map(walk, tree))
        if isinstance(tree, dict):
            return {key: walk(one) for key, one in tree.items()}
        return Slice(walk(tree.start), walk(tree.stop), walk(tree.step)) if isinstance(tree, Slice) else tree

    for event in side.stretches[position].events:
        changed = [(name(old), name(new)) for old, new in event.changed]
        results = [name(number) for number in event.results]
        yield event.called, walk(event.arguments), results, changed, event.differentiable, event.autocast


def is_exact(program: Program) -> bool:
    """Whether a stretch computes in float32 also in mixed precision: it names a type, or is without autocast."""

    def found(tree: Any) -> bool:
        if isinstance(tree, Named):
            kind = getattr(torch, tree.name)
            return isinstance(kind, torch.dtype) and kind.is_floating_point
        if isinstance(tree, list | tuple):
            return any(map(found, tree))
        return isinstance(tree, dict) and any(map(found, tree.values()))

    def casts(call: Call) -> bool:
        names = call.function == "Tensor.float" or found(call.arguments) or found(dict(call.settings))
        return names or call.autocast == OFF

    return any(map(casts, program.calls))
