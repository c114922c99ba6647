"""Optimizer updates in place: the reference rule on every device, one pass over memory on the CPU.

The CPU kernels are PyTorch's fused optimizers where their formula can be made ours. Adding one is one function in
`FUSED`, named by the optimizer's `rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch

from stepgraph.optimizers import GradientClippingType, Optimizer, RegularizationType, clipping_factor

State = Sequence[torch.Tensor]


def update(
    optimizer: Optimizer,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    norm: torch.Tensor | None,
    numbers: torch.Tensor,
) -> None:
    """Updates `parameter` and `state` in place, by the fastest implementation for where they live."""
    if parameter.device.type == "cpu" and optimizer.rule in FUSED:
        names = ",".join(optimizer.live)
        settings = (int(optimizer.gradient_clipping_type), int(optimizer.regularization_type))
        torch.ops.stepgraph.update_(parameter, gradient, state, norm, numbers, optimizer.rule, names, *settings)
    else:
        reference(optimizer, parameter, gradient, state, norm, numbers)


def reference(
    optimizer: Optimizer,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    norm: torch.Tensor | None,
    numbers: torch.Tensor,
) -> None:
    """Updates in place by the optimizer's own rule."""
    n = named(optimizer, numbers)
    prepared = optimizer.prepare(parameter, gradient, norm, n)
    new, new_state = optimizer.update(parameter, prepared, tuple(state), n)
    parameter.copy_(new)
    for old, one in zip(state, new_state, strict=True):
        old.copy_(one)


def named(optimizer: Optimizer, numbers: torch.Tensor) -> SimpleNamespace:
    """The live numbers as device scalars, by name."""
    return SimpleNamespace(**dict(zip(optimizer.live, numbers.unbind(), strict=True)))


def number_type(device: torch.device) -> torch.dtype:
    """How live numbers are kept: as Python keeps them, except on devices without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def _adam(parameter: torch.Tensor, gradient: torch.Tensor, state: State, n: SimpleNamespace) -> None:
    # PyTorch adds ε after the bias correction; dividing it by the correction gives our formula.
    correction = math.sqrt(1 - n.beta2**n.time_step)
    step = torch.tensor(n.time_step, dtype=torch.float32)
    largest = [state[2]] if len(state) == 3 else []
    torch._fused_adam_(
        [parameter], [gradient], [state[0]], [state[1]], largest, [step],
        lr=n.learning_rate, beta1=n.beta1, beta2=n.beta2, weight_decay=n.decay, eps=n.epsilon / correction,
        amsgrad=bool(largest), maximize=False,
    )  # fmt: skip


def _sgd(parameter: torch.Tensor, gradient: torch.Tensor, state: State, n: SimpleNamespace) -> None:
    torch._fused_sgd_(
        [parameter], [gradient], [],
        weight_decay=n.decay, momentum=0.0, lr=n.learning_rate, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False,
    )  # fmt: skip


def _sgd_nesterov(parameter: torch.Tensor, gradient: torch.Tensor, state: State, n: SimpleNamespace) -> None:
    torch._fused_sgd_(
        [parameter], [gradient], [state[0]],
        weight_decay=n.decay, momentum=n.momentum_scale, lr=n.learning_rate, dampening=0.0, nesterov=True,
        maximize=False, is_first_step=False,
    )  # fmt: skip


def _sgd_momentum(parameter: torch.Tensor, gradient: torch.Tensor, state: State, n: SimpleNamespace) -> None:
    (momentum,) = state
    momentum.mul_(n.momentum_scale).add_(gradient, alpha=n.learning_rate)
    if n.decay:
        momentum.add_(parameter, alpha=n.learning_rate * n.decay)
    parameter.sub_(momentum)


FUSED: dict[str, Callable[[torch.Tensor, torch.Tensor, State, SimpleNamespace], None]] = {
    "adam": _adam,
    "adam amsgrad": _adam,
    "sgd": _sgd,
    "sgd momentum": _sgd_momentum,
    "sgd nesterov": _sgd_nesterov,
}

_library = torch.library.Library("stepgraph", "FRAGMENT")
_library.define(
    "update_(Tensor(a!) parameter, Tensor gradient, Tensor(b!)[] state, Tensor? norm, Tensor numbers, "
    "str rule, str names, int clipping, int regularization) -> ()"
)


@torch.library.impl(_library, "update_", "CPU")
def _update_on_cpu(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    state: State,
    norm: torch.Tensor | None,
    numbers: torch.Tensor,
    rule: str,
    names: str,
    clipping: int,
    regularization: int,
) -> None:
    n = SimpleNamespace(**dict(zip(names.split(","), numbers.tolist(), strict=True)))
    gradient = _prepared(parameter, gradient, norm, n, clipping, regularization)
    # The fused kernels walk memory, not extents.
    FUSED[rule](parameter, gradient if gradient.stride() == parameter.stride() else gradient.contiguous(), state, n)


@torch.library.register_fake("stepgraph::update_", lib=_library)
def _(*_: object) -> None:
    return None


def _prepared(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    norm: torch.Tensor | None,
    n: SimpleNamespace,
    clipping: int,
    regularization: int,
) -> torch.Tensor:
    """`Optimizer.prepare` without the passes that change nothing; L2 is left to the fused kernels as `n.decay`."""
    if clipping == GradientClippingType.BY_VALUE:
        if math.isfinite(n.gradient_clip_max):
            gradient = gradient.clamp(n.gradient_clip_min, n.gradient_clip_max)
    elif math.isfinite(n.maximum_clipping_norm):
        size = torch.linalg.vector_norm(gradient) if norm is None else norm
        limit = SimpleNamespace(maximum_clipping_norm=torch.tensor(n.maximum_clipping_norm))
        gradient = gradient * clipping_factor(size, limit)
    if n.gradient_rescale != 1:
        gradient = gradient * n.gradient_rescale
    if regularization == RegularizationType.L1:
        gradient = gradient.add(parameter.sign(), alpha=n.regularization_scale)
    n.decay = n.regularization_scale if regularization == RegularizationType.L2 else 0.0
    return gradient
