"""The networks of the examples, trained for a moment, as ONNX files: numbers at batches of 1, 2 and 5."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

import stepgraph as sg
from stepgraph.interop import onnx_check, onnx_export

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

FOLDER = Path(__file__).parent.parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("[0-9]*.py"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[sg.TrainingGraph]:
    """The training graphs that a program creates."""
    found: list[sg.TrainingGraph] = []
    create = sg.TrainingGraph.__init__

    def noted(self: sg.TrainingGraph, *given: object, **settings: object) -> None:
        create(self, *given, **settings)  # type: ignore[arg-type]
        found.append(self)

    monkeypatch.setattr(sg.TrainingGraph, "__init__", noted)
    return found


@pytest.mark.deep
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_matches_onnx_runtime(
    example: Path, made: list[sg.TrainingGraph], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", [str(example), "--quick"])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    compiled = [training for training in made if training.compilation is not None]
    assert compiled
    for training in compiled[:3]:
        asked = training.inference().prediction("test")
        path = onnx_export.save(onnx_export.Request(asked), tmp_path / "model.onnx", check=True)
        free = any(tensor.shape[0] == asked.batch for tensor in asked.inputs.values())
        for rows in (1, 2, 5) if free else (int(asked.batch),):
            batch = onnx_check.drawn(asked, rows, seed=rows)
            expected, found = onnx_check.results(asked, batch), onnx_check.run(path, asked.outputs, batch)
            for name, tensor in asked.outputs.items():
                scale = expected[tensor].abs().max()
                assert torch.all((expected[tensor] - found[name]).abs() <= 1e-5 * scale), (name, rows)
