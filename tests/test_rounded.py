"""Parameters kept in the compute type beside float32: the update writes both, and whoever else writes is noticed.

On the CPU nothing is kept, because anyone can write to memory there. Here it is, and the bits are compared with steps
that convert their parameters themselves.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.step import KeyKind
from stepgraph.graphs import compilation
from stepgraph.system import torch_private
from stepgraph.tensors.tensor import Tensor

CPU = sg.Device.cpu()
X = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
Y = np.random.default_rng(1).standard_normal((8, 3)).astype(np.float32)
LARGER = np.random.default_rng(2).standard_normal((5, 6)).astype(np.float32)
OPTIONS = sg.GraphCompilationOptions


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keeps copies on the CPU, as if only its tensors could reach memory."""
    monkeypatch.setattr(compilation, "ROUNDED", {"cpu"})
    monkeypatch.setattr(Tensor, "_is_watched", property(lambda tensor: tensor.current is not None))
    monkeypatch.setattr(Tensor, "is_exposed", property(lambda tensor: tensor._shares.are_held))
    yield


class Net:
    def __init__(self, kind: str = "bfloat16", options: Any = OPTIONS.NONE, layers: Any = None, **settings: Any):
        sg.set_seed(3)
        self.first = sg.FullyConnectedLayer.create(6, 5) if layers is None else layers[0]
        self.last = sg.FullyConnectedLayer.create(5, 3) if layers is None else layers[1]
        x, y, graph = sg.Tensor((8, 6)), sg.Tensor((8, 3)), sg.Graph()
        hidden = graph.node(sg.LayerNormalizationLayer.create((5,)), graph.node(self.first, x))
        graph.node(self.last, graph.node(sg.ActivationLayer.gelu(), hidden))
        optimizer = settings.pop("optimizer", None) or sg.AdamWOptimizer(0.05, weight_decay=0.1)
        self.training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), optimizer, **settings)
        self.training.add_inputs({"x": x}, {"y": y})
        self.training.compile(CPU, options | OPTIONS.DETERMINISTIC, compute_type=kind)

    def step(self, x: np.ndarray = X) -> float:
        return self.training.execute({"x": x}, {"y": Y}).loss

    def phases(self) -> float:
        tensors = {**self.training.inputs, **self.training.loss_labels}
        self.training.bind_and_write_data({"x": X, "y": Y}, tensors, CPU)
        loss = self.training.execute_forward().loss
        self.training.execute_gradient()
        self.training.execute_optimizer_update()
        return loss

    @property
    def copies(self) -> dict[Tensor, torch.Tensor]:
        arrays = self.training.session.state.arrays
        return {key.owner: array for key, array in arrays.items() if key.kind is KeyKind.ROUNDED}


def converting(make: Callable[[], Any]) -> Any:
    """The same without copies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "ROUNDED", set[str]())
        return make()


def casts(net: Net) -> int:
    nodes = net.training.compilation.programs.program(8).nodes
    return sum(node.target is torch_private.to_copy.default and node.args[0].op == "placeholder" for node in nodes)


def test_layers_read_copies_that_the_update_writes(kept: None) -> None:
    net, plain = Net(), converting(Net)
    assert {*net.copies} == {net.first.weights, net.first.biases, net.last.weights, net.last.biases}
    assert not plain.copies
    assert casts(plain) == casts(net) + 4  # the input and the label are converted in both
    for _ in range(3):
        assert net.step() == plain.step()
        for tensor, copy in net.copies.items():
            assert copy.equal(tensor.array().bfloat16())
    assert net.first.weights.numpy().tobytes() == plain.first.weights.numpy().tobytes()
    count = sum(tensor.descriptor.element_count for tensor in net.copies)
    assert net.training.memory_plan.parameters == plain.training.memory_plan.parameters + 2 * count


def test_nothing_is_kept_on_the_cpu() -> None:
    assert not Net().copies


def test_own_steps_do_not_round_again(kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    net, rounded = Net(), []
    net.step(), net.phases()
    monkeypatch.setattr(torch_private, "foreach_copy_", lambda *given: rounded.append(given))
    for _ in range(3):
        net.step()
        net.phases()
    assert not rounded
    net.first.weights.overwrite(torch.from_numpy(LARGER))
    net.step()
    assert len(rounded) == 1


def bind(net: Net) -> None:
    net.first.weights.bind_and_write_data(LARGER.copy(), CPU)


def load(net: Net) -> None:
    state = {name: 2 * array for name, array in net.training.state_dict().items()}
    net.training.load_state_dict(state)


def write_through_an_array(net: Net) -> None:
    net.last.weights.torch().mul_(0.5)


def freeze(net: Net) -> None:
    net.first.weights_parameter.is_updatable = False
    net.step()
    net.first.weights.overwrite(torch.from_numpy(LARGER))
    net.step()
    net.first.weights_parameter.is_updatable = True


def recompile(net: Net) -> None:
    net.training.compile(CPU, OPTIONS.DETERMINISTIC, compute_type="float16")
    net.step()
    net.training.compile(CPU, OPTIONS.DETERMINISTIC, compute_type="bfloat16")


def evaluate(net: Net) -> None:
    net.training.execute({"x": X}, {"y": Y}, options=sg.ExecutionOptions.FORWARD_FOR_INFERENCE)


def train_elsewhere(net: Net) -> None:
    """A second graph, in another type, trains the same tensors."""
    other = Net("float16", layers=(net.first, net.last))
    for _ in range(3):
        other.step()
        net.step()


def find_a_rate(net: Net) -> None:
    sg.find_learning_rate(net.training, (np.tile(X, (4, 1)), np.tile(Y, (4, 1))), steps=4)


QUICK = [bind, load, write_through_an_array, train_elsewhere]
SLOW = [(write, Net.step) for write in (freeze, recompile, evaluate, find_a_rate)]
SLOW += [(write, Net.phases) for write in (*QUICK, freeze, recompile, evaluate, find_a_rate)]
CASES = [(write, Net.step) for write in QUICK]
CASES += [pytest.param(*case, marks=pytest.mark.deep) for case in SLOW]


@pytest.mark.parametrize(("write", "way"), CASES)
def test_whoever_writes_is_noticed(write: Callable[[Net], None], way: Callable[[Net], float], kept: None) -> None:
    def losses() -> list[float]:
        net, found = Net(), []
        for _ in range(2):
            found.append(way(net))
            write(net)
            found += [way(net), way(net)]
        return found

    assert losses() == converting(losses)


def test_an_array_that_was_given_away_can_be_written_to_at_any_time(kept: None) -> None:
    def losses() -> list[float]:
        net = Net()
        weights, found = net.first.weights.torch(), []
        for _ in range(3):
            found += [net.step(), net.step()]
            weights.mul_(0.5)
        del weights
        return [*found, net.step(), net.step()]

    assert losses() == converting(losses)


def test_an_array_is_rounded_only_while_someone_holds_it(kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    net, rounded, copy = Net(), list[int](), torch_private.foreach_copy_

    def counted(copies: list[torch.Tensor], arrays: list[torch.Tensor]) -> None:
        rounded.append(len(copies))
        copy(copies, arrays)

    net.step()
    monkeypatch.setattr(torch_private, "foreach_copy_", counted)
    held = net.first.weights.torch().detach()[1:]  # a view of the array
    assert not deepcopy(net.first.weights).is_exposed  # it has memory of its own
    net.step(), net.step(), net.step()
    assert rounded == [4, 1, 1]
    held.fill_(7.0)
    del held
    net.step(), net.step(), net.step()  # the first of them sees what was written
    assert rounded == [4, 1, 1, 1]
    net.training.state_dict()
    net.step(), net.step(), net.step()
    assert rounded == [4, 1, 1, 1, 4]


def test_averages_exchange_and_a_skipped_step(kept: None) -> None:
    def losses() -> list[float]:
        net = Net("float16", average=0.5)
        found = [net.step(), net.step()]
        with net.training.averaged():
            evaluate(net)
        found += [net.step(np.full_like(X, 1e30)), net.step()]
        net.training.loss_scale = 2.0**30
        return [*found, net.step(), net.step()]

    np.testing.assert_array_equal(losses(), converting(losses))


def test_a_step_that_is_rolled_back(kept: None) -> None:
    def losses() -> list[float]:
        net = Net(options=OPTIONS.CHECK_NUMERICS)
        found = [net.step()]
        with pytest.raises(sg.NumericsError):
            net.step(np.full_like(X, np.nan))
        return [*found, net.step(), net.step()]

    assert losses() == converting(losses)


def test_groups_clipping_and_accumulation(kept: None) -> None:
    def losses() -> list[float]:
        optimizer = sg.AdamWOptimizer(0.05, weight_decay=0.1, clip_norm=0.1, groups=sg.DECAY_MATRICES_ONLY)
        net = Net(optimizer=optimizer)
        history = sg.fit(net.training, (X, Y), epochs=3, batch_size=8, progress="quiet")
        return [*history["loss"], net.step(), net.phases()]

    assert losses() == converting(losses)


def test_checkpoints_do_not_contain_copies(kept: None, tmp_path: Any) -> None:
    net = Net()
    net.step()
    net.training.save(tmp_path / "model")
    expected = [net.step(), net.step()]
    again = Net()
    again.step(), again.step()
    again.training.restore(tmp_path / "model")
    assert [again.step(), again.step()] == expected


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    def losses() -> list[float]:
        net, found = Net(), []
        net.training.compile(sg.Device.gpu(), OPTIONS.DETERMINISTIC, compute_type="bfloat16")
        for write in (lambda net: None, load, write_through_an_array, lambda net: None):
            found += [net.step() for _ in range(4)]
            write(net)
        net.first.weights.bind_and_write_data(LARGER.copy(), sg.Device.gpu())
        return [*found, net.step(), net.step(), float(bool(net.copies))]

    found, expected = losses(), converting(losses)
    assert found[:-1] == expected[:-1] and found[-1] == 1 and expected[-1] == 0


@pytest.mark.gpu
def test_a_gpu_rounds_parameters_only_while_someone_holds_their_arrays() -> None:
    net = Net()
    net.training.compile(sg.Device.gpu(), OPTIONS.DETERMINISTIC, compute_type="bfloat16")
    held = [net.step(), net.training.state_dict()]
    assert all(tensor.is_exposed for tensor in net.copies)
    net.step()
    held.clear()
    assert not any(tensor.is_exposed for tensor in net.copies)
    net.last.weights.torch().mul_(0.5)  # nobody holds the array any more
    net.step()
    for tensor, copy in net.copies.items():
        assert copy.equal(tensor.array().bfloat16())
