"""Optimizers of PyTorch over an imported model, step by step against PyTorch's own."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepgraph as sg

STEPS, ROWS = 10, 8
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Tied weights, a normalization, a parameter that is frozen and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)
        self.leave.weight = nn.Parameter(self.enter.weight.detach().T.contiguous())
        self.again, self.fixed, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.ones(3))
        self.last = nn.Linear(4, 4)
        self.last.weight = self.again.weight
        self.fixed.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.leave(torch.tanh(self.norm(self.enter(x))))
        return self.last(torch.tanh(self.again(self.fixed(x))))


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def decaying(kind: type, **settings: Any) -> Make:
    """Weights decay, biases and the normalization do not and learn faster."""

    def make(net: nn.Module) -> torch.optim.Optimizer:
        matrices = [one for one in net.parameters() if one.ndim > 1]
        vectors = [one for one in net.parameters() if one.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}]
        return kind(groups, lr=0.01, **settings)  # type: ignore[no-any-return]

    return make


def whole(kind: type, **settings: Any) -> Make:
    return lambda net: kind(net.parameters(), **settings)  # type: ignore[no-any-return]


def some(net: nn.Module) -> torch.optim.Optimizer:
    """Only some of the parameters."""
    return torch.optim.AdamW([*net.enter.parameters(), net.last.bias], lr=0.01, weight_decay=0.1)  # type: ignore[arg-type]


EPSILON = 1e-3  # a gradient that is 0 but for rounding would otherwise decide a whole step
OPTIMIZERS: dict[str, Make] = {
    "sgd": whole(torch.optim.SGD, lr=0.05),
    "sgd, momentum": whole(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd, nesterov": whole(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "sgd, maximize": whole(torch.optim.SGD, lr=0.01, maximize=True),
    "sgd, groups": decaying(torch.optim.SGD, momentum=0.9),
    "adam": whole(torch.optim.Adam, lr=0.01, betas=(0.8, 0.95), eps=EPSILON, weight_decay=0.1),
    "adam, amsgrad": whole(torch.optim.Adam, lr=0.01, eps=EPSILON, amsgrad=True),
    "adamw": whole(torch.optim.AdamW, lr=0.01, eps=EPSILON, weight_decay=0.1),
    "adamw, groups": decaying(torch.optim.AdamW, eps=EPSILON),
    "rmsprop": whole(torch.optim.RMSprop, lr=0.01, alpha=0.9, eps=EPSILON),
    "rmsprop, centered": whole(torch.optim.RMSprop, lr=0.01, eps=EPSILON, momentum=0.5, centered=True),
    "some parameters": some,
}


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, 4, generator=generator), torch.randn(ROWS, 4, generator=generator)) for _ in range(STEPS)
    ]


def in_pytorch(net: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[Any], Any] | None = None) -> None:
    for x, y in data():
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        if clip is not None:
            clip(net.parameters())
        optimizer.step()


def by_graph(net: nn.Module, make: Make, **clipping: float) -> sg.TrainingGraph:
    imported = sg.from_torch(net, torch.zeros(ROWS, 4))
    optimizer = imported.optimizer(make(net), **clipping)
    training = imported.training(sg.LossLayer.mean_squared_error(), optimizer, sg.Tensor((sg.BATCH, 4)))
    training.compile("cpu", deterministic=True)
    for x, y in data():
        training.execute({"x": x}, {"labels": y})
    return training


def compare(mine: nn.Module, theirs: nn.Module) -> None:
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(
            mine.state_dict()[name], value, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_equal_pytorchs(name: str) -> None:
    mine, theirs = model(), model()
    start = copy.deepcopy(theirs.state_dict())
    in_pytorch(theirs, OPTIMIZERS[name](theirs))
    by_graph(mine, OPTIMIZERS[name])
    compare(mine, theirs)
    moved = {key for key, value in theirs.state_dict().items() if not torch.equal(value, start[key])}
    assert {"enter.weight", "last.bias"} <= moved and not moved & {"fixed.weight", "unused"}


@pytest.mark.parametrize(
    ("clipping", "clip"),
    [
        ({"clip_norm": 0.1}, lambda p: nn.utils.clip_grad_norm_(p, 0.1)),
        ({"clip_value": 0.01}, lambda p: nn.utils.clip_grad_value_(p, 0.01)),
    ],
    ids=["norm", "value"],
)
def test_gradients_are_clipped_as_in_pytorch(clipping: dict[str, float], clip: Callable[[Any], Any]) -> None:
    mine, theirs, plain = model(), model(), model()
    make = OPTIMIZERS["sgd, groups"]
    in_pytorch(theirs, make(theirs), clip)
    in_pytorch(plain, make(plain))
    by_graph(mine, make, **clipping)
    compare(mine, theirs)
    assert not torch.allclose(plain.enter.weight, theirs.enter.weight, rtol=1e-3)


def test_groups_survive_a_file(tmp_path: Path) -> None:
    mine = model()
    training = by_graph(mine, OPTIMIZERS["adamw, groups"])
    training.save(tmp_path / "model")
    loaded = sg.load(tmp_path / "model", "cpu", custom=[copy.deepcopy(mine)])
    for one in (training, loaded):
        one.execute({"x": data()[0][0]}, {"labels": data()[0][1]})
    assert {n: t.numpy().tobytes() for n, t in loaded.named_tensors().items()} == {
        n: t.numpy().tobytes() for n, t in training.named_tensors().items()
    }


class Doubled(torch.optim.SGD):
    """A rule of its own under the numbers of another."""


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(net.parameters())
    in_pytorch(net, optimizer)
    return optimizer


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (stepped, sg.StateError, "the optimizer has made steps"),
        (lambda net: torch.optim.SGD(nn.Linear(3, 7).parameters(), 0.1), sg.ArgumentError, r"of shape \[7, 3\] is not"),
        (lambda net: torch.optim.Adagrad(net.parameters()), sg.DataTypeError, "Adagrad is not one that it knows"),
        (lambda net: Doubled(net.parameters(), 0.1), sg.DataTypeError, "Doubled is not one that it knows"),
        (lambda net: sg.SGDOptimizer(0.1), sg.DataTypeError, "SGDOptimizer is not an optimizer of PyTorch"),
    ],
    ids=["steps", "foreign", "unknown", "subclass", "ours"],
)
def test_what_has_no_equal_is_refused(make: Any, error: type[Exception], words: str) -> None:
    net = model()
    imported = sg.from_torch(net, torch.zeros(ROWS, 4))
    with pytest.raises(error, match=words):
        imported.optimizer(make(net))


def test_only_what_would_be_trained_needs_a_group() -> None:
    net = model()
    imported = sg.from_torch(net, torch.zeros(ROWS, 4))
    trained = [one for one in net.parameters() if one.requires_grad]
    assert imported.optimizer(torch.optim.SGD(trained, 0.1)).groups == ()
    (group,) = imported.optimizer(torch.optim.SGD([one for one in trained if one is not net.norm.bias], 0.1)).groups
    assert group.frozen and group.parameters == (imported.tensors["norm.bias"],)
