"""`TorchLayer` against PyTorch: losses and states over training steps, and everything a graph does with a layer."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import stepgraph as sg
from tests import torch_modules
from tests.torch_modules import MODULES

CPU, STEPS = sg.Device.cpu(), 20
EPSILON = 1e-3  # large enough that gradients which are 0 but for rounding, as that of a key's bias, change nothing
OPTIMIZERS: dict[str, tuple[Callable[[], sg.Optimizer], Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": (lambda: sg.SGDOptimizer(0.05), lambda p: torch.optim.SGD(p, 0.05)),
    "AdamW": (
        lambda: sg.AdamWOptimizer(0.01, weight_decay=0.1, epsilon=EPSILON, formula="torch"),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, eps=EPSILON),
    ),
}


def made(row: torch_modules.Row, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return row.make()


def data(row: torch_modules.Row, steps: int = STEPS) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if row.indices:
        return [[torch.randint(10, shape, generator=generator) for shape in row.shapes] for _ in range(steps)]
    return [[torch.randn(shape, generator=generator) for shape in row.shapes] for _ in range(steps)]


def call(tree: Any, place: Callable[[int], Any]) -> Any:
    """The call of a row, with something in the places of its sources."""
    if isinstance(tree, str) and tree.startswith("source "):
        return place(int(tree.split()[1]))
    if isinstance(tree, dict):
        return {key: call(one, place) for key, one in tree.items()}
    return type(tree)(call(one, place) for one in tree) if isinstance(tree, list | tuple) else tree


def first(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    return first(next(iter(output.values())) if isinstance(output, Mapping) else output[0])


def trained(
    module: nn.Module,
    *shapes: Sequence[int],
    optimizer: sg.Optimizer | None = None,
    indices: bool = False,
    call: Any = None,
    **settings: Any,
) -> sg.TrainingGraph:
    """A training graph around one module: the mean of its squared results is the loss."""
    kind = sg.DataType.INT64 if indices else sg.DataType.FLOAT32
    sources = [sg.Tensor(tuple(shape), kind, label=f"x{i}") for i, shape in enumerate(shapes)]
    graph = sg.Graph()
    y = graph.node(sg.TorchLayer(module, call=call), *sources)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), optimizer or sg.SGDOptimizer(0.05))
    training.add_inputs({f"x{i}": one for i, one in enumerate(sources)}, {"y": sg.Tensor(y.shape)})
    training.compile(CPU, **settings)
    return training


def step(training: sg.TrainingGraph, arrays: Sequence[torch.Tensor], y: torch.Tensor | None = None) -> float:
    label = training.declaration.feeds.labels["y"]
    rows = arrays[0].shape[0] if training.declaration.is_batched(label) else label.shape[0]
    zeros = torch.zeros(rows, *label.shape[1:]) if y is None else y
    return float(training.execute({f"x{i}": one for i, one in enumerate(arrays)}, {"y": zeros}).loss)


def distance(one: nn.Module, other: nn.Module) -> float:
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    return max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)


# Those that the ordinary tests run; the deep checks run every module with both optimizers.
QUICK = {
    ("mlp", "SGD"), ("residual", "AdamW"), ("attention", "SGD"), ("tied", "AdamW"), ("low rank", "AdamW"),
    ("two inputs", "SGD"), ("target", "AdamW"), ("averaged", "SGD"), ("custom", "AdamW"), ("spectral norm", "SGD"),
}  # fmt: skip
CASES = [
    pytest.param(name, kind, marks=[] if (name, kind) in QUICK else pytest.mark.deep, id=f"{name}-{kind}")
    for name in MODULES
    for kind in OPTIMIZERS
]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_losses_and_state_are_those_of_pytorch(name: str, kind: str) -> None:
    row = MODULES[name]
    module, batches = made(row), data(row)
    reference = copy.deepcopy(module)
    ours, theirs = OPTIMIZERS[kind]
    where = None if row.call is None else call(row.call, sg.Source)
    training = trained(module, *row.shapes, optimizer=ours(), indices=row.indices, call=where, deterministic=True)
    optimizer = theirs([p for p in reference.parameters() if p.requires_grad])
    bound = 0.0 if row.bits and kind == "SGD" else 2e-6
    for arrays in batches:
        args, kwargs = (arrays, {}) if row.call is None else call(row.call, arrays.__getitem__)
        loss = first(reference(*args, **kwargs)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert step(training, arrays) == pytest.approx(loss.item(), rel=bound or 1e-7, abs=bound)
    assert distance(module, reference) <= bound


# ------------------------------------------------------------------------------------------------- what is shared


def test_the_module_sees_training_at_once_and_a_layer_sees_the_module() -> None:
    module = nn.Linear(3, 2)
    training = trained(module, (4, 3))
    before, x = module.weight.detach().clone(), torch.randn(4, 3)
    step(training, [x])
    assert not torch.equal(before, module.weight)
    with torch.no_grad():
        module.weight.zero_(), module.bias.zero_()
    assert step(training, [x]) == 0


def test_without_sharing_the_module_changes_only_when_asked() -> None:
    module, x = nn.Linear(3, 2), sg.Tensor((4, 3), label="x0")
    graph, layer = sg.Graph(), sg.TorchLayer(module, share=False)
    graph.node(layer, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x0": x}, {"y": sg.Tensor((4, 2))})
    training.compile(CPU)
    before = copy.deepcopy(module.state_dict())
    step(training, [torch.randn(4, 3)])
    assert all(torch.equal(one, before[name]) for name, one in module.state_dict().items())
    layer.copy_to_module()
    assert np.array_equal(layer.parameters["weight"].numpy(), module.weight.detach().numpy())
    assert not torch.equal(module.weight, before["weight"])


def test_a_module_that_is_used_twice_is_one_set_of_parameters() -> None:
    module, reference = nn.Linear(3, 3), nn.Linear(3, 3)
    reference.load_state_dict(module.state_dict())
    graph, x = sg.Graph(), sg.Tensor((4, 3), label="x0")
    first, second = sg.TorchLayer(module), sg.TorchLayer(module)
    graph.node(second, graph.node(first, x))
    assert first.parameters == second.parameters
    assert sg.TorchLayer(copy.deepcopy(module)).parameters.keys() == first.parameters.keys()
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x0": x}, {"y": sg.Tensor((4, 3))})
    training.compile(CPU)
    array, optimizer = torch.randn(4, 3), torch.optim.SGD(reference.parameters(), 0.1)
    for _ in range(3):
        loss = reference(reference(array)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert step(training, [array]) == pytest.approx(loss.item(), rel=1e-6)
    assert distance(module, reference) < 1e-6


def test_tensors_that_are_passed_are_used_by_any_of_their_names() -> None:
    module = torch_modules.Tied()
    mine = sg.Tensor((10, 6), fill=0.25)
    layer = sg.TorchLayer(module, tensors={"head.weight": mine})
    assert layer.parameters["embedding.weight"] is mine and "head.weight" not in layer.parameters
    with pytest.raises(sg.UnknownNameError, match="no array 'wrong'"):
        sg.TorchLayer(module, tensors={"wrong": mine})
    with pytest.raises(sg.ShapeError, match=r"the tensor for 'body.bias' is \[10, 6\]"):
        sg.TorchLayer(module, tensors={"body.bias": mine})


def test_roles_of_arrays() -> None:
    layer = sg.TorchLayer(nn.Sequential(torch_modules.Averaged(), nn.BatchNorm1d(4)))
    sg.Graph().node(layer, sg.Tensor((5, 3)))
    assert set(layer.statistics) == {
        "0.average", "0.calls", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    }  # fmt: skip
    assert set(layer.constants) == {"0.scale"}
    frozen = sg.TorchLayer(torch_modules.LowRank())
    assert frozen.frozen == ("base.weight", "base.bias")
    assert [name for name, one in frozen.parameters.items() if one in frozen.frozen_tensors] == [*frozen.frozen]


class Impure(nn.Module):
    """Assigns, appends, removes and fails."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(3, 3), fails
        self.seen: list[Any] = []
        self.last: Any = None
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = y = self.linear(x)
        self.seen.append(y)
        self.extra = 1
        self.total = self.total + y.sum(0).detach()
        self.train(False)
        if self.fails:
            raise RuntimeError("it fails in the middle")
        return y


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_leaves_the_module_as_it_was(fails: bool) -> None:
    module = Impure(fails)
    inside = dict(module.__dict__), dict(module.linear.__dict__)
    weight, total = module.linear.weight, module.total
    if fails:
        with pytest.raises(sg.ShapeError, match="it fails in the middle"):
            trained(module, (4, 3))
    else:
        training = trained(module, (4, 3))
        step(training, [torch.randn(4, 3)])
        assert float(total.abs().sum()) > 0  # a statistic, in the module's memory
    assert (dict(module.__dict__), dict(module.linear.__dict__)) == inside
    assert module.linear.weight is weight and module.total is total
    assert module.seen == [] and module.last is None and module.training and not hasattr(module, "extra")


def test_inputs_changed_in_place_stay_as_they_were() -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2).add_(1)

    graph, x = sg.Graph(), sg.Tensor((2, 3), label="x")
    y = graph.node(sg.TorchLayer(InPlace()), x)
    z = graph.node(sg.TorchLayer(nn.Identity()), x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({"y": y, "z": z})
    inference.compile(CPU)
    given = torch.ones(2, 3)
    inference.execute({"x": given})
    assert (inference.outputs["y"].numpy() == 3).all() and (inference.outputs["z"].numpy() == 1).all()
    assert (given == 1).all()


# ------------------------------------------------------------------------------------------------ calls and results


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    nothing: None
    hidden: tuple[torch.Tensor, ...]


class Several(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        parts = Output(x * 2, None, (x.sum(), x.argmax(1)))
        return {"parts": parts, "text": "no array", "list": [x > 0]}


def test_results_are_flattened_in_order() -> None:
    graph, x = sg.Graph(), sg.Tensor((2, 3), label="x")
    layer = sg.TorchLayer(Several())
    graph.node(layer, x)
    results = graph.result_tensors(layer)
    assert [(one.shape, one.data_type.name) for one in results] == [
        ((2, 3), "FLOAT32"), ((1,), "FLOAT32"), ((2,), "INT64"), ((2, 3), "BOOLEAN"),
    ]  # fmt: skip
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.add_outputs({str(i): one for i, one in enumerate(results)})
    inference.compile(CPU)
    inference.execute({"x": np.array([[1, 5, 3], [-1, -2, -3]], np.float32)})
    assert inference.outputs["1"].numpy() == [3] and list(inference.outputs["2"].numpy()) == [1, 0]


def test_some_results_by_path(tmp_path: Path) -> None:
    graph, x = sg.Graph(), sg.Tensor((2, 3), label="x")
    result, mask = (
        graph.node(sg.TorchLayer(Several(), results=["parts.hidden.0", "list.0"]), x),
        graph.nodes[0].results[1],
    )
    assert (result.shape, mask.data_type.name) == ((1,), "BOOLEAN")
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(CPU)
    inference.save(tmp_path / "saved")
    again = sg.load(tmp_path / "saved", CPU, custom=[Several()])
    assert list(again.layers[0].results) == ["parts.hidden.0", "list.0"]
    with pytest.raises(sg.UnknownNameError, match=r"returns no 'logits'(.|\n)*parts\.logits"):
        sg.Graph().node(sg.TorchLayer(Several(), results=["logits"]), x)


def test_keywords_alone_and_a_call_that_misses_a_source() -> None:
    module = torch_modules.Pair()
    a, b = sg.Tensor((4, 3)), sg.Tensor((4, 5))
    layer = sg.TorchLayer(module, call={"b": sg.Source(1), "a": sg.Source(0)})
    assert sg.Graph().node(layer, a, b).shape == (4, 4)
    with pytest.raises(sg.ArgumentError, match=r"uses the sources \[0, 1\], but the node has 1"):
        sg.Graph().node(layer, a)


def test_a_result_that_is_a_parameter_does_not_follow_the_update() -> None:
    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * self.weight, self.weight

    graph, x, layer = sg.Graph(), sg.Tensor((2, 3), label="x0"), sg.TorchLayer(Shows())
    y = graph.node(layer, x)
    training = sg.TrainingGraph([graph], optimizer=sg.SGDOptimizer(0.1))
    training.node(sg.LossLayer.mean_squared_error(), y, loss_labels=(label := sg.Tensor((2, 3))))
    training.add_inputs({"x0": x}, {"y": label})
    training.add_outputs({"weight": graph.result_tensors(layer)[1]})
    training.compile(CPU)
    training.execute({"x0": np.ones((2, 3), np.float32)}, {"y": np.zeros((2, 3), np.float32)})
    assert (training.outputs["weight"].numpy() == 1).all()


def test_any_batch_size_runs_the_python_code_again() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(x.shape[0] * 3).view(-1, 3) / len(x) + torch.arange(len(x))[:, None]

    graph, x = sg.Graph(), sg.Tensor((sg.BATCH, 3), label="x")
    y = graph.node(sg.TorchLayer(Reads()), x)
    assert y.shape == (sg.BATCH, 3)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(CPU)
    for rows in (1, 2, 5):
        found = inference.execute({"x": np.ones((rows, 3), np.float32)}).result.numpy()
        assert np.allclose(found, 1 / rows + np.arange(rows)[:, None])


# -------------------------------------------------------------------------------- what a graph does with every layer


class Everything(nn.Module):
    """Dropout, batch norm, a moving average and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.4)
        self.register_buffer("average", torch.zeros(8))
        self.second = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.norm(self.first(x)).relu())
        if self.training:
            self.average = self.average * 0.5 + y.detach().mean(0)
        return self.second(y) + self.average.sum()


X = [torch.randn(6, 3, generator=torch.Generator().manual_seed(i)) for i in range(8)]


def everything(seed: int = 3, **settings: Any) -> tuple[nn.Module, sg.TrainingGraph]:
    torch.manual_seed(seed)
    sg.set_seed(seed)
    module = Everything()
    return module, trained(module, (6, 3), optimizer=sg.AdamOptimizer(0.05), **settings)


def test_runs_are_repeatable_and_phases_are_the_whole() -> None:
    runs = []
    for _ in range(2):
        module, training = everything(deterministic=True)
        losses = [step(training, [x]) for x in X]
        runs.append((losses, copy.deepcopy(module.state_dict())))
    assert runs[0][0] == runs[1][0] and len(set(runs[0][0])) == len(X)
    module, training = everything(deterministic=True)
    for x, loss in zip(X, runs[0][0], strict=True):
        assert float(training.execute_forward({"x0": x}, {"y": torch.zeros(6, 3)}).loss) == loss
        training.execute_gradient()
        training.execute_optimizer_update()
    for name, array in module.state_dict().items():
        assert torch.equal(array, runs[0][1][name]), name


def test_a_checkpoint_continues_the_same_run(tmp_path: Path) -> None:
    module, training = everything(deterministic=True)
    for x in X[:4]:
        step(training, [x])
    training.save(tmp_path / "saved")
    wanted = [step(training, [x]) for x in X[4:]]
    state = copy.deepcopy(module.state_dict())
    other, again = everything(seed=9, deterministic=True)
    again.restore(tmp_path / "saved")
    assert [step(again, [x]) for x in X[4:]] == wanted and distance(other, module) == 0
    handed = Everything()
    for custom in ([handed], [lambda: Everything()]):  # noqa: PLW0108  a function, not the class
        loaded = sg.load(tmp_path / "saved", CPU, custom=custom)
        assert [step(loaded, [x]) for x in X[4:]] == wanted
    sg.load(tmp_path / "saved", custom=[handed]).layers[0].copy_to_module()
    assert not torch.equal(handed.first.weight, state["first.weight"])
    with pytest.raises(sg.CheckpointError, match=r"the arrays of a PyTorch module .*:Everything, but no code"):
        sg.load(tmp_path / "saved", CPU)
    with pytest.raises(sg.CheckpointError, match="hand it over"):
        sg.load(tmp_path / "saved", CPU, custom=[nn.Linear(3, 3)])


def test_a_module_that_changed_cannot_be_loaded(tmp_path: Path) -> None:
    training = trained(nn.Sequential(nn.Linear(3, 2)), (4, 3))
    training.save(tmp_path / "saved")
    for other in (nn.Sequential(nn.Linear(3, 5)), nn.Sequential(nn.ReLU()), nn.Sequential(nn.Linear(3, 2), nn.PReLU())):
        with pytest.raises(sg.CheckpointError):
            sg.load(tmp_path / "saved", CPU, custom=[other])
    simple = trained(nn.Linear(3, 2, bias=False), (4, 3))
    simple.save(tmp_path / "simple")
    assert sg.load(tmp_path / "simple", CPU).layers[0].module.bias is None  # PyTorch's own class, known arguments


def deep(seed: int = 0, **settings: Any) -> tuple[nn.Module, sg.TrainingGraph]:
    torch.manual_seed(seed)
    sg.set_seed(seed)
    block = [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.2)]
    module = nn.Sequential(*(copy.deepcopy(one) for _ in range(4) for one in block))
    return module, trained(module, (64, 32), deterministic=True, **settings)


@pytest.mark.deep
def test_a_memory_limit_changes_no_number() -> None:
    batches = [torch.randn(64, 32, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    module, training = deep()
    losses = [step(training, [x]) for x in batches]
    limited, other = deep(memory_limit=int(training.memory_plan.total * 0.8))
    assert [step(other, [x]) for x in batches] == pytest.approx(losses, rel=1e-6)
    assert distance(module, limited) < 1e-6


def test_gradients_accumulate_and_statistics_move_with_each_forward_pass() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    reference = copy.deepcopy(module)
    training = trained(module, (6, 3), deterministic=True)
    optimizer = torch.optim.SGD(reference.parameters(), 0.05)
    for x in X[:3]:
        training.execute_forward({"x0": x}, {"y": torch.zeros(6, 4)})
        training.execute_gradient(options=sg.ExecutionOptions.ACCUMULATE_GRADIENTS)
        reference(x).square().mean().backward()
    training.execute_optimizer_update()
    optimizer.step()
    assert distance(module, reference) < 1e-6


def test_a_nan_is_traced_to_the_module() -> None:
    _, checked = everything(check_numerics=True)
    with pytest.raises(sg.NumericsError, match="Everything"):
        step(checked, [X[0] / 0])


@pytest.mark.deep
def test_fit_trains_a_module() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))
    graph, x = sg.Graph(), sg.Tensor((sg.BATCH, 3), label="x")
    y = graph.node(sg.TorchLayer(module), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(0.02))
    training.add_inputs({"x": x}, {"y": sg.Tensor((sg.BATCH,), "int64")})
    assert y.shape == (sg.BATCH, 2)
    arrays = torch.randn(210, 3, generator=torch.Generator().manual_seed(0))
    labels = (arrays.sum(1) > 0).long()
    training.compile(CPU)
    history = sg.fit(training, (arrays.numpy(), labels.numpy()), epochs=6, batch_size=32, progress="quiet")
    assert history.epochs[-1]["loss"] < 0.7 * history.epochs[0]["loss"]
    assert float((module.eval()(arrays).argmax(1) == labels).float().mean()) > 0.9


def test_inference_runs_in_eval_mode() -> None:
    module, training = everything()
    for x in X:
        step(training, [x])
    graph, x = sg.Graph(), sg.Tensor((6, 3), label="x")
    graph.node(sg.TorchLayer(module), x)
    inference = sg.InferenceGraph([graph])
    inference.add_inputs({"x": x})
    inference.compile(CPU)
    average = module.average.clone()
    found = inference.execute({"x": X[0]}).result.numpy()
    assert torch.equal(module.average, average)
    with torch.no_grad():
        assert np.allclose(found, module.eval()(X[0]).numpy(), atol=1e-6)


def test_a_submodule_in_eval_mode_stays_in_it(tmp_path: Path) -> None:
    module = Everything()
    module.norm.eval(), module.drop.eval()
    training = trained(module, (6, 3))
    module.train()  # too late: the layer keeps what it found
    before = module.norm.running_mean.clone()
    step(training, [X[0]])
    assert torch.equal(module.norm.running_mean, before) and module.average.abs().sum() > 0
    training.save(tmp_path / "saved")
    loaded = sg.load(tmp_path / "saved", CPU, custom=[Everything()])
    assert loaded.layers[0].evaluated == ("norm", "drop")


def test_tables_and_messages_show_the_class() -> None:
    _, training = everything()
    assert "Torch Everything" in str(training) and "Everything" in training.summarized_dot_description
    assert repr(training.layers[0]) == "TorchLayer('Everything', Everything)"
    names = training.declaration.parameter_names
    assert ("Everything.first.weight", "Torch Everything.first.weight") in names.values()


# -------------------------------------------------------------------------------------------------- other ways to write


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(3, 8), nn.Linear(8, 2), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).tanh())

        return checkpoint(body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_is_switched_off(reentrant: bool) -> None:
    torch.manual_seed(0)
    module = Checkpointed(reentrant)
    reference, x = copy.deepcopy(module), torch.randn(4, 3, requires_grad=True)
    training = trained(module, (4, 3), deterministic=True)
    plain = trained(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), (4, 3), deterministic=True)
    count = [str(one).split(" operators")[0].split()[-1] for one in (training, plain)]
    assert count[0] == count[1]
    step(training, [x.detach()])
    reference(x).square().mean().backward()
    assert torch.allclose(module.first.weight, reference.first.weight - 0.05 * reference.first.weight.grad)


@pytest.mark.deep
def test_compiled_parts_are_inlined() -> None:
    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(nn.Linear(3, 4))
            self.outer = nn.Linear(4, 2)
            self.outer.compile()
            self.function = torch.compile(lambda x: x.relu() * 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.function(self.inner(x)))

    module = Compiled()
    training = trained(module, (4, 3), deterministic=True)
    x = torch.randn(4, 3)
    inner = module.inner._orig_mod
    wanted = F.linear(F.linear(x, inner.weight, inner.bias).relu() * 2, module.outer.weight, module.outer.bias)
    assert step(training, [x]) == pytest.approx(wanted.square().mean().item(), rel=1e-6)


class Rotated(nn.Module):
    """A region without autocast, and a product outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.linspace(100, 101, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            angles = self.frequencies @ torch.eye(8)
        return self.linear(x) * angles.cos()


@pytest.mark.filterwarnings("ignore:.*bf16")
@pytest.mark.parametrize(
    "name", ["rotated", *(pytest.param(one, marks=pytest.mark.deep) for one in ("lstm", "residual"))]
)
def test_mixed_precision_is_pytorchs(name: str) -> None:
    torch.manual_seed(0)
    row = torch_modules.Row(Rotated, ((4, 8),)) if name == "rotated" else MODULES[name]
    module, (arrays,) = made(row), data(row, 1)
    reference = copy.deepcopy(module)
    training = trained(module, *row.shapes, compute_type=sg.DataType.BFLOAT16)
    # On some CPUs, PyTorch has no LSTM in bfloat16.
    with torch.autocast("cpu", torch.bfloat16, enabled=name != "lstm"):
        wanted = reference(*arrays).float().square().mean().item()
    assert step(training, arrays) == pytest.approx(wanted, rel=0.01)
    assert all(one.dtype is torch.float32 for one in module.parameters())
    assert step(training, arrays) < wanted


@pytest.mark.gpu
def test_on_a_gpu_the_module_follows_when_asked() -> None:
    torch.manual_seed(0)
    sg.set_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3))
    reference, device = copy.deepcopy(module).cuda(), sg.Device.gpu()
    graph, x, layer = sg.Graph(), sg.Tensor((4, 2, 6, 6), label="x"), sg.TorchLayer(module)
    graph.node(layer, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.05))
    training.add_inputs({"x": x}, {"y": sg.Tensor((4, 3))})
    training.compile(device)
    optimizer, before = torch.optim.SGD(reference.parameters(), 0.05), module[0].weight.detach().clone()
    for i in range(5):
        array = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(i))
        loss = reference(array.cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ours = training.execute({"x": array}, {"y": torch.zeros(4, 3)})
        assert float(ours.loss) == pytest.approx(loss.item(), rel=1e-3)
    assert torch.equal(module[0].weight, before)
    layer.copy_to_module()
    assert distance(module, reference.cpu()) < 1e-3
