"""The invariants of a program after every pass.

Tests call `check` after each row of the pipeline; a pass that breaks an invariant is wrong, whatever its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import getitem

import torch
from torch import fx

from stepgraph.compiler import memory
from stepgraph.compiler.program import Part, Phase, fake, fakes, has_notes, is_view, mutates, notes, storage, storages
from stepgraph.compiler.step import Key

ORDER = {phase: index for index, phase in enumerate(Phase)}


def check(part: Part, like: Mapping[Key, torch.Tensor] | None = None, is_fused: bool = False) -> None:
    """Raises an `AssertionError` that names each broken invariant and its operator.

    Args:
        part: the output of a pass.
        like: the results before the pass, which must keep their shapes and types.
        is_fused: whether a compiler gets the operators, which plans its own memory.
    """
    part.module.graph.lint()
    broken = [*_unknown(part), *_dead(part), *_disordered(part), *_overwritten(part), *_overlapping(part)]
    broken += [] if is_fused else _detached(part)
    broken += _changed(part, like) if like is not None else []
    assert not broken, "\n".join(broken)


def _unknown(part: Part) -> Iterator[str]:
    """Every operator has a layer, a phase and a result with a known shape."""
    for node in part.nodes:
        if not has_notes(node) or not notes(node).layer:
            yield f"{_named(node)} has no layer or phase"
        if fake(node) is None and not mutates(node):
            yield f"{_named(node)}: its result is unknown"


def _dead(part: Part) -> Iterator[str]:
    """Every operator has a reader. Of several results, some may be unread."""
    for node in part.nodes:
        if not node.users and not mutates(node) and node.target is not getitem:
            yield f"{_named(node)}: nothing reads it"


def _disordered(part: Part) -> Iterator[str]:
    """No phase reads what a later one computes."""
    computed = set(part.nodes)
    for node in part.nodes:
        for source in node.all_input_nodes:
            if source in computed and ORDER[notes(source).phase] > ORDER[notes(node).phase]:
                yield f"{_named(node)} reads {_named(source)} from a later phase"


def _overwritten(part: Part) -> Iterator[str]:
    """What an operator overwrites is not read again, except through its result."""
    gone: dict[int | None, fx.Node] = {}  # storages, and what overwrote them
    for node in part.nodes:
        for source in node.all_input_nodes:
            writer = gone.get(storage(source))
            if writer is not None and source is not writer:
                yield f"{_named(node)} reads {_named(source)}, which {_named(writer)} has overwritten"
        if notes(node).in_place:
            former = node.args[0]
            assert isinstance(former, fx.Node)
            gone[storage(former)] = node


def _detached(part: Part) -> Iterator[str]:
    """A view has the memory of what it views: the memory plan and operators that write in place rely on that."""
    for node in part.nodes:
        source = node.args[0] if node.target is getitem or is_view(node) else None
        if isinstance(source, fx.Node) and node.target is not torch.ops.aten.reshape.default:  # which may copy
            for one in storages(node):
                if one not in storages(source):
                    yield f"{_named(node)} has other memory than {_named(source)}, which it is a view of"


def _overlapping(part: Part) -> Iterator[str]:
    """Results that are alive at the same time do not overlap in the arena, and stay inside it."""
    births, deaths = memory.lifetimes(part)
    placed: list[tuple[int, int, int, int, fx.Node]] = []
    for node in part.nodes:
        for one, array in zip(storages(node), fakes(node), strict=True):
            if one in notes(node).offsets:
                start = notes(node).offsets[one]
                end = start + array.untyped_storage().nbytes()
                placed.append((start, end, births[one][0], deaths[one], node))
                if end > part.held:
                    yield f"{_named(node)} ends at {end} of {part.held} held bytes"
    for index, (start, end, birth, death, node) in enumerate(placed):
        for other_start, other_end, other_birth, other_death, other in placed[:index]:
            if start < other_end and other_start < end and birth <= other_death and other_birth <= death:
                yield f"{_named(node)} and {_named(other)} share held memory and are alive at the same time"


def _changed(part: Part, like: Mapping[Key, torch.Tensor]) -> Iterator[str]:
    """Results keep their shapes and types."""
    for key, found in part.results.items():
        expected = like[key]
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            yield f"{key.kind}: {found.dtype} {list(found.shape)}, was {expected.dtype} {list(expected.shape)}"


def _named(node: fx.Node) -> str:
    return f"{node.name} ({node.target}, {notes(node).layer}, {notes(node).phase})"
