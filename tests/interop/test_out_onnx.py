"""`save_onnx`: names, a free batch, numbers checked by ONNX Runtime, and what cannot be exported."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.interop import onnx_check, onnx_export
from tests.cli_graphs import Called
from tests.interop.test_out_module import network

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")


def served(path: Path, **data: torch.Tensor) -> list[np.ndarray]:
    """What a program without stepgraph computes."""
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {name: array.numpy() for name, array in data.items()})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[sg.InferenceGraph, Path]:
    """A network, exported once for the tests that only look at it."""
    graph = network()
    return graph, graph.save_onnx(tmp_path_factory.mktemp("onnx") / "model.onnx")


def test_names_and_numbers(saved: tuple[sg.InferenceGraph, Path]) -> None:
    graph, path = saved
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert model.opset_import[0].version == 20
    (image,), (output,) = model.graph.input, model.graph.output
    assert (image.name, output.name) == ("image", "output")
    assert [one.dim_param or one.dim_value for one in image.type.tensor_type.shape.dim] == ["batch", 1, 8, 8]
    assert [one.dim_param or one.dim_value for one in output.type.tensor_type.shape.dim] == ["batch", 3]
    assert {one.name for one in model.graph.initializer} >= set(graph.state_dict())
    operators = {node.name: node for node in model.graph.node}
    assert operators["features.0/Conv"].output == ["features.0"] and operators["features/Gemm"].output == ["output"]
    assert len(operators) == len(model.graph.node)
    module = graph.to_torch()
    for rows in (1, 2, 5):
        data = torch.randn(rows, 1, 8, 8)
        (found,) = served(path, image=data)
        wanted = module(data).detach().numpy()
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert [one.name for one in path.parent.iterdir()] == ["model.onnx"]


def test_weights_come_back(saved: tuple[sg.InferenceGraph, Path]) -> None:
    graph, path = saved
    other = network()
    with torch.no_grad():
        for array in other.state_dict().values():
            array.zero_()
    report = sg.load_onnx_weights(other, path)
    assert set(report.loaded) == set(graph.state_dict()) and not report.missing and not report.mismatched
    assert all(torch.equal(other.state_dict()[name], array) for name, array in graph.state_dict().items())
    foreign = sg.Graph()
    foreign.dense(sg.Tensor((1, 2)), 3, label="features")
    with pytest.raises(sg.CheckpointError, match=r"features\.weights"):
        sg.load_onnx_weights(foreign, path)
    report = sg.load_onnx_weights(foreign, path, partial=True)
    assert report.loaded == ("features.biases",) and [one.name for one in report.mismatched] == ["features.weights"]


def test_the_first_layer_that_differs_is_named(saved: tuple[sg.InferenceGraph, Path], tmp_path: Path) -> None:
    """A file with one changed weight, as a wrong exporter would write it."""
    graph, path = saved
    model = onnx.load(path)
    (gamma,) = (one for one in model.graph.initializer if one.name == "features.norm.gamma")
    gamma.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(gamma) * 1.001, gamma.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    asked = graph.prediction("test")
    with pytest.raises(sg.ExecutionError, match=r"'features\.norm'.*computes other numbers from 'features\.norm' on"):
        onnx_check.check_file(asked, tmp_path / "wrong.onnx", None)
    onnx_check.check_file(asked, path, None)


@pytest.mark.parametrize("error, is_wrong", [(3e-7, False), (3e-4, True)])
def test_a_number_near_zero_may_be_off_by_roundings(
    monkeypatch: pytest.MonkeyPatch, error: float, is_wrong: bool
) -> None:
    """One row and one number, which the bias brings to 0.001: rounding is a large share of it, and of no other row."""
    sg.set_seed(0)
    x, graph = sg.Tensor((sg.BATCH, 64), label="x"), sg.Graph()
    head = sg.FullyConnectedLayer.create(64, 1, label="head")
    result = graph.node(head, x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({"y": result})
    inference.compile("cpu")
    asked = inference.prediction("test")
    number = onnx_check.results(asked, onnx_check.drawn(asked, 1, seed=0))[result]
    head.biases.torch().copy_(0.001 - number.reshape(-1))

    def run(path: Path, outputs: object, batch: onnx_check.Batch) -> dict[str, torch.Tensor]:
        return {"y": onnx_check.results(asked, batch)[result] + error}

    monkeypatch.setattr(onnx_check, "run", run)
    monkeypatch.setattr(onnx_check, "layer_values", lambda *_: {})
    with pytest.raises(sg.ExecutionError) if is_wrong else nullcontext():
        onnx_check.check_file(asked, Path("not read.onnx"), 1)


def test_a_wrong_file_is_not_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"the old one")
    monkeypatch.setattr(onnx_check, "TOLERANCE", -1.0)
    monkeypatch.setattr(onnx_check, "_differs", lambda *_: True)
    with pytest.raises(sg.ExecutionError, match="from 'head' on than the graph, and so another output 'output'"):
        small().save_onnx(tmp_path / "model.onnx")
    assert [one.name for one in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_bytes() == b"the old one"


def small(width: int = 2) -> sg.InferenceGraph:
    graph = sg.InferenceGraph()
    graph.dense(sg.Tensor((sg.BATCH, width), label="x"), 2, label="head")
    return graph


def test_outputs_that_are_not_operators(tmp_path: Path) -> None:
    """An input, a constant and the same result twice as outputs; tied weights once; names that collide."""
    x = sg.Tensor((3, 4), label="x")
    graph = sg.InferenceGraph()
    first = sg.FullyConnectedLayer.create(4, 4, label="val_0")  # as the exporter calls its own values
    y = graph.node(first, x)
    z = graph.node(sg.FullyConnectedLayer(first.weights, None, first.descriptor, label="x"), y)
    passed = graph.node(sg.DropoutLayer(0.5, label="passes"), x)
    fixed = graph.constant(np.arange(3, dtype=np.float32))
    graph.add_inputs({"x": x})
    graph.add_outputs({"y": y, "again": y, "z": z, "passed": passed, "fixed": fixed})
    path = graph.save_onnx(tmp_path / "odd.onnx")
    model = onnx.load(path)
    assert [one.name for one in model.graph.output] == ["y", "again", "z", "passed", "fixed"]
    assert sum("weights" in one.name for one in model.graph.initializer) == 1
    data = torch.randn(5, 4)
    found = served(path, x=data)
    for ours, wanted in zip(found, graph.to_torch()(data), strict=True):
        np.testing.assert_allclose(ours, wanted.detach().numpy(), rtol=1e-5, atol=1e-6)
    assert sg.load_onnx_weights(graph, path).loaded


@pytest.mark.deep
def test_recurrent_layers_are_single_operators(tmp_path: Path) -> None:
    x, lengths = sg.Tensor((sg.BATCH, 7, 3), label="x"), sg.Tensor((sg.BATCH,), "int64", label="lengths")
    graph = sg.InferenceGraph()
    y = graph.node(sg.LSTMLayer.create(3, 4, 2, is_bidirectional=True, label="lstm"), x, lengths)
    graph.node(sg.GRULayer.create(8, 5, label="gru"), y, lengths)
    path = graph.save_onnx(tmp_path / "rnn.onnx")
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("LSTM") == 4 and kinds.count("GRU") == 1


class Rounded(sg.Layer):
    """A layer of the user's own."""

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return torch.round(x * 2) / 2


class Eigenvalues(sg.Layer):
    """A layer with an operator that ONNX does not have."""

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return torch.linalg.eigvalsh(x @ x.transpose(-1, -2))


@pytest.mark.deep
def test_layers_that_cannot_be_exported_are_named(tmp_path: Path) -> None:
    graph = sg.InferenceGraph()
    x = graph.node(Rounded(label="round"), sg.Tensor((sg.BATCH, 3, 3), label="x"))
    graph.node(Eigenvalues(label="eigenvalues"), x)
    with pytest.raises(sg.ExecutionError, match=r"Eigenvalues 'eigenvalues'.*cannot be exported to ONNX") as failed:
        graph.save_onnx(tmp_path / "model.onnx")
    assert "linalg_eigh" in str(failed.value)
    assert not list(tmp_path.iterdir())


class Doubled(sg.Layer):
    """A layer that turns the number of rows into a number of Python's."""

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * len(x)


@pytest.mark.deep
def test_layers_that_fix_the_batch_are_named(tmp_path: Path) -> None:
    graph = sg.InferenceGraph()
    graph.node(Doubled(label="by rows"), graph.dense(sg.Tensor((sg.BATCH, 3), label="x"), 3))
    with pytest.raises(sg.ExecutionError, match=r"(?s)Doubled .by rows.*batch_size="):
        graph.save_onnx(tmp_path / "model.onnx")
    assert graph.save_onnx(tmp_path / "model.onnx", batch_size=4).exists()


@pytest.mark.deep
def test_a_fixed_number_of_rows(tmp_path: Path) -> None:
    path = small().save_onnx(tmp_path / "fixed.onnx", batch_size=3, opset=18, optimize=True)
    model = onnx.load(path)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 3 and model.opset_import[0].version == 18


@pytest.mark.deep
def test_large_weights_are_beside_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(onnx_export, "LARGEST", 1)
    path, graph = tmp_path / "large.onnx", small(100)
    for _ in range(2):
        graph.save_onnx(path)
    names = sorted(one.name for one in tmp_path.iterdir())
    assert len(names) == 2 and names[0] == "large.onnx" and names[1].endswith(".data")
    expected = graph.to_torch()(torch.ones(2, 100)).detach()
    np.testing.assert_allclose(served(path, x=torch.ones(2, 100))[0], expected, rtol=1e-5, atol=1e-6)
    assert sg.load_onnx_weights(graph, path).loaded == ("head.weights", "head.biases")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"opset": 7}, "opset is 7, not one of 18 to 23"),
        ({"opset": True}, "opset is True"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
    ],
)
def test_bad_settings(settings: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(sg.ArgumentError, match=words):
        small().save_onnx(tmp_path / "model.onnx", **settings)


def test_bad_paths_and_names(tmp_path: Path) -> None:
    with pytest.raises(sg.DataTypeError, match="the path is int"):
        small().save_onnx(3)  # type: ignore[arg-type]
    graph = small()
    graph.add_outputs({"x": graph.nodes[-1].results[0]})
    with pytest.raises(sg.ArgumentError, match="an input and an output are both named 'x'"):
        graph.save_onnx(tmp_path / "model.onnx")
    with pytest.raises(sg.StateError, match="the graph has no layers"):
        sg.InferenceGraph().save_onnx(tmp_path / "model.onnx")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnx_ir"])
def test_a_missing_package(package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(sg.StateError, match="pip install 'stepgraph\\[onnx\\]'"):
        small().save_onnx(tmp_path / "model.onnx")


def test_without_a_runtime_nothing_is_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    onnx_check.check_file(small().prediction("test"), tmp_path / "missing.onnx", None)


# The command


def test_compare_walks_layer_by_layer(
    saved: tuple[sg.InferenceGraph, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    graph, path = saved
    checkpoint = graph.save(tmp_path / "graph")
    called = Called(capsys, "compare", checkpoint, path)
    assert called.code == 0, called.err
    lines = called.out.splitlines()
    assert lines[0] == "Differences from cpu" and str(path) in lines[1] and "features.norm" in called.out
    assert lines[-1].startswith("All ")
    model = onnx.load(path)
    for one in model.graph.initializer:
        if one.name == "features.norm.gamma":
            one.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(one) * 2, one.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    called = Called(capsys, "compare", checkpoint, tmp_path / "wrong.onnx", "--batch-size", "3")
    assert called.code == 1 and "the first is the result of features.norm" in called.out
    called = Called(capsys, "compare", checkpoint)
    assert called.code == 2 and "pass --devices A,B or an ONNX file" in called.err
