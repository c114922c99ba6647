"""Memory for results, laid out once and kept between steps on the CPU: for large ones, and for all of a tiny step.

An allocator returns memory that is free for some milliseconds to the system and gets it back page by page. In long
steps this takes as long as many an operator. In a tiny step, creating an array takes as long as computing it, and
views of arrays that stay need not be created either. Results that only the step itself reads, from operators with an
out-variant, share one arena: each has an offset in it, and two overlap only if one is dead before the other
is created.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph.compiler import memory
from stepgraph.compiler.operators import operator
from stepgraph.compiler.program import EXCHANGE, Part, fake, fakes, is_view, note, notes, storages

LARGE = 1 << 18  # bytes; allocators cache smaller blocks
MOST = 512  # results, the largest ones: assigning offsets takes quadratic time
ALIGNED = 64  # bytes
LEAST = 1 << 22  # minimum total bytes: small steps end before memory is returned to the system
WORTH = 1.05  # how much more memory a step may need with an arena


class Allocation(NamedTuple):
    """An array in the arena: its layout and type, as an array without data, and where its memory begins, in bytes."""

    like: torch.Tensor
    offset: int


class _Life(NamedTuple):
    node: fx.Node
    storage: int
    birth: int
    death: int
    size: int


def hold(part: Part) -> Part:
    """The part with offsets for results, unless that would need noticeably more memory."""
    part = part.changeable()
    lives = _candidates(part) if all(map(_is_known, part.nodes)) else []
    enough = math.inf if part.is_tiny else WORTH * (memory.peak(part) + _exchanged(part))
    if not lives or (not part.is_tiny and sum(life.size for life in lives) < LEAST):
        return part
    offsets = _offsets(lives)
    for life, offset in zip(lives, offsets, strict=True):
        note(life.node, offsets={**notes(life.node).offsets, life.storage: offset})
    held = replace(part, held=max(offset + life.size for life, offset in zip(lives, offsets, strict=True)))
    if memory.peak(held) <= enough:
        return held
    for life in lives:
        note(life.node, offsets={})
    return part


def _exchanged(part: Part) -> int:
    """Bytes that ranks exchange: they lie beside an arena; without one, where memory is free by then."""
    nodes, (births, _) = list(part.module.graph.nodes), memory.lifetimes(part)
    return sum(size for birth, size, _ in births.values() if notes(nodes[birth]).layer == EXCHANGE)


def _candidates(part: Part) -> list[_Life]:
    """The largest results that stay inside, with their lifetimes; not what other ranks read, at their own time."""
    nodes, large = list(part.module.graph.nodes), 1 if part.is_tiny else LARGE
    births, deaths = memory.lifetimes(part)
    found = []
    for one, (birth, size, _) in births.items():
        node = nodes[birth]
        inside = deaths[one] < len(nodes) - 1 and notes(node).layer != EXCHANGE
        if inside and size >= large and _has_out(node, part.is_tiny) and _by_storage(node)[one].is_contiguous():
            found.append(_Life(node, one, birth, deaths[one], -(-size // ALIGNED) * ALIGNED))
    return sorted(found, key=lambda life: -life.size)[:MOST]


def _is_known(node: fx.Node) -> bool:
    """Whether a view was recorded as a view of its source; of others, it is not known how long memory is read."""
    known = {one for source in node.all_input_nodes for one in storages(source)}
    return not is_view(node) or known.issuperset(storages(node))


def _has_out(node: fx.Node, is_tiny: bool) -> bool:
    out = operator(node).out
    return out is not None and (is_tiny or not out.is_for_tiny)


def _offsets(lives: Sequence[_Life]) -> list[int]:
    """Offsets, in order: for each, the lowest that is free during its lifetime."""
    offsets: list[int] = []
    for life in lives:
        taken = ((start, start + one.size) for one, start in zip(lives, offsets, strict=False) if _overlap(one, life))
        lowest = 0
        for start, end in sorted(taken):
            if start - lowest >= life.size:
                break
            lowest = max(lowest, end)
        offsets.append(lowest)
    return offsets


def _overlap(one: _Life, other: _Life) -> bool:
    return one.birth <= other.death and other.birth <= one.death


def write_into_arena(graph: fx.Graph) -> dict[str, Allocation]:
    """Makes operators write into the arena; returns the allocations by attribute name.

    What reads a result takes it from the arena, and so does what reads a view of it.
    """
    names: dict[str, Allocation] = {}
    for node in list(graph.nodes):
        if notes(node).offsets:
            _write_into_arena(node, names)
        elif isinstance(fake(node), torch.Tensor) and node.args and _is_held(node.args[0], names):
            _take_from_arena(node, node.args[0], names)
    return names


def _write_into_arena(node: fx.Node, names: dict[str, Allocation]) -> None:
    given: list[fx.Node | None] = []
    for one, array in zip(storages(node), fakes(node), strict=True):
        offset = notes(node).offsets.get(one)
        given.append(None if offset is None else _name(node, Allocation(array, offset), names))
    out = operator(node).out
    assert out is not None
    there = given if isinstance(fake(node), tuple | list) else given[0]
    node.target, node.kwargs = out.function, node.kwargs | {out.keyword: there}
    if isinstance(there, fx.Node):
        node.replace_all_uses_with(there)


def _is_held(source: Any, names: Mapping[str, Allocation]) -> bool:
    return isinstance(source, fx.Node) and source.op == "get_attr" and source.target in names


def _take_from_arena(node: fx.Node, source: fx.Node, names: dict[str, Allocation]) -> None:
    """Replaces what is a view of an array in the arena, or was written in its place."""
    if notes(node).in_place:
        node.replace_all_uses_with(source)
    elif is_view(node) and fake(node).dtype is names[str(source.target)].like.dtype:
        base = names[str(source.target)]
        node.replace_all_uses_with(_name(node, Allocation(_viewed(node, base.like), base.offset), names))
        node.graph.erase_node(node)


def _viewed(node: fx.Node, source: torch.Tensor) -> torch.Tensor:
    """A view as PyTorch creates it at run time, as an array without data.

    A recorded view may have other strides along dimensions of size 1. No element moves, but products choose how to add
    by them, and a step would differ from its phases in the last bit.
    """
    if 1 not in fake(node).shape:
        return fake(node)
    count = source.untyped_storage().nbytes() // source.element_size()
    base = torch.empty(count, dtype=source.dtype, device="meta")
    like = base.as_strided(source.shape, source.stride(), source.storage_offset())
    created: torch.Tensor = node.target(like, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    return created


def _name(node: fx.Node, allocation: Allocation, names: dict[str, Allocation]) -> fx.Node:
    names[name := f"held_{len(names)}"] = allocation
    with node.graph.inserting_before(node):
        return node.graph.get_attr(name)


def _by_storage(node: fx.Node) -> dict[int, torch.Tensor]:
    return dict(zip(storages(node), fakes(node), strict=True))
