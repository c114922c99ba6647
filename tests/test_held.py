"""Memory held for results: two of them never overlap, numbers stay, and the plan knows of it."""

import copy
import platform
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from stepgraph.compiler.passes import held
from stepgraph.compiler.program import PartName, note, notes, storages
from tests.parallel_runs import together
from tests.test_memory import measured_peak, nothing_collected

OPTIONS = sg.GraphCompilationOptions
BATCH, WIDTH = 256, 512


@pytest.fixture(autouse=True)
def _at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "WORTH", 1.5)


def network(options: OPTIONS = OPTIONS.NONE, **settings: Any) -> sg.TrainingGraph:
    """Fully connected layers whose results are half a megabyte each."""
    sg.set_seed(1)
    x, y = sg.Tensor((BATCH, 64)), sg.Tensor((BATCH,), "int64")
    graph = sg.Graph()
    z = graph.node(sg.FullyConnectedLayer.create(64, WIDTH), x)
    for _ in range(6):
        hidden = graph.node(sg.FullyConnectedLayer.create(WIDTH, WIDTH), graph.node(sg.ActivationLayer.gelu(), z))
        z = graph.node(sg.ArithmeticLayer.add(), hidden, z)
    graph.node(sg.FullyConnectedLayer.create(WIDTH, 10), z)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-3))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), options, **settings)
    return training


def step(training: sg.TrainingGraph, rows: int = BATCH) -> float:
    generator = np.random.default_rng(rows)
    data = {"x": generator.standard_normal((rows, 64), np.float32)}, {"y": generator.integers(0, 10, rows)}
    return training.execute(*data, batch_size=rows).loss


def bytes_held(training: sg.TrainingGraph, rows: int = BATCH) -> int:
    return training.compilation.programs.executable(PartName.STEP, rows).part.held


LIVES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 15), st.integers(1, 9)).map(
        lambda life: held._Life(SimpleNamespace(), 0, life[0], life[0] + life[1], 64 * life[2])  # type: ignore[arg-type]
    ),
    max_size=25,
)


def no_processor() -> str:
    """The name of one for which nothing competes with PyTorch's operators: not all alternatives write into memory."""
    return "none"


@given(LIVES)
def test_what_lives_at_the_same_time_lies_apart(lives: list[held._Life]) -> None:
    allocated = list(zip(lives, held._offsets(lives), strict=True))
    for i, (one, offset) in enumerate(allocated):
        for other, there in allocated[:i]:
            apart = offset + one.size <= there or there + other.size <= offset
            assert apart or one.death < other.birth or other.death < one.birth


def test_a_step_computes_the_same_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = network()
    assert bytes_held(holding) > held.LEAST / 4
    monkeypatch.setattr(held, "LARGE", 1 << 40)
    plain = network()
    assert bytes_held(plain) == 0
    assert [step(holding) for _ in range(6)] == [step(plain) for _ in range(6)]


def recurrent(**settings: Any) -> tuple[sg.TrainingGraph, list[float]]:
    """Two LSTMs whose gates take one megabyte, and what they learn."""
    sg.set_seed(1)
    x = sg.Tensor((32, 32, 16))
    graph = sg.Graph()
    last = graph.node(sg.LSTMLayer.create(16, 64, 2, **settings), x)
    y = sg.Tensor(last.shape)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    generator = np.random.default_rng(0)
    inputs, labels = ({name: generator.standard_normal(one.shape, np.float32)} for name, one in (("x", x), ("y", y)))
    return training, [training.execute(inputs, labels).loss for _ in range(6)]


@pytest.mark.parametrize(
    "settings", [{}, {"is_bidirectional": True}, {"returns_sequences": False, "uses_biases": False}]
)
def test_operators_of_several_results_write_into_it(monkeypatch: pytest.MonkeyPatch, settings: dict[str, bool]) -> None:
    monkeypatch.setattr(platform, "machine", no_processor)
    monkeypatch.setattr(held, "LARGE", 1 << 16)
    monkeypatch.setattr(held, "LEAST", 1 << 20)
    holding, losses = recurrent(**settings)
    (executable,) = holding.compilation.programs.executables.values()
    counts = {(node.target, len(offsets)) for node in executable.part.nodes if (offsets := notes(node).offsets)}
    assert {(torch.ops.stepgraph.lstm.default, 3), (torch.ops.stepgraph.lstm_gradient.default, 1)} <= counts
    monkeypatch.setattr(held, "LARGE", 1 << 40)
    plain, right = recurrent(**settings)
    assert losses == right and losses[-1] < losses[0]
    assert next(iter(plain.compilation.programs.executables.values())).part.held == 0


def test_batch_sizes_share_it_and_it_grows() -> None:
    training = network()
    sizes = {rows: bytes_held(training, rows) for rows in (BATCH, 2 * BATCH)}
    assert sizes[2 * BATCH] > sizes[BATCH] > 0
    reference = network(OPTIONS.DETERMINISTIC)
    for rows in (BATCH, 2 * BATCH, BATCH, 2 * BATCH):
        assert step(training, rows) == pytest.approx(step(reference, rows), rel=1e-4)
    memory = training.compilation.programs._arena.of(0)
    assert len(memory) == sizes[2 * BATCH] and training.compilation.programs._arena.of(1) is memory


def test_there_are_never_two_of_it() -> None:
    training = network()
    step(training)
    small = weakref.ref(training.compilation.programs._arena.of(0).untyped_storage())
    step(training, 2 * BATCH)
    is_free = small() is None  # not in the assertion, which would write out all its numbers
    assert is_free
    assert training.compilation.programs._arena.of(0).nbytes == bytes_held(training, 2 * BATCH)


def test_compiling_again_releases_it() -> None:
    training = network()
    step(training)
    with nothing_collected():
        memory = weakref.ref(training.compilation.programs._arena.of(0))
        assert memory() is not None
        training.compile()
        assert memory() is None
    step(training)
    assert training.compilation.programs._arena.of(0).nbytes == bytes_held(training)


def test_the_plan_counts_it() -> None:
    training = network()
    step(training)
    inside = bytes_held(training)
    planned = training.memory_plan.intermediates
    assert planned == pytest.approx(measured_peak(lambda: step(training)) + inside, rel=0.1)
    assert planned == max(size for *_, size in training.memory_plan.timeline)


@pytest.mark.parametrize("settings", [{"options": OPTIONS.DETERMINISTIC}, {"memory_limit": 1 << 30}])
def test_a_limit_and_plain_kernels_hold_nothing(settings: dict[str, Any]) -> None:
    assert bytes_held(network(**settings)) == 0


def test_a_step_that_would_need_more_memory_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "WORTH", 0.5)
    training = network()
    assert bytes_held(training) == 0
    nodes = training.compilation.programs.executable(PartName.STEP, BATCH).part.nodes
    assert not any(notes(node).offsets for node in nodes)


def held_by_rank(worth: float) -> tuple[int, float]:
    """Bytes held by the last shard of a rank, and a loss."""
    held.WORTH, platform.machine = worth, no_processor
    training = network(parallel=sg.Parallel(2))
    loss = step(training)
    programs = training.compilation.programs
    return next(one.part.held for (name, _), one in programs.executables.items() if name == PartName.LAST), loss


def test_a_rank_holds_results_beside_what_it_exchanges() -> None:
    """Gradients that are exchanged are not in it, and would make it look too large."""
    (found, loss), _ = together(2, held_by_rank, 1.05)
    (nothing, same), _ = together(2, held_by_rank, 0.1)
    assert found > 0 and nothing == 0 and loss == same


def tiny(rows: int) -> tuple[sg.TrainingGraph, tuple[sg.Tensor, ...], tuple[dict[str, Any], dict[str, Any]]]:
    """A perceptron of few numbers, its parameters, and a batch."""
    sg.set_seed(1)
    x, y = sg.Tensor((rows, 5)), sg.Tensor((rows,), "int64")
    layers = sg.FullyConnectedLayer.create(5, 6), sg.FullyConnectedLayer.create(6, 3)
    graph = sg.Graph()
    graph.node(layers[1], graph.node(sg.ActivationLayer.relu(), graph.node(layers[0], x)))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu")
    generator = np.random.default_rng(0)
    data = {"x": generator.standard_normal((rows, 5), np.float32)}, {"y": generator.integers(0, 3, rows)}
    return training, tuple(one for layer in layers for one in layer.parameters.values()), data


def learned(rows: int) -> tuple[list[float], list[np.ndarray], int]:
    training, parameters, data = tiny(rows)
    losses = [training.execute(*data).loss for _ in range(6)]
    return losses, [parameter.numpy().copy() for parameter in parameters], bytes_held(training, rows)


@pytest.mark.parametrize("rows", [1, 7])
def test_a_tiny_step_is_in_it_and_computes_the_same(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    losses, parameters, held_bytes = learned(rows)
    assert held_bytes > 0
    monkeypatch.setattr(held, "hold", lambda part: part)
    plain_losses, plain_parameters, nothing = learned(rows)
    assert nothing == 0 and losses == plain_losses and losses[-1] < losses[0]
    for one, other in zip(parameters, plain_parameters, strict=True):
        np.testing.assert_array_equal(one, other)


def test_passes_of_a_tiny_step_compute_the_same_without_it() -> None:
    (whole, parameters, data), (passes, others, _) = tiny(7), tiny(7)
    for _ in range(3):
        assert whole.execute(*data).loss == passes.execute_forward(*data).loss
        passes.execute_gradient()
        passes.execute_optimizer_update()
    for one, other in zip(parameters, others, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_views_in_it_have_the_strides_of_other_views() -> None:
    """Along dimensions of size 1, recorded views may have others, and by them products choose how to add."""

    def views(x: torch.Tensor) -> list[torch.Tensor]:
        found = [x * 2]
        found.append(found[-1].transpose(1, 2))
        found.append(found[-1].view(9, 2, 1))
        return [*found, found[-1].view(18, 1)]

    x = torch.zeros(9, 1, 2, 1)
    graph = copy.deepcopy(make_fx(lambda x: views(x)[-1] + 1, tracing_mode="fake")(x).graph)  # a part's has no module
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    note(product, offsets=dict.fromkeys(storages(product), 0))
    allocations = held.write_into_arena(graph).values()
    assert [one.like.stride() for one in allocations] == [one.stride() for one in views(x)]


def test_views_of_what_is_in_it_are_created_once() -> None:
    training, _, data = tiny(7)
    training.execute(*data)
    executable = training.compilation.programs.executable(PartName.STEP, 7)
    transposed = [node.name for node in executable.part.nodes if node.target is torch.ops.aten.t.default]
    assert transposed and all(f"{name} = torch.t(" not in executable._code.source for name in transposed)
    views = [like for like, _ in executable._code.allocations.values() if not like.is_contiguous()]
    assert views  # transposed gradients


def test_results_of_a_tiny_step_are_not_in_it() -> None:
    training, _, data = tiny(7)
    executions = [training.execute(*data) for _ in range(3)]
    before = [execution.loss for execution in executions]
    training.execute(*data)
    assert [execution.loss for execution in executions] == before and len(set(before)) == 3
