"""A later run finds what was compiled for a step before PyTorch's compiler starts, and nothing that is not the same."""

import logging
import operator
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx
from torch._functorch import config as tracing_settings
from torch._inductor import config as compiler_settings

import stepgraph as sg
from stepgraph.compiler import fused_cache, fused_memory, fusion, kept_files, outline, triton_launch
from stepgraph.compiler.kernels.update import expanded_update, number_of
from stepgraph.compiler.memory import MemoryPlan, Timeline
from stepgraph.compiler.modules import Module
from stepgraph.compiler.program import Part, Phase, note, set_fake
from stepgraph.compiler.step import Fusion
from stepgraph.compiler.trace import recording
from stepgraph.runtime import executable as executables
from stepgraph.system import torch_private
from tests.cli_graphs import Called

ENTRY = "f" + 51 * "a"
KEY = 64 * "0"
LIVE: Timeline = [
    ("first", Phase.FORWARD, {"activations": 10, "gradients": 0, "workspace": 0}),
    ("", Phase.UPDATE, {"activations": 0, "gradients": 0, "workspace": 30}),
]
OPTIMIZER = sg.SGDOptimizer(0.1)
aten = torch.ops.aten
needs_compiler = pytest.mark.skipif(not fusion.has_compiler(), reason="needs a C++ compiler")


@pytest.fixture
def folder(nothing_fuses: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "stepgraph" / "fused"


def graph(
    target: Any = aten.mul.Tensor, factor: Any = 2.0, shape: tuple[int, ...] = (2, 3), name: str = "x", **noted: Any
) -> tuple[fx.Graph, list[torch.Tensor]]:
    """A graph of one operator, and its input."""
    made = fx.Graph()
    x = made.placeholder(name)
    with torch_private.FakeTensorMode():
        array = torch.empty(shape)
    set_fake(x, array)
    y = made.call_function(target, (x, x if factor is None else factor))
    note(y, **{"layer": "a", "phase": Phase.FORWARD, **noted})
    made.output([y])
    return made, [array]


# Keys


def key_of(made: fx.Graph, arrays: list[torch.Tensor], *decided: object) -> str | None:
    return fused_cache.key(outline.of_graph(made), made, arrays, *decided)


def test_whatever_decides_the_code_decides_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    same = key_of(*graph(), {"a": 1}), key_of(*graph(name="other"), {"a": 1})
    assert same[0] == same[1] is not None
    keys = [
        same[0],
        key_of(*graph(), {"a": 2}),
        key_of(*graph(aten.add.Tensor), {"a": 1}),
        key_of(*graph(factor=2.0000000000000004), {"a": 1}),
        key_of(*graph(factor=2), {"a": 1}),
        key_of(*graph(factor=0), {"a": 1}),
        key_of(*graph(factor=None), {"a": 1}),
        key_of(*graph(shape=(3, 2)), {"a": 1}),
        key_of(*graph(phase=Phase.GRADIENT), {"a": 1}),
        key_of(*graph(recomputed=True), {"a": 1}),
    ]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "get_num_threads", lambda: 77)
        keys.append(key_of(*graph(), {"a": 1}))
    with monkeypatch.context() as patched:
        patched.setattr(outline, "source", lambda: "another version")
        keys.append(key_of(*graph(), {"a": 1}))
    for settings, name in ((compiler_settings, "max_autotune"), (tracing_settings, "treat_parameters_as_free_to_save")):
        with settings.patch(**{name: not getattr(settings, name)}):
            keys.append(key_of(*graph(), {"a": 1}))
    torch.use_deterministic_algorithms(True)
    try:
        keys.append(key_of(*graph(), {"a": 1}))
    finally:
        torch.use_deterministic_algorithms(False)
    assert None not in keys and len(set(keys)) == len(keys)


def test_what_may_change_unseen_has_no_key() -> None:
    library = torch.library.Library("of_somebody_else", "FRAGMENT")
    library.define("scale(Tensor x, float factor) -> Tensor")
    assert key_of(*graph(operator.mul)) is not None
    assert key_of(*graph(torch.ops.of_somebody_else.scale.default)) is None
    assert key_of(*graph(lambda x, factor: x)) is None
    assert key_of(*updating([])) is None and key_of(*updating(["p - g"])) is not None
    with_constant, arrays = graph()
    with with_constant.inserting_before():
        with_constant.get_attr("constant")
    assert key_of(with_constant, arrays) is None
    with compiler_settings.patch(force_disable_caches=True):
        assert key_of(*graph()) is None
    with compiler_settings.patch(fx_graph_cache=False):
        assert key_of(*graph()) is None
    with compiler_settings.patch(post_grad_custom_pre_pass=print):
        assert key_of(*graph()) is None


def test_an_update_is_known_by_its_rule_and_not_by_the_number_of_its_optimizer() -> None:
    another = sg.SGDOptimizer(0.2)
    by_norm = sg.SGDOptimizer(0.1, clip_norm=1.0)
    key = key_of(*updating(["p - g"]))
    assert key == key_of(*updating(["p - g"], another))
    others = key_of(*updating(["p - 2 * g"])), key_of(*updating(["p - g"], by_norm))
    assert len({key, *others}) == 3


def updating(rules: list[str], optimizer: sg.Optimizer = OPTIMIZER) -> tuple[fx.Graph, list[torch.Tensor]]:
    """A graph with an update."""
    found, arrays = graph()
    (x,) = found.find_nodes(op="placeholder")
    with found.inserting_after(x):
        found.call_function(expanded_update, ([x], [x], [], [], x, None, None, number_of(optimizer), "rate", rules))
    return found, arrays


# Files


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The entries that were loaded; PyTorch has all of them."""
    found: list[str] = []

    def load(entry: str, arrays: object) -> Any:
        found.append(entry)
        return compiled(entry).compiled

    monkeypatch.setattr(torch_private, "load_compiled", load)
    return found


def compiled(entry: str | None, live: Timeline | None = LIVE, places: Sequence[int] = ()) -> fused_cache.Kept:
    graph: Any = SimpleNamespace(cache_key="", _fx_graph_cache_key=entry)
    return fused_cache.Kept(graph, [*places], live)


def test_what_was_kept_is_found(folder: Path, loaded: list[str]) -> None:
    assert fused_cache.load(KEY, []) is None and fused_cache.load(None, []) is None
    fused_cache.keep(KEY, compiled(ENTRY))
    fused_cache.keep(None, compiled(ENTRY))
    fused_cache.keep(KEY[1:] + "1", compiled(None))
    assert [one.name for one in folder.iterdir()] == [f"{KEY}.json"]
    found = fused_cache.load(KEY, [])
    assert found is not None and found.live == LIVE and loaded == [ENTRY]
    assert fused_cache.load(KEY[1:] + "1", []) is None


def test_compiled_code_gets_the_arrays_that_it_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[list[torch.Tensor]]()
    monkeypatch.setattr(torch_private, "load_compiled", lambda entry, arrays: given.append(arrays) or "compiled")
    fused_cache.keep(KEY, compiled(ENTRY, places=[0, 2]))
    arrays = [torch.ones(count) for count in (1, 2, 3)]
    found = fused_cache.load(KEY, arrays)
    assert found is not None and found.places == [0, 2] and given == [[arrays[0], arrays[2]]]
    assert fused_cache.load(KEY, arrays[:2]) is None and not list(folder.iterdir())  # it is of another step


def test_a_timeline_may_be_unknown_or_too_long(
    folder: Path, loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_cache.keep(KEY, compiled(ENTRY, None))
    fused_cache.keep(KEY[1:] + "1", compiled(ENTRY, []))
    monkeypatch.setattr(fused_cache, "LARGEST", 400)
    fused_cache.keep(KEY[1:] + "2", compiled(ENTRY, 100 * LIVE))
    for key, live in ((KEY, None), (KEY[1:] + "1", []), (KEY[1:] + "2", None)):
        found = fused_cache.load(key, [])
        assert found is not None and found.live == live


def test_what_was_kept_is_known_by_the_beginning_of_its_key(folder: Path) -> None:
    assert not fused_cache.knows("ab")
    fused_cache.keep(f"ab-{KEY}", compiled(ENTRY))
    assert fused_cache.knows("ab") and not fused_cache.knows("a") and not fused_cache.knows(KEY)


def test_the_outline_of_a_part_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, of_graph = list[fx.Graph](), outline.of_graph
    monkeypatch.setattr(outline, "of_graph", lambda one: (calls.append(one), of_graph(one))[1])
    parts = [Part(Module(torch.nn.Module(), one), (), ()) for one, _ in (graph(), graph(operator.mul))]
    outlines = [outline.of(part) for part in (*parts, *parts)]
    assert outlines[:2] == outlines[2:] == [of_graph(part.module.graph) for part in parts] and len(calls) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: text.replace(b"faaa", b"fbaa"),
        lambda text: text.replace(KEY.encode(), b"1" + KEY[1:].encode()),
        lambda text: b"\0 no JSON",
        lambda text: b"[1]",
        lambda text: b"{}",
        lambda text: b'{"entry": 5}',
        lambda text: text.replace(b"[1,2,0,0,30]", b"[1,2,0,0,31]"),
        lambda text: fused_cache._text(KEY, ENTRY, [], (["a"], [[0, 0, 1, 2, -3]])),
        lambda text: fused_cache._text(KEY, ENTRY, [], (["a"], [[0, 0, 1, 2, "3"]])),  # type: ignore[list-item]
        lambda text: fused_cache._text(KEY, ENTRY, [], (["a"], [[0, 0, 1, 2]])),
        lambda text: fused_cache._text(KEY, ENTRY, [], (["a"], [[1, 0, 1, 2, 3]])),
        lambda text: fused_cache._text(KEY, ENTRY, [-1], None),
        lambda text: fused_cache._text(KEY, ENTRY, ["0"], None),  # type: ignore[list-item]
        lambda text: bytes(fused_cache.LARGEST + 1),
        lambda text: fused_cache._text(KEY, "f/../../../../../somewhere/else", [], None),
    ],
)
def test_a_damaged_file_is_removed_with_one_line(
    folder: Path, loaded: list[str], caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    fused_cache.keep(KEY, compiled(ENTRY))
    (file,) = fused_cache.files()
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING, "stepgraph"):
        assert fused_cache.load(KEY, []) is None
    (line,) = caplog.messages
    assert line.startswith(f"compiling again instead of using {file}")
    assert not file.exists() and loaded == []


def test_an_entry_that_pytorch_cannot_load_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> Any:
        raise AttributeError("renamed")

    for load, expected in ((fail, ["renamed"]), (lambda *_: None, [])):
        caplog.clear()
        fused_cache.keep(KEY, compiled(ENTRY))
        monkeypatch.setattr(torch_private, "load_compiled", load)
        assert fused_cache.load(KEY, []) is None and fused_cache.files() == []
        assert [line.rpartition(": ")[2] for line in caplog.messages] == expected


def test_the_oldest_files_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_cache, "MOST", 2)
    ages: dict[str, int] = {}
    monkeypatch.setattr(kept_files, "_age", lambda file: ages[file.stem[0]])
    for number, key in enumerate("cab"):
        ages[key] = number
        fused_cache.keep(key + KEY[1:], compiled(ENTRY))
    assert [one.name[0] for one in fused_cache.files()] == ["a", "b"]


def test_without_a_folder_nothing_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    fused_cache.keep(KEY, compiled(ENTRY))
    assert fused_cache.load(KEY, []) is None and fused_cache.files() == [] and not caplog.messages
    monkeypatch.setattr(kept_files, "cache_folder", lambda: None)
    fused_cache.keep(KEY, compiled(ENTRY))
    assert fused_cache.load(KEY, []) is None and fused_cache.files() == []


def test_the_command_counts_and_clears_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in "012":
        fused_cache.keep(number + KEY[1:], compiled(ENTRY))
    assert "3 steps, " in Called(capsys, "cache").out
    assert "0 files removed" in Called(capsys, "cache", "--clear", "--others").out and len(fused_cache.files()) == 3
    assert "0 files removed" in Called(capsys, "cache", "--clear", "sum").out and len(fused_cache.files()) == 3
    assert "3 files removed" in Called(capsys, "cache", "--clear").out and fused_cache.files() == []
    assert "steps" not in Called(capsys, "cache").out


# Steps


@needs_compiler
def test_a_step_that_is_compiled_again_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_found_again("cpu", folder, monkeypatch)


@pytest.mark.gpu
def test_a_step_on_a_gpu_that_is_compiled_again_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_found_again("cuda", folder, monkeypatch)


def require_found_again(device: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, plan = losses(device)
    (file,) = fused_cache.files()
    with monkeypatch.context() as patched:
        patched.setattr(fusion, "_compiled", None)  # the compiler does not start
        patched.setattr(fused_memory, "timeline", None)  # nor is its code looked at again
        assert losses(device) == (first, plan)
    file.write_bytes(b"damaged")
    assert losses(device) == (first, plan) and [one.name for one in fused_cache.files()] == [file.name]


def losses(device: str) -> tuple[list[Any], MemoryPlan]:
    """Those of a fused step, and its plan."""
    training = network(device, fuse=True)
    return [training.execute(*BATCH).loss for _ in range(4)], training.memory_plan


BATCH = {"x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)}, {"y": np.array([0, 1, 2, 0])}


def network(device: str, **settings: Any) -> sg.TrainingGraph:
    """A step that updates parameters and statistics."""
    sg.set_seed(3)
    x, y = sg.Tensor((4, 6)), sg.Tensor((4,), "int64")
    made = sg.Graph()
    made.dense(made.relu(made.batch_normalization(x)), 3)
    training = sg.TrainingGraph([made], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(device, **settings)
    return training


# Steps that are fused in the background, as on a GPU


@pytest.fixture
def later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and steps on the CPU that are fused like those on a GPU."""
    monkeypatch.setattr("stepgraph.graphs.compilation.fusion_of", lambda *_: Fusion.LATER)
    return folder


def fused_in_the_background() -> list[Any]:
    """The losses of fused steps, which later runs find."""
    training = network("cpu")
    (executable,) = training.compilation.programs.executables.values()
    executable.fuse_later({})
    executable._fusing.result(300)
    found = [training.execute(*BATCH).loss for _ in range(3)]
    assert printed(training).endswith("s") and "in the background" in printed(training)
    return found


def printed(training: sg.TrainingGraph) -> str:
    (line,) = (line.strip() for line in str(training).splitlines() if line.strip().startswith("fused "))
    return line


@needs_compiler
def test_the_first_step_is_fused_if_an_earlier_run_has_fused_it(
    later: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = fused_in_the_background()
    assert "steps run faster from now on" in caplog.text
    caplog.clear()
    monkeypatch.setattr(fusion, "_compiled", None)
    training = network("cpu")
    (executable,) = training.compilation.programs.executables.values()
    assert executable.fusing == "not yet" and training.memory_plan.total > 0
    assert training.execute(*BATCH).loss == first[0]  # the bits of a fused step
    assert executable.mode == "fused traced" and executable.fusing == "done"
    assert "before the first step" in printed(training)
    (line,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert line.startswith(f"loaded {len(executable.part.nodes)} operators, fused by an earlier run, in ")
    assert [training.execute(*BATCH).loss for _ in range(2)] == first[1:]


@needs_compiler
@pytest.mark.parametrize("planned", [True, False])
def test_operators_are_not_changed_for_the_compiler_again(
    later: Path, monkeypatch: pytest.MonkeyPatch, planned: bool
) -> None:
    """Only the plan would need them, and it is kept as soon as it is known; the same bits and the same plan result."""
    training, changed, change = network("cpu"), list[Part](), fusion._prepared
    (executable,) = training.compilation.programs.executables.values()
    executable.fuse_later({})
    fused = executable._fusing.result(300)
    plan = fused.plan()
    losses = [training.execute(*BATCH).loss for _ in range(3)]
    if not planned:  # the process ends before that
        (file,) = fused_cache.files()
        entry, places, _ = fused_cache._read(file, file.stem)
        file.write_bytes(fused_cache._text(file.stem, entry, places, None))
    monkeypatch.setattr(fusion, "_compiled", None)
    monkeypatch.setattr(fusion, "_prepared", lambda part, step: (changed.append(part), change(part, step))[1])
    for _ in range(2):  # later processes
        training = network("cpu")
        assert [training.execute(*BATCH).loss for _ in range(3)] == losses
        (executable,) = training.compilation.programs.executables.values()
        assert executable.mode == "fused traced" and training.memory_plan.total == plan.total
    assert len(changed) == (not planned)


@needs_compiler
def test_the_first_step_does_not_wait_for_the_compiler(
    later: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If PyTorch has lost what it kept, steps run unfused while it compiles again."""
    fused_in_the_background()
    caplog.clear()
    may_end, real = threading.Event(), fusion._compiled

    def compiled(*given: Any) -> Any:
        assert may_end.wait(60)
        return real(*given)

    monkeypatch.setattr(fusion, "_compiled", compiled)
    monkeypatch.setattr(torch_private, "load_compiled", lambda *_: None)
    training = network("cpu")
    (executable,) = training.compilation.programs.executables.values()
    training.execute(*BATCH)
    assert executable.mode == "traced" and executable.fusing == "under way"
    executable.fuse_later({})  # once is enough
    may_end.set()
    executable._fusing.result(300)
    training.execute(*BATCH)
    assert executable.mode == "fused traced" and "in the background" in printed(training)
    assert "steps run faster from now on" in caplog.text


@needs_compiler
def test_the_first_step_does_not_wait_while_another_is_compiled(later: Path) -> None:
    fused_in_the_background()
    training = network("cpu")
    (executable,) = training.compilation.programs.executables.values()
    held, may_end = threading.Event(), threading.Event()

    def compile_another() -> None:
        with recording:
            held.set()
            assert may_end.wait(60)

    thread = threading.Thread(target=compile_another)
    thread.start()
    assert held.wait(60)
    training.execute(*BATCH)
    assert executable.mode == "traced" and executable.fusing == "under way"
    may_end.set()
    thread.join()
    executable._fusing.result(60)
    training.execute(*BATCH)
    assert executable.mode == "fused traced"


def test_a_step_that_nobody_has_fused_does_not_look_for_the_compiler(
    later: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_cache.keep(f"{KEY}-{KEY}", compiled(ENTRY))  # of another step
    monkeypatch.setattr(fusion, "fuse_in_background", None)
    training = network("cpu")
    (executable,) = training.compilation.programs.executables.values()
    training.execute(*BATCH)
    assert executable.mode == "traced" and executable.fusing == "not yet"


@needs_compiler
def test_a_large_step_is_fused_beside_its_first_call(later: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts, real = list[str](), fusion.fuse_in_background
    small = network("cpu")
    unfused = [float(small.execute(*BATCH).loss) for _ in range(2)]

    def noted(*given: Any) -> Any:
        starts.append(executable.mode)
        return real(*given)

    monkeypatch.setattr(executables, "LARGE", 1)
    monkeypatch.setattr(fusion, "fuse_in_background", noted)
    training = network("cpu")
    (executable,) = training.compilation.programs.executables.values()
    assert not starts  # nothing is called yet
    found = [float(training.execute(*BATCH).loss)]
    assert starts == ["traced"] and executable._fusing is not None
    executable._fusing.result(300)
    found.append(float(training.execute(*BATCH).loss))
    assert executable.mode == "fused traced" and "in the background" in printed(training)
    assert fused_cache.files() and found == pytest.approx(unfused, rel=1e-5)
    training.inference().execute(BATCH[0])
    training.execute(*({name: array[:2] for name, array in one.items()} for one in BATCH), batch_size=2)
    assert len(starts) == 1  # whoever predicts may do it once, and there are short last batches


@pytest.mark.parametrize("hinders", ["the size", "the precision", "the caller"])
def test_a_step_is_not_fused_beside_its_first_call_if(
    hinders: str, later: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first call runs under the settings of its step, by which the compiler distinguishes what it keeps."""
    monkeypatch.setattr(executables, "LARGE", 1 if hinders != "the size" else executables.LARGE)
    monkeypatch.setattr(fusion, "fuse_in_background", None)
    training = network("cpu", tf32=hinders == "the precision")
    (executable,) = training.compilation.programs.executables.values()
    with torch.autocast("cpu", enabled=hinders == "the caller"):
        training.execute(*BATCH)
    assert executable.fusing == "not yet"


def test_triton_hashes_its_files_while_a_step_is_recorded(later: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = threading.Event()
    asked: list[str] = []

    def imported(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(triton_key=hashed.set)

    monkeypatch.setattr(fused_cache, "importlib", SimpleNamespace(import_module=imported))
    fused_cache.start_hashing.cache_clear()
    network("cpu")
    assert not asked  # nothing is kept, so no key will be needed soon
    fused_cache.keep(KEY, compiled(ENTRY))
    for _ in range(2):
        network("cpu")
        assert hashed.wait(60)
    assert asked == ["triton.runtime.cache"]
    fused_cache.start_hashing.cache_clear()


@needs_compiler
def test_what_fails_to_load_leaves_the_step_as_it_was(
    later: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fused_in_the_background()
    caplog.clear()

    def broken(*_: object) -> Any:
        raise fusion.Unusable("no kernel is right")

    monkeypatch.setattr(fusion, "_of_all", broken)
    training = network("cpu")
    (executable,) = training.compilation.programs.executables.values()
    assert np.isfinite([float(training.execute(*BATCH).loss) for _ in range(3)]).all()
    assert executable.fusing == "no kernel is right"
    warnings = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert warnings == ["operators remain unfused: no kernel is right"]


@needs_compiler
def test_a_kernel_that_cannot_be_compiled_leaves_the_step_as_it_was(
    later: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("no such instruction")

    def compiled_with_kernel(module: Any, step: Any, arrays: Any, settings: Any) -> Any:
        triton_launch.launch(SimpleNamespace(warmup=broken), (1,), arrays[0])
        return compile_kernels(module, step, arrays, settings)

    compile_kernels = fusion._compiled
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(fusion, "_compiled", compiled_with_kernel)
    training = network("cpu")
    (executable,) = training.compilation.programs.executables.values()
    executable.fuse_later({})
    assert str(executable._fusing.exception(300)) == "no such instruction"
    assert np.isfinite([float(training.execute(*BATCH).loss) for _ in range(3)]).all()
    assert executable.fusing == "no such instruction"
    assert not fused_cache.files()  # a later run would launch it


@needs_compiler
def test_steps_that_are_fused_at_a_fixed_step_are_not_fused_before(
    later: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_in_the_background()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(later.parents[1]))
    training = network("cpu")
    (executable,) = training.compilation.programs.executables.values()
    training.execute(*BATCH)
    assert fused_cache.files() and not executable.is_fused


@pytest.mark.gpu
def test_the_first_step_on_a_gpu_is_fused_if_an_earlier_run_has_fused_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = [{name: torch.tensor(array, device="cuda") for name, array in one.items()} for one in BATCH]
    training = network("cuda", tf32=True)  # a setting of the step, not of the process
    (executable,) = training.compilation.programs.executables.values()
    found = [float(training.execute(*on_gpu).loss) for _ in range(3)]
    until = time.monotonic() + 300
    while not executable.is_fused and time.monotonic() < until:
        training.execute(*on_gpu)
        time.sleep(0.01)
    assert executable.is_fused and "in the background" in printed(training)
    monkeypatch.setattr(fusion, "_compiled", None)
    again = network("cuda", tf32=True)
    (executable,) = again.compilation.programs.executables.values()
    # TF32 rounds products; fused ones that are small do without it.
    assert [float(again.execute(*on_gpu).loss) for _ in range(3)] == pytest.approx(found, rel=5e-3)
    assert "before the first step" in printed(again)
    assert executable.mode == "fused CUDA graph" and again.memory_plan == training.memory_plan


def test_without_its_source_nothing_of_other_processes_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = outline.source.__wrapped__
    assert known() == known()
    monkeypatch.setattr(outline, "__file__", str(tmp_path / "all.zip" / "stepgraph" / "compiler" / "x.py"))
    assert known() != known()
