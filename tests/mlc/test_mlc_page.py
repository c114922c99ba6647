"""The column *stepgraph* of the generated page: every row runs as it stands and does what the face's call does."""

import dataclasses
import enum
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.mlc.names import CLASSES
from stepgraph.mlc.table import NO, VOID, Row
from stepgraph.mlc.tables.enumerations import ENUMERATIONS
from stepgraph.mlc.values import give, unwrapped
from tests.mlc.arguments import PREPARED, arguments, instance
from tests.mlc.kit import Kit, M

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from-ml-compute.md").read_text()
WITHOUT_GPU = {"gpuDevice", "aneDevice", "deviceWithGPUDevices:"}
# What a property gives in another form than the native one; the page notes it.
OTHERWISE = {"maxTensorDimensions", "deviceType", "anchorBoxes", "data", "bytes"}


class Line(NamedTuple):
    """One row of the page."""

    owner: str
    selector: str
    text: str


def lines() -> list[Line]:
    """Every row that names a member of stepgraph."""
    found = []
    for section in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]:
        owner, _, body = section.partition("\n")
        cells = [line.split(" | ") for line in body.splitlines() if line.startswith("| ") and line.count(" | ") == 4]
        found += [Line(owner, one[1].strip("`"), one[3].strip("`")) for one in cells[1:] if one[3].startswith("`")]
    return found


LINES = lines()
TABLES = {table.name: {row.selector: row for row in table.rows} for table in CLASSES}
MEMBERS = [line for line in LINES if line.owner in TABLES]
PROPERTIES = [line for line in MEMBERS if TABLES[line.owner][line.selector].kind == "property"]
CALLS = [line for line in MEMBERS if line not in PROPERTIES and line.selector not in WITHOUT_GPU]
NAMES = {name: getattr(sg, name) for name in dir(sg) if not name.startswith("_")}


def test_the_page_has_a_row_for_everything() -> None:
    rows = [row for table in CLASSES for row in table.rows if not row.kind.endswith("setter")]
    assert len(MEMBERS) == sum(row.kind not in ("new", "init") for row in rows) > 450
    assert len([line for line in CALLS if "(" in line.text]) > 230
    assert len(LINES) - len(MEMBERS) == sum(
        not member.isdigit() for one in ENUMERATIONS for _, member in one.pairs
    ) + sum(one.is_described for one in ENUMERATIONS)


def plain(value: Any) -> Any:
    """What can be compared between two runs: kinds and numbers, no identities."""
    value = unwrapped(value)
    if isinstance(value, sg.Tensor):
        held = value.numpy().tobytes() if value.has_data else None
        state = [bytes(one.bytes) for one in value.optimizer_data]
        return ["tensor", value.descriptor, held, value.is_updatable, state]
    if isinstance(value, sg.TensorData):
        return ["memory", bytes(value.bytes)]
    if isinstance(value, sg.TensorParameter):
        return ["parameter", plain(value.tensor), value.is_updatable]
    if isinstance(value, sg.Graph):
        named = [*value.inputs, *value.outputs] if isinstance(value, sg.TrainingGraph | sg.InferenceGraph) else []
        results = [plain(tensor) for node in value.nodes for tensor in node.results]
        return [type(value), [plain(layer) for layer in value.layers], named, results, value.device]
    if isinstance(value, sg.Optimizer):
        return [type(value), value.settings]
    if isinstance(value, sg.Layer):
        fields = {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return [type(value), fields, value.layer_id]
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, enum.Enum) or not callable(value) else "a function"


def prepared(line: Line, row: Row) -> tuple[Any, Any, list[Any]]:
    """A kit, the receiver of the call, and the arguments a program would pass; the same numbers each time."""
    sg.set_seed(5)
    kit = Kit()
    if row.selector in PREPARED:
        PREPARED[row.selector](kit)
    kind = getattr(M, line.owner)
    receiver = kind if row.is_class_method else instance(kit, line.owner, row.selector)
    given = arguments(kit, line.owner, row)
    sg.set_seed(7)
    return kit, receiver, given


def native_values(line: Line, row: Row, given: list[Any]) -> dict[str, Any]:
    """The arguments under the original's names, as a stepgraph program has them: lists stay lists."""
    taken = row.taken(line.text, given, {})
    values = {}
    for label, value, one in zip(row.labels, given, taken.values(), strict=True):
        is_numbers = isinstance(value, list) and all(isinstance(number, int) for number in value)
        values[label] = value if is_numbers else one
    return values


@pytest.mark.parametrize("line", CALLS, ids=lambda line: f"{line.owner}.{line.selector}")
def test_a_call_does_what_its_row_says(line: Line) -> None:
    row = TABLES[line.owner][line.selector]
    kit, receiver, given = prepared(line, row)
    answer = getattr(receiver, row.spelling)(*given)
    assert M.lastError() is None
    twin, native, again = prepared(line, row)
    values = native_values(line, row, again)
    dotted = line.text.startswith(".")
    found = eval(f"receiver{line.text}" if dotted else line.text, {**NAMES, **values, "receiver": unwrapped(native)})
    if row.refusal not in (NO, VOID) and line.selector != "maxTensorDimensions":
        made = [unwrapped(one) for one in answer] if isinstance(answer, list) else unwrapped(answer)
        theirs = found if hasattr(type(answer), "table") or isinstance(answer, list) else give(found)
        if line.selector != "supportsDataType:onDevice:":  # NO on the base class, as measured
            assert plain(theirs) == plain(made)
    if dotted:
        assert plain(unwrapped(native)) == plain(unwrapped(receiver))
    if line.owner == "MLCTrainingGraph":
        assert twin.state()[:4] == kit.state()[:4]  # parameters, optimizer state, gradients, numbers
    assert plain(again) == plain(given)


@pytest.mark.parametrize("line", PROPERTIES, ids=lambda line: f"{line.owner}.{line.selector}")
def test_a_property_reads_what_its_row_says(line: Line) -> None:
    row = TABLES[line.owner][line.selector]
    _, receiver, _ = prepared(line, row)
    answer, found = getattr(receiver, row.spelling)(), eval(f"receiver{line.text}", {"receiver": receiver.native})
    if line.selector not in OTHERWISE:
        assert unwrapped(give(found)) == unwrapped(answer) or plain(unwrapped(found)) == plain(unwrapped(answer))


def test_constants_and_descriptions() -> None:
    for line in LINES:
        if line.owner == "Functions and blocks":
            value = next(iter(NAMES[line.text.partition("(")[0]]))
            assert eval(line.text, {**NAMES, "value": value}) == getattr(M, line.selector)(int(value))
        elif line.owner not in TABLES:
            assert int(eval(line.text, dict(NAMES))) == getattr(M, line.selector)
