"""Sums over the rows of a result, added up by the kernel that writes the result to memory.

A product reads the gradient behind an activation, and the gradient of the bias is the sum of its rows. PyTorch's
compiler divides such a sum into stages without regard to the loops of the kernel that writes the gradient, so the first
stage is another kernel, which reads all of it again. Here both work on blocks of rows: the result is written as an
array of blocks, and the first stage adds up the rows of each block. By exchanging loops, the compiler then makes one
kernel of the two. A second stage adds up the sums of the blocks, so no bit depends on which thread finishes first.

The same holds for biases of query, key and value, whose gradients a kernel writes side by side. Sums of a batch
normalization's gradient stay apart: they also read its source, and one kernel for all that is slower than two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.passes.absorbed import (
    is_absorbed,
    is_gradient,
    is_reduction,
    is_small,
    made,
    sums_rows,
    users_of,
)
from stepgraph.compiler.passes.stored import MOVES
from stepgraph.compiler.program import call, fake, is_view, remove_dead
from stepgraph.system import torch_private

aten, prims = torch.ops.aten, torch.ops.prims
ROWS = 32  # that a block has at least: the sums of blocks are small beside the rows
FEWEST = 1 << 16  # sums of blocks, each by a thread or more: fewer do not fill a GPU
ENOUGH = 1 << 18  # sums of blocks: with more, adding them up takes longer
LIMIT = 1 << 20  # sums of blocks at most
# Operators of a result whose loops may be divided. In a longer computation, the compiler may store what is in between,
# and it fuses kernels only if their loops are the same. So the blocks of a longer one are its first dimension.
SHORT = 8
ADDED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Rows:
    """An array as rows in memory.

    Args:
        order: its dimensions, those of the rows first.
        extents: those of the rows.
        columns: the elements of a row.
    """

    order: tuple[int, ...]
    extents: tuple[int, ...]
    columns: int

    @classmethod
    def of(cls, array: torch.Tensor, columns: int) -> _Rows | None:
        """An array as rows of so many elements; None if its memory has gaps, or is not made of such rows."""
        strides = array.stride()
        order = sorted(range(array.ndim), key=lambda axis: (-strides[axis], axis))
        extents = [array.shape[axis] for axis in order]
        count = next((place for place in range(len(order) + 1) if math.prod(extents[place:]) == columns), None)
        if count is None or not _are_contiguous(extents, [strides[axis] for axis in order]):
            return None
        return cls(tuple(order), tuple(extents[:count]), columns)

    @property
    def outer(self) -> tuple[int, ...]:
        """The dimensions of the rows."""
        return self.order[: len(self.extents)]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return math.prod(self.extents)

    def divisions(self) -> Iterator[int]:
        """Numbers of blocks that divide at most one dimension, so that indices remain simple."""
        before = 1
        for extent in self.extents:
            small = [part for part in range(1, math.isqrt(extent) + 1) if extent % part == 0]
            yield from (before * part for one in small for part in (one, extent // one))
            before *= extent


def _are_contiguous(extents: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements follow one another in memory; asking PyTorch takes a hundred times as long without memory."""
    sizes = [math.prod(extents[place + 1 :]) for place in range(len(extents))]
    return 0 in extents or all(extents[i] == 1 or strides[i] == sizes[i] for i in range(len(extents)))


@dataclass(frozen=True)
class _Blocks:
    """How many blocks the rows of a result are divided into, and the elements of a row."""

    count: int
    columns: int


def sum_rows_where_written(graph: fx.Graph) -> None:
    """Adds up rows by blocks, over which the kernel that writes the rows also loops."""
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        _sum_together(node)
    order = {node: place for place, node in enumerate(graph.nodes)}
    written = dict[fx.Node, _Blocks]()
    summed = dict[fx.Node, int]()
    for node in order:
        if node in written or not _is_written(node) or _meets_rows(node):
            continue
        sums = _sums_of(node, order)
        blocks = _blocks(node, sums)
        if blocks is not None:
            written = dict.fromkeys((node, *_written_with(node, blocks, order)), blocks) | written
            summed |= dict.fromkeys(sums, blocks.count)
    for node, blocks in written.items():
        _write_in_blocks(node, blocks)
    for node, count in summed.items():
        _add_in_blocks(node, count)
    remove_dead(graph)


def _sum_together(node: fx.Node) -> None:
    """Replaces sums over the rows of arrays that are joined column by column with parts of one sum."""
    parts: Any = node.args[0]
    whole, axis = fake(node), (*node.args, 0)[1]
    last = whole.ndim - 1
    alike = all(fake(part).ndim == whole.ndim and fake(part).dtype is whole.dtype for part in parts)
    if not alike or axis not in (-1, last) or not _is_written(node):
        return
    sums = {part: [user for user in part.users if _is_sum(user)] for part in parts}
    late = _between([one for some in sums.values() for one in some], node)
    if not any(sums.values()) or not all(map(is_absorbed, late)):
        return
    with node.graph.inserting_after(node):
        total = call(node, aten.sum.dim_IntList, (node, list(range(last)), True))
    place, start = total, 0
    for part in parts:
        end = start + fake(part).shape[last]
        for one in sums[part]:
            with node.graph.inserting_after(place):
                cut = call(one, aten.slice.Tensor, (total, last, start, end))
            with node.graph.inserting_after(cut):
                place = call(one, aten.reshape.default, (cut, list(fake(one).shape)))
            one.replace_all_uses_with(place)
        start = end
    for one in late:
        place.append(one)
        place = one


def _between(first: Sequence[fx.Node], last: fx.Node) -> list[fx.Node]:
    """What is computed from some results before another one, in order."""
    found, node = dict.fromkeys(first), min([*first, last])
    while node is not last:
        if any(source in found for source in node.all_input_nodes):
            found[node] = None
        node = node.next
    return [node for node in found if node not in first]


def _is_sum(node: fx.Node) -> bool:
    """Whether an operator adds up all rows of an array in float32."""
    if node.target is not aten.sum.dim_IntList or node.kwargs or not sums_rows(node):
        return False
    array, axes = fake(node.all_input_nodes[0]), node.args[1]
    rows = _Rows.of(array, fake(node).numel())
    if rows is None or array.dtype not in ADDED:
        return False
    reduced = {axis % array.ndim for axis in axes}  # type: ignore[union-attr]
    return all((axis in reduced) == (axis in rows.outer) for axis in range(array.ndim) if array.shape[axis] > 1)


def _is_written(node: fx.Node) -> bool:
    """Whether a kernel writes a large result, element by element, because operators outside of kernels read it."""
    if node.op != "call_function" or is_view(node) or is_small(node) or not isinstance(fake(node), torch.Tensor):
        return False
    if node.target is aten.cat.default:  # if its parts are computed, kernels write these directly to their places
        by_elements = not any(is_absorbed(made(part)) for part in node.all_input_nodes)
    else:
        by_elements = is_absorbed(node) and not is_reduction(node)
    users = users_of(node)
    called = any(not is_absorbed(user) for user in users) and MOVES.isdisjoint(user.target for user in users)
    return by_elements and called


def _meets_rows(node: fx.Node) -> bool:
    """Whether a kernel that reduces rows, such as a layer normalization, computes a result or reads it.

    The compiler fuses the two, and then cannot exchange their loops.
    """
    return any(is_reduction(one) and not sums_rows(one) for one in (*_before(node), *_behind(node)))


def _before(node: fx.Node) -> set[fx.Node]:
    """What generated kernels compute a result from, back to reductions; those of the other pass are complete."""
    found, pending = set[fx.Node](), [node]
    while pending:
        for source in map(made, pending.pop().all_input_nodes):
            if source in found or source.op != "call_function" or not is_absorbed(source):
                continue
            if not is_reduction(source):
                pending.append(source)
            elif is_gradient(source) != is_gradient(node):
                continue
            found.add(source)
    return found


def _behind(node: fx.Node) -> set[fx.Node]:
    """What generated kernels compute from a result, up to reductions."""
    found, pending = set[fx.Node](), [node]
    while pending:
        for user in pending.pop().users:
            if user not in found and user.op == "call_function" and is_absorbed(user):
                found.add(user)
                pending += [] if is_reduction(user) else [user]
    return found


def _sums_of(node: fx.Node, order: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Sums over the rows of a result, as soon as it is there; none if other arrays are summed together with it."""
    count = fake(node).numel()
    sums = [one for one in _behind(node) if _is_sum(one) and fake(one.all_input_nodes[0]).numel() == count]
    if any(_read(one) != {node} for one in sums):
        return []
    return sorted(sums, key=order.__getitem__)


def _is_before(needs: Iterable[fx.Node], node: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    return all(order[one] < order[node] for one in needs)


def _needs(node: fx.Node) -> set[fx.Node]:
    """What must be complete before the kernel of an operator can start, apart from what is given."""
    return {one for one in _read(node) if one.op == "call_function"}


def _read(node: fx.Node) -> set[fx.Node]:
    """The arrays in memory from which the kernel of an operator computes its result."""
    inside = {node, *_inside(node)}
    return {source for one in inside for source in map(made, one.all_input_nodes)} - inside


def _inside(node: fx.Node) -> set[fx.Node]:
    """What the kernel of an operator computes for it from arrays in memory."""
    found, pending = set[fx.Node](), [node]
    while pending:
        for source in map(made, pending.pop().all_input_nodes):
            inner = source.op == "call_function" and is_absorbed(source) and not is_reduction(source)
            if inner and source not in found and not _is_written(source):
                found.add(source)
                pending.append(source)
    return found


def _blocks(node: fx.Node, sums: Sequence[fx.Node]) -> _Blocks | None:
    """The blocks into which to divide the rows of a result, or None."""
    widths = {fake(one).numel() for one in sums}
    if len(widths) != 1:
        return None
    (columns,) = widths
    arrays = [_Rows.of(fake(one), columns) for one in (node, *(one.all_input_nodes[0] for one in sums))]
    rows = [one for one in arrays if one is not None]
    if len(rows) < len(arrays):
        return None
    common = set(rows[0].divisions()).intersection(*(one.divisions() for one in rows[1:]))
    if len(_inside(node)) > SHORT:
        common &= {rows[0].extents[0]} if len(rows[0].extents) == 2 else set()
    most = min(LIMIT // columns, rows[0].count // ROWS)
    fitting = [one for one in common if one * columns >= FEWEST and 1 < one <= most]
    few = [one for one in fitting if one * columns <= ENOUGH]
    return _Blocks(max(few) if few else min(fitting), columns) if fitting else None


def _written_with(node: fx.Node, blocks: _Blocks, order: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Other results that the same kernel writes, from the same sources, for operators outside of kernels only."""
    needs = _needs(node)
    readers = {user for need in needs if not is_small(need) for user in _behind(need)}
    found = [one for one in readers - needs - {node} if _is_written(one) and _is_alike(one, node, blocks)]
    return sorted((one for one in found if _is_before(_needs(one), node, order)), key=order.__getitem__)


def _is_alike(one: fx.Node, node: fx.Node, blocks: _Blocks) -> bool:
    """Whether a result can be written in the same blocks as another, and nothing else would share its kernel."""
    rows = _Rows.of(fake(one), blocks.columns)
    if rows is None or blocks.count not in rows.divisions() or is_gradient(one) != is_gradient(node):
        return False
    alone = not any(map(is_absorbed, users_of(one)))
    return alone and fake(one).numel() == fake(node).numel() and not _meets_rows(one)


def _write_in_blocks(node: fx.Node, blocks: _Blocks) -> None:
    """Lets the kernel of a result loop over blocks; everything else reads it as before."""
    graph, rows = node.graph, _Rows.of(fake(node), blocks.columns)
    assert rows is not None
    shape = [blocks.count, rows.count // blocks.count, blocks.columns]
    back = [rows.order.index(axis) for axis in range(len(rows.order))]
    found, readers = node, set(node.users)
    for target, given in (
        (aten.permute.default, list(rows.order)),
        (aten.reshape.default, shape),
        (torch_private.written_to_memory(), [shape[1] * shape[2], shape[2], 1]),
        (aten.reshape.default, [fake(node).shape[axis] for axis in rows.order]),
        (aten.permute.default, back),
    ):
        with graph.inserting_after(found):
            found = call(node, target, (found, given))
    node.replace_all_uses_with(found, readers.__contains__)


def _add_in_blocks(node: fx.Node, count: int) -> None:
    """Adds up the rows of each block, then the blocks."""
    (source,) = node.all_input_nodes
    rows = _Rows.of(fake(source), fake(node).numel())
    assert rows is not None
    found = source
    with node.graph.inserting_before(node):
        for target, given in (
            (prims.convert_element_type.default, torch.float32),
            (aten.permute.default, list(rows.order)),
            (aten.reshape.default, [count, rows.count // count, rows.columns]),
            (aten.sum.dim_IntList, [1]),
            (aten.sum.dim_IntList, [0]),
            (prims.convert_element_type.default, fake(node).dtype),
            (aten.reshape.default, list(fake(node).shape)),
        ):
            found = call(node, target, (found, given))
    node.replace_all_uses_with(found)
