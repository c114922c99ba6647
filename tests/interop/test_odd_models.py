"""Models that are refused, wrapped or changed on import, each with the right outcome.

Every model that is accepted trains for two steps like PyTorch, unless it draws random numbers.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import stepgraph as sg
from tests.interop.training import apart, find

X = torch.arange(24.0).reshape(4, 6) / 24 - 0.4


def model(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module with a forward and some parts: modules, parameters, buffers (tensors) or plain attributes in a list."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            for name, part in parts.items():
                if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                    self.register_buffer(name, part)
                else:
                    setattr(self, name, part[0] if isinstance(part, list) else part)

    Odd.forward = forward  # type: ignore[method-assign]
    torch.manual_seed(0)
    return Odd()


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    logits: torch.Tensor
    cache: Any = None
    states: list[torch.Tensor] = field(default_factory=list)


class Doubled(torch.autograd.Function):
    """A function with a gradient of its own: three times the right one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 6


class Inner(nn.Module):
    """A module in the middle, which holds functions that cannot be divided."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.inner_forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner_forward(self, x)


def nested(forward: Callable[..., Any]) -> nn.Module:
    return model(lambda self, x: self.b(self.inner(self.a(x))), inner=Inner(forward))


def frozen_norm() -> nn.Module:
    made = model(lambda self, x: self.b(self.norm(self.a(x))), norm=nn.BatchNorm1d(6)).train()
    made.norm.eval()
    made.norm.running_mean += 0.5
    return made


def hooked() -> nn.Module:
    made = model(lambda self, x: self.b(self.a(x)))
    made.a.register_forward_hook(lambda module, inputs, output: output * 2)
    return made


def replaced() -> nn.Module:
    made = model(lambda self, x: self.b(self.a(x)))
    made.a.forward = lambda x: x * 3
    return made


def tied() -> nn.Module:
    made = model(lambda self, x: self.b(torch.relu(self.a(x))))
    made.b.weight = made.a.weight
    return made


def frozen() -> nn.Module:
    made = model(lambda self, x: self.b(self.a(x)))
    made.a.requires_grad_(False)
    return made


def in_inference(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(x) if self.training else self.b(self.a(x))


def two_programs(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    y = y * 2 + 1 if self.training else y - 1
    return self.b(y)


def no_grad_module(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = self.a(x)
    return self.b(y)


def no_grad_function(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    with torch.no_grad():
        z = y * 2
    return self.b(y + z)


def in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    z = self.b(y)
    z += y
    z.mul_(0.5).relu_()
    return z


def in_place_on_input(self: Any, x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return self.b(self.a(x) + x)


def in_place_through_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x).clone()
    y[:, 0] = 0
    y[:, 1:3] += 1
    return self.b(y)


def in_place_across(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    view = y[:, :3]
    z = self.b(y + 0)
    y.mul_(2)
    return z + view.sum(1, keepdim=True)


def dictionaries(self: Any, x: torch.Tensor) -> dict[str, Any]:
    y = self.a(x)
    return {"scores": self.b(y), "hidden": {"first": y}, "count": 3, "nothing": None, "index": y.argmax(1)}


def repeated(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(torch.relu(self.a(self.b(x))))


def constants(self: Any, x: torch.Tensor) -> torch.Tensor:
    steps = torch.arange(6, dtype=x.dtype, device=x.device)
    return self.b(self.a(x) * steps + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) + self.scale)


def by_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    y = self.a(x).view(rows, 2, 3).transpose(1, 2).reshape(rows * 3, 2).sum(1).view(rows, 3)
    return self.b(torch.cat([y, y], 1) / rows)


def odd_rows(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x)) * (1.0 / x.shape[0]) + torch.zeros(x.shape[0] + 1).sum()


def replaced_where_masked(self: Any, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    y = self.a(x).clone()
    y[hidden] = self.start
    return self.b(y)


def zero_where_masked(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    y[x > 0] = 0.0
    y[x[:, 0] < -0.5, :] = y.new_ones(1, 6)
    return self.b(y)


def collecting(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not self.known:
        self.known, self.seen = True, []
        self.a.register_forward_hook(lambda _, __, output: self.seen.append(output))
    self.seen.clear()
    return self.b(self.a(x)) + self.seen[0]


def data_dependent(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    return self.b(y) if y.sum() > 0 else y


def six_dimensions(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x).view(-1, 1, 2, 1, 3, 1)
    return self.b(self.identity(y).reshape(x.shape))


def own_function(self: Any, x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(self.a(x))


def counting(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.count += 1
    return self.b(self.a(x)) * self.count


def assigning(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    self.mean = self.mean * 0.9 + y.detach().mean(0) * 0.1
    return self.b(y - self.mean)


def remembering(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last = self.a(x)
    self.calls = 5
    return self.b(self.last)


def remembering_values(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    self.last = self.last * 0.5 + y.detach().mean(0)
    return self.b(y + self.last)


def changing_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    self.total.add_(y.detach().mean(0))
    return self.b(y + self.total)


def new_module(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(nn.ReLU()(self.a(x)))


def keywords(self: Any, *, first: torch.Tensor, flag: bool = False, **others: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(first) + others["second"]) * (2 if flag else 1)


def many(self: Any, *inputs: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(inputs[0]) + inputs[1])


def lists(self: Any, pair: list[torch.Tensor]) -> torch.Tensor:
    return self.b(self.a(pair[0]) + pair[1])


def autocast(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    with torch.autocast("cpu", torch.bfloat16):
        z = y @ y.T
    return self.b(y + z.float().sum(1, keepdim=True))


def scalar_between(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    total = y.mean()
    return self.b(y) * total + total


def eval_in_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.norm.eval()
    with torch.no_grad():
        y = self.norm(self.a(x))
    return self.b(y)


def other_weights(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As people write adapters; with a gain of ones, no comparison in inference would tell."""
    return torch.func.functional_call(self.a, {"weight": self.a.weight * self.gain}, (x,)) + self.b(x)


def made_weights(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.free.weight = self.a(x).mean(0).expand(6, 6) + self.b.weight
    return self.free(x)


def without_weights() -> nn.Module:
    made = model(made_weights, free=nn.Linear(6, 6))
    del made.free.weight
    return made


def array_hook(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y * 2


def modules_in_autocast(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.gelu(self.a(x))
    return y.float()


def through_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    if self.training:
        self.mean.data.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    return self.b(y - self.mean)


def zeros_through_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    weights = torch.zeros(x.shape[0], 6)
    weights.data.masked_fill_(x > 0, 0.5)
    return self.b(self.a(x) * weights)


def result_through_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x) * 2
    y.data.masked_fill_(x > 0, 0.5)
    return self.b(y)


def neighbours(self: Any, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    return self.b(torch.zeros_like(x).index_add(0, edges[1], self.a(x)[edges[0]]))


def caching(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    self.ramp = torch.arange(6.0) if self.ramp is None else self.ramp
    return self.b(self.a(x) * self.ramp)


def warming_up(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += self.training
    return self.b(self.a(x)) * (min(1.0, self.calls / 3) if self.training else 1.0)


def going_on(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x) if self.last is None else self.a(x + self.last)
    self.last = y.detach()
    return self.b(y)


def likely(self: Any, x: torch.Tensor) -> torch.Tensor:
    found = torch.distributions.Normal(self.a(x), F.softplus(self.b(x)) + 0.1)
    return found.log_prob(x) + found.mean


def averaging(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.training:
        with torch.no_grad():
            self.b.weight.lerp_(self.a.weight, 0.1)
    return self.a(x) - self.b(x)


class Scaled(nn.Module):
    """A product with normalized weights, which an attribute holds; at first it is a view of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.effective = self.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.effective = self.weight / self.weight.norm()
        return F.linear(x, self.effective)


class Repeated(nn.Module):
    """Learned rows, as many as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(1, 6))

    def forward(self, count: int) -> torch.Tensor:
        return self.rows.expand(count, 6) / count


def parametrized() -> nn.Module:
    made = model(lambda self, x: self.b(self.a(x)))
    made.a = parametrizations.weight_norm(made.a)
    return made


class Experts(nn.Module):
    """Each row times one of three matrices, by PyTorch's product of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return experts(self, x)


def experts(self: Any, x: torch.Tensor) -> torch.Tensor:
    chosen, order = (x[:, 0] * 5).long().remainder(3).sort(stable=True)
    ends = (chosen[:, None] == torch.arange(3)).sum(0).cumsum(0).to(torch.int32)
    found = F.grouped_mm(F.pad(x[order], (0, 2)), self.weight, offs=ends)  # rows of multiples of 16 bytes
    return torch.zeros_like(found).index_copy(0, order, found)


class Remembering(nn.Module):
    """Returns something first, in one of the modes only."""

    def __init__(self, in_training: bool) -> None:
        super().__init__()
        self.weight, self.in_training = nn.Parameter(torch.randn(6, 6)), in_training

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        memory = {"memory": x.sin()} if self.training is self.in_training else {}
        return {**memory, "output": x @ self.weight}


def with_memory(in_training: bool, *names: str) -> nn.Module:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        found = self.last(self.a(x))
        return self.b(sum(found[name] for name in names if name in found))

    return model(run, last=Remembering(in_training))


Outcome = str | dict[str, str]
ACCEPTED: dict[str, tuple[Callable[[], nn.Module], Any, Outcome]] = {
    # name: model, example, path of the result and how some paths are imported
    "plain": (lambda: model(lambda self, x: self.b(self.a(x))), X, {"a": "native", "b": "native"}),
    "hooks": (hooked, X, {"a": "wrapped"}),
    "hooks that the first call registers": (lambda: model(collecting, known=[False]), X, {"a": "native"}),
    "a replaced forward": (replaced, X, {"a": "wrapped"}),
    "parametrizations": (parametrized, X, {"a": "wrapped"}),
    "tied weights": (tied, X, {"a": "native"}),
    "frozen parameters": (frozen, X, {"a": "native"}),
    "a norm fixed in eval mode": (frozen_norm, X, {"norm": "wrapped"}),
    "other modules in training": (lambda: model(in_inference), X, {"": "wrapped"}),
    "other functions in training": (lambda: model(two_programs), X, {"a": "native"}),
    "a module in no_grad": (lambda: model(no_grad_module), X, {"a": "native"}),
    "functions in no_grad": (lambda: model(no_grad_function), X, {"a": "native"}),
    "eval in forward": (lambda: model(eval_in_forward, norm=nn.BatchNorm1d(6)).train(), X, {"": "wrapped"}),
    "other weights for a call": (
        lambda: model(other_weights, gain=nn.Parameter(torch.ones(6, 6))),
        X,
        {"": "wrapped"},
    ),
    "weights that are computed": (without_weights, X, {"": "wrapped"}),
    "a hook on an array": (lambda: nested(array_hook), X, {"inner": "wrapped", "a": "native"}),
    "modules in autocast": (lambda: nested(modules_in_autocast), X, {"inner": "wrapped", "a": "native"}),
    "a buffer that is changed through its data": (
        lambda: model(through_data, mean=torch.zeros(6)),
        X,
        {"": "wrapped"},
    ),
    "an array that is changed through its data": (lambda: model(zeros_through_data), X, {"a": "native"}),
    "a result that is changed through its data": (lambda: model(result_through_data), X, {"a": "native"}),
    "an attribute that begins as a view of a parameter": (
        lambda: model(lambda self, x: self.b(self.scaled(x)), scaled=Scaled()),
        X,
        {"b": "native"},
    ),
    "spectral_norm of a new layer": (
        lambda: model(lambda self, x: self.b(self.last(x)), last=nn.utils.spectral_norm(nn.Linear(6, 6))),
        X,
        {"b": "native"},
    ),
    "a parameter without elements": (
        lambda: model(lambda self, x: self.b(self.a(x)) + self.none.sum(), none=nn.Parameter(torch.zeros(0, 6))),
        X,
        {"": "wrapped"},
    ),
    "experts": (lambda: model(lambda self, x: self.last(self.a(x)), last=Experts()), X, {"last": "wrapped"}),
    "experts between modules": (
        lambda: model(lambda self, x: experts(self, self.a(x)), weight=nn.Parameter(torch.randn(3, 8, 8))),
        X,
        {"": "wrapped"},
    ),
    "more results in training": (lambda: with_memory(True, "output"), X, {"last": "wrapped", "a": "native"}),
    "more results in inference": (lambda: with_memory(False, "output"), X, {"last": "wrapped", "a": "native"}),
    "more results in training, used": (lambda: with_memory(True, "output", "memory"), X, {"": "wrapped"}),
    "more results in inference, used": (lambda: with_memory(False, "output", "memory"), X, {"": "wrapped"}),
    "a distribution": (lambda: model(likely), X, {"a": "native"}),
    "indices of rows": (
        lambda: model(neighbours),
        {"x": X, "edges": torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 1]])},
        {"a": "native"},
    ),
    "a cache and a counter": (lambda: model(caching, calls=[0], ramp=[None]), X, {"a": "native"}),
    "detach": (lambda: model(lambda self, x: self.b(self.a(x).detach())), X, {"a": "native"}),
    "data": (lambda: model(lambda self, x: self.b(self.a(x).data)), X, {"a": "native"}),
    "in place": (lambda: model(in_place), X, {"a": "native"}),
    "in place on the input": (lambda: model(in_place_on_input), X, {"a": "native"}),
    "in place through a view": (lambda: model(in_place_through_view), X, {"b": "native"}),
    "in place on what another node viewed": (lambda: model(in_place_across), X, {"": "wrapped"}),
    "an in-place activation": (
        lambda: model(lambda self, x: self.b(self.act(self.a(x))), act=nn.ReLU(inplace=True)),
        X,
        {"act": "native"},
    ),
    "nested dictionaries": (lambda: model(dictionaries), X, "scores"),
    "a dataclass": (lambda: model(lambda self, x: Result(self.b(self.a(x)))), X, "logits"),
    "a list in a dataclass": (lambda: model(lambda self, x: Result(x, states=[self.b(self.a(x))])), X, "states.0"),
    "a named tuple": (lambda: model(lambda self, x: Pair(x, self.b(self.a(x)))), X, "second"),
    "a list": (lambda: model(lambda self, x: [None, self.b(self.a(x))]), X, "1"),
    "the same result twice": (lambda: model(lambda self, x: (self.b(self.a(x)),) * 2), X, "1"),
    "a scalar": (lambda: model(lambda self, x: self.b(self.a(x)).mean()), X, "output"),
    "a scalar between modules": (lambda: model(scalar_between), X, {"a": "native"}),
    "its own input": (lambda: model(lambda self, x: (x, self.b(self.a(x)))), X, "1"),
    "a module called twice": (lambda: model(repeated), X, {"a": "native"}),
    "arrays created on the way": (lambda: model(constants, scale=[torch.tensor(2.0)]), X, {"a": "native"}),
    "a parameter of the model": (
        lambda: model(lambda self, x: self.b(self.a(x) * self.gain), gain=nn.Parameter(torch.tensor(1.5))),
        X,
        {"a": "native"},
    ),
    "a parameter as an argument": (
        lambda: model(lambda self, x: self.b(x) + self.a(self.start), start=nn.Parameter(torch.randn(1, 6))),
        X,
        {"a": "native"},
    ),
    "a buffer of the model": (
        lambda: model(lambda self, x: self.b(self.a(x) * self.mask), mask=torch.tensor([1.0, 0, 1, 1, 0, 1])),
        X,
        {"a": "native"},
    ),
    "a parameter where a mask is": (
        lambda: model(replaced_where_masked, start=nn.Parameter(torch.randn(6))),
        {"x": X, "hidden": torch.tensor([True, False, True, False])},
        {"a": "native"},
    ),
    "a number where a mask is": (lambda: model(zero_where_masked), X, {"a": "native"}),
    "indices with sparse gradients": (
        lambda: model(lambda self, x, i: self.b(self.a(x)) + self.rows(i), rows=nn.Embedding(5, 6, sparse=True)),
        {"x": X, "i": torch.tensor([0, 3, 3, 1])},
        {"rows": "native"},
    ),
    "bags with sparse gradients": (
        lambda: model(lambda self, x, i: self.b(self.a(x)) + self.bags(i), bags=nn.EmbeddingBag(5, 6, sparse=True)),
        {"x": X, "i": torch.tensor([[0, 3], [3, 1], [1, 1], [2, 4]])},
        {"bags": "wrapped"},
    ),
    "numbers that follow the batch": (lambda: model(by_rows), X, {"a": "native"}),
    "numbers that follow the batch in another way": (lambda: model(odd_rows), X, {"": "wrapped"}),
    "a module that takes the number of rows": (
        lambda: model(lambda self, x: self.b(self.a(x) + self.start(len(x))), start=Repeated()),
        X,
        {"": "wrapped"},
    ),
    "six dimensions within functions": (
        lambda: model(lambda self, x: self.b(self.a(x).view(-1, 1, 2, 1, 3, 1).mul(2).reshape(x.shape))),
        X,
        {"a": "native"},
    ),
    "six dimensions at a module": (lambda: model(six_dimensions, identity=nn.Identity()), X, {"": "wrapped"}),
    "a gradient of its own": (lambda: nested(own_function), X, {"inner": "wrapped", "a": "native"}),
    "vmap": (lambda: model(lambda self, x: self.b(torch.vmap(lambda row: self.a(row) * 2)(x))), X, {"": "wrapped"}),
    "a gradient as a function": (
        lambda: model(lambda self, x: self.b(torch.func.grad(lambda z: self.a(z).square().sum())(x))),
        X,
        {"": "wrapped"},
    ),
    "in-place functions": (lambda: model(lambda self, x: self.b(F.relu_(self.a(x)))), X, {"a": "native"}),
    "a changing buffer": (lambda: model(counting, count=torch.ones(1)), X, {"": "wrapped"}),
    "an assigned buffer": (lambda: model(assigning, mean=torch.zeros(6)), X, {"": "wrapped"}),
    "attributes": (lambda: model(remembering, last=[None], calls=[0]), X, {"a": "native"}),
    "an attribute that is assigned": (lambda: model(remembering_values, last=[torch.zeros(6)]), X, {"": "wrapped"}),
    "an attribute that is changed": (lambda: model(changing_attribute, total=[torch.zeros(6)]), X, {"": "wrapped"}),
    "a compiled module": (
        lambda: model(lambda self, x: self.b(self.c(self.a(x))), c=torch.compile(nn.Linear(6, 6))),
        X,
        {"a": "native"},
    ),
    "a module made in forward": (lambda: model(new_module), X, {"a": "native"}),
    "unused parameters": (lambda: model(lambda self, x: self.b(x)), X, {"b": "native"}),
    "keyword arguments": (lambda: model(keywords), {"first": X, "flag": True, "second": X + 1}, {"a": "native"}),
    "positional arguments": (lambda: model(many), (X, X + 1), {"a": "native"}),
    "lists of inputs": (lambda: model(lists), {"pair": [X, X + 1]}, {"a": "native"}),
    "autocast": (lambda: model(autocast), X, {"a": "native"}),
    "complex numbers within functions": (
        lambda: model(lambda self, x: self.b(torch.fft.fft(self.a(x)).real)),
        X,
        {"a": "native"},
    ),
    "complex numbers at a module": (
        lambda: nested(lambda self, x: nn.Identity()(torch.fft.fft(self.a(x))).abs()),
        X,
        {"inner.a": "native"},
    ),
    "iteration": (
        lambda: model(lambda self, x: self.b(torch.stack([row * 2 for row in self.a(x).T], 1))),
        X,
        {"a": "native"},
    ),
    "one row": (lambda: model(lambda self, x: self.b(self.a(x).squeeze(0)) + self.a.bias), X[:1], {"a": "native"}),
    "an identity": (lambda: model(lambda self, x: self.b(self.same(self.a(x))), same=nn.Identity()), X, "output"),
    "double precision": (lambda: model(lambda self, x: self.b(self.a(x))).double(), X.double(), {"a": "native"}),
    "a sequence": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Tanh())),
        X,
        {"1.0": "native"},
    ),
}


def batch(example: Any, seed: int) -> Any:
    """Other numbers of the same shapes."""
    generator = torch.Generator().manual_seed(seed)

    def other(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return torch.randn(value.shape, generator=generator, dtype=value.dtype)
        if isinstance(value, list | tuple):
            return type(value)(map(other, value))
        return {name: other(one) for name, one in value.items()} if isinstance(value, dict) else value

    return other(example)


def run(made: nn.Module, example: Any) -> Any:
    with torch.compiler.set_stance("force_eager"):
        if isinstance(example, dict):
            return made(**example)
        return made(*example) if isinstance(example, tuple) else made(example)


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return [array for part in parts for array in flat(part)]


def at(output: Any, path: str) -> torch.Tensor:
    for key in path.split(".") if path != "output" else []:
        if not key.isdigit() and not isinstance(output, dict):
            output = getattr(output, key)
        else:
            output = find(output, key)
    return output


def imported_as(name: str) -> tuple[nn.Module, sg.Imported, str]:
    """A model of the table, imported as the table says, and the path of its result."""
    make, example, outcome = ACCEPTED[name]
    made = make()
    before = {path: module.training for path, module in made.named_modules()}
    attributes = {path: set(vars(module)) for path, module in made.named_modules()}
    path = outcome if isinstance(outcome, str) else "output"
    imported = sg.from_torch(made, batch(example, 0), outputs=[path], share=False)
    assert {one: module.training for one, module in made.named_modules()} == before
    assert {one: set(vars(module)) for one, module in made.named_modules()} == attributes
    hows = {row.path: row.how for row in imported.rows if row.how != "glue"}
    for one, how in ({} if isinstance(outcome, str) else outcome).items():
        assert hows[one] == how, imported
    return made, imported, path


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_odd_model_is_imported_and_left_as_it_was(name: str) -> None:
    made, imported, _ = imported_as(name)
    assert list(imported.state_dict()) == list(made.state_dict())


@pytest.mark.parametrize("in_training", [True, False])
def test_a_model_with_other_results_in_a_mode_as_one_node(in_training: bool) -> None:
    """What only one mode returns is no result of the node, and a checkpoint says so."""
    made = Remembering(in_training)
    imported = sg.from_torch(made, X, outputs=["output"], whole=True)
    assert list(imported.outputs) == ["output"] and imported.layers[""].results == ("output",)
    graph = sg.InferenceGraph([imported.graph])
    graph.add_inputs(imported.inputs)
    graph.compile("cpu")
    found = graph.execute(dict.fromkeys(imported.inputs, X)).result.torch()
    assert apart(found, X @ made.weight.detach()) < 1e-6


UNSEEN = ("eval in forward", "other weights for a call", "a hook on an array")  # inference would not show them


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in UNSEEN else pytest.mark.deep) for name in ACCEPTED]
)
def test_an_odd_model_trains_like_pytorch(name: str) -> None:
    made, imported, path = imported_as(name)
    example, output = ACCEPTED[name][1], imported.outputs[path]
    labels = sg.Tensor(output.descriptor)
    training = imported.training(
        sg.LossLayer.mean_squared_error(reduction_type=sg.ReductionType.MEAN),
        sg.SGDOptimizer(0.1),
        labels,
    )
    training.compile("cpu", deterministic=True)
    trained = [p for p in made.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in (1, 2):
        data = batch(example, step)
        shape = output.descriptor.at(flat(data)[0].shape[0]).shape
        target = torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=output.data_type.torch)
        arrays = dict(zip(imported.inputs, flat(copy.deepcopy(data)), strict=False)) if imported.inputs else {}
        ours = float(training.execute(arrays, {"labels": target}).loss)
        result = at(run(made, copy.deepcopy(data)), path)
        theirs = F.mse_loss(result.reshape(target.shape), target)
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
        assert ours == pytest.approx(float(theirs.detach()), rel=1e-5), (name, step)
    state, expected = imported.state_dict(), made.state_dict()
    assert list(state) == list(expected)
    for one in expected:
        assert apart(state[one], expected[one]) < 1e-5, one


def item(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x)) * self.a(x).mean().item()


def masked(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x)[x[:, 0] > 0])


def numpy(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x)) + float(self.a(x).detach().numpy().sum())


def tolist(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x)) * x.sum(1).tolist()[0]


def shaken(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x)) * (random.random() if self.training else 1)


def mixed(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(x) * float(np.random.beta(0.5, 0.5))


def drop_layers(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x)) if not self.training or torch.rand([]) < 0.5 else self.a(x)


def other_device(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(self.a(x).to("meta"))


def cumulative() -> nn.Module:
    return model(lambda self, x: self.norm(self.a(x)), norm=nn.BatchNorm1d(6, momentum=None))


def scripted() -> nn.Module:
    with pytest.warns(DeprecationWarning):
        return torch.jit.script(nn.Sequential(nn.Linear(6, 6)))


def on_meta() -> nn.Module:
    return nn.Linear(6, 6, device="meta")


REFUSED: dict[str, tuple[Callable[[], Any], Any, dict[str, Any], type[Exception], str]] = {
    # name: model, example, settings, error, what it says
    "if": (lambda: model(data_dependent), X, {}, sg.StateError, "depends on the data"),
    "item": (lambda: model(item), X, {}, sg.StateError, "depends on the data"),
    "a mask as index": (lambda: model(masked), X, {}, sg.StateError, "depends on the data"),
    "numpy": (lambda: model(numpy), X, {}, sg.StepgraphError, "test_odd_models.py"),
    "tolist": (lambda: model(tolist), X, {}, sg.StateError, "depends on the data"),
    "nonzero": (lambda: model(lambda self, x: x.nonzero().float()), X, {}, sg.StateError, "depends on the data"),
    "if, in a module": (lambda: nested(data_dependent_inner), X, {}, sg.StateError, "test_odd_models.py"),
    "layers dropped at random": (lambda: model(drop_layers), X, {}, sg.StateError, "depends on the data"),
    "Python's random numbers": (lambda: model(shaken), X, {}, sg.ArgumentError, "Python's random"),
    "NumPy's random numbers, in a module": (lambda: nested(mixed), X, {}, sg.ArgumentError, "numpy.random"),
    "a factor that grows": (lambda: model(warming_up, calls=[0]), X, {}, sg.StateError, "assigned   calls"),
    "a state between calls": (lambda: model(going_on, last=[None]), X, {}, sg.StateError, "assigned   last"),
    "a complex buffer": (
        lambda: model(lambda self, x: self.a(x), turns=torch.ones(3, dtype=torch.complex64)),
        X,
        {},
        sg.DataTypeError,
        "view_as_real",
    ),
    "a lazy module": (lambda: nn.LazyLinear(3), X, {}, sg.StateError, "call the module once"),
    "a module on the meta device": (on_meta, X, {}, sg.StateError, "meta device"),
    "a scripted module": (scripted, X, {}, sg.DataTypeError, "scripted"),
    "a cumulative average": (cumulative, X, {}, sg.ArgumentError, "momentum"),
    "no module": (lambda: lambda x: x, X, {}, sg.DataTypeError, "not a torch.nn.Module"),
    "no arrays": (lambda: nn.Linear(6, 6), {}, {}, sg.ArgumentError, "no array"),
    "another argument": (lambda: nn.Linear(6, 6), {"y": X}, {}, sg.ArgumentError, "does not run on the example"),
    "another shape": (lambda: nn.Linear(6, 6), X.T, {}, sg.ArgumentError, "does not run on the example"),
    "an object as argument": (lambda: nn.Linear(6, 6), {"input": object()}, {}, sg.DataTypeError, "object"),
    "a scalar as input": (lambda: nn.Linear(6, 6), torch.tensor(1.0), {}, sg.ArgumentError, "0 dimensions"),
    "an unknown output": (lambda: model(dictionaries), X, {"outputs": ["logits"]}, sg.UnknownNameError, "scores"),
    "an output that is None": (lambda: model(dictionaries), X, {"outputs": ["nothing"]}, sg.UnknownNameError, "scores"),
    "an output that is an int": (
        lambda: model(dictionaries),
        X,
        {"outputs": ["count"]},
        sg.UnknownNameError,
        "scores",
    ),
    "outputs as a text": (lambda: model(dictionaries), X, {"outputs": "scores"}, sg.DataTypeError, "list"),
    "integers alone": (lambda: model(lambda self, x: x.argmax(1)), X, {}, sg.ArgumentError, "floating-point"),
    "nothing": (lambda: model(lambda self, x: None), X, {}, sg.ArgumentError, "floating-point"),
    "a text": (lambda: model(lambda self, x: "text"), X, {}, sg.ArgumentError, "floating-point"),
    "a wrong depth": (lambda: nn.Linear(6, 6), X, {"depth": -1}, sg.ArgumentError, "depth"),
    "an exception": (lambda: model(lambda self, x: 1 / 0), X, {}, sg.ArgumentError, "ZeroDivisionError"),
    "other dimensions for other rows": (lambda: model(other_device), X, {}, sg.StepgraphError, ""),
}


def data_dependent_inner(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.a(x) if x.sum() > 0 else x


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_is_refused_with_a_reason_and_left_as_it_was(name: str) -> None:
    make, example, settings, kind, says = REFUSED[name]
    made = make()
    call, apply = nn.Module.__call__, vars(torch.autograd.Function)["apply"]
    before = {k: v.clone() for k, v in made.state_dict().items()} if name not in ("a lazy module", "no module") else {}
    with pytest.raises(kind) as raised:
        sg.from_torch(made, example, **settings)
    assert says in str(raised.value), str(raised.value)
    assert (nn.Module.__call__, vars(torch.autograd.Function)["apply"]) == (call, apply)
    for key, value in before.items():
        assert value.is_meta or torch.equal(made.state_dict()[key], value)


def test_a_parameter_that_a_model_averages_is_refused_for_that() -> None:
    imported = sg.from_torch(model(averaging), X)
    training = imported.training(sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1), sg.Tensor((sg.BATCH, 6)))
    with pytest.raises(sg.StateError, match=r"changes the parameter 'b.weight' in place.*\n.*make it a buffer"):
        training.compile("cpu")


RANDOM: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "dropout": lambda self, x: self.b(F.dropout(self.a(x), 0.5, self.training)),
    "noise": lambda self, x: self.b(self.a(x) + torch.randn_like(x)),
    "uniform": lambda self, x: self.b(self.a(x) * torch.rand(x.shape[0], 1)),
    "bernoulli": lambda self, x: self.b(self.a(x) * x.new_empty(x.shape[0], 1).bernoulli_(0.5)),
    "attention": lambda self, x: self.b(
        F.scaled_dot_product_attention(*[self.a(x).view(-1, 2, 3)] * 3, dropout_p=0.3 * self.training).flatten(1)
    ),
}


@pytest.mark.parametrize("name", ["dropout", *(pytest.param(one, marks=pytest.mark.deep) for one in RANDOM)])
def test_random_numbers_come_from_the_graphs_stream(name: str) -> None:
    def losses() -> list[float]:
        imported = sg.from_torch(model(RANDOM[name]), X, check=name in ("dropout", "attention"))
        labels = sg.Tensor((sg.BATCH, 6))
        training = imported.training(sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1), labels)
        training.compile("cpu", deterministic=True)
        sg_seed = training.execute({"x": X}, {"labels": X})
        return [float(sg_seed.loss), *(float(training.execute({"x": X}, {"labels": X}).loss) for _ in range(2))]

    random.seed(0)
    state = torch.get_rng_state()
    sg.set_seed(3)
    first = losses()
    torch.manual_seed(5)
    sg.set_seed(3)
    assert losses() == first and len(set(first)) == 3
    torch.set_rng_state(state)


@pytest.mark.parametrize("frozen", [False, True])
def test_only_the_optimizer_changes_parameters_that_share_memory(frozen: bool) -> None:
    made = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), Scaled())
    made.requires_grad_(not frozen)
    before = {name: one.detach().clone() for name, one in made.named_parameters()}
    imported = sg.from_torch(nn.Sequential(made, nn.Linear(6, 6)), X)
    labels = sg.Tensor((sg.BATCH, 6))
    training = imported.training(sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1 if frozen else 0.0), labels)
    training.compile("cpu")
    for _ in range(2):
        training.execute({"input": X}, {"labels": X})
    assert all(torch.equal(one, before[name]) for name, one in made.named_parameters())


def in_place_through_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.view.mul_(0.9)
    return self.a(x) + self.b(x)


def test_a_parameter_that_is_changed_under_another_name_is_refused() -> None:
    made = model(in_place_through_attribute)
    made.view = made.a.weight.data
    layer = sg.TorchLayer(made)
    for wire in (lambda: sg.from_torch(made, X), *[lambda: sg.Graph().node(layer, sg.Tensor((4, 6)))] * 2):
        with pytest.raises(sg.StateError, match=r"changes the parameter 'a.weight' in place, as 'view'"):
            wire()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_refused_by_name(hook: str, whole: bool) -> None:
    made = model(lambda self, x: self.b(self.a(x)))
    handle = getattr(made.a.weight, hook)(lambda gradient: None)
    with pytest.raises(sg.StateError, match=r"parameter 'a\.weight' has a hook on its gradient"):
        sg.from_torch(made, X, whole=whole)
    handle.remove()
    sg.from_torch(made, X, whole=whole)


def projected(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.b(x @ torch.randn(6, 6, generator=torch.Generator().manual_seed(7)))


def seeded(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return self.b(self.a(x)[:, torch.randperm(6)])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("forward", [projected, seeded])
def test_numbers_of_a_seed_in_the_model_are_refused(forward: Any, whole: bool) -> None:
    """PyTorch draws the same ones in every call; the graph's stream would draw others."""
    with pytest.raises(sg.StateError, match=r"generator with a seed of its own[\s\S]*register a buffer"):
        sg.from_torch(model(forward), X, whole=whole)


@pytest.mark.parametrize("whole", [False, True])
def test_what_only_training_draws_is_named_then(whole: bool) -> None:
    def mixed(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.b(x * torch.distributions.Beta(0.4, 0.4).sample() if self.training else x)

    imported = sg.from_torch(model(mixed), X, whole=whole)
    training = imported.training(sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1), sg.Tensor((sg.BATCH, 6)))
    with pytest.raises(sg.ArgumentError, match=r"random operator aten\._sample_dirichlet[\s\S]*use torch\.rand"):
        training.compile("cpu")
        training.execute({"x": X}, {"labels": X})


@pytest.mark.parametrize("whole", [False, True])
def test_an_operator_without_an_answer_is_named(whole: bool) -> None:
    made = model(lambda self, x: self.b(torch.poisson(self.a(x).abs())))
    with pytest.raises(sg.ArgumentError, match=r"random operator aten\.poisson.*[\s\S]*\n.*torch\.rand"):
        sg.from_torch(made, X, whole=whole)
