"""Every public symbol of ML Compute is here, spelled as PyObjC spells it, and answers."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import stepgraph.mlc as MLCompute
from stepgraph.mlc.coverage import missing, symbols
from stepgraph.mlc.names import CLASSES
from stepgraph.mlc.page import page
from tests.mlc.arguments import PREPARED, arguments, instance
from tests.mlc.kit import Kit

HERE = Path(__file__).parent
LINES = [line.split(" | ") for line in (HERE / "symbols.txt").read_text().splitlines() if not line.startswith("#")]
LISTED = [(kind.strip(), owner.strip(), name) for kind, owner, names in LINES for name in names.split()]
COUNTS = {"class": 56, "property": 259, "method": 223, "unavailable": 31, "enum": 19, "constant": 134, "function": 13}
WITHOUT_GPU = {"gpuDevice", "aneDevice", "deviceWithGPUDevices:"}
# Nothing is wrong with nil here: the object at hand has none, or the method answers with it.
NIL = {
    *("sequenceLengths", "batchSizePerSequenceStep", "splitSectionLengths", "peepholeWeights"),
    *("peepholeWeightsParameters", "attentionBiases", "synchronizeUpdates", "setRNGSeedTo:", "mean", "variance"),
    *("paddingIndex", "maximumNorm", "weights", "device", "supportsDataType:onDevice:"),
}


def test_the_list_is_complete() -> None:
    counts = Counter("method" if kind == "class method" else kind for kind, _, _ in LISTED)
    assert counts == {**COUNTS, "block": 1} and len(LISTED) == 736
    full = {name if kind in ("class", "enum") or not owner else f"{owner}.{name}" for kind, owner, name in LISTED}
    assert full == set(symbols()) and missing() == []


def test_each_is_in_the_module_as_pyobjc_spells_it() -> None:
    for _, owner, name in LISTED:
        found = getattr(MLCompute, owner) if owner else MLCompute
        assert hasattr(MLCompute if name == owner else found, name.replace(":", "_")), f"{owner} {name}"
    assert not [name for name in MLCompute.__all__ if name.endswith("Count")]


def test_the_tables_hold_nothing_else() -> None:
    listed = {
        (owner, name) for kind, owner, name in LISTED if kind in ("property", "method", "class method", "unavailable")
    }
    tabled = {(table.name, row.selector) for table in CLASSES for row in table.rows if not row.kind.endswith("setter")}
    assert tabled == listed
    writable = {(table.name, row.swift) for table in CLASSES for row in table.rows if row.kind.endswith("setter")}
    assert len(writable) == 14 and writable <= listed


@pytest.fixture(scope="module")
def kit() -> Kit:
    return Kit()


@pytest.mark.parametrize("table", CLASSES, ids=lambda table: table.name)
def test_each_member_answers(table: Any, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    for module in ("build", "names"):
        monkeypatch.setattr(f"stepgraph.mlc.{module}.refuse", lambda call, error: refused.append(f"{call}: {error}"))
    kind = getattr(MLCompute, table.name)
    for row in table.rows:
        fresh = Kit() if row.kind == "method" else kit
        if row.kind in ("new", "init"):
            answer = kind.new() if row.kind == "new" else kind.alloc().init()
            assert type(answer) is kind
            continue
        if row.selector in PREPARED:
            PREPARED[row.selector](fresh)
        receiver = kind if row.is_class_method else instance(fresh, table.name, row.selector)
        if row.kind.endswith("setter"):
            value = getattr(receiver, row.swift)()
            getattr(receiver, row.spelling)(value)
            assert getattr(receiver, row.swift)() == value
        elif row.selector == "deviceWithGPUDevices:":
            kind.deviceWithGPUDevices_([])
            refused.clear()  # no GPU was named
        else:
            answer = getattr(receiver, row.spelling)(*arguments(fresh, table.name, row))
            wanted = row.selector not in NIL | WITHOUT_GPU
            assert not wanted or answer not in (None, False) or row.kind.endswith("property"), (row.selector, refused)
        assert not refused, row.selector


def test_enumerations_constants_and_functions() -> None:
    for kind, _, name in LISTED:
        if kind == "enum":
            assert getattr(MLCompute, name)(1) == 1
        elif kind == "constant":
            assert type(getattr(MLCompute, name)) is int
        elif kind == "function":
            assert isinstance(getattr(MLCompute, name)(1), str)
    assert MLCompute.MLCGraphCompletionHandler is not None


def test_the_page_is_written_from_the_tables() -> None:
    committed = (HERE.parent.parent / "docs" / "coming-from-ml-compute.md").read_text()
    assert committed == page(), "write it anew: python -m stepgraph.mlc --page > docs/coming-from-ml-compute.md"
    for _, _, name in LISTED:
        assert f"`{name}`" in committed or f"## {name}\n" in committed, name


def test_the_command_counts() -> None:
    command = [sys.executable, "-m", "stepgraph.mlc", "--coverage"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "736 of 736 symbols\n"
