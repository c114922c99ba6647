"""The passes that turn a recorded step into what runs, in order, from top to bottom.

A pass is a function; a row defines the steps it applies to. Nothing else decides what a program computes: writing it as
code only decides how operators are called and where results lie. `step` rows decide how a step is recorded, `recorded`
rows see the whole step once, `part` rows each part of it, `fused` rows the operators passed to PyTorch's compiler,
`lowered` rows what that compiler has decomposed them into.

To add a pass, add a row here and a function in its own module of `passes/`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from rich.console import RenderableType
from torch import fx

from stepgraph import draw
from stepgraph.compiler import kernels, memory, operators
from stepgraph.compiler.kernels import label_losses
from stepgraph.compiler.kernels.few_channels import convolve_few_channels
from stepgraph.compiler.kernels.max_pool import pool_by_rows
from stepgraph.compiler.modules import Module
from stepgraph.compiler.passes import (
    concatenations,
    constants,
    corrections,
    half_normalization,
    held,
    in_place,
    join,
    layout,
    pool_indices,
    recompute,
    recompute_fused,
    simplification,
    stored,
)
from stepgraph.compiler.passes.beside import pass_beside
from stepgraph.compiler.passes.conversions import convert_in_order
from stepgraph.compiler.passes.exchange import exchange_gradients, gather_updates
from stepgraph.compiler.passes.half_gradients import read_half
from stepgraph.compiler.passes.hidden import hide
from stepgraph.compiler.passes.loss_with_gradient import join_losses
from stepgraph.compiler.passes.merge_statistics import merge_statistics
from stepgraph.compiler.passes.merge_updates import merge_updates
from stepgraph.compiler.passes.pad_channels import pad_channels
from stepgraph.compiler.passes.pad_classes import pad_classes
from stepgraph.compiler.passes.pad_predictions import pad_predictions
from stepgraph.compiler.passes.pool_first import pool_first
from stepgraph.compiler.passes.separate_windows import multiply_windows
from stepgraph.compiler.passes.shared_gradients import store_gradients
from stepgraph.compiler.passes.sums_of_rows import sum_rows_where_written
from stepgraph.compiler.program import Part, PartName, Program, has_notes, notes
from stepgraph.compiler.step import Fusion, Step
from stepgraph.compiler.trace import trace
from stepgraph.compiler.tuned import MANIFEST
from stepgraph.compiler.tuned.row import Tuned
from stepgraph.system import surroundings, torch_private

# Parts that run a whole call, or a shard of one.
WHOLE = (PartName.STEP, PartName.SHARD, PartName.LAST, PartName.INFERENCE)
TRAINING = (PartName.STEP, PartName.SHARD, PartName.LAST)


class Stage(StrEnum):
    """What a pass works on."""

    STEP = "step"
    RECORDED = "recorded"
    PART = "part"
    FUSED = "fused"
    LOWERED = "lowered"


@dataclass(frozen=True)
class Pass:
    """One row of the pipeline.

    Args:
        name: a short description.
        stage: what it works on; steps and parts are replaced, graphs of the other stages are changed in place.
        run: the pass, a function of what it works on and the step.
        applies: whether it runs for a step, and a part of it by name.
    """

    name: str
    stage: Stage
    run: Callable[[Any, Step], Any]
    applies: Callable[[Step, PartName | None], bool]


def _always(step: Step, part: PartName | None) -> bool:
    return True


def _chooses(step: Step, part: PartName | None) -> bool:
    return step.chooses_kernels


def _has_implementations(step: Step, part: PartName | None) -> bool:
    # On a GPU cuDNN chooses among its own algorithms. PyTorch's compiler makes its own choices, and does not know all
    # libraries behind our implementations.
    return step.chooses_kernels and step.device.type == "cpu" and step.fusion is not Fusion.FIRST


def _normalizes_half(step: Step, part: PartName | None) -> bool:
    known = step.device.type in half_normalization.DEVICES and torch.version.hip is None
    return known and step.compute_type is not None


def _is_whole_step(step: Step, part: PartName | None) -> bool:
    return part == PartName.STEP


def _is_limited(step: Step, part: PartName | None) -> bool:
    return step.memory_limit is not None and part in (*WHOLE, PartName.TRIAL)


def _holds(step: Step, part: PartName | None) -> bool:
    # The memory limit was met without an arena, and PyTorch's compiler plans its own memory.
    unlimited = step.memory_limit is None and step.fusion is not Fusion.FIRST
    return part in TRAINING and step.device.type == "cpu" and step.chooses_kernels and unlimited


def _on_cpu(step: Step, part: PartName | None) -> bool:
    return step.device.type == "cpu"


def _on_gpu(step: Step, part: PartName | None) -> bool:
    return not _on_cpu(step, part)


def _on_cuda(step: Step, part: PartName | None) -> bool:
    return step.device.type == "cuda"


def _trains_on_cuda(step: Step, part: PartName | None) -> bool:
    return _on_cuda(step, part) and part in TRAINING


def _exchanges(step: Step, part: PartName | None) -> bool:
    return step.ownership is not None and part == PartName.LAST


def _gathers(step: Step, part: PartName | None) -> bool:
    return step.ownership is not None and part == PartName.UPDATE


def _merges_updates(step: Step, part: PartName | None) -> bool:
    # Within a limit, other results could not be kept because of gradients that wait.
    return step.device.type == "cuda" and step.memory_limit is None


def _saves(step: Step, part: PartName | None) -> bool:
    # It makes steps up to 4% slower: what a product reads is written twice.
    return step.memory_limit is not None


def _recomputes(step: Step, part: PartName | None) -> bool:
    # Kernels on a GPU wait for memory; on a CPU, arithmetic takes longer than reading.
    return _on_gpu(step, part) and not _saves(step, part)


def _graph(function: Callable[[fx.Graph], Any]) -> Callable[[fx.GraphModule, Step], Any]:
    """A pass that needs only the graph."""
    return lambda module, step: function(module.graph)


def _simplify(module: fx.GraphModule, step: Step) -> None:
    simplification.simplify(module)
    _require_phases(module.graph)  # no-ops may have been recorded outside of any phase


def _require_phases(graph: fx.Graph) -> None:
    """Requires a phase for every operator, because parts are split by phase."""
    for node in graph.nodes:
        if node.op == "call_function" and not has_notes(node):
            raise AssertionError(f"{node.format_node()} was recorded outside any phase")


def _fit(part: Part, step: Step) -> Part:
    assert step.memory_limit is not None
    part = replace(part, is_draft=False)  # it is compared with what recomputes, and kept
    fitted = recompute.fit(step, part, step.memory_limit)
    return replace(fitted, unlimited=part) if any(notes(node).recomputed for node in fitted.nodes) else fitted


def _compute_once(module: fx.GraphModule, step: Step) -> None:
    module.graph = torch_private.inductor().without_repeats(module.graph)


def _choose_kernels(module: fx.GraphModule, step: Step) -> None:
    offered = [one for row in MANIFEST if row.applies(step) for one in row.offers]
    with surroundings.unrounded():  # they are measured as they will run
        kernels.choose_kernels(module, offered, None if step.measures_kernels else kernels.preferred)


def _lay_out(step: Step, _: Step) -> Step:
    with surroundings.tracing(), surroundings.unrounded():  # it is tried as it will run
        return layout.choose(step, program, lambda part, of: settled(part, of, PartName.TRIAL))


def _fused(row: Tuned) -> Pass:
    """A row of the manifest of tuned code as a pass."""
    assert row.run is not None
    return Pass(row.name, Stage.FUSED, _graph(row.run), lambda step, part: row.applies(step))


STEP, RECORDED, PART, FUSED, LOWERED = Stage
TABLE: tuple[Pass, ...] = (
    Pass("choose the layout of images", STEP, _lay_out, lambda step, part: layout.is_open(step)),
    Pass("remove no-ops and duplicates", RECORDED, _simplify, _always),
    Pass("compute equal constants once", RECORDED, _graph(constants.compute_once), _always),
    Pass(
        "work around incorrect operators",
        RECORDED,
        lambda module, step: corrections.correct(module.graph, step.device),
        _always,
    ),
    Pass("pool before ReLU", RECORDED, _graph(pool_first), _chooses),
    Pass(
        "choose implementations",
        RECORDED,
        _choose_kernels,
        _has_implementations,
    ),
    Pass("normalize in half precision", RECORDED, _graph(half_normalization.normalize_half), _normalizes_half),
    Pass("convert and reorder at once", RECORDED, _graph(convert_in_order), _on_gpu),
    Pass("record workspaces", RECORDED, _graph(operators.note_workspaces), _always),
    Pass("join losses and gradients", PART, lambda part, step: join_losses(part), _is_whole_step),
    Pass("update from half precision", PART, lambda part, step: read_half(part), _on_cuda),
    Pass("merge updates of statistics", PART, lambda part, step: merge_statistics(part), _on_cuda),
    Pass("exchange gradients with other ranks", PART, exchange_gradients, _exchanges),
    Pass("keep indices of pools narrow", PART, lambda part, step: pool_indices.keep_narrow(part), _trains_on_cuda),
    Pass("recompute to fit the memory limit", PART, _fit, _is_limited),
    Pass("write in place", PART, lambda part, step: in_place.in_place(part), _always),
    Pass("merge updates", PART, lambda part, step: merge_updates(part), _merges_updates),
    Pass("gather what ranks update", PART, gather_updates, _gathers),
    Pass("keep memory between steps", PART, lambda part, step: held.hold(part), _holds),
    Pass("write out of place", FUSED, _graph(in_place.out_of_place), _always),
    Pass("restore indices of pools", FUSED, _graph(pool_indices.restore), _on_cuda),
    Pass("pool by rows", FUSED, _graph(pool_by_rows), _on_cuda),
    Pass("convolve few channels", FUSED, _graph(convolve_few_channels), _on_cuda),
    *(_fused(row) for row in MANIFEST if row.run is not None),
    Pass("merge activations", FUSED, _graph(join.join_activations), _on_gpu),
    Pass("merge products", FUSED, _graph(join.join_products), _always),
    Pass("hide miscompiled operators", FUSED, _graph(hide), _on_gpu),
    Pass("pad classes", FUSED, _graph(pad_classes), _on_gpu),
    Pass("pad classes of pixels", FUSED, _graph(pad_predictions), _on_cuda),
    Pass("expand cross entropies", FUSED, _graph(label_losses.expand), _always),
    Pass("expand GELU", FUSED, _graph(kernels.expand_gelu), _on_gpu),
    Pass("expand normalization", FUSED, _graph(kernels.expand_layer_norms), _on_gpu),
    Pass("sum statistics of batches", FUSED, _graph(kernels.expand_batch_norms), _on_gpu),
    Pass("expand updates of statistics", FUSED, _graph(kernels.expand_statistics), _on_gpu),
    Pass("expand updates", FUSED, _graph(kernels.expand_updates), _always),
    Pass("pass optimizer buffers beside the compiler", FUSED, _graph(pass_beside), _on_cuda),
    Pass("keep recomputation apart", LOWERED, _graph(recompute_fused.separate), _always),
    Pass("compute equal operators once", LOWERED, _compute_once, _always),
    Pass("pad channels", LOWERED, _graph(pad_channels), _on_cuda),
    Pass("multiply for separate windows", LOWERED, _graph(multiply_windows), _on_cuda),
    Pass("recompute what is nearly free", LOWERED, _graph(recompute_fused.recompute_by_default), _recomputes),
    Pass("recompute what is cheap", LOWERED, _graph(recompute_fused.recompute_cheap), _saves),
    Pass("store gradients that are read with their sums", LOWERED, _graph(store_gradients), _on_gpu),
    Pass("sum rows where they are written", LOWERED, _graph(sum_rows_where_written), _on_cuda),
    Pass("store constants", LOWERED, _graph(stored.store_constants), _always),
    Pass("store what several operators copy", LOWERED, _graph(stored.store_sources), _always),
    Pass("store factors of channels", LOWERED, _graph(stored.store_factors), _on_gpu),
    Pass("store numbers that are looked up", LOWERED, _graph(stored.store_numbers), _on_gpu),
    Pass("write the parts of concatenations to their places", LOWERED, _graph(concatenations.store_parts), _on_gpu),
)


def rows(stage: Stage, step: Step, part: PartName | None) -> Iterator[Pass]:
    """The passes of a stage that apply, in order."""
    return (row for row in TABLE if row.stage is stage and row.applies(step, part))


def decided(step: Step) -> Step:
    """The step as it will be recorded."""
    for row in rows(STEP, step, None):
        step = row.run(step, step)
    return step


def program(step: Step) -> Program:
    """The recorded step, ready to be split into parts."""
    recorded = trace(step)
    with surroundings.tracing():
        for row in rows(RECORDED, step, None):
            row.run(recorded.module, step)
    return recorded.refreshed()


def settled(part: Part, step: Step, name: PartName | None) -> Part:
    """A part ready to run. Copying operators takes as long as most passes, so all of these change one copy."""
    part = replace(part.copied(), is_draft=True)
    for row in rows(PART, step, name):
        part = row.run(part, step)
    return replace(part, is_draft=False)


@dataclass(frozen=True)
class Ran:
    """The effect of one pass: operators before and after it, bytes of intermediates after it, and its time.

    Bytes are None before parts exist; everything is None if the pass does not apply. `decision` is what a pass decided
    before there were operators.
    """

    row: Pass
    before: int | None = None
    after: int | None = None
    intermediates: int | None = None
    seconds: float | None = None
    decision: str = ""


@dataclass(frozen=True)
class Report:
    """The passes that ran for a step, and their effects."""

    ran: tuple[Ran, ...]

    def __rich__(self) -> RenderableType:
        drawn = draw.Listing("stage", "pass", title="Pipeline", title_justify="left", show_edge=False, pad_edge=False)
        for column in ("operators", "intermediates", "time"):
            drawn.add_column(column, justify="right")
        for one in self.ran:
            drawn.add_row(*_row(one))
        return drawn

    def __str__(self) -> str:
        return draw.text(self.__rich__(), width=120)


def report(step: Step, name: PartName, cut: Callable[[Program], Part]) -> Report:
    """Reruns the passes for a part of a step and observes each.

    Args:
        step: what to compute.
        name: the part.
        cut: extracts the part from the recorded step.
    """
    found = [_decision(row, step) for row in TABLE if row.stage is STEP]
    recorded = trace(step)
    with surroundings.tracing():
        found += [_watched(row, recorded.module, step, None) for row in TABLE if row.stage is RECORDED]
    part = cut(recorded.refreshed())
    for row in TABLE:
        if row.stage is PART:
            ran, part = _replaced(row, part, step, name)
            found.append(ran)
    fuses = step.fusion in (Fusion.LATER, Fusion.FIRST)  # at a fixed step, another recording is fused
    module = Module(part.module, copy.deepcopy(part.module.graph))
    found += [_watched(row, module, step, name) if fuses else Ran(row) for row in TABLE if row.stage is FUSED]
    found += [Ran(row) for row in TABLE if row.stage is LOWERED]  # only PyTorch's compiler can run them
    return Report(tuple(found))


def _decision(row: Pass, step: Step) -> Ran:
    """What was decided before; the step no longer says whether anything was open."""
    was_open = row.applies(replace(step, channels_last=False), None)
    return Ran(row, decision=(layout.LAST if step.channels_last else layout.FIRST) if was_open else "")


def _watched(row: Pass, module: fx.GraphModule, step: Step, name: PartName | None) -> Ran:
    if not row.applies(step, name):
        return Ran(row)
    before, began = _count(module), time.perf_counter()
    row.run(module, step)
    return Ran(row, before, _count(module), None, time.perf_counter() - began)


def _replaced(row: Pass, part: Part, step: Step, name: PartName | None) -> tuple[Ran, Part]:
    if not row.applies(step, name):
        return Ran(row), part
    before, began = _count(part.module), time.perf_counter()
    part = row.run(part, step)
    seconds = time.perf_counter() - began
    return Ran(row, before, _count(part.module), memory.peak(part), seconds), part


def _count(module: fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in module.graph.nodes)


def _row(one: Ran) -> Sequence[str]:
    if one.before is None or one.seconds is None:
        return (one.row.stage, one.row.name, one.decision or "–", "", "")
    changed = str(one.before) if one.before == one.after else f"{one.before} → {one.after}"
    size = "" if one.intermediates is None else draw.size(one.intermediates)
    return (one.row.stage, one.row.name, changed, size, f"{1e3 * one.seconds:.1f} ms")
