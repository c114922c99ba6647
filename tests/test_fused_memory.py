"""The memory of fused steps: what the gradient pass recomputes, the plan of generated code, and limits."""

from __future__ import annotations

import copy
import gc
import importlib.util
import itertools
import logging
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

import stepgraph as sg
from benchmarks.in_stepgraph import Stepgraph
from benchmarks.models import SMALL
from stepgraph.compiler import fused_memory, fusion, memory, phases, pipeline
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.modules import Module
from stepgraph.compiler.passes import absorbed, recompute, rewritten
from stepgraph.compiler.passes.in_place import out_of_place
from stepgraph.compiler.passes.minimum_cut import UNLIMITED, Network
from stepgraph.compiler.program import Notes, Part, PartName, Phase, fake, notes, storages
from stepgraph.compiler.step import Step
from stepgraph.compiler.verifier import check
from stepgraph.system import torch_private

OPTIONS = sg.GraphCompilationOptions
aten, later = torch.ops.aten, torch.ops.stepgraph.later.default
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler")


# The minimum cut


@pytest.mark.parametrize("seed", range(20))
def test_a_minimum_cut_costs_as_little_as_the_best_of_all(seed: int) -> None:
    draw, inner = random.Random(seed), list("abcdef")
    edges = {
        (start, end): draw.randint(0, 9)
        for start, end in itertools.permutations(["source", *inner, "sink"], 2)
        if draw.random() < 0.4 and start != "sink" and end != "source"
    }
    network = Network("source", "sink")
    for (start, end), capacity in edges.items():
        network.connect(start, end, capacity)

    def cost(behind: set[Any]) -> int:
        return sum(size for (start, end), size in edges.items() if start not in behind and end in behind)

    every = [{"sink", *some} for count in range(len(inner) + 1) for some in itertools.combinations(inner, count)]
    least = min(map(cost, every))
    found = network.behind_cut()
    assert cost(found) == least and "source" not in found
    assert all(found <= one for one in every if cost(one) == least)  # the closest to the sink


def test_edges_without_limit_are_not_cut() -> None:
    network = Network("source", "sink")
    for start, end, capacity in (("source", "a", 3), ("a", "b", UNLIMITED), ("b", "sink", 3), ("a", "sink", UNLIMITED)):
        network.connect(start, end, capacity)
    assert network.behind_cut() == {"a", "b", "sink"}


# What is recomputed


def lowered(part: Part, step: Step, limit: int | None = 1 << 40) -> Part:
    """The part after the rows for what a GPU's compiler gets; they only look at the graph."""
    part = replace(part, module=Module(part.module, copy.deepcopy(part.module.graph)))
    step = replace(step, device=torch.device("cuda"), memory_limit=limit)
    out_of_place(part.module.graph)
    for row in pipeline.rows(pipeline.LOWERED, step, None):
        row.run(part.module, step)
    return part


def settled(training: sg.TrainingGraph) -> tuple[Part, Step]:
    compiled = training.compilation
    step = replace(compiled.programs.program(training.declaration.feeds.batch).step, chooses_kernels=False)
    part = phases.whole(pipeline.program(step), compiled.kept())
    return part, step


def blocks(rows: int = 32, width: int = 16, depth: int = 2) -> sg.TrainingGraph:
    """A transformer without attention: each block a sum, a normalization, two products with GELU between them."""
    sg.set_seed(0)
    x, y, graph = sg.Tensor((rows, width)), sg.Tensor((rows, width)), sg.Graph()
    hidden = graph.node(sg.FullyConnectedLayer.create(width, width), x)
    for _ in range(depth):
        inner = graph.node(sg.LayerNormalizationLayer.create((width,)), hidden)
        inner = graph.node(
            sg.ActivationLayer.gelu(), graph.node(sg.FullyConnectedLayer.create(width, 4 * width), inner)
        )
        hidden = graph.add(hidden, graph.node(sg.FullyConnectedLayer.create(4 * width, width), inner))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    return training


def crossing(part: Part) -> int:
    """Bytes that the forward pass leaves for the gradient pass."""
    sizes: dict[int, int] = {}
    given = {one for node in part.placeholders for one in storages(node)}
    for node in part.nodes:
        if notes(node).phase is Phase.FORWARD and any(
            user.op == "call_function" and notes(user).phase is not Phase.FORWARD for user in node.users
        ):
            sizes |= {one: size for one, size in memory.sizes(node).items() if one not in given}
    return sum(sizes.values())


def test_activations_are_recomputed_and_residual_sums_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbed, "SMALL", 1 << 10)
    training = blocks()
    training.compile(sg.Device.cpu(), OPTIONS.DETERMINISTIC)
    part, step = settled(training)
    after = lowered(part, step)
    check(after, part.results)
    again = [node.target for node in after.nodes if notes(node).recomputed]
    assert again.count(aten.gelu.default) == 2  # from its source, which its own gradient reads
    assert aten.add.Tensor not in again  # it would need the sum before it, and that one the sum before it
    assert not any("mm" in str(target) for target in again)
    held_back = [node for node in after.nodes if node.target is later]
    assert held_back and all(notes(node.args[1]).phase is Phase.GRADIENT for node in held_back)
    assert crossing(after) == crossing(part) - 2 * 32 * 64 * 4


def test_small_arrays_are_not_worth_it() -> None:
    training = blocks()
    training.compile(sg.Device.cpu(), OPTIONS.DETERMINISTIC)
    part, step = settled(training)
    assert not any(notes(node).recomputed for node in lowered(part, step).nodes)


def ran(part: Part, arrays: list[torch.Tensor]) -> list[torch.Tensor]:
    """Results and inputs after a run; stepgraph's own operators run as they are."""
    copies = [array.clone() for array in arrays]
    with torch.no_grad():
        found = fx.Interpreter(part.module).run(*copies)
    return [*found, *copies]


@pytest.mark.parametrize(("name", "saves"), [("cnn", False), ("transformer", True)])
def test_recomputed_steps_give_the_same_bits(name: str, saves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbed, "SMALL", 1 << 8)
    monkeypatch.setattr(rewritten, "SHARE", 1.0)
    monkeypatch.setattr(rewritten, "ENOUGH", 0)
    part, step = settled(Stepgraph(SMALL[name], "cpu", dropout=True).training)
    draw = torch.Generator().manual_seed(0)
    arrays = [_like(fake(node), draw) for node in part.placeholders]
    expected = ran(part, arrays)
    for limit in (1 << 40, None):
        after = lowered(part, step, limit)
        check(after, part.results)
        assert any(notes(node).recomputed for node in after.nodes) is saves
        assert crossing(after) < crossing(part) if saves else crossing(after) == crossing(part)
        for one, other in zip(expected, ran(after, arrays), strict=True):
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def _like(array: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    if not array.is_floating_point():
        return torch.ones(array.shape, dtype=array.dtype)
    return torch.rand(array.shape, generator=draw).to(array.dtype)


def test_recomputation_for_a_limit_stays_apart_from_the_originals() -> None:
    training = blocks()
    training.compile(sg.Device.cpu(), OPTIONS.DETERMINISTIC)
    part, step = settled(training)
    limited = replace(step, memory_limit=int(0.8 * training.memory_plan.total))
    fitted = pipeline.settled(part, limited, PartName.STEP)
    again = sum(notes(node).recomputed for node in fitted.nodes)
    assert again and fitted.unlimited is not None
    assert [node.format_node() for node in fitted.unlimited.nodes] == [node.format_node() for node in part.nodes]
    after = lowered(fitted, step)
    check(after, part.results)
    assert sum(notes(node).recomputed for node in after.nodes) >= again
    assert any(node.target is later for node in after.nodes)
    segments = recompute.fit(step, part, 1)  # as little memory as possible: products are recomputed, too
    assert crossing(lowered(segments, step)) == crossing(segments) < crossing(part)


# The plan of generated code

GENERATED = """
def call(args):
    a, b = args
    args.clear()
    assert_size_stride(a, (256, 64), (64, 1))
    buf0 = empty_strided_cpu((256, 64), (64, 1), torch.float32)
    # Topologically Sorted Source Nodes: [add], Original ATen: [aten.add]
    cpp_fused_add_0(a, buf0)
    buf1 = empty_strided_cpu((256, 32), (32, 1), torch.float32)
    # Topologically Sorted Source Nodes: [mm], Original ATen: [aten.mm]
    extern_kernels.mm(buf0, b, out=buf1)
    del buf0
    # Topologically Sorted Source Nodes: [sort], Original ATen: [aten.sort]
    buf2 = torch.ops.aten.sort.default(reinterpret_tensor(buf1, (32, 256), (1, 32), 0))
    buf3 = buf2[1]
    del buf2
    buf4 = buf1; del buf1  # reuse
    # Topologically Sorted Source Nodes: [mul], Original ATen: [aten.mul]
    triton_fused_mul_1.run(buf4, buf3, 8192, stream=0)
    del buf3
    return (buf4,)
"""


def generated(folder: Path, source: str) -> ModuleType:
    """As PyTorch's compiler writes it; a kernel that ran would raise."""
    (folder / "generated.py").write_text(source)
    spec = importlib.util.spec_from_file_location("generated", folder / "generated.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    unused = ("assert_size_stride", "empty_strided_cpu", "reinterpret_tensor", "cpp_fused_add_0")
    vars(module).update(dict.fromkeys(unused, _not_called), torch=torch, extern_kernels=torch)
    vars(module)["triton_fused_mul_1"] = type("Kernel", (), {"run": _not_called})()
    spec.loader.exec_module(module)
    return module


def _not_called(*_: Any) -> None:
    raise AssertionError("this needs memory")


def test_the_memory_of_generated_code_is_what_it_allocates(tmp_path: Path) -> None:
    known = {
        "add": Notes("first", Phase.FORWARD),
        "mm": Notes("second", Phase.FORWARD),
        "sort": Notes("second", Phase.GRADIENT),
        "mul": Notes("first", Phase.GRADIENT),
    }
    with torch_private.FakeTensorMode():
        arrays = [torch.empty(256, 64), torch.empty(64, 32)]
    live = fused_memory.timeline(generated(tmp_path, GENERATED), arrays, known)
    found = [(layer, phase, {kind: size for kind, size in kinds.items() if size}) for layer, phase, kinds in live]
    large, small = 256 * 64 * 4, 256 * 32 * 4
    assert found[0] == ("first", Phase.FORWARD, {"activations": large})
    assert ("second", Phase.FORWARD, {"activations": large + small}) in found
    # sorted numbers and their indices; only the latter are read
    assert ("second", Phase.GRADIENT, {"activations": small, "gradients": 3 * small}) in found
    assert found[-1] == ("first", Phase.GRADIENT, {"activations": small})
    assert max(sum(kinds.values()) for _, _, kinds in found) == 4 * small


def test_code_of_another_kind_leaves_the_plan_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training = blocks()
    training.compile(sg.Device.cpu(), OPTIONS.DETERMINISTIC)
    part, _ = settled(training)
    monkeypatch.setattr(torch_private, "generated_module", lambda one: one)
    code = generated(tmp_path, "def call(args):\n    return reserve(args)\n")
    arrays = [fake(node) for node in part.placeholders]
    assert fusion._timeline(part.module, [arrays], [code]) is None
    assert "remains that of unfused operators" in caplog.text


def test_a_plan_is_computed_by_one_of_several_threads() -> None:
    computed: list[int] = []

    def compute() -> MemoryPlan:
        computed.append(1)
        time.sleep(0.2)
        return MemoryPlan(activations=3)

    plan = fusion._Once(compute)
    with ThreadPoolExecutor(4) as threads:
        found = [one.result() for one in [threads.submit(plan) for _ in range(4)]]
    assert computed == [1] and found == [MemoryPlan(activations=3)] * 4


# Limits


def limited(monkeypatch: pytest.MonkeyPatch, needed: Callable[[Part], int]) -> tuple[sg.TrainingGraph, list[Part]]:
    """A graph with a limit that its operators meet by recomputation, and a compiler that needs what is asked for."""
    tried: list[Part] = []

    def compiled(part: Part, step: Step, *_: object) -> fusion.Fused:
        tried.append(part)
        if step.memory_limit is not None and needed(part) > step.memory_limit:
            raise fusion.TooLarge("fused, it would need too much")
        return fusion.Fused(lambda *arrays: fx.Interpreter(part.module).run(*arrays), lambda: MemoryPlan(activations=5))

    monkeypatch.setattr(fusion, "_fused", compiled)
    training = blocks()
    training.compile(sg.Device.cpu(), OPTIONS.DETERMINISTIC)
    training.compile(sg.Device.cpu(), OPTIONS.FUSE_LAYERS, memory_limit=int(0.9 * training.memory_plan.total))
    return training, tried


def first_loss(training: sg.TrainingGraph) -> float:
    draw = np.random.default_rng(0)
    x, y = (draw.standard_normal((32, 16)).astype(np.float32) for _ in range(2))
    return float(training.execute({"x": x}, {"y": y}).loss)


def test_a_fused_step_that_fits_recomputes_only_what_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    training, tried = limited(monkeypatch, lambda part: 0)
    assert len(tried) == 1 and not any(notes(node).recomputed for node in tried[0].nodes)
    assert training.memory_plan == MemoryPlan(activations=5)
    assert np.isfinite(first_loss(training))


def test_a_fused_step_that_does_not_fit_recomputes_what_the_limit_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    training, tried = limited(monkeypatch, lambda part: 0 if part.unlimited is not None else 1 << 40)
    (executable,) = training.compilation.programs.executables.values()
    assert len(tried) == 2 and executable.is_fused
    assert any(notes(node).recomputed for node in tried[1].nodes)


def test_a_fused_step_that_never_fits_stays_unfused_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        training, tried = limited(monkeypatch, lambda part: 1 << 40)
    (executable,) = training.compilation.programs.executables.values()
    assert len(tried) == 2 and not executable.is_fused
    assert "operators remain unfused: fused, it would need too much" in caplog.text
    assert training.memory_plan.total <= (training.compilation.settings.memory_limit or 0)
    plain = blocks()
    plain.compile(sg.Device.cpu(), OPTIONS.DETERMINISTIC)
    assert first_loss(training) == pytest.approx(first_loss(plain), rel=1e-5)


def test_passes_with_a_limit_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    training, tried = limited(monkeypatch, lambda part: 0)
    training.compile(memory_limit=10 * training.memory_plan.total + 10**7, fuse=True)
    tried.clear()
    draw = np.random.default_rng(0)
    training.execute_forward(
        {"x": draw.standard_normal((32, 16)).astype(np.float32)},
        {"y": draw.standard_normal((32, 16)).astype(np.float32)},
    )
    assert not tried


@pytest.mark.deep
@needs_compiler
def test_fused_steps_with_a_limit_keep_it_and_give_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PyTorch's compiler: what is recomputed stays recomputed in the code that it generates."""
    monkeypatch.setattr(absorbed, "SMALL", 1 << 10)
    shape = 256, 64, 5
    plain, free, small = blocks(*shape), blocks(*shape), blocks(*shape)
    plain.compile(sg.Device.cpu(), OPTIONS.DETERMINISTIC)
    free.compile(sg.Device.cpu(), OPTIONS.FUSE_LAYERS)  # without a limit, nothing is recomputed on the CPU
    limit = free.memory_plan.total - int(0.3 * free.memory_plan.intermediates)
    small.compile(sg.Device.cpu(), OPTIONS.FUSE_LAYERS, memory_limit=limit)
    (executable,) = small.compilation.programs.executables.values()
    assert executable.is_fused and small.memory_plan.total <= limit
    draw = np.random.default_rng(0)
    x, y = (draw.standard_normal((256, 64)).astype(np.float32) for _ in range(2))
    losses = [[float(one.execute({"x": x}, {"y": y}).loss) for _ in range(10)] for one in (plain, free, small)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-4)
    part, step = settled(small)
    segments = recompute.fit(step, part, 1)  # as little memory as possible: products are recomputed, too
    tight = fusion.fuse(segments, replace(step, memory_limit=1 << 40)).plan()
    assert tight is not None and tight.intermediates < small.memory_plan.intermediates


def settled_memory() -> int:
    """Bytes that stay allocated on the GPU, without garbage of earlier tests that might be freed at any time."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_the_plan_of_a_fused_step_is_what_the_allocator_measures(dropout: float) -> None:
    sg.set_seed(0)
    rows, width = 1 << 15, 1024
    x, y, graph = sg.Tensor((rows, width)), sg.Tensor((rows, width)), sg.Graph()
    hidden = x
    for _ in range(4):
        inner = graph.node(sg.LayerNormalizationLayer.create((width,)), hidden)
        inner = graph.node(
            sg.ActivationLayer.gelu(), graph.node(sg.FullyConnectedLayer.create(width, 4 * width), inner)
        )
        inner = graph.node(sg.DropoutLayer(dropout), inner) if dropout else inner
        hidden = graph.add(hidden, graph.node(sg.FullyConnectedLayer.create(4 * width, width), inner))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=1e-3))
    training.add_inputs({"x": x}, {"y": y})
    data = {"x": torch.randn(rows, width, device="cuda")}, {"y": torch.randn(rows, width, device="cuda")}
    start = settled_memory()
    training.compile("cuda", compute_type="bfloat16", fuse=False)
    unfused = training.memory_plan.total
    plain = [float(training.execute(*data).loss) for _ in range(3)]
    training.compile("cuda", compute_type="bfloat16", fuse=True, memory_limit=unfused)
    fused = [float(training.execute(*data).loss)]  # Triton tries block sizes in this call, with arrays of its own
    between = settled_memory()
    torch.cuda.reset_peak_memory_stats()
    fused += [float(training.execute(*data).loss) for _ in range(2)]
    peak, plan = torch.cuda.max_memory_allocated(), training.memory_plan
    assert plan.intermediates == pytest.approx(peak - between, rel=0.02)
    assert plan.total == pytest.approx(peak - start, rel=0.05)  # with cuBLAS's workspaces, which no plan contains
    assert plan.total <= unfused
    assert np.isfinite([*plain, *fused]).all()
