"""Parameters that are frozen belong to a graph: the same module can be frozen in one and trained in another."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph as sg
from stepgraph import draw

STEPS, ROWS = 6, 8


class Chain(nn.Module):
    """What trains the generator: the discriminator judges what it makes."""

    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.discriminator(self.generator(noise))


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))


def discriminator() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.PReLU(), nn.Linear(8, 1))


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return generator(), discriminator()


def compiled(model: nn.Module, name: str, shape: tuple[int, ...], rate: float, **settings: Any) -> sg.TrainingGraph:
    imported = sg.from_torch(model, {name: torch.zeros(ROWS, *shape)}, **settings)
    loss = sg.LossLayer.sigmoid_cross_entropy(reduction_type=sg.ReductionType.MEAN)
    training = imported.training(loss, sg.SGDOptimizer(rate), sg.Tensor((sg.BATCH, 1)))
    training.compile("cpu", deterministic=True)
    return training


def value(step: Any) -> float:
    return float(step.loss)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(ROWS, 3), torch.randn(ROWS, 5)) for _ in range(STEPS)]


def in_pytorch(make: nn.Module, judge: nn.Module) -> list[float]:
    """The usual loop: one step of the discriminator, then one of the generator, with the discriminator frozen."""
    ours = torch.optim.SGD(make.parameters(), 0.1)
    theirs = torch.optim.SGD(judge.parameters(), 0.05)
    losses = []
    for noise, real in batches():
        both = torch.cat([real, make.eval()(noise).detach()])
        labels = torch.cat([torch.ones(ROWS, 1), torch.zeros(ROWS, 1)])
        theirs.zero_grad()
        loss = F.binary_cross_entropy_with_logits(judge(both), labels)
        loss.backward()
        theirs.step()
        losses.append(loss.item())
        judge.requires_grad_(False)
        make.train()
        ours.zero_grad()
        loss = F.binary_cross_entropy_with_logits(judge(make(noise)), torch.ones(ROWS, 1))
        loss.backward()
        ours.step()
        judge.requires_grad_(True)
        losses.append(loss.item())
    return losses


def by_graphs(make: nn.Module, judge: nn.Module, frozen_first: bool, **settings: Any) -> list[float]:
    """The same by two graphs, imported in either order."""

    def trains_judge() -> sg.TrainingGraph:
        judge.requires_grad_(True)
        return compiled(judge, "input", (5,), 0.05, **settings)

    def trains_generator() -> sg.TrainingGraph:
        judge.requires_grad_(False)
        return compiled(Chain(make, judge), "noise", (3,), 0.1, **settings)

    if frozen_first:
        for_make = trains_generator()
        for_judge = trains_judge()
    else:
        for_judge = trains_judge()
        for_make = trains_generator()
    losses = []
    for noise, real in batches():
        both = torch.cat([real, make.eval()(noise).detach()])
        labels = torch.cat([torch.ones(ROWS, 1), torch.zeros(ROWS, 1)])
        losses.append(value(for_judge.execute({"input": both}, {"labels": labels})))
        losses.append(value(for_make.execute({"noise": noise}, {"labels": torch.ones(ROWS, 1)})))
    return losses


@pytest.mark.parametrize("frozen_first", [True, False])
@pytest.mark.parametrize("settings", [{}, {"native": False}, {"whole": True}], ids=["native", "wrapped", "whole"])
def test_a_discriminator_is_frozen_in_one_graph_and_trained_in_the_other(
    frozen_first: bool, settings: dict[str, Any]
) -> None:
    make, judge = pair()
    reference = copy.deepcopy((make, judge))
    expected = in_pytorch(*reference)
    torch.testing.assert_close(by_graphs(make, judge, frozen_first, **settings), expected, rtol=1e-5, atol=1e-6)
    for one, other in zip((make, judge), reference, strict=True):
        for name, value in other.state_dict().items():
            torch.testing.assert_close(one.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


def both(**settings: Any) -> tuple[sg.Imported, sg.Imported]:
    """A chain whose discriminator is frozen, and the discriminator alone."""
    make, judge = pair()
    judge.requires_grad_(False)
    chain = sg.from_torch(Chain(make, judge), {"noise": torch.zeros(ROWS, 3)}, **settings)
    return chain, sg.from_torch(judge.requires_grad_(True), torch.zeros(ROWS, 5), **settings)


def trained(imported: sg.Imported, optimizer: sg.Optimizer | None = None) -> sg.TrainingGraph:
    loss = sg.LossLayer.sigmoid_cross_entropy(reduction_type=sg.ReductionType.MEAN)
    training = imported.training(loss, optimizer or sg.SGDOptimizer(0.1), sg.Tensor((sg.BATCH, 1)))
    training.compile("cpu", deterministic=True)
    return training


def data(imported: sg.Imported) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    ((name, tensor),) = imported.inputs.items()
    torch.manual_seed(2)
    return {name: torch.randn(ROWS, *tensor.shape[1:])}, {"labels": torch.ones(ROWS, 1)}


def changed(imported: sg.Imported, training: sg.TrainingGraph) -> set[str]:
    """The parameters that a step of a graph changes, by their names in the model."""
    before = {name: tensor.numpy().tobytes() for name, tensor in imported.tensors.items()}
    training.execute(*data(imported))
    parameters = dict(imported.model.named_parameters())
    return {name for name in parameters if imported.tensors[name].numpy().tobytes() != before[name]}


JUDGE = {f"discriminator.{name}" for name, _ in discriminator().named_parameters()}
MAKER = {f"generator.{name}" for name, _ in generator().named_parameters()}


def test_both_graphs_know_what_is_frozen() -> None:
    chain, judge = both()
    assert (set(chain.frozen), judge.frozen) == (JUDGE, ())
    assert all(tensor.is_updatable for tensor in chain.tensors.values())
    assert str(chain).count(" frozen ") == 3 and "frozen" not in str(judge)
    training = trained(chain)
    assert str(training).count(" frozen") == 3 and "frozen" not in str(trained(judge))
    assert {t.label for node in training.nodes for t in node.trained} == MAKER


def test_a_part_of_a_layer_can_be_frozen() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].bias.requires_grad_(False)
    imported = sg.from_torch(model, torch.zeros(ROWS, 3))
    training = trained(imported)
    assert imported.frozen == ("0.bias",) and "16 (4 frozen)" in str(imported) and "16 (4 frozen)" in str(training)
    assert "4 of them frozen" in draw.svg(training.nodes)
    assert changed(imported, training) == {"0.weight", "1.weight", "1.bias"}


def test_neither_weight_decay_nor_groups_touch_what_is_frozen() -> None:
    chain, judge = both()
    groups = [sg.ParameterGroup("discriminator.*", weight_decay=0.5), sg.ParameterGroup("generator.0.*")]
    first = trained(chain, sg.AdamWOptimizer(0.1, weight_decay=0.1, clip_norm=1.0, groups=groups))
    assert changed(chain, first) == MAKER
    assert changed(judge, trained(judge, sg.AdamWOptimizer(0.1))) == {name.partition(".")[2] for name in JUDGE}


def test_the_memory_plan_has_no_optimizer_state_for_what_is_frozen() -> None:
    chain, _ = both()
    maker = sum(one.numel() for one in generator().parameters())
    assert trained(chain, sg.AdamOptimizer(0.1)).memory_plan_for(ROWS).optimizer_state == 2 * 4 * maker


@pytest.mark.parametrize("settings", [{}, {"native": False}, {"whole": True}], ids=["native", "wrapped", "whole"])
def test_a_file_keeps_what_is_frozen(settings: dict[str, Any], tmp_path: Path) -> None:
    for index, imported in enumerate(both(**settings)):
        training = trained(imported, sg.AdamOptimizer(0.1))
        training.save(tmp_path / f"{index}")
        model = copy.deepcopy(imported.model).requires_grad_(index == 0)  # the file decides, not the module
        loaded = sg.load(tmp_path / f"{index}", "cpu", custom=[model])
        assert str(loaded) == str(training)
        before = {name: tensor.numpy().tobytes() for name, tensor in loaded.named_tensors().items()}
        for one in (training, loaded):
            one.execute(*data(imported))
        kept = {name for name, tensor in loaded.named_tensors().items() if tensor.numpy().tobytes() == before[name]}
        assert len(kept) == (len(JUDGE) if index == 0 else 0)
        assert {n: t.numpy().tobytes() for n, t in loaded.named_tensors().items()} == {
            n: t.numpy().tobytes() for n, t in training.named_tensors().items()
        }


def test_restoring_does_not_change_what_is_frozen(tmp_path: Path) -> None:
    chain, judge = both()
    training = trained(chain)
    training.save(tmp_path / "chain")
    training.execute(*data(chain))
    training.restore(tmp_path / "chain")
    assert changed(chain, training) == MAKER
    assert len(changed(judge, trained(judge))) == len(JUDGE)


def test_a_pytorch_module_of_the_graph_has_the_same_parameters_frozen() -> None:
    chain, judge = both()
    for imported, expected in ((chain, JUDGE), (judge, set())):
        made = trained(imported).inference().to_torch()
        assert {name for name, one in made.named_parameters() if not one.requires_grad} == expected


def test_layers_around_one_module_can_differ() -> None:
    module = nn.Linear(3, 1)
    trains = sg.TorchLayer(module)
    module.bias.requires_grad_(False)
    keeps_bias, fixed = sg.TorchLayer(module), sg.TorchLayer(module, frozen=["weight", "bias"])
    assert [layer.frozen for layer in (trains, keeps_bias, fixed)] == [(), ("bias",), ("weight", "bias")]
    for layer, expected in ((trains, 2), (keeps_bias, 1), (fixed, 0)):
        node = sg.Graph()
        node.node(layer, sg.Tensor((4, 3)))
        assert len(node.nodes[0].trained) == expected and layer.tensors == trains.tensors
    with pytest.raises(sg.UnknownNameError, match="its module has no array 'biases'"):
        sg.TorchLayer(module, frozen=["biases"])


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(x)
        return self.head(features.detach()), self.head(features)


def test_what_one_graph_detaches_another_trains() -> None:
    model = Detached()
    apart = sg.from_torch(model, torch.zeros(ROWS, 3), outputs=["0"])
    whole = sg.from_torch(model, torch.zeros(ROWS, 3), outputs=["1"])
    assert changed(apart, trained(apart)) == {"head.weight", "head.bias"}
    assert changed(whole, trained(whole)) == {"body.weight", "body.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize("all_gradients", [False, True])
def test_in_one_step_a_frozen_use_adds_nothing_to_the_gradient(all_gradients: bool) -> None:
    """Both losses of a GAN in one update: each network learns from its own."""
    make, judge = pair()
    other_make, other_judge = copy.deepcopy((make, judge))
    noise, real = batches()[0]
    judge.requires_grad_(False)
    chain = sg.from_torch(Chain(make, judge), {"noise": noise})
    alone = sg.from_torch(judge.requires_grad_(True), {"input": real})
    loss = sg.LossLayer.sigmoid_cross_entropy(reduction_type=sg.ReductionType.MEAN)
    training = sg.TrainingGraph([chain.graph, alone.graph], None, sg.SGDOptimizer(0.1))
    labels = sg.Tensor((sg.BATCH, 1))
    for imported in (chain, alone):
        (output,) = imported.outputs.values()
        training.node(copy.copy(loss), output, loss_labels=labels)
    training.add_inputs({**chain.inputs, **alone.inputs}, {"labels": labels})
    training.compile("cpu", deterministic=True, all_gradients=all_gradients)
    training.execute({"noise": noise, "input": real}, {"labels": torch.ones(ROWS, 1)})

    first = F.binary_cross_entropy_with_logits(
        other_judge.requires_grad_(False)(other_make(noise)), torch.ones(ROWS, 1)
    )
    first.backward()
    second = F.binary_cross_entropy_with_logits(other_judge.requires_grad_(True)(real), torch.ones(ROWS, 1))
    second.backward()
    torch.optim.SGD([*other_make.parameters(), *other_judge.parameters()], 0.1).step()
    for one, other in ((make, other_make), (judge, other_judge)):
        for name, value in other.named_parameters():
            torch.testing.assert_close(one.state_dict()[name], value.detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_a_graph_that_trains_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 1).requires_grad_(False)
    trained(sg.from_torch(model, torch.zeros(ROWS, 3)))
    assert "every parameter of the graph is frozen" in caplog.text
    caplog.clear()
    trained(sg.from_torch(model.requires_grad_(True), torch.zeros(ROWS, 3)))
    image, graph = sg.Tensor((ROWS, 3), data=torch.zeros(ROWS, 3), label="image"), sg.Graph()
    graph.node(sg.TorchLayer(model, frozen=["weight", "bias"]), image)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"image": image}, {"y": sg.Tensor((ROWS, 1))})
    training.set_training_tensor_parameters([sg.TensorParameter(image)])
    training.compile("cpu")
    assert not caplog.records
