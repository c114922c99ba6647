"""The README tells the truth: its programs run, its error message is the one a user sees."""

import re
from pathlib import Path

import pytest

import stepgraph as sg

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_programs_run_one_after_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them saves
    names: dict = {}
    programs = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(programs) >= 3 and len(programs[0].splitlines()) <= 25
    for program in programs:
        exec(compile(program, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "Memory plan" in printed and "31,530" in printed
    assert names["history"]["validation accuracy"][-1] > 0.9 and names["step"].loss < 1.0


def test_the_page_on_checkpoints_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "checkpoints.md").read_text()
    names: dict = {}
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) >= 5
    for program in programs:
        exec(compile(program, "checkpoints.md", "exec"), names)
    listing = sorted(path.name for path in Path("run/series").iterdir())
    assert listing == ["checkpoint-000008", "checkpoint-000009", "checkpoint-000010"]


def test_the_page_on_performance_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent / "docs" / "performance.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(program, "performance.md", "exec"), {})
    assert "Memory plan" in capsys.readouterr().out
    for option in re.findall(r"`GraphCompilationOptions\.(\w+)`", page):
        assert option in sg.GraphCompilationOptions.__members__


def test_the_page_on_training_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "training.md").read_text()
    names: dict = {}
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(programs) >= 8
    for program in programs:
        exec(compile(program, "training.md", "exec"), names)
    listing = sorted(path.name for path in Path("run").iterdir())
    assert listing == ["best", "checkpoint-000007", "checkpoint-000008"]


def test_the_page_on_reports_runs_and_names_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(__file__).parent.parent / "docs"
    page = (folder / "reports.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(program, "reports.md", "exec"), {})
    written = {path.name + "/" * path.is_dir() for path in Path("runs/first").iterdir()}
    assert written == set(re.findall(r"^\| `([\w./]+)` \| the", page, re.MULTILINE))
    kinds = set(re.findall(r'^{"kind":"(\w+)"', Path("runs/first/run.jsonl").read_text(), re.MULTILINE))
    assert kinds | {"missing"} == set(re.findall(r"^\| `(\w+)` \| `", page, re.MULTILINE)) | {"missing"}
    assert all((folder / name).is_file() for name in re.findall(r"\]\((images/[\w.-]+)\)", page))


def test_the_error_message_is_what_a_user_sees() -> None:
    (shown,) = re.findall(r"```\n(FullyConnectedLayer.*?)```", README, re.DOTALL)
    with pytest.raises(sg.ShapeError) as caught:
        sg.Graph().node(sg.FullyConnectedLayer.create(3000, 10), sg.Tensor((64, 3136)))
    assert re.sub(r"\(\S+:\d+\)", "(train.py:9)", str(caught.value)) == shown.strip()


def test_every_module_named_exists() -> None:
    rows = re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`([a-z_/]+)`", row)]
    package = Path(sg.__file__).parent
    assert len(names) > 10
    for name in names:
        assert (package / name).is_dir() or (package / f"{name}.py").is_file(), name
