"""Imported models as ONNX files: the numbers of ONNX Runtime at batches of 1, 2 and 5, and the model's own names."""

from pathlib import Path

import pytest
import torch

import stepgraph as sg
from stepgraph.interop import onnx_check, onnx_export
from tests.interop.models import CASES

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")


@pytest.mark.deep
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "resnet", "mobilenet", "unet", "lstm", "encoder"])
def test_an_imported_model_matches_onnx_runtime(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make()
    imported = sg.from_torch(model, case.inputs(), outputs=[case.output])
    inference = sg.InferenceGraph([imported.graph])
    inference.add_inputs(imported.inputs)
    inference.add_outputs(imported.outputs)
    asked = inference.prediction("test")
    path = onnx_export.save(onnx_export.Request(asked), tmp_path / "model.onnx", check=True)
    for rows in (1, 2, 5):
        batch = onnx_check.drawn(asked, rows, seed=rows)
        expected, found = onnx_check.results(asked, batch), onnx_check.run(path, asked.outputs, batch)
        for output, tensor in asked.outputs.items():
            scale = expected[tensor].abs().max()
            assert torch.all((expected[tensor] - found[output]).abs() <= 1e-5 * scale), (output, rows)
    other = sg.from_torch(case.make(), case.inputs(), outputs=[case.output])
    report = sg.load_onnx_weights(other.graph, path, partial=True)  # inference does not read counts of batches
    assert all("num_batches_tracked" in key for key in report.missing) and not report.mismatched
    for key, value in model.state_dict().items():
        assert key in report.missing or torch.equal(other.state_dict()[key].reshape(value.shape), value)
