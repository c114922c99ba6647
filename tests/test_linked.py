"""Linked graphs: a parameter learns what it would in one graph, and stays as it is where it would there."""

from collections.abc import Callable

import numpy as np
import pytest

import stepgraph as sg

CPU = sg.Device.cpu()
NUMBERS = np.random.default_rng(7).standard_normal((2, 4, 3)).astype(np.float32)


class Linked:
    """Two layers in the first of two linked graphs, whose results the second one may read; weights decay."""

    def __init__(
        self,
        wire: Callable[[sg.Graph, list[sg.Tensor], list[sg.FullyConnectedLayer]], sg.Tensor],
        freezes: tuple[bool, bool] = (False, False),
    ) -> None:
        self.x, self.y, first, second = sg.Tensor((4, 3)), sg.Tensor((4, 3)), sg.Graph(), sg.Graph()
        self.layers = [sg.FullyConnectedLayer.create(3, 3) for _ in range(2)]
        self.middle = [
            first.node(one, self.x, disable_update=frozen) for one, frozen in zip(self.layers, freezes, strict=True)
        ]
        wire(second, self.middle, self.layers)
        decay = {"regularization_type": sg.RegularizationType.L2, "regularization_scale": 0.5}
        decaying = sg.SGDOptimizer(sg.OptimizerDescriptor(learning_rate=0.1, **decay))
        loss = sg.LossLayer.mean_squared_error()
        self.graphs = [sg.TrainingGraph([first], None, decaying), sg.TrainingGraph([second], loss, decaying)]
        read = {t for node in second.nodes for t in node.sources}
        self.graphs[1].add_inputs({f"m{i}": t for i, t in enumerate(self.middle) if t in read}, {"y": self.y})
        for graph in self.graphs:
            graph.compile(CPU, sg.GraphCompilationOptions.LINK_GRAPHS)
        self.graphs[0].link(self.graphs[1:])

    def moved(self) -> list[bool]:
        """Which of the two layers a step changes."""
        before = [layer.weights.data.copy() for layer in self.layers]
        self.graphs[0].bind_and_write_data({"x": NUMBERS[0]}, {"x": self.x}, CPU)
        self.graphs[1].bind_and_write_data({"y": NUMBERS[1]}, {"y": self.y}, CPU)
        for graph in self.graphs:
            graph.execute_forward()
        for graph in reversed(self.graphs):
            graph.execute_gradient()
        for graph in self.graphs:
            graph.execute_optimizer_update()
        after = (layer.weights.data for layer in self.layers)
        return [not np.array_equal(one, other) for one, other in zip(before, after, strict=True)]


def both(graph: sg.Graph, middle: list[sg.Tensor], layers: list[sg.FullyConnectedLayer]) -> sg.Tensor:
    return graph.node(sg.ArithmeticLayer.add(), *middle)


def second_unused(graph: sg.Graph, middle: list[sg.Tensor], layers: list[sg.FullyConnectedLayer]) -> sg.Tensor:
    graph.node(sg.ActivationLayer.tanh(), middle[1])
    return graph.node(sg.ActivationLayer.tanh(), middle[0])


def shared(graph: sg.Graph, middle: list[sg.Tensor], layers: list[sg.FullyConnectedLayer]) -> sg.Tensor:
    """The second layer learns from the second graph alone, where it is used once more."""
    twin = sg.FullyConnectedLayer(layers[1].weights, None, layers[1].descriptor)
    return graph.node(twin, graph.node(sg.ActivationLayer.tanh(), middle[0]))


@pytest.mark.parametrize(("wire", "expected"), [(both, [1, 1]), (second_unused, [1, 0]), (shared, [1, 1])])
def test_only_what_a_loss_depends_on_learns(wire: Callable[..., sg.Tensor], expected: list[bool]) -> None:
    assert Linked(wire).moved() == expected


def twice(graph: sg.Graph, middle: list[sg.Tensor], layers: list[sg.FullyConnectedLayer]) -> sg.Tensor:
    """Both graphs use the second layer, on the way to the loss."""
    return graph.node(layers[1], graph.node(sg.ArithmeticLayer.add(), *middle))


def test_the_second_graph_trains_what_the_first_one_freezes() -> None:
    """As in one graph, where a layer that is frozen shares a tensor with one that is not: the sum over all uses."""
    found = []
    for freezes in ((False, False), (False, True)):
        sg.set_seed(0)
        linked = Linked(twice, freezes)
        assert linked.moved() == [True, True]
        found.append([layer.weights.data.copy() for layer in linked.layers])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)


def test_gradients_that_stop_in_one_graph_stop_for_the_other() -> None:
    linked = Linked(both)
    assert linked.moved() == [True, True]
    linked.graphs[1].stop_gradient([linked.middle[0]])
    assert linked.moved() == [False, True]


def test_a_gradient_from_outside_reaches_the_other_graph() -> None:
    linked = Linked(second_unused)
    assert linked.moved() == [True, False]
    (unused,) = linked.graphs[1].nodes[0].results
    given = linked.graphs[1].allocate_user_gradient(unused)
    given.bind_and_write_data(NUMBERS[1], CPU)
    assert linked.moved() == [True, True]


def test_a_graph_that_is_compiled_again_tells_the_other() -> None:
    linked = Linked(both)
    linked.middle[0].bind_and_write_data(NUMBERS[0], CPU)
    linked.graphs[1].compile(CPU, sg.GraphCompilationOptions.LINK_GRAPHS, {"m0": linked.middle[0]})
    assert linked.moved() == [False, True]


def test_a_graph_without_anything_to_learn_takes_part() -> None:
    linked = Linked(both)
    linked.graphs[1].stop_gradient(linked.middle)
    assert linked.moved() == [False, False]


def attention_learns(linked: bool) -> list[np.ndarray]:
    """The parameters of attention after a step; its gradient comes from a recurrent layer, in one graph or another."""
    sg.set_seed(4)
    x, y, first = sg.Tensor((4, 5, 2)), sg.Tensor((4, 5, 3)), sg.Graph()
    middle = first.attention(x, 1)
    second = sg.Graph() if linked else first
    second.node(sg.GRULayer.create(2, 3), middle)
    loss = sg.LossLayer.mean_squared_error()
    if linked:
        graphs = [sg.TrainingGraph([first], None, sg.SGDOptimizer(0.1))]
        graphs.append(sg.TrainingGraph([second], loss, sg.SGDOptimizer(0.1)))
        graphs[0].add_inputs({"x": x})
        graphs[1].add_inputs({"middle": middle}, {"y": y})
    else:
        graphs = [sg.TrainingGraph([first], loss, sg.SGDOptimizer(0.1))]
        graphs[0].add_inputs({"x": x}, {"y": y})
    for graph in graphs:
        graph.compile(CPU, sg.GraphCompilationOptions.LINK_GRAPHS if linked else sg.GraphCompilationOptions.NONE)
    if linked:
        graphs[0].link(graphs[1:])
    numbers, wanted = (np.random.default_rng(3).standard_normal(one.shape).astype(np.float32) for one in (x, y))
    graphs[0].bind_and_write_data({"x": numbers}, {"x": x}, CPU)
    graphs[-1].bind_and_write_data({"y": wanted}, {"y": y}, CPU)
    for graph in graphs:
        graph.execute_forward()
    for graph in reversed(graphs):
        graph.execute_gradient()
    for graph in graphs:
        graph.execute_optimizer_update()
    return [one.data.copy() for one in graphs[0].layers[0].parameters.values()]


def test_a_gradient_in_another_order_in_memory_is_taken() -> None:
    for one, other in zip(attention_learns(linked=True), attention_learns(linked=False), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
