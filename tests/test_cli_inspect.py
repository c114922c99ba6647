"""`stepgraph inspect` and `stepgraph devices`: what they tell is what the library says."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import stepgraph as sg
from stepgraph.cli import machine
from stepgraph.cli.main import main
from stepgraph.compiler.kernels.choices import CHOICES
from tests.checkpoint_runs import batch, compiled, network
from tests.cli_graphs import CPU, SWISH, Called, saved_custom, saved_inference, saved_linked, saved_network
from tests.test_kernel_choices import CHOICE

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_network(tmp_path_factory.mktemp("saved") / "net")


def inspected(capsys: Capture, *given: str | Path) -> dict[str, Any]:
    called = Called(capsys, "inspect", *given, "--json")
    assert called.code == 0, called.err
    return json.loads(called.out)


def test_rows_that_are_left_to_the_data(capsys: Capture, tmp_path: Path) -> None:
    x = sg.Tensor((sg.BATCH, 3), label="x")
    graph = sg.Graph()
    graph.dense(x, 2)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    assert inspected(capsys, inference.save(tmp_path / "open"))["inputs"] == {"x": "[BATCH, 3] float32"}


def test_everything_is_told(saved: Path, capsys: Capture) -> None:
    called = Called(capsys, "inspect", saved, "--device", "cpu", "--batch-sizes", "1,8")
    assert called.code == 0 and called.err == ""
    for words in (
        rf"^{re.escape(str(saved))}: training graph$",
        r"^  inputs +image \[6, 1, 4, 4\] float32$",
        r"^  loss labels +label \[6\] int64$",
        r"^  optimizer +adam amsgrad, learning_rate 0.01, beta1 0.9, .*updates: 3$",
        r"^  compiled +DETERMINISTIC$",
        r'^  note who +\["a", "b"\]$',
        r"^conv +│ Convolution +│ 6×1×4×4 +│ 6×2×4×4 +│ +20$",
        r"^Loss +│ Loss +│ 6×3 +│ 1 +│$",
        r"^norm.mean +│ statistic +│ 2 +│ float32 +│ +2 │",
        r"^square.weights +│ parameter +│ 32×32 +│ float32 +│ 1,024 │",
        r"^Memory by batch size on cpu \(\d+ threads?\)$",
        r"^ +┃ +1 ┃ +8$",
        r"^total +│ +[\d.]+ KiB │ +[\d.]+ KiB$",
    ):
        assert re.search(words, called.out, re.MULTILINE), words


def test_numbers_are_those_of_the_graph(saved: Path, capsys: Capture) -> None:
    found = inspected(capsys, saved, "--device", "cpu")  # and batches as they are by default
    graph = sg.load(saved, CPU)
    tensors = {one["name"]: one for one in found["tensors"]}
    weights = graph.layers[0].weights.numpy()
    assert tensors["conv.weights"]["norm"] == pytest.approx(np.linalg.norm(weights.astype(np.float64)))
    assert tensors["conv.weights"]["largest"] == pytest.approx(np.abs(weights).max())
    assert [one["count"] for one in found["tensors"] if one["role"] == "parameter"] == [18, 2, 2, 2, 1024, 32, 96, 3]
    by_batch = found["memory"][0]["by_batch_size"]
    assert by_batch.keys() == {"1", "6", "24"}
    for rows, plan in by_batch.items():
        wanted = graph.memory_plan_for(int(rows))
        assert plan == {kind: getattr(wanted, kind) for kind in plan} and plan["total"] > 0
    assert by_batch["6"]["total"] == graph.memory_plan.total
    assert [one["name"] for one in found["layers"][0]][:2] == ["conv", "norm"]
    assert found["layers"][0][-1]["sources"] == [[6, 3], [6]] and found["notes"]["step"] == 3


def test_passes_are_shown(saved: Path, capsys: Capture) -> None:
    assert inspected(capsys, saved, "--no-plan")["passes"] == []
    (passes,) = inspected(capsys, saved, "--no-plan", "--passes", "--device", "cpu")["passes"]
    by_name = {one["name"]: one for one in passes}
    first, in_place = by_name["remove no-ops and duplicates"], by_name["write in place"]
    assert first["stage"] == "recorded" and first["operators"][0] > first["operators"][1] and first["seconds"] > 0
    assert in_place["intermediates"] > 0 and by_name["merge products"]["operators"] is None
    shown = Called(capsys, "inspect", saved, "--no-plan", "--passes", "--device", "cpu").out
    assert "Pipeline" in shown and "choose implementations" in shown


def test_settings_of_the_device_change_the_plan(saved: Path, capsys: Capture) -> None:
    plain, half = (inspected(capsys, saved, "--device", one, "--batch-sizes", "6") for one in ("cpu", "cpu:bfloat16"))
    activations = [one["memory"][0]["by_batch_size"]["6"]["activations"] for one in (plain, half)]
    assert activations[0] != activations[1]


def test_drawings_are_written(saved: Path, capsys: Capture, tmp_path: Path) -> None:
    dot, svg = tmp_path / "net.dot", tmp_path / "net.svg"
    called = Called(capsys, "inspect", saved, "--no-plan", "--dot", dot, "--svg", svg)
    assert called.code == 0 and "Memory" not in called.out
    assert dot.read_text().startswith("digraph") and "conv" in dot.read_text()
    ElementTree.parse(svg)
    assert 'data-layer="square"' in svg.read_text() and 'data-layer="Loss"' in svg.read_text()
    called = Called(capsys, "inspect", saved, "--no-plan", "--svg", tmp_path / "no" / "net.svg")
    assert called.code == 1 and "it cannot be written: No such file" in called.err


def test_a_narrow_terminal_and_a_pipe_lose_nothing(
    saved: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    piped = Called(capsys, "inspect", saved, "--no-plan").out
    assert "…" not in piped and "\x1b" not in piped and f"{saved}: training graph\n" in piped
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    narrow = re.sub(r"\x1b\[[\d;]*m", "", Called(capsys, "inspect", saved, "--no-plan").out)
    assert max(map(len, narrow.splitlines())) <= 30 and "…" not in narrow
    # Column by column, what was folded is all there.
    cells = [[cell.strip() for cell in line.split("│")] for line in narrow.splitlines()]
    firsts = "".join(row[0] for row in cells if len(row) > 4)
    assert "Activation" in firsts and "square.weights" in firsts and "norm.variance" in firsts


def test_a_series_and_what_fit_noted(capsys: Capture, tmp_path: Path) -> None:
    training = compiled(network())
    images, labels = (
        np.concatenate([batch(step)[part][name] for step in range(4)]) for part, name in ((0, "image"), (1, "label"))
    )
    settings = {"metrics": [sg.accuracy], "checkpoints": tmp_path / "run", "progress": "quiet"}
    sg.fit(training, (images, labels), validation=(images, labels), epochs=2, **settings)
    called = Called(capsys, "inspect", tmp_path / "run", "--no-plan")
    assert called.code == 0 and f"{tmp_path}/run/checkpoint-000002: training graph" in called.out
    assert re.search(
        r"note fit +2 epochs, 8 updates; last epoch: loss .* validation accuracy .*; best epoch: [12]", called.out
    )
    assert Called(capsys, "inspect", tmp_path / "run" / "best" / "graph.json", "--no-plan").code == 0
    called = Called(capsys, "inspect", tmp_path)
    assert called.code == 1 and f"below it   {tmp_path}/run" in called.err


def test_a_run_that_ended_in_nan_is_told(tmp_path: Path, capsys: Capture) -> None:
    x, y, graph = sg.Tensor((8, 2)), sg.Tensor((8, 1)), sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(2, 1), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    rows = np.full((8, 2), np.nan, np.float32)
    sg.fit(training, (rows, rows[:, :1]), checkpoints=tmp_path / "run", on_nan="continue", progress="quiet")
    called = Called(capsys, "inspect", tmp_path / "run")
    assert called.code == 0, called.err
    assert re.search(r"note fit +1 epochs, 1 updates; last epoch: loss nan .*; best epoch: None", called.out)


def test_inference_and_linked_graphs(capsys: Capture, tmp_path: Path) -> None:
    found = inspected(capsys, saved_inference(tmp_path / "inference"), "--batch-sizes", "4,400")
    assert found["kind"] == "inference graph" and found["compiled"] == "not yet" and found["optimizers"] == []
    plans = found["memory"][0]["by_batch_size"]
    assert plans["400"]["activations"] == 100 * plans["4"]["activations"] and plans["4"]["optimizer_state"] == 0
    linked = saved_linked(tmp_path / "linked")
    for extra in ([], ["--no-plan"]):
        called = Called(capsys, "inspect", linked, *extra)
        assert called.code == 0, called.err
        assert "linked with 1 more" in called.out and "Layers of graph 2 of 2" in called.out
        assert called.out.count("Memory by batch size") == (0 if extra else 2)


def test_a_loss_that_has_no_labels_yet(capsys: Capture, tmp_path: Path) -> None:
    graph, x = sg.Graph(), sg.Tensor((4, 3))
    graph.node(sg.FullyConnectedLayer.create(3, 2, label="dense"), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x})
    training.save(tmp_path / "net")
    called = Called(capsys, "inspect", tmp_path / "net", "--no-plan", "--dot", tmp_path / "net.dot")
    assert called.code == 0 and "dense" in called.out, called.err
    assert "dense" in (tmp_path / "net.dot").read_text()
    assert [one["name"] for one in inspected(capsys, tmp_path / "net", "--no-plan")["layers"][0]] == ["dense"]


def test_a_graph_that_takes_one_batch_size_says_so(capsys: Capture, tmp_path: Path) -> None:
    x = sg.Tensor((4, 6), label="x")
    graph = sg.InferenceGraph()
    graph.node(sg.TransposeLayer((1, 0)), x)
    path = graph.save(tmp_path / "graph")
    called = Called(capsys, "inspect", path)
    assert called.code == 0 and "Other batch sizes cannot be planned: batch_size is " in called.out
    called = Called(capsys, "inspect", path, "--batch-sizes", "2")
    assert called.code == 1 and "the first input has 4 rows and the result 6" in called.err


# Classes of the user's own


def test_own_classes(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, code = saved_custom(tmp_path / "graph"), tmp_path / "own_layers.py"
    code.write_text(SWISH)
    called = Called(capsys, "inspect", path)
    assert called.code == 1 and "own classes" in called.out and "dense.weights" in called.out  # what can be told
    assert (
        "which is not a stepgraph class" in called.err and "Fix: pass the class: --custom layers.py:Class" in called.err
    )
    assert Called(capsys, "inspect", path, "--custom", f"{code}:Swish").code == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_layers")
    assert Called(capsys, "inspect", path, "--custom", "own_layers:Swish").code == 0
    for given, words in (
        (f"{code}:Swash", "has no class Swash.\n    classes   Swish"),
        ("Swish", "'Swish' does not name a class"),
        ("nowhere.py:Swish", "there is no file nowhere.py"),
        ("nowhere_at_all:Swish", "cannot be imported: ModuleNotFoundError"),
    ):
        called = Called(capsys, "inspect", path, "--custom", given)
        assert called.code == 1 and words in called.err, given


# What is no saved graph


def damaged(path: Path) -> Path:
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return path


def foreign(folder: Path, net: Path) -> dict[str, tuple[Path, str]]:
    """Things that are no saved graph, and words of what is said about them."""
    save_file({"w": np.zeros(3)}, folder / "w.safetensors")
    torch.save({}, folder / "m.pt")
    np.save(folder / "m.npy", np.zeros(3))
    (folder / "m.pkl").write_bytes(b"\x80\x04}.")
    (folder / "m.txt").write_text("hello")
    (folder / "nothing").touch()
    return {
        "missing": (folder / "missing", "there is no such directory"),
        "folder": (folder, "there is no complete checkpoint: no graph.json"),
        "tensors": (next(net.glob("*.safetensors")), f"pass its directory, {net}"),
        "safetensors": (
            folder / "w.safetensors",
            "it is a safetensors file, tensors without a graph, not a saved graph",
        ),
        "torch": (folder / "m.pt", "it is a zip archive (PyTorch's torch.save"),
        "pickle": (folder / "m.pkl", "a pickle, which stepgraph never opens"),
        "numpy": (folder / "m.npy", "a NumPy array"),
        "text": (folder / "m.txt", "a file of another kind"),
        "empty": (folder / "nothing", "an empty file"),
        "damaged": (damaged(Path(shutil.copytree(net, folder / "x" / "net"))), "is damaged"),
    }


def test_what_is_no_saved_graph_is_told_apart(saved: Path, capsys: Capture, tmp_path: Path) -> None:
    for path, words in foreign(tmp_path, saved).values():
        for command in (["inspect"], ["compare", "--devices", "cpu,cpu"]):
            called = Called(capsys, *command, path)
            assert (called.code, called.out) == (1, "") and words in called.err and "Fix: " in called.err, called.err


# Devices


def test_devices_tells_what_torch_says(capsys: Capture) -> None:
    assert main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["any"] == str(sg.Device.any()) and found["versions"]["stepgraph"] == sg.__version__
    assert found["versions"]["torch"].startswith(torch.__version__)
    gpus = torch.accelerator.device_count()
    assert found["devices"][0]["device"] == "cpu" and len(found["devices"]) == 1 + gpus
    assert found["devices"][0]["threads"] == torch.get_num_threads()
    called = Called(capsys, "devices")
    assert called.code == 0 and f"Device.any() is {sg.Device.any()}." in called.out
    assert found["kernels"]["file"] in called.out and "OMP_NUM_THREADS" in called.out


def test_devices_counts_kernels_that_were_chosen(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(CHOICES, "file", tmp_path / "kernels.jsonl")
    assert "missing: the first compilation creates it" in Called(capsys, "devices").out
    CHOICES.keep(CHOICE)
    CHOICES.keep(replace(CHOICE, question=replace(CHOICE.question, operator="other")))
    assert re.search(r"holds +2 choices", Called(capsys, "devices").out)


@pytest.mark.parametrize(
    "platform, cuda, nvidia, hidden, words",
    [
        ("linux", None, False, None, "no GPU driver was found"),
        ("linux", None, True, None, "a CUDA driver is installed: install PyTorch's build for CUDA"),
        ("linux", "12.8", False, None, "built for CUDA 12.8, but no driver was found"),
        ("linux", "12.8", True, None, "does not work with this PyTorch, built for CUDA 12.8"),
        ("linux", "12.8", True, "", "CUDA_VISIBLE_DEVICES='' hides all GPUs"),
        ("darwin", None, False, None, "Metal"),
    ],
)
def test_why_there_is_no_gpu(
    platform: str, cuda: str | None, nvidia: bool, hidden: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(machine, "_has_nvidia", lambda: nvidia)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    (told,) = [one for one in machine.missing(()) if "GPU" in one["what"]]
    assert words in told["fix"]


def test_what_the_compiler_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert any("C++ compiler" in one["what"] for one in machine.missing(()))
    monkeypatch.setenv("CXX", sys.executable)  # something that is there
    assert not any("C++ compiler" in one["what"] for one in machine.missing(()))
    monkeypatch.setattr(machine.util, "find_spec", lambda name: None)
    assert any("Triton" in one["what"] for one in machine.missing((torch.device("cuda", 0),)))
    assert not any("Triton" in one["what"] for one in machine.missing((torch.device("mps", 0),)))
