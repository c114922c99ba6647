"""Concatenations whose parts are computed: kernels write them directly to their places.

PyTorch's compiler computes a concatenation on a GPU element by element. Every element then takes the instructions of
all parts, and parts that are computed from the same arrays read these again. The gradient of query, key and value with
rotary positions is such a concatenation, and two of its parts are concatenations of pairs.

A part that waits for its concatenation in memory, because other kernels read it first, is written there only: what goes
from one side of a U-Net to the other is not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from stepgraph.compiler.passes.absorbed import made, users_of
from stepgraph.compiler.passes.stored import MOVES, arguments, is_inlined, size, write, write_once
from stepgraph.compiler.program import fake, inherit, is_view, remove_dead
from stepgraph.system import torch_private

aten, prims = torch.ops.aten, torch.ops.prims
LARGE = 2**20  # elements, whose instructions take longer than the start of a few more kernels
SECTOR = 32  # bytes that a GPU reads at least: parts made of whole ones are read as fast as dense arrays
_COPIES = {aten.clone.default, prims.convert_element_type.default}
# Views that keep the order of elements.
_SHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    torch_private.unsafe_view.default,
}
Place = tuple[fx.Node, torch.Tensor]  # a part, and the view of the whole that it fills

torch.library.define(
    "stepgraph::filled", "(Tensor[] parts, int[] shape, int[] order, int[] strides, int[] offsets) -> Tensor"
)


@torch.library.impl("stepgraph::filled", "CompositeExplicitAutograd")
def filled(
    parts: Sequence[torch.Tensor],
    shape: Sequence[int],
    order: Sequence[int],
    strides: Sequence[int],
    offsets: Sequence[int],
) -> torch.Tensor:
    """A new array of parts that fill it, each at an offset with its own strides.

    Args:
        parts: what fills it.
        shape: its shape.
        order: its strides.
        strides: those of all parts in it, as one list.
        offsets: where each part begins.
    """
    whole, rest = parts[0].new_empty_strided(shape, order), iter(strides)
    for part, offset in zip(parts, offsets, strict=True):
        whole.as_strided(part.shape, [next(rest) for _ in part.shape], offset).copy_(part)
    return whole


@torch.library.register_fake("stepgraph::filled")
def _(
    parts: Sequence[torch.Tensor],
    shape: Sequence[int],
    order: Sequence[int],
    strides: Sequence[int],
    offsets: Sequence[int],
) -> torch.Tensor:
    return parts[0].new_empty_strided(shape, order)


def store_parts(graph: fx.Graph) -> None:
    """Lets kernels of their own write computed parts, and one kernel those that share their sources."""
    torch_private.lower_to_places(torch.ops.stepgraph.filled.default)
    # Of nested concatenations, the outer one comes last.
    for node in reversed(graph.find_nodes(op="call_function", target=aten.cat.default)):
        if not _is_uniform(node):
            continue
        kept = _kept(node)
        if kept or (_is_for_calls(node) and (_share_sources(arguments(node)) or _is_long(node))):
            for part in kept:
                write_once(part)
            _write_parts(node)
    remove_dead(graph)
    graph.lint()


def _write_parts(node: fx.Node) -> None:
    """Lets kernels write the parts of a concatenation, and those of the concatenations among its parts."""
    own, like, places = arguments(node), fake(node), _places(node, _empty(node))
    with node.graph.inserting_before(node):
        if len(places) == len(own) and like.is_contiguous():
            node.args = ([_written(part) for part in own], *node.args[1:])
            return
        strides = [stride for _, view in places for stride in view.stride()]
        offsets = [int(view.storage_offset()) for _, view in places]
        filling = ([_written(part) for part, _ in places], list(like.shape), list(like.stride()), strides, offsets)
        whole = node.graph.call_function(torch.ops.stepgraph.filled.default, filling)
    node.replace_all_uses_with(inherit(whole, node))


def _written(part: fx.Node) -> fx.Node:
    """A part in memory."""
    if not is_inlined(made(part)):
        return part
    return write(part)


def _empty(node: fx.Node) -> torch.Tensor:
    """An array like the result of an operator, without numbers."""
    return torch.empty_strided(fake(node).shape, fake(node).stride(), device="meta")


def _kept(node: fx.Node) -> list[fx.Node]:
    """The parts of a large concatenation for products that are in memory before it, if they lie well in it."""
    if size(node) < LARGE or all(map(_is_kernel, users_of(node))):
        return []
    if not all(_is_aligned(view, fake(node).itemsize) for _, view in _places(node, _empty(node))):
        return []
    return [part for part in arguments(node) if _is_kept(part, node)]


def _is_kept(part: fx.Node, whole: fx.Node) -> bool:
    """Whether a computed part is also in memory for other kernels, which can as well read it in its place."""
    readers = users_of(part) - {whole}
    alone = arguments(whole).count(part) == 1 and is_inlined(part)
    return alone and bool(readers) and all(map(_is_kernel, readers)) and not all(map(is_inlined, readers))


def _is_kernel(node: fx.Node) -> bool:
    """Whether generated kernels compute what an operator computes, from arrays in any order."""
    target = node.target
    if not isinstance(target, torch_private.OpOverload) or target.overloadpacket in flop_registry:
        return False
    return not torch_private.is_called(target)


def _is_aligned(place: torch.Tensor, itemsize: int) -> bool:
    """Whether a place in an array consists of whole sectors."""
    extents, run = sorted(zip(place.stride(), place.shape, strict=True)), 1
    for stride, extent in extents:
        run *= extent if stride == run or extent == 1 else 1
    return not run * itemsize % SECTOR and not place.storage_offset() * itemsize % SECTOR


def _places(node: fx.Node, whole: torch.Tensor) -> list[Place]:
    """The parts of a concatenation with their places."""
    axis: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    found, start = list[Place](), 0
    for part in arguments(node):
        extent = fake(part).shape[axis]
        found += _inner_places(part, whole.narrow(axis, start, extent))
        start += extent
    return found


def _inner_places(part: fx.Node, place: torch.Tensor) -> list[Place]:
    """The parts of a concatenation that only this part reads, or the part itself."""
    node, view = part, place
    while node.target in _SHAPES and len(node.users) == 1:
        (node,) = node.all_input_nodes
        try:
            view = view.view(fake(node).shape)
        except RuntimeError:  # in its place, the array could not have that shape
            return [(part, place)]
    if node.target is not aten.cat.default or len(node.users) > 1 or not _is_uniform(node):
        return [(part, place)]
    inner = _places(node, view)
    return inner if len(inner) > len(arguments(node)) or _share_sources(arguments(node)) else [(part, place)]


def _is_uniform(node: fx.Node) -> bool:
    """Whether the parts of a concatenation fill it as they are: none is converted, none is empty with another rank."""
    return len({(fake(one).ndim, fake(one).dtype) for one in (node, *arguments(node))}) == 1


def _is_for_calls(node: fx.Node) -> bool:
    """Whether a result must be in memory, because no generated kernel reads it."""
    views = [user for user in node.users if is_view(user) and user.all_input_nodes[0] is node]
    return not any(map(is_inlined, node.users)) and all(map(_is_for_calls, views))


def _is_long(node: fx.Node) -> bool:
    """Whether the elements of a large concatenation take many instructions, because some are more than copies."""
    return size(node) >= LARGE and any(map(_is_computed, arguments(node)))


def _is_computed(node: fx.Node) -> bool:
    """Whether the kernel that reads a result computes it, rather than moving or converting elements of an array."""
    source = made(node)
    if not is_inlined(source):
        return False
    return source.target not in MOVES | _COPIES or any(map(_is_computed, source.all_input_nodes))


def _share_sources(parts: list[fx.Node]) -> bool:
    """Whether arrays of one size and type are computed, all of them, from an array of that size."""
    each = [made(part) for part in parts]
    alike = len({(fake(part).shape, fake(part).dtype) for part in parts}) == 1
    if not alike or not all(map(is_inlined, each)):
        return False
    shared = set[fx.Node].intersection(*map(_sources, each))
    return any(size(one) == size(parts[0]) for one in shared)


def _sources(node: fx.Node) -> set[fx.Node]:
    """The arrays, or views of arrays, that a kernel reads from memory to compute a result."""
    found, seen, pending = set[fx.Node](), {node}, [node]
    while pending:
        for one in pending.pop().all_input_nodes:
            source = made(one)
            if not is_inlined(source):
                found.add(one)
            elif source not in seen:
                seen.add(source)
                pending.append(source)
    return found
