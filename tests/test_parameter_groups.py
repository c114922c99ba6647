"""Parameter groups against PyTorch's, and in every way a step can run."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.optimizers import assigned
from tests.optimizer_rules import BATCH, GLOBAL, NORM, STEPS, Net

NAMES = ("FullyConnected1.weights", "FullyConnected1.biases", "FullyConnected2.weights", "FullyConnected2.biases")


def groups_of_four() -> list[sg.ParameterGroup]:
    """One parameter by pattern, one by function, one frozen; the last has the optimizer's own numbers."""
    return [
        sg.ParameterGroup("FullyConnected1.weights", learning_rate_factor=0.1, weight_decay=0.3),
        sg.ParameterGroup(lambda name, tensor: name.endswith("2.biases"), clipping=False, weight_decay=0.0),
        sg.ParameterGroup("*.biases", frozen=True),
    ]


def in_torch(net: Net, make: Callable[..., torch.optim.Optimizer], most: float, clip: str) -> list[np.ndarray]:
    """The same with `torch.optim`'s groups: the second is not clipped, the third not updated."""
    weights = [torch.from_numpy(w.copy()).requires_grad_() for w in net.start]
    own = [{"params": [weights[0]], "factor": 0.1, "weight_decay": 0.3}, {"params": [weights[3]], "weight_decay": 0.0}]
    optimizer = make([*own, {"params": [weights[2]]}])
    for group in optimizer.param_groups:
        group["lr"] *= group.get("factor", 1.0)
    for x, y in zip(torch.from_numpy(net.x), torch.from_numpy(net.y), strict=True):
        hidden = torch.tanh(torch.nn.functional.linear(x, weights[0], weights[1]))
        loss = torch.nn.functional.mse_loss(torch.nn.functional.linear(hidden, weights[2], weights[3]), y)
        optimizer.zero_grad()
        loss.backward()
        clipped = [weights[0], weights[2]]
        if clip == "value":
            torch.nn.utils.clip_grad_value_(clipped, most)
        else:
            for some in [clipped] if clip == "global" else [[one] for one in clipped]:
                torch.nn.utils.clip_grad_norm_(some, most)
        optimizer.step()
    return [w.detach().numpy() for w in weights]


CLIPS: dict[str, dict[str, Any]] = {
    "global": {"clip_norm": 0.3},
    "value": {"clip_value": 0.05},
    "each": {"learning_rate": sg.OptimizerDescriptor(0.05, gradient_clipping_type=NORM, maximum_clipping_norm=0.1,
                                                     regularization_type=sg.RegularizationType.L2,
                                                     regularization_scale=0.1)},
}  # fmt: skip
PAIRS: dict[str, tuple[Any, Any]] = {
    "sgd": (sg.SGDOptimizer, torch.optim.SGD),
    "nesterov": (
        lambda *a, **k: sg.SGDOptimizer(*a, momentum=0.9, nesterov=True, **k),
        lambda p, **k: torch.optim.SGD(p, momentum=0.9, nesterov=True, **k),
    ),
    "adam": (lambda *a, **k: sg.AdamOptimizer(*a, formula="torch", **k), torch.optim.Adam),
    "adamw": (lambda *a, **k: sg.AdamWOptimizer(*a, formula="torch", **k), torch.optim.AdamW),
    "rmsprop": (
        lambda *a, **k: sg.RMSPropOptimizer(*a, momentum=0.5, formula="torch", epsilon=1e-2, **k),
        lambda p, **k: torch.optim.RMSprop(p, momentum=0.5, eps=1e-2, **k),
    ),
}


def made(rule: str, clip: str, groups: Any) -> sg.Optimizer:
    settings = dict(CLIPS[clip])
    if "learning_rate" not in settings:
        settings |= {"learning_rate": 0.05, "weight_decay": 0.1}
    return PAIRS[rule][0](groups=groups, **settings)


TRIED: list[Any] = [("sgd", "global"), ("nesterov", "value"), ("adamw", "global")]
MORE = [("sgd", "value"), ("sgd", "each"), ("adam", "global"), ("rmsprop", "global")]
TRIED += [pytest.param(*pair, marks=pytest.mark.deep) for pair in MORE]


@pytest.mark.parametrize(("rule", "clip"), TRIED)
def test_thirty_steps_equal_pytorchs_groups(rule: str, clip: str) -> None:
    net = Net()
    most = next(value for name, value in CLIPS[clip].items() if name != "learning_rate") if clip != "each" else 0.1
    theirs = in_torch(net, lambda p: PAIRS[rule][1](p, lr=0.05, weight_decay=0.1), most, clip)
    _, ours = net.stepgraph(made(rule, clip, groups_of_four()))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    assert (ours[1] == net.start[1]).all()


def run(training: sg.TrainingGraph, net: Net, steps: range, change: Callable[[int], None] = lambda step: None) -> None:
    for step in steps:
        change(step)
        training.execute({"x": net.x[step]}, {"y": net.y[step]})


def values(net: Net) -> list[np.ndarray]:
    return [tensor.numpy().copy() for tensor in net.tensors]


def assert_equal(found: list[np.ndarray], expected: list[np.ndarray], relative: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=relative, atol=relative)


def test_everything_is_live_and_nothing_recompiles() -> None:
    net, group = Net(), sg.ParameterGroup(["*1.*", "*2.biases"])
    optimizer = sg.AdamWOptimizer(0.05, weight_decay=0.1, clip_norm=0.2, groups=[group])
    training = net.graph(optimizer)
    before = training.executables
    plain = Net()
    other = plain.graph(sg.AdamWOptimizer(0.05, weight_decay=0.1, clip_norm=0.2))
    run(training, net, range(3))
    run(other, plain, range(3))
    assert_equal(values(net), values(plain), 1e-6)  # a group without settings changes nothing
    group.frozen = True
    now = values(net)
    state = [[bytes(data.bytes) for data in tensor.optimizer_data] for tensor in net.tensors]
    run(training, net, range(3, 6))
    same = [bool((a == b).all()) for a, b in zip(values(net), now, strict=True)]
    assert same == [True, True, False, True]
    kept = [
        [bytes(d.bytes) for d in tensor.optimizer_data] == was for tensor, was in zip(net.tensors, state, strict=True)
    ]
    assert kept == [True, True, False, True]
    group.frozen, group.learning_rate_factor = False, 0.0
    run(training, net, range(6, 8))
    assert (values(net)[0] == now[0]).all()
    group.learning_rate_factor, group.weight_decay, group.clipping = 1.0, 10.0, False
    run(training, net, range(8, 9))
    assert np.abs(values(net)[0]).mean() < 0.8 * np.abs(now[0]).mean()
    assert training.executables == before
    assert training.optimizer is optimizer and optimizer.time_step == 10


def test_without_groups_the_program_is_what_it_was() -> None:
    codes = []
    for groups in ((), [sg.ParameterGroup("*.biases")]):
        training = Net().graph(sg.SGDOptimizer(0.1, momentum=0.9, clip_norm=1.0, groups=groups))
        programs = training.require_session("test").compilation.programs
        codes.append([str(node.target) for node in programs.program(BATCH).nodes])
    assert len(codes[0]) < len(codes[1])
    assert sum("update_" in name for name in codes[0]) == 1


WAYS = [
    *("accumulated", "one operator"),
    *(pytest.param(way, marks=pytest.mark.deep) for way in ("phases", "memory limit", "checked", "fused")),
]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_a_step_gives_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, net = Net(), Net()
    optimizer = made("adamw", "global", groups_of_four())
    run(expected.graph(made("adamw", "global", groups_of_four())), expected, range(6))
    if way == "one operator":
        import sys

        from stepgraph.compiler.kernels.update import update

        monkeypatch.setattr(sys.modules[update.__module__], "AS_ONE", {"cpu"})
        monkeypatch.setattr(sys.modules[update.__module__], "FUSED", {})
    training = net.graph(optimizer)
    settings: dict[str, Any] = {
        "memory limit": {"memory_limit": training.memory_plan.total},
        "fused": {"options": sg.GraphCompilationOptions.FUSE_LAYERS},
        "checked": {"options": sg.GraphCompilationOptions.CHECK_NUMERICS},
    }.get(way, {})
    if settings:
        training.compile(sg.Device.cpu(), **settings)
    for step in range(6):
        if way not in ("phases", "accumulated"):
            training.execute({"x": net.x[step]}, {"y": net.y[step]})
            continue
        names = {"x": net.inputs, "y": net.labels}
        training.bind_and_write_data({"x": net.x[step], "y": net.y[step]}, names, sg.Device.cpu())
        for part in range(2 if way == "accumulated" else 1):
            training.execute_forward()
            adding = sg.ExecutionOptions.ACCUMULATE_GRADIENTS if part else sg.ExecutionOptions.NONE
            training.execute_gradient(options=adding)
        if way == "accumulated":
            for key, array in training.gradients.found.items():
                training.gradients.found[key] = array / 2
        training.execute_optimizer_update()
    assert_equal(values(net), values(expected), 2e-6)


def test_with_a_scaled_loss_a_frozen_group_cannot_stop_the_others() -> None:
    net = Net()
    optimizer = sg.SGDOptimizer(0.05, clip_norm=1.0, groups=[sg.ParameterGroup("*1.*", frozen=True)])
    training = net.graph(optimizer)
    training.compile(sg.Device.cpu(), compute_type="float16")
    run(training, net, range(4))
    moved = [bool((tensor.numpy() != start).any()) for tensor, start in zip(net.tensors, net.start, strict=True)]
    assert moved == [False, False, True, True]
    assert optimizer.time_step == 5


def test_saved_restored_and_loaded(tmp_path: Path) -> None:
    net = Net()
    optimizer = made("adamw", "global", groups_of_four())
    training = net.graph(optimizer)
    run(training, net, range(5))
    optimizer.groups[0].learning_rate_factor = 0.5
    optimizer.groups[2].frozen = False
    training.save(tmp_path)
    again = Net()
    other = again.graph(made("adamw", "global", groups_of_four()))
    report = other.restore(tmp_path)
    assert report.is_complete and not report.changed
    assert [group.settings for group in other.optimizer.groups] == [group.settings for group in optimizer.groups]
    loaded = sg.load(tmp_path, sg.Device.cpu())
    assert [group.settings for group in loaded.optimizer.groups] == [group.settings for group in optimizer.groups]
    assert [bool(group.parameters) for group in loaded.optimizer.groups] == [True] * 3
    run(training, net, range(5, 9))
    run(other, again, range(5, 9))
    for step in range(5, 9):
        loaded.execute({"x": net.x[step]}, {"y": net.y[step]})
    assert_equal(values(again), values(net))
    layers = [layer for layer in loaded.layers if layer.parameters]
    found = [tensor.numpy() for layer in layers for tensor in layer.parameters.values()]
    assert_equal(sorted(found, key=np.sum), sorted(values(net), key=np.sum))


def test_other_groups_than_in_the_checkpoint_are_reported(tmp_path: Path) -> None:
    Net().graph(sg.SGDOptimizer(0.1, groups=[sg.ParameterGroup("*.biases", weight_decay=0.5)])).save(tmp_path)
    mine = sg.ParameterGroup("*.weights", weight_decay=0.25)
    training = Net().graph(sg.SGDOptimizer(0.1, groups=[mine]))
    report = training.restore(tmp_path)
    assert any("parameter groups" in line for line in report.changed)
    assert mine.weight_decay == 0.25


def test_shown_by_print_repr_and_report() -> None:
    from stepgraph.report.facts import settings

    optimizer = sg.AdamWOptimizer(0.1, weight_decay=0.2, groups=groups_of_four())
    text = str(Net().graph(optimizer))
    assert "group FullyConnected1.weights: 1 parameter, learning rate × 0.1, weight decay 0.3" in text
    assert "group *.biases: 1 parameter, frozen" in text
    assert "ParameterGroup('*.biases', frozen=True)" in repr(optimizer)
    assert "*.biases: frozen" in settings({"optimizer": optimizer})["optimizer"]


@pytest.mark.gpu
def test_groups_and_averages_are_the_same_on_cuda() -> None:
    found = []
    for device in (sg.Device.cpu(), sg.Device.gpu()):
        net = Net()
        training = net.graph(made("adamw", "global", groups_of_four()), average=0.9)
        training.compile(device)
        run(training, net, range(STEPS))  # captured after the second step
        training.synchronize_updates()
        found.append([*values(net), *(array.cpu().numpy() for array in training.averages.values())])
    assert_equal(*found, 2e-5)


# Which parameters a group has


def layers_graph(groups: Any, label: str = "") -> sg.TrainingGraph:
    x, graph = sg.Tensor((4, 3, 2, 2)), sg.Graph()
    y = graph.node(sg.ConvolutionLayer.create(3, 4, 3), x)
    y = graph.node(sg.BatchNormalizationLayer.create(4, label=label), y)
    y = graph.node(sg.ReshapeLayer((4, 16)), y)
    y = graph.node(sg.LayerNormalizationLayer.create(16), y)
    graph.node(sg.FullyConnectedLayer.create(16, 2), y)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1, groups=groups))
    training.add_inputs({"x": x}, {"y": sg.Tensor((4, 2))})
    return training


def members(training: sg.TrainingGraph, group: int = 1) -> set[str]:
    names = training.declaration.parameter_names
    assert training.optimizer is not None
    found = assigned(training.optimizer.groups, names)
    return {names[tensor][0] for tensor in found if found[tensor] == group}


@pytest.mark.parametrize(
    ("selectors", "label", "expected"),
    [
        ("*.biases", "", {"Convolution.biases", "FullyConnected.biases"}),
        ("*Normalization*.*", "", {"BatchNorm.beta", "BatchNorm.gamma", "LayerNorm.beta", "LayerNorm.gamma"}),
        ("BatchNormalization.*", "first", {"first.beta", "first.gamma"}),
        ("first.gamma", "first", {"first.gamma"}),
        (["*.beta", "Conv*.weights"], "", {"BatchNorm.beta", "LayerNorm.beta", "Convolution.weights"}),
        (lambda name, tensor: tensor.shape == (16,), "", {"LayerNorm.beta", "LayerNorm.gamma"}),
        (lambda name, tensor: False, "", set()),
    ],
)
def test_what_selectors_select(selectors: Any, label: str, expected: set[str]) -> None:
    assert members(layers_graph([sg.ParameterGroup(selectors)], label)) == expected


def test_decay_for_matrices_only() -> None:
    found = members(layers_graph(sg.DECAY_MATRICES_ONLY))
    assert found == {"Convolution.biases", "FullyConnected.biases", "BatchNorm.beta", "BatchNorm.gamma",
                     "LayerNorm.beta", "LayerNorm.gamma"}  # fmt: skip
    optimizer = sg.AdamWOptimizer(0.1, weight_decay=0.5, groups=sg.DECAY_MATRICES_ONLY)
    optimizer.groups[0].weight_decay = 0.1  # its own copy
    assert sg.DECAY_MATRICES_ONLY[0].weight_decay == 0
    with pytest.raises(sg.StateError, match="DECAY_MATRICES_ONLY"):
        sg.DECAY_MATRICES_ONLY[0].weight_decay = 0.1
    table = sg.EmbeddingLayer.create(5, 4).parameters["weights"]
    assert not sg.DECAY_MATRICES_ONLY[0].selects(table, ["Embedding.weights"])
    assert sg.DECAY_MATRICES_ONLY[0].selects(sg.Tensor((4, 4)), ["LayerNorm.gamma"])


def test_the_first_group_has_it_and_tied_weights_have_every_name() -> None:
    tied = sg.Tensor((3, 3), fill=0.5)
    x, graph = sg.Tensor((2, 3)), sg.Graph()
    inner = graph.node(sg.FullyConnectedLayer(tied, None, sg.ConvolutionDescriptor(1, 3, 3), label="inner"), x)
    graph.node(sg.FullyConnectedLayer(tied, None, sg.ConvolutionDescriptor(1, 3, 3), label="outer"), inner)
    groups = [sg.ParameterGroup("outer.*", frozen=True), sg.ParameterGroup("inner.*"), sg.ParameterGroup(tied)]
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1, groups=groups))
    training.add_inputs({"x": x}, {"y": sg.Tensor((2, 3))})
    training.compile(sg.Device.cpu())
    training.execute({"x": [1.0] * 6}, {"y": [0.0] * 6})
    assert (tied.numpy() == 0.5).all()


def test_trained_inputs_have_names_too() -> None:
    x, y = sg.Tensor((1, 2), data=np.ones((1, 2), np.float32), label="picture"), sg.Tensor((1, 2))
    graph = sg.Graph()
    graph.node(sg.ActivationLayer.linear(3.0, 0.0), x)
    group = sg.ParameterGroup("input.picture", learning_rate_factor=2.0)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1, groups=[group]))
    training.add_inputs({}, {"y": y})
    training.set_training_tensor_parameters([sg.TensorParameter(x)])
    training.compile(sg.Device.cpu())
    training.execute({}, {"y": [0.0, 0.0]})
    np.testing.assert_allclose(x.numpy(), 1 - 0.2 * 9, rtol=1e-6)


def test_linked_graphs_share_an_optimizer_and_its_groups() -> None:
    group = sg.ParameterGroup("second.*", frozen=True)
    optimizer = sg.SGDOptimizer(0.1, groups=[group])
    x, y = sg.Tensor((2, 3)), sg.Tensor((2, 3))
    first, second = sg.Graph(), sg.Graph()
    layers = [sg.FullyConnectedLayer.create(3, 3, label=label) for label in ("first", "second")]
    middle = first.node(layers[0], x)
    one = sg.TrainingGraph([first], None, optimizer)
    one.add_inputs({"x": x})
    second.node(layers[1], middle)
    two = sg.TrainingGraph([second], sg.LossLayer.mean_squared_error(), optimizer)
    two.add_inputs({"m": middle}, {"y": y})
    for training in (one, two):
        training.compile(sg.Device.cpu(), sg.GraphCompilationOptions.LINK_GRAPHS)
    one.link([two])
    before = [layer.parameters["weights"].numpy().copy() for layer in layers]
    for training, data in ((one, {"x": np.ones((2, 3), np.float32)}), (two, {"y": np.ones((2, 3), np.float32)})):
        names = {name: {"x": x, "y": y}[name] for name in data}
        training.bind_and_write_data(data, names, sg.Device.cpu())
        training.execute_forward()
    two.execute_gradient()
    one.execute_gradient()
    for training in (one, two):
        training.execute_optimizer_update()
    moved = [bool((layer.parameters["weights"].numpy() != b).any()) for layer, b in zip(layers, before, strict=True)]
    assert moved == [True, False]


# Mistakes


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("*.bias", r"(?s)group \*\.bias of the optimizer.*known.*Convolution\.biases.*did you mean \"\*\.biases\""),
        ("Convolutoin.weights", r"(?s)did you mean \"Convolution\.weights\""),
        (sg.Tensor((2, 2), label="stray"), r"(?s)'stray'.*matches no parameter"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_at_compile(pattern: Any, words: str) -> None:
    training = layers_graph([sg.ParameterGroup(pattern)])
    with pytest.raises(sg.UnknownNameError, match=words):
        training.compile(sg.Device.cpu())
    assert training.session is None


def test_a_new_optimizer_is_checked_as_well() -> None:
    net = Net()
    training = net.graph(sg.SGDOptimizer(0.1))
    with pytest.raises(sg.UnknownNameError, match="typo"):
        training.compile_optimizer(sg.SGDOptimizer(0.1, groups=[sg.ParameterGroup("typo.*")]))
    run(training, net, range(1))


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: sg.ParameterGroup(3), TypeError, "selects no parameters"),
        (lambda: sg.ParameterGroup(["a", 3]), TypeError, "3 selects no parameters"),
        (lambda: sg.ParameterGroup("a", learning_rate_factor=-1), ValueError, "learning_rate_factor is -1"),
        (lambda: sg.ParameterGroup("a", learning_rate_factor=np.nan), ValueError, "learning_rate_factor is nan"),
        (lambda: sg.ParameterGroup("a", weight_decay=np.inf), ValueError, "weight_decay is inf"),
        (lambda: sg.ParameterGroup("a", frozen=1), TypeError, "frozen is 1"),
        (lambda: setattr(sg.ParameterGroup("a"), "weight_decy", 1), ValueError, "assign weight_decay"),
        (lambda: sg.SGDOptimizer(0.1, groups=["a"]), TypeError, "groups is"),
        (lambda: sg.SGDOptimizer(0.1, groups="*.biases"), TypeError, "groups is"),
        (lambda: sg.SGDOptimizer(0.1, groups=[sg.ParameterGroup("a", lr=1.0)]), ValueError, "sets lr"),
        (lambda: sg.SGDOptimizer(0.1, groups=[sg.ParameterGroup("a", beta1=0.5)]), ValueError, "sets beta1"),
        (lambda: sg.SGDOptimizer(0.1, groups=[sg.ParameterGroup("a", momentum=0.5)]), ValueError, "pass momentum"),
    ],
)
def test_bad_groups_are_refused(make: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(sg.StepgraphError, match=words) as caught:
        make()
    assert isinstance(caught.value, kind)


def test_a_function_that_fails_is_named() -> None:
    with pytest.raises(sg.ArgumentError, match="the function failed"):
        layers_graph([sg.ParameterGroup(lambda name: True)]).compile(sg.Device.cpu())


def test_numbers_of_the_rule_can_differ_and_copies_are_their_own() -> None:
    group = sg.ParameterGroup("*.biases", beta1=0.5, epsilon=0.1)
    optimizer = sg.AdamOptimizer(0.1, groups=[group])
    rows = [dict(zip(optimizer.columns, row, strict=True)) for row in optimizer.rows()]
    assert [(row["beta1"], row["epsilon"], row["beta2"]) for row in rows] == [(0.9, 1e-8, 0.999), (0.5, 0.1, 0.999)]
    for made_from in (copy.copy, copy.deepcopy):
        other = made_from(optimizer)
        other.groups[0].beta1 = 0.7
        assert group.beta1 == 0.5 and other.groups[0].beta1 == 0.7
    momentum = sg.SGDOptimizer(0.1, momentum=0.9, groups=[sg.ParameterGroup("*.biases", momentum=0.0)])
    assert [row[momentum.columns.index("momentum_scale")] for row in momentum.rows()] == [0.9, 0.0]
    assert GLOBAL is sg.GradientClippingType.BY_GLOBAL_NORM


# Muon selects parameters, too


BY_NAME = pytest.param("*2.weights", marks=pytest.mark.deep)


@pytest.mark.parametrize("selector", [BY_NAME, lambda name, tensor: name.endswith("2.weights")])
def test_muon_keeps_one_buffer_per_matrix_and_is_saved(selector: Any, tmp_path: Path) -> None:
    net, again = Net(), Net()
    training = net.graph(sg.MuonOptimizer(0.05, weight_decay=0.1, clip_norm=1.0, adamw=selector))
    assert [len(tensor.optimizer_data) for tensor in net.tensors] == [1, 2, 2, 2]
    sizes = [w.nbytes for w in net.start]
    assert training.memory_plan.optimizer_state == 2 * sum(sizes) - sizes[0]
    run(training, net, range(4))
    training.save(tmp_path)
    other = again.graph(sg.MuonOptimizer(0.05, weight_decay=0.1, clip_norm=1.0, adamw=selector))
    assert other.restore(tmp_path).is_complete
    loaded = sg.load(tmp_path, sg.Device.cpu())
    for step in range(4, 6):
        losses = [one.execute({"x": net.x[step]}, {"y": net.y[step]}).loss for one in (training, other, loaded)]
        assert len(set(losses)) == 1


def test_a_pattern_of_muon_that_matches_nothing_is_refused() -> None:
    with pytest.raises(sg.UnknownNameError, match=r"(?s)Embedding\.\*.*matches no parameter"):
        Net().graph(sg.MuonOptimizer(0.05, adamw="Embedding.*"))


def test_groups_of_tensors_are_printed_by_name_and_shortened(tmp_path: Path) -> None:
    x, y, graph = sg.Tensor((sg.BATCH, 3)), sg.Tensor((sg.BATCH, 3)), sg.Graph()
    layers = [sg.FullyConnectedLayer.create(3, 3) for _ in range(4)]
    graph.sequence(x, *layers)
    groups = [sg.ParameterGroup(layers[3].weights, frozen=True), *sg.DECAY_MATRICES_ONLY]
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamWOptimizer(0.1, groups=groups))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu")
    assert "group FullyConnected4.weights: 1 parameter, frozen" in str(training)
    training.save(tmp_path)
    biases = ", ".join(f"FullyConnected{i}.biases" for i in (1, 2, 3))
    printed = " ".join(str(sg.load(tmp_path, sg.Device.cpu())).split())
    assert f"group {biases} and 1 more: 4 parameters, weight decay 0" in printed
