"""The manifest of tuned code: one file per row, used where it applies, and gone if it is switched off."""

import json
import shutil
from pathlib import Path

import pytest

import stepgraph as sg
from benchmarks import rent
from benchmarks.models import SMALL
from stepgraph.compiler import pipeline, tuned
from stepgraph.compiler.tuned.row import Tuned

RESULTS = Path(rent.__file__).parent / "results"
SHARED = {"__init__", "row", "gpus"}
HELPERS = ("_kernels", "_sums")


def test_every_file_is_a_row_of_the_manifest() -> None:
    files = {path.stem for path in Path(tuned.__file__).parent.glob("*.py")} - SHARED
    rows = {one for one in files if not one.endswith(HELPERS)}
    assert {id(getattr(tuned, name).ROW) for name in rows} == {id(row) for row in tuned.MANIFEST}
    names = [row.name for row in tuned.MANIFEST]
    assert len(names) == len(set(names))
    assert all(row.hardware and row.pattern for row in tuned.MANIFEST)


@pytest.mark.parametrize("row", tuned.MANIFEST, ids=lambda row: row.name)
def test_every_row_pays(row: Tuned) -> None:
    """3% of a whole step on two networks, or 10% on one, in the recorded measurement."""
    recorded = json.loads((RESULTS / f"{row.results}.json").read_text())["rows"][row.name]
    for network, gain in row.gains.items():
        assert gain == pytest.approx(recorded[network][1], abs=0.05 * (gain - 1) + 0.005)
    assert sum(gain >= 1.03 for gain in row.gains.values()) >= 2 or max(row.gains.values()) >= 1.1


def test_nothing_else_imports_tuned_code() -> None:
    """So that deleting a row and its file is all it takes."""
    source = Path(sg.__file__).parent
    for path in source.rglob("*.py"):
        if path.parent.name != "tuned":
            for line in path.read_text().splitlines():
                if "compiler.tuned" in line:
                    allowed = (
                        "from stepgraph.compiler.tuned import MANIFEST",
                        "from stepgraph.compiler.tuned.row import",
                    )
                    assert line.startswith(allowed), f"{path}: {line}"


def test_a_row_that_is_off_does_not_run() -> None:
    training = _tiny()
    compiled = training.compilation
    step = compiled.programs.executable("step", compiled.feeds.batch).step
    names = {row.name for row in tuned.MANIFEST if row.run is not None and row.applies(step)}
    assert names and names <= {one.name for one in pipeline.rows(pipeline.FUSED, step, "step")}
    for row in tuned.MANIFEST:
        with rent.without(row):
            assert row.name not in {one.name for one in pipeline.rows(pipeline.FUSED, step, "step")}
            assert not row.applies(step)


def test_rent_names_the_rows_that_change_a_network() -> None:
    changing = set(rent.changing(_tiny()))
    assert {"expand small products", "replay generated code"} <= changing
    assert "expand narrow products" not in changing


@pytest.mark.deep
@pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler on the CPU")
def test_rent_measures_what_a_row_gains() -> None:
    found = rent.measure(SMALL["tiny"], "cpu", ["replay generated code"], rounds=3)
    assert list(found) == ["replay generated code"] and found["replay generated code"][1] > 1


def _tiny() -> sg.TrainingGraph:
    x, y = sg.Tensor((2, 6)), sg.Tensor((2,), "int64")
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(6, 3), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    return training
