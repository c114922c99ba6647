"""Moving averages of the parameters: in the step, in checkpoints, for evaluation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from tests.optimizer_rules import Net

DECAY = 0.8


def averaging(net: Net, optimizer: sg.Optimizer | None = None, **settings: Any) -> sg.TrainingGraph:
    """The network with averages, compiled."""
    return net.graph(optimizer or sg.AdamOptimizer(0.05, clip_norm=1.0), average=DECAY, **settings)


def step(training: sg.TrainingGraph, net: Net, number: int) -> None:
    training.execute({"x": net.x[number]}, {"y": net.y[number]})


def expected_averages(training: sg.TrainingGraph, net: Net, count: int) -> list[np.ndarray]:
    """`A = d A + (1 - d) W` in float64, beside the training."""
    found = [tensor.numpy().astype(np.float64) for tensor in net.tensors]
    for number in range(count):
        step(training, net, number)
        found = [DECAY * a + (1 - DECAY) * t.numpy() for a, t in zip(found, net.tensors, strict=True)]
    return found


def assert_averages(training: sg.TrainingGraph, net: Net, expected: list[np.ndarray]) -> None:
    for tensor, wanted in zip(net.tensors, expected, strict=True):
        np.testing.assert_allclose(training.averages[tensor].numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "groups", "float16"])
def test_averages_follow_the_formula(kind: str) -> None:
    net = Net()
    optimizer: dict[str, sg.Optimizer] = {
        "groups": sg.AdamWOptimizer(0.05, weight_decay=0.1, groups=[sg.ParameterGroup("*.biases", frozen=True)]),
    }
    settings = {"compute_type": "float16"} if kind == "float16" else {}
    training = averaging(net, optimizer.get(kind), **settings)
    if kind == "float16":
        training.loss_scale = 8.0  # no update is skipped
    assert_averages(training, net, expected_averages(training, net, 6))
    assert "averages the parameters" in str(training)
    slots = len(training.optimizer.slots) + 1
    assert training.memory_plan.optimizer_state == slots * sum(w.nbytes for w in net.start)


def test_a_skipped_update_moves_no_average() -> None:
    net = Net()
    training = averaging(net, compute_type="float16")
    step(training, net, 0)
    before = {tensor: array.clone() for tensor, array in training.averages.items()}
    training.execute({"x": np.full((6, 3), 1e30, np.float32)}, {"y": net.y[0]})
    assert all(torch.equal(training.averages[tensor], array) for tensor, array in before.items())


def test_phases_accumulate_into_the_same_average() -> None:
    net = Net()
    training = averaging(net)
    expected = [w.astype(np.float64) for w in net.start]
    for number in range(3):
        names = {"x": net.inputs, "y": net.labels}
        training.bind_and_write_data({"x": net.x[number], "y": net.y[number]}, names, sg.Device.cpu())
        training.execute_forward()
        training.execute_gradient()
        training.execute_optimizer_update()
        expected = [DECAY * a + (1 - DECAY) * t.numpy() for a, t in zip(expected, net.tensors, strict=True)]
    assert_averages(training, net, expected)


def test_inside_the_block_the_averages_are_used_and_afterwards_not() -> None:
    net = Net()
    training = averaging(net)
    for number in range(4):
        step(training, net, number)
    weights, averages = [t.numpy().copy() for t in net.tensors], training.averages
    inference = sg.InferenceGraph([net.wired])
    inference.add_inputs({"x": net.inputs})
    inference.compile(sg.Device.cpu())
    with training.averaged():
        assert all((t.numpy() == averages[t].numpy()).all() for t in net.tensors)
        assert all(torch.equal(training.averages[t], averages[t]) for t in net.tensors)
        found = inference.execute({"x": net.x[0]}).result
        evaluated = training.execute(
            {"x": net.x[0]}, {"y": net.y[0]}, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE
        )
        for refused in (lambda: step(training, net, 4), lambda: training.save("never"), training.averaged().__enter__):
            with pytest.raises(sg.StateError, match="averages"):
                refused()
    a = [averages[t].numpy().astype(np.float64) for t in net.tensors]
    wanted = np.tanh(net.x[0] @ a[0].T + a[1]) @ a[2].T + a[3]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert evaluated.loss == pytest.approx(((wanted - net.y[0]) ** 2).mean(), rel=1e-4)
    assert all((t.numpy() == w).all() for t, w in zip(net.tensors, weights, strict=True))
    step(training, net, 4)


def test_saved_restored_and_loaded(tmp_path: Path) -> None:
    net, again = Net(), Net()
    training = averaging(net)
    for number in range(3):
        step(training, net, number)
    training.save(tmp_path)
    other = averaging(again)
    report = other.restore(tmp_path)
    assert report.is_complete and not report.changed
    loaded = sg.load(tmp_path, sg.Device.cpu())
    assert loaded.average == DECAY
    for graph in (training, other, loaded):
        for number in range(3, 5):
            graph.execute({"x": net.x[number]}, {"y": net.y[number]})
    kept = [array.numpy() for array in training.averages.values()]
    for graph in (other, loaded):
        found = [array.numpy() for array in graph.averages.values()]
        assert all((a == b).all() for a, b in zip(found, kept, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_averages_come_with_restored_parameters(compiled: bool, tmp_path: Path) -> None:
    """Where only parameters are restored; the optimizer and the step count stay as they are."""
    net = Net()
    training = averaging(net)
    for number in range(3):
        step(training, net, number)
    training.save(tmp_path)
    wanted = [array.numpy().copy() for array in training.averages.values()]
    if compiled:
        for number in range(3, 6):
            step(training, net, number)
        training.restore(tmp_path, only_parameters=True)
        assert training.optimizer.time_step == 7
    else:
        net = Net(seed=5)
        averaging(net)
        loss, optimizer = sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(0.05)
        training = sg.TrainingGraph([net.wired], loss, optimizer, average=DECAY)
        training.add_inputs({"x": net.inputs}, {"y": net.labels})
        training.restore(tmp_path, only_parameters=True)
        training.compile("cpu")
        assert training.optimizer.time_step == 1
    assert_averages(training, net, wanted)
    before = [array.numpy().copy() for array in training.averages.values()]
    step(training, net, 7)
    moved = [DECAY * a + (1 - DECAY) * t.numpy() for a, t in zip(before, net.tensors, strict=True)]
    assert_averages(training, net, moved)


def test_averages_start_from_parameters_that_come_without(tmp_path: Path) -> None:
    plain, net = Net(seed=9), Net()
    plain.graph(sg.SGDOptimizer(0.1)).save(tmp_path)
    training = averaging(net)
    for number in range(3):
        step(training, net, number)
    training.restore(tmp_path, only_parameters=True)
    assert_averages(training, net, [tensor.numpy() for tensor in plain.tensors])
    assert_averages(training, net, expected_averages(training, net, 2))


def test_averages_start_from_what_is_restored(tmp_path: Path) -> None:
    net, again = Net(), Net(seed=9)
    plain = net.graph(sg.AdamOptimizer(0.05))
    step(plain, net, 0)
    plain.save(tmp_path)
    training = averaging(again, sg.AdamOptimizer(0.05))
    report = training.restore(tmp_path)
    assert report.changed == ("average is 0.8, was None",)
    assert_averages(training, again, [tensor.numpy() for tensor in net.tensors])
    assert_averages(training, again, expected_averages(training, again, 2))


def test_the_decay_is_live() -> None:
    net = Net()
    training = averaging(net)
    step(training, net, 0)
    training.average = 0.0
    step(training, net, 1)
    assert_averages(training, net, [tensor.numpy() for tensor in net.tensors])
    assert training.average == 0.0


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan"), 2, "0.9"])
def test_bad_decays_are_refused(decay: Any) -> None:
    with pytest.raises(sg.StepgraphError, match="average is"):
        sg.TrainingGraph([], None, None, average=decay)


def test_without_averages_there_are_none() -> None:
    training = Net().graph(sg.SGDOptimizer(0.1))
    for call in (lambda: training.averages, lambda: training.averaged().__enter__()):
        with pytest.raises(sg.StateError, match=r"average=0\.999"):
            call()
    with pytest.raises(sg.StateError, match=r"average=0\.999"):
        training.average = 0.9
    with pytest.raises(sg.StateError, match="not compiled"):
        _ = sg.TrainingGraph([], None, None, average=0.9).averages


def predicted(training: sg.TrainingGraph, net: Net) -> np.ndarray:
    """The prediction with the averages, in float64."""
    a = [training.averages[tensor].cpu().numpy().astype(np.float64) for tensor in net.tensors]
    return np.tanh(net.x[0] @ a[0].T + a[1]) @ a[2].T + a[3]


def test_an_inference_graph_follows_the_averages(tmp_path: Path) -> None:
    net = Net()
    training = averaging(net)
    inference, current = training.inference(weights="average"), training.inference()

    def check(apart: bool = True) -> None:
        found = inference.execute({"x": net.x[0]}).result.numpy()
        np.testing.assert_allclose(found, predicted(training, net), rtol=1e-4, atol=1e-5)
        assert np.allclose(found, current.execute({"x": net.x[0]}).result.numpy(), atol=1e-4) != apart

    check(apart=False)
    for number in range(2):
        step(training, net, number)
        check()
    training.save(tmp_path)
    step(training, net, 2)
    training.restore(tmp_path)  # the averages are other arrays now
    check()
    training.compile(sg.Device.cpu(), deterministic=True)
    step(training, net, 3)
    check()
    with training.averaged():
        check(apart=False)
    check()
    inference.save(tmp_path / "averaged")
    loaded = sg.load(tmp_path / "averaged", sg.Device.cpu())
    np.testing.assert_allclose(loaded.execute({"x": net.x[0]}).result.numpy(), predicted(training, net), rtol=1e-4)


def test_frozen_and_shared_layers_in_an_inference_graph_of_averages() -> None:
    x, y, graph = sg.Tensor((sg.BATCH, 4)), sg.Tensor((sg.BATCH, 4)), sg.Graph()
    shared = sg.FullyConnectedLayer.create(4, 4)
    fixed = sg.FullyConnectedLayer.create(4, 4)
    hidden = graph.node(sg.ActivationLayer.tanh(), graph.node(shared, x))
    graph.node(shared, graph.node(fixed, hidden, disable_update=True))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.5), average=0.5)
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu")
    rows = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    training.execute({"x": rows}, {"y": rows})
    inference = training.inference(weights="average")
    with training.averaged():
        wanted = training.inference().execute({"x": rows}).result.numpy()
    assert (inference.execute({"x": rows}).result.numpy() == wanted).all()
    assert len({t for layer in inference.layers for t in layer.parameters.values()}) == 4


def test_an_inference_graph_of_averages_with_a_module_of_pytorch() -> None:
    x, y, graph = sg.Tensor((3, 4)), sg.Tensor((3, 2)), sg.Graph()
    graph.node(sg.TorchLayer(torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.5), average=0.5)
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu")
    rows = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    training.execute({"x": rows}, {"y": rows[:, :2]})
    found = training.inference(weights="average").execute({"x": rows}).result.numpy()
    with training.averaged():
        assert (found == training.inference().execute({"x": rows}).result.numpy()).all()
    assert (found != training.inference().execute({"x": rows}).result.numpy()).any()


def test_an_inference_graph_of_averages_needs_them() -> None:
    training = Net().graph(sg.SGDOptimizer(0.1))
    with pytest.raises(sg.StateError, match=r"average=0\.999"):
        training.inference(weights="average")
    with pytest.raises(sg.ArgumentError, match="'best'"):
        training.inference(weights="best")


@pytest.mark.gpu
def test_an_inference_graph_follows_the_averages_on_cuda() -> None:
    net = Net()
    training = averaging(net)
    training.compile("cuda")
    inference = training.inference(weights="average")
    for number in range(4):
        step(training, net, number)
        found = inference.execute({"x": net.x[0]}).result.numpy()
        np.testing.assert_allclose(found, predicted(training, net), rtol=1e-3, atol=1e-4)


def rows(net: Net, count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(net.x[:count]), np.concatenate(net.y[:count])


def test_the_learning_rate_finder_leaves_the_averages_as_they_were() -> None:
    net = Net()
    training = averaging(net)
    sg.find_learning_rate(training, rows(net, 3), steps=5)
    for tensor in net.tensors:
        tensor.torch().mul_(2)  # before the first update, averages follow the parameters
    expected = expected_averages(training, net, 3)
    sg.find_learning_rate(training, rows(net, 3), steps=5)
    assert_averages(training, net, expected)


@pytest.mark.parametrize("resumed", [False, True])
def test_the_averages_of_the_best_epoch_are_restored(tmp_path: Path, resumed: bool) -> None:
    scores = iter([0.1, 0.9, 0.3, 0.4])
    kept: dict[str, Any] = {"metrics": {"score": lambda prediction, labels: next(scores)}, "watch": "score"}
    kept |= {"restore_best": True, "checkpoints": tmp_path, "resume": True, "shuffle": False, "progress": "quiet"}
    net, best = Net(), Net()
    if resumed:
        sg.fit(averaging(Net()), rows(net, 1), epochs=3, **kept)
    training, wanted = averaging(net), averaging(best)
    assert sg.fit(training, rows(net, 1), epochs=4, **kept).best_epoch == 2
    sg.fit(wanted, rows(best, 1), epochs=2, shuffle=False, progress="quiet")
    assert_averages(training, net, [wanted.averages[tensor].numpy() for tensor in best.tensors])
