"""Whatever modes and switches a program sets around its calls, a graph learns the same, bit for bit."""

import locale
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import stepgraph as sg
from stepgraph.compiler.passes import layout
from stepgraph.runtime.execution import turn
from stepgraph.system import surroundings, torch_private
from stepgraph.system.surroundings import Precision

ROWS, SHORT = 12, 5
DATA = np.random.default_rng(0).standard_normal((ROWS, 6)).astype(np.float32)
LABELS = np.arange(ROWS) % 3
CPU = sg.Device.cpu()


def network() -> sg.TrainingGraph:
    """Dropout, running statistics, class indices and an optimizer with buffers: all that a mode could get at."""
    sg.set_seed(4)
    x, y = sg.Tensor((ROWS, 6)), sg.Tensor((ROWS,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.FullyConnectedLayer.create(6, 8), x)
    hidden = graph.node(sg.BatchNormalizationLayer.create(8), graph.reshape((ROWS, 8, 1, 1), hidden))
    hidden = graph.reshape((ROWS, 8), hidden)
    hidden = graph.node(sg.DropoutLayer(0.25), graph.node(sg.ActivationLayer.gelu(), hidden))
    graph.node(sg.FullyConnectedLayer.create(8, 3), hidden)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=0.05))
    training.add_inputs({"x": x}, {"y": y})
    return training


def loss(training: sg.TrainingGraph, rows: int = ROWS) -> Any:
    return training.execute({"x": DATA[:rows]}, {"y": LABELS[:rows]}, batch_size=rows).loss


@contextmanager
def switched(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(kind: torch.dtype) -> AbstractContextManager[None]:
    return switched(torch.get_default_dtype, torch.set_default_dtype, kind)


def precision(spelled: str) -> AbstractContextManager[None]:
    products = torch.backends.cuda.matmul
    if spelled == "new":
        return switched(lambda: "none", lambda value: setattr(products, "fp32_precision", value), "tf32")
    return switched(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high")


@contextmanager
def read_only_home(folder: Path) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ("HOME", "XDG_CACHE_HOME")}
    os.environ |= {"HOME": str(folder / "none"), "XDG_CACHE_HOME": "/proc/nothing"}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def deterministic() -> AbstractContextManager[None]:
    return switched(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


def comma() -> AbstractContextManager[None]:
    found = next((one for one in ("de_DE.UTF-8", "fr_FR.UTF-8") if _has_locale(one)), "C")
    return switched(lambda: locale.setlocale(locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL), found)


def _has_locale(name: str) -> bool:
    before = locale.setlocale(locale.LC_ALL)
    try:
        locale.setlocale(locale.LC_ALL, name)
    except locale.Error:
        return False
    locale.setlocale(locale.LC_ALL, before)
    return True


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device meta": lambda: torch.device("meta"),
    "default type float64": lambda: default_dtype(torch.float64),
    "default type float16": lambda: default_dtype(torch.float16),
    "deterministic algorithms": deterministic,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "TF32, old spelling": lambda: precision("old"),
    "TF32, new spelling": lambda: precision("new"),
    "another locale": comma,
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return story(nullcontext, "", tmp_path_factory.mktemp("plain"))


def story(mode: Callable[[], AbstractContextManager[Any]], moment: str, folder: Path) -> list[Any]:
    """A run of which one moment happens under a mode."""

    def under(name: str) -> AbstractContextManager[Any]:
        return mode() if moment == name else nullcontext()

    with under("build"):
        training = network()
    with under("compile"):
        training.compile(CPU)
    with under("first call"):
        found = [loss(training)]
    found += [loss(training) for _ in range(3)]
    with under("new batch size"):
        found.append(loss(training, SHORT))
    found += [loss(training, SHORT), loss(training)]
    with under("save"):
        training.save(folder / "saved")
    with under("load"):
        loaded = sg.load(folder / "saved", CPU)
    found += [loss(loaded), loss(loaded, SHORT)]
    with under("restore"):
        training.restore(folder / "saved")
    return [*found, loss(training), loss(training, SHORT)]


MOMENTS = ("build", "compile", "first call", "new batch size", "save", "load", "restore")
# The mode that did most harm around each call; the others in the deep checks.
CELLS = [("inference_mode", moment) for moment in MOMENTS]
OTHERS = [(name, moment) for name in MODES for moment in MOMENTS if (name, moment) not in CELLS]


@pytest.mark.parametrize(("name", "moment"), [*CELLS, *(pytest.param(*one, marks=pytest.mark.deep) for one in OTHERS)])
def test_a_mode_around_any_call_changes_no_bit(name: str, moment: str, undisturbed: list[Any], tmp_path: Path) -> None:
    assert story(MODES[name], moment, tmp_path) == undisturbed


@pytest.mark.parametrize("name", MODES)
def test_a_mode_around_everything_changes_no_bit_and_stays(name: str, undisturbed: list[Any], tmp_path: Path) -> None:
    def seen() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled(),
            Precision.of(None), torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
        )  # fmt: skip

    with MODES[name]():
        before = seen()
        found = story(nullcontext, "", tmp_path)
        assert seen() == before
    assert found == undisturbed


@pytest.mark.parametrize("phases", [False, True], ids=["whole", "phases"])
def test_learning_under_no_grad_learns(phases: bool) -> None:
    """A graph that was compiled, or first called with a batch size, under no_grad took no step at all."""
    with torch.no_grad():
        training = network()
        training.compile(CPU)
        losses = [loss(training, SHORT) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    if phases:
        feeds = {"x": training.inputs["x"], "y": training.loss_labels["y"]}
        with torch.inference_mode():
            for _ in range(3):
                training.bind_and_write_data({"x": DATA, "y": LABELS}, feeds, CPU)
                forward = training.execute_forward().loss
                training.execute_gradient()
                training.execute_optimizer_update()
        assert np.isfinite(forward) and training.optimizer.time_step == 44


@pytest.mark.parametrize("rows", [5, 10])
def test_a_recorded_run_learns_from_short_batches(rows: int, tmp_path: Path) -> None:
    """The recorder looks into the step before the first update, which once made a program without gradients."""
    losses = []
    for settings in ({}, {"run": tmp_path / "run"}):
        training = network()
        training.compile(CPU)
        data = (DATA[:rows], LABELS[:rows])
        losses.append(sg.fit(training, data, epochs=20, progress="quiet", **settings).losses)
    assert losses[0] == losses[1] and losses[0][-1] < 0.7 * losses[0][0]


@pytest.mark.parametrize("mode", ["plain", "no_grad"])
def test_threads_of_their_own_modes_train_alike(mode: str, undisturbed: list[Any], tmp_path: Path) -> None:
    found: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        with nullcontext() if mode == "plain" else MODES[mode]():
            training = network()
            training.compile(CPU)
            found[number] = [loss(training) for _ in range(4)]

    for number in range(2):  # a seed is drawn for each graph, so one after the other
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        thread.join(60)
    assert found == {0: undisturbed[:4], 1: undisturbed[:4]}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX warns of every fork once another test has used it
def test_a_forked_child_goes_on(undisturbed: list[Any]) -> None:
    training = network()
    training.compile(CPU)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        first = [loss(training) for _ in range(2)]
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, repr([loss(training) for _ in range(2)]).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        assert first + eval(told) == undisturbed[:4]
        assert [loss(training) for _ in range(2)] == undisturbed[2:4]  # the parent's is its own
    finally:
        torch.set_num_threads(threads)


def test_a_home_that_cannot_be_written_changes_nothing(undisturbed: list[Any], tmp_path: Path) -> None:
    with read_only_home(tmp_path):
        assert story(nullcontext, "", tmp_path) == undisturbed


class Detached(sg.Layer):
    """Uses its weight, and hides it from autograd."""

    weight: sg.Tensor

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * scope.array(self.weight).detach()


def detached(**settings: Any) -> sg.TrainingGraph:
    x = sg.Tensor((2, 3))
    graph = sg.Graph()
    hidden = graph.node(sg.FullyConnectedLayer.create(3, 3), x)
    graph.node(Detached(sg.Tensor((3,), fill=1.0)), hidden, **settings)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": sg.Tensor((2, 3))})
    return training


def test_a_trainable_tensor_without_a_gradient_is_refused_when_compiling() -> None:
    training = detached()
    with pytest.raises(sg.StateError, match="trainable and the loss depends on it, but no gradient reaches it"):
        training.compile(CPU)
    assert training.device is None
    detached(disable_update=True).compile(CPU)  # said on purpose


class Heads(sg.Layer):
    """Two results, each of its own weight; and a weight that nothing reads."""

    a: sg.Tensor
    b: sg.Tensor
    unused: sg.Tensor

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scope.array(self.a), x * scope.array(self.b)


def test_weights_that_the_loss_was_not_computed_from_need_no_gradient() -> None:
    x = sg.Tensor((2, 3))
    graph = sg.Graph()
    layer = Heads(*(sg.Tensor((3,), fill=1.0) for _ in range(3)))
    graph.node(layer, x)
    labels = sg.Tensor((2, 3))
    graph.node(sg.LossLayer.mean_squared_error(), graph.result_tensors(layer)[0], loss_labels=labels)
    training = sg.TrainingGraph([graph], None, sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": labels})
    training.compile(CPU)
    training.execute({"x": np.ones((2, 3), np.float32)}, {"y": np.zeros((2, 3), np.float32)})
    assert (layer.a.data < 1).all() and (layer.b.data == 1).all() and (layer.unused.data == 1).all()


def test_precision_is_taken_when_compiling_and_put_back_in_either_spelling() -> None:
    cudnn = torch.backends.cudnn.allow_tf32  # another test may have set it
    with precision("new"):
        assert Precision.of(None).tf32 == (True, cudnn)
        with Precision.of(False).applied():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    with Precision.of(True).applied():
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert not torch.backends.cuda.matmul.allow_tf32 and torch.backends.cudnn.allow_tf32 == cudnn  # readable as before
    assert Precision.of(True).tf32 == (True, True) and Precision.of(False).tf32 == (False, False)
    with pytest.raises(sg.DataTypeError, match="tf32 is 'yes'"):
        detached(disable_update=True).compile(CPU, tf32="yes")  # type: ignore[arg-type]


def _old(value: str) -> AbstractContextManager[None]:
    return switched(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value)


def _new(kind: str, value: str) -> AbstractContextManager[None]:
    one = getattr(torch.backends.mkldnn, kind)
    return switched(lambda: one.fp32_precision, partial(setattr, one, "fp32_precision"), value)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "rounding",
    [partial(_old, "medium"), *(partial(_new, kind, "bf16") for kind in ("matmul", "conv", "rnn"))],
    ids=["old spelling", "matmul", "conv", "rnn"],
)
def test_rounding_on_the_cpu_changes_no_bit_and_stays(
    rounding: Callable[[], AbstractContextManager[None]], deterministic: bool
) -> None:
    sg.set_seed(0)
    x, graph = sg.Tensor((8, 16, 12, 12)), sg.Graph()
    images = graph.node(sg.ConvolutionLayer.create(16, 64, 3), x)
    steps = graph.reshape((8, 64, 144), images)
    output = graph.node(sg.LSTMLayer.create(144, 128), steps)
    graph.node(sg.FullyConnectedLayer.create(128, 256), graph.reshape((512, 128), output))
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile("cpu", deterministic=deterministic)
    data = {"x": np.random.default_rng(0).standard_normal((8, 16, 12, 12), np.float32)}
    exact = inference.execute(data).result.numpy().copy()
    with rounding():
        settings = [getattr(torch.backends.mkldnn, kind).fp32_precision for kind in ("matmul", "conv", "rnn")]
        assert np.array_equal(inference.execute(data).result.numpy(), exact)
        inference.compile("cpu", deterministic=deterministic)
        assert np.array_equal(inference.execute(data).result.numpy(), exact)
        after = [getattr(torch.backends.mkldnn, kind).fp32_precision for kind in ("matmul", "conv", "rnn")]
        assert after == settings


def test_two_threads_never_launch_under_the_settings_of_the_other() -> None:
    order, first_is_in = list[str](), threading.Event()

    def other() -> None:
        assert first_is_in.wait(10)
        with surroundings.cudnn(Precision.of(True), tries=False, deterministic=False):
            order.append("other")
            assert Precision.of(None).tf32 == (True, True)

    before = Precision.of(None)
    thread = threading.Thread(target=other)
    thread.start()
    with surroundings.cudnn(Precision.of(False), tries=True, deterministic=True):
        first_is_in.set()
        thread.join(0.2)
        order.append("first")
        cudnn = torch.backends.cudnn
        assert Precision.of(None).tf32 == (False, False) and cudnn.benchmark and cudnn.deterministic
    thread.join(10)
    assert order == ["first", "other"] and Precision.of(None) == before


@pytest.mark.parametrize("replacing", [torch_private.without_checkpointing, torch_private.nothing_validated])
def test_what_two_threads_replace_is_restored(replacing: Callable[[], AbstractContextManager[None]]) -> None:
    def state() -> Any:
        return torch.utils.checkpoint.CheckpointFunction, torch.distributions.Distribution._validate_args

    before, entered, left = state(), threading.Event(), threading.Event()

    def other() -> None:
        with replacing():
            entered.set()
            assert left.wait(10)

    thread = threading.Thread(target=other)
    with replacing():
        thread.start()
        assert not entered.wait(0.2)  # it waits
    left.set()
    thread.join(10)
    assert entered.is_set() and state() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_child_that_is_forked_during_the_call_of_another_thread_can_call() -> None:
    training, has_turn, ends = network(), threading.Event(), threading.Event()
    training.compile(CPU)

    def hold() -> None:
        with turn(CPU):
            has_turn.set()
            ends.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has_turn.wait(10)
    child = os.fork()
    if not child:
        caller = threading.Thread(target=loss, args=(training,), daemon=True)
        caller.start()
        caller.join(20)
        os._exit(caller.is_alive())
    _, status = os.waitpid(child, 0)
    ends.set()
    thread.join()
    assert status == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_fork_during_the_step_of_another_thread_inherits_no_setting() -> None:
    """The child would wait for that thread for ever, and keep what it has changed."""
    is_in, ends = threading.Event(), threading.Event()

    def step() -> None:
        with surroundings.neutral(("matmul",)):
            is_in.set()
            ends.wait(0.3)

    with _new("matmul", "bf16"):
        thread = threading.Thread(target=step)
        thread.start()
        assert is_in.wait(10)
        child = os.fork()  # waits for the other thread
        if not child:
            caller = threading.Thread(target=step, daemon=True)
            setting = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
            caller.start()
            caller.join(20)
            os._exit(caller.is_alive() or setting != "bf16")
        _, status = os.waitpid(child, 0)
        thread.join()
    assert status == 0


@pytest.mark.parametrize("reads", ["rounding", "get_default_dtype"])
def test_a_check_notices_a_thread_that_changes_settings_meanwhile(monkeypatch: pytest.MonkeyPatch, reads: str) -> None:
    """What the check has read is a setting of that thread, which restores the caller's before the step begins."""

    def read_between(*_: str) -> Any:
        with surroundings._for_cpus if reads == "rounding" else surroundings._for_all_threads:
            return "ieee" if reads == "rounding" else torch.float32

    monkeypatch.setattr(surroundings if reads == "rounding" else torch, reads, read_between)
    assert surroundings.reach("cpu", reads != "rounding", ("matmul",) if reads == "rounding" else ())


def test_an_interrupt_between_two_settings_restores_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    change, changed = surroundings._set, list[str]()

    def interrupted(*given: Any) -> None:
        if changed:
            raise KeyboardInterrupt
        change(*given)
        changed.append(given[1].fp32_precision)

    monkeypatch.setattr(surroundings, "_set", interrupted)
    with _new("matmul", "bf16"):
        with pytest.raises(KeyboardInterrupt), surroundings.neutral(("matmul",)):
            raise AssertionError("it was not interrupted")
        assert changed == ["ieee"]
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["autocast", "rounding"])
def test_a_profile_under_any_mode_changes_no_bit(name: str) -> None:
    rng = np.random.default_rng(0)
    data = {"x": rng.standard_normal((256, 512), np.float32)}, {"y": rng.standard_normal((256, 512), np.float32)}

    def profiled(mode: AbstractContextManager[Any]) -> list[Any]:
        sg.set_seed(0)
        x, y, graph = sg.Tensor((256, 512)), sg.Tensor((256, 512)), sg.Graph()
        graph.dense(x, 512)  # large enough for oneDNN
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
        training.add_inputs({"x": x}, {"y": y})
        training.compile(CPU, deterministic=True)
        with mode:
            found = [training.execute(*data, options=sg.ExecutionOptions.PER_LAYER_PROFILING).loss for _ in range(3)]
            assert training.profile(*data).rows
        return found

    mode = torch.autocast("cpu", torch.bfloat16) if name == "autocast" else _old("medium")
    assert profiled(mode) == profiled(nullcontext())


def test_the_trial_of_layouts_in_a_first_call_is_independent_of_modes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tried, original = list[Any](), layout._losses_and_gradients

    def watched(*given: Any) -> Any:
        tried.append((torch.is_autocast_enabled("cpu"), torch.backends.mkldnn.conv.fp32_precision))  # type: ignore[attr-defined]
        return original(*given)

    monkeypatch.setattr(layout, "_losses_and_gradients", watched)
    x, y, graph = sg.Tensor((sg.BATCH, 3, 32, 32)), sg.Tensor((sg.BATCH,), "int64"), sg.Graph()
    images = x
    for _ in range(2):
        images = graph.max_pooling(graph.relu(graph.convolution(images, 16, 3)), 2)
    graph.dense(graph.reshape((sg.BATCH, -1), images), 10)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    with torch.autocast("cpu", torch.bfloat16), _new("conv", "bf16"):
        found = training.execute({"x": np.ones((64, 3, 32, 32), np.float32)}, {"y": np.arange(64) % 10}).loss
    assert np.isfinite(found) and tried and {*tried} == {(False, "ieee")}


def test_factors_of_products_with_results_in_half_precision_count_as_rounded() -> None:
    """A CPU computes such convolutions in float32."""
    x, y, graph = sg.Tensor((16, 16, 8, 8)), sg.Tensor((16,), "int64"), sg.Graph()
    graph.dense(graph.reshape((16, -1), graph.convolution(x, 16, 3)), 10)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU, compute_type="float16")
    (executable,) = training.compilation.programs.executables.values()
    assert executable.part.rounded == surroundings.ROUNDED
