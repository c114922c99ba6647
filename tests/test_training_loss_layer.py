"""The loss layer given to a training graph is one of its layers: the last one, with sources, results and a drawing."""

from pathlib import Path

import numpy as np
import pytest

import stepgraph as sg
from tests.test_training_members import BATCH, CPU, Network, X, Y, dense, mse, sgd


def test_it_is_the_last_layer_with_the_prediction_as_source_and_the_loss_as_result() -> None:
    loss = mse(label="distance")
    network = Network(loss, sgd())
    training = network.training
    assert training.layers == [network.first, network.tanh, network.second, loss]
    assert training.source_tensors(loss) == [network.out]
    (result,) = training.result_tensors(loss)
    assert result.shape == (1,) and not result.has_data
    assert loss not in network.graph.layers and len(training.nodes) == 3
    network.compiled()
    assert training.result_tensors(loss) == [result] and training.layers[-1] is loss
    execution = training.execute({"x": X}, {"y": Y})
    assert np.array_equal(execution.result.numpy(), result.numpy())  # the call's own, and the graph's
    assert result.numpy().item() == execution.loss == pytest.approx(np.mean((network.out.numpy() - Y) ** 2), rel=1e-6)


def test_a_loss_without_reduction_is_read_there_phase_by_phase_and_with_fewer_rows() -> None:
    loss = mse(sg.ReductionType.NONE)
    network = Network(loss, sgd()).compiled()
    (result,) = network.training.result_tensors(loss)
    network.bind()
    network.training.execute_forward()
    np.testing.assert_allclose(result.numpy(), (network.out.numpy() - Y) ** 2, rtol=1e-6)
    network.training.execute({"x": X[:3]}, {"y": Y[:3]}, batch_size=3)
    assert result.numpy().shape == (3, 2)


def test_before_labels_are_declared_it_is_listed_and_has_no_results() -> None:
    network, loss = Network(), mse()
    training = sg.TrainingGraph([network.graph], loss)
    assert training.layers[-1] is loss and len(training.layers) == 4
    assert training.result_tensors(loss) == training.source_tensors(loss) == [] and loss.layer_id == 0
    assert "Loss" not in training.summarized_dot_description and "3 nodes" in str(training)
    training.add_inputs({"x": network.x}, {"y": network.y})
    assert len(training.result_tensors(loss)) == 1 and loss.layer_id == 4
    assert "4 nodes" in str(training)


def test_an_empty_graph_lists_no_loss() -> None:
    training = sg.TrainingGraph([], mse())
    assert training.layers == [] and "digraph" in training.summarized_dot_description


def test_labels_that_do_not_fit_are_told_by_compile_and_not_by_looking() -> None:
    network, loss = Network(), mse(label="distance")
    training = sg.TrainingGraph([network.graph], loss, sgd())
    training.add_inputs({"x": network.x}, {"y": sg.Tensor((BATCH, 7))})
    assert training.layers[-1] is loss and training.result_tensors(loss) == [] and "3 nodes" in str(training)
    with pytest.raises(sg.ShapeError, match="'distance'"):
        training.compile(CPU)


def test_nodes_added_later_move_the_prediction_and_keep_the_loss_tensor() -> None:
    loss = mse()
    network = Network(loss, sgd()).compiled()
    training = network.training
    (result,) = training.result_tensors(loss)
    extra = dense(2, 2, 30, "extra")
    last = training.node(extra, network.out)
    assert training.layers[-2:] == [extra, loss]
    assert training.source_tensors(loss) == [last] and training.result_tensors(loss) == [result]
    assert (extra.layer_id, loss.layer_id) == (4, 5)
    before = training.execute({"x": X}, {"y": Y})  # the compiled graph keeps what it compiled
    assert result.numpy().item() == before.loss == pytest.approx(np.mean((network.out.numpy() - Y) ** 2), rel=1e-6)
    network.compiled()
    after = training.execute({"x": X}, {"y": Y})
    assert result.numpy().item() == after.loss == pytest.approx(np.mean((last.numpy() - Y) ** 2), rel=1e-6)


def test_a_prediction_of_another_shape_gives_another_loss_tensor() -> None:
    loss = mse(sg.ReductionType.NONE)
    network, wide = Network(), sg.Tensor((BATCH, 3))
    training = sg.TrainingGraph([network.graph], loss)
    training.add_inputs({"x": network.x}, {"y": network.y})
    (narrow,) = training.result_tensors(loss)
    training.node(dense(2, 3, 30), network.out)
    assert training.result_tensors(loss) == []  # the labels no longer fit
    other = sg.TrainingGraph([network.graph], loss)
    other.node(dense(2, 3, 40), network.out)
    other.add_inputs({"x": network.x}, {"y": wide})
    (result,) = other.result_tensors(loss)
    assert result.shape == (BATCH, 3) and narrow.shape == (BATCH, 2)


def test_every_drawing_shows_it_once_before_and_after_compiling() -> None:
    network = Network(mse(label="distance"), sgd())
    drawn = []
    for _ in range(2):
        training = network.training
        dot = training.summarized_dot_description
        assert dot.count("distance") == 1 and "n2 -> n3 [style=solid]" in dot
        assert f"t{network.y.tensor_id} -> n3 [style=dashed]" in dot
        assert str(training).count("distance") == 1 and "distance" in training._repr_svg_()
        assert "distance" in training._repr_html_()
        drawn.append(dot)
        network.compiled()
    assert drawn[0] == drawn[1]


def test_a_layer_that_is_a_node_and_the_loss_is_listed_once_and_last() -> None:
    x, first, graph = sg.Tensor((2, 3)), sg.ActivationLayer.relu(), sg.Graph()
    hidden = graph.node(first, x)
    second = sg.ActivationLayer.tanh()
    graph.node(second, hidden)
    training = sg.TrainingGraph([graph], first)
    assert training.layers == [second, first] and first.layer_id == 1
    assert training.result_tensors(first)[0] is hidden and len(training.result_tensors(first)) == 2


def test_one_loss_layer_serves_several_training_graphs() -> None:
    loss, network = mse(), Network()
    losses = []
    for _ in range(2):
        training = sg.TrainingGraph([network.graph], loss)
        training.add_inputs({"x": network.x}, {"y": network.y})
        training.compile(CPU)
        (result,) = training.result_tensors(loss)
        losses.append((result, training.execute({"x": X}, {"y": Y}).loss))
    assert losses[0][0] is not losses[1][0] and losses[0][1] == losses[1][1]


def test_an_inference_graph_over_the_same_graphs_has_no_loss() -> None:
    loss = mse()
    network = Network(loss, sgd()).compiled()
    for adopted in (network.graph, network.training):
        inference = sg.InferenceGraph([adopted])
        assert loss not in inference.layers and inference.result_tensors(loss) == []
        inference.add_inputs({"x": network.x})
        inference.compile(CPU)
        assert inference.execute({"x": X}).result.shape == (BATCH, 2)


def test_the_loss_can_be_an_output_declared_before_compiling_and_survives_a_file(tmp_path: Path) -> None:
    loss = mse(label="distance")
    network = Network(loss, sgd())
    training = network.training
    training.add_outputs({"loss": training.result_tensors(loss)[0]})
    training.compile(CPU)
    written = np.zeros(1, np.float32)
    assert training.execute({"x": X}, {"y": Y}, outputs_data={"loss": written}).loss == written.item()
    training.save(tmp_path / "model")
    loaded = sg.load(tmp_path / "model", CPU)
    assert [layer.label for layer in loaded.layers] == ["first", "tanh", "second", "distance"]
    assert len(loaded.nodes) == 3 and str(loaded) == str(training)
    assert loaded.layers[-1].layer_id == loss.layer_id == 4
    again = np.zeros(1, np.float32)
    step, twin = training.execute({"x": X}, {"y": Y}), loaded.execute({"x": X}, {"y": Y}, outputs_data={"loss": again})
    assert again.item() == twin.loss == step.loss
    assert loaded.result_tensors(loaded.layers[-1])[0].numpy().item() == step.loss


def test_a_gradient_from_outside_may_be_asked_for_at_the_loss_before_compiling() -> None:
    loss = mse()
    network = Network(loss, sgd())
    (result,) = network.training.result_tensors(loss)
    handle = network.training.allocate_user_gradient(result)
    network.compiled()
    network.bind()
    network.training.execute_forward()
    network.training.execute_gradient()
    plain = [array.copy() for array in network.gradients()]
    network.training.bind_and_write_data({"g": np.ones(1, np.float32)}, {"g": handle}, CPU)
    network.training.execute_gradient()
    for one, other in zip(network.gradients(), plain, strict=True):
        np.testing.assert_allclose(one, 2 * other, rtol=1e-6)
