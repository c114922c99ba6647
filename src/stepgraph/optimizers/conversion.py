"""Optimizers of PyTorch as ours: the same formulas, the same numbers, the same groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from stepgraph.errors import ArgumentError, DataTypeError
from stepgraph.optimizers.adam import AdamOptimizer, AdamWOptimizer
from stepgraph.optimizers.base import TORCH, Optimizer
from stepgraph.optimizers.groups import ParameterGroup
from stepgraph.optimizers.rmsprop import RMSPropOptimizer
from stepgraph.optimizers.sgd import SGDOptimizer
from stepgraph.tensors.tensor import Tensor

Given = Mapping[str, Any]
Names = Mapping[Any, "str | Tensor"] | Sequence["str | Tensor"]

WHERE = "from_torch"
FIXED = ("nesterov", "amsgrad", "centered", "decoupled_weight_decay")  # what all groups must have in common


def _sgd(given: Given) -> dict[str, Any]:
    plain = not given["nesterov"] and given["momentum"]
    return {"momentum": given["momentum"], **({"dampening": given["dampening"]} if plain else {})}


def _adam(given: Given) -> dict[str, Any]:
    beta1, beta2 = map(float, given["betas"])
    return {"beta1": beta1, "beta2": beta2, "epsilon": given["eps"]}


def _rmsprop(given: Given) -> dict[str, Any]:
    return {"momentum": given["momentum"], "alpha": given["alpha"], "epsilon": given["eps"]}


NUMBERS: dict[type, Callable[[Given], dict[str, Any]]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.RMSprop: _rmsprop,
}


def from_torch(
    optimizer: torch.optim.Optimizer,
    names: Names | None = None,
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> Optimizer:
    """The same optimizer as one of `torch.optim`: SGD, Adam, AdamW or RMSprop, with its groups.

    It takes the current numbers, not the buffers: create it where training starts. A learning rate factor keeps the
    ratio of each group's learning rate to that of the first; a schedule for that one scales all.

    Args:
        optimizer: PyTorch's.
        names: which parameter of the graph stands for each of PyTorch's: needed only if there are several groups. A
            list in PyTorch's order, group after group, or a dictionary whose keys are PyTorch's parameters, or their
            names if the optimizer was created from `model.named_parameters()`. The values are tensors of the graph,
            or names as it prints them. Without it, PyTorch's own names must be the graph's.
        clip_norm: what the loop passes to `clip_grad_norm_` before each step.
        clip_value: what it passes to `clip_grad_value_`.

    Example:
        >>> from stepgraph.optimizers import from_torch
        >>> weight = torch.nn.Parameter(torch.zeros(2, 3))
        >>> optimizer = from_torch(torch.optim.AdamW([weight], lr=3e-4, weight_decay=0.1))
        >>> optimizer.learning_rate, optimizer.weight_decay, optimizer.formula
        (0.0003, 0.1, 'torch')
    """
    require_known(optimizer)
    members = _members(optimizer.param_groups, names)
    return converted(optimizer, members, (), {"clip_norm": clip_norm, "clip_value": clip_value})


def converted(
    optimizer: torch.optim.Optimizer,
    members: Sequence[Sequence[str | Tensor]],
    frozen: Sequence[Tensor],
    clipping: Mapping[str, float | None],
) -> Optimizer:
    """The same optimizer, for known members of its groups.

    Args:
        optimizer: PyTorch's.
        members: the graph's parameters of each group; those of the first with a learning rate need not be listed.
        frozen: parameters that belong to no group.
        clipping: `clip_norm` and `clip_value`.
    """
    require_known(optimizer)
    read, given = NUMBERS[type(optimizer)], optimizer.param_groups
    # The others are multiples of its learning rate.
    base = next((one for one in given if float(one["lr"]) > 0), given[0])
    _require_alike(given, base)
    decays = any(one["weight_decay"] for one in given)
    groups = [
        ParameterGroup(own, **_group(one, base, read, decays))
        for one, own in zip(given, members, strict=True)
        if one is not base and own
    ]
    groups += [ParameterGroup(frozen, frozen=True)] if frozen else []
    decay = float(base["weight_decay"]) if decays else None
    made = _made(type(optimizer), base, {**read(base), **clipping, "groups": groups, "weight_decay": decay})
    if base["maximize"]:
        made.gradient_rescale = -1.0
    return made


def require_known(optimizer: Any, where: str = WHERE) -> None:
    """Rejects what has no equal, such as a class that changes the rule of one that has."""
    if type(optimizer) not in NUMBERS:
        known = ", ".join(kind.__name__ for kind in NUMBERS)
        raise DataTypeError(where, f"{type(optimizer).__name__} is not one that it knows", fix=f"pass one of {known}")


def _made(kind: type, base: Given, settings: dict[str, Any]) -> Optimizer:
    settings, rate = {**settings, "formula": TORCH}, float(base["lr"])
    if kind is torch.optim.SGD:
        return SGDOptimizer(rate, nesterov=base["nesterov"], **settings)
    if kind is torch.optim.RMSprop:
        return RMSPropOptimizer(rate, centered=base["centered"], **settings)
    is_decoupled = kind is torch.optim.AdamW or base.get("decoupled_weight_decay")
    return (AdamWOptimizer if is_decoupled else AdamOptimizer)(rate, amsgrad=base["amsgrad"], **settings)


def _group(one: Given, base: Given, read: Callable[[Given], dict[str, Any]], decays: bool) -> dict[str, Any]:
    """The settings of a group: its learning rate as a multiple, its decay, and the numbers that differ."""
    rate, first = float(one["lr"]), float(base["lr"])
    found: dict[str, Any] = {"learning_rate_factor": rate / first if first else 1.0}
    if decays:
        found["weight_decay"] = float(one["weight_decay"])
    own, common = read(one), read(base)
    found |= {name: value for name, value in own.items() if value != common[name]}
    if one["maximize"] != base["maximize"]:
        found["gradient_rescale"] = -1.0 if one["maximize"] else 1.0
    return found


def _require_alike(given: Sequence[Given], base: Given) -> None:
    """Rejects groups with other rules; one optimizer has one."""
    for one in given:
        for name in (name for name in FIXED if name in base):
            if one[name] != base[name]:
                raise ArgumentError(
                    WHERE, f"{name} is {base[name]} in one group and {one[name]} in another", fix="use one"
                )
        if bool(one.get("momentum")) != bool(base.get("momentum")):
            raise ArgumentError(WHERE, "some groups have momentum and others do not", fix="use momentum in all of them")


def _members(given: Sequence[Given], names: Names | None) -> list[list[str | Tensor]]:
    """The graph's parameters of each group."""
    if len(given) == 1:
        return [[]]
    if isinstance(names, Sequence) and not isinstance(names, str):
        count = sum(len(one["params"]) for one in given)
        if len(names) != count:
            raise ArgumentError(WHERE, f"there are {len(names)} names for {count} parameters", fix="pass one for each")
        rest = iter(names)
        return [[_escaped(next(rest)) for _ in one["params"]] for one in given]
    if names is None and not all("param_names" in one for one in given):
        raise ArgumentError(
            WHERE,
            f"there are {len(given)} groups, and nothing says which parameters of the graph they have",
            fix="pass names=, a list of the graph's parameters in the optimizer's order",
        )
    return [[_escaped(_named(one, i, names)) for i in range(len(one["params"]))] for one in given]


def _named(group: Given, index: int, names: Mapping[Any, str | Tensor] | Any | None) -> str | Tensor:
    parameter, called = group["params"][index], (*group.get("param_names", ()), *[None] * (index + 1))[index]
    if names is None:
        return called
    found = next((names[key] for key in names if key is parameter or (called is not None and _is(key, called))), None)
    if found is None:
        shown = called or f"a parameter of shape {list(parameter.shape)}"
        raise ArgumentError(WHERE, f"names has no entry for {shown}", fix="add one for every parameter")
    return found


def _is(key: Any, name: str) -> bool:
    return isinstance(key, str) and key == name


def _escaped(name: str | Tensor) -> str | Tensor:
    """A name as a pattern that matches only it."""
    if not isinstance(name, str | Tensor):
        raise DataTypeError(WHERE, f"{name!r} names no parameter", fix="pass a name or a tensor of the graph")
    return name if isinstance(name, Tensor) else "".join(f"[{c}]" if c in "*?[" else c for c in name)
