"""Imported models as ONNX files: the numbers of ONNX Runtime at batches of 1, 2 and 5, and the model's own names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stepgraph as sg
from stepgraph.interop import onnx_check, onnx_export
from stepgraph.interop.onnx_lowering import ForExport
from stepgraph.interop.onnx_recurrent import projected_lstm
from stepgraph.system.torch_private import DispatchMode
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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_an_lstm_with_projections_step_by_step(bias: bool) -> None:
    """As other operators: ONNX's own has no projection, and PyTorch's exporter writes a loop that it cannot export."""
    torch.manual_seed(0)
    module, x = nn.LSTM(4, 6, proj_size=3, bidirectional=True, bias=bias), torch.randn(5, 2, 4)
    state = torch.randn(2, 2, 3), torch.randn(2, 2, 6)
    output, ends = module(x, state)
    with ForExport(), Operators() as seen:
        module(x, state)
    found = projected_lstm(x, state, [*module.parameters()], bias, 1, 0.0, False, True, False)
    assert not any("lstm" in one for one in seen.names)
    for one, expected in zip(found, (output, *ends), strict=True):
        torch.testing.assert_close(one, expected)


class Operators(DispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_an_lstm_with_projections_matches_onnx_runtime(tmp_path: Path) -> None:
    imported = sg.from_torch(nn.LSTM(4, 6, 2, batch_first=True, proj_size=3, bidirectional=True), torch.zeros(2, 5, 4))
    inference = sg.InferenceGraph([imported.graph])
    inference.add_inputs(imported.inputs)
    inference.add_outputs(imported.outputs)
    inference.compile("cpu")
    inference.save_onnx(tmp_path / "model.onnx")  # which compares
