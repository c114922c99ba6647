"""Tiny steps on the CPU are fused from a fixed step on, so that the number of an update alone decides its bits."""

import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import fusion
from stepgraph.compiler.fusion import Fused
from stepgraph.compiler.kernels.choices import CHOICES
from stepgraph.compiler.program import Part, PartName
from stepgraph.errors import DataError, ExecutionError
from stepgraph.runtime import switch
from stepgraph.runtime.switch import Switch
from stepgraph.system.surroundings import keeps_subnormals

STARTS, FIRST = 3, 6
needs_compiler = pytest.mark.skipif(not fusion.has_compiler(), reason="needs a C++ compiler")


class Compiler:
    """Stands for PyTorch's compiler: what it makes doubles each loss, and counts its calls."""

    def __init__(self) -> None:
        self.compiled, self.calls, self.may_end = 0, 0, threading.Event()
        self.kept_subnormals: bool | None = None  # in the last call
        self.may_end.set()

    def fuse(self, part: Part, *_: object) -> Fused:
        self.compiled += 1
        assert self.may_end.wait(10)

        def function(*arrays: torch.Tensor) -> list[torch.Tensor]:
            self.calls += 1
            self.kept_subnormals = keeps_subnormals()
            if arrays[0].isnan().any():
                raise RuntimeError("a kernel has failed")
            return [found * 2 if found.numel() == 1 else found for found in part.module(*arrays)]

        return Fused(function, lambda: None)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    made = Compiler()
    monkeypatch.setattr(fusion, "fuse", made.fuse)
    monkeypatch.setattr(fusion, "has_compiler", lambda: True)
    monkeypatch.setattr(switch, "STARTS_AT", STARTS)
    monkeypatch.setattr(switch, "FUSED_FROM", FIRST)
    yield made
    made.may_end.set()


def network(rows: Any = 4, optimizer: sg.Optimizer | None = None, **settings: Any) -> sg.TrainingGraph:
    sg.set_seed(5)
    x, y, graph = sg.Tensor((rows, 3)), sg.Tensor((rows, 2)), sg.Graph()
    hidden = graph.node(sg.DropoutLayer(0.3), graph.node(sg.FullyConnectedLayer.create(3, 5), x))
    graph.node(sg.FullyConnectedLayer.create(5, 2), hidden)
    optimizer = optimizer or sg.AdamOptimizer(learning_rate=0.01)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), optimizer)
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", **settings)
    return training


def run(training: sg.TrainingGraph, first: int, last: int) -> list[Any]:
    """The losses of the updates from one number to another."""
    found = []
    for number in range(first, last + 1):
        rng = np.random.default_rng(number)
        data = ({"x": rng.standard_normal((4, 3), np.float32)}, {"y": rng.standard_normal((4, 2), np.float32)})
        found.append(training.execute(*data).loss)
    return found


@cache
def plain() -> list[Any]:
    """The losses of ten unfused updates; index 0 is no update's."""
    return [None, *run(network(fuse=False), 1, 10)]


def the_switch(training: sg.TrainingGraph) -> Switch:
    (found,) = training.compilation.programs.switches.values()
    return found


def said(training: sg.TrainingGraph) -> str:
    return next(line.strip() for line in str(training).splitlines() if line.strip().startswith("fused"))


def test_steps_are_fused_from_the_fixed_one_on(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    training = network()
    assert run(training, 1, STARTS - 1) == plain()[1:STARTS] and compiler.compiled == 0
    assert said(training) == "fused       nothing yet: tiny steps are fused from step 6 on"
    assert run(training, STARTS, FIRST - 1) == plain()[STARTS:FIRST]
    assert compiler.compiled == 1 and compiler.calls == 0
    assert "being fused in the background, for step 6 on" in said(training)
    assert run(training, FIRST, 9) == [2 * loss for loss in plain()[FIRST:10]]
    assert compiler.calls == 4 and "steps run faster from now on" in caplog.text
    assert "operators, by PyTorch's compiler, from step 6 on, in " in said(training) and "fused traced" in str(training)
    assert training.memory_plan.total > 0


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot do without subnormal numbers")
@pytest.mark.parametrize("keeps", [True, False])
def test_a_fused_step_takes_subnormal_numbers_as_zero_and_nobody_else_does(compiler: Compiler, keeps: bool) -> None:
    training = network()
    run(training, 1, FIRST - 1)
    torch.set_flush_denormal(not keeps)
    try:
        run(training, FIRST, FIRST + 1)
        assert compiler.kept_subnormals is False and keeps_subnormals() is keeps
        with pytest.raises(ExecutionError):
            training.execute({"x": np.full((4, 3), np.nan, np.float32)}, {"y": np.zeros((4, 2), np.float32)})
        assert keeps_subnormals() is keeps
    finally:
        torch.set_flush_denormal(False)


def test_a_slow_compiler_is_waited_for(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    compiler.may_end.clear()
    training = network()
    assert run(training, 1, FIRST - 1) == plain()[1:FIRST]
    threading.Timer(0.1, compiler.may_end.set).start()
    assert run(training, FIRST, 8) == [2 * loss for loss in plain()[FIRST:9]]
    assert "waiting for PyTorch's compiler" in caplog.text


def test_a_resumed_run_gives_the_same_bits(compiler: Compiler, tmp_path: Path) -> None:
    whole, expected = network(), []
    for number in range(1, 11):
        expected += run(whole, number, number)
        whole.save(tmp_path / str(number))
    values = [tensor.numpy().copy() for tensor in whole.compilation.held]
    for training, saved_at in ((network(), 8), (whole, STARTS), (whole, FIRST - 1), (whole, FIRST)):
        training.restore(tmp_path / str(saved_at))  # a graph that has been fused goes back, too
        assert run(training, saved_at + 1, 10) == expected[saved_at:]
        for tensor, value in zip(training.compilation.held, values, strict=True):
            assert np.array_equal(tensor.numpy(), value)


def test_an_optimizer_of_two_graphs_counts_for_each(compiler: Compiler) -> None:
    optimizer = sg.SGDOptimizer(learning_rate=0.01)
    one, other = network(optimizer=optimizer), network(optimizer=optimizer)
    run(one, 1, FIRST - 1)
    run(other, 1, FIRST - 1)
    assert compiler.calls == 0
    run(one, FIRST, FIRST)
    assert compiler.calls == 1


def test_an_assigned_step_count_decides(compiler: Compiler) -> None:
    training = network()
    assert training.optimizer is not None
    training.optimizer.time_step = FIRST
    run(training, 1, 1)
    training.optimizer.time_step = 1
    run(training, 1, 1)
    assert compiler.calls == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"fuse": False},
        {"deterministic": True},
        {"check_numerics": True},
        {"memory_limit": 1 << 30},
        {"compute_type": "float16"},
        {"rows": sg.BATCH},
    ],
    ids=str,
)
def test_what_stays_unfused(compiler: Compiler, settings: dict[str, Any]) -> None:
    training = network(**settings)
    assert not training.compilation.programs.switches and compiler.compiled == 0


def test_only_whole_steps_of_the_declared_size_are_fused(compiler: Compiler) -> None:
    training, other = network(), network(fuse=False)
    for one in (training, other):
        assert one.optimizer is not None
        one.optimizer.time_step = FIRST
    found = []
    for one in (training, other):
        data = {"x": np.ones((4, 3), np.float32)}, {"y": np.ones((4, 2), np.float32)}
        found.append(
            [
                one.execute(*data, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE).loss,
                one.execute_forward(*data).loss,
                one.execute_gradient().error,
                one.execute_optimizer_update().error,
                one.execute(*data, batch_size=3).loss,
                one.inference().execute(data[0]).result.numpy().tolist(),
            ]
        )
    assert found[0] == found[1] and compiler.compiled == 0


def test_without_a_compiler_nothing_is_fused(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "has_compiler", lambda: False)
    training = network()
    run(training, 1, FIRST + 1)
    assert not training.compilation.programs.switches and compiler.compiled == 0
    assert said(training) == "fused       nothing; on the CPU, only fuse=True fuses this step, and needs a C++ compiler"


class Scaled(sg.Layer):
    """A layer that reads what can change when it is recorded."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * self.settings["factor"] + torch.tensor(self.settings["table"], device=x.device)


@pytest.mark.parametrize(
    ("name", "later", "warning"),
    [
        ("factor", 2.0, ""),
        ("table", [1.0, 2.0, 3.0], ""),
        ("factor", 3.0, "a layer computes something else than when the graph was compiled"),
        ("table", [1.0, 2.0, 4.0], "a layer computes something else than when the graph was compiled"),
        ("factor", None, "unsupported operand"),
    ],
)
def test_a_step_is_fused_only_if_its_layers_compute_the_same_as_before(
    compiler: Compiler, caplog: pytest.LogCaptureFixture, name: str, later: Any, warning: str
) -> None:
    def trained(changes: bool) -> list[Any]:
        sg.set_seed(5)
        x, y, graph = sg.Tensor((4, 3)), sg.Tensor((4, 2)), sg.Graph()
        settings: dict[str, Any] = {"factor": 2.0, "table": [1.0, 2.0, 3.0]}
        graph.node(sg.FullyConnectedLayer.create(3, 2), graph.node(Scaled(settings), x))
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.01))
        training.add_inputs({"x": x}, {"y": y})
        training.compile("cpu")
        losses = run(training, 1, STARTS - 1)
        if changes:
            settings[name] = later
        return losses + run(training, STARTS, FIRST + 2)

    found = trained(changes=True)
    said_then = caplog.text
    assert ("operators remain unfused" in said_then) == bool(warning) and warning in said_then
    assert compiler.compiled == (not warning)
    expected = trained(changes=False)
    assert found[: FIRST - 1] == expected[: FIRST - 1]
    later_on = [loss / 2 if warning else loss for loss in expected[FIRST - 1 :]]
    assert found[FIRST - 1 :] == pytest.approx(later_on, rel=1e-5)  # the update is recorded in another form


def test_a_step_whose_kernels_were_chosen_for_other_threads_is_fused(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    """With other threads other implementations may be the fastest; the layers compute the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, y, graph = sg.Tensor((4, 2, 8, 8)), sg.Tensor((4,), "int64"), sg.Graph()
        graph.dense(graph.reshape((4, -1), graph.relu(graph.convolution(x, 4, 3))), 3)
        training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.01))
        training.add_inputs({"x": x}, {"y": y})
        training.compile("cpu")
        measured = [one for one in CHOICES.stored() if one.question.threads == 1 and len(one.seconds) > 1]
        for one in measured:
            other = next(name for name in one.seconds if name != one.chosen)
            CHOICES.keep(replace(one, question=replace(one.question, threads=2), chosen=other, disturbed=False))
        assert measured
        data = {"x": np.ones((4, 2, 8, 8), np.float32)}, {"y": np.arange(4) % 3}
        for number in range(FIRST):
            torch.set_num_threads(2 if number else 1)
            training.execute(*data)
        assert compiler.compiled == 1 and "remain unfused" not in caplog.text
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_name_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not fusion.has_compiler.__wrapped__()
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(sys, "platform", "linux")
    assert fusion.has_compiler.__wrapped__()


@pytest.mark.parametrize("named", ["no-such-compiler", "false", __file__])
def test_a_c_compiler_that_does_not_run_is_named(
    named: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", named)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing that another run has compiled
    with pytest.raises(sg.DeviceError, match=re.escape(f"C++ compiler, but {named!r} does not run")) as found:
        network(fuse=True)
    assert "CXX" in str(found.value) or sys.platform == "darwin"
    assert capfd.readouterr().err == ""  # PyTorch's compiler would print its operators


def test_waiting_for_the_fixed_step_is_not_compiling(compiler: Compiler) -> None:
    training = network()
    run(training, 1, STARTS - 1)
    began = time.perf_counter()
    run(training, STARTS, STARTS)
    fusing = the_switch(training)._fusing
    assert fusing is not None and fusing.exception() is None
    most = time.perf_counter() - began
    time.sleep(0.5)
    run(training, STARTS + 1, FIRST)
    assert 0 < the_switch(training).fused.fusion_seconds <= most  # type: ignore[union-attr]


def test_large_steps_stay_unfused(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Part.__module__], "TINY", 10)
    assert not network().compilation.programs.switches


def test_a_compiler_that_fails_is_said_once(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Fused:
        raise RuntimeError("the headers of Python are missing")

    monkeypatch.setattr(fusion, "fuse", broken)
    training = network()
    assert run(training, 1, 10) == plain()[1:]
    lines = [one.message for one in caplog.records if one.levelno == logging.WARNING and "waiting" not in one.message]
    assert lines == ["operators remain unfused: the headers of Python are missing"]
    assert said(training) == "fused       nothing: the headers of Python are missing"


def test_an_interrupt_while_waiting_changes_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    training = network()
    assert run(training, 1, FIRST - 1) == plain()[1:FIRST]
    fusing = the_switch(training)._fusing
    assert fusing is not None

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fusing, "exception", interrupted)
        run(training, FIRST, FIRST)
    assert training.optimizer is not None and training.optimizer.time_step == FIRST
    assert run(training, FIRST, 8) == [2 * loss for loss in plain()[FIRST:9]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_compiles_again(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.may_end.clear()
    training = network()
    run(training, 1, STARTS)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as if the thread had stayed in another process
    compiler.may_end.set()
    while compiler.compiled == 0:
        pass
    the_switch(training)._fusing = type(the_switch(training)._fusing)()  # nobody completes it
    run(training, STARTS + 1, FIRST)
    assert compiler.compiled == 2 and compiler.calls == 1


@pytest.mark.deep
@needs_compiler
def test_the_real_compiler_takes_over_with_few_bits_of_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "STARTS_AT", STARTS)
    monkeypatch.setattr(switch, "FUSED_FROM", FIRST)
    training, other = network(), network(deterministic=True)
    np.testing.assert_allclose(run(training, 1, 20), run(other, 1, 20), rtol=1e-4)
    assert training.compilation.programs.in_use(PartName.STEP, 4).mode == "fused traced"


CLASSES = """
import sys
import numpy as np
import stepgraph as sg
from stepgraph.compiler.program import PartName
from stepgraph.runtime import switch
switch.STARTS_AT, switch.FUSED_FROM = 2, int(sys.argv[1])
sg.set_seed(3)
x, y = sg.Tensor((2, 6)), sg.Tensor((2,), "int64")
graph = sg.Graph()
layer = sg.FullyConnectedLayer.create(6, 3)
graph.node(layer, x)
training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-2))
training.add_inputs({"x": x}, {"y": y})
training.compile("cpu")
for label in (1, 1, 1, 1, 1, 7):
    before = layer.weights.numpy().copy()
    try:
        training.execute({"x": np.ones((2, 6), np.float32)}, {"y": np.array([0, label])})
    except sg.DataError as error:
        assert "holds the class index 7" in str(error), error
        assert np.array_equal(layer.weights.numpy(), before)
        print("refused", training.compilation.programs.in_use(PartName.STEP, 2).mode)
"""


@pytest.mark.deep
@needs_compiler
@pytest.mark.parametrize(("first", "mode"), [(4, "fused traced"), (1000, "traced")])
def test_a_process_ends_while_the_compiler_works(first: int, mode: str, tmp_path: Path) -> None:
    """It also refuses an index out of range, fused or not."""
    given = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [shutil.which(sys.executable) or sys.executable, "-c", CLASSES, str(first)]
    done = subprocess.run(command, check=False, env=given, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, f"refused {mode}"), done.stderr
    others = [line for line in done.stderr.splitlines() if "PyTorch's compiler" not in line and "fused" not in line]
    assert others == []


@needs_compiler
def test_a_refused_call_of_a_fused_step_changes_nothing() -> None:
    """The compiler may put the update of one loss before the operator that finds a label of another out of range."""
    sg.set_seed(0)
    index, x, y, v = sg.Tensor((4,), "int64"), sg.Tensor((4, 6)), sg.Tensor((4,), "int64"), sg.Tensor((4, 2))
    graph = sg.Graph()
    words, head = sg.EmbeddingLayer.create(7, 6), sg.FullyConnectedLayer.create(8, 2)
    scores = graph.dense(graph.add(graph.node(words, index), x), 5)
    prediction = graph.node(head, graph.relu(graph.dense(x, 8)))
    graph.node(sg.LossLayer.mean_squared_error(), [prediction, v])
    graph.node(sg.LossLayer.softmax_cross_entropy(), [scores, y])
    training = sg.TrainingGraph([graph], None, sg.AdamOptimizer(0.01), average=0.5)
    training.add_inputs({"i": index, "x": x}, {"y": y, "v": v})
    training.compile("cpu", fuse=True)

    def step(word: int = 0, label: int = 4) -> None:
        inputs = {"i": np.array([1, 2, 3, word]), "x": np.ones((4, 6), np.float32)}
        training.execute(inputs, {"y": np.array([0, 1, 2, label]), "v": np.ones((4, 2), np.float32)})

    def state() -> list[np.ndarray]:
        progress = training.progress()
        buffers = [one.numpy().copy() for each in progress.buffers.values() for one in each]
        parameters = [one.numpy().copy() for one in training.state_dict().values()]
        averages = [one.numpy().copy() for one in training.averages.values()]
        return [np.array(progress.time_step), *buffers, *parameters, *averages]

    for _ in range(3):
        step()
    before = state()
    for wrong in ({"word": 7}, {"label": 9}, {"word": -1}):
        with pytest.raises(DataError):
            step(**wrong)
    for one, other in zip(state(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    step()
    assert training.progress().time_step == before[0] + 1
