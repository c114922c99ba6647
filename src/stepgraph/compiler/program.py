"""A recorded step: a graph of operators, and what is known about each of them.

Besides its arguments, an operator has a fake, an array without memory that represents its result, and `Notes`. This
is the only module that accesses `fx.Node.meta`, which stores both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, cached_property
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx import traceback

from stepgraph.compiler.alike import NAMESPACES, Known
from stepgraph.compiler.modules import Module
from stepgraph.compiler.step import Key, Step
from stepgraph.system import torch_private
from stepgraph.system.surroundings import ROUNDED

aten = torch.ops.aten
# Keys of `fx.Node.meta`; PyTorch's tracer sets all but the second.
_FAKE, _NOTES, _TAG, _SOURCE = "val", "stepgraph", "custom", "from_node"
_TAGGED = ("layer", "phase", "recomputed")  # the notes that a tag carries
TINY = 1 << 16  # numbers in all results of a part
EXCHANGE = "exchange"  # the layer of operators that exchange something with other ranks


class Phase(StrEnum):
    """The phases of a step, in order."""

    FORWARD = "forward"
    GRADIENT = "gradient"
    UPDATE = "update"


class PartName(StrEnum):
    """The parts of a step that are compiled. `step` and `inference` run a whole call, `trial` runs for inspection."""

    STEP = "step"
    SHARD = "shard"  # forward and gradient, for a part of a batch
    LAST = "last shard"  # the same, and the exchange of gradients with other ranks
    FORWARD = "forward"
    GRADIENT = "gradient"
    UPDATE = "update"
    FORWARD_ONLY = "forward only"
    INFERENCE = "inference"
    EVALUATION = "evaluation"
    TRIAL = "trial"


_ORDER = {phase: index for index, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True)
class Notes:
    """What is known about an operator besides its arguments and its result.

    Attributes:
        layer: the layer it belongs to, by name.
        phase: the phase it belongs to.
        implementation: the name of the operation and of its chosen implementation, if there are several.
        workspace: its workspace in bytes, besides its results.
        offsets: the offsets of its results in the arena, by storage.
        in_place: whether it overwrites its first argument with its first result.
        recomputed: whether it recomputes what was dropped to save memory.
    """

    layer: str = ""
    phase: Phase = Phase.FORWARD
    implementation: tuple[str, str] | None = None
    workspace: int = 0
    offsets: Mapping[int, int] = field(default_factory=dict)
    in_place: bool = False
    recomputed: bool = False


def tag(layer: str, phase: Phase) -> dict[str, Any]:
    """The tag that the tracer attaches to every operator it records meanwhile; `adopt_tags` reads it."""
    return {"layer": layer, "phase": phase}


def set_tag(node: fx.Node, tagged: dict[str, Any]) -> None:
    """Attaches a tag to an operator, as PyTorch's tracer does."""
    node.meta[_TAG] = tagged


def derive(new: Iterable[fx.Node], node: fx.Node) -> None:
    """Gives nodes that stand for an operator its tag and its name, which PyTorch's compiler writes above kernels."""
    source = [traceback.NodeSource(node)]
    for one in new:
        one.meta[_SOURCE] = source
        if _TAG in node.meta:
            one.meta[_TAG] = node.meta[_TAG]


def adopt_tags(graph: fx.Graph) -> None:
    """Creates the notes of every recorded operator."""
    for node in graph.nodes:
        if tagged := node.meta.pop(_TAG, None):
            known = {name: tagged[name] for name in _TAGGED if name in tagged}
            note(node, **known)


def attach_tags(graph: fx.Graph) -> None:
    """Turns notes into tags, which reach the operators that PyTorch's compiler replaces these with."""
    for node in operators(graph):
        node.meta[_TAG] = {name: getattr(notes(node), name) for name in _TAGGED}


def complete_notes(graph: fx.Graph) -> None:
    """Notes for operators that a compiler added: layer and phase of the last of what they read."""
    for node in operators(graph):
        if not has_notes(node):
            read = [notes(source) for source in node.all_input_nodes if has_notes(source)]
            last = max(read, key=lambda one: _ORDER[one.phase], default=_NOTHING)
            note(node, layer=last.layer, phase=last.phase)


def has_notes(node: fx.Node) -> bool:
    """Whether an operator has notes."""
    return _NOTES in node.meta


def notes(node: fx.Node) -> Notes:
    """The notes of an operator."""
    return node.meta.get(_NOTES, _NOTHING)


_NOTHING = Notes()


def note(node: fx.Node, **changes: Any) -> None:
    """Changes some notes of an operator."""
    node.meta[_NOTES] = replace(notes(node), **changes)


def inherit(node: fx.Node, other: fx.Node, fake: Any = None, **changes: Any) -> fx.Node:
    """Gives an operator the notes of another, with changes, and its fake unless one is passed."""
    node.meta = {**other.meta, _NOTES: replace(notes(other), **changes)}
    if fake is not None:
        node.meta[_FAKE] = fake
    return node


def fake(node: fx.Node) -> Any:
    """The array without memory that represents an operator's result, or several; None if unknown."""
    return node.meta.get(_FAKE)


def fakes(node: fx.Node) -> list[torch.Tensor]:
    """All results of an operator."""
    values = fake(node)
    values = values if isinstance(values, tuple | list) else [values]
    return [array for array in values if isinstance(array, torch.Tensor)]


def call(like: fx.Node, target: Any, arguments: tuple[Any, ...], **settings: Any) -> fx.Node:
    """A new operator of the same layer and phase as another, at the graph's insertion point."""
    node = like.graph.call_function(target, arguments, settings)
    note(node, layer=notes(like).layer, phase=notes(like).phase)
    refresh(node)
    return node


def refresh(node: fx.Node) -> None:
    """Computes the fake of an operator from those of its arguments."""
    arrays = (one for source in node.all_input_nodes for one in fakes(source))
    # PyTorch types arrays without memory as ordinary ones; numbers that a function makes itself join their mode.
    known = Known.of(next(arrays).fake_mode)  # type: ignore[attr-defined]
    set_fake(node, known.result(node.target, *fx.map_arg((node.args, node.kwargs), fake)))


def set_fake(node: fx.Node, value: Any) -> None:
    """Sets the fake of an operator."""
    node.meta[_FAKE] = value


def update_views(node: fx.Node) -> None:
    """Updates what is known about the views of an operator whose result now has other strides; some become copies."""
    for user in node.users:
        if user.target in (aten.view.default, torch_private.unsafe_view.default):
            user.target = aten.reshape.default
        if is_view(user) and user.target is not getitem:
            refresh(user)
            update_views(user)


def replace_uses(node: fx.Node, other: fx.Node) -> None:
    """Lets everything that reads a result read another with the same layout."""
    node.replace_all_uses_with(other)
    share_memory(other)


def share_memory(node: fx.Node) -> None:
    """Gives the views of a result its memory: they may have been recorded as views of another."""
    for user in node.users:
        if is_view(user) and user.args[0] is node and not set(storages(user)) <= set(storages(node)):
            refresh(user)
            share_memory(user)


def storages(node: fx.Node) -> list[int]:
    """Identities of the memory behind all of an operator's results."""
    return [torch_private.identity(array.untyped_storage()) for array in fakes(node)]


def storage(node: fx.Node) -> int | None:
    """Identity of the memory behind an operator's result; views share it."""
    array = fake(node)
    return torch_private.identity(array.untyped_storage()) if isinstance(array, torch.Tensor) else None


def same_order(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two arrays of one shape have the same layout; the stride of a dimension of size 1 is irrelevant."""
    mine, theirs = one.stride(), other.stride()
    return mine == theirs or all(a == b for a, b, n in zip(mine, theirs, one.shape, strict=True) if n > 1)


def copied_as(array: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """A copy with these strides."""
    return torch.empty_strided(array.shape, stride, dtype=array.dtype, device=array.device).copy_(array)


def reached(nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """These operators, those that follow them, those that follow these, and so on."""
    found, rest = set[fx.Node](), [*nodes]
    while rest:
        node = rest.pop()
        if node not in found:
            found.add(node)
            rest += following(node)
    return found


def mutates(node: fx.Node) -> bool:
    """Whether an operator changes one of its arguments in place."""
    target = node.target
    if isinstance(target, torch_private.OpOverload):
        return bool(torch_private.schema(target).is_mutable)
    return has_notes(node) and notes(node).in_place  # a function that overwrites its first argument has no schema


def is_view(node: fx.Node) -> bool:
    """Whether an operator returns views of what it reads, or one of several such views."""
    maker = node.args[0] if node.target is getitem else node
    target = maker.target if isinstance(maker, fx.Node) else None
    return isinstance(target, torch_private.OpOverload) and returns_views(target)


@cache  # passes ask often, and PyTorch describes an operator anew each time
def returns_views(operator: torch_private.OpOverload) -> bool:
    """Whether all that an operator returns are views of its arguments."""
    returned = torch_private.schema(operator).returns
    return bool(returned) and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)


def writes(node: fx.Node) -> list[fx.Node]:
    """The arrays that an operator changes in place."""
    if not mutates(node):
        return []
    if not isinstance(node.target, torch_private.OpOverload):
        return node.all_input_nodes[:1]
    arguments = torch_private.schema(node.target).arguments
    given = {one.name: value for one, value in zip(arguments, node.args, strict=False)} | node.kwargs
    written = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    changed = [given[name] for name in written if name in given]
    arrays = (one for value in changed for one in (value if isinstance(value, list | tuple) else [value]))
    return [one for one in arrays if isinstance(one, fx.Node)]


@dataclass(frozen=True, eq=False)
class Program:
    """A traced step: operators with their notes, and which array is which."""

    module: fx.GraphModule
    inputs: dict[Key, fx.Node]
    outputs: dict[Key, fx.Node]
    step: Step

    @classmethod
    def of(cls, module: fx.GraphModule, inputs: Iterable[Key], outputs: Iterable[Key], step: Step) -> Program:
        """A program whose graph takes and returns these arrays, in this order."""
        (end,) = module.graph.find_nodes(op="output")
        given = zip(inputs, module.graph.find_nodes(op="placeholder"), strict=True)
        return cls(module, dict(given), dict(zip(outputs, end.args[0], strict=True)), step)

    def refreshed(self) -> Program:
        """The same, after a pass has changed its graph."""
        return Program.of(self.module, self.inputs, self.outputs, self.step)

    @property
    def nodes(self) -> list[fx.Node]:
        """The operators, in order."""
        return operators(self.module.graph)


@dataclass(frozen=True, eq=False)
class Part:
    """A program's operators of some phases: what it reads, what it returns, and the bytes of its arena.

    `unlimited` is the same part before it was made to recompute results for a memory limit. A draft belongs to the
    passes that make it ready to run: each may change its operators.
    """

    module: fx.GraphModule
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    held: int = 0
    unlimited: Part | None = None
    is_draft: bool = False

    @property
    def nodes(self) -> list[fx.Node]:
        """The operators, in order."""
        return operators(self.module.graph)

    @property
    def placeholders(self) -> list[fx.Node]:
        """The nodes of its inputs, in order."""
        return self.module.graph.find_nodes(op="placeholder")

    @property
    def returned(self) -> list[fx.Node]:
        """The nodes of its outputs, in order."""
        (end,) = self.module.graph.find_nodes(op="output")
        return list(end.args[0])

    @property
    def results(self) -> dict[Key, torch.Tensor]:
        """Its outputs, as arrays without memory."""
        return {key: fake(node) for key, node in zip(self.outputs, self.returned, strict=True)}

    def copied(self) -> Part:
        """The same with operators of its own."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.module.graph, {}))
        return replace(self, module=Module(self.module, graph), is_draft=False)

    def changeable(self) -> Part:
        """The same, for a pass that changes operators: its own ones if it is a draft, otherwise copies."""
        return replace(self) if self.is_draft else self.copied()

    def reordered(self, orders: Mapping[Key, tuple[int, ...]]) -> Part:
        """The same for inputs with other strides, which every operator that reads them must accept."""
        if not any(key in orders and fake(node).stride() != orders[key] for key, node in self.given):
            return self
        new = self.copied()
        for node, strides in ((node, orders[key]) for key, node in new.given if key in orders):
            like = fake(node)
            with like.fake_mode:
                set_fake(node, torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device))
        before = None if self.unlimited is None else self.unlimited.reordered(orders)
        return replace(new, unlimited=before)

    @property
    def given(self) -> Iterable[tuple[Key, fx.Node]]:
        """Its inputs with their nodes."""
        return zip(self.inputs, self.placeholders, strict=True)

    @cached_property
    def is_tiny(self) -> bool:
        """Whether one thread finishes it before others would wake up.

        What is exchanged does not count, so that a shard runs in as many threads whatever its rank does with it.
        """
        own = (node for node in self.nodes if notes(node).layer != EXCHANGE)
        return sum(array.numel() for node in own for array in fakes(node)) < TINY

    @cached_property
    def is_open_to_switches(self) -> bool:
        """Whether PyTorch's process-wide settings can affect an operator: default type or device, determinism."""
        return any(_asks_switches(node) for node in self.nodes)

    @cached_property
    def rounded(self) -> tuple[str, ...]:
        """The kinds of operators that it may have whose float32 factors oneDNN rounds if it is allowed to."""
        kinds = {kind for node in self.nodes for kind in _rounded(node)}
        return tuple(kind for kind in ROUNDED if kind in kinds)

    @cached_property
    def written(self) -> tuple[Key, ...]:
        """The arrays passed to it that a run changes: parameters, statistics, optimizer state, random stream.

        They are derived from the operators: a separate list could miss something. A run for inspection
        receives copies of these; a run that may be rolled back keeps copies of them.
        """
        changed = {storage(array) for node in self.nodes for array in writes(node)}
        return tuple(key for key, node in self.given if storage(node) in changed)


def _rounded(node: fx.Node) -> Collection[str]:
    if node.op != "call_function" or node.target is getitem:  # constants have no operator
        return ()
    target: Any = node.target
    if isinstance(target, torch_private.OpOverload):
        name = torch_private.schema(target).name
    elif target.__module__ == "stepgraph.compiler.operators":  # it calls the operator of its name
        name = target.__name__
    else:  # an implementation of ours, which may call anything, and compute in float32 whatever it returns
        return ROUNDED
    if not any(array.dtype is torch.float32 for array in fakes(node)):
        return ()
    named = {"conv": ("conv",), "rnn": ("rnn", "lstm", "gru")}
    return ["matmul", *(kind for kind, parts in named.items() if any(part in name for part in parts))]


def operators(graph: fx.Graph) -> list[fx.Node]:
    """The operators of a graph, in order."""
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def remove_dead(graph: fx.Graph) -> None:
    """Removes operators whose results nothing reads. PyTorch's own function spends most of its time on other checks."""
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def _asks_switches(node: fx.Node) -> bool:
    """Whether an operator may depend on the default type or device, or on determinism.

    These are foreign operators, those that write at indices, and those that create real numbers from none.
    """
    target = node.target
    if isinstance(target, torch_private.OpOverload):
        if target.namespace not in NAMESPACES:
            return True
        if any(word in target.name() for word in ("index", "scatter", "put", "cum", "embedding")):
            return True
    makes_real = any(array.is_floating_point() for array in fakes(node)) and node.kwargs.get("dtype") is None
    read = [array for source in node.all_input_nodes for array in fakes(source)]
    return makes_real and not any(array.is_floating_point() for array in read)
