"""Updates merged into few launches, and updates that read gradients in half precision: the same bits, no more memory.

The passes run on CUDA. Here they run on the CPU, with the rule's own operators in the place of kernels.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import memory, pipeline, walk
from stepgraph.compiler.kernels import update_kernel
from stepgraph.compiler.kernels.update import TOGETHER, Recorded, named, reference, update
from stepgraph.compiler.kernels.update_kernel import Update
from stepgraph.compiler.passes import merge_updates
from stepgraph.compiler.passes.half_gradients import read_half
from stepgraph.compiler.program import Part, PartName, fake, notes
from stepgraph.compiler.verifier import check
from stepgraph.graphs import compilation
from stepgraph.system import torch_private

KERNELS = sys.modules[update.__module__]
UPDATE = torch.ops.stepgraph.update_by_rule_.default
ROWS = ("merge updates", "update from half precision")
CPU, OPTIONS, DEPTH = sg.Device.cpu(), sg.GraphCompilationOptions, 4
X = np.random.default_rng(0).standard_normal((256, 8)).astype(np.float32)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Update]:
    """Updates as on CUDA: recorded as operators with kernels, those of single parameters as soon as possible."""
    monkeypatch.setattr(KERNELS, "AS_ONE", {"cpu"})
    monkeypatch.setattr(KERNELS, "FUSED", {})
    monkeypatch.setattr(KERNELS, "_rules", lambda optimizer, arrays, *_: ["its code"] * len(arrays.parameters))
    monkeypatch.setattr(compilation, "ROUNDED", {"cpu"})
    monkeypatch.setattr(walk, "SMALL", 9)
    monkeypatch.setattr(merge_updates, "MANY", 3)
    found: list[Update] = []

    def launch(arrays: Update, rules: Any, norms: Any) -> None:
        found.append(arrays)
        optimizer = USED[-1]
        names = [name for name in vars(named(optimizer, torch.zeros(len(optimizer.columns)))) if name != TOGETHER]
        reference(optimizer, arrays, SimpleNamespace(**dict(zip(names, arrays.numbers.unbind(), strict=True))))

    monkeypatch.setattr(KERNELS, "launch", launch)
    return found


def with_rows(names: tuple[str, ...]) -> tuple[pipeline.Pass, ...]:
    """The table of passes, in which some rows always apply."""
    return tuple(replace(row, applies=lambda *_: True) if row.name in names else row for row in pipeline.TABLE)


def adamw(**settings: Any) -> sg.Optimizer:
    return sg.AdamWOptimizer(0.05, weight_decay=0.1, **settings)


USED: list[sg.Optimizer] = []


def network(
    kind: str | None = None,
    optimizer: sg.Optimizer | None = None,
    rows: int = len(X),
    device: sg.Device | None = None,
    options: OPTIONS = OPTIONS.DETERMINISTIC,
    **settings: Any,
) -> sg.TrainingGraph:
    sg.set_seed(3)
    USED.append(optimizer or adamw())
    x, y, graph = sg.Tensor((rows, 8)), sg.Tensor((rows, 8)), sg.Graph()
    hidden = x
    for _ in range(DEPTH):
        hidden = graph.node(sg.ActivationLayer.tanh(), graph.node(sg.FullyConnectedLayer.create(8, 8), hidden))
    for _ in range(2):  # the peak comes before the first update
        hidden = graph.node(sg.ActivationLayer.tanh(), hidden)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), USED[-1], **settings)
    training.add_inputs({"x": x}, {"y": y})
    training.compile(device or CPU, options, compute_type=kind)
    return training


def whole(training: sg.TrainingGraph) -> float:
    return training.execute({"x": X}, {"y": X[::-1].copy()}).loss


def phases(training: sg.TrainingGraph) -> float:
    tensors = {**training.inputs, **training.loss_labels}
    training.bind_and_write_data({"x": X, "y": X[::-1].copy()}, tensors, CPU)
    loss = training.execute_forward().loss
    training.execute_gradient()
    training.execute_optimizer_update()
    return loss


def trained(make: Callable[[], sg.TrainingGraph], step: Callable[[sg.TrainingGraph], float]) -> list[np.ndarray]:
    """Everything that four steps leave behind."""
    training = make()
    losses = [step(training) for _ in range(4)]
    state = training.session.state
    assert state is not None
    arrays = [*state.arrays.values(), *training.state_dict().values()]
    return [np.array(losses), *(array.detach().float().cpu().numpy().copy() for array in arrays)]


MADE: dict[str, Callable[[], sg.TrainingGraph]] = {
    "plain": lambda: network("bfloat16"),
    "average": lambda: network("bfloat16", average=0.9),
    "groups": lambda: network("bfloat16", adamw(groups=sg.DECAY_MATRICES_ONLY)),
    "global norm": lambda: network("bfloat16", adamw(clip_norm=0.1)),
    "one row": lambda: network(rows=1),
}
SLOW = [("plain", whole), ("global norm", whole), ("average", phases), ("groups", phases)]
CASES = [("average", whole), ("groups", whole), *(pytest.param(*case, marks=pytest.mark.deep) for case in SLOW)]


@pytest.mark.parametrize(("name", "step"), CASES)
def test_merged_updates_compute_the_same_bits(
    name: str, step: Any, launched: list[Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, single = trained(MADE[name], step), len(launched)
    launched.clear()
    monkeypatch.setattr(pipeline, "TABLE", with_rows(ROWS))
    found = trained(MADE[name], step)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    kinds = 2 if name == "groups" else 1
    assert len(launched) == 4 * kinds and (name == "global norm" or single == 4 * (DEPTH + 1))


@cache
def part_of(name: str) -> Part:
    """A whole step, before its updates are merged."""
    (executable,) = MADE[name]().compilation.programs.executables.values()
    return executable.part


def updates(part: Part) -> list[int]:
    return [len(node.args[0]) for node in part.nodes if node.target is UPDATE]


@pytest.mark.parametrize("name", ["plain", "average", "groups"])
def test_merged_updates_need_no_more_memory(name: str, launched: list[Update]) -> None:
    part = part_of(name)
    merged = merge_updates.merge_updates(part)
    check(merged, part.results)
    assert memory.peak(merged) <= memory.peak(part)
    assert set(merged.written) == set(part.written)
    assert sum(updates(merged)) == sum(updates(part)) == 2 * DEPTH
    assert all(notes(node).layer == "optimizer" for node in merged.nodes if node.target is UPDATE)


def test_updates_do_not_wait_where_that_would_need_memory(launched: list[Update]) -> None:
    part = part_of("one row")  # gradients are larger than activations
    merged = merge_updates.merge_updates(part)
    assert memory.peak(merged) <= memory.peak(part)
    assert len(updates(merged)) > 1


def test_updates_wait_only_until_there_is_enough(launched: list[Update], monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_of("plain")
    monkeypatch.setattr(merge_updates, "ENOUGH", 2 * 64)
    assert updates(merge_updates.merge_updates(part)) == [2, 2, DEPTH]
    monkeypatch.setattr(merge_updates, "MANY", 2 * DEPTH)
    assert merge_updates.merge_updates(part) is part  # few parameters are left to the compiler


def test_updates_do_not_pass_what_they_depend_on(launched: list[Update]) -> None:
    part = read_half(part_of("average"))  # a copy
    first, second, *_ = [node for node in part.nodes if node.target is UPDATE]
    second.update_arg(1, [first.args[0][0]])  # reads what the first one writes
    merged = merge_updates.merge_updates(part)
    assert updates(merged)[0] == 1
    averages = [node.target for node in merged.nodes if node.target in (UPDATE, torch.ops.aten.lerp_.Tensor)]
    assert averages[:2] == [UPDATE, torch.ops.aten.lerp_.Tensor]  # what follows the first one stays behind it
    assert averages.count(torch.ops.aten.lerp_.Tensor) == 2 * DEPTH


def test_buffers_of_merged_updates_are_ordered_by_slot() -> None:
    first = Recorded(["p"], ["g"], ["m", "v"], ["h"], "numbers", None, None, 3, "names", ["rule"])
    second = Recorded(["P", "Q"], ["G", "H"], ["M", "N", "V", "W"], ["I", "J"], *first[4:9], ["other", "rule"])
    joined = merge_updates._joined([first, second])
    assert joined[:4] == (["p", "P", "Q"], ["g", "G", "H"], ["m", "M", "N", "v", "V", "W"], ["h", "I", "J"])
    assert joined[4:] == (*first[4:9], ["rule", "other", "rule"])


def test_updates_read_gradients_as_they_were_computed(launched: list[Update]) -> None:
    plain = part_of("plain")
    half = read_half(plain)
    check(half, plain.results)
    assert casts(plain) - casts(half) == DEPTH  # those of weights
    for node in half.nodes:
        for gradient in node.args[1] if node.target is UPDATE else ():
            assert fake(gradient).dtype is (torch.bfloat16 if fake(gradient).ndim > 1 else torch.float32)
    assert memory.peak(half) <= memory.peak(plain)


def casts(part: Part) -> int:
    return sum(node.target is torch_private.to_copy.default for node in part.nodes)


def test_gradients_that_are_measured_stay_in_float32(launched: list[Update], monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = sg.OptimizerDescriptor(
        0.05, applies_gradient_clipping=True, gradient_clipping_type=sg.GradientClippingType.BY_NORM,
        maximum_clipping_norm=0.1,
    )  # fmt: skip
    monkeypatch.setitem(MADE, "norms", lambda: network("bfloat16", sg.AdamWOptimizer(descriptor)))
    part = read_half(part_of("norms"))
    read = [fake(one).dtype for node in part.nodes if node.target is UPDATE for one in node.args[1]]
    assert read and set(read) == {torch.float32}


def test_a_step_with_a_memory_limit_updates_early() -> None:
    rows = {row.name: row for row in pipeline.TABLE}
    step = SimpleNamespace(device=torch.device("cuda"), memory_limit=None)
    assert rows["merge updates"].applies(step, PartName.STEP)  # type: ignore[arg-type]
    step.memory_limit = 1 << 30
    assert not rows["merge updates"].applies(step, PartName.STEP)  # type: ignore[arg-type]
    assert rows["update from half precision"].applies(step, PartName.STEP)  # type: ignore[arg-type]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks of each launch on a GPU, where few small parameters are updated as many large ones are."""
    found: list[int] = []

    def launch(kernel: Any, blocks: int, *rest: Any) -> None:
        found.append(blocks)
        torch_private.launch_cuda(kernel, blocks, *rest)

    for module in (KERNELS, merge_updates):
        monkeypatch.setattr(module, "MANY", 3)
    monkeypatch.setattr(walk, "SMALL", 9)
    monkeypatch.setattr(update_kernel, "launch_cuda", launch)
    return found


@pytest.mark.gpu
def test_merged_updates_compute_the_same_bits_on_a_gpu(few: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> sg.TrainingGraph:
        return network("bfloat16", average=0.9, device=sg.Device.gpu())

    merged, launches = trained(make, whole), len(few)
    few.clear()
    monkeypatch.setattr(pipeline, "TABLE", tuple(row for row in pipeline.TABLE if row.name not in ROWS))
    for ours, theirs in zip(merged, trained(make, whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert launches == 2 * 2 and len(few) == 2 * (
        DEPTH + 1
    )  # gradients in two types; in the first call and the capture


@pytest.mark.gpu
def test_fused_steps_merge_updates(few: list[int]) -> None:
    def losses(options: OPTIONS) -> list[float]:
        training = network("bfloat16", device=sg.Device.gpu(), options=options)
        return [whole(training) for _ in range(8)]

    expected = losses(OPTIONS.DETERMINISTIC)
    few.clear()
    np.testing.assert_allclose(losses(OPTIONS.FUSE_LAYERS), expected, rtol=2e-2)
    assert 0 < len(few) < 2 * (DEPTH + 1)  # in the first call and the capture
