"""The table of passes: programs are valid after every row, each row can be looked at, and an invalid one is found."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from benchmarks.in_stepgraph import Stepgraph
from benchmarks.models import FURTHER, SMALL
from stepgraph.compiler import memory, phases, pipeline
from stepgraph.compiler.modules import Module
from stepgraph.compiler.program import Part, PartName, Phase, note, notes
from stepgraph.compiler.step import Fusion, Step
from stepgraph.compiler.trace import trace
from stepgraph.compiler.verifier import check
from tests.fuzz.build import Built
from tests.fuzz.generate import generate

CPU = sg.Device.cpu()
LONG = dict.fromkeys(("resnet18", *FURTHER), pytest.mark.deep)


def parts(step: Step, name: PartName) -> Iterator[tuple[str, Part, Part]]:
    """A part after each row that applies: the row's name, the part before it, the part after it."""
    program = trace(step)
    every = list(program.outputs)
    for row in pipeline.rows(pipeline.RECORDED, step, name):
        before = phases.whole(program, every)
        row.run(program.module, step)
        program = program.refreshed()
        yield row.name, before, phases.whole(program, every)
    part = phases.whole(program, every)
    for row in pipeline.rows(pipeline.PART, step, name):
        before, part = part, row.run(part, step)
        yield row.name, before, part


def valid(step: Step, name: PartName = PartName.STEP) -> list[str]:
    ran = []
    for row, before, after in parts(step, name):
        check(after, before.results)
        ran.append(row)
    return ran


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in SMALL])
def test_programs_are_valid_after_every_row_for_models(name: str) -> None:
    training = Stepgraph(SMALL[name], "cpu", dropout=True).training
    step = training.compilation.programs.program(training.declaration.feeds.batch).step
    ran = valid(step)
    assert ran[0] == "remove no-ops and duplicates" and ran[-1] == "keep memory between steps"


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_programs_are_valid_where_results_are_computed_again(name: str) -> None:
    training = Stepgraph(SMALL[name], "cpu", dropout=True).training
    step = training.compilation.programs.program(training.declaration.feeds.batch).step
    limit = int(0.8 * training.memory_plan.total)
    assert "recompute to fit the memory limit" in valid(replace(step, memory_limit=limit))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(3, 6))])
def test_programs_are_valid_after_every_row_for_random_graphs(seed: int) -> None:
    for training in Built(generate(seed, images=seed % 2 == 0)).trainings:
        step = training.compilation.programs.program(training.declaration.feeds.batch).step
        valid(step)
        valid(replace(step, chooses_kernels=False, channels_last=True))


def described(part: Part) -> list[Any]:
    """What a part consists of."""
    return [part.held, part.inputs, part.outputs, *((node.format_node(), notes(node)) for node in part.nodes)]


def deep() -> sg.TrainingGraph:
    """Wide layers behind each other, of which much can be computed again."""
    x, y, graph = sg.Tensor((512, 16)), sg.Tensor((512, 16)), sg.Graph()
    hidden = x
    for _ in range(4):
        hidden = graph.node(sg.ActivationLayer.sigmoid(), graph.node(sg.FullyConnectedLayer.create(16, 16), hidden))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    return training


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("limited", [False, True])
def test_passes_do_the_same_to_one_copy_as_to_copies_of_their_own(limited: bool, kind: str) -> None:
    training = deep()
    step = training.compilation.programs.program(512).step
    recorded = phases.whole(pipeline.program(step), training.compilation.kept())
    limit = int(0.8 * training.memory_plan.total) if limited else None
    step = replace(step, device=torch.device(kind), memory_limit=limit)
    before = described(recorded)
    settled, apart = pipeline.settled(recorded, step, PartName.STEP), recorded
    assert described(recorded) == before
    for row in pipeline.rows(pipeline.PART, step, PartName.STEP):
        earlier, known = apart, described(apart)
        apart = row.run(apart, step)
        assert described(earlier) == known
    assert described(settled) == described(apart) != before
    assert not settled.is_draft
    assert settled.unlimited is None or described(settled.unlimited) == described(apart.unlimited)
    assert limited == (settled.unlimited is not None) == (apart.unlimited is not None)


def fused(part: Part, step: Step) -> Iterator[tuple[str, Part]]:
    part = replace(part, module=Module(part.module, copy.deepcopy(part.module.graph)))
    for row in pipeline.rows(pipeline.FUSED, step, PartName.STEP):
        row.run(part.module, step)
        yield row.name, part


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in SMALL])
def test_the_law_holds_after_fused_rows(name: str, kind: str) -> None:
    """The rows for a GPU, too: they only look at the graph."""
    training = Stepgraph(SMALL[name], "cpu", dropout=False).training
    step = replace(training.compilation.programs.program(training.declaration.feeds.batch).step, chooses_kernels=False)
    part = pipeline.settled(phases.whole(pipeline.program(step), training.compilation.kept()), step, None)
    before, ran = part.results, []
    for row, after in fused(part, replace(step, device=torch.device(kind), fusion=Fusion.FIRST)):
        check(after, before, is_fused=True)
        ran.append(row)
    last = "pass optimizer buffers beside the compiler" if kind == "cuda" else "expand updates"
    assert ran[0] == "write out of place" and ran[-1] == last


def small() -> tuple[sg.TrainingGraph, Part]:
    x, y, graph = sg.Tensor((4, 3)), sg.Tensor((4, 2)), sg.Graph()
    graph.node(sg.ActivationLayer.relu(), graph.node(sg.FullyConnectedLayer.create(3, 2), x))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    program = training.compilation.programs.program(4)
    return training, phases.whole(program, list(program.outputs))


def test_broken_laws_are_found() -> None:
    _, part = small()
    check(part)
    operator = next(node for node in part.nodes if notes(node).phase is Phase.FORWARD and node.users)
    known = notes(operator)
    note(operator, layer="")
    with pytest.raises(AssertionError, match="has no layer or phase"):
        check(part)
    note(operator, layer=known.layer, phase=Phase.UPDATE)
    with pytest.raises(AssertionError, match="from a later phase"):
        check(part)
    note(operator, phase=known.phase)
    with part.module.graph.inserting_after(operator):
        unread = part.module.graph.call_function(torch.ops.aten.neg.default, (operator,))
    with pytest.raises(AssertionError, match="nothing reads it"):
        check(part)
    part.module.graph.erase_node(unread)
    check(part)
    relu = next(node for node in part.nodes if node.target is torch.ops.aten.relu.default)
    note(relu, in_place=True)
    with part.module.graph.inserting_after(relu):
        late = part.module.graph.call_function(torch.ops.aten.add.Tensor, (relu.args[0], relu))
    with pytest.raises(AssertionError, match="has overwritten"):
        check(part)
    part.module.graph.erase_node(late)
    note(relu, in_place=False)
    with pytest.raises(AssertionError, match=r"was torch\.float32 \[7\]"):
        check(part, dict.fromkeys(part.outputs, torch.empty(7)))


def test_results_that_share_held_memory_are_found() -> None:
    _, part = small()
    births, _ = memory.lifetimes(part)
    nodes = list(part.module.graph.nodes)
    for one, (birth, *_) in list(births.items())[:2]:
        note(nodes[birth], offsets={one: 0})
    with pytest.raises(AssertionError, match="share held memory"):
        check(replace(part, held=1 << 10))


def test_the_pipeline_of_a_graph_is_printed() -> None:
    training, _ = small()
    shown = str(training.pipeline)
    assert [row.row.name for row in training.pipeline.ran] == [row.name for row in pipeline.TABLE]
    assert "remove no-ops and duplicates" in shown and "write in place" in shown and " ms" in shown and " → " in shown
    never = next(one for one in training.pipeline.ran if one.row.stage is pipeline.FUSED)
    assert never.before is None  # nothing is fused on the CPU unless it is asked for
    training.compile(CPU, sg.GraphCompilationOptions.FUSE_LAYERS)
    ran = [one for one in training.pipeline.ran if one.row.stage is pipeline.FUSED and one.before is not None]
    assert ran and all(one.seconds is not None and one.seconds >= 0 for one in ran)
    inference = sg.InferenceGraph([training])
    with pytest.raises(sg.StateError, match="not compiled"):
        _ = inference.pipeline
    inference.compile(CPU)
    assert "remove no-ops and duplicates" in str(inference.pipeline)


def test_the_page_on_the_architecture_has_the_table() -> None:
    page = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
    told = re.findall(r"^\| (step|recorded|part|fused|lowered) \| (.*?) \|", page, re.MULTILINE)
    assert told == [(row.stage, row.name) for row in pipeline.TABLE]


def test_an_operator_recorded_outside_of_any_phase_is_found() -> None:
    _, part = small()
    module = make_fx(torch.relu, tracing_mode="fake")(torch.ones(2))
    step = next(row for row in pipeline.TABLE if row.name == "remove no-ops and duplicates")
    with pytest.raises(AssertionError, match="recorded outside any phase"):
        step.run(module, None)
    step.run(part.module, None)


class WritesElsewhere(sg.Layer):
    """Operators that write into memory that is not their first argument."""

    def forward(self, x: torch.Tensor, *, scope: Any) -> torch.Tensor:
        half, most = torch.empty_like(x), x.new_empty(len(x))
        torch.div(x, 2, out=half)
        torch.sub(half, 1, out=half)
        torch.amax(half, 1, out=most)
        return half + torch.add(x, most[:, None], out=torch.empty_like(x))


def test_results_written_elsewhere_are_those_that_are_read() -> None:
    x, y = sg.Tensor((4, 3)), sg.Tensor((4, 3))
    rows = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    half = rows / 2 - 1
    wanted = half + rows + half.max(1, keepdims=True)
    inference = sg.InferenceGraph()
    inference.node(WritesElsewhere(), x)
    inference.add_inputs({"x": x})
    inference.compile("cpu")
    np.testing.assert_allclose(inference.execute({"x": rows}).result, wanted, rtol=1e-6)
    graph = sg.Graph()
    scaled = graph.node(WritesElsewhere(), x)
    graph.node(sg.FullyConnectedLayer.create(3, 3), scaled)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.add_outputs({"scaled": scaled})
    training.compile("cpu")
    for _ in range(2):
        np.testing.assert_allclose(training.execute({"x": rows}, {"y": rows})["scaled"], wanted, rtol=1e-6)
