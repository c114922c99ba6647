"""`stepgraph cache`: what was chosen by measurement is listed, cleared and measured again."""

import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stepgraph.cli import kept
from stepgraph.compiler.kernels import cross_entropy, measure
from stepgraph.compiler.kernels.choices import CHOICES, Choice, Question
from tests.cli_graphs import Called

Capture = pytest.CaptureFixture[str]
LOGITS = torch.empty(512, 40)
ARGUMENTS = (LOGITS, torch.empty(512), torch.empty(512, dtype=torch.int64), None, 0, -100)


@pytest.fixture
def folder(nothing_fuses: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    CHOICES.forget()
    yield tmp_path / "stepgraph"
    CHOICES.forget()


def choice(operator: str = "sum", kind: torch.dtype = torch.float32, **changes: object) -> Choice:
    question = Question(operator, ("a", "b"), ({"shape": [64, 3], "strides": [3, 1], "type": str(kind)},), 2)
    made = Choice(question, "b", {"a": 3e-3, "b": 2e-4}, {"a": 0.0, "b": 0.1}, False, 1, "2026-11-17T08:30:00+00:00")
    return replace(made, **changes)


def listed(capsys: Capture, *given: str) -> dict:
    called = Called(capsys, "cache", *given, "--json")
    assert (called.code, called.err) == (0, "")
    return json.loads(called.out)


# Listing


def test_a_selection_of_nothing_is_said(folder: Path, capsys: Capture) -> None:
    for given, words in ((["sums*"], "No choice of an operator like 'sums*'."), (["--disturbed"], "No disturbed")):
        called = Called(capsys, "cache", *given)
        assert called.code == 0 and words in called.out
    assert "No choice" not in Called(capsys, "cache").out


@pytest.mark.parametrize(("kind", "shapes"), [(torch.float32, "64×3"), (torch.bfloat16, "64×3 in bfloat16")])
def test_other_types_than_float32_are_named(folder: Path, capsys: Capture, kind: torch.dtype, shapes: str) -> None:
    CHOICES.keep(choice(kind=kind))
    assert [row["shapes"] for row in listed(capsys)["choices"]] == [shapes]


def test_choices_are_listed_with_how_they_were_made(folder: Path, capsys: Capture) -> None:
    CHOICES.keep(choice())
    CHOICES.keep(choice("product", disturbed=True, tries=2))
    (folder.parent / "inductor").mkdir()
    (folder.parent / "inductor" / "kernel.so").write_bytes(bytes(2048))
    called = Called(capsys, "cache")
    assert (called.code, called.err) == (0, "")
    assert re.search(r"holds +2 choices, 1 of them disturbed", called.out) and str(CHOICES.file) in called.out
    assert re.search(r"PyTorch's compiler +\S+inductor, 2.00 KiB", called.out)
    wanted = ["sum", "64×3", "2", "b", "200 µs", "a ×15.00", "2026-11-17 08:30"]
    (row,) = [line for line in called.out.splitlines() if line.startswith("sum")]
    assert [cell.strip() for cell in row.split("│")][:-1] == wanted
    assert "disturbed 2×" in called.out and "--measure --disturbed does so now" in called.out
    found = listed(capsys)
    assert [one["operator"] for one in found["choices"]] == ["product", "sum"]
    assert found["choices"][1]["ratio"] == pytest.approx(15) and found["own"]["disturbed"] == 1


def test_a_pattern_and_disturbance_select(folder: Path, capsys: Capture) -> None:
    for name in ("convolution", "convolution data", "sum"):
        CHOICES.keep(choice(name, disturbed=name == "sum"))
    assert [one["operator"] for one in listed(capsys, "convolution*")["choices"]] == ["convolution", "convolution data"]
    assert [one["operator"] for one in listed(capsys, "--disturbed")["choices"]] == ["sum"]
    assert listed(capsys, "convolution", "--disturbed")["choices"] == []


def test_foreign_text_in_the_file_is_not_obeyed(folder: Path, capsys: Capture) -> None:
    CHOICES.keep(choice("a\x1b[2Jb", measured="\x1b]0;x\x07"))
    for given in ((), ("--json",)):
        called = Called(capsys, "cache", *given)
        assert called.code == 0 and "\x1b" not in called.out and "\x07" not in called.out


# Folders of all kinds


def test_an_empty_cache_has_nothing_to_list(folder: Path, capsys: Capture) -> None:
    called = Called(capsys, "cache")
    assert called.code == 0 and "nothing: the first compilation creates it" in called.out and not folder.exists()
    for given in (["--clear"], ["--clear", "x*"], ["--clear", "--others"], ["--measure"]):
        called = Called(capsys, "cache", *given)
        assert (called.code, called.err) == (0, "") and re.search(r"(Cleared|Measured) 0 choices", called.out)
    assert not folder.exists()


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: Capture) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME")
    for given in ([], ["--clear"], ["--measure"]):
        called = Called(capsys, "cache", *given)
        assert called.code == 0 and "none: there is no home directory, so each process measures again" in called.out


def test_damaged_lines_are_counted_and_cleared(folder: Path, capsys: Capture) -> None:
    CHOICES.keep(choice())
    with CHOICES.file.open("a") as file:
        file.write('{"format": 2, "oper\n{}\n')
    assert re.search(r"damaged +2 lines, ignored", Called(capsys, "cache").out)
    assert "Cleared 0 choices" in Called(capsys, "cache", "--clear", "nothing").out
    assert listed(capsys)["own"] | {"damaged": 0, "choices": 1} == listed(capsys)["own"]


@pytest.mark.skipif(os.name == "nt", reason="makes POSIX files")
def test_what_is_no_file_is_told(folder: Path, capsys: Capture) -> None:
    CHOICES.file.mkdir(parents=True)
    assert "not a regular file, so each process measures again" in Called(capsys, "cache").out
    CHOICES.file.rmdir()
    os.mkfifo(CHOICES.file)
    assert "not a regular file, so each process measures again" in Called(capsys, "cache").out


def test_a_folder_that_cannot_be_written_is_told(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHOICES.keep(choice())
    monkeypatch.setattr(os, "access", lambda *_: False)  # the superuser may write everywhere
    assert "the folder is read-only, so each process measures again" in Called(capsys, "cache").out

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name, given in (("unlink", []), ("write_bytes", ["sum"])):
        with monkeypatch.context() as patched:
            patched.setattr(Path, name, denied)
            called = Called(capsys, "cache", "--clear", *given)
        assert (called.code, called.out) == (1, "") and "Permission denied" in called.err and "Fix:" in called.err
    assert len(CHOICES.stored()) == 1 and [one.name for one in folder.iterdir()] == [CHOICES.file.name]


# Clearing


def test_choices_are_cleared_by_pattern_or_all(folder: Path, capsys: Capture) -> None:
    for name in ("convolution", "convolution data", "sum"):
        CHOICES.keep(choice(name))
    others = [folder / "kernels-x86-torch-2.12.0.json", folder / "kernels-x86-torch-2.12.0.jsonl"]
    for one in (*others, folder / "unrelated"):
        one.write_text("{}")
    assert re.search(r"others +2 files for other processors or versions", Called(capsys, "cache").out)
    assert "Cleared 2 choices, 0 files removed." in Called(capsys, "cache", "--clear", "conv*").out
    assert [one.question.operator for one in CHOICES.stored()] == ["sum"]
    assert "Cleared 0 choices, 2 files removed." in Called(capsys, "cache", "--clear", "--others").out
    assert [one.question.operator for one in CHOICES.stored()] == ["sum"] and not any(map(Path.exists, others))
    assert "Cleared 1 choice, 1 file removed." in Called(capsys, "cache", "--clear").out
    assert [one.name for one in folder.iterdir()] == ["unrelated"]


def test_others_are_whole_files(folder: Path, capsys: Capture) -> None:
    for given in (["--others"], ["--clear", "--others", "sum"], ["--measure", "--others"]):
        called = Called(capsys, "cache", *given)
        assert called.code == 1 and "--others stands for whole files" in called.err and "Fix:" in called.err


# Measuring again


def test_choices_are_measured_again(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    measure.fastest(cross_entropy.OPERATOR, cross_entropy.IMPLEMENTATIONS, ARGUMENTS, below=40)
    (first,) = CHOICES.stored()
    CHOICES.keep(replace(first, disturbed=True, seconds={"pytorch": 1e-9, "gradient": 2e-9}))
    CHOICES.keep(choice("layout 0123456789abcdef", disturbed=True))
    CHOICES.keep(choice("sum"))
    CHOICES.forget()
    seen, threads = [], torch.get_num_threads()
    found = measure.Measurement("gradient", {"pytorch": 2.0, "gradient": 1.0}, {"pytorch": 0.0, "gradient": 0.0}, False)

    def again(implementations: dict, arguments: list, **rules: object) -> measure.Measurement:
        seen.append((implementations, arguments, rules, torch.get_num_threads()))
        return found

    monkeypatch.setattr(measure, "measure", again)
    called = Called(capsys, "cache", "--measure", "--disturbed")
    changed = int(first.chosen != "gradient")
    assert called.code == 0 and f"Measured 1 choice again: {changed} changed, 0 disturbed." in called.out
    assert "Cleared 1 choice that only a compilation can measure." in called.out
    ((implementations, arguments, rules, used),) = seen
    assert implementations == cross_entropy.IMPLEMENTATIONS and rules == {"below": 40}
    assert used == first.question.threads and torch.get_num_threads() == threads
    assert [(one.shape, one.stride(), one.dtype) for one in arguments[:3]] == [
        (one.shape, one.stride(), one.dtype) for one in ARGUMENTS[:3]
    ] and arguments[3:] == [None, 0, -100]
    assert {one.question.operator: one.disturbed for one in CHOICES.stored()} == {"cross entropy": False, "sum": False}


def test_measuring_again_really_measures(folder: Path, capsys: Capture) -> None:
    measure.fastest(cross_entropy.OPERATOR, cross_entropy.IMPLEMENTATIONS, ARGUMENTS, below=40)
    (first,) = CHOICES.stored()
    CHOICES.keep(replace(first, disturbed=True, seconds={"pytorch": 9e9, "gradient": 9e9}))
    assert listed(capsys, "--measure")["measured"]["measured"] == 1
    assert all(0 < one < 1 for one in CHOICES.stored()[0].seconds.values())


def test_no_measurement_begins_after_its_time(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        CHOICES.keep(choice(name))
    times = itertools.count(0.0)
    monkeypatch.setattr(kept, "time", SimpleNamespace(monotonic=lambda: next(times)))  # other threads keep their clock
    assert "2 choices left when the time was over" in Called(capsys, "cache", "--measure", "--seconds", "0.5").out
    assert len(CHOICES.stored()) == 2


def test_measurements_that_were_disturbed_and_not_kept_are_counted(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure.fastest(cross_entropy.OPERATOR, cross_entropy.IMPLEMENTATIONS, ARGUMENTS, below=40)
    (first,) = CHOICES.stored()
    CHOICES.keep(replace(first, disturbed=False))
    before = CHOICES.stored()
    busy = measure.Measurement("gradient", {"pytorch": 2.0, "gradient": 1.0}, {}, disturbed=True)
    monkeypatch.setattr(measure, "measure", lambda *_, **__: busy)
    assert "1 choice left as before: the new measurements were disturbed." in Called(capsys, "cache", "--measure").out
    assert CHOICES.stored() == before


def test_arguments_that_cannot_be_made_again_are_left_to_a_compilation(folder: Path, capsys: Capture) -> None:
    names = tuple(cross_entropy.IMPLEMENTATIONS)
    for number, described in enumerate(({"shape": [-1]}, {"shape": [2], "strides": [1], "type": "torch.nothing"}, 5)):
        question = Question(cross_entropy.OPERATOR, names, (described, number), 1)
        CHOICES.keep(replace(choice(), question=question, chosen=names[0], seconds={names[0]: 1.0}))
    called = Called(capsys, "cache", "--measure")
    assert called.code == 0 and "Cleared 3 choices that only a compilation can measure." in called.out


# PyTorch's folder


@pytest.mark.deep  # the import takes seconds
def test_the_folder_of_the_compiler_is_the_one_it_uses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "x"))
    assert kept.compiler_folder() == tmp_path / "x"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert kept.compiler_folder() == Path(default_cache_dir())
