"""Ctrl-C at moments drawn at random: what was being done has happened or has not, and all goes on as if undisturbed."""

import json
import os
from pathlib import Path

import pytest

from tests.forked import forked
from tests.interrupt_runs import KINDS, Counts, interrupt_and_tell

pytestmark = pytest.mark.skipif(os.name == "nt", reason="interrupts with POSIX signals")
SEED = 16
# How often in the suite, and how often in the deep tests.
TIMES = {
    "steps": (12, 600),
    "phases": (12, 600),
    "fit": (6, 90),
    "save": (12, 600),
    "restore": (12, 600),
    "wire": (12, 600),
    "load": (0, 150),
    "compile": (4, 150),
    "compile again": (0, 150),
    "outputs": (0, 30),
    "batch size": (0, 90),
}
# Interrupts that need not be noticed: `fit` is over when they come, or they end something that Python ignores.
UNNOTICED = {"fit": 0.75, "batch size": 0.5, "compile again": 0.5}


def _interrupted(kind: str, seed: int, times: int | None, folder: Path) -> Counts:
    """What so many interrupts did in a process of its own, which need not import everything again."""
    told = folder / "told.json"
    process = forked().Process(target=interrupt_and_tell, args=(kind, seed, times, folder, told))
    process.start()
    process.join()
    assert process.exitcode == 0, f"{kind} with seed {seed} ended with {process.exitcode}"
    found = Counts(**json.loads(told.read_text()))
    print(f"{kind}: {found.tried} interrupts with seed {seed}, {found.came} noticed, {len(found.wrong)} wrong")
    return found


def _require_right(found: Counts, times: int) -> None:
    assert not found.wrong, "\n".join(found.wrong)
    assert found.tried == times and found.came >= times * (1 - UNNOTICED.get(found.kind, 0.2))


def test_every_kind_has_its_counts() -> None:
    assert TIMES.keys() == KINDS.keys()


# Those whose work takes long are interrupted in the deep tests only.
BRIEF = [kind for kind in KINDS if kind not in ("load", "compile again", "outputs", "batch size")]


@pytest.mark.parametrize("kind", BRIEF)
def test_interrupted_at_random_moments(kind: str, tmp_path: Path) -> None:
    times, _ = TIMES[kind]
    _require_right(_interrupted(kind, SEED, times, tmp_path), times)


def _interrupted_at_every_edge(kind: str, folder: Path) -> None:
    found = _interrupted(kind, SEED, None, folder)
    assert found.tried and not found.wrong, "\n".join(found.wrong)


@pytest.mark.parametrize("kind", ["restore", "save"])
def test_interrupted_where_each_context_manager_begins_and_ends(kind: str, tmp_path: Path) -> None:
    _interrupted_at_every_edge(kind, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("restore", "save", "fit")])
def test_interrupted_where_each_context_manager_begins_and_ends_in_long_work(kind: str, tmp_path: Path) -> None:
    _interrupted_at_every_edge(kind, tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_at_many_random_moments(kind: str, tmp_path: Path) -> None:
    _, times = TIMES[kind]
    _require_right(_interrupted(kind, SEED + 1, times, tmp_path), times)
