"""docs/command-line.md tells the truth: its commands run one after another, and print what it shows."""

import json
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

import stepgraph as sg
from stepgraph.cli import device_argument, shapes
from stepgraph.cli.main import COMMANDS, EXAMPLES
from tests.cli_graphs import Called

PAGE = (Path(__file__).parent.parent / "docs" / "command-line.md").read_text()
MACHINE = ("devices", "cache")  # what these print is another thing on another machine


def masked(text: str) -> list[str]:
    """Lines without what differs from machine to machine: numbers, builds, widths, and pictures of shapes."""
    found = []
    for line in re.sub(r"(?<=\d)\+\w+", "", text).splitlines():  # 2.13.0+cpu
        words = re.sub(r"\d[\d.,]*(e[-+]\d+)?%?", "#", re.sub(r"[━─╇┼]+", "━", line))
        words = re.sub(r"# ([KMG]i)?B", "# B", re.sub(r"\s+", " ", words)).replace("# threads", "# thread")
        found.append(words.strip())
    return found


def test_the_commands_run_and_print_what_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```text\n\$ stepgraph (.*?)\n(.*?)```", PAGE, re.DOTALL)
    assert {shlex.split(command)[0] for command, _ in blocks} == set(COMMANDS) - {
        "report"
    }  # that has a page of its own
    for command, shown in blocks:
        called = Called(capsys, *shlex.split(command))
        assert (called.code, called.err) == (0, ""), command
        printed = masked(called.out)
        missing = [line for line in masked(shown) if line != "…" and line not in printed]
        assert shlex.split(command)[0] in MACHINE or not missing, (command, missing, called.out)
        if command.startswith("demo"):
            (recognized,) = re.findall(r"It recognizes ([\d.]+)%", called.out)
            assert float(recognized) > 95
            following = re.findall(r"^  stepgraph (.*)$", called.out, re.MULTILINE)
            assert [one.split()[0] for one in following] == ["inspect", "inspect", "report", "compare"]
        if "--json" in command:
            assert json.loads(called.out)["optimizers"][0]["updates"] == 235
    ElementTree.parse("demo.svg")
    assert Path("demo.dot").read_text().startswith("digraph")
    assert Called(capsys, "report", "run/demo").code == 0 and Path("run/demo/report.html").is_file()
    again = Called(capsys, "demo", "--save", "run/demo")
    assert (again.code, again.out) == (1, "") and "it exists and is not an empty folder" in again.err
    assert type(sg.load("run/demo", sg.Device.cpu())) is sg.TrainingGraph


def test_pictures_keep_to_the_width() -> None:
    pictures, kinds = shapes.draw(5, seed=0)
    assert pictures.shape == (5, 1, 16, 16) and set(shapes.draw(100, seed=1)[1]) == {0, 1, 2, 3}
    names = [shapes.NAMES[kind] for kind in kinds]
    for width, rows in ((10_000, 1), (40, 3), (10, 5)):
        lines = shapes.as_text(pictures, names, width).splitlines()
        assert len(lines) == 18 * rows - 1 and max(map(len, lines)) <= max(width, 16)
        assert " ".join(lines[16::18]).split() == names


def test_settings_and_exit_codes_are_all_there() -> None:
    for name in (*device_argument.NAMES, *device_argument.SETTINGS):
        assert f"`{name}`" in PAGE, name
    codes = re.findall(r"^  (\d+) ", EXAMPLES.partition("exit codes:")[2], re.MULTILINE)
    assert codes == re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE) == ["0", "1", "2", "130", "141"]
