"""Processes that fork while a step is compiled or fused: a data loader does so for its workers."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from stepgraph.compiler import fusion
from stepgraph.compiler.fusion import Unusable
from stepgraph.system import surroundings
from tests.checkpoint_runs import compiled, network, train
from tests.forked import forked

WAITS = 0.5  # seconds until the fork has certainly begun

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def fork_while_fusing(folder: Path) -> None:
    """Forks while the compiler works, which then needs a lock of a file and a pool of threads; both go on to train."""
    training, begun = compiled(network()), threading.Event()
    train(training, 0, 1)
    (executable,) = training.require_session("test").compilation.programs.executables.values()

    def compiler(*_: Any) -> Any:
        begun.set()
        time.sleep(WAITS)
        with FileLock(folder / "lock"), ThreadPoolExecutor(1) as pool:
            pool.submit(time.sleep, 0).result()
        raise Unusable("it is not the real one")

    fusion._compiled = compiler
    fusing = fusion.fuse_in_background(executable.part, executable.step)
    assert begun.wait(60)
    child = os.fork()
    training.compile("cpu")  # records again
    train(training, 1, 2)
    if child:
        assert isinstance(fusing.exception(0), Unusable)  # the fork has waited for it
        assert os.waitpid(child, 0)[1] == 0
    os._exit(0)


def fork_while_compiling() -> None:
    """Forks while another thread has changed settings of the process and has yet to record a step."""
    torch.set_default_dtype(torch.float64)
    has_changed = threading.Event()

    def compile_() -> None:
        with surroundings.tracing():
            has_changed.set()
            time.sleep(WAITS)
            compiled(network())

    thread = threading.Thread(target=compile_)
    thread.start()
    assert has_changed.wait(60)
    child = os.fork()
    assert torch.get_default_dtype() is torch.float64
    train(compiled(network()), 0, 1)
    if child:
        thread.join()
        assert os.waitpid(child, 0)[1] == 0
    os._exit(0)


def test_a_fork_waits_for_a_thread_that_has_changed_settings() -> None:
    process = forked().Process(target=fork_while_compiling)
    process.start()
    process.join(60)
    ended = process.exitcode
    process.kill()
    assert ended == 0


def test_a_fork_waits_for_a_fusion_that_needs_locks_of_others(tmp_path: Path) -> None:
    process = forked().Process(target=fork_while_fusing, args=(tmp_path,))
    process.start()
    process.join(60)
    ended = process.exitcode
    process.kill()
    assert ended == 0
