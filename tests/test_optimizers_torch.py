"""Optimizers made from PyTorch's: 50 steps of each, with groups and a changing learning rate."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.optimizers import from_torch
from tests.optimizer_rules import Net

STEPS, ATOL = 50, 1e-6
Parameters = list[torch.Tensor]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD decay": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
    "SGD maximize": lambda p: torch.optim.SGD(p, 1e-3, weight_decay=0.1, maximize=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "SGD dampening": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5),
    "SGD Nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, eps=1e-3, weight_decay=0.1),
    "Adam AMSGrad": lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.9), eps=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.2),
    "AdamW AMSGrad": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), eps=1e-3, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9, eps=1e-2, weight_decay=0.05),
    "RMSprop momentum": lambda p: torch.optim.RMSprop(p, 0.005, alpha=0.9, eps=1e-2, momentum=0.8),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, 0.005, alpha=0.9, eps=1e-1, momentum=0.8, centered=True),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": [p[1], p[3]], "weight_decay": 0.0}, {"params": [p[2]], "lr": 0.002, "betas": (0.5, 0.9)},
         {"params": [p[0]]}], 0.01, eps=1e-3, weight_decay=0.3,
    ),
    "other groups": lambda p: torch.optim.SGD(
        [{"params": [p[0], p[1]], "lr": 0.0}, {"params": [p[3]], "momentum": 0.5, "maximize": True, "lr": 1e-3},
         {"params": [p[2]], "weight_decay": 0.1}], 0.05, momentum=0.9,
    ),
}  # fmt: skip


def rates(optimizer: Any, step: int) -> None:
    """Changes the learning rate twice: what a buffer holds shows only then."""
    if step in (20, 35):
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else [optimizer.__dict__]
        for group in groups:
            name = "lr" if "lr" in group else "learning_rate"
            rate = float(group[name]) * 0.5
            if isinstance(optimizer, sg.Optimizer):
                optimizer.learning_rate = rate
            else:
                group[name] = rate


def in_torch(net: Net, optimizer: torch.optim.Optimizer, weights: Parameters) -> list[np.ndarray]:
    for step in range(STEPS):
        x, y = torch.from_numpy(net.x[step % 30]), torch.from_numpy(net.y[step % 30])
        rates(optimizer, step)
        hidden = torch.tanh(torch.nn.functional.linear(x, weights[0], weights[1]))
        loss = torch.nn.functional.mse_loss(torch.nn.functional.linear(hidden, weights[2], weights[3]), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [w.detach().numpy() for w in weights]


LATER = ("SGD", "SGD decay", "SGD maximize", "AdamW AMSGrad", "RMSprop")  # the others include what they compute


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.deep if name in LATER else ()) for name in OPTIMIZERS]
)
def test_fifty_steps_equal_pytorchs(name: str) -> None:
    net = Net()
    weights = [torch.from_numpy(w.copy()).requires_grad_() for w in net.start]
    theirs = OPTIMIZERS[name](weights)
    order = [next(i for i, w in enumerate(weights) if w is p) for one in theirs.param_groups for p in one["params"]]
    names = [("FullyConnected1", "FullyConnected2")[i // 2] + (".weights", ".biases")[i % 2] for i in order]
    ours = from_torch(theirs, names)
    training = net.graph(ours)
    for step in range(STEPS):
        rates(ours, step)
        training.execute({"x": net.x[step % 30]}, {"y": net.y[step % 30]})
    for found, expected in zip(net.tensors, in_torch(net, theirs, weights), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=ATOL, atol=ATOL)


def model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))


def two_groups(network: torch.nn.Module) -> torch.optim.Optimizer:
    named = list(network.named_parameters())
    vectors = [(name, one) for name, one in named if one.ndim < 2]
    matrices = [(name, one) for name, one in named if one.ndim >= 2]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], 1e-3)


def test_parameters_are_found_by_position_name_or_parameter() -> None:
    network, tensors = model(), [sg.Tensor((2, 2)) for _ in range(4)]
    optimizer = two_groups(network)
    assert from_torch(optimizer).groups[0].parameters == ("0.bias", "1.bias")
    called = {"0.weight": "a.weights", "1.weight": "b.weights", "0.bias": "a.biases", "1.bias": tensors[3]}
    assert from_torch(optimizer, called).groups[0].parameters == ("a.biases", tensors[3])
    by_parameter = dict(zip(network.parameters(), ("a.w", "a.b", "b.w", "b[0].b"), strict=True))
    plain = torch.optim.SGD([{"params": [network[0].weight]}, {"params": list(network.parameters())[1:]}], 0.1)
    assert from_torch(plain, by_parameter).groups[0].parameters == ("a.b", "b.w", "b[[]0].b")
    assert from_torch(plain, tensors).groups[0].parameters == tuple(tensors[1:])
    assert from_torch(torch.optim.SGD(network.parameters(), 0.1)).groups == ()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda w: from_torch(torch.optim.Adagrad(w)), "Adagrad is not one that it knows"),
        (lambda w: from_torch(3), "int is not one that it knows"),  # type: ignore[arg-type]
        (lambda w: from_torch(torch.optim.SGD([{"params": w[:1]}, {"params": w[1:]}], 0.1)), "nothing says which"),
        (lambda w: from_torch(torch.optim.SGD([{"params": w[:1]}, {"params": w[1:]}], 0.1), ["a"]), "1 names for 4"),
        (lambda w: from_torch(torch.optim.SGD([{"params": w[:1]}, {"params": w[1:]}], 0.1), {w[0]: "a"}), "no entry"),
        (
            lambda w: from_torch(
                torch.optim.SGD([{"params": w[:1], "momentum": 0.5}, {"params": w[1:]}], 0.1), ["a"] * 4
            ),
            "some groups have momentum",
        ),
        (
            lambda w: from_torch(
                torch.optim.Adam([{"params": w[:1], "amsgrad": True}, {"params": w[1:]}], 0.1), ["a"] * 4
            ),
            "amsgrad is True in one group",
        ),
    ],
)
def test_what_cannot_be_the_same_is_refused(make: Callable[[Parameters], Any], words: str) -> None:
    with pytest.raises(sg.StepgraphError, match=words):
        make(list(model().parameters()))


def test_muon_is_pytorchs_up_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(1)
    start, gradients = torch.randn(12, 5, generator=generator), torch.randn(6, 12, 5, generator=generator)
    weight = start.clone().requires_grad_()
    theirs = torch.optim.Muon([weight], lr=0.1, weight_decay=0.2)
    ours, parameter, state = sg.MuonOptimizer(0.1, weight_decay=0.2, scale="original"), start, (torch.zeros(12, 5),)
    numbers = torch.tensor(ours.rows()[0], dtype=torch.float64)
    from stepgraph.compiler.kernels.update import named

    for gradient in gradients:
        weight.grad = gradient
        theirs.step()
        parameter, state = ours.update(parameter, gradient, state, named(ours, numbers))
    torch.testing.assert_close(parameter.float(), weight.detach(), rtol=0, atol=0.03)
    assert (parameter - start).abs().max() > 0.4
