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

from stepgraph.interop.arguments import extents_in, held_in, makes, numbers_in
from stepgraph.interop.capture import Capture, Event, Held
from stepgraph.interop.rows import are_alike
from stepgraph.layers.glue import Call, Program, Value
from stepgraph.random import Drawn, Refusals
from stepgraph.system import surroundings
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
        needed = _needed(mask, events)
        computed = _computed(mask, needed, found) if are_alike(found, needed) else None
        return None if computed is None else _settings(computed, steps)

    def told(event: Event) -> Event:
        given = _given(event)
        mask = given.get("attn_mask")
        if not isinstance(mask, Value) or mask.number not in constants:
            return event
        query, key = (_shape(found, given[name])[-2] for name in ("query", "key"))
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


def _shape(found: Capture, array: Value | Held) -> Sequence[int]:
    return found.held[array.number].shape if isinstance(array, Held) else found.known[array.number].shape


def _needed(mask: int, events: Sequence[Event]) -> list[Event]:
    """The functions that a mask depends on, in order; of what they change, only what it depends on."""
    numbers, found = {mask}, list[Event]()
    for event in reversed(events):
        if numbers.isdisjoint(makes(event)):
            continue
        changed = tuple((old, new) for old, new in event.changed if new in numbers)
        numbers.update(numbers_in(event.arguments), (old for old, _ in changed))
        found.append(replace(event, changed=changed))
    return found[::-1]


def _computed(mask: int, events: Sequence[Event], found: Capture) -> torch.Tensor | None:
    """A mask for the fewest rows possible; None if it is random, large, or not computed on a CPU."""
    shares = [one.multiple.denominator for event in events for one in extents_in(event.arguments)]
    rows = math.lcm(*shares) if shares else found.rows
    shape = [one.at(rows) if isinstance(one, BatchExtent) else one for one in found.known[mask].shape]
    if not 0 < math.prod(shape) <= _LARGEST:
        return None
    calls = (
        Call(str(one.called), *one.arguments, one.results, one.changed, one.differentiable, one.autocast)
        for one in events
    )
    device = torch.device("cpu")
    try:
        with surroundings.tracing(), torch.no_grad(), Refusals(), device:
            return Program(tuple(calls), (mask,)).run([], rows, device)[0]
    except (Drawn, RuntimeError):  # the model's own device may have more functions
        return None


def _settings(mask: torch.Tensor, steps: tuple[int, int]) -> dict[str, Any] | None:
    """What attention is told instead of a mask; None if it needs the array.

    Args:
        mask: the mask for some number of rows.
        steps: the lengths of queries and keys.
    """
    kept = _kept(mask)
    if kept is None:
        return None
    if bool(kept.all()):
        return {"attn_mask": None}
    is_causal = steps[0] == steps[1] and bool((kept == torch.ones(steps, dtype=torch.bool).tril()).all())
    return {"attn_mask": None, "is_causal": True} if is_causal else None


def _kept(mask: torch.Tensor) -> torch.Tensor | None:
    """Which scores a mask keeps; None if it changes some of them."""
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    kept = mask == 0
    return kept if bool((kept | (mask <= torch.finfo(mask.dtype).min)).all()) else None
