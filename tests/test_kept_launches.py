"""Later runs launch the kernels of a fused tiny step without PyTorch's compiler, and only if they are the same."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._functorch import config as tracing_settings
from torch._inductor import config as compiler_settings

import stepgraph as sg
from stepgraph.compiler import fused_cache, fusion, kept_files, kept_launches
from stepgraph.compiler.launch_record import Launch, Place, Record
from stepgraph.compiler.memory import MemoryPlan, Timeline
from stepgraph.compiler.program import Part, Phase
from stepgraph.compiler.tuned.replay import Replay
from stepgraph.system import torch_private
from tests.cli_graphs import Called

KEY = f"{64 * '0'}-{64 * '1'}"
LIVE: Timeline = [("first", Phase.FORWARD, {"activations": 10, "gradients": 0, "workspace": 0})]
needs_compiler = pytest.mark.skipif(not fusion.has_compiler(), reason="needs a C++ compiler")


@pytest.fixture
def folder(nothing_fuses: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "stepgraph" / "fused"


# Files


def scale(x: torch.Tensor, scratch: torch.Tensor, rest: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    """A kernel that gets addresses, so its arrays beside inputs and results are bytes."""
    scratch[:8].view(torch.float32).copy_(x)
    rest[:4].view(torch.float32).fill_(1.0)
    out.copy_(scratch[:8].view(torch.float32) * factor)


def shift(out: torch.Tensor, rest: torch.Tensor, added: int) -> None:
    out.add_(rest[:4].view(torch.float32) * added)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[Path, Callable[..., None]]:
    """Kernels in files of their own."""
    made = {tmp_path / f"{kernel.__name__}.so": kernel for kernel in (scale, shift)}
    for file in made:
        file.write_text(f"the code of {file.name}")
    named = {kernel: file for file, kernel in made.items()}
    monkeypatch.setattr(torch_private, "library_of", named.get)
    monkeypatch.setattr(torch_private, "kernel_in", made.__getitem__)
    return made


def recorded(*more: Any, factor: Any = 3.0) -> Record:
    """Two launches: one of three arrays and a number, and one that shares memory with it."""
    memory = torch.zeros(16, dtype=torch.uint8)
    first: list[Any] = [None, memory[:8], memory[8:], None, factor]
    second: list[Any] = [None, memory[8:], 5, *more]
    return Record(
        [Launch(scale, first), Launch(shift, second)],
        [[Place(first, 0)]],
        [[Place(first, 3), Place(second, 0)]],
        [((2,), (1,), torch.float32)],
        torch_private.allocate_on_cpu(),
    )


def test_launches_are_the_same_in_a_later_run(folder: Path, libraries: object) -> None:
    kept_launches.keep(KEY, kept_launches.Kept(recorded(), LIVE))
    found = kept_launches.load(KEY)
    assert found is not None and found.live == LIVE and [one.name for one in folder.iterdir()] == [f"{KEY}.launches"]
    replay = Replay.of(found.record)
    assert replay.is_direct
    results = [replay(torch.tensor([1.0, 2.0]))[0] for _ in range(2)]
    assert [one.tolist() for one in results] == [[8.0, 11.0]] * 2
    assert results[0].data_ptr() != results[1].data_ptr()  # the caller may keep them


def test_what_was_not_kept_is_not_found(folder: Path, libraries: object) -> None:
    assert kept_launches.load(KEY) is None and kept_launches.load(None) is None
    kept_launches.keep(None, kept_launches.Kept(recorded(), LIVE))
    assert not folder.exists()


@pytest.mark.parametrize("record", [recorded("a text"), recorded(factor=None)])
def test_arguments_of_another_kind_are_not_kept(folder: Path, libraries: object, record: Record) -> None:
    kept_launches.keep(KEY, kept_launches.Kept(record, LIVE))
    assert not kept_launches.files()


def test_kernels_without_a_library_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.library_of(scale) is None
    kept_launches.keep(KEY, kept_launches.Kept(recorded(), LIVE))
    assert not kept_launches.files()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: b"\0 no JSON",
        lambda text: b"[1]",
        lambda text: text.replace(KEY.encode(), b"2" + KEY[1:].encode()),
        lambda text: text.replace(b"3.0", b"4.0"),
        lambda text: bytes(kept_launches.LARGEST + 1),
    ],
)
def test_a_damaged_file_is_removed(folder: Path, libraries: object, damage: Callable[[bytes], bytes]) -> None:
    kept_launches.keep(KEY, kept_launches.Kept(recorded(), LIVE))
    (file,) = kept_launches.files()
    file.write_bytes(damage(file.read_bytes()))
    assert kept_launches.load(KEY) is None and not kept_launches.files()


@pytest.mark.parametrize("change", [Path.unlink, lambda library: library.write_text("other code")])
def test_a_library_that_is_not_the_same_is_not_loaded(
    folder: Path, libraries: dict[Path, Any], change: Callable[[Path], object]
) -> None:
    kept_launches.keep(KEY, kept_launches.Kept(recorded(), LIVE))
    change(next(iter(libraries)))
    assert kept_launches.load(KEY) is None and not kept_launches.files()


def test_the_oldest_files_make_room(folder: Path, libraries: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_launches, "MOST", 2)
    for number in range(3):
        kept_launches.keep(f"{number}{KEY[1:]}", kept_launches.Kept(recorded(), LIVE))
        for age, file in enumerate(kept_launches.files()):
            os.utime(file, (age, age))
    assert [one.name[0] for one in kept_launches.files()] == ["1", "2"]


def test_what_is_used_stays(folder: Path, libraries: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        kept_launches.keep(f"{number}{KEY[1:]}", kept_launches.Kept(recorded(), LIVE))
    for age, file in enumerate(kept_launches.files()):
        os.utime(file, (age, age))
    assert kept_launches.load(f"0{KEY[1:]}") is not None
    monkeypatch.setattr(kept_launches, "MOST", 2)
    kept_launches.keep(f"2{KEY[1:]}", kept_launches.Kept(recorded(), LIVE))
    assert [one.name[0] for one in kept_launches.files()] == ["0", "2"]


@pytest.mark.parametrize("kept", [kept_launches, fused_cache])
def test_a_folder_that_cannot_be_read_has_nothing(
    folder: Path, libraries: object, monkeypatch: pytest.MonkeyPatch, kept: Any
) -> None:
    kept_launches.keep(KEY, kept_launches.Kept(recorded(), LIVE))

    def refuse(*_: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "exists", refuse)
    arguments = (KEY,) if kept is kept_launches else (KEY, [])
    assert kept.load(*arguments) is None


def test_where_nothing_can_be_written_nothing_is_kept(
    folder: Path, libraries: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file")
    kept_launches.keep(KEY, kept_launches.Kept(recorded(), LIVE))
    monkeypatch.setattr(kept_files, "cache_folder", lambda: None)
    kept_launches.keep(KEY, kept_launches.Kept(recorded(), LIVE))
    assert kept_launches.load(KEY) is None and kept_launches.files() == []
    assert not [one for one in caplog.records if one.levelno > logging.DEBUG]


def test_the_command_clears_them(folder: Path, libraries: object, capsys: pytest.CaptureFixture[str]) -> None:
    kept_launches.keep(KEY, kept_launches.Kept(recorded(), LIVE))
    assert "0 files removed" in Called(capsys, "cache", "--clear", "--others").out and kept_launches.files()
    assert "1 file removed" in Called(capsys, "cache", "--clear").out and not kept_launches.files()


# Steps

BATCH = {"x": np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)}, {"y": np.array([0, 1, 2, 0])}


def network(width: int = 3) -> sg.TrainingGraph:
    """A step that updates parameters and statistics."""
    sg.set_seed(3)
    x, y = sg.Tensor((4, 6)), sg.Tensor((4,), "int64")
    graph = sg.Graph()
    graph.dense(graph.relu(graph.batch_normalization(x)), width)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    return training


def trained(**settings: Any) -> tuple[list[Any], MemoryPlan]:
    """The losses of a fused step, and its plan."""
    training = network()
    training.compile("cpu", fuse=True, **settings)
    losses = [training.execute(*BATCH).loss for _ in range(4)]
    (executable,) = training.compilation.programs.executables.values()
    assert executable.is_fused and training.memory_plan == executable.fused_plan and training.memory_plan.timeline
    return losses, training.memory_plan


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """How often PyTorch's compiler was asked."""
    found: list[object] = []
    ask = fusion._by_the_compiler

    def noted(*given: Any) -> Any:
        found.append(1)
        return ask(*given)

    monkeypatch.setattr(fusion, "_by_the_compiler", noted)
    return found


@needs_compiler
def test_a_later_run_does_not_ask_the_compiler(folder: Path, asked: list[object]) -> None:
    first = trained()
    assert len(asked) == 1 and len(kept_launches.files()) == 1
    assert trained() == first == trained() and len(asked) == 1
    (file,) = kept_launches.files()
    file.write_bytes(b"damaged")
    assert trained() == first and len(asked) == 2 and len(kept_launches.files()) == 1


@needs_compiler
def test_a_limit_of_memory_holds_in_later_runs(folder: Path, asked: list[object]) -> None:
    _, plan = first = trained(memory_limit=2**20)
    assert len(asked) == 1
    assert trained(memory_limit=2**20) == first and len(asked) == 1
    with pytest.raises(sg.MemoryLimitError):
        trained(memory_limit=plan.parameters)


def test_whatever_decides_the_kernels_decides_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, other = part_of(3), part_of(5)
    keys = [kept_launches.key(part, 1), kept_launches.key(part, 2), kept_launches.key(other, 1)]
    with monkeypatch.context() as patched:
        patched.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
        keys.append(kept_launches.key(part, 1))
    with compiler_settings.patch({"cpp.enable_floating_point_contract_flag": "fast"}):
        keys.append(kept_launches.key(part, 1))
    with compiler_settings.patch(post_grad_custom_post_pass=print):  # which the compiler's own key leaves out
        keys.append(kept_launches.key(part, 1))
    with tracing_settings.patch(treat_parameters_as_free_to_save=not tracing_settings.treat_parameters_as_free_to_save):
        keys.append(kept_launches.key(part, 1))
    torch.use_deterministic_algorithms(True)
    try:
        keys.append(kept_launches.key(part, 1))
    finally:
        torch.use_deterministic_algorithms(False)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", "3.0")
        keys.append(kept_launches.key(part, 1))
    assert None not in keys and len({*keys}) == len(keys)
    assert kept_launches.key(part, 1) == keys[0] == kept_launches.key(part_of(3), 1)


def part_of(width: int) -> Part:
    """The operators of a training step."""
    training = network(width)
    training.compile("cpu", fuse=False)
    (executable,) = training.compilation.programs.executables.values()
    return executable.part


@needs_compiler
def test_what_the_compiler_would_not_keep_is_not_kept(folder: Path) -> None:
    with compiler_settings.patch(force_disable_caches=True):
        trained()
    assert not kept_launches.files()


PROGRAM = """\
import sys
import numpy as np
import stepgraph as sg

sg.set_seed(0)
x, y = sg.Tensor((1, 8)), sg.Tensor((1,), "int64")
graph = sg.Graph()
graph.dense(graph.relu(graph.dense(x, 16)), 4)
training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-2))
training.add_inputs({"x": x}, {"y": y})
training.compile("cpu", fuse=True)
batch = {"x": np.ones((1, 8), np.float32)}, {"y": np.array([1])}
print([float(training.execute(*batch).loss) for _ in range(5)])
(executable,) = training.compilation.programs.executables.values()
print(executable.is_fused, "torch._inductor.compile_fx" in sys.modules)
"""


@needs_compiler
def test_another_process_does_not_load_the_compiler(folder: Path) -> None:
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    ]
    assert [one[1] for one in runs] == ["True True", "True False"]
    assert runs[0][0] == runs[1][0]  # the same bits
