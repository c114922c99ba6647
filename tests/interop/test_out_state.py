"""`state_dict`, `load_state_dict` and safetensors: names as PyTorch's, all or nothing, at once in compiled graphs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import stepgraph as sg

CPU = sg.Device.cpu()
NAMES = ["hidden.weights", "hidden.biases", "norm.beta", "norm.gamma", "norm.mean", "norm.variance"]
NAMES += ["head.weights", "head.biases"]


def wired() -> sg.Graph:
    x = sg.Tensor((4, 3), label="x")
    graph = sg.Graph()
    h = 2 * graph.dense(x, 6, label="hidden")
    h = graph.node(sg.BatchNormalizationLayer.create(label="norm"), graph.reshape((4, 6, 1, 1), h))
    graph.dense(graph.reshape((4, 6), h), 2, label="head")
    return graph


def trained(graph: sg.Graph) -> sg.TrainingGraph:
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": graph.nodes[0].sources[0]}, {"y": sg.Tensor((4, 2))})
    training.compile(CPU)
    return training


def numbers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.rand_like(array) + 0.5 for name, array in state.items()}


def unchanged(graph: sg.Graph, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(array, before[name]) for name, array in graph.state_dict().items())


def copied(graph: sg.Graph) -> dict[str, torch.Tensor]:
    return {name: array.clone() for name, array in graph.state_dict().items()}


def test_names_are_those_of_layers_and_fields() -> None:
    graph = wired()
    training = trained(graph)
    assert list(graph.state_dict()) == list(training.state_dict()) == list(training.inference().state_dict()) == NAMES
    assert all(type(array) is torch.Tensor for array in graph.state_dict().values())


def test_a_compiled_graph_uses_loaded_values_at_once() -> None:
    graph = wired()
    training = trained(graph)
    data, labels = np.ones((4, 3), np.float32), np.zeros((4, 2), np.float32)
    training.execute({"x": data}, {"y": labels})
    inference = training.inference()
    new = numbers(training.state_dict())
    assert training.load_state_dict(new) == ([], [])
    wanted = torch.from_numpy(data) @ new["hidden.weights"].t() + new["hidden.biases"]
    scale = new["norm.gamma"] / (new["norm.variance"].flatten() + 1e-5).sqrt()
    wanted = (2 * wanted - new["norm.mean"].flatten()) * scale.flatten() + new["norm.beta"].flatten()
    wanted = wanted @ new["head.weights"].t() + new["head.biases"]
    torch.testing.assert_close(inference.execute({"x": data}).result.torch(), wanted, rtol=1e-4, atol=1e-4)
    loss = training.execute({"x": data}, {"y": labels})
    assert np.isfinite(loss.loss) and not unchanged(training, new)


def test_values_are_shared() -> None:
    graph = wired()
    graph.state_dict()["head.biases"].fill_(7)
    assert graph.nodes[-1].layer.biases.numpy().tolist() == [7, 7]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: s.pop("head.biases"), "missing   head.biases"),
        (lambda s: s.update(extra=torch.zeros(1)), "unexpected   extra"),
        (lambda s: s.update({"head.biases": torch.zeros(3)}), r"head.biases \(\[2\] float32 here, \[3\] float32 there"),
        (lambda s: s.update({"head.biases": torch.zeros(2).half()}), "float16 there"),
        (lambda s: s.update({"head.biases": torch.zeros(2).cfloat()}), "complex64 there"),
        (lambda s: s.update({"head.biases": torch.zeros(())}), r"\[\] float32 there"),
        (lambda s: s.update({"head.biases": [0, 0]}), "'head.biases' is list"),
    ],
)
def test_what_does_not_fit_is_refused(change: Any, words: str) -> None:
    graph = wired()
    before, state = copied(graph), numbers(graph.state_dict())
    change(state)
    with pytest.raises(sg.StepgraphError, match=words):
        graph.load_state_dict(state)
    assert unchanged(graph, before)
    with pytest.raises(sg.DataTypeError, match="not a dictionary"):
        graph.load_state_dict([])  # type: ignore[arg-type]


def test_not_strict_loads_what_is_there() -> None:
    graph = wired()
    found = graph.load_state_dict({"head.biases": torch.ones(2), "extra": torch.zeros(1)}, strict=False)
    assert found.unexpected_keys == ["extra"] and found.missing_keys == [n for n in NAMES if n != "head.biases"]
    assert graph.state_dict()["head.biases"].tolist() == [1, 1]
    with pytest.raises(sg.CheckpointError):  # as in PyTorch, other shapes are always an error
        graph.load_state_dict({"head.biases": torch.ones(3)}, strict=False)


def tied() -> tuple[sg.Graph, sg.FullyConnectedLayer]:
    x = sg.Tensor((2, 3), label="x")
    graph = sg.Graph()
    first = sg.FullyConnectedLayer.create(3, 3, label="first")
    y = graph.node(first, x)
    graph.node(sg.FullyConnectedLayer(first.weights, None, first.descriptor, label="second"), y)
    return graph, first


def test_tied_weights_have_all_names(tmp_path: Path) -> None:
    graph, first = tied()
    state = graph.state_dict()
    assert list(state) == ["first.weights", "first.biases", "second.weights"]
    assert state["first.weights"].data_ptr() == state["second.weights"].data_ptr()
    one = {"first.biases": torch.ones(3), "second.weights": torch.full((3, 3), 2.0)}
    assert graph.load_state_dict(one) == ([], []) and first.weights.numpy().min() == 2
    with pytest.raises(sg.CheckpointError, match=r"the same tensor as .* here, other values"):
        graph.load_state_dict({**state, "second.weights": torch.zeros(3, 3)})
    sg.save_safetensors(graph, tmp_path / "tied.safetensors")
    with safe_open(tmp_path / "tied.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["first.biases", "first.weights"]
        assert json.loads(file.metadata()["stepgraph.aliases"]) == {"second.weights": "first.weights"}
    assert sg.load_safetensors(tied()[0], tmp_path / "tied.safetensors").is_complete


def test_an_imported_model_keeps_its_names() -> None:
    """`origin` names come first, in their order, aliases and unused tensors included."""
    graph, first = tied()
    unused = sg.Tensor((1,), fill=5.0)
    names = {"unused": unused, "a.weight": first.weights, "a.bias": first.biases, "lm_head.weight": first.weights}
    graph.set_origin(names)
    training = sg.TrainingGraph([graph])
    inference = training.inference()
    for one in (graph, training, inference):
        assert one.origin == names and list(one.state_dict()) == list(names)
    module = inference.to_torch()
    assert set(module.state_dict()) == set(names)
    data = torch.randn(2, 3)
    w, b = first.weights.torch(), first.biases.torch()
    torch.testing.assert_close(module(data), (data @ w.t() + b) @ w.t())


def test_two_imported_models_with_the_same_names() -> None:
    x = sg.Tensor((2, 3))
    graphs = []
    for label in ("one", "two"):
        graph = sg.Graph()
        graph.dense(x, 3, label=label)
        layer = graph.layers[0]
        graph.set_origin({"0.weight": layer.weights, "0.bias": layer.biases})
        graphs.append(graph)
    both = sg.InferenceGraph(graphs)
    assert list(both.state_dict()) == ["0.weight", "0.bias", "two.weights", "two.biases"]


def test_trained_inputs_have_a_name() -> None:
    style = sg.Tensor((1, 3), fill=0.5, label="style")
    graph = sg.Graph()
    graph.node(sg.ActivationLayer.tanh(), style)
    training = sg.TrainingGraph([graph], None, sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"style": style})
    training.set_training_tensor_parameters([sg.TensorParameter(style)])
    assert list(training.state_dict()) == ["input.style"]


def test_safetensors_round_trip(tmp_path: Path) -> None:
    graph, path = wired(), tmp_path / "new folder" / "model.safetensors"
    training = trained(graph)
    training.execute({"x": np.ones((4, 3), np.float32)}, {"y": np.zeros((4, 2), np.float32)})
    assert sg.save_safetensors(training, path) == path
    assert [one.name for one in path.parent.iterdir()] == [path.name] and path.stat().st_mode & 0o044
    other = wired()
    report = sg.load_safetensors(other, path)
    assert report.is_complete and set(report.loaded) == set(NAMES) and "8 of 8 tensors restored" in str(report)
    assert unchanged(other, copied(training))
    assert sg.save_safetensors(other, path) == path  # replaced


def test_safetensors_of_others(tmp_path: Path) -> None:
    graph, path = wired(), tmp_path / "other.safetensors"
    before = copied(graph)
    save_file({"head.biases": torch.ones(2), "head.weights": torch.ones(3, 3), "more": torch.ones(1)}, path)
    with pytest.raises(sg.CheckpointError, match="the file and the graph do not match"):
        sg.load_safetensors(graph, path)
    assert unchanged(graph, before)
    report = sg.load_safetensors(graph, path, partial=True)
    assert report.loaded == ("head.biases",) and report.unexpected == ("more",)
    assert report.mismatched[0].name == "head.weights" and "hidden.weights" in report.missing
    assert graph.state_dict()["head.biases"].tolist() == [1, 1]


@pytest.mark.parametrize("call", [sg.save_safetensors, sg.load_safetensors, sg.load_onnx_weights])
def test_bad_arguments(call: Any, tmp_path: Path) -> None:
    with pytest.raises(sg.DataTypeError, match="is not a graph"):
        call("model", tmp_path / "x")
    with pytest.raises(sg.DataTypeError, match="the path is int"):
        call(wired(), 3)
    with pytest.raises(sg.StorageError if call is sg.save_safetensors else (sg.StorageError, sg.CheckpointError)):
        call(wired(), tmp_path)
    if call is not sg.save_safetensors:
        (tmp_path / "junk").write_bytes(b"junk, and nothing else")
        with pytest.raises(sg.CheckpointError):
            call(wired(), tmp_path / "junk")
        with pytest.raises(sg.StorageError):
            call(wired(), tmp_path / "missing")
