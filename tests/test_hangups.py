"""A terminal that is closed, or output that nobody can read: the run is saved, or it continues."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stepgraph as sg
from stepgraph.cli.main import FAILED, NO_READER, OK, main
from stepgraph.fitting.loop import BEST
from tests.fit_runs import arrays, renewed

HANGUP = getattr(signal, "SIGHUP", 0)
needs_hangups = pytest.mark.skipif(not HANGUP, reason="Windows has no SIGHUP")


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Hears of the terminal even where these tests run under `nohup`."""
    before = signal.signal(HANGUP, signal.SIG_DFL) if HANGUP else None
    yield
    if before is not None:
        signal.signal(HANGUP, before)


class Sent(sg.Callback):
    """Sends signals after some updates."""

    listens_to_steps = True

    def __init__(self, step: int, *numbers: int) -> None:
        self.at, self.numbers = step, numbers

    def step(self, moment: Any) -> None:
        if moment.step == self.at:
            for number in self.numbers:
                signal.raise_signal(number)


def fitted(*numbers: int, **settings: Any) -> sg.History:
    settings = {"epochs": 3, "progress": "quiet", "callbacks": [Sent(3, *numbers)]} | settings
    return sg.fit(renewed(), arrays(), **settings)


# Signals


@needs_hangups
@pytest.mark.parametrize(
    ("numbers", "status"),
    [((HANGUP,), 129), ((HANGUP, HANGUP), 129), ((HANGUP, signal.SIGTERM), 129), ((signal.SIGTERM, HANGUP), 143)],
    ids=["once", "by terminal and shell", "then SIGTERM", "after SIGTERM"],
)
def test_a_run_whose_terminal_is_closed_is_saved(numbers: tuple[int, ...], status: int, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        fitted(*numbers, checkpoints=tmp_path)
    assert caught.value.code == status
    assert signal.getsignal(HANGUP) == signal.SIG_DFL
    assert {one.name for one in tmp_path.iterdir()} == {"checkpoint-000001"}
    resumed = fitted(checkpoints=tmp_path / "plain")
    again = fitted(checkpoints=tmp_path, resume=True)
    assert again["loss"] == resumed["loss"] and (tmp_path / BEST).exists()


@needs_hangups
@pytest.mark.parametrize("ignores", [True, False])
def test_a_program_that_handles_hangups_itself_goes_on(ignores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    came = list[int]()
    before = signal.signal(HANGUP, signal.SIG_IGN if ignores else lambda number, _: came.append(number))
    try:
        assert fitted(HANGUP, HANGUP).stopped == "finished"
    finally:
        signal.signal(HANGUP, before)
    assert came == ([] if ignores else [HANGUP] * 2)


# Output that cannot be written


class Gone(io.StringIO):
    """Accepts nothing."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def write(self, _: str) -> int:
        raise self.error


PROBLEMS = [BrokenPipeError(32, "Broken pipe"), OSError(5, "Input/output error"), ValueError("I/O on closed file")]


@pytest.mark.parametrize("progress", ["plain", "rich"])
@pytest.mark.parametrize("error", PROBLEMS, ids=["pipe", "terminal", "closed"])
def test_progress_that_cannot_be_shown_does_not_end_training(
    error: Exception, progress: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = Gone(error)
    monkeypatch.setattr("sys.stdout", gone)
    history = fitted(progress=progress)
    assert sys.stdout is gone
    assert history.stopped == "finished" and len(history.epochs) == 3
    assert history.notes == [f"its progress could not be shown: {error}"]
    assert caplog.messages == [f"training continues, but {history.notes[0]}"]  # once


@pytest.mark.parametrize("progress", ["auto", "plain", "rich"])
def test_a_program_without_output_trains(progress: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert fitted(progress=progress).notes == []


def test_lines_are_shown_again_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        refuses = 1

        def flush(self) -> None:
            self.refuses -= 1
            if self.refuses >= 0:
                raise OSError(28, "No space left on device")

    out = Full()
    monkeypatch.setattr("sys.stdout", out)
    fitted(progress="plain")
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/3", "2/3", "3/3"]


# The command


def test_a_command_without_output_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    try:
        assert main(["devices"]) == OK
    finally:
        sys.stdout.close()


@pytest.mark.parametrize(("error", "code"), [(PROBLEMS[0], NO_READER), (PROBLEMS[1], FAILED)])
def test_a_command_says_why_it_cannot_write(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", Gone(error))
    assert main(["devices"]) == code
    assert capsys.readouterr().err == ("" if code == NO_READER else f"stepgraph devices: {error}\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
def test_a_full_disk_is_named_once() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "stepgraph", "completion", "bash"]
        found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=os.environ)
    assert (found.returncode, found.stderr) == (FAILED, f"stepgraph completion: {OSError(28, os.strerror(28))}\n")
