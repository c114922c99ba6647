"""What other threads execute is read while they go on, without harm to them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import stepgraph as sg
from stepgraph.system import stacks

# A thread looks at the main one again and again. Its garbage lets the main thread go on wherever a collection comes,
# and leave frames meanwhile: some are in the memory of generators, which is free then.
LOOKING = f"""
import gc, threading, time
from stepgraph.system.stacks import line_of

gc.set_threshold(20)

class Garbage:
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(1e-4)

def generated(n):
    {", ".join(f"v{i}" for i in range(70))} = range(70)
    for i in range(n):
        yield v1 + sum(v2 for _ in range(9))

def deep(n):
    return deep(n - 1) if n else sum(generated(3)) + sum(generated(2))

def look():
    while True:
        Garbage()
        found.add(line_of(main))
        time.sleep(5e-4)

found, main = set(), threading.main_thread().ident
threading.Thread(target=look, daemon=True).start()
end, n = time.monotonic() + 3, 0
while time.monotonic() < end:
    deep(n % 40)
    n += 1
assert len(found) > 2 and all(one.startswith("program.py:") for one in found), found
"""


def test_looking_at_a_thread_does_no_harm_to_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LOOKING)
    found = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def waiting_in(file: str, inner: str = "") -> tuple[list[stacks.Line], str]:
    """What a thread is found to execute that waits in the second line of a file, or of another one called there."""
    begun, over = threading.Event(), threading.Event()
    space = {"begun": begun, "over": over}
    exec(compile("def fähig():\n    begun.set(); over.wait(10)", inner or file, "exec"), space)
    thread = threading.Thread(target=lambda: exec(compile("\nfähig()", file, "exec"), space))
    thread.start()
    begun.wait(10)
    assert thread.ident is not None
    found = stacks.lines(thread.ident), stacks.line_of(thread.ident)
    over.set()
    thread.join()
    assert stacks.lines(thread.ident) == [] and stacks.line_of(thread.ident) == "no line of your program"
    return found


@pytest.mark.parametrize("name", ["train.py", "my data/größe 数 🙂.py", 'with "quotes", line 3 in.py'])
def test_the_line_of_a_thread_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines, line = waiting_in(str(tmp_path / name))
    own = [one for one in lines if one.file == str(tmp_path / name)]
    assert [(one.number, one.function) for one in own] == [(2, "fähig"), (2, "<module>")]
    assert line in (f"{name}:2", f"{name}:2 (in wait)")  # it may be just in front of its wait


PYTHON = Path(os.__file__).parent
LIBRARIES = [PYTHON / "json" / "a.py", Path(torch.__file__).parent / "nn" / "a.py", Path(sg.__file__).parent / "a.py"]


@pytest.mark.parametrize(
    ("file", "is_library"),
    [
        *((str(one), True) for one in LIBRARIES),
        ("<string>", True),
        (str(PYTHON / "site-packages" / "mine" / "a.py"), False),
        (str(PYTHON.parent / "dist-packages" / "a.py"), False),
    ],
)
def test_lines_of_libraries_are_not_of_the_users_program(
    file: str, is_library: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, line = waiting_in(str(tmp_path / "train.py"), file)
    assert line.split(" ")[0] == ("train.py:2" if is_library else "a.py:2")


def test_collections_of_garbage_come_as_before() -> None:
    assert gc.isenabled() and stacks.lines(threading.get_ident()) and gc.isenabled()
    gc.disable()
    try:
        assert stacks.lines(threading.get_ident()) and not gc.isenabled()
    finally:
        gc.enable()


def test_threads_that_run_at_the_same_time_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert stacks.lines(threading.get_ident()) == []
    assert stacks.line_of(threading.get_ident()) == "no line of your program"
    assert stacks.place(threading.get_ident()) is None
