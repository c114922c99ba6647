"""Graphs in files: rebuilt in a program that never saw them made, they are what they were in every respect."""

import enum
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.checkpoint import files
from tests.checkpoint_runs import BATCH, CPU, batch, compiled, network, state, train
from tests.test_training_members import X, Y, dense, mse, numbers, sgd

LINK, ALL = sg.GraphCompilationOptions.LINK_GRAPHS, sg.GraphCompilationOptions.COMPUTE_ALL_GRADIENTS


def twin(graph: Any, path: Path, device: sg.Device | None = CPU, **settings: Any) -> Any:
    """The graph after a way through a file."""
    sg.save(path, graph)
    return sg.load(path, device, **settings)


# Structure


def test_a_fresh_process_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    training = compiled(network())
    train(training, 0, 2)
    training.save(tmp_path / "model")
    data = batch(2)
    np.savez(tmp_path / "data.npz", image=data[0]["image"], label=data[1]["label"])
    program = """
import numpy as np, torch, stepgraph as sg
torch.set_num_threads(1)
training = sg.load("model", sg.Device.cpu())
data = np.load("data.npz")
print(*(training.execute({"image": data["image"]}, {"label": data["label"]}).loss.hex() for _ in range(3)))
training.save("model")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(sg.__file__).parents[1])}
    arguments = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [training.execute(*data).loss for _ in range(3)]
    assert [float.fromhex(one) for one in done.stdout.split()] == expected
    assert state(sg.load(tmp_path / "model", CPU)) == state(training)


def test_the_rebuilt_graph_looks_the_same(tmp_path: Path) -> None:
    old = compiled(network())
    new = twin(old, tmp_path)
    assert str(new) == str(old)
    for one, other in zip(new.nodes, old.nodes, strict=True):
        assert repr(one.layer) == repr(other.layer)
        assert (one.layer.layer_id, one.where, one.layer.where) == (
            other.layer.layer_id,
            other.where,
            other.layer.where,
        )
        assert [t.label for t in (*one.sources, *one.results)] == [t.label for t in (*other.sources, *other.results)]
    assert new.nodes[5].layer is new.nodes[6].layer  # used twice, one layer
    assert new.inputs.keys() == {"image"} and new.loss_labels.keys() == {"label"}
    assert new.memory_plan.device_memory_size == old.memory_plan.device_memory_size


def test_a_file_of_a_loaded_graph_is_the_same_file(tmp_path: Path) -> None:
    old = compiled(network())
    train(old, 0, 2)
    new = twin(old, tmp_path / "a", None)
    new.save(tmp_path / "b")
    (one,), (other,) = ((tmp_path / name).glob("*.safetensors") for name in "ab")
    assert one.name == other.name  # the name is the checksum: state that waits for compile is saved too


def test_shared_tensors_stay_one(tmp_path: Path) -> None:
    x, y = sg.Tensor((4, 3), label="x"), sg.Tensor((4, 3), label="y")
    weights = sg.Tensor((3, 3), data=numbers(3, 3, seed=1))
    graph = sg.Graph()
    hidden = graph.node(sg.FullyConnectedLayer(weights, None, sg.ConvolutionDescriptor(1, 3, 3)), x)
    graph.node(sg.FullyConnectedLayer(weights, None, sg.ConvolutionDescriptor(1, 3, 3)), hidden)
    old = sg.TrainingGraph([graph], mse(), sgd())
    old.add_inputs({"x": x}, {"y": y})
    old.compile(CPU)
    new = twin(old, tmp_path)
    assert new.layers[0].weights is new.layers[1].weights
    for one in (old, new):
        one.execute({"x": X}, {"y": X})
    assert new.layers[0].weights.numpy().tobytes() == weights.numpy().tobytes()


def test_frozen_layers_stopped_gradients_and_updatable_flags_stay(tmp_path: Path) -> None:
    x, y = sg.Tensor((4, 3)), sg.Tensor((4, 2))
    graph = sg.Graph()
    first = graph.node(dense(3, 5, 1, "first"), x)
    second = graph.node(dense(5, 5, 2, "second"), first, disable_update=True)
    graph.node(dense(5, 2, 3, "third"), second)
    graph.layers[2].biases.is_updatable = False
    old = sg.TrainingGraph([graph], mse(), sgd())
    old.add_inputs({"x": x}, {"y": y})
    old.stop_gradient([first])
    old.compile(CPU)
    new = twin(old, tmp_path)
    assert new.summarized_dot_description.count("dashed") == old.summarized_dot_description.count("dashed") == 2
    before = state(new)
    for one in (old, new):
        one.execute({"x": X}, {"y": Y})
    changed = {name for name, value in state(new).items() if before[name] != value}
    assert changed == {"2.weights", "time_step"} and state(new) == state(old)


def test_constants_trained_inputs_and_outputs_stay(tmp_path: Path) -> None:
    a, b, c, y = (sg.Tensor((4, 3), label=name) for name in "abcy")
    graph = sg.Graph()
    total = graph.node(sg.ArithmeticLayer.add(), graph.node(sg.ArithmeticLayer.add(), a, b), c)
    old = sg.TrainingGraph([graph], mse(), sgd())
    old.add_inputs({"a": a, "b": b, "c": c}, {"y": y})
    b.bind_and_write_data(numbers(4, 3, seed=3), CPU)
    old.set_training_tensor_parameters([sg.TensorParameter(b)])
    old.compile(CPU, ALL, {"c": c}, {"c": numbers(4, 3, seed=4)})
    old.add_outputs({"total": total, "gradient": old.gradient_tensor(a)})
    layer = graph.layers[0]
    old.add_outputs({"own": old.source_gradient_tensors(layer)[0]})
    new = twin(old, tmp_path)
    outputs = []
    for one in (old, new):
        found = {name: np.zeros((4, 3), np.float32) for name in ("total", "gradient", "own")}
        one.execute({"a": X}, {"y": X}, outputs_data=found)
        outputs.append({name: array.tobytes() for name, array in found.items()})
    assert outputs[0] == outputs[1] and new.outputs.keys() == {"total", "gradient", "own"}
    assert new.inputs["b"].numpy().tobytes() == b.numpy().tobytes()
    new.restore(tmp_path)
    assert new.inputs["b"].numpy().tobytes() == numbers(4, 3, seed=3).tobytes()  # restored by its name


def test_gradients_from_outside_and_weights_of_labels_stay(tmp_path: Path) -> None:
    x = sg.Tensor((4, 3), label="x")
    graph = sg.Graph()
    graph.node(dense(3, 2, 5), x)
    old = sg.TrainingGraph([graph], None, sgd())
    old.add_inputs({"x": x})
    old.compile(CPU)
    old.allocate_user_gradient(graph.nodes[0].results[0])
    new = twin(old, tmp_path / "gradient")
    for one in (old, new):
        one.allocate_user_gradient(one.nodes[0].results[0]).bind_and_write_data(Y, CPU)
        one.execute({"x": X})
    assert state(new) == state(old)

    weighted = sg.TrainingGraph([graph], mse(), sgd())
    weighted.add_inputs({"x": x}, {"y": sg.Tensor((4, 2))}, {"w": sg.Tensor((4, 2))})
    weighted.compile(CPU)
    new = twin(weighted, tmp_path / "weights")
    ones = np.arange(8, dtype=np.float32).reshape(4, 2)
    assert new.execute({"x": X}, {"y": Y}, {"w": ones}).loss == weighted.execute({"x": X}, {"y": Y}, {"w": ones}).loss


def test_data_an_input_was_made_with_stays(tmp_path: Path) -> None:
    x, mask = sg.Tensor((4, 3), label="x"), sg.Tensor((4, 3), data=numbers(4, 3, seed=9), label="mask")
    old = sg.InferenceGraph()
    old.node(sg.ArithmeticLayer.multiply(), x, mask)
    old.compile(CPU)
    new = twin(twin(old, tmp_path / "a"), tmp_path / "b")
    assert new.execute({"x": X}).result.numpy().tobytes() == old.execute({"x": X}).result.numpy().tobytes()


def test_sequences_keep_their_lengths(tmp_path: Path) -> None:
    x = sg.Tensor.sequences([4, 2], 3, 2, sorted_sequences=True, label="x")
    old = sg.InferenceGraph()
    old.node(sg.LSTMLayer.create(3, 5), x)
    new = twin(old, tmp_path, None)
    assert new.nodes[0].sources[0].descriptor == x.descriptor
    data = numbers(2, 4, 3, seed=1)
    for one in (old, new):
        one.compile(CPU)
        one.execute({"x": data})
    assert new.nodes[0].results[0].numpy().tobytes() == old.nodes[0].results[0].numpy().tobytes()


def test_linked_graphs_are_saved_and_linked_again(tmp_path: Path) -> None:
    x, y = sg.Tensor((4, 3), label="x"), sg.Tensor((4, 2), label="y")
    tail, head = sg.Graph(), sg.Graph()
    hidden = head.node(dense(3, 5, 1, "head"), x)
    tail.node(dense(5, 2, 2, "tail"), hidden)
    optimizer = sgd(momentum_scale=0.9)
    first, second = sg.TrainingGraph([head], None, optimizer), sg.TrainingGraph([tail], mse(), optimizer)
    first.add_inputs({"x": x})
    second.add_inputs({"hidden": hidden}, {"y": y})
    for one in (first, second):
        one.compile(CPU, LINK)
    second.link([first])

    def step(tail: Any) -> None:
        tail, head = tail.linked_graphs
        head.bind_and_write_data({"x": X}, head.inputs, CPU)
        tail.bind_and_write_data({"y": Y}, tail.loss_labels, CPU)
        for one in (head, tail):
            one.execute_forward()
        for one in (tail, head):
            one.execute_gradient()
        for one in (tail, head):
            one.execute_optimizer_update()

    step(second)
    new = twin(second, tmp_path)
    with pytest.raises(sg.CheckpointError, match=r"2 linked graphs.*\nFix: load\(path, device\)"):
        sg.load(tmp_path)
    assert new.layers[0].label == "tail" and len(new.linked_graphs) == 2
    assert new.linked_graphs[0].optimizer is new.linked_graphs[1].optimizer
    assert len(sg.load(tmp_path, CPU, options=ALL).linked_graphs) == 2
    for one in (second, new):
        step(one)
    for mine, theirs in zip(new.linked_graphs, second.linked_graphs, strict=True):
        assert state(mine) == state(theirs)
    second.restore(tmp_path)
    step(second)
    for mine, theirs in zip(new.linked_graphs, second.linked_graphs, strict=True):
        assert state(mine) == state(theirs)


def test_a_graph_may_be_compiled_otherwise_than_it_was_saved(tmp_path: Path) -> None:
    old = compiled(network())  # deterministic
    new = twin(old, tmp_path, compute_type="bfloat16")
    assert (
        new.compilation.settings.options == sg.GraphCompilationOptions.NONE
        and new.compilation.settings.compute_type is torch.bfloat16
    )
    assert twin(new, tmp_path).compilation.settings.compute_type is torch.bfloat16
    assert twin(old, tmp_path, options=ALL).compilation.settings.options == ALL
    with pytest.raises(sg.ArgumentError, match="tf32 needs a device to compile for"):
        sg.load(tmp_path, tf32=True)


def test_an_inference_graph_can_be_made_from_a_training_checkpoint(tmp_path: Path) -> None:
    training = compiled(network())
    train(training, 0, 3)
    new = twin(training, tmp_path, inference=True)
    old = sg.InferenceGraph([training])
    old.compile(CPU, sg.GraphCompilationOptions.DETERMINISTIC)  # as the training graph was
    assert isinstance(new, sg.InferenceGraph) and new.inputs.keys() == {"image"} and not new.loss_labels
    data = np.concatenate([batch(7)[0]["image"]] * 2)
    found = [one.execute({"image": data}, batch_size=2 * BATCH).result.numpy().tobytes() for one in (old, new)]
    assert found[0] == found[1]
    again = twin(new, tmp_path / "again")
    assert again.execute({"image": data}, batch_size=2 * BATCH).result.numpy().tobytes() == found[0]


def test_loss_nodes_are_left_out_of_inference(tmp_path: Path) -> None:
    x, y = sg.Tensor((4, 3), label="x"), sg.Tensor((4, 2), label="y")
    graph = sg.Graph()
    graph.node(mse(), graph.node(dense(3, 2, 1), x), loss_labels=y)
    old = sg.TrainingGraph([graph], None, sgd())
    old.add_inputs({"x": x}, {"y": y})
    old.compile(CPU)
    new = twin(old, tmp_path, inference=True)
    assert len(new.nodes) == 1 and new.execute({"x": X}).result.shape == (4, 2)
    again = sg.load(tmp_path, CPU)
    assert again.execute({"x": X}, {"y": Y}).loss == old.execute({"x": X}, {"y": Y}).loss


def test_tf32_and_the_memory_limit_are_those_that_were_saved(tmp_path: Path) -> None:
    old = compiled(network(), tf32=False, memory_limit=10**6)
    new = twin(old, tmp_path)
    assert (new.compilation.settings.tf32, new.compilation.settings.memory_limit) == (False, 10**6)
    assert (twin(new, tmp_path).compilation.settings.tf32, twin(new, tmp_path).compilation.settings.memory_limit) == (
        False,
        10**6,
    )  # and saved once more
    assert twin(old, tmp_path, inference=True).compilation.settings.tf32 is False  # the limit is that of a step
    other = sg.load(tmp_path, CPU, memory_limit=2 * 10**6)
    assert (other.compilation.settings.tf32, other.compilation.settings.memory_limit) == (
        None,
        2 * 10**6,
    )  # asked for anything, nothing saved counts
    with pytest.raises(sg.MemoryLimitError, match="the limit is 1,000"):
        sg.load(tmp_path, CPU, memory_limit=1000)
    for given, error, words in (
        ({"memory_limit": "much"}, sg.DataTypeError, "memory_limit is 'much'"),
        ({"compute_type": "int8"}, sg.ArgumentError, "compute_type is int8"),
        ({"options": 3}, sg.DataTypeError, "the options are 3"),
        ({"speed": 9}, sg.ArgumentError, "'speed' is not a setting"),
    ):
        with pytest.raises(error, match=words):
            sg.load(tmp_path, CPU, **given)
    with pytest.raises(sg.DataTypeError, match=r"3\.5 is not a Device"):
        sg.load(tmp_path, 3.5)
    for name, value in {"memory_limit": 10**6, "parallel": sg.Parallel(shards=2)}.items():
        with pytest.raises(sg.ArgumentError, match=f"an inference graph takes no {name}"):
            sg.load(tmp_path, CPU, inference=True, **{name: value})


def test_a_graph_is_loaded_in_as_many_shards_as_one_asks_for(tmp_path: Path) -> None:
    compiled(network(), parallel=sg.Parallel(shards=2)).save(tmp_path)
    assert [sg.load(tmp_path, CPU, **one).compilation.shards for one in ({}, {"parallel": sg.Parallel(shards=4)})] == [
        0,
        4,
    ]


def test_a_checkpoint_from_before_they_were_saved_still_loads(tmp_path: Path) -> None:
    old = compiled(network(), tf32=False, memory_limit=10**6)
    old.save(tmp_path)
    description = json.loads((tmp_path / files.DESCRIPTION).read_bytes())
    for name in ("tf32", "memory_limit"):
        del description["graphs"][0]["compiled"][name]
    del description["sha256"]
    files._write_description(tmp_path, description)
    new = sg.load(tmp_path, CPU)
    assert (new.compilation.settings.tf32, new.compilation.settings.memory_limit) == (None, None) and train(
        new, 0, 2
    ) == train(old, 0, 2)
    assert old.restore(tmp_path).is_complete


def test_mixed_precision_and_options_are_those_that_were_saved(tmp_path: Path) -> None:
    old = compiled(network(), compute_type="bfloat16")
    new = twin(old, tmp_path)
    assert train(new, 0, 2) == train(old, 0, 2)
    assert (
        new.compilation.settings.options == old.compilation.settings.options
        and new.compilation.settings.compute_type is torch.bfloat16
    )


# Classes of the user


class Mode(enum.Enum):
    PLAIN = "plain"
    SIGNED = "signed"


@dataclass(frozen=True)
class SlopeDescriptor:
    mode: Mode
    steps: tuple[int, ...] = (1, 2)


class Slope(sg.Layer):
    """Every kind of field a layer may have."""

    slopes: list[sg.Tensor]
    descriptor: SlopeDescriptor
    table: np.ndarray
    kernel: torch.Tensor
    names: dict[str, Any] = field(default_factory=dict)
    limit: float = math.inf
    shift: sg.Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", float(self.table.sum() + self.kernel.sum()))

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        total = sum(scope.array(slope) for slope in self.slopes) * x + self.offset
        return total.clamp_max(self.limit) + (0 if self.shift is None else scope.array(self.shift))


class Halving(sg.SGDOptimizer):
    """A user's own optimizer."""

    def __init__(self, descriptor: Any, **settings: Any) -> None:
        super().__init__(descriptor, **settings)
        self.__dict__["rule"] = "halving"

    def update(self, parameter: Any, gradient: Any, state: Any, n: Any) -> Any:
        return parameter - n.learning_rate * gradient / 2, state


def sloped(optimizer: sg.Optimizer | None = None, **fields: Any) -> sg.TrainingGraph:
    x, y = sg.Tensor((4, 3), label="x"), sg.Tensor((4, 3), label="y")
    slopes = [sg.Tensor((3,), fill=0.5), sg.Tensor((3,), fill=1.5)]
    descriptor, table = SlopeDescriptor(Mode.SIGNED, (3, 4)), np.arange(3.0)
    names = {"a": (1, [2, None]), "b": {"deep": True, "tiny": -math.inf}, **fields}
    graph = sg.Graph()
    graph.node(Slope(slopes, descriptor, table, torch.tensor([1.0, 2.0, 3.0]), names, label="slope"), x)
    training = sg.TrainingGraph([graph], mse(), optimizer or sgd())
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    return training


def test_classes_of_the_user_are_handed_over(tmp_path: Path) -> None:
    old = sloped(Halving(sg.OptimizerDescriptor(0.1)))
    old.execute({"x": X}, {"y": X})
    new = twin(old, tmp_path, custom=[Slope, SlopeDescriptor, Mode, Halving])
    one, other = new.layers[0], old.layers[0]
    assert (one.descriptor, one.names, one.limit, one.shift) == (other.descriptor, other.names, math.inf, None)
    assert type(one.slopes) is list and np.array_equal(one.table, other.table) and torch.equal(one.kernel, other.kernel)
    assert one.table.dtype == np.float64 and type(new.optimizer) is Halving
    for graph in (old, new):
        graph.execute({"x": X}, {"y": X})
    assert state(new) == state(old)


@pytest.mark.parametrize(
    ("custom", "words"),
    [
        ([], r"holds a \S*test_portable:Slope, which is not a stepgraph class.*\nFix: .*custom=\[Slope\]"),
        ([Slope, Mode], r"SlopeDescriptor, which is not a stepgraph class.*custom=\[SlopeDescriptor\]"),
        ([Slope, SlopeDescriptor], r"test_portable:Mode, which is not a stepgraph class"),
    ],
)
def test_missing_classes_are_named_and_nothing_is_imported(custom: list[type], words: str, tmp_path: Path) -> None:
    sloped().save(tmp_path)
    with pytest.raises(sg.CheckpointError, match=f"(?s){words}"):
        sg.load(tmp_path, custom=custom)


@pytest.mark.parametrize("custom", [["Slope"], [Slope, type("Slope", (), {"__qualname__": "Slope"})]])
def test_what_is_no_class_is_refused(custom: list[Any], tmp_path: Path) -> None:
    sloped().save(tmp_path)
    with pytest.raises(sg.DataTypeError, match="custom holds"):
        sg.load(tmp_path, custom=custom)


def test_a_class_that_has_changed_is_told(tmp_path: Path) -> None:
    class Other(sg.Layer):
        slopes: list[sg.Tensor]

    Other.__qualname__ = "Slope"
    sloped().save(tmp_path)
    with pytest.raises(sg.CheckpointError, match=r"(?s)'slope' cannot be created from its saved settings.*version of"):
        sg.load(tmp_path, custom=[Other, SlopeDescriptor, Mode])


def test_a_function_in_a_field_can_be_restored_but_not_loaded(tmp_path: Path) -> None:
    old = sloped(function=print)
    old.execute({"x": X}, {"y": X})
    old.save(tmp_path)
    with pytest.raises(sg.CheckpointError, match=r"setting is a builtin_function.*\nFix: build the graph"):
        sg.load(tmp_path, custom=[Slope, SlopeDescriptor, Mode])
    new = sloped(function=print)
    assert new.restore(tmp_path).is_complete
    assert state(new) == state(old)


@pytest.mark.parametrize("graph", [sg.Graph(), None, "model"])
def test_only_graphs_can_be_saved(graph: Any, tmp_path: Path) -> None:
    with pytest.raises(sg.DataTypeError, match="is not a graph that can be saved"):
        sg.save(tmp_path, graph)
