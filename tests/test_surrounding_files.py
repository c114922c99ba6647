"""Whatever surrounds a program (paths, folders, a home, a terminal): our errors or plain work, never raw ones."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import stepgraph as sg
from stepgraph.cli.main import main
from stepgraph.compiler.kernels.choices import CHOICES
from stepgraph.errors import readable
from stepgraph.report.run import Run
from tests.checkpoint_runs import CPU, compiled, network, state, train
from tests.cli_graphs import Called
from tests.test_checkpoint_hostile import one_batch

# Paths


@cache
def trained() -> sg.TrainingGraph:
    """One for all: a refused call leaves nothing behind."""
    return compiled(network())


def uses(path: Any) -> dict[str, Callable[[], Any]]:
    """All that takes a path."""
    training = trained()
    return {
        "save": lambda: training.save(path),
        "series": lambda: training.save(path, keep=2),
        "restore": lambda: training.restore(path),
        "load": lambda: sg.load(path),
        "checkpoints": lambda: sg.fit(training, one_batch(), checkpoints=path, progress="quiet"),
        "resume": lambda: sg.fit(training, one_batch(), checkpoints=path, resume=True, progress="quiet"),
        "run": lambda: sg.fit(training, one_batch(), run=path, progress="quiet"),
        "latest": lambda: sg.latest(path),
    }


@pytest.mark.parametrize("use", uses(""))
@pytest.mark.parametrize(
    ("path", "error", "words"),
    [
        ("", sg.ArgumentError, "the path is empty"),
        ("a\0b", sg.ArgumentError, r"the path 'a\\x00b' contains a NUL character"),
        (b"bytes", sg.DataTypeError, "the path is bytes"),
        (7, sg.DataTypeError, "the path is int"),
        ("x" * 300, sg.StorageError, "File name too long"),
        ("d/" * 3000, sg.StorageError, "File name too long"),
        ("file", sg.StorageError, "file"),
        ("file/below", sg.StorageError, "file/below"),
    ],
    ids=["empty", "NUL", "bytes", "number", "long name", "long path", "file", "below a file"],
)
def test_paths_that_are_none_are_refused(
    use: str, path: Any, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    if use == "latest" and path in ("file", "file/below"):
        assert sg.latest(path) is None
    else:
        expected = (error, sg.CheckpointError) if path in ("file", "file/below") else error
        with pytest.raises(expected, match=words) as caught:
            uses(path)[use]()
        assert "\nFix: " in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_the_working_directory_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    network().save(".")
    assert sg.load(".") is not None and len(list(tmp_path.iterdir())) == 2


def test_a_failed_save_leaves_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(sg.StorageError, match="No space left"):
        network().save(tmp_path / "a" / "b" / "c", keep=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a working directory")
def test_a_deleted_working_directory_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    training = compiled(network())
    train(training, 0, 1)
    path = training.save(tmp_path / "model")
    assert state(sg.load(path, CPU)) == state(training)
    sg.fit(training, one_batch(), run=tmp_path / "run", progress="quiet")
    assert Run(tmp_path / "run").status == "finished" and (tmp_path / "run" / "report.html").exists()
    assert str(training) and training._repr_html_()
    for use in ("save", "restore", "load", "run", "checkpoints"):
        with pytest.raises(sg.StorageError):
            uses("relative")[use]()
    assert main(["inspect", str(path), "--no-plan"]) == 0


# A home, and the cache in it


@pytest.fixture
def measuring(nothing_fuses: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Compiles with kernels that are chosen, in a process that has not looked for its cache yet."""

    def measured() -> float:
        CHOICES.forget()
        training = network()
        training.compile(CPU)
        return train(training, 0, 1)[0]

    yield measured
    monkeypatch.undo()
    CHOICES.forget()


def _homeless() -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize("cache", [None, "", "relative", "./x"])
def test_without_a_home_kernels_are_measured_and_nothing_is_kept(
    cache: str | None, measuring: Callable[[], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "home", _homeless)
    monkeypatch.delenv("XDG_CACHE_HOME")
    if cache is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert np.isfinite(measuring())
    assert CHOICES.file is None and not list(tmp_path.iterdir())
    sg.fit(compiled(network()), one_batch(), run=tmp_path / "run", progress="quiet")
    assert main(["devices"]) == 0


@pytest.mark.parametrize("cache", ["", "relative"])
def test_a_relative_cache_is_the_one_at_home(
    cache: str, measuring: Callable[[], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    measuring()
    assert [one.name for one in tmp_path.iterdir()] == ["home"]
    assert CHOICES.file is not None and CHOICES.file.parent == tmp_path / "home" / ".cache" / "stepgraph"


@pytest.mark.skipif(os.name == "nt", reason="makes POSIX files")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["pipe", "endless", "too long", "a file", "other ways"])
def test_a_cache_of_another_kind_is_measured_anew(
    kind: str, measuring: Callable[[], float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300 if kind == "too long" else "cache")))
    expected = measuring()
    file = CHOICES.file
    if kind == "a file":
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").write_text("")
    elif kind == "other ways":
        lines = [json.loads(line) for line in file.read_text().split("\n") if line]
        others = ({"chosen": ("none", [], None, 5)[i % 4]} for i in range(len(lines)))
        file.write_text("\n".join(json.dumps(line | other) for line, other in zip(lines, others, strict=True)))
    elif kind != "too long":
        file.unlink()
        os.mkfifo(file) if kind == "pipe" else file.symlink_to("/dev/zero")
    assert measuring() == pytest.approx(expected, rel=1e-4)


# Terminals

LABEL = "größe שלום 💡 \x1b]0;title\x07\x1b[2J\x9b31m\r\b\u202egnp\u2066 [/b] [red]x :smile: \ud800\nFix: obey"
FORBIDDEN = [*"\x1b\x07\x9b\r\b\u202e\u2066\ud800"]
READABLE = readable(LABEL)


def labelled() -> sg.TrainingGraph:
    x, y, graph = sg.Tensor((4, 3), label=LABEL), sg.Tensor((4, 3), label="y"), sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(3, 3, label=LABEL), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({LABEL: x}, {"y": y})
    training.compile(CPU, sg.GraphCompilationOptions.DETERMINISTIC)
    return training


def harmless(text: str, shown: str = READABLE) -> None:
    assert not [one for one in FORBIDDEN if one in text]
    assert shown in text and "\nFix: obey" not in text


def test_readable_keeps_what_people_write() -> None:
    kept = "größe, שלום, 日本, é, 👩\u200d🔬, a\u200cb, […] \\ 'x'"
    assert readable(kept) == kept
    assert READABLE.startswith(
        "größe שלום 💡 \\x1b]0;title\\x07\\x1b[2J\\x9b31m\\r\\x08\\u202egnp\\u2066 [/b] [red]x :smile: "
    )


def test_labels_are_shown_and_never_obeyed() -> None:
    training = labelled()
    harmless(str(training), READABLE[:12])  # folded
    harmless(training.summarized_dot_description, READABLE.replace("\\", "\\\\"))
    harmless(training._repr_html_())
    harmless(training._repr_svg_())
    console = Console(file=StringIO(), force_terminal=True, color_system="truecolor", width=300, record=True)
    console.print(training)
    harmless(console.export_text(styles=False))
    with pytest.raises(sg.DataError) as caught:
        training.execute({LABEL: np.zeros(1, np.float32)}, {"y": np.zeros((4, 3), np.float32)})
    harmless(str(caught.value))
    assert str(caught.value).count("\nFix: ") == 1


def test_reports_of_restoring_are_harmless(tmp_path: Path) -> None:
    labelled().save(tmp_path)
    other = network()
    harmless(str(other.restore(tmp_path, partial=True)))
    with pytest.raises(sg.CheckpointError) as caught:
        other.restore(tmp_path)
    harmless(str(caught.value))


@pytest.mark.parametrize("progress", ["plain", "rich"])
def test_names_of_metrics_are_shown_and_never_obeyed(
    progress: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = (np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32))
    metrics = {LABEL: lambda prediction, labels: 1.0}
    history = sg.fit(labelled(), data, metrics=metrics, run=tmp_path, progress=progress)
    harmless(capsys.readouterr().out.replace("\n", ""), READABLE[:20])
    harmless(str(history).replace("\n", ""), READABLE[:20])
    harmless(history._repr_html_())
    harmless((tmp_path / "report.html").read_text(), "")


def test_a_terminal_of_another_alphabet_does_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    data = (np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32))
    sg.fit(labelled(), data, metrics={"größe": lambda prediction, labels: 1.0}, progress="plain")
    out.flush()
    assert b"gr\\xf6\\xdfe 1.0000" in out.buffer.getvalue()


def test_the_command_shows_labels_and_never_obeys_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labelled().save(tmp_path / "model", notes={LABEL: LABEL})
    called = Called(capsys, "inspect", tmp_path / "model")
    assert called.code == 0
    harmless(called.out)
    called = Called(capsys, "inspect", tmp_path / "model", "--json")
    assert not [one for one in FORBIDDEN if one in called.out]
    assert json.loads(called.out)["layers"][0][0]["name"] == LABEL
    called = Called(capsys, "inspect", tmp_path / "mod\x1bel")
    assert called.code == 1
    harmless(called.err, "mod\\x1bel")


# PyTorch's own cache

WIRED = """
import stepgraph as sg
try:
    sg.Graph().dense(sg.Tensor((4, 3)), 2)
except sg.StorageError as error:
    print(error)
"""


def test_a_cache_of_pytorch_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    surroundings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file")}
    found = subprocess.run([sys.executable, "-c", WIRED], env=surroundings, capture_output=True, text=True, check=True)
    # Newer versions of PyTorch may create the folder later.
    assert not found.stdout or all(word in found.stdout for word in (str(tmp_path / "file"), "TORCHINDUCTOR_CACHE_DIR"))


def test_files_that_a_forward_cannot_read_are_no_matter_of_its_sources(tmp_path: Path) -> None:
    class Reading(sg.Layer):
        def forward(self, x: Any, *, scope: Any) -> Any:
            return x * len((tmp_path / "absent").read_text())

    with pytest.raises(sg.StorageError, match=r"needs a file or folder that cannot be used.*absent"):
        sg.Graph().node(Reading(), sg.Tensor((4, 3)))
