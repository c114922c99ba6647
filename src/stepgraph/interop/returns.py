"""Modules that return other results in training than in inference, such as a memory for the next call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepgraph.interop.arguments import numbers_in
from stepgraph.interop.capture import Capture, Event

Problems = dict[str, str]


def with_common_results(
    training: Capture, inference: Capture, wanted: Sequence[str]
) -> tuple[Capture, Capture, Problems]:
    """The recordings, with the results of each module that both modes return, and where that is not enough.

    Args:
        training: the recording in training mode.
        inference: the recording in inference mode.
        wanted: the paths of the model's results to compute.
    """
    modules = [[event for event in one.events if event.is_module] for one in (training, inference)]
    if [one.path for one in modules[0]] != [one.path for one in modules[1]]:
        return training, inference, {}
    common = [_common(*pair) for pair in zip(*modules, strict=True)]
    problems: Problems = {}
    found = []
    for capture in (training, inference):
        pairs = iter(common)
        events = [_only(event, next(pairs)) if event.is_module else event for event in capture.events]
        found.append(replace(capture, events=events))
        problems |= _missing(capture, events, wanted)
    return found[0], found[1], problems


def _common(one: Event, two: Event) -> tuple[str, ...]:
    """The results that a module returns in both modes, in the order of training."""
    return one.names if {*one.names} == {*two.names} else tuple(name for name in one.names if name in two.names)


def _only(event: Event, names: tuple[str, ...]) -> Event:
    if event.names == names:
        return event
    numbers = dict(zip(event.names, event.results, strict=True))
    return replace(event, names=names, results=tuple(numbers[name] for name in names), returns_more=True)


def _missing(capture: Capture, events: Sequence[Event], wanted: Sequence[str]) -> Problems:
    """The modules of which a mode reads a result that the other mode does not return."""
    read = {n for event in events for n in numbers_in(event.arguments)}
    read.update(n for path in wanted for n in numbers_in(capture.output[path]))
    return {
        old.path.rpartition(".")[0]: f"'{old.path}' ({type(old.called).__name__}) returns other arrays in training"
        for old, new in zip(capture.events, events, strict=True)
        if read & ({*old.results} - {*new.results}) or (old.results and not new.results)
    }
