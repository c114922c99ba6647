"""`stepgraph compare`: differences are those of the arrays, and the exit code tells whether they matter."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.cli import batch, differences
from stepgraph.cli.differences import What
from tests.cli_graphs import (
    CPU,
    SWISH,
    Called,
    batch_file,
    saved_custom,
    saved_dense,
    saved_inference,
    saved_linked,
    saved_network,
)

Capture = pytest.CaptureFixture[str]
TYPES = "cpu:default,cpu:bfloat16"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_network(tmp_path_factory.mktemp("saved") / "net")


def compared(capsys: Capture, code: int, *given: str | Path) -> dict[str, Any]:
    called = Called(capsys, "compare", *given, "--json")
    assert called.code == code, called.err
    return json.loads(called.out)


# The arithmetic


def numbers(**arrays: list[float]) -> dict[What, torch.Tensor]:
    found = {}
    for name, values in arrays.items():
        layer, _, field = name.partition("_")
        found[What("gradient" if field else "result", name, layer)] = torch.tensor(values)
    return found


@pytest.mark.parametrize(
    "one, other, absolute, share",
    [
        ([1.0, -4.0], [1.0, -3.0], 1.0, 0.25),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0),
        ([0.0], [1e-30], 1e-30, float("inf")),
        ([float("nan"), 2.0], [float("nan"), 1.0], 1.0, 0.5),
        ([float("inf"), 2.0], [float("inf"), 2.0], 0.0, 0.0),
        ([float("nan"), 2.0], [1.0, 2.0], float("inf"), float("inf")),
        ([float("inf"), 2.0], [float("-inf"), 2.0], float("inf"), float("inf")),
    ],
)
def test_differences(one: list[float], other: list[float], absolute: float, share: float) -> None:
    (found,) = differences.differences(numbers(a=one), numbers(a=other)).values()
    assert found.absolute == pytest.approx(absolute) and found.share == pytest.approx(share)


def test_a_gradient_is_judged_by_those_of_its_layer() -> None:
    one, other = (
        numbers(conv_b=[1e-8], conv_w=[0.5], dense_w=[0.1]),
        numbers(conv_b=[3e-8], conv_w=[0.5], dense_w=[0.2]),
    )
    found = {what.name: one for what, one in differences.differences(one, other).items()}
    assert found["conv_b"].share == pytest.approx(4e-8) and found["dense_w"].share == pytest.approx(1.0)
    assert found["conv_b"].largest == pytest.approx(1e-8)


# The command


def test_the_same_twice_is_the_same(saved: Path, capsys: Capture) -> None:
    found = compared(capsys, 0, saved, "--devices", "cpu,cpu", "--tolerance", "0")
    names = [(one["kind"], one["name"]) for one in found["rows"]]
    assert names[:3] == [("result", "conv"), ("result", "norm"), ("result", "Activation")]
    assert ("result", "square (1)") in names and ("result", "square (2)") in names and ("result", "Loss") in names
    gradients = [name for kind, name in names if kind == "gradient"]
    assert gradients[0].startswith("out.") and gradients[-1] == "conv.weights" and len(gradients) == 8
    assert all(one["differences"][0]["absolute"] == 0 and one["largest"] > 0 for one in found["rows"])
    assert found["first_beyond"] is None


def test_numbers_are_those_of_the_graph(saved: Path, capsys: Capture, tmp_path: Path) -> None:
    """What `compare` tells about bfloat16, computed once more by hand."""
    path = batch_file(tmp_path / "batch.npz")
    found = compared(capsys, 1, saved, "--devices", TYPES, "--data", path)
    data, results = np.load(path), []
    for compute_type in (None, "bfloat16"):
        options = sg.GraphCompilationOptions.NONE
        training = sg.load(saved, CPU, options=options, compute_type=compute_type)
        for name, tensor in (training.inputs | training.loss_labels).items():
            training.bind_and_write_data({name: data[name]}, {name: tensor}, CPU)
        training.execute_forward()
        training.execute_gradient()
        layer = training.layers[0]
        results.append((training.result_tensors(layer)[0].numpy(), training.gradient_data(layer.weights, layer)))
    rows = {(one["kind"], one["name"]): one for one in found["rows"]}
    for (one, other), key in zip(
        zip(*results, strict=True), (("result", "conv"), ("gradient", "conv.weights")), strict=True
    ):
        assert rows[key]["largest"] == pytest.approx(np.abs(one).max())
        assert rows[key]["differences"][0]["absolute"] == pytest.approx(np.abs(one - other).max(), rel=1e-4)


def test_the_first_layer_beyond_is_marked(saved: Path, capsys: Capture) -> None:
    called = Called(capsys, "compare", saved, "--devices", f"cpu:deterministic,{TYPES}")
    lines = called.out.splitlines()
    assert called.code == 1 and lines[0] == "Differences from cpu:deterministic"
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    shares = np.array([[float(row[4]), float(row[6])] for row in cells])
    assert len(shares) == 17 and shares[:, 0].max() < 1e-4 < shares[:, 1].max()  # measuring chooses within 1e-4
    marked = [line for line in lines if "← first beyond" in line]
    assert len(marked) == 1 and marked[0].startswith("conv ") and "beyond" in lines[lines.index(marked[0]) + 1]
    assert "beyond 0.001 of the largest number; the first is the result of conv." in lines[-1]
    called = Called(capsys, "compare", saved, "--devices", "cpu,cpu", "--tolerance", "0.1")
    assert called.code == 0 and called.out.splitlines()[-1].startswith("All 17 within 0.1 of the largest number")


def test_float16_does_not_overflow(capsys: Capture, tmp_path: Path) -> None:
    path = saved_dense(tmp_path / "dense")
    np.savez(tmp_path / "batch.npz", x=np.ones((4, 3), np.float32), y=np.full((4, 2), 100, np.float32))
    given = [path, "--devices", "cpu,cpu:float16", "--data", tmp_path / "batch.npz", "--tolerance", "0.01"]
    rows = compared(capsys, 0, *given)["rows"]
    assert [one["name"] for one in rows] == ["dense", "Loss", "dense.biases", "dense.weights"]
    assert rows[2]["largest"] * 65536 > 65504  # at the scale that training starts with it would overflow


def test_other_batches_and_seeds(capsys: Capture, tmp_path: Path) -> None:
    given = [saved_dense(tmp_path / "dense"), "--devices", "cpu,cpu:deterministic"]
    np.savez(tmp_path / "batch.npz", x=np.ones((9, 3), np.float32), y=np.ones((9, 2), np.float32))
    largest = []
    for extra in (["--seed", "1"], ["--batch-size", "2"], ["--data", tmp_path / "batch.npz"]):
        found = compared(capsys, 0, *given, *extra)
        largest.append(found["rows"][0]["largest"])
    assert len(set(largest)) == 3
    assert compared(capsys, 0, *given, *extra) == found, "the same from run to run"


def test_graphs_of_other_kinds(capsys: Capture, tmp_path: Path) -> None:
    found = compared(capsys, 0, saved_inference(tmp_path / "inference"), "--devices", TYPES, "--tolerance", "0.05")
    assert [one["name"] for one in found["rows"]] == ["words", "squash"]
    found = compared(capsys, 0, saved_linked(tmp_path / "linked"), "--devices", "cpu,cpu:deterministic")
    names = [one["name"] for one in found["rows"]]
    assert names == ["head", "tail", "Loss", "head.biases", "head.weights", "tail.biases", "tail.weights"]
    assert all(one["largest"] > 0 for one in found["rows"])
    (tmp_path / "own.py").write_text(SWISH)
    path = saved_custom(tmp_path / "own")
    given = [path, "--devices", "cpu,cpu", "--custom", f"{tmp_path / 'own.py'}:Swish"]
    found = compared(capsys, 0, *given)  # without a loss: gradients from outside are drawn
    assert [one["name"] for one in found["rows"]] == ["dense", "swish", "dense.biases", "dense.weights"]
    assert all(one["largest"] > 0 for one in found["rows"])
    assert Called(capsys, "compare", path, "--devices", "cpu,cpu").code == 1


def test_drawn_numbers_are_valid() -> None:
    words, label = sg.Tensor((200, 3), "int32", label="words"), sg.Tensor((200,), "int64", label="label")
    graph = sg.Graph()
    x = graph.node(sg.EmbeddingLayer.create(11, 4), words)
    graph.node(sg.FullyConnectedLayer.create(12, 5), graph.reshape((200, -1), x))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"words": words}, {"label": label})
    training.compile(CPU)
    found = batch.drawn([training], 300, seed=0)
    assert found["words"].dtype is torch.int32 and tuple(found["words"].shape) == (300, 3)
    assert (int(found["words"].min()), int(found["words"].max())) == (0, 10)
    assert (int(found["label"].min()), int(found["label"].max())) == (0, 4)
    assert training.execute({"words": found["words"]}, {"label": found["label"]}, batch_size=300).loss > 0


def test_drawn_lengths_leave_something_to_compare() -> None:
    x, lengths = sg.Tensor((sg.BATCH, 6, 4), label="x"), sg.Tensor((sg.BATCH,), "int64", label="lengths")
    graph = sg.Graph()
    graph.lstm(x, 5, others=[lengths])
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x, "lengths": lengths})
    inference.compile(CPU)
    found = batch.drawn([inference], 200, seed=0)["lengths"]
    assert (int(found.min()), int(found.max())) == (1, 6)


def onnx_file(saved: Path, path: Path) -> Path:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    return sg.load(saved, inference=True).save_onnx(path)


def test_a_file_for_training_also_serves_onnx(capsys: Capture, tmp_path: Path) -> None:
    """Labels are left out; other names still are errors."""
    saved = saved_dense(tmp_path / "dense")
    onnx, path = onnx_file(saved, tmp_path / "dense.onnx"), tmp_path / "batch.npz"
    arrays = {"x": np.ones((4, 3), np.float32), "y": np.zeros((4, 2), np.float32)}
    np.savez(path, **arrays)
    assert Called(capsys, "compare", saved, onnx, "--data", path).code == 0
    np.savez(path, **arrays, z=np.zeros(3))
    called = Called(capsys, "compare", saved, onnx, "--data", path)
    assert called.code == 1 and "no input or label 'z'" in called.err


def test_another_onnx_file_is_refused(capsys: Capture, tmp_path: Path) -> None:
    saved = saved_dense(tmp_path / "dense")
    called = Called(capsys, "compare", saved, tmp_path / "missing.onnx")
    assert called.code == 1 and "missing.onnx: there is no such file.\nFix: check the path" in called.err
    other = onnx_file(saved_inference(tmp_path / "words"), tmp_path / "words.onnx")
    called = Called(capsys, "compare", saved, other)
    assert called.code == 1 and "words.onnx: it has an input 'words', but the graph has none" in called.err
    assert "pass the file that was written from this graph" in called.err


@pytest.mark.parametrize("seed", ["-1", "x", "1.5"])
@pytest.mark.parametrize("command", [("demo",), ("compare", "run", "--devices", "cpu,cpu")])
def test_a_seed_is_a_number(command: tuple[str, ...], seed: str, capsys: Capture) -> None:
    called = Called(capsys, *command, f"--seed={seed}")
    assert called.code == 2 and "is not a seed: use a number ≥ 0" in called.err


@pytest.mark.parametrize(
    "arrays, words",
    [
        ({"x": np.zeros((4, 3), np.float32)}, "it has no array 'y'.\n    needed   x [4, 3] float32, y [4, 2] float32"),
        ({"x": 0, "y": 0, "extra": 0}, "the graph has no input or label 'extra'"),
        ({"x": np.zeros((4, 3)), "y": np.zeros((4, 2), np.float32)}, "float64"),
        ({"x": np.zeros((4, 5), np.float32), "y": np.zeros((4, 2), np.float32)}, "Tensor 'x'"),
        ({"x": np.array([{}]), "y": 0}, "it contains no readable arrays"),
        (b"PK\x03\x04 no zip", "it contains no readable arrays"),
        (np.zeros(3), "it holds one array without a name"),
        (None, "No such file or directory"),
    ],
)  # fmt: skip
def test_data_that_does_not_fit_is_refused(arrays: Any, words: str, capsys: Capture, tmp_path: Path) -> None:
    saved = saved_dense(tmp_path / "dense")
    path = tmp_path / "batch.npz"
    if isinstance(arrays, dict):
        np.savez(path, **arrays)
    elif isinstance(arrays, bytes):
        path.write_bytes(arrays)
    elif arrays is not None:
        with path.open("wb") as file:
            np.save(file, arrays)
    called = Called(capsys, "compare", saved, "--devices", "cpu,cpu", "--data", path)
    assert (called.code, called.out) == (1, "") and words in called.err and "Traceback" not in called.err


def test_rows_of_a_file_are_its_own(saved: Path, capsys: Capture, tmp_path: Path) -> None:
    given = ["--data", batch_file(tmp_path / "b.npz"), "--batch-size", "3"]
    called = Called(capsys, "compare", saved, "--devices", "cpu,cpu", *given)
    assert called.code == 1 and "--data has its own rows" in called.err


@pytest.mark.gpu
def test_cpu_and_gpu(saved: Path, capsys: Capture) -> None:
    found = compared(capsys, 0, saved, "--devices", "cpu,gpu:no-tf32,gpu:deterministic:no-tf32")
    assert any(one["differences"][0]["absolute"] > 0 for one in found["rows"])
    assert compared(capsys, 1, saved, "--devices", "cpu,cuda:0:bfloat16")["first_beyond"]["name"] == "conv"
