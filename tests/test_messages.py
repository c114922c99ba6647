"""What a person does wrong first, and the fix that the message names."""

from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.program import PartName


class Unscoped(sg.Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Item(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * x.sum().item()


class Branch(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class ByNumpy(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)


class Listed(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * sum(x.tolist()[0])


class Masked(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x[x > 0]


class Elsewhere(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0])


class There(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0], device=x.device)


class Times(sg.Layer):
    scale: sg.Tensor

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * self.scale  # type: ignore[operator]


class Before(Times):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return self.scale * x  # type: ignore[return-value]


class Linear(Times):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.scale)  # type: ignore[arg-type]


class Indexed(Times):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * scope[self.scale]  # type: ignore[index]


class Adds(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        x += 1
        return x


class Doubles(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        x[:2].mul_(2)  # a view
        return x


class Grows(Times):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * scope.array(self.scale).mul_(1.01)


class Rectifies(sg.LossLayer):
    def forward(self, x: torch.Tensor, *labels: torch.Tensor, scope: sg.Scope) -> torch.Tensor:
        return super().forward(torch.relu_(x), *labels, scope=scope)


class Noise(sg.Layer):
    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x + torch.rand(3)


READS, WRITES = "its forward reads numbers", "its forward changes source 1 in place"


@pytest.mark.parametrize(
    ("layer", "kind", "problem", "fix"),
    [
        (Unscoped, sg.DataTypeError, "its forward does not take scope", "def forward(self, x, *, scope)"),
        *((one, sg.StateError, READS, "torch.where instead of if") for one in (Item, Branch, ByNumpy, Listed, Masked)),
        (Elsewhere, sg.DeviceError, "an array that is on another device", "device=x.device"),
        *((one, sg.ArgumentError, WRITES, "as in x + 1 or torch.relu(x)") for one in (Adds, Doubles)),
        (Noise, sg.ArgumentError, "random operator aten.rand", "scope.random(shape)"),
    ],
)
def test_a_forward_that_cannot_be_recorded_names_the_fix(layer: Any, kind: Any, problem: str, fix: str) -> None:
    with pytest.raises(kind) as caught:
        sg.Graph().node(layer(), sg.Tensor((4, 3)))
    assert problem in str(caught.value) and fix in str(caught.value) and f"'{layer.__name__}'" in str(caught.value)


def test_a_forward_that_changes_a_parameter_or_a_prediction_is_refused() -> None:
    with pytest.raises(sg.ArgumentError, match="its forward changes 'scale' in place"):
        sg.Graph().node(Grows(sg.Tensor((3,), fill=1.0)), sg.Tensor((4, 3)))
    graph, loss = sg.Graph(), Rectifies(sg.LossDescriptor(sg.LossType.MEAN_SQUARED_ERROR))
    x = sg.Tensor((4, 3))
    graph.node(sg.FullyConnectedLayer.create(3, 3), x)
    training = sg.TrainingGraph([graph], loss)
    training.add_inputs({"x": x}, {"y": sg.Tensor((4, 3))})
    with pytest.raises(sg.ArgumentError, match=WRITES):
        training.compile("cpu")


@pytest.mark.parametrize("layer", [Times, Before, Linear, Indexed])
@pytest.mark.parametrize("filled", [False, True])
def test_a_forward_that_reads_a_field_instead_of_its_array_names_the_fix(layer: Any, filled: bool) -> None:
    scale = sg.Tensor((3,), fill=1.0) if filled else sg.Tensor((3,))
    with pytest.raises(sg.DataTypeError, match=r"computes with a field[\s\S]*scope\.array\(self\.weights\)"):
        sg.Graph().node(layer(scale), sg.Tensor((4, 3)))


def test_an_operator_on_an_input_names_the_fix() -> None:
    for other in (2, np.ones(3, np.float32)):
        with pytest.raises(sg.StateError, match=r"operators work on results[\s\S]*call graph\.add"):
            sg.Tensor((4, 3)) + other


def test_rows_that_a_layer_of_an_open_graph_does_not_accept() -> None:
    x, graph = sg.Tensor((sg.BATCH, 4)), sg.Graph()
    graph.reshape((6, -1), x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile("cpu")
    with pytest.raises(sg.ShapeError, match=r"cannot run with 1 row: [\s\S]*use BATCH where it has a number"):
        inference.execute({"x": np.ones((1, 4), np.float32)})


def test_a_single_section_length_is_refused() -> None:
    with pytest.raises(sg.ArgumentError, match=r"is 1, not a sequence"):
        sg.SplitLayer(2, 1)  # type: ignore[arg-type]


def test_the_fix_for_a_constant_works() -> None:
    x, graph = sg.Tensor((4, 3)), sg.Graph()
    graph.node(There(), x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(sg.Device.cpu())
    found = inference.execute({"x": np.ones((4, 3), np.float32)}).result
    assert found is not None and found.numpy()[0].tolist() == [1, 2, 3]


def test_layers_made_in_a_loop_have_their_names_of_tables() -> None:
    graph = sg.Graph()
    x = sg.Tensor((4, 5))
    for _ in range(3):
        x = graph.node(sg.FullyConnectedLayer.create(5, 5), x)
    with pytest.raises(sg.ShapeError, match=r"FullyConnectedLayer 'FullyConnected4' \(.*test_messages.py:\d+\)"):
        graph.node(sg.FullyConnectedLayer.create(9, 5), x)
    assert "FullyConnected3" in str(graph) and "FullyConnected4" not in str(graph)
    with pytest.raises(sg.ShapeError, match="FullyConnectedLayer 'other'"):
        graph.node(sg.FullyConnectedLayer.create(9, 5, label="other"), x)


def test_a_batch_size_names_the_layer_of_the_loop() -> None:
    graph, given = sg.Graph(), sg.Tensor((4, 6))
    x = given
    for shape in ((4, 3, 2), (12, 2), (4, 6)):  # the second fixes the batch dimension
        x = graph.node(sg.ReshapeLayer(shape), x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": given})
    inference.compile(sg.Device.cpu())
    with pytest.raises(sg.ShapeError, match=r"'Reshape2' .*cannot run with batch size 5 instead of 4"):
        inference.execute({"x": np.ones((5, 6), np.float32)}, batch_size=5)


def test_indices_name_the_layer_of_the_loop() -> None:
    graph = sg.Graph()
    words = [sg.Tensor((4,), "int64", label=name) for name in ("a", "b")]
    for one in words:
        graph.node(sg.EmbeddingLayer.create(5, 2), one)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({one.label: one for one in words})
    inference.compile(sg.Device.cpu())
    fine, wrong = np.array([0, 1, 2, 3]), np.array([0, 1, 7, 3])
    with pytest.raises(sg.DataError, match="row 2 holds the index 7, but Embedding2 takes 0 to 4"):
        inference.execute({"a": fine, "b": wrong})


@pytest.mark.parametrize(
    ("declared", "given", "fix"),
    [
        ((4, 3, 8, 8), (4, 8, 8, 3), "np.transpose(data, (0, 3, 1, 2)), or tensor.permute(0, 3, 1, 2)"),
        ((4, 8, 6, 3), (9, 3, 8, 6), "np.transpose(data, (0, 2, 3, 1))"),
        ((4, 3, 20), (4, 20, 3), "np.transpose(data, (0, 2, 1))"),
        ((4, 3, 8, 8), (4, 8, 8, 4), "reshape or flatten the data"),
        ((4, 12), (4, 3, 5), "reshape or flatten the data"),
    ],
)
def test_channels_elsewhere_need_a_transpose(declared: Any, given: Any, fix: str) -> None:
    x, graph = sg.Tensor(declared), sg.Graph()
    graph.node(sg.ActivationLayer.relu(), x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(sg.Device.cpu())
    with pytest.raises(sg.ShapeError) as caught:
        inference.execute({"x": np.ones(given, np.float32)})
    assert caught.value.fix is not None and fix in caught.value.fix


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ],
    ids=["GPU", "CPU", "Python"],
)
def test_out_of_memory_says_so(error: Exception) -> None:
    x, graph = sg.Tensor((4, 3)), sg.Graph()
    graph.node(sg.ActivationLayer.relu(), x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(sg.Device.cpu())
    executable = inference.require_session("test").compilation.programs.executable(PartName.INFERENCE, 4)

    def full(*_: Any) -> Any:
        raise error

    executable._function = full
    with pytest.raises(sg.ExecutionError, match="cpu is out of memory") as caught:
        inference.execute({"x": np.ones((4, 3), np.float32)})
    assert "smaller batch size" in str(caught.value) and "memory_limit=" in str(caught.value)


def test_a_metric_that_returns_nothing_says_so() -> None:
    x, y, graph = sg.Tensor((4, 3)), sg.Tensor((4, 3)), sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(3, 3), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    ones = np.ones((4, 3), np.float32)
    with pytest.raises(sg.DataTypeError, match="'forgotten' returned NoneType"):
        sg.fit(training, (ones, ones), metrics={"forgotten": lambda prediction, labels: None}, progress="quiet")
