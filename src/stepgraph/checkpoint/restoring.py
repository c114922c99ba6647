"""Restores a checkpoint into a graph that the program has built: everything is checked before anything changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stepgraph.checkpoint import files
from stepgraph.checkpoint.codec import Decoder, Encoder, Numbered
from stepgraph.checkpoint.graph_json import (
    layers_of,
    named_tensors,
    read_array,
    read_descriptor,
    read_notes,
    read_optimizer,
    read_progress,
)
from stepgraph.checkpoint.kept import Kept
from stepgraph.checkpoint.restore_report import Mismatch, RestoreReport
from stepgraph.draw import unique_names
from stepgraph.errors import CheckpointError, StepgraphError, reason
from stepgraph.optimizers import Optimizer, assigned
from stepgraph.runtime.declaration import Declaration
from stepgraph.runtime.state import Progress
from stepgraph.tensors.tensor import Tensor

OTHER = "use another checkpoint"


@dataclass(frozen=True)
class Taken:
    """The training state that one graph restores, and settings that differ."""

    progress: Progress
    optimizer: Optimizer | None
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """What a checkpoint provides for some graphs, after all checks and before any change.

    Args:
        report: what matches and what does not.
        arrays: new values of tensors.
        taken: the training state of each graph; None if it has none, or keeps its own.
        averages: those of each graph's parameters, where only parameters are restored.
    """

    report: RestoreReport
    arrays: Mapping[Tensor, torch.Tensor]
    taken: Sequence[Taken | None]
    averages: Sequence[Mapping[Tensor, torch.Tensor]]

    def write_tensors(self) -> None:
        """Writes the new values."""
        for tensor, array in self.arrays.items():
            tensor.overwrite(array)


def read(group: Sequence[Kept], path: Any, partial: bool, only_parameters: bool, trains: bool) -> Found:
    """Reads, verifies, and matches by name."""
    content = files.read(files.as_path("restore", path))
    declared = [graph.declaration for graph in group]
    taken: Sequence[Taken | None] = [None] * len(group)
    with understood(content.path):
        tensors, report = _match(declared, content)
        taken, problems = (taken, []) if only_parameters else _states(declared, content, tensors)
        averages = _averages(declared, content, tensors)
        changed = [*_changed(declared, content.description), *(one for each in taken if each for one in each.changed)]
        report = replace(report, state=tuple(problems), changed=tuple(changed))
        described = content.description["tensors"]
        arrays = {tensor: read_array(described[number], content.arrays) for number, tensor in tensors.items()}
    # An inference graph may be only a part of what was trained.
    fits = report.is_complete if trains else replace(report, unexpected=()).is_complete
    if not partial and not fits:
        raise CheckpointError(
            f"{content.path}",
            "the checkpoint and the graph do not match",
            **report.facts,
            fix="build the graph that was saved, or restore what fits: restore(path, partial=True)",
        )
    return Found(report, arrays, taken, averages)


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Rejects an intact but invalid description like a damaged one, whatever error it causes."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # a hostile description can make any code raise anything
        message = f"{error.where}: {error.problem}" if isinstance(error, StepgraphError) else reason(error)
        problem = f"its description is invalid ({type(error).__name__}: {message})"
        raise CheckpointError(f"{path}", problem, fix=OTHER) from error


def _match(group: Sequence[Declaration], content: files.Content) -> tuple[dict[int, Tensor], RestoreReport]:
    """The tensors to write, by number in the file, and what did not match."""
    mine = named_tensors(group)
    described = content.description["tensors"]
    theirs = {str(one["name"]): number for number, one in enumerate(described) if "name" in one and "data" in one}
    found: dict[str, Tensor] = {}
    mismatched = []
    for name in (name for name in mine if name in theirs):
        here, there = mine[name].descriptor, read_descriptor(described[theirs[name]])
        if (here.shape, here.data_type) == (there.shape, there.data_type):
            found[name] = mine[name]
        else:
            mismatched.append(Mismatch(name, str(here), str(there)))
    report = RestoreReport(
        content.path,
        loaded=tuple(found),
        missing=tuple(name for name in mine if name not in theirs),
        unexpected=tuple(name for name in theirs if name not in mine),
        mismatched=tuple(mismatched),
        notes=read_notes(content.description),
    )
    return {theirs[name]: tensor for name, tensor in found.items()}, report


def _states(
    group: Sequence[Declaration], content: files.Content, tensors: Mapping[int, Tensor]
) -> tuple[list[Taken | None], list[str]]:
    """What each training graph restores, and what it cannot."""
    theirs = content.description["graphs"]
    if len(theirs) != len(group):
        return [None] * len(group), [f"{len(theirs)} linked graphs in the checkpoint, {len(group)} here"]
    taken: list[Taken | None] = []
    problems: list[str] = []
    for graph, described in zip(group, theirs, strict=True):
        # An inference graph has no training state.
        one, problem = _state(graph, described, content, tensors) if graph.trains else (None, [])
        taken.append(one)
        problems += problem
    return taken, problems


def _averages(
    group: Sequence[Declaration], content: files.Content, tensors: Mapping[int, Tensor]
) -> list[Mapping[Tensor, torch.Tensor]]:
    """The averages that a checkpoint has for each graph's parameters."""
    theirs = content.description["graphs"]
    if len(theirs) != len(group):
        return [{}] * len(group)
    pairs = zip(group, (read_progress(one["progress"], tensors, content.arrays) for one in theirs), strict=True)
    return [progress.averages if graph.trains else {} for graph, progress in pairs]  # type: ignore[misc]


def _state(
    graph: Declaration, described: Mapping[str, Any], content: files.Content, tensors: Mapping[int, Tensor]
) -> tuple[Taken, list[str]]:
    progress = read_progress(described["progress"], tensors, content.arrays)
    number, mine = described["optimizer"], graph.optimizer
    known = [tensors.get(number) for number in range(len(content.description["tensors"]))]
    decoder = Decoder(f"{content.path}", [], known, {}, [] if mine is None else [type(mine)])
    there = None if number is None else Numbered(content.description["optimizers"])[number]
    rules = ["no optimizer" if one is None else one for one in (there and there["rule"], mine and mine.rule)]
    if rules[0] != rules[1]:
        stream = Progress(stream=progress.stream, scale=progress.scale)
        return Taken(stream, None), [f"{rules[0]} in the checkpoint, {rules[1]} here"]
    optimizer = None if there is None else read_optimizer(there, decoder)
    progress.time_version = 0 if mine is None else mine.time_version
    check_buffers(f"{content.path}", progress, graph)
    changed = []
    if optimizer is not None and mine is not None and _members(optimizer, graph) != _members(mine, graph):
        optimizer.__dict__["groups"] = mine.groups
        changed.append("the parameter groups of the optimizer, which keep their own numbers")
    if graph.average != described.get("average"):
        changed.append(f"average is {graph.average}, was {described.get('average')}")
    return Taken(progress, optimizer, tuple(changed)), _beginning(graph, progress, tensors)


def _beginning(graph: Declaration, progress: Progress, tensors: Mapping[int, Tensor]) -> list[str]:
    """What the report says about parameters that are new to an optimizer which has made updates."""
    restored = {*tensors.values()}
    new = [names[0] for t, names in graph.parameter_names.items() if t not in restored and graph.slots(t)]
    if not new or progress.time_step is None or progress.time_step <= 1:
        return []
    return [f"no optimizer state of {', '.join(new)} in the checkpoint, which is at update {progress.time_step:,}"]


def _members(optimizer: Optimizer, graph: Declaration) -> list[tuple[set[Tensor], tuple[str, ...]]]:
    """The parameters of each group, and the names of its numbers."""
    found = assigned(optimizer.groups, graph.parameter_names)
    groups = enumerate(optimizer.groups, 1)
    return [({t for t in found if found[t] == i}, group.numbers) for i, group in groups]


def check_buffers(where: str, progress: Progress, graph: Declaration) -> None:
    """Rejects optimizer buffers, gradients and averages that do not match their parameters."""
    single = [*progress.gradients.items(), *progress.averages.items()]
    for tensor, arrays in (*progress.buffers.items(), *((t, (a,)) for t, a in single)):
        if any(array.shape != tensor.shape or array.dtype != tensor.data_type.torch for array in arrays):
            raise CheckpointError(where, f"a buffer of {tensor!r} has a different shape or type", fix=OTHER)
    for tensor, arrays in progress.buffers.items():
        if len(arrays) != (slots := len(graph.slots(tensor))):
            raise CheckpointError(where, f"{tensor!r} does not have {slots} buffers", fix=OTHER)


def _changed(group: Sequence[Declaration], description: Mapping[str, Any]) -> list[str]:
    """Settings that differ: the program's apply, not the checkpoint's, and the report should say so."""
    encoder = Encoder()
    theirs = {one["fields"]["label"]: one for one in _unique(description["layers"])}
    found = []
    for layer, name in unique_names(layers_of(group)).items():
        here = encoder.described[encoder.layer(layer)]
        there = theirs.get(name, here)
        if there["class"] != here["class"]:
            found.append(f"{name} is a {here['class']}, was a {there['class']}")
            continue
        for field in here["fields"]:
            ours, old = here["fields"][field], there["fields"].get(field)
            if field not in ("label", "is_debugging_enabled") and ours != old and "tensor" not in f"{ours}{old}":
                found.append(f"{name}.{field} is {_plain(ours)}, was {_plain(old)}")
    return found


def _unique(layers: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Described layers under the names that `unique_names` gives them."""
    labels = [one["fields"]["label"] for one in layers]
    for i, one in enumerate(layers):
        label = labels[i]
        name = label if labels.count(label) == 1 else f"{label}{labels[: i + 1].count(label)}"
        yield {**one, "fields": {**one["fields"], "label": name}}


def _plain(value: Any) -> Any:
    """A described setting in readable form."""
    if not isinstance(value, dict):
        return value
    match value:
        case {"member": member}:
            return member
        case {"tuple": items}:
            return tuple(_plain(one) for one in items)
        case {"fields": fields}:
            return {name: _plain(one) for name, one in fields.items()}
    return next(iter(value.values()))
