"""Every layer through ONNX: each conformance case in inference mode, many in one file."""

from pathlib import Path

import pytest

import stepgraph as sg
from stepgraph.interop import onnx_export
from tests.interop.cases import ALL, ROWS, Wired, freely, prediction, resized, wire

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from stepgraph.interop import onnx_check

PER_FILE = 40
QUICK = [case for case in ALL if case.name in ("LSTM", "relu", "softmax")]


def groups(count: int) -> list[list[int]]:
    return [list(range(start, min(start + count, len(ALL)))) for start in range(0, len(ALL), count)]


def agree(graph: sg.InferenceGraph, wired: list[Wired], folder: Path, *, rows: tuple[int | None, ...]) -> None:
    """Exports cases together, and compares ONNX Runtime with PyTorch to 1e-5 of the largest number."""
    asked = prediction(graph, wired)
    fixed = int(asked.batch) if rows == (None,) else None
    path = onnx_export.save(onnx_export.Request(asked, fixed), folder / "cases.onnx", check=False)
    for count in rows:
        data = {name: array for one in wired for name, array in one.data.items()}
        if count is not None:
            open_inputs = {name for name, tensor in asked.inputs.items() if tensor.descriptor.is_open}
            data = {name: resized(a, count) if name in open_inputs else a for name, a in data.items()}
        expected, found = onnx_check.results(asked, data), onnx_check.run(path, asked.outputs, data)
        wrong = [
            (name, count, expected[tensor].flatten()[:4], found[name].flatten()[:4])
            for name, tensor in asked.outputs.items()
            if onnx_check._differs(expected[tensor], found[name])
        ]
        assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.deep
@pytest.mark.parametrize("numbers", groups(PER_FILE), ids=lambda numbers: f"{numbers[0]}-{numbers[-1]}")
def test_every_layer_as_wired(numbers: list[int], tmp_path: Path) -> None:
    graph = sg.InferenceGraph()
    agree(graph, [wire(graph, ALL[i], f"case {i}: {ALL[i].name}") for i in numbers], tmp_path, rows=(None,))


@pytest.mark.deep
@pytest.mark.parametrize("numbers", groups(PER_FILE), ids=lambda numbers: f"{numbers[0]}-{numbers[-1]}")
def test_every_layer_with_a_free_batch(numbers: list[int], tmp_path: Path) -> None:
    graph = sg.InferenceGraph()
    wired = [freely(graph, ALL[i], f"case {i}: {ALL[i].name}") for i in numbers]
    kept = [one for one in wired if one is not None]
    assert len(kept) > len(wired) // 3
    agree(graph, kept, tmp_path, rows=ROWS)
