"""Graphs: wiring, conveniences, queries, pictures, data bound by hand, and layers of the user's own."""

import re
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg

CPU = sg.Device.cpu()


def tensor(*shape: int, kind: str = "float32", **settings: Any) -> sg.Tensor:
    return sg.Tensor(shape, kind, **settings)


def run(graph: sg.Graph, inputs: dict[str, tuple[sg.Tensor, Any]]) -> np.ndarray:
    """The last result of a graph, run for inference on the CPU."""
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({name: one for name, (one, _) in inputs.items()})
    inference.compile(CPU)
    return inference.execute({name: data for name, (_, data) in inputs.items()}).result.numpy()


class TestNode:
    def test_a_node_returns_a_new_tensor_with_a_shape_and_no_data(self) -> None:
        graph, x = sg.Graph(), tensor(2, 3)
        y = graph.node(sg.FullyConnectedLayer.create(3, 4), x)
        assert (y.shape, y.data, y is x) == ((2, 4), None, False)
        assert graph.node(sg.ActivationLayer.relu(), y).shape == (2, 4)  # results are sources of later nodes
        assert (len(graph.nodes), graph.device) == (2, None)

    @pytest.mark.parametrize("form", ["apart", "list", "tuple"])
    def test_sources_one_by_one_or_as_a_sequence(self, form: str) -> None:
        x, y, graph, layer = tensor(2, 3), tensor(2, 3), sg.Graph(), sg.ArithmeticLayer.subtract()
        sources = {"apart": (x, y), "list": ([x, y],), "tuple": ((x, y),)}[form]
        assert graph.node(layer, *sources).shape == (2, 3)
        assert graph.source_tensors(layer) == [x, y]

    @pytest.mark.parametrize("form", ["tensor", "list"])
    def test_loss_labels_make_a_loss_node(self, form: str) -> None:
        x, y, graph = tensor(2, 3), tensor(2, 3), sg.Graph()
        layer = sg.LossLayer.mean_squared_error(sg.ReductionType.SUM)
        graph.node(layer, x, loss_labels=y if form == "tensor" else [y])
        assert graph.source_tensors(layer) == [x]
        training = sg.TrainingGraph([graph])
        training.add_inputs({"x": x}, {"y": y})
        training.compile(CPU)
        assert training.execute({"x": np.ones((2, 3), np.float32)}, {"y": [3] * 6}).loss == 24

    def test_disabled_updates_freeze_the_layer_and_let_gradients_through(self) -> None:
        x, y, graph = tensor(1, 1), tensor(1, 1), sg.Graph()
        first, second = (sg.FullyConnectedLayer.create(1, 1, biases=False) for _ in range(2))
        for layer, value in ((first, 2.0), (second, 3.0)):
            layer.weights.data[:] = value
        graph.node(second, graph.node(first, x), disable_update=True)
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.01))
        training.add_inputs({"x": x}, {"y": y})
        training.compile(CPU)
        training.execute({"x": [1]}, {"y": [5]})
        assert second.weights.numpy().item() == 3
        assert first.weights.numpy().item() == pytest.approx(2 - 0.01 * 2 * (6 - 5) * 3, rel=1e-6)

    def test_layers_are_listed_once_and_numbered_from_one(self) -> None:
        graph, layers = sg.Graph(), [sg.FullyConnectedLayer.create(3, 3), sg.ActivationLayer.relu()]
        assert [layer.layer_id for layer in layers] == [0, 0]
        x = tensor(2, 3)
        first = graph.node(layers[0], x)
        second = graph.node(layers[1], first)
        third = graph.node(layers[0], second)  # weight sharing
        assert (graph.layers, len(graph.nodes)) == (layers, 3)
        assert [layer.layer_id for layer in layers] == [1, 2]
        assert graph.source_tensors(layers[0]) == [x, second]
        assert graph.result_tensors(layers[0]) == [first, third]
        last = sg.ActivationLayer.tanh()
        sg.InferenceGraph([graph]).node(last, third)  # a graph's own nodes come after those it adopts
        assert last.layer_id == 3

    def test_a_refused_node_leaves_no_trace(self) -> None:
        graph, layer = sg.Graph(), sg.ActivationLayer.relu()
        result = graph.node(layer, tensor(2, 3))
        for sources in ((), (tensor(2), tensor(2)), (tensor(2), tensor(2), tensor(2)), (tensor(2, kind="int32"),)):
            with pytest.raises(sg.StepgraphError, match="ActivationLayer 'Activation'"):
                graph.node(layer, *sources)
        assert (graph.layers, len(graph.nodes)) == ([layer], 1)
        assert (len(graph.source_tensors(layer)), graph.result_tensors(layer)) == (1, [result])

    def test_queries_about_a_foreign_layer_are_empty(self) -> None:
        graph = sg.Graph()
        assert (graph.source_tensors(sg.ActivationLayer.relu()), graph.result_tensors(sg.ActivationLayer.relu())) == (
            [],
            [],
        )

    def test_a_layer_is_in_two_graphs_and_keeps_its_place_in_the_first(self) -> None:
        first, second, layer = sg.Graph(), sg.Graph(), sg.FullyConnectedLayer.create(3, 2, label="dense")
        second.node(sg.ActivationLayer.relu(), x := tensor(2, 3))
        first.node(layer, tensor(2, 3))
        second.node(layer, x)
        assert (first.layers, second.layers[1], layer.layer_id) == ([layer], layer, 1)

    def test_one_graph_serves_training_and_inference(self) -> None:
        graph, x, layer = sg.Graph(), tensor(1, 1), sg.FullyConnectedLayer.create(1, 1)
        result = graph.node(layer, x)
        training = sg.TrainingGraph([graph], None, sg.SGDOptimizer(0.1))
        inference = sg.InferenceGraph([graph])
        own = inference.node(sg.ActivationLayer.relu(), result)
        for compiled in (training, inference):
            assert (compiled.source_tensors(layer), compiled.result_tensors(layer)) == ([x], [result])
        assert (len(training.nodes), len(inference.nodes), len(graph.nodes)) == (1, 2, 1)
        assert inference.result_tensors(inference.layers[1]) == [own]

    def test_memory_of_one_relu_is_what_was_measured(self) -> None:
        graph = sg.Graph()
        graph.node(sg.ActivationLayer.relu(), tensor(2, 3))
        for compiled, size in ((sg.InferenceGraph([graph]), 24), (sg.TrainingGraph([graph]), 48)):
            assert compiled.device_memory_size == 0
            compiled.compile(CPU)
            assert compiled.device_memory_size == size


SOURCE = np.arange(6, dtype=np.float32).reshape(2, 3)


class TestConveniences:
    @pytest.mark.parametrize(("dimension", "shape"), [(1, (2, 6)), (0, (4, 3))])
    def test_concatenate(self, dimension: int, shape: tuple) -> None:
        graph, x, y = sg.Graph(), tensor(2, 3), tensor(2, 3)
        assert graph.concatenate([x, y], dimension).shape == shape
        found = run(graph, {"x": (x, SOURCE), "y": (y, -SOURCE)})
        assert found.tolist() == np.concatenate([SOURCE, -SOURCE], dimension).tolist()

    @pytest.mark.parametrize(
        ("shape", "result"), [((6,), (6,)), ((3, 2), (3, 2)), ((-1, 2), (3, 2)), ([2, 1, 3], (2, 1, 3))]
    )
    def test_reshape(self, shape: tuple, result: tuple) -> None:
        graph, x = sg.Graph(), tensor(2, 3)
        assert graph.reshape(shape, x).shape == result
        assert run(graph, {"x": (x, SOURCE)}).tolist() == SOURCE.reshape(result).tolist()

    @pytest.mark.parametrize(
        ("source", "dimensions", "result"),
        [((2, 3), (0, 1), (2, 3)), ((2, 3), (1, 0), (3, 2)), ((2, 3, 4), (0, 2, 1), (2, 4, 3))],
    )
    def test_transpose(self, source: tuple, dimensions: tuple, result: tuple) -> None:
        graph, x = sg.Graph(), tensor(*source)
        values = np.arange(np.prod(source), dtype=np.float32).reshape(source)
        assert graph.transpose(dimensions, x).shape == result
        assert run(graph, {"x": (x, values)}).tolist() == values.transpose(dimensions).tolist()

    @pytest.mark.parametrize(
        ("source", "how", "dimension", "shapes"),
        [
            ((2, 3), {"split_count": 2}, 1, [(2, 2), (2, 1)]),
            ((2, 3), {"split_count": 3}, 0, [(1, 3), (1, 3)]),  # extent 2 runs out
            ((2, 3, 4), {"split_count": 2}, 1, [(2, 2, 4), (2, 1, 4)]),
            ((2, 3), {"split_section_lengths": [1, 2]}, 1, [(2, 1), (2, 2)]),
            ((2, 3), {"split_section_lengths": (1, 1, 1)}, 1, [(2, 1)] * 3),
        ],
    )
    def test_split(self, source: tuple, how: dict, dimension: int, shapes: list) -> None:
        graph, x = sg.Graph(), tensor(*source)
        parts = graph.split(x, **how, dimension=dimension)
        assert [part.shape for part in parts] == shapes
        assert graph.result_tensors(graph.layers[0]) == parts
        values = np.arange(np.prod(source), dtype=np.float32).reshape(source)
        graph.concatenate(parts[::-1], dimension)
        bounds = np.cumsum([shape[dimension] for shape in shapes])[:-1]
        expected = np.concatenate(np.split(values, bounds, dimension)[::-1], dimension)
        assert run(graph, {"x": (x, values)}).tolist() == expected.tolist()

    def test_select_gather_and_scatter(self) -> None:
        graph, x, y = sg.Graph(), tensor(2, 3), tensor(2, 3)
        mask, places = tensor(2, 3, kind="boolean"), tensor(2, kind="int64")
        chosen = graph.select([x, y], mask)
        picked = graph.gather(1, chosen, places)
        placed = graph.scatter(1, picked, places, x)
        graph.scatter(1, picked, places, placed, sg.ReductionType.SUM)
        assert (chosen.shape, picked.shape, placed.shape) == ((2, 3), (2, 2), (2, 3))
        where, at = SOURCE % 2 == 0, np.array([2, 0])
        selected = np.where(where, SOURCE, -SOURCE)
        expected = SOURCE.copy()
        expected[:, at] = selected[:, at]
        expected[:, at] += selected[:, at]
        given = {"x": (x, SOURCE), "y": (y, -SOURCE), "mask": (mask, where), "places": (places, at)}
        assert run(graph, given).tolist() == expected.tolist()

    @pytest.mark.parametrize(
        ("call", "error", "words"),
        [
            (lambda g: g.concatenate([tensor(2, 3), tensor(2, 3)], 3), sg.ShapeError, "dimension 3 .* 2 dimensions"),
            (lambda g: g.reshape((7,), tensor(2, 3)), sg.ShapeError, r"6 elements .*\[7\]"),
            (lambda g: g.reshape((), tensor(2, 3)), sg.ArgumentError, "0 dimensions"),
            (lambda g: g.transpose((0,), tensor(2, 3)), sg.ShapeError, "1 dimensions are listed, but the source has 2"),
            (lambda g: g.transpose((0, 2, 1), tensor(2, 3, 4, 5)), sg.ShapeError, "3 dimensions .* has 4"),
            (
                lambda g: g.split(tensor(2, 3), None, [1, 5], dimension=1),
                sg.ShapeError,
                "add up to 6, but dimension 1 has 3",
            ),
            (lambda g: g.split(tensor(2, 3), 2, dimension=2), sg.ShapeError, "dimension 2 .* 2 dimensions"),
            (lambda g: g.select([tensor(2), tensor(2)], tensor(2)), sg.DataTypeError, "float32, not boolean"),
        ],
    )
    def test_what_the_original_left_unchecked_is_refused(self, call: Any, error: type, words: str) -> None:
        graph = sg.Graph()
        with pytest.raises(error, match=words):
            call(graph)
        assert graph.layers == []


def picture() -> tuple[sg.TrainingGraph, sg.Tensor, sg.Tensor]:
    x, hidden, graph = tensor(4, 3, label='in "x"'), None, sg.Graph()
    dense = sg.FullyConnectedLayer.create(3, 1200, label="wide")
    hidden = graph.node(sg.ActivationLayer.relu(), graph.node(dense, x))
    first, second = graph.split(hidden, 2, dimension=1)
    shared = sg.FullyConnectedLayer.create(600, 2, label="shared")
    graph.node(sg.ArithmeticLayer.add(), graph.node(shared, first), graph.node(shared, second))
    graph.node(sg.ActivationLayer.relu(), graph.nodes[-1].results[0])
    return sg.TrainingGraph([graph]), x, hidden


class TestPictures:
    def test_dot_text_has_every_node_and_edge(self) -> None:
        training, _, _ = picture()
        text = training.summarized_dot_description
        assert re.fullmatch(r"digraph \w+ \{\n(  [^\n]+;\n)+\}\n", text)
        nodes = dict(re.findall(r'^  (\w+) \[label="((?:[^"\\]|\\.)*)"', text, re.M))
        edges = re.findall(r"^  (\w+) -> (\w+) \[style=(\w+)\];$", text, re.M)
        assert len(nodes) == len(training.nodes) + 1  # and the input
        assert len(edges) == sum(len(node.sources) for node in training.nodes) == 8
        assert {end for edge in edges for end in edge[:2]} == set(nodes)
        assert [sum(label.startswith(name) for label in nodes.values()) for name in ("wide", "shared")] == [1, 2]
        assert {style for _, _, style in edges} == {"solid"}

    def test_edges_without_a_gradient_are_dashed(self) -> None:
        training, _, hidden = picture()
        assert "dashed" not in training.summarized_dot_description
        training.stop_gradient([hidden])
        assert training.summarized_dot_description.count("dashed") == 1  # one layer reads it
        graph = sg.Graph()
        graph.gather(0, tensor(2, 3), tensor(2, kind="int32"))
        assert re.findall(r"style=(solid|dashed)\]", graph.summarized_dot_description) == ["solid", "dashed"]

    def test_the_table_shows_layers_shapes_and_parameters(self) -> None:
        training, _, _ = picture()
        text = str(training)
        assert "not compiled" in text
        for words in ("wide .*4×3 .*4×1200 .*4,800", "shared .*4×600 .*4×2 .*1,202", "shared .*4×600 .*4×2 .*shared"):
            assert re.search(words, text)
        assert re.search(r"Activation1 .*\n(.*\n)*.*Activation2 ", text)  # equal labels are numbered
        assert re.search(r"Split .*4×1200 .*4×600, 4×600", text)
        assert re.search(r"^7 nodes .*6,002$", text, re.M)  # a shared layer counts once

    def test_the_table_marks_frozen_layers_and_a_compiled_graph_its_device(self) -> None:
        graph, x = sg.Graph(), tensor(2, 3)
        graph.node(sg.FullyConnectedLayer.create(3, 2), x, disable_update=True)
        assert re.search(r"FullyConnected .*8 \(?frozen", str(graph))
        training = sg.TrainingGraph([graph])
        training.compile(CPU)
        assert re.search(r"TrainingGraph on cpu(.|\n)*parameters +32 B", str(training))
        assert repr(graph) == "<Graph with 1 nodes>"


class TestBinding:
    def test_bound_memory_is_read_at_each_pass(self) -> None:
        graph, x = sg.Graph(), tensor(2, 2, label="x")
        result = graph.node(sg.ActivationLayer.relu(), x)
        training, memory = sg.TrainingGraph([graph]), np.array([[-1, 2], [3, -4]], np.float32)
        training.compile(CPU)
        training.bind_and_write_data({"x": memory}, {"x": x, "unused": tensor(1)}, CPU)
        training.execute_forward()
        assert result.numpy().tolist() == [[0, 2], [3, 0]]
        memory[:] = 5
        training.execute_forward()
        assert result.numpy().tolist() == [[5, 5], [5, 5]]

    def test_a_plain_graph_binds_and_stays_without_device(self) -> None:
        graph, x = sg.Graph(), tensor(4, 2)
        graph.bind_and_write_data({}, {}, CPU)
        graph.bind_and_write_data({"x": np.ones((3, 2), np.float32)}, {"x": x}, CPU, batch_size=3, synchronous=False)
        assert (x.numpy().shape, graph.device) == ((3, 2), None)

    def test_nothing_is_bound_unless_everything_fits(self) -> None:
        graph, x, y = sg.Graph(), tensor(2, fill=1.0), tensor(3, label="y")
        with pytest.raises(sg.DataError, match=r"'y'.*8 bytes for 12 bytes"):
            graph.bind_and_write_data({"x": [2, 2], "y": [2, 2]}, {"x": x, "y": y}, CPU)
        with pytest.raises(sg.UnknownNameError, match=r"'z'.*\['x'\]"):
            graph.bind_and_write_data({"x": [2, 2], "z": [2, 2]}, {"x": x}, CPU)
        assert (x.data.tolist(), y.has_data) == ([1, 1], False)

    def test_nodes_added_after_compiling_join_at_the_next_compile(self) -> None:
        graph, x = sg.Graph(), tensor(1, 2, label="x")
        result = graph.node(sg.ActivationLayer.relu(), x)
        inference = sg.InferenceGraph([graph])
        inference.compile(CPU)
        graph.node(sg.ActivationLayer.linear(10.0, 1.0), result)
        assert inference.execute({"x": [-1, 2]}).result.numpy().tolist() == [[0, 2]]
        inference.compile()
        assert inference.execute({"x": [-1, 2]}).result.numpy().tolist() == [[1, 21]]


class Swish(sg.Layer):
    beta: float = 1.0

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return x * torch.sigmoid(self.beta * x)


class Scale(sg.Layer):
    factor: sg.Tensor
    center: sg.Tensor = sg.statistic()

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        center = scope.array(self.center)
        scope.update(self.center, center + 1)
        return (x - center) * scope.array(self.factor)


def test_layers_of_ten_lines_train_as_in_pytorch() -> None:
    generator = np.random.default_rng(2)
    data, goal = (generator.normal(size=(5, 3)).astype(np.float32) for _ in range(2))
    x, y, graph = tensor(5, 3), tensor(5, 3), sg.Graph()
    scale = Scale(tensor(3, fill=1.5, label="factor"), tensor(1, fill=0.0), label="scale")
    graph.node(Swish(2.0), graph.node(scale, x))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    factor = torch.full((3,), 1.5, requires_grad=True)
    for step in range(5):
        inner = (torch.from_numpy(data) - step) * factor
        loss = torch.nn.functional.mse_loss(inner * torch.sigmoid(2 * inner), torch.from_numpy(goal))
        (gradient,) = torch.autograd.grad(loss, factor)
        assert training.execute({"x": data}, {"y": goal}).loss == pytest.approx(loss.item(), rel=1e-5)
        factor = (factor - 0.1 * gradient).detach().requires_grad_()
        np.testing.assert_allclose(scale.factor.numpy(), factor.detach().numpy(), rtol=1e-5)
    assert scale.center.numpy().tolist() == [5]
    assert (list(scale.parameters), list(scale.statistics), scale.parameter_count) == (["factor"], ["center"], 3)
    assert (Swish().label, scale.label) == ("Swish", "scale")
