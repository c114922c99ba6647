"""The README tells the truth: its error message is the one a user sees, its modules exist (test_docs runs it)."""

import re
from pathlib import Path

import pytest

import stepgraph as sg

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_page_on_reports_runs_and_names_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(__file__).parent.parent / "docs"
    page = (folder / "reports.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(program, "reports.md", "exec"), {})
    written = {path.name + "/" * path.is_dir() for path in Path("runs/first").iterdir()}
    assert written == set(re.findall(r"^\| `([\w./]+)` \| the", page, re.MULTILINE))
    kinds = set(re.findall(r'^{"kind":"(\w+)"', Path("runs/first/run.jsonl").read_text(), re.MULTILINE))
    assert kinds | {"missing", "ranks"} == set(re.findall(r"^\| `(\w+)` \| `", page, re.MULTILINE))
    assert all((folder / name).is_file() for name in re.findall(r"\]\((images/[\w.-]+)\)", page))


def test_the_error_message_is_what_a_user_sees() -> None:
    (shown,) = re.findall(r"```text\n(FullyConnectedLayer.*?)```", README, re.DOTALL)
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
