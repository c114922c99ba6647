"""The documentation tells the truth: its programs run, print what it says, and the reference names everything.

A fence's language says what it is. `python` is run, a page's blocks one after another as one program; `output` is
what the block above it prints, where `…` stands for anything; `console` is run by test_cli_page.py; `bash`, `swift` and
`text` are only read.
"""

import contextlib
import doctest
import importlib
import importlib.util
import inspect
import io
import linecache
import os
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "output", "bash", "console", "swift", "text"}
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fence of a page."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(f[1], f[2], text[: f.start(2)].count("\n") + 1) for f in FENCE.finditer(text)]


def matches(shown: str, printed: str) -> bool:
    """Whether the two are equal, but for what may differ between machines.

    `…` stands for anything, a line `…` for any lines or none; numbers with a decimal point may be 2% off; blanks at
    the end of a line do not count.
    """
    wanted, found = ("\n".join(line.rstrip() for line in one.strip("\n").splitlines()) for one in (shown, printed))
    pattern = re.escape(wanted).replace("\\\n…", r"(?:\n.*?)?").replace("…", ".*?")
    fit = re.fullmatch(re.sub(r"\d+\\\.\d+", r"(\\d+\\.\\d+)", pattern), found, re.DOTALL)
    numbers = [float(one) for one in re.findall(r"\d+\.\d+", wanted)]
    return fit is not None and np.allclose(numbers, [float(one) for one in fit.groups()], rtol=0.02, atol=0.005)


def run(page: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], str, int]:
    """Runs a page in the current folder: its names, all it printed, and how many blocks that were."""
    program = types.ModuleType("train")
    monkeypatch.setitem(sys.modules, "train", program)
    printed, everything, count = None, "", 0
    for block in blocks(page):
        place = f"{page.relative_to(ROOT)}, line {block.line}"
        if block.language == "python":
            written = io.StringIO()
            try:
                with contextlib.redirect_stdout(written):
                    exec(compile(block.text, "train.py", "exec"), vars(program))
            except Exception as error:
                raise AssertionError(f"{place}: {type(error).__name__}: {error}") from error
            printed, count = written.getvalue(), count + 1
            everything += printed
        elif block.language == "output":
            assert printed is not None, f"{place}: no program above prints this"
            assert matches(block.text, printed), f"{place}: the program prints\n{printed}"
            printed = None
    return vars(program), everything, count


def check_readme(names: dict[str, Any], printed: str) -> None:
    assert "Memory plan" in printed and "31,530" in printed
    assert names["history"]["validation accuracy"][-1] > 0.9 and names["step"].loss < 1.0


def check_checkpoints(names: dict[str, Any], printed: str) -> None:
    listing = sorted(path.name for path in Path("run/series").iterdir())
    assert listing == ["checkpoint-000008", "checkpoint-000009", "checkpoint-000010"]


def check_training(names: dict[str, Any], printed: str) -> None:
    assert sorted(path.name for path in Path("run").iterdir()) == ["best", "checkpoint-000007", "checkpoint-000008"]


def check_performance(names: dict[str, Any], printed: str) -> None:
    assert "Memory plan" in printed
    for option in re.findall(r"`GraphCompilationOptions\.(\w+)`", (ROOT / "docs" / "performance.md").read_text()):
        assert option in sg.GraphCompilationOptions.__members__


def check_swift(names: dict[str, Any], printed: str) -> None:
    assert np.allclose(names["line"], [13, 15, 17, 19], atol=1e-2)
    assert names["accuracy"] > 0.85  # the last digits of the collection are the hardest
    assert np.abs(names["error"]).max() < 0.05 and names["raw"].shape == (1, 1)


CHECKS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "README.md": check_readme,
    "docs/checkpoints.md": check_checkpoints,
    "docs/training.md": check_training,
    "docs/performance.md": check_performance,
    "docs/porting-from-swift.md": check_swift,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    assert len(blocks(page)) * 2 == len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)), "a fence nobody reads"
    assert {block.language for block in blocks(page)} <= LANGUAGES
    names, printed, count = run(page, monkeypatch)
    assert count == text.count("```python")
    CHECKS.get(str(page.relative_to(ROOT)), lambda *_: None)(names, printed)


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        ("a  \nb\n", "a\nb", True),
        ("took … s", "took 0.31 s", True),
        ("first\n…\nlast", "first\nsecond\nthird\nlast\n", True),
        ("first\n…", "first", True),
        ("loss 0.5012, 3 steps", "loss 0.5013, 3 steps", True),
        ("loss 0.5012, 3 steps", "loss 0.5213, 3 steps", False),
        ("loss 0.5012, 3 steps", "loss 0.5012, 4 steps", False),
        ("took … s", "took 0.31 ms", False),
        ("a\nb", "a\nc", False),
        ("a", "a\nb", False),
    ],
)
def test_outputs_are_compared(shown: str, printed: str, equal: bool) -> None:
    assert matches(shown, printed) is equal


def test_the_readme_shows_programs_and_pages_that_exist() -> None:
    readme = ROOT / "README.md"
    first = next(block for block in blocks(readme) if block.language == "python")
    assert len(first.text.splitlines()) <= 25
    links = re.findall(r"\]\(([^)#:]+)\)", readme.read_text())
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).exists(), link


# ------------------------------------------------------------------------------------------------------ reference


def public_names() -> list[str]:
    """What `stepgraph` exports: its classes and functions that are not private."""
    names = [name for name in dir(sg) if not name.startswith("_")]
    return [name for name in names if getattr(getattr(sg, name), "__module__", "").startswith("stepgraph")]


def documented() -> set[str]:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    return set(re.findall(r"^::: stepgraph(?:\.\w+)*\.(\w+)$", pages, re.MULTILINE))


def test_the_reference_has_every_public_name() -> None:
    assert len(public_names()) > 100
    assert set(public_names()) - documented() == set(), "add `::: stepgraph.NAME` to a page in docs/api"


def modules() -> list[str]:
    found = pkgutil.walk_packages(sg.__path__, "stepgraph.")
    absent = "_kernels" if importlib.util.find_spec("triton") is None else "__main__"  # PyTorch brings it with CUDA
    return [one.name for one in found if "__main__" not in one.name and absent not in one.name]


def test_the_examples_in_docstrings_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # Before each docstring, doctest looks whether any file that was ever shown in a traceback has changed.
    monkeypatch.setattr(linecache, "checkcache", lambda filename=None: None)
    constants = [name for name in dir(sg) if name.isupper() and not name.startswith("_")]
    given = {name: getattr(sg, name) for name in (*public_names(), *constants)} | {"np": np, "torch": torch}
    attempted = 0
    for name in modules():
        written = io.StringIO()
        with contextlib.redirect_stdout(written):
            result = doctest.testmod(importlib.import_module(name), extraglobs=given, optionflags=doctest.ELLIPSIS)
        assert result.failed == 0, written.getvalue()
        attempted += result.attempted
    assert attempted > 80


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name in public_names() if not inspect.getdoc(getattr(sg, name))] == []


# --------------------------------------------------------------------------------------------------------- errors


def error_classes() -> list[str]:
    classes = [
        one for one in [getattr(sg, name) for name in dir(sg)] if inspect.isclass(one) and one is not sg.StepgraphError
    ]
    return [one.__name__ for one in classes if issubclass(one, sg.StepgraphError)]


@pytest.mark.parametrize("name", error_classes())
def test_the_error_guide_has_every_class_with_a_real_message(name: str) -> None:
    page = ROOT / "docs" / "errors.md"
    assert f"\n## {name}\n" in page.read_text()
    section = page.read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    languages = [fence[1] for fence in FENCE.finditer(section)]
    assert languages[:2] == ["python", "output"], "first a program that raises it, then what it prints"
    assert f"except sg.{name}" in section and "\nFix: " in section


# ----------------------------------------------------------------------------------------------------------- site


@pytest.fixture
def site(tmp_path: Path) -> Path:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return tmp_path


def fetched(page: str) -> list[str]:
    """Addresses a browser would go to for a page by itself: scripts, styles, pictures, frames, imports."""
    tags = re.findall(r"<(?:script|link|img|iframe|source|object|embed|video|audio)\b[^>]*>", page)
    found = re.findall(r"(?:src|href|data|srcset)\s*=\s*[\"']?([^\"'\s>]+)", "".join(tags))
    return found + re.findall(r"(?:url\(|@import\s+(?!url))\s*[\"']?([^\"')\s]+)", page)


def test_the_site_builds_without_a_warning_is_complete_and_needs_no_network(site: Path) -> None:
    pages = {path: path.read_text() for path in [*site.rglob("*.html"), *site.rglob("*.css")]}
    assert len(pages) > 30
    away = {
        f"{path.relative_to(site)}: {address}"
        for path, text in pages.items()
        for address in fetched(text)
        if re.match(r"(?:[a-z]+:)?//", address)
    }
    assert away == set()
    everything = "\n".join(pages.values())
    assert 'class="mermaid"' not in everything  # the theme would fetch its script
    anchors = set(re.findall(r'id="stepgraph(?:\.\w+)*\.(\w+)"', everything))
    assert set(public_names()) - anchors == set()


def test_the_check_for_addresses_finds_them() -> None:
    page = '<script src="https://a/b.js"></script><link href=//c/d.css><style>@import url("https://e/f")</style><a href="https://g">'
    assert [one for one in fetched(page) if "//" in one] == ["https://a/b.js", "//c/d.css", "https://e/f"]
