"""Fused steps: the same numbers from PyTorch's compiler, also on the CPU where that is asked for."""

import copy
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from stepgraph.compiler import fusion, pipeline
from stepgraph.compiler.kernels.update import update
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.passes.in_place import out_of_place
from stepgraph.compiler.passes.join import join_products
from stepgraph.compiler.program import Part, PartName, Phase, adopt_tags, fake, tag
from stepgraph.compiler.settings import fusion_of
from stepgraph.compiler.step import Fusion, value
from stepgraph.compiler.tuned import attention_in_tiles as tiled
from stepgraph.compiler.tuned.replay import Replay
from stepgraph.compiler.tuned.small_products import expand_small_products
from stepgraph.runtime import executable as executables
from stepgraph.system import torch_private

OPTIONS = sg.GraphCompilationOptions
aten = torch.ops.aten


def network(options: OPTIONS) -> sg.TrainingGraph:
    sg.set_seed(7)
    x, y = sg.Tensor.image(8, 8, 1, 16), sg.Tensor((16,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.BatchNormalizationLayer.create(4), graph.node(sg.ConvolutionLayer.create(1, 4, 3), x))
    hidden = graph.node(sg.PoolingLayer.max(2), graph.node(sg.ActivationLayer.relu(), hidden))
    hidden = graph.node(sg.DropoutLayer(0.2), graph.reshape((16, -1), hidden))
    graph.node(sg.FullyConnectedLayer.create(64, 10), hidden)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), options)
    return training


def losses(training: sg.TrainingGraph) -> list[float]:
    images = np.random.default_rng(1).standard_normal((16, 1, 8, 8)).astype(np.float32)
    return [training.execute({"x": images}, {"y": np.arange(16) % 10}).loss for _ in range(20)]


INDEPENDENT = (999,), (1000,), (1001,), (2, 4, 4, 3), (2, 5, 6, 7), (9, 100), (10, 101), ()


def independent(*arrays: torch.Tensor) -> list[torch.Tensor]:
    """Transposed images, sums over rows, and other arrays, each plus one: a kernel per array."""
    transposed = [one.permute(0, 3, 1, 2).contiguous() if one.ndim == 4 else one for one in arrays]
    return [one.sum(1) if one.ndim == 2 else one + 1 for one in transposed]


def test_only_small_kernels_over_one_range_of_indices_are_launched_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.scheduler import ForeachKernelSchedulerNode, Scheduler

    found: list[tuple[int, ...]] = []

    def groups(scheduler: Any) -> list[list[Any]]:
        return [list(scheduler.nodes)]  # PyTorch's own function leaves out what is on the CPU

    def see(scheduler: Any, num_ck_nodes: int | None = None) -> None:
        (group,) = ForeachKernelSchedulerNode.group_nodes_for_combo_kernels(scheduler)
        found.extend(tuple(map(int, node.node.get_size())) for node in group)
        raise RuntimeError("seen")  # nothing need be compiled

    monkeypatch.setattr(Scheduler, "create_combo_kernel_nodes", see)
    monkeypatch.setattr(ForeachKernelSchedulerNode, "group_algorithm_for_combo_kernels", groups)
    arrays = [torch.ones(shape) for shape in INDEPENDENT]
    compile_graph = torch_private.inductor().compile_graph
    with pytest.raises(Exception, match="seen"), torch_private.combined_up_to(1000):
        compile_graph(make_fx(independent)(*arrays), arrays, config_patches={"combo_kernels": True})
    assert found == [(999,), (1000,), (9,), ()]
    assert ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels is groups, "restored"


@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
def test_parameters_are_updated_behind_the_gradients_that_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the compiler forgets that order, as PyTorch 2.11 does when it divides a loop."""
    from torch._inductor.scheduler import SchedulerNode

    def forgetful(loop: Any, *given: Any, **named: Any) -> None:
        divided.append(loop)
        loop._compute_attrs(*given, **named)

    divided: list[Any] = []
    monkeypatch.setattr(SchedulerNode, "recompute_size_and_body", forgetful)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((4, 3), np.float32)}, {"y": rng.standard_normal((4, 2), np.float32)}
    found = []
    for options in (OPTIONS.FUSE_LAYERS, OPTIONS.DETERMINISTIC):
        sg.set_seed(0)
        x, y = sg.Tensor((4, 3)), sg.Tensor((4, 2))
        graph = sg.Graph()
        hidden = graph.node(sg.ActivationLayer.tanh(), graph.node(sg.FullyConnectedLayer.create(3, 5), x))
        graph.node(sg.FullyConnectedLayer.create(5, 2), hidden)
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.5))
        training.add_inputs({"x": x}, {"y": y})
        training.compile("cpu", options)
        found.append([training.execute(*batch).loss for _ in range(4)])
    assert divided
    np.testing.assert_allclose(*found, rtol=1e-4)


@pytest.mark.gpu
def test_small_kernels_are_launched_together_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.utils import run_and_get_code

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    arrays = [torch.rand(shape, device="cuda") for shape in INDEPENDENT]
    with torch_private.combined_up_to(1000):
        compiled = torch.compile(independent, options={"combo_kernels": True})
        results, (code,) = run_and_get_code(compiled, *arrays)
    assert code.count("'num_kernels'") == code.count("'num_kernels': 3") == 1, "the arrays of 999, 1000 and 1 elements"
    for found, expected in zip(results, independent(*arrays), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_the_compiler_does_not_wait_for_steps() -> None:
    array, ended = torch.ones(1, device="cuda"), torch.cuda.Event()
    for _ in range(40):  # loads kernels, creates streams and takes memory for each, for which CUDA may wait
        with fusion._beside_steps([array]):
            assert (array + 1).item() == 2
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    ended.record()
    with fusion._beside_steps([array]):
        assert (array + 1).item() == 2
    assert not ended.query()


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
def test_a_fused_step_on_the_cpu_equals_the_plain_one() -> None:
    fused = network(OPTIONS.FUSE_LAYERS)
    np.testing.assert_allclose(losses(fused), losses(network(OPTIONS.DETERMINISTIC)), rtol=1e-4)
    assert next(iter(fused.compilation.programs.executables.values())).mode == "fused traced"


class WithConstants(torch.nn.Module):
    """Arrays that are neither parameters nor buffers: a number, a row, indices, and one like a source."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.tensor(0.5) + x.new_tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
        chosen = self.linear(torch.where(x > 0, x, torch.tensor(-1.0)))
        return chosen[:, torch.tensor([2, 0, 1])]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_fused_step_reads_constants(device: str, caplog: pytest.LogCaptureFixture) -> None:
    if device == "cpu" and shutil.which("g++") is None:
        pytest.skip("PyTorch's compiler needs a C++ compiler on the CPU")
    rng, found = np.random.default_rng(0), []
    batches = [rng.standard_normal((2, 4, 6), np.float32) for _ in range(6)]
    for fuse in (True, False):
        torch.manual_seed(0)
        y = sg.Tensor((4, 3))
        imported = sg.from_torch(WithConstants(), sg.Tensor((4, 6)))
        training = imported.training(sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1), y)
        training.compile(device, fuse=fuse)
        (given,), (label,) = training.compilation.feeds.inputs, training.compilation.feeds.labels
        found.append([training.execute({given: one}, {label: other[:, :3]}).loss for one, other in batches])
        assert ("fused" in next(iter(training.compilation.programs.executables.values())).mode) == fuse
    np.testing.assert_allclose(*found, rtol=1e-4)
    assert "memory plan remains" not in caplog.text


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
def test_the_kernels_of_a_tiny_step_are_launched_directly() -> None:
    graphs = [tiny(OPTIONS.FUSE_LAYERS), tiny(OPTIONS.DETERMINISTIC)]
    rng, found = np.random.default_rng(0), []
    for step in range(20):  # other memory with every call
        batch = {"x": rng.standard_normal((2, 6)).astype(np.float32)}, {"y": np.array([step % 3, 1])}
        found.append([training.execute(*batch).loss for training in graphs])
    np.testing.assert_allclose(*np.transpose(found), rtol=1e-4)
    executable = next(iter(graphs[0].compilation.programs.executables.values()))
    assert isinstance(executable._function, Replay) and executable._function.is_direct


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
def test_updates_recorded_as_one_operator_are_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = losses(network(OPTIONS.DETERMINISTIC))
    monkeypatch.setattr(sys.modules[update.__module__], "AS_ONE", {"cpu"})
    monkeypatch.setattr(sys.modules[update.__module__], "FUSED", {})
    fused = network(OPTIONS.FUSE_LAYERS)
    np.testing.assert_allclose(losses(fused), expected, rtol=1e-4)
    (executable,) = fused.compilation.programs.executables.values()
    assert "update_by_rule" in str(executable.part.module.graph)


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
def test_a_fused_phase_hands_on_what_the_next_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Query, key and value are views of one product in a fused forward pass; the gradient pass knows nothing of it."""
    rows = tuple(row for row in pipeline.TABLE if row.name != "expand small products")
    assert len(rows) == len(pipeline.TABLE) - 1
    monkeypatch.setattr(pipeline, "TABLE", rows)
    rng = np.random.default_rng(0)
    data = {name: rng.standard_normal((4, 6, 16)).astype(np.float32) for name in "xy"}
    found = []
    for options in (OPTIONS.FUSE_LAYERS, OPTIONS.DETERMINISTIC):
        training = attention(layers=1, options=options)
        training.bind_and_write_data(data, {**training.inputs, **training.loss_labels}, sg.Device.cpu())
        losses = []
        for _ in range(5):
            losses.append(training.execute_forward().loss)
            for key, declared in training.compilation.programs.executable(PartName.FORWARD, 4).part.results.items():
                handed = training.session.saved[key]
                assert handed.shape == declared.shape and handed.stride() == declared.stride()
            training.execute_gradient()
            training.execute_optimizer_update()
        found.append(losses)
    np.testing.assert_allclose(*found, rtol=1e-4)


def tiny(options: OPTIONS, optimizer: sg.Optimizer | None = None) -> sg.TrainingGraph:
    sg.set_seed(3)
    x, y = sg.Tensor((2, 6)), sg.Tensor((2,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.ActivationLayer.relu(), graph.node(sg.FullyConnectedLayer.create(6, 8), x))
    graph.node(sg.FullyConnectedLayer.create(8, 3), hidden)
    optimizer = optimizer or sg.AdamOptimizer(learning_rate=1e-2)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), optimizer)
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), options)
    return training


GENERATED = """
def call(args):
    a, b = args
    args.clear()
    assert_size_stride(a, (4,), (1,))
    buf0 = empty_strided_cpu((4,), (1,), torch.float32)
    buf1 = empty_strided_cpu((2, 2), (2, 1), torch.float32)
    cpp_fused_add_0(a, b, buf0)
    {other}
    cpp_fused_mul_1(buf0, b, buf1)
    return ({result},)
"""


def generated(other: str = "", result: str = "reinterpret_tensor(buf1, (4,), (1,), 0)") -> tuple[Replay, list[str]]:
    """As PyTorch's compiler writes it: `b` becomes `a + b`, the result is its square."""
    ran: list[str] = []

    def add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        ran.append("add")
        out.copy_(a + b)

    def square(total: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        ran.append("square")
        b.copy_(total)
        out.view(-1).copy_(total * total)

    def allocate(*like: object) -> torch.Tensor:
        ran.append("allocate")
        return torch.empty_strided(*like[:2])  # type: ignore[arg-type]

    names = {
        "torch": torch,
        "extern_kernels": torch,
        "assert_size_stride": lambda *_: ran.append("check"),
        "empty_strided_cpu": allocate,
        "reinterpret_tensor": lambda x, size, stride, _: x.as_strided(size, stride),
        "cpp_fused_add_0": add,
        "cpp_fused_mul_1": square,
    }
    exec(GENERATED.format(other=other, result=result), names)
    call: Callable[..., list[torch.Tensor]] = names["call"]  # type: ignore[assignment]
    return Replay(lambda *arrays: call(list(arrays)), call), ran


def test_replayed_kernels_need_no_checks_and_no_new_buffers() -> None:
    replay, ran = generated()
    b, kept = torch.ones(4), []
    for step in range(4):
        kept.append(replay(torch.full((4,), float(step)), b)[0])
    assert replay.is_direct
    assert ran[-6:] == ["allocate", "add", "square"] * 2  # the result, which the caller may keep
    assert b.tolist() == [7.0] * 4
    assert [one.tolist() for one in kept] == [[n] * 4 for n in (1.0, 4.0, 16.0, 49.0)]  # each call has its own


@pytest.mark.parametrize("other", ["extern_kernels.mm(a.view(2, 2), b.view(2, 2), out=buf1)", "torch.ops.aten.sin_(b)"])
def test_code_that_does_more_than_launch_is_left_alone(other: str) -> None:
    replay, ran = generated(other)
    for _ in range(3):
        replay(torch.ones(4), torch.ones(4))
    assert not replay.is_direct and ran.count("allocate") == 6


@pytest.mark.parametrize("result", ["b", "buf1, reinterpret_tensor(buf0, (2,), (1,), 0)"])
def test_results_that_are_no_buffers_of_their_own_are_left_alone(result: str) -> None:
    replay, _ = generated(result=result)
    for _ in range(3):
        found = replay(torch.ones(4), torch.ones(4))
    assert not replay.is_direct and found[0].flatten().tolist() == [2.0 if result == "b" else 4.0] * 4


def test_who_is_fused_and_when() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert fusion_of(OPTIONS.NONE, cpu) is Fusion.FIXED
    assert fusion_of(OPTIONS.CHECK_NUMERICS, cpu) is Fusion.NEVER
    assert fusion_of(OPTIONS.NONE, torch.device("mps")) is Fusion.NEVER
    assert fusion_of(OPTIONS.NONE, cuda) is Fusion.LATER
    assert fusion_of(OPTIONS.FUSE_LAYERS, cpu) is Fusion.FIRST
    assert fusion_of(OPTIONS.NONE, cuda, sg.Parallel(2)) is Fusion.NEVER  # time must not decide about bits
    assert fusion_of(OPTIONS.NONE, cuda, sg.Parallel(2, order="any")) is Fusion.LATER
    assert fusion_of(OPTIONS.NONE, cpu, sg.Parallel(2, order="any")) is Fusion.NEVER
    assert fusion_of(OPTIONS.FUSE_LAYERS, cuda, sg.Parallel(2)) is Fusion.FIRST
    for options in (OPTIONS.DISABLE_LAYER_FUSION, OPTIONS.DETERMINISTIC, OPTIONS.FUSE_LAYERS | OPTIONS.DETERMINISTIC):
        assert fusion_of(options, cuda) is Fusion.NEVER


def test_the_fused_function_is_taken_between_two_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The way of a GPU, with a compiler that only counts and a step that is asked to fuse on the CPU."""
    ready, calls = threading.Event(), []
    training, plain = network(OPTIONS.NONE), network(OPTIONS.NONE)
    (executable,) = training.compilation.programs.executables.values()

    plan = MemoryPlan(activations=7)

    def slow(*_: object) -> fusion.Fused:
        ready.wait(10)

        def function(*arrays: torch.Tensor) -> Any:
            calls.append(1)
            return unfused(*arrays, *executable._code.views(arrays))

        return fusion.Fused(function, lambda: plan)

    monkeypatch.setattr(fusion, "fuse", slow)
    executable._fusing = fusion.fuse_in_background(executable.part, executable.step)
    assert losses(training)[:5] == losses(plain)[:5] and not calls  # steps go on meanwhile
    assert training.memory_plan == plain.memory_plan
    unfused = executable._function
    ready.set()
    executable._fusing.result(10)
    assert losses(training) == losses(plain)
    assert len(calls) == 20 and executable.is_fused and "fused" in caplog.text
    assert training.memory_plan == plan  # what runs now


@pytest.mark.parametrize(("seconds", "started"), [(0.01, 10), (0.3, 5), (0.6, 3), (60.0, 3)])
def test_fusing_starts_after_some_calls_or_some_time(
    seconds: float, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU captures its second call; nothing is fused beside that."""
    calls, starts = 0, list[int]()
    monkeypatch.setattr(executables, "time", SimpleNamespace(perf_counter=lambda: 100 + calls * seconds))
    capture = executables._Capture.__new__(executables._Capture)
    capture.calls, capture.began, capture.waits, capture.graph = 0, 0.0, True, None
    later = SimpleNamespace(fuse_later=lambda _: starts.append(calls))
    capture.executable = later  # type: ignore[assignment]
    for calls in range(1, 13):
        if capture.waits:
            capture._count({})
        if calls == 2:
            capture.graph = object()  # type: ignore[assignment]
    assert starts == [started]


def test_a_compiler_that_fails_leaves_the_step_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> fusion.Fused:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(fusion, "fuse", broken)
    training = network(OPTIONS.NONE)
    (executable,) = training.compilation.programs.executables.values()
    executable._fusing = fusion.fuse_in_background(executable.part, executable.step)
    executable._fusing.exception(10)
    assert np.isfinite(losses(training)).all()
    assert "remain unfused: no compiler here" in caplog.text and not executable.is_fused


def test_a_compiler_that_fails_before_the_first_step_raises_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ImportError("the cache is damaged")

    monkeypatch.setattr(fusion, "fuse", fail)
    with pytest.raises(sg.ExecutionError, match="PyTorch's compiler failed: the cache is damaged") as raised:
        tiny(OPTIONS.FUSE_LAYERS)
    assert isinstance(raised.value.__cause__, ImportError) and "fuse=False" in str(raised.value)


def test_a_pass_without_arrays_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every gradient is stopped, the gradient pass makes constants of nothing."""

    def fuse(part: Part, *_: object) -> fusion.Fused:
        assert part.inputs
        raise fusion.Unusable("not compiled here, which would take seconds")

    monkeypatch.setattr(fusion, "fuse", fuse)
    x, y, graph = sg.Tensor((4, 3)), sg.Tensor((4, 2)), sg.Graph()
    result = graph.dense(x, 2)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.stop_gradient([result])
    training.compile("cpu", fuse=True)
    training.execute_forward({"x": np.ones((4, 3), np.float32)}, {"y": np.ones((4, 2), np.float32)})
    training.execute_gradient()
    (gradient,) = (one for (name, _), one in training.compilation.programs.executables.items() if name == "gradient")
    assert gradient.part.nodes and not gradient.part.inputs  # so there was something to refuse


def attention(
    layers: int, options: OPTIONS = OPTIONS.DETERMINISTIC, *, heads: int = 2, **settings: Any
) -> sg.TrainingGraph:
    """Self-attentions, each with a shortcut, and two fully connected layers that read the same."""
    sg.set_seed(3)
    x, y = sg.Tensor((4, 6, 16)), sg.Tensor((4, 6, 16))
    graph = sg.Graph()
    z: sg.Tensor = x
    for _ in range(layers):
        attended = graph.node(sg.MultiheadAttentionLayer.create(16, heads, **settings), z, z, z)
        z = graph.node(sg.ArithmeticLayer.add(), z, attended)
    one, other = (graph.node(sg.FullyConnectedLayer.create(16, 16), z) for _ in range(2))
    graph.node(sg.ArithmeticLayer.multiply(), one, other)
    # Not Adam: key biases have no gradient but rounding, which Adam would make as large as any other.
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), options)
    return training


# Forward, of weights and of the source: 2 of 3 products go in an attention (x gets no gradient), 1 of 2 at the end.
JOINED = (2 + 2) + (2 + 2 + 2) + (1 + 1 + 1)


@pytest.mark.parametrize(("change", "fewer"), [(join_products, JOINED), (expand_small_products, 27)])
def test_products_are_changed_and_give_the_same(change: Callable[[fx.Graph], None], fewer: int) -> None:
    check_changed(change, fewer)


def test_products_are_joined_whose_weights_are_converted_one_after_another() -> None:
    def function(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        with traceback.annotate(tag("layer", Phase.FORWARD)):
            return [x @ w.double().t() for w in weights]

    arrays = [torch.rand(4, 8, dtype=torch.float64), *(torch.rand(3, 8) for _ in range(3))]
    with traceback.preserve_node_meta():
        module = make_fx(function, tracing_mode="fake")(*arrays)
    adopt_tags(module.graph)
    join_products(module.graph)
    module.recompile()
    (product,) = module.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert fake(product).shape == (4, 9)
    for found, expected in zip(module(*arrays), function(*arrays), strict=True):
        torch.testing.assert_close(found, expected)


def check_changed(change: Callable[[fx.Graph], None], fewer: int | None, **settings: Any) -> fx.Graph:
    """Changes a step's graph and runs both."""
    training = attention(layers=2, **settings)
    part = training.compilation.programs.executable(PartName.STEP, 4).part
    changed = copy.deepcopy(part.module)
    out_of_place(changed.graph)
    change(changed.graph)
    changed.recompile()
    generator = torch.Generator().manual_seed(0)
    fed = {key: torch.randn(4, 6, 16, generator=generator) for key in map(value, training.declaration.feeds.tensors)}
    arrays = training.session.bound(PartName.STEP, 4).filled(fed)
    given, again = ([one.clone() for one in arrays] for _ in range(2))
    with torch.no_grad():
        for found, wanted in zip(changed(*given), part.module(*again), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for found, wanted in zip(given, again, strict=True):  # parameters and state change in place
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not all(map(torch.equal, given, arrays))
    products = [
        sum(node.target in (aten.mm.default, aten.addmm.default) for node in one.graph.nodes)
        for one in (part.module, changed)
    ]
    assert fewer is None or products[0] - products[1] == fewer
    return changed.graph


@pytest.fixture
def plain_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operators of `attention_kernels` by PyTorch's formula, in the place of what is recorded on a CPU."""
    library = torch.library.Library("stepgraph", "FRAGMENT")
    sources = "Tensor q, Tensor k, Tensor v"
    library.define(f"attend({sources}) -> (Tensor, Tensor)")
    library.define(f"attend_gradients({sources}, Tensor y, Tensor norms, Tensor dy) -> (Tensor, Tensor, Tensor)")
    library.define(f"attend_joint_gradients({sources}, Tensor y, Tensor norms, Tensor dy) -> Tensor")

    def attend(*sources: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.scaled_dot_product_attention(*sources), sources[0][..., 0].clone()

    def gradients(q, k, v, y, norms, dy) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
        with torch.inference_mode(False), torch.enable_grad():
            sources = [one.clone().requires_grad_() for one in (q, k, v)]
            found = torch.autograd.grad(attend(*sources)[0], sources, dy.clone())
        return tuple(one.transpose(1, 2).contiguous().transpose(1, 2) for one in found)

    def joint(*given: torch.Tensor) -> torch.Tensor:
        return torch.stack([one.transpose(1, 2) for one in gradients(*given)], 2)

    for name, function in (("attend", attend), ("attend_gradients", gradients), ("attend_joint_gradients", joint)):
        library.impl(name, function, "CPU")

    def shaped(q: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        batch, heads, steps, width = q.shape
        return q.new_empty(batch, steps, 3, heads, width)

    library.impl("attend_joint_gradients", shaped, "Meta")
    monkeypatch.setitem(sys.modules, "stepgraph.compiler.tuned.attention_kernels", SimpleNamespace())
    monkeypatch.setattr(tiled, "WIDTHS", (8,))
    monkeypatch.setattr(tiled, "FORWARD", aten._scaled_dot_product_flash_attention_for_cpu.default)
    monkeypatch.setattr(tiled, "BACKWARD", aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    yield
    library._destroy()


@pytest.mark.skipif(find_spec("triton") is not None, reason="there the operators themselves are registered")
def test_gradients_of_an_attention_are_written_side_by_side(plain_tiles: None) -> None:
    def change(graph: fx.Graph) -> None:
        tiled.tile_attention(graph)
        join_products(graph)

    graph = check_changed(change, JOINED)
    targets = [str(node.target) for node in graph.nodes]
    assert targets.count("stepgraph.attend.default") == 2
    assert targets.count("stepgraph.attend_joint_gradients.default") == 2
    assert "stepgraph.attend_gradients.default" not in targets


@pytest.mark.skipif(find_spec("triton") is not None, reason="there the operators themselves are registered")
def test_gradients_that_were_rotated_are_not_taken_for_those_of_the_attention(plain_tiles: None) -> None:
    def change(graph: fx.Graph) -> None:
        tiled.tile_attention(graph)
        join_products(graph)

    # With as many heads as steps, the rotated gradients have the shape of those that the operator returns.
    graph = check_changed(change, None, heads=6, key_dimension=48, value_dimension=48, rotary_base=10.0)
    targets = [str(node.target) for node in graph.nodes]
    assert targets.count("stepgraph.attend_gradients.default") == 2
    assert "stepgraph.attend_joint_gradients.default" not in targets


def test_many_parameters_keep_their_update_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = sys.modules[update.__module__]
    monkeypatch.setattr(kernels, "AS_ONE", {"cpu"})
    monkeypatch.setattr(kernels, "FUSED", {})
    monkeypatch.setattr(kernels, "_rules", lambda optimizer, arrays, *_: ["P = p - g;"] * len(arrays.parameters))

    def targets(most: int) -> list[Any]:
        monkeypatch.setattr(kernels, "MANY", most)
        training = tiny(OPTIONS.DETERMINISTIC)
        (executable,) = training.compilation.programs.executables.values()
        graph = copy.deepcopy(executable.part.module.graph)
        kernels.expand_updates(graph)
        return [(node.target, node.args[-1]) for node in graph.nodes if "update" in node.name]

    (kept,), (again,), (expanded,) = targets(3), targets(3), targets(4)
    assert kept[0] is torch.ops.stepgraph.update_by_kernel_.default
    assert kept == again  # the number of a kernel does not depend on what was compiled before
    assert expanded[0] is kernels.expanded_update


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
def test_a_fused_step_calls_update_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, launched = sys.modules[update.__module__], []

    def launch(arrays: Any, *_: Any) -> None:
        launched.append(len(arrays.parameters))
        for parameter, gradient in zip(arrays.parameters, arrays.gradients, strict=True):
            parameter.sub_(0.1 * gradient)

    monkeypatch.setattr(kernels, "AS_ONE", {"cpu"})
    monkeypatch.setattr(kernels, "FUSED", {})
    monkeypatch.setattr(kernels, "MANY", 3)
    monkeypatch.setattr(kernels, "_rules", lambda optimizer, arrays, *_: ["P = p - 0.1f * g;"] * len(arrays.parameters))
    monkeypatch.setattr(kernels, "launch", launch)
    found = []
    for options in (OPTIONS.FUSE_LAYERS, OPTIONS.DETERMINISTIC):
        training = tiny(options, sg.SGDOptimizer(0.1))
        batch = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 6)}, {"y": np.array([2, 1])}
        found.append([training.execute(*batch).loss for _ in range(4)])
        assert launched == [4] * len(launched)
    np.testing.assert_allclose(*found, rtol=1e-5)
    assert len(launched) >= 8 and found[0][-1] < found[0][0]
