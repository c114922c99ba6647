"""Recorded calls of two batch sizes as one: numbers that differ are multiples of the batch."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch

from stepgraph.interop.capture import Capture, Event, Known
from stepgraph.layers.glue import Slice
from stepgraph.tensors.extents import BatchExtent


class Differs(Exception):
    """Two recordings that cannot become one; its arguments are the path of a module and the reason."""


def common_path(*paths: str) -> str:
    """The innermost module around all of these."""
    parts = [path.split(".") if path else [] for path in paths]
    common = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    return ".".join(common)


def joined(first: Capture, second: Capture) -> Capture:
    """The first recording, with every number that follows the batch as a `BatchExtent`."""
    for one, two in zip(first.events, second.events, strict=False):
        if one.called is not two.called and one.called != two.called:
            raise Differs(common_path(one.path, two.path), "calls other functions with another batch size")
    if len(first.events) != len(second.events):
        raise Differs("", "calls more functions with another batch size")
    if any(not _same(one, two) for one, two in zip(first.held, second.held, strict=True)):
        raise Differs("", "makes other arrays with another batch size")
    rows = first.rows, second.rows
    events = [_event(one, two, rows) for one, two in zip(first.events, second.events, strict=True)]
    for event in first.events:
        if any(len(first.known[n].shape) != len(second.known[n].shape) for n in event.results):
            raise Differs(event.path, "makes arrays of other dimensions with another batch size")
    known = {number: one._replace(shape=_shape(one, second.known[number], rows)) for number, one in first.known.items()}
    return replace(first, events=events, known=known)


def require_calls(joined: Capture, other: Capture) -> None:
    """Raises `Differs` if a joined recording does not say what was recorded with another number of rows."""
    for both, one in zip(joined.events, other.events, strict=False):
        if both.called is not one.called and both.called != one.called:
            raise Differs(common_path(both.path, one.path), _calls_others(other))
        if _at(both.arguments, other.rows) != one.arguments:
            raise Differs(both.path.rpartition(".")[0] if both.is_module else both.path, _depends(both))
    if len(joined.events) != len(other.events):
        raise Differs("", _calls_others(other))


def _calls_others(other: Capture) -> str:
    return f"calls other functions for {other.rows} row{'s' * (other.rows > 1)}"


def _depends(event: Event) -> str:
    called = event.called if isinstance(event.called, str) else type(event.called).__name__
    return f"{called} takes numbers that depend on the number of rows in another way than as multiples"


def _at(tree: Any, rows: int) -> Any:
    """Arguments for a number of rows."""
    if isinstance(tree, BatchExtent):
        return tree.at(rows)
    if isinstance(tree, list | tuple):
        return type(tree)(_at(one, rows) for one in tree)
    if isinstance(tree, dict):
        return {name: _at(one, rows) for name, one in tree.items()}
    return Slice(*(_at(one, rows) for one in (tree.start, tree.stop, tree.step))) if isinstance(tree, Slice) else tree


def _shape(one: Known, two: Known, rows: tuple[int, int]) -> tuple[int, ...]:
    """A shape with the extents that follow the batch."""
    return tuple(a if a == b else _extent(a, b, rows) for a, b in zip(one.shape, two.shape, strict=True))


def _extent(one: int, two: int, rows: tuple[int, int]) -> BatchExtent:
    multiple = Fraction(two - one, rows[1] - rows[0])
    return BatchExtent(multiple, int(one - multiple * rows[0]))


def _same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one is two or (one.shape == two.shape and one.dtype == two.dtype and bool(torch.equal(one, two)))


def _event(one: Event, two: Event, rows: tuple[int, int]) -> Event:
    if (one.results, one.changed) != (two.results, two.changed):
        raise Differs(one.path, "returns other arrays with another batch size")
    try:
        arguments = _join(one.arguments, two.arguments, rows)
        if one.is_module and arguments != one.arguments:  # a layer's call is the same for all rows
            raise Differs(one.path.rpartition(".")[0], f"passes the number of rows to '{one.path}'")
        return replace(one, arguments=arguments)
    except ValueError as error:
        called = one.called if isinstance(one.called, str) else type(one.called).__name__
        raise Differs(one.path, f"{called} {error}") from None


def _join(one: Any, two: Any, rows: tuple[int, int]) -> Any:
    if isinstance(one, list | tuple) and type(one) is type(two) and len(one) == len(two):
        return type(one)(_join(a, b, rows) for a, b in zip(one, two, strict=True))
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return {name: _join(part, two[name], rows) for name, part in one.items()}
    if isinstance(one, Slice) and isinstance(two, Slice):
        parts = _join((one.start, one.stop, one.step), (two.start, two.stop, two.step), rows)
        return Slice(*parts)
    if type(one) is type(two) and one == two:
        return one
    if type(one) is int and type(two) is int and one * rows[1] == two * rows[0]:
        return BatchExtent(Fraction(one, rows[0]))
    raise ValueError(f"takes {one!r} for {rows[0]} rows and {two!r} for {rows[1]}, which is no multiple of the batch")


def transferred(joined: Capture, first: Capture, other: Capture) -> Capture | None:
    """The recording of the other mode, with what the joined one says about the batch.

    None if the two modes call different functions, or pass different integers: then only a recording with another
    batch size can tell.

    Args:
        joined: a mode's recordings at two batch sizes, joined.
        first: the first of them.
        other: the other mode's recording at the same size.
    """
    if len(first.events) != len(other.events) or [one[:2] for one in first.known.values()] != [
        one[:2] for one in other.known.values()
    ]:
        return None
    events = []
    for both, one, two in zip(joined.events, first.events, other.events, strict=True):
        if (one.called, one.results, one.changed) != (two.called, two.results, two.changed):
            return None
        try:
            events.append(replace(two, arguments=_transfer(both.arguments, one.arguments, two.arguments)))
        except ValueError:
            return None
    known = {number: one._replace(shape=joined.known[number].shape) for number, one in other.known.items()}
    return replace(other, events=events, known=known)


def _transfer(both: Any, one: Any, two: Any) -> Any:
    if isinstance(one, list | tuple) and type(one) is type(two) and len(one) == len(two):
        return type(two)(_transfer(*parts) for parts in zip(both, one, two, strict=True))
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return {name: _transfer(both[name], part, two[name]) for name, part in one.items()}
    if type(one) is type(two) and one == two:
        return both
    if isinstance(two, int) and not isinstance(two, bool):
        raise ValueError
    return two
