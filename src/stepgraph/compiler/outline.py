"""What a graph of operators computes, as a hash: for finding what an earlier run has made of the same operators.

It covers operators, arguments and results, their layers and phases, the machine and our version, so that two graphs
with the same outline are compiled alike.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from secrets import token_hex
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from stepgraph.compiler.alike import NAMESPACES
from stepgraph.compiler.kernels.choices import processor
from stepgraph.compiler.kernels.update import UPDATE, Recorded, expanded_update
from stepgraph.compiler.program import Part, fakes, notes
from stepgraph.system import torch_private

MODULES = ("_operator", "torch", "stepgraph")  # of functions that depend on their arguments alone


def fingerprint(graph: fx.Graph) -> str:
    """What kernels depend on besides what PyTorch's cache already compares: results of operators, machine and version.

    PyTorch knows custom operators by name only, so their results and our source count too; and it assumes that all
    processors that see the cache are alike.
    """
    results = [_layouts(node) for node in graph.nodes]
    machine = processor(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return hashlib.sha256(f"{source()} {machine} {results}".encode()).hexdigest()


def is_known(graph: fx.Graph) -> bool:
    """Whether names, arguments and results tell what operators compute, in every process."""
    return all(map(_is_known, graph.nodes))


def are_alike(one: Part, other: Part) -> bool:
    """Whether two parts compute the same: operators with the same arguments, on constants with the same values."""
    if of(one) != of(other):
        return False
    return all(map(torch.equal, _constants(one), _constants(other)))


def _constants(part: Part) -> list[torch.Tensor]:
    """The bytes of the arrays that a part itself has, in the order of the operators that read them."""
    nodes = part.module.graph.find_nodes(op="get_attr")
    return [getattr(part.module, node.target).reshape(-1).view(torch.uint8) for node in nodes]  # NaN equals NaN


def of(part: Part) -> str:
    """The outline of a part, computed once: it is needed to look for what was kept, and to load that."""
    found = _outlines.get(part)
    if found is None:
        found = _outlines[part] = of_graph(part.module.graph)
    return found


_outlines: WeakKeyDictionary[Part, str] = WeakKeyDictionary()


def of_graph(graph: fx.Graph) -> str:
    """A hash of operators, their arguments and results, the machine and our version."""
    found = hashlib.sha256(fingerprint(graph).encode())
    places = {node: place for place, node in enumerate(graph.nodes)}  # names of inputs differ between processes
    for node in graph.nodes:
        named = () if node.op == "placeholder" else (node.name, _name(node))
        arguments = fx.map_arg((_decisive(node), node.kwargs), lambda one: _Place(places[one]))
        known = notes(node)
        noted = known.layer, known.phase, known.recomputed, known.in_place
        found.update(repr((node.op, named, arguments, noted)).encode())
    return found.hexdigest()


class _Place(int):
    """The place of an operator, which is not the number that an argument may be."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _is_known(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":  # constants have values
        return False
    if node.target in (UPDATE, expanded_update):  # an optimizer's number says nothing in another process, its code does
        arguments: Any = node.args
        return bool(Recorded(*arguments).rules)
    if isinstance(node.target, torch_private.OpOverload):
        return node.target.namespace in NAMESPACES
    return str(getattr(node.target, "__module__", "")).split(".")[0] in MODULES and "<" not in _name(node)


def _decisive(node: fx.Node) -> tuple[Any, ...]:
    """The arguments; of an update, without the number of its optimizer, which each optimizer has its own of."""
    arguments: Any = node.args
    return Recorded(*arguments).decisive if node.target in (UPDATE, expanded_update) else node.args


def _name(node: fx.Node) -> str:
    target: Any = node.target
    named = isinstance(target, str | torch_private.OpOverload)
    return str(target) if named else f"{target.__module__}.{getattr(target, '__qualname__', '<unnamed>')}"


def _layouts(node: fx.Node) -> list[tuple[Any, ...]]:
    return [(tuple(one.shape), one.stride(), one.dtype, one.device) for one in fakes(node)]


@cache
def source() -> str:
    """The hash of stepgraph's source; where there is none, as in an archive, a text that no other process has."""
    root = Path(__file__).parents[1]
    modules = sorted(root.rglob("*.py"))
    if not modules:  # another version would have the same hash, and run what this one has compiled
        return token_hex()
    found = hashlib.sha256()
    for file in modules:
        found.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return found.hexdigest()
