"""The README tells the truth: its error message is the one a user sees, its modules exist (test_docs runs it)."""

import re
from pathlib import Path

import pytest

import stepgraph as sg

README = (Path(__file__).parent.parent / "README.md").read_text()


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
