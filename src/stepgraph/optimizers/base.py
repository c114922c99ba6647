"""What all optimizers do once: spellings, ranges, live numbers, groups, clipping, rescaling, regularization.

A rule sees one parameter: `update(parameter, gradient, state, numbers)` returns the new parameter and the new
state. All hyperparameters are live: they enter the compiled step as device scalars, so assigning one takes effect in
the next update and never recompiles anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from stepgraph.errors import ArgumentError, StateError
from stepgraph.optimizers.groups import FROZEN, UNCLIPPED, ParameterGroup, checked
from stepgraph.optimizers.settings import (
    CLIPPING,
    GradientClippingType,
    OptimizerDescriptor,
    RegularizationType,
    check_bounds,
    in_range,
    switch,
)
from stepgraph.optimizers.spelling import Alias, annotated, documented, stored, unknown
from stepgraph.tensors.tensor import Tensor

Arrays = tuple[torch.Tensor, ...]
Groups = ParameterGroup | Sequence[ParameterGroup]

ML_COMPUTE, TORCH = "ml compute", "torch"  # whose formula is used where the two differ


class Optimizer:
    """Base of the optimizers.

    Args:
        learning_rate: the step size, or an `OptimizerDescriptor` with all shared settings.
        weight_decay: λ. `AdamWOptimizer`, `LionOptimizer` and `MuonOptimizer` shrink the parameters directly, by
            `lr λ W`; the others add `λ W` to the gradient, as `torch.optim` does. If it is left out, it is 0.
        clip_norm: scales all gradients together so that their norm is at most this.
        clip_value: limits each element of a gradient to this magnitude.
        groups: parameters with numbers of their own: `ParameterGroup`s, or `DECAY_MATRICES_ONLY`.
        settings: ML Compute's spellings of settings.

    Example:
        >>> optimizer = AdamWOptimizer(3e-4, weight_decay=0.1, clip_norm=1.0, groups=DECAY_MATRICES_ONLY)
        >>> optimizer.learning_rate = 1e-4  # the next update uses it
    """

    slots: tuple[str, ...] = ()
    rule: str = ""
    decouples_decay: ClassVar[bool] = False
    is_elementwise: ClassVar[bool] = False  # whether the rule computes each element from the same element of all arrays
    selecting: ClassVar[tuple[str, ...]] = ()  # settings that select parameters
    live: tuple[str, ...] = (
        "learning_rate",
        "gradient_rescale",
        "gradient_clip_max",
        "gradient_clip_min",
        "maximum_clipping_norm",
        "custom_global_norm",
        "regularization_scale",
        "time_step",
    )

    learning_rate: float
    gradient_rescale: float
    gradient_clip_max: float
    gradient_clip_min: float
    maximum_clipping_norm: float
    custom_global_norm: float
    regularization_scale: float
    applies_gradient_clipping: bool
    gradient_clipping_type: GradientClippingType
    regularization_type: RegularizationType
    groups: tuple[ParameterGroup, ...]
    time_step: int
    version: int
    time_version: int

    def __init__(
        self,
        learning_rate: float | OptimizerDescriptor | None = None,
        *,
        weight_decay: float | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        groups: Groups = (),
        **settings: Any,
    ) -> None:
        where = type(self).__name__
        descriptor = settings.pop("descriptor", None)
        if settings:
            raise unknown(type(self), next(iter(settings)))
        given = learning_rate if descriptor is None else descriptor
        if given is None or (descriptor is not None and learning_rate is not None):
            problem = "there is no learning rate" if given is None else "descriptor and learning_rate are both passed"
            raise ArgumentError(where, problem, fix=f"write {where}(1e-3)")
        if not isinstance(given, OptimizerDescriptor):
            in_range(where, "learning_rate", given)
        shared = given if isinstance(given, OptimizerDescriptor) else OptimizerDescriptor(given)
        shared = _decaying(where, shared, weight_decay, self.decouples_decay)
        shared = _clipping(where, shared, clip_norm, clip_value)
        own = [name for name in self.live if name not in Optimizer.live]
        self.groups = checked(where, groups, ["gradient_rescale", *stored(type(self)), *own])
        if self.groups and not self.decouples_decay:
            shared = _grouped(where, shared, self.groups)
        self.time_step = 1
        for one in fields(shared):
            setattr(self, one.name, getattr(shared, one.name))

    def spelled(self, settings: dict[str, Any], **documented: Any) -> tuple[Any, ...]:
        """The values of settings that have an alias, from whichever spelling was passed; takes ML Compute's out."""
        found = []
        for name, value in documented.items():
            other = getattr(type(self), name).stored
            if other in settings and value:
                raise ArgumentError(type(self).__name__, f"{name} and {other} are both passed", fix=f"pass only {name}")
            found.append(settings.pop(other, value))
        return tuple(found)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(type(self), name, None), Alias | property):
            object.__setattr__(self, name, value)
            return
        where = type(self).__name__
        if name in self.live:
            in_range(where, name, value)
        elif name == "applies_gradient_clipping":
            switch(where, name, value)
        elif name in self.__dict__:
            raise StateError(where, f"{name} cannot change after construction", fix="create a new optimizer")
        elif not hasattr(type(self), name) and name not in annotated(type(self)):
            raise unknown(type(self), name)
        if "maximum_clipping_norm" in self.__dict__:
            check_bounds(where, SimpleNamespace(**{**self.__dict__, name: value}))
        self._require_clipping(name)
        if name == "time_step" and int(value) != value:
            raise ArgumentError(where, f"time_step is {value}, not an integer", fix="count updates from 1")
        self.__dict__[name] = value
        # Graphs compare these counters to detect assignments. Each graph counts its own time steps.
        self.__dict__["version"] = self.__dict__.get("version", 0) + 1
        if name == "time_step":
            self.__dict__["time_version"] = self.version

    def __copy__(self) -> Optimizer:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__, groups=tuple(group.copy() for group in self.groups))
        return new

    def _require_clipping(self, name: str) -> None:
        """Rejects an assigned bound that would have no effect."""
        if name not in self.__dict__ or name not in CLIPPING:
            return
        by_value = self.gradient_clipping_type is GradientClippingType.BY_VALUE
        if by_value != (name != "maximum_clipping_norm"):
            kind = self.gradient_clipping_type.debug_description.lower()
            raise StateError(
                type(self).__name__, f"it clips {kind}, which does not use {name}", fix="create a new optimizer"
            )
        if not self.applies_gradient_clipping:
            raise StateError(
                type(self).__name__,
                f"{name} is assigned, but clipping is disabled",
                fix="assign applies_gradient_clipping = True first",
            )

    # Documented spellings of shared settings

    @property
    def weight_decay(self) -> float:
        """λ. To assign it later, create the optimizer with one; 0.0 is enough."""
        decays = self.decouples_decay or self.regularization_type is RegularizationType.L2
        return self.regularization_scale if decays else 0.0

    @weight_decay.setter
    def weight_decay(self, value: float) -> None:
        where = type(self).__name__
        in_range(where, "weight_decay", value)
        if not self.decouples_decay and self.regularization_type is not RegularizationType.L2:
            raise StateError(
                where, "it was created without weight decay", fix=f"create it as {where}(…, weight_decay=0.0)"
            )
        self.regularization_scale = value

    @property
    def clip_norm(self) -> float | None:
        """The largest norm of all gradients together; None if they are not clipped so. Assign None to disable it."""
        clips = self.applies_gradient_clipping and self.needs_global_norm
        return self.maximum_clipping_norm if clips else None

    @clip_norm.setter
    def clip_norm(self, value: float | None) -> None:
        self._clip("clip_norm", GradientClippingType.BY_GLOBAL_NORM, value)

    @property
    def clip_value(self) -> float | None:
        """The largest magnitude of an element; None if elements are not clipped so. Assign None to disable it."""
        by_value = self.gradient_clipping_type is GradientClippingType.BY_VALUE
        return self.gradient_clip_max if self.applies_gradient_clipping and by_value else None

    @clip_value.setter
    def clip_value(self, value: float | None) -> None:
        self._clip("clip_value", GradientClippingType.BY_VALUE, value)

    def _clip(self, name: str, kind: GradientClippingType, value: float | None) -> None:
        where = type(self).__name__
        if value is not None:
            in_range(where, name, value)
        if self.gradient_clipping_type is not kind:
            other = f", but to clip {self.gradient_clipping_type.debug_description.lower()}"
            problem = f"it was created without {name}{other if self.applies_gradient_clipping else ''}"
            raise StateError(where, problem, fix=f"create it as {where}(…, {name}=1.0)")
        self.applies_gradient_clipping = value is not None
        if value is not None and kind is GradientClippingType.BY_VALUE:
            self.__dict__.update(gradient_clip_max=value, gradient_clip_min=-value)
        elif value is not None:
            self.maximum_clipping_norm = value

    # What a graph reads

    @property
    def settings(self) -> dict[str, Any]:
        """Everything the optimizer was created with or was assigned since, including its time step; without groups."""
        derived = ("slots", "rule", "live", "groups", "version", "time_version")
        return {name: value for name, value in self.__dict__.items() if name not in derived}

    @classmethod
    def accepted(cls) -> set[str]:
        """The names of all settings that can be passed, in every spelling."""
        return {*documented(cls), *stored(cls).values()}

    def require_momentum(self) -> None:
        """Rejects momentum that only a group has: then there is no buffer for it."""
        if "momentum" not in self.slots and any({"momentum", "momentum_scale"} & {*one.numbers} for one in self.groups):
            raise ArgumentError(
                type(self).__name__, "a group has momentum, but the optimizer has none", fix="pass momentum"
            )

    def adopt(self, other: Optimizer) -> None:
        """Copies the live numbers of an optimizer with the same rule, including its time step, and those of groups."""
        names = (*self.live, "applies_gradient_clipping")
        self.__dict__.update({name: other.__dict__[name] for name in names})
        self.__dict__["version"] += 1  # not the time's version: each graph counts its own steps
        for mine, theirs in zip(self.groups, other.groups, strict=True):
            mine.adopt({name: value for name, value in theirs.settings.items() if name in mine.settings})

    def numbers(self) -> dict[str, float]:
        """The live numbers as the compiled step reads them; disabled clipping becomes infinite bounds."""
        values = {name: float(getattr(self, name)) for name in self.live}
        return values if self.applies_gradient_clipping else values | UNCLIPPED

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the numbers in a row."""
        return (*self.live, FROZEN) if self.groups else self.live

    def rows(self) -> list[list[float]]:
        """The live numbers: a row for parameters without a group, then one per group."""
        whole = self.numbers()
        if not self.groups:
            return [list(whole.values())]
        other = stored(type(self))
        return [
            list(one.values()) for one in (whole | {FROZEN: 0.0}, *(group.row(whole, other) for group in self.groups))
        ]

    @property
    def selections(self) -> tuple[ParameterGroup, ...]:
        """The groups, and other settings that select parameters, as groups."""
        return (*self.groups, *(ParameterGroup(getattr(self, name)) for name in self.selecting))

    @property
    def group_version(self) -> int:
        """Changes when a group is assigned."""
        return sum(group.version for group in self.groups)

    def slots_of(self, tensor: Tensor, names: Sequence[str]) -> tuple[str, ...]:
        """The buffers that a parameter with these names has."""
        return self.slots

    def cuts(self, slots: Sequence[str]) -> bool:
        """Whether parts of a parameter with these buffers can be updated by themselves."""
        return self.is_elementwise and self.gradient_clipping_type is not GradientClippingType.BY_NORM

    @property
    def penalty(self) -> RegularizationType:
        """The penalty added to the gradient: none if the decay is decoupled from it."""
        return RegularizationType.NONE if self.decouples_decay else self.regularization_type

    @property
    def needs_global_norm(self) -> bool:
        """Whether an update must wait until every gradient is known."""
        return self.gradient_clipping_type is GradientClippingType.BY_GLOBAL_NORM

    def prepare(
        self, parameter: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor | None, n: SimpleNamespace
    ) -> torch.Tensor:
        """The gradient after clipping, rescaling and regularization. `norm` is the global norm if one is needed."""
        if self.gradient_clipping_type is GradientClippingType.BY_VALUE:
            gradient = torch.clamp(gradient, n.gradient_clip_min, n.gradient_clip_max)
        else:
            size = torch.linalg.vector_norm(gradient) if norm is None else norm
            gradient = gradient * clipping_factor(size, n)
        gradient = gradient * n.gradient_rescale
        if self.penalty is RegularizationType.L1:
            gradient = gradient + n.regularization_scale * parameter.sign()
        elif self.penalty is RegularizationType.L2:
            gradient = gradient + n.regularization_scale * parameter
        return gradient

    def derive(self, n: SimpleNamespace) -> None:
        """Adds derived values that are the same for every parameter to the live numbers."""

    def update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: Arrays, n: SimpleNamespace
    ) -> tuple[torch.Tensor, Arrays]:
        """The new parameter and state, from a prepared gradient."""
        raise NotImplementedError(f"{type(self).__name__} has no update rule")

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in self.live if name in self.__dict__]
        shown += [f"groups={list(self.groups)!r}"] if self.groups else []
        return f"{type(self).__name__}({', '.join(shown)})"


def combined_norm(norms: Sequence[torch.Tensor], n: SimpleNamespace) -> torch.Tensor:
    """The norm of gradients with these norms, or the custom norm if one is set."""
    computed = torch.stack(list(norms)).norm()
    return torch.where(n.custom_global_norm != 0, n.custom_global_norm.to(computed.dtype), computed)


def clipping_factor(norm: torch.Tensor, n: SimpleNamespace) -> torch.Tensor:
    """The factor that limits a gradient of this norm to the maximum."""
    maximum = n.maximum_clipping_norm.to(norm.dtype)
    return torch.where(norm > maximum, maximum / norm, torch.ones_like(norm))


def check_formula(where: str, formula: Any) -> str:
    """A formula's name; rejects unknown ones."""
    if formula not in (ML_COMPUTE, TORCH):
        raise ArgumentError(where, f"formula is {formula!r}", fix=f'use "{TORCH}" or "{ML_COMPUTE}"')
    return formula


def _decaying(
    where: str, shared: OptimizerDescriptor, weight_decay: float | None, decouples: bool
) -> OptimizerDescriptor:
    """The shared settings with a weight decay: the only penalty, since two would hide one another."""
    if weight_decay is None:
        return shared
    in_range(where, "weight_decay", weight_decay)
    if shared.regularization_scale or shared.regularization_type is not RegularizationType.NONE:
        raise ArgumentError(where, "the descriptor regularizes, and weight_decay is passed", fix="leave one out")
    kind = RegularizationType.NONE if decouples else RegularizationType.L2
    return shared.changed(regularization_type=kind, regularization_scale=weight_decay)


def _clipping(
    where: str, shared: OptimizerDescriptor, clip_norm: float | None, clip_value: float | None
) -> OptimizerDescriptor:
    """The shared settings with clipping by the global norm or by value."""
    if clip_norm is None and clip_value is None:
        return shared
    both = clip_norm is not None and clip_value is not None
    if both or shared.applies_gradient_clipping:
        problem = "clip_norm and clip_value are both passed" if both else "the descriptor clips, too"
        raise ArgumentError(where, problem, fix="leave one out")
    if clip_norm is not None:
        in_range(where, "clip_norm", clip_norm)
        kind = GradientClippingType.BY_GLOBAL_NORM
        bounds = {"gradient_clipping_type": kind, "maximum_clipping_norm": clip_norm}
    else:
        in_range(where, "clip_value", clip_value)
        assert clip_value is not None
        bounds = {"gradient_clip_max": clip_value, "gradient_clip_min": -clip_value}
        bounds["gradient_clipping_type"] = GradientClippingType.BY_VALUE
    return shared.changed(applies_gradient_clipping=True, **bounds)


def _grouped(where: str, shared: OptimizerDescriptor, groups: Sequence[ParameterGroup]) -> OptimizerDescriptor:
    """The shared settings with a penalty whose weight groups can set, also later."""
    if shared.regularization_type is RegularizationType.NONE:
        return shared.changed(regularization_type=RegularizationType.L2, regularization_scale=0.0)
    if shared.regularization_type is RegularizationType.L1 and any(one.weight_decay is not None for one in groups):
        raise ArgumentError(where, "a group has weight decay, but the optimizer regularizes by L1", fix="use L2")
    return shared
