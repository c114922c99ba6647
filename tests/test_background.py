"""A program ends as if nothing worked beside it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from stepgraph.compiler import fused_cache, fusion
from stepgraph.system import background
from tests.checkpoint_runs import compiled, network, train

# A program that ends while its step is being fused; the moment is given in seconds.
ENDING = """
import sys, time
import numpy as np
import stepgraph as sg
from stepgraph.compiler import fusion

x, y, graph = sg.Tensor((4, 32)), sg.Tensor((4, 32)), sg.Graph()
hidden = x
for _ in range(12):
    hidden = graph.tanh(graph.dense(hidden, 32))
training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(0.1))
training.add_inputs({"x": x}, {"y": y})
training.compile("cpu")
training.execute({"x": np.ones((4, 32), np.float32)}, {"y": np.ones((4, 32), np.float32)})
(executable,) = training.require_session("test").compilation.programs.executables.values()
fusion.load_compiler()
fusing = fusion.fuse_in_background(executable.part, executable.step)
time.sleep(float(sys.argv[1]))
assert not fusing.done() or fusing.exception() is None
"""


def end_after(seconds: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(folder / name))
    found = subprocess.run([sys.executable, "-c", ENDING, str(seconds)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", ""), f"after {seconds} s"


def test_a_program_that_ends_while_a_step_is_fused_ends_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_after(0.1, tmp_path, monkeypatch)


@pytest.mark.deep
@pytest.mark.parametrize("moment", range(30))
def test_a_program_that_ends_at_any_moment_ends_without_a_word(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_after(moment * 0.13, tmp_path, monkeypatch)


def test_threads_end_wherever_they_work() -> None:
    ended, begun = [], threading.Barrier(3)

    def work() -> None:
        try:
            begun.wait(10)
            while True:
                time.sleep(0.001)
        finally:
            ended.append(threading.current_thread())

    threads = [background.start("test", work) for _ in range(2)]
    begun.wait(10)
    background.end()
    assert {*threads} == {*ended} and not any(one.is_alive() for one in threads)


def test_the_end_does_not_wait_for_a_thread_that_waits() -> None:
    leave = threading.Event()
    thread = background.start("test", lambda: [leave.wait()])
    began = time.monotonic()
    background.end(0.2)
    assert time.monotonic() - began < 2 and thread.is_alive()
    leave.set()
    thread.join(10)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not say what a thread does")
def test_the_end_waits_for_a_thread_that_computes_outside_of_python() -> None:
    began = time.perf_counter()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    rounds = int(100_000 / (time.perf_counter() - began))  # a second's, without Python's lock
    thread = background.start("test", lambda: [hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)])
    background.end(0.2)
    assert not thread.is_alive()


def test_the_end_does_not_wait_for_python_code_that_cannot_be_ended() -> None:
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            with suppress(SystemExit):
                sum(range(1000))

    thread, began = background.start("test", work), time.monotonic()
    background.end(0.2, 5)
    took = time.monotonic() - began
    over.set()
    thread.join(10)
    assert took < 3


# A program that is interrupted while it waits for a thread at its end.
INTERRUPTED = """
import os, signal, sys, threading, time
from stepgraph.system import background


def interrupt():
    while sys.unraisablehook is usual:
        time.sleep(0.01)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)


usual = sys.unraisablehook
signal.signal(signal.SIGINT, signal.default_int_handler)
background.start("test", lambda: time.sleep(60))
threading.Thread(target=interrupt, daemon=True).start()
"""


@pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")
def test_an_impatient_ctrl_c_does_not_cut_the_end_short() -> None:
    found = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_a_step_remains_unfused_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    training = compiled(network())
    train(training, 0, 1)
    (executable,) = training.require_session("test").compilation.programs.executables.values()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    fused_cache.start_hashing.cache_clear()
    fused_cache.start_hashing()
    fusing = fusion.fuse_in_background(executable.part, executable.step)
    assert str(fusing.exception(0)) == "can't start new thread"
    assert fusing.has_searched.is_set() and not fusion.is_under_way()
