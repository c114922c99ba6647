"""Masks of attention that follow from shapes alone, said as settings.

A model of transformers computes its causal mask from positions; others call `torch.tril`. Attention that is told
`is_causal` computes the same numbers in less time and memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from stepgraph.interop.capture import Capture, Event
from stepgraph.interop.plan import held_in, makes, numbers_in
from stepgraph.layers.glue import Call, Program, Value
from stepgraph.layers.torch_answers import Drawn, Refusals
from stepgraph.tensors.extents import BatchExtent

_ATTENTION = "F.scaled_dot_product_attention"
_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_LARGEST = 2**28  # elements of a mask that is looked at


def without_constant_masks(found: Capture) -> Capture:
    """The recording, with settings in the place of constant masks that are causal or exclude nothing."""
    events = _constants(found)
    constants = {number for event in events for number in makes(event)}

    @cache
    def instead(mask: int, steps: tuple[int, int]) -> dict[str, Any] | None:
        masks = [_computed(mask, events, rows) for rows in (found.rows, 2 * found.rows)]
        return _settings([one for one in masks if one is not None], steps)

    def told(event: Event) -> Event:
        given = _given(event)
        mask = given.get("attn_mask")
        if not isinstance(mask, Value) or mask.number not in constants or not _is_small(found, mask):
            return event
        query, key = (found.known[given[name].number].shape[-2] for name in ("query", "key"))
        if isinstance(query, BatchExtent) or isinstance(key, BatchExtent):
            return event
        settings = instead(mask.number, (query, key))
        return event if settings is None else _with(event, given | settings)

    return replace(found, events=[told(event) for event in found.events])


def _constants(found: Capture) -> list[Event]:
    """The functions whose results depend on no input, parameter, buffer or module."""
    events, numbers = list[Event](), set[int]()
    for event in found.events:
        is_function = isinstance(event.called, str) and not [*held_in(event.arguments)]
        if is_function and numbers.issuperset(numbers_in(event.arguments)):
            events.append(event)
            numbers.update(makes(event))
    return events


def _given(event: Event) -> dict[str, Any]:
    """The arguments of attention by name; nothing for another function."""
    if event.called != _ATTENTION:
        return {}
    arguments, settings = event.arguments
    return dict(zip(_POSITIONAL, arguments, strict=False)) | settings


def _with(event: Event, given: dict[str, Any]) -> Event:
    arrays = {name: given[name] for name in _POSITIONAL[:3]}
    settings = {name: value for name, value in given.items() if name not in arrays}
    return replace(event, arguments=(tuple(arrays.values()), settings))


def _is_small(found: Capture, mask: Value) -> bool:
    shape = found.known[mask.number].shape
    return math.prod(one.at(2 * found.rows) if isinstance(one, BatchExtent) else one for one in shape) <= _LARGEST


def _computed(mask: int, events: Sequence[Event], rows: int) -> torch.Tensor | None:
    """A mask for a number of rows; None if it is random."""
    needed, calls = {mask}, list[Call]()
    for event in reversed(events):
        if needed.isdisjoint(makes(event)):
            continue
        changed = tuple((old, new) for old, new in event.changed if new in needed)
        needed.update(numbers_in(event.arguments), (old for old, _ in changed))
        modes = event.differentiable, event.autocast
        calls.append(Call(str(event.called), *event.arguments, event.results, changed, *modes))
    device = torch.device("cpu")
    try:
        with torch.no_grad(), Refusals(), device:
            return Program(tuple(reversed(calls)), (mask,)).run([], rows, device)[0]
    except Drawn:
        return None


def _settings(masks: Sequence[torch.Tensor], steps: tuple[int, int]) -> dict[str, Any] | None:
    """What attention is told instead of a mask with different numbers of rows; None if it needs the array.

    Args:
        masks: the mask for some numbers of rows; none if it is random.
        steps: the lengths of queries and keys.
    """
    kept = [_kept(mask) for mask in masks]
    causal = torch.ones(steps, dtype=torch.bool).tril()
    if kept and all(one is not None and bool(one.all()) for one in kept):
        return {"attn_mask": None}
    if kept and steps[0] == steps[1] and all(one is not None and bool((one == causal).all()) for one in kept):
        return {"attn_mask": None, "is_causal": True}
    return None


def _kept(mask: torch.Tensor) -> torch.Tensor | None:
    """Which scores a mask keeps; None if it changes some of them."""
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    kept = mask == 0
    return kept if bool((kept | (mask <= torch.finfo(mask.dtype).min)).all()) else None
