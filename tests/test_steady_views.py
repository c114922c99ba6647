"""Views of arrays that stay between calls: created once per binding, and again when a tensor gets other memory."""

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from stepgraph.compiler.kernels.update import PreparedUpdate
from stepgraph.compiler.operators import Count
from stepgraph.compiler.program import PartName, operators
from stepgraph.runtime import steady_views

DATA = {"x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)}
LABELS = {"y": np.array([0, 1, 1])}


def _training(scale: float = 1.0) -> tuple[sg.TrainingGraph, sg.Tensor]:
    x, y = sg.Tensor((3, 4)), sg.Tensor((3,), "int64")
    weights = sg.Tensor((2, 4), data=scale * np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4))
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer(weights, None, sg.ConvolutionDescriptor(1, 4, 2)), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu")
    return training, weights


def test_a_step_creates_no_views_of_what_stays() -> None:
    training, _ = _training()
    training.execute(DATA, LABELS)
    assert training.session is not None
    binding = training.session.bound(PartName.STEP, 3)
    assert binding.views is not None
    memory = {array.untyped_storage().data_ptr() for array in binding.arrays if array is not None}
    views = [one for one in binding.views if isinstance(one, torch.Tensor)]
    own = [array for array in views if array.untyped_storage().data_ptr() not in memory]
    assert len(own) < len(views)  # the transposed weights
    assert [array.item() for array in own] == [1]  # the gradient of the loss with respect to itself
    before = binding.views
    training.execute(DATA, LABELS)
    assert training.session.bound(PartName.STEP, 3).views is before


def test_updates_and_the_step_count_are_prepared_once() -> None:
    training, weights = _training()
    training.execute(DATA, LABELS)
    assert training.session is not None and training.optimizer is not None
    binding = training.session.bound(PartName.STEP, 3)
    prepared = [one for one in binding.views or () if not isinstance(one, torch.Tensor)]
    assert [type(one) for one in prepared] == [PreparedUpdate, Count]
    training.execute(DATA, LABELS)
    state = training.session.state
    assert state is not None and state.next_update == training.optimizer.time_step == 3
    before = np.array(weights.numpy())
    training.optimizer.learning_rate = 0.0  # what is prepared reads the numbers in every call
    training.execute(DATA, LABELS)
    np.testing.assert_array_equal(weights.numpy(), before)


def test_a_parameter_in_other_memory_gets_other_views() -> None:
    training, weights = _training()
    training.execute(DATA, LABELS)
    other, others = _training(scale=2.0)
    weights.bind_and_write_data(np.array(others.numpy()), sg.Device.cpu())
    assert training.execute(DATA, LABELS).loss == other.execute(DATA, LABELS).loss


def test_whole_steps_and_passes_agree_bit_for_bit() -> None:
    (whole, one), (passes, other) = _training(), _training()
    for _ in range(3):
        loss = whole.execute(DATA, LABELS).loss
        assert passes.execute_forward(DATA, LABELS).loss == loss
        passes.execute_gradient()
        passes.execute_optimizer_update()
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_only_views_of_the_chosen_inputs_move() -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        kept = a.t()[0]  # a view of a view
        return [kept * b.view(-1), a.add_(1).t()]

    given = torch.arange(6.0).reshape(2, 3), torch.ones(2, 1)
    traced = make_fx(step, tracing_mode="fake")(*(array.clone() for array in given))
    count = len(operators(traced.graph))
    expected = step(*(array.clone() for array in given))
    before = steady_views.move_out(traced.graph, [0])
    assert len(operators(traced.graph)) < count
    assert not any(node.args[0] is traced.graph.find_nodes(op="placeholder")[1] for node in operators(before))
    traced.recompile()
    create = torch.fx.GraphModule(torch.nn.Module(), before)
    arrays = [array.clone() for array in given]
    found = traced(*arrays, *create(*arrays))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_numbers_that_are_changed_or_returned_are_filled_in_every_call() -> None:
    def step(a: torch.Tensor) -> list[torch.Tensor]:
        changed, returned, steady = (torch.full((2,), 1.0, dtype=torch.float32, device="cpu") for _ in range(3))
        return [changed.add_(a), returned, a * steady]

    traced = make_fx(step, tracing_mode="fake")(torch.ones(2))
    before = steady_views.move_out(traced.graph, [])
    assert [
        len(graph.find_nodes(op="call_function", target=torch.ops.aten.full.default))
        for graph in (traced.graph, before)
    ] == [2, 1]


def test_prepared_updates_read_settings_that_change_and_change_back() -> None:
    training, weights = _training()
    assert training.optimizer is not None
    moved = []
    for rescale in (1.0, 0.0, 1.0, 1.0, 0.0):
        before = np.array(weights.numpy())
        training.optimizer.gradient_rescale = rescale
        training.optimizer.learning_rate = 0.1 * rescale  # Adam's momentum moves parameters without a gradient, too
        training.execute(DATA, LABELS)
        moved.append(bool((weights.numpy() != before).any()))
    assert moved == [True, False, True, True, False]


def test_numbers_that_an_operator_overwrites_are_filled_in_every_call() -> None:
    """The gradient of a hinge loss is written over the ones that it starts from."""

    def trained(in_phases: bool) -> np.ndarray:
        sg.set_seed(0)
        x, y, graph = sg.Tensor((4, 3)), sg.Tensor((4, 3)), sg.Graph()
        layer = sg.FullyConnectedLayer.create(3, 3, biases=False)
        graph.node(layer, x)
        loss = sg.LossLayer.hinge(sg.ReductionType.NONE)
        training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(0.1))
        training.add_inputs({"x": x}, {"y": y})
        training.compile("cpu")
        for data in np.random.default_rng(0).standard_normal((8, 2, 4, 3), np.float32):
            batch = {"x": data[0]}, {"y": (data[1] > 0).astype(np.float32)}
            if in_phases:
                training.execute_forward(*batch)
                training.execute_gradient()
                training.execute_optimizer_update()
            else:
                training.execute(*batch)
        return layer.weights.numpy().copy()

    np.testing.assert_array_equal(trained(in_phases=False), trained(in_phases=True))
