"""Optimizer updates in place: the reference rule on every device, one pass over memory on the CPU.

The CPU kernels are PyTorch's fused optimizers where their formula can be adapted to ours. To add one, add a function
to `FUSED` under the optimizer's `rule`. On a GPU an update is recorded as one operator, which is fast to trace. On
CUDA it is one kernel made from the rule (`update_kernel.py`); for the compiler that fuses the step, updates of few
parameters are expanded into the rule's own operators.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import fx

from stepgraph.compiler.kernels.update_kernel import Update, is_ordered, launch, prepare, written
from stepgraph.compiler.program import fake
from stepgraph.optimizers import GradientClippingType, Optimizer, RegularizationType, clipping_factor
from stepgraph.system.torch_private import disable_modes, fused_adam_, fused_adamw_, fused_sgd_

Arrays = list[torch.Tensor]
# By shape, number of buffers and names of live numbers: a rule as code, or None if it must run operator by operator.
Rules = dict[tuple[tuple[int, ...], int, tuple[str, ...]], str | None]
AS_ONE = {"cuda", "mps"}  # where an update is recorded as one operator
TOGETHER = "together"  # all live numbers in one array
AT_ONCE = {  # how many parameter-sized temporaries a rule has at its peak
    **{"sgd": 3, "sgd momentum": 4, "sgd nesterov": 4, "rmsprop": 5, "rmsprop momentum": 5},
    **{"adam": 6, "adam amsgrad": 7, "adamw": 7, "adamw amsgrad": 8},
    **{"lion": 7, "muon": 9, "muon nesterov": 10},
}
MOST_AT_ONCE = 7  # for other rules
MANY = 32  # parameters that a fused step updates with kernels of their own


class _Numbered:
    """Optimizers of recorded steps by number: an operator takes numbers and arrays, no Python objects."""

    def __init__(self) -> None:
        self._numbers: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._optimizers: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()
        self._next = itertools.count()

    def number(self, optimizer: Optimizer) -> int:
        """The number of an optimizer, never that of another one."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = number = next(self._next)
            self._optimizers[number] = optimizer
        return self._numbers[optimizer]

    def __getitem__(self, number: int) -> Optimizer:
        return self._optimizers[number]


_numbered = _Numbered()


def number_of(optimizer: Optimizer) -> int:
    """The number by which operators find an optimizer, while it exists."""
    return _numbered.number(optimizer)


def update(
    optimizer: Optimizer,
    arrays: Update,
    named: Callable[[], SimpleNamespace],
    *,
    expanded: bool = False,
    known: Rules | None = None,
) -> None:
    """Updates parameters and states in place, with the fastest implementation for their device.

    Args:
        optimizer: the rule.
        arrays: what it changes and reads, with the live numbers as the optimizer keeps them.
        named: the live numbers by name.
        expanded: whether to use the reference, for a compiler that turns it into a kernel.
        known: code of the rule from other updates of the same step, to which this one adds its own.
    """
    if arrays.numbers.device.type == "cpu" and _is_fused(optimizer.rule, arrays) and not expanded:
        # The fused kernels traverse memory, not dimensions.
        pairs = zip(arrays.parameters, arrays.gradients, strict=True)
        ordered = [g if g.stride() == p.stride() else g.contiguous() for p, g in pairs]
        settings = (int(optimizer.gradient_clipping_type), int(optimizer.penalty))
        torch.ops.stepgraph.update_(
            arrays.parameters, ordered, _flat(arrays), arrays.numbers, arrays.norm, arrays.finite,
            optimizer.rule, ",".join(optimizer.columns), *settings,
        )  # fmt: skip
        _follow(arrays)
    elif arrays.numbers.device.type not in AS_ONE:
        reference(optimizer, arrays, named())
    else:
        n = named()
        live = [name for name in vars(n) if name != TOGETHER]
        rules = _rules(optimizer, arrays, live, {} if known is None else known)
        torch.ops.stepgraph.update_by_rule_(
            arrays.parameters, arrays.gradients, _flat(arrays), list(arrays.copies), getattr(n, TOGETHER),
            arrays.norm, arrays.finite, number_of(optimizer), ",".join(live), rules,
        )  # fmt: skip


def _is_fused(rule: str, arrays: Update) -> bool:
    """Whether a CPU has a kernel for a rule. PyTorch's for SGD leaves arrays in half precision as they are."""
    wide = all(one.dtype in (torch.float32, torch.float64) for one in arrays.parameters)
    return rule in FUSED and (wide or FUSED[rule] not in (_sgd, _sgd_nesterov, _sgd_momentum_torch))


def _flat(arrays: Update) -> Arrays:
    """The buffers as operators take them."""
    return [array for slot in arrays.states for array in slot]


def _rules(optimizer: Optimizer, arrays: Update, names: Sequence[str], known: Rules) -> list[str]:
    """The update of each parameter as code for a CUDA kernel; empty if it must run operator by operator."""
    given = arrays.parameters if arrays.norm is None else [*arrays.parameters, arrays.norm]
    plain = all(one.is_cuda and one.dtype is torch.float32 and one.is_contiguous() for one in given)
    if not plain or torch.version.hip is not None:
        return []

    def rule(p: torch.Tensor, g: torch.Tensor, state: Any, size: torch.Tensor, live: Any) -> Sequence[torch.Tensor]:
        n = SimpleNamespace(**dict(zip(names, live, strict=True)))
        new, new_state = optimizer.update(p, optimizer.prepare(p, g, size, n), tuple(state), n)
        return [new, *new_state]

    forms = [(tuple(one.shape), len(arrays.states), tuple(names)) for one in arrays.parameters]
    with disable_modes():  # the rule runs once more, outside of a recording
        for shape, states, live in (form for form in dict.fromkeys(forms) if form not in known):
            known[shape, states, live] = written(rule, shape, states, len(live))
    rules = [known[form] for form in forms]
    return [one for one in rules if one is not None] if None not in rules else []


def reference(optimizer: Optimizer, arrays: Update, n: SimpleNamespace) -> None:
    """Updates in place with the optimizer's own rule, one parameter at a time; `n` are the live numbers by name."""
    for i, (parameter, gradient) in enumerate(zip(arrays.parameters, arrays.gradients, strict=True)):
        state = [slot[i] for slot in arrays.states]
        prepared = optimizer.prepare(parameter, gradient.to(parameter.dtype), arrays.norm, n)
        new, new_state = optimizer.update(parameter, prepared, tuple(state), n)
        for old, one in zip((parameter, *state), (new, *new_state), strict=True):
            old.copy_(one if arrays.finite is None else torch.where(arrays.finite, one, old))
    _follow(arrays)


def _follow(arrays: Update) -> None:
    """Rounds the parameters into their copies, if there are any."""
    for copy, parameter in zip(arrays.copies, arrays.parameters, strict=False):
        copy.copy_(parameter)


def named(optimizer: Optimizer, numbers: torch.Tensor) -> SimpleNamespace:
    """The live numbers and values derived from them as device scalars, by name."""
    live = numbers.unbind()
    n = SimpleNamespace(**dict(zip(optimizer.columns, live, strict=True)))
    optimizer.derive(n)
    names, values = zip(*vars(n).items(), strict=True)
    as_given = all(map(operator.is_, values, live))  # a rule may change them too
    # In one array, so that a compiler does not recompute powers wherever they are read.
    together = torch.cat([numbers, *_each(values[len(live) :])] if as_given else _each(values))
    if numbers.is_cuda:
        together = settled(together.float())
    return SimpleNamespace(**dict(zip(names, together.unbind(), strict=True)), **{TOGETHER: together})


def _each(numbers: Sequence[torch.Tensor]) -> Arrays:
    return [number[None] for number in numbers]


@torch.library.custom_op("stepgraph::settled", mutates_args=())
def settled(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers, computed once: a fusing compiler would recompute powers for every element it updates."""
    return numbers.clone()


@settled.register_fake
def _(numbers: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(numbers)


def number_type(device: torch.device) -> torch.dtype:
    """The type of live numbers: float64 as in Python, except on devices without it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _adam(parameters: Arrays, gradients: Arrays, states: Sequence[Arrays], n: SimpleNamespace) -> None:
    # PyTorch adds ε after the bias correction; dividing it by the correction gives our formula.
    correction = 1.0 if n.as_in_torch else math.sqrt(1 - n.beta2**n.time_step)
    largest = states[2] if len(states) == 3 else []
    fused, decay = (fused_adamw_, n.regularization_scale) if n.decoupled else (fused_adam_, n.decay)
    fused(
        parameters, gradients, states[0], states[1], largest, n.steps,
        lr=n.learning_rate, beta1=n.beta1, beta2=n.beta2, weight_decay=decay, eps=n.epsilon / correction,
        amsgrad=bool(largest), maximize=False,
    )  # fmt: skip


def _adamw(parameters: Arrays, gradients: Arrays, states: Sequence[Arrays], n: SimpleNamespace) -> None:
    n.decoupled = True
    _adam(parameters, gradients, states, n)


def _rmsprop(parameters: Arrays, gradients: Arrays, states: Sequence[Arrays], n: SimpleNamespace) -> None:
    for parameter, gradient, velocity in zip(parameters, _decayed(parameters, gradients, n), states[0], strict=True):
        velocity.mul_(n.alpha).addcmul_(gradient, gradient, value=1 - n.alpha)
        parameter.addcdiv_(gradient, velocity.sqrt().add_(n.epsilon), value=-n.learning_rate)


def _sgd(parameters: Arrays, gradients: Arrays, states: Sequence[Arrays], n: SimpleNamespace) -> None:
    fused_sgd_(
        parameters, gradients, [],
        weight_decay=n.decay, momentum=0.0, lr=n.learning_rate, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=False,
    )  # fmt: skip


def _sgd_nesterov(parameters: Arrays, gradients: Arrays, states: Sequence[Arrays], n: SimpleNamespace) -> None:
    fused_sgd_(
        parameters, gradients, states[0],
        weight_decay=n.decay, momentum=n.momentum_scale, lr=n.learning_rate, dampening=0.0, nesterov=True,
        maximize=False, is_first_step=False,
    )  # fmt: skip


def _sgd_momentum_torch(parameters: Arrays, gradients: Arrays, states: Sequence[Arrays], n: SimpleNamespace) -> None:
    fused_sgd_(
        parameters, gradients, states[0],
        weight_decay=n.decay, momentum=n.momentum_scale, lr=n.learning_rate,
        dampening=n.dampening if n.time_step > 1 else 0.0, nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip


def _sgd_momentum(parameters: Arrays, gradients: Arrays, states: Sequence[Arrays], n: SimpleNamespace) -> None:
    for parameter, gradient, momentum in zip(parameters, gradients, states[0], strict=True):
        momentum.mul_(n.momentum_scale).add_(gradient, alpha=n.learning_rate)
        if n.decay:
            momentum.add_(parameter, alpha=n.learning_rate * n.decay)
        parameter.sub_(momentum)


FUSED: dict[str, Callable[[Arrays, Arrays, Sequence[Arrays], SimpleNamespace], None]] = {
    **{name: _adam for name in ("adam", "adam amsgrad", "adam torch", "adam amsgrad torch")},
    **{name: _adamw for name in ("adamw", "adamw amsgrad", "adamw torch", "adamw amsgrad torch")},
    "rmsprop": _rmsprop,
    "sgd": _sgd,
    "sgd momentum": _sgd_momentum,
    "sgd momentum torch": _sgd_momentum_torch,
    "sgd nesterov": _sgd_nesterov,
}

_library = torch.library.Library("stepgraph", "FRAGMENT")
_library.define(
    "update_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] states, Tensor numbers, Tensor? norm, "
    "Tensor? finite, str rule, str names, int clipping, int regularization) -> ()"
)


@torch.library.impl(_library, "update_", "CPU")
def update_on_cpu(
    parameters: Arrays,
    gradients: Arrays,
    states: Arrays,
    numbers: torch.Tensor,
    norm: torch.Tensor | None,
    finite: torch.Tensor | None,
    *settings: Any,
) -> None:
    PreparedUpdate(parameters, states, numbers, *settings)(gradients, norm, finite)


class PreparedUpdate:
    """An update of the same arrays in every call, which are looked at once: that takes as long as a small update."""

    def __init__(
        self,
        parameters: Arrays,
        states: Arrays,
        numbers: torch.Tensor,
        rule: str,
        names: str,
        clipping: int,
        regularization: int,
    ) -> None:
        self._parameters, self._slots = parameters, _slots(states, len(parameters))
        self._kernel, self._names = FUSED[rule], _split(names)
        self._numbers: Any = numbers.numpy().data
        self._step = self._names.index("time_step")
        self._clipping, self._regularization = clipping, regularization
        self._limit = "gradient_clip_max" if clipping == GradientClippingType.BY_VALUE else "maximum_clipping_norm"
        self._decays = regularization == RegularizationType.L2
        steps = [numbers[self._step]] * len(parameters)
        self._settings = SimpleNamespace(steps=steps, decoupled=False, as_in_torch=rule.endswith(" torch"))
        self._known: list[float] = []  # the numbers that the settings were read from
        self._prepares = False

    def __call__(self, gradients: Arrays, norm: torch.Tensor | None, finite: torch.Tensor | None) -> None:
        if finite is not None and not finite:
            return
        n, numbers = self._settings, self._numbers.tolist()
        n.time_step, numbers[self._step] = numbers[self._step], 0.0
        if numbers != self._known:  # most calls change the step alone
            self._read(numbers)
        if self._prepares:
            pairs = zip(self._parameters, gradients, strict=True)
            gradients = [_prepared(p, g, norm, n, self._clipping, self._regularization) for p, g in pairs]
        self._kernel(self._parameters, gradients, self._slots, n)

    def _read(self, numbers: list[float]) -> None:
        """Reads the settings from the live numbers; the step is already there."""
        n, self._known = self._settings, numbers
        live = zip(self._names, numbers, strict=True)
        vars(n).update((name, number) for name, number in live if name != "time_step")
        n.decay = n.regularization_scale if self._decays else 0.0
        penalizes = self._regularization == RegularizationType.L1
        self._prepares = penalizes or n.gradient_rescale != 1 or math.isfinite(getattr(n, self._limit))


@torch.library.register_fake("stepgraph::update_", lib=_library)
def _(*_: object) -> None:
    return None


_library.define(
    "update_by_rule_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] states, Tensor(c!)[] copies, "
    "Tensor numbers, Tensor? norm, Tensor? finite, int optimizer, str names, str[] rules) -> ()"
)
UPDATE = torch.ops.stepgraph.update_by_rule_.default


class Recorded(NamedTuple):
    """The arguments of `update_by_rule_`: arrays, or the nodes of a recorded graph that stand for them.

    Args:
        parameters: see `Update` for this and the other arrays.
        gradients: one per parameter.
        states: by buffer, then by parameter.
        copies: one per parameter, or none.
        numbers: the live numbers and what was derived from them.
        norm: of all gradients, or None.
        finite: whether anything may change, or None.
        optimizer: its number.
        names: those of the numbers, separated by commas.
        rules: the code of each parameter's rule; empty if it must run operator by operator.
    """

    parameters: Sequence[Any]
    gradients: Sequence[Any]
    states: Sequence[Any]
    copies: Sequence[Any]
    numbers: Any
    norm: Any
    finite: Any
    optimizer: int
    names: str
    rules: Sequence[str]

    @property
    def slots(self) -> list[Any]:
        """The buffers by slot."""
        return _slots(self.states, len(self.parameters))

    @property
    def arrays(self) -> Update:
        """The arrays alone."""
        return _arrays(*self[:7])

    @property
    def clips_by_value(self) -> bool:
        """Whether gradients are clipped without being measured."""
        return _numbered[self.optimizer].gradient_clipping_type is GradientClippingType.BY_VALUE

    @property
    def decisive(self) -> tuple[Any, ...]:
        """What decides the operators of a rule that was recorded as code: all but the optimizer's number."""
        return (*self._replace(optimizer=0), self.clips_by_value)

    @property
    def takes_half(self) -> bool:
        """Whether gradients may be in half precision: a kernel reads them, and nothing measures them."""
        return bool(self.rules) and (self.norm is not None or self.clips_by_value)


def recorded(node: fx.Node) -> Recorded | None:
    """The arguments of an update that was recorded as one operator; None for other operators."""
    return Recorded(*node.args) if node.target is UPDATE else None  # type: ignore[arg-type]


@torch.library.impl(_library, "update_by_rule_", "CompositeExplicitAutograd")
def update_by_rule(*given: Any) -> None:
    """One pass over memory if the rule was recorded as code, else `reference` for an optimizer by its number."""
    own = Recorded(*given)
    in_order = all(one.is_contiguous() for one in (*own.parameters, *own.states))
    if own.rules and in_order and all(map(is_ordered, own.copies)):
        _launch(own.arrays, own.rules, own.clips_by_value)
    else:
        expanded_update(*given)


def _launch(update: Update, rules: Sequence[str], by_value: bool) -> None:
    """Updates with kernels made from rules. Gradients that are clipped by their own norms are measured first."""
    ordered = [one if is_ordered(one) else one.contiguous() for one in update.gradients]
    unread = update.numbers[0]
    norms = [unread if update.norm is None else update.norm] * len(ordered)
    if update.norm is None and not by_value:
        ordered = [gradient.float() for gradient in ordered]
        norms = [torch.linalg.vector_norm(gradient) for gradient in ordered]
    launch(update._replace(gradients=ordered), rules, norms)


def expanded_update(*given: Any) -> None:
    """`reference` for an optimizer by its number, on any device."""
    own = Recorded(*given)
    n = SimpleNamespace(**dict(zip(_split(own.names), own.numbers.unbind(), strict=True)))
    reference(_numbered[own.optimizer], own.arrays, n)


def _arrays(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor],
    numbers: torch.Tensor,
    norm: torch.Tensor | None,
    finite: torch.Tensor | None,
) -> Update:
    """The arrays that operators take, as one object."""
    return Update(parameters, gradients, _slots(states, len(parameters)), numbers, copies, norm, finite)


def _slots(states: Sequence[Any], count: int) -> list[Any]:
    """The buffers of `count` parameters by slot."""
    return [states[i : i + count] for i in range(0, len(states), count)]


@torch.library.register_fake("stepgraph::update_by_rule_", lib=_library)
def _(*_: object) -> None:
    return None


def workspace(arguments: Sequence[Any], _: int) -> int:
    """The workspace of `update_by_rule_` in bytes."""
    own = Recorded(*arguments)
    if own.rules:  # only gradients in an order that the kernel cannot follow are copied
        return sum(gradient.nbytes for gradient in own.gradients if not is_ordered(gradient))
    count = AT_ONCE.get(_numbered[own.optimizer].rule.removesuffix(" torch"), MOST_AT_ONCE)
    return count * max(parameter.nbytes for parameter in own.parameters)


_library.define(
    "update_by_kernel_(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] states, Tensor(c!)[] copies, "
    "Tensor numbers, Tensor? norm, Tensor? finite, int kernel) -> ()"
)
BY_KERNEL = torch.ops.stepgraph.update_by_kernel_.default
# By a number made from what they do, which is the same in every run: compiled steps are kept between runs.
_kernels: dict[int, tuple[tuple[str, ...], bool]] = {}


@torch.library.impl(_library, "update_by_kernel_", "CompositeExplicitAutograd")
def launch_kernel(*given: Any) -> None:
    """`update_by_rule` in a fused step, if the rule was recorded as code."""
    *arrays, kernel = given
    _launch(_arrays(*arrays), *_kernels[kernel])


@torch.library.register_fake("stepgraph::update_by_kernel_", lib=_library)
def _(*_: object) -> None:
    return None


def expand_updates(graph: fx.Graph) -> None:
    """Expands updates into the rule's own operators, for a compiler that fuses them with what precedes them.

    Many parameters keep their kernel, if the rule has one: compiling twenty operators for each would take longer than
    the rest of the step.
    """
    kept = remember_updates(graph)
    for node in [one for one in graph.nodes if one.target is UPDATE]:
        if node in kept:
            node.target, node.args = BY_KERNEL, (*Recorded(*node.args)[:7], kept[node])
        else:
            node.target = expanded_update


def remember_updates(graph: fx.Graph) -> dict[fx.Node, int]:
    """The updates that keep their kernels, which fused steps call by number, and begins to assemble these."""
    updates = {node: own for node in graph.nodes if (own := recorded(node)) is not None}
    if sum(len(own.parameters) for own in updates.values()) <= MANY:
        return {}
    with_kernels = {node: own for node, own in updates.items() if own.rules}
    for own in with_kernels.values():
        arrays: Any = fx.map_arg(own[:7], fake)
        prepare(_arrays(*arrays), own.rules)
    return {node: _number(own) for node, own in with_kernels.items()}


def _number(own: Recorded) -> int:
    """The number of a kernel."""
    kernel = tuple(own.rules), own.clips_by_value
    number = int(hashlib.sha256(repr(kernel).encode()).hexdigest()[:15], 16)
    _kernels[number] = kernel
    return number


@cache
def _split(names: str) -> tuple[str, ...]:
    return tuple(names.split(","))


def _decayed(parameters: Arrays, gradients: Arrays, n: SimpleNamespace) -> Arrays:
    return [g.add(p, alpha=n.decay) for p, g in zip(parameters, gradients, strict=True)] if n.decay else gradients


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
        limit = SimpleNamespace(
            maximum_clipping_norm=torch.tensor(n.maximum_clipping_norm, dtype=torch.float32, device="cpu")
        )
        gradient = gradient * clipping_factor(size, limit)
    if n.gradient_rescale != 1:
        gradient = gradient * n.gradient_rescale
    if regularization == RegularizationType.L1:
        gradient = gradient.add(parameter.sign(), alpha=n.regularization_scale)
    return gradient
