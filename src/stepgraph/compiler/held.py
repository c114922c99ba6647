"""Memory for large results, laid out once and kept between steps on the CPU.

An allocator gives memory that is free for some milliseconds back to the system and gets it again page by page, which in
long steps takes as much time as many an operator. Results that only the step itself reads, of operators that can write
into given memory, share one block: each has its place in it, and two have the same only if one is dead when the other
is born.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph import torch_private
from stepgraph.compiler import memory
from stepgraph.compiler.kernels import operators, products
from stepgraph.compiler.phases import Part
from stepgraph.layers import lstm_kernel

aten = torch.ops.aten
LARGE = 1 << 18  # bytes; smaller ones an allocator keeps at hand
MOST = 512  # results, the largest: finding places takes time with the square of their number
ALIGNED = 64  # bytes
LEAST = 1 << 22  # bytes in all, for which this is done: small steps are over before memory is given back
WORTH = 1.05  # how much more a step may need than without

# Adding one is an entry here: the operator, the one that writes into given memory, and how it calls that. Where there
# are several results, all of them arrays, that is a list with None for those that are not held.
OUT: dict[Any, tuple[Callable[..., Any], str]] = {
    aten.mm.default: (aten.mm.out, "out"),
    aten.bmm.default: (aten.bmm.out, "out"),
    aten.addmm.default: (aten.addmm.out, "out"),
    aten.add.Tensor: (aten.add.out, "out"),
    aten.mul.Tensor: (aten.mul.out, "out"),
    aten.relu.default: (aten.relu.out, "out"),
    aten.gelu.default: (aten.gelu.out, "out"),
    aten.gelu_backward.default: (aten.gelu_backward.grad_input, "grad_input"),
    aten.threshold_backward.default: (aten.threshold_backward.grad_input, "grad_input"),
    torch_private.softmax.default: (torch_private.softmax.out, "out"),
    **{way: (way, "out") for way in (*products.INTO, operators.gelu_backward_by_parts)},
    torch.ops.stepgraph.lstm.default: (lstm_kernel.run, "out"),
    torch.ops.stepgraph.lstm_gradient.default: (lstm_kernel.run_gradient, "out"),
}


class Place(NamedTuple):
    """Where in the held memory an array lies, which is given without numbers."""

    like: torch.Tensor
    offset: int


class _Life(NamedTuple):
    node: fx.Node
    storage: int
    birth: int
    death: int
    size: int


def hold(part: Part) -> Part:
    """The part with places for large results, unless it would need noticeably more memory like that."""
    lives, enough = _candidates(part), WORTH * memory.peak(part)
    if sum(life.size for life in lives) < LEAST:
        return part
    places = _placed(lives)
    for life, place in zip(lives, places, strict=True):
        life.node.meta.setdefault("held", {})[life.storage] = place
    held = replace(part, held=max(place + life.size for life, place in zip(lives, places, strict=True)))
    if memory.peak(held) <= enough:
        return held
    for life in lives:
        life.node.meta.pop("held", None)
    return part


def _candidates(part: Part) -> list[_Life]:
    """The largest results that stay inside, with their lives."""
    nodes = list(part.module.graph.nodes)
    births, deaths = memory.lifetimes(part)
    found = []
    for one, (birth, size, _) in births.items():
        node, inside = nodes[birth], deaths[one] < len(nodes) - 1
        if inside and size >= LARGE and node.target in OUT and _by_storage(node)[one].is_contiguous():
            found.append(_Life(node, one, birth, deaths[one], -(-size // ALIGNED) * ALIGNED))
    return sorted(found, key=lambda life: -life.size)[:MOST]


def _placed(lives: Sequence[_Life]) -> list[int]:
    """Offsets, in order: for each the lowest that is free all its life."""
    places: list[int] = []
    for life in lives:
        others = ((place, place + one.size) for one, place in zip(lives, places, strict=False) if _meet(one, life))
        lowest = 0
        for start, end in sorted(others):
            if start - lowest >= life.size:
                break
            lowest = max(lowest, end)
        places.append(lowest)
    return places


def _meet(one: _Life, other: _Life) -> bool:
    return one.birth <= other.death and other.birth <= one.death


def write_there(graph: fx.Graph) -> dict[str, Place]:
    """Lets operators write into memory that is held for them: where that is, by the name they know it by."""
    names: dict[str, Place] = {}
    for node in list(graph.nodes):
        if "held" not in node.meta:
            continue
        given: list[fx.Node | None] = []
        for one, array in zip(memory.storages(node), memory.arrays(node), strict=True):
            offset = node.meta["held"].get(one)
            given.append(None if offset is None else _name(node, Place(array, offset), names))
        operator, keyword = OUT[node.target]
        there = given if isinstance(node.meta["val"], tuple | list) else given[0]
        node.target, node.kwargs = operator, node.kwargs | {keyword: there}
    return names


def _name(node: fx.Node, place: Place, names: dict[str, Place]) -> fx.Node:
    names[name := f"held_{len(names)}"] = place
    with node.graph.inserting_before(node):
        return node.graph.get_attr(name)


def _by_storage(node: fx.Node) -> dict[int, torch.Tensor]:
    return dict(zip(memory.storages(node), memory.arrays(node), strict=True))
