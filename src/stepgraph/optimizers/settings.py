"""The settings that all optimizers share, and the range of every number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import numpy as np

from stepgraph.errors import ArgumentError, DataTypeError
from stepgraph.types import RawEnum

LARGEST = float(np.finfo(np.float32).max)  # updates compute in float32


class GradientClippingType(RawEnum):
    """What is limited before an update."""

    BY_VALUE = 0, "By Value"
    BY_NORM = 1, "By Norm"
    BY_GLOBAL_NORM = 2, "By Global Norm"


class RegularizationType(RawEnum):
    """The penalty added to the gradient to keep parameters small."""

    NONE = 0, "None"
    L1 = 1, "L1"
    L2 = 2, "L2"


@dataclass(frozen=True)
class OptimizerDescriptor:
    """The settings that all optimizers share.

    The order is: clip, rescale, then add the regularization's gradient (`scale * sign(W)` or `scale * W`),
    which is itself neither clipped nor rescaled.

    Args:
        learning_rate: the step size.
        gradient_rescale: a factor for every gradient.
        applies_gradient_clipping: whether gradients are clipped. By default they are if one of the next
            four settings is passed; False together with them is rejected.
        gradient_clipping_type: by value, by the norm of each gradient, or by the norm of all of them together; by
            default, by value. A norm requires it.
        gradient_clip_max: the largest element, by value; default 1.
        gradient_clip_min: the smallest element, by value; default -1.
        maximum_clipping_norm: the largest norm, by norm and by global norm; default 1.
        custom_global_norm: if not 0, replaces the computed global norm. (The original's short
            factories set it to 1; here it is 0, so that clipping by global norm takes effect.)
        regularization_type: the penalty added to gradients to keep parameters small.
        regularization_scale: its weight; the weight decay of `AdamWOptimizer`.

    Example:
        >>> together = GradientClippingType.BY_GLOBAL_NORM
        >>> clipped = OptimizerDescriptor(1e-3, gradient_clipping_type=together, maximum_clipping_norm=5.0)
        >>> AdamOptimizer(clipped).applies_gradient_clipping
        True
    """

    learning_rate: float
    gradient_rescale: float = 1.0
    # None means "not passed" and is replaced by `CLIPPING`: it is never read.
    applies_gradient_clipping: bool = None  # type: ignore[assignment]
    gradient_clipping_type: GradientClippingType = None  # type: ignore[assignment]
    gradient_clip_max: float = None  # type: ignore[assignment]
    gradient_clip_min: float = None  # type: ignore[assignment]
    maximum_clipping_norm: float = None  # type: ignore[assignment]
    custom_global_norm: float = 0.0
    regularization_type: RegularizationType = RegularizationType.NONE
    regularization_scale: float = 0.0

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in CLIPPING if getattr(self, name) is not None}
        if self.applies_gradient_clipping is None:
            object.__setattr__(self, "applies_gradient_clipping", bool(given))
        elif self.applies_gradient_clipping is False and given and given != CLIPPING:  # `replace` passes them all
            raise ArgumentError(
                "OptimizerDescriptor",
                f"applies_gradient_clipping is False, but {', '.join(given)} is set",
                fix="leave one out",
            )
        for name, default in CLIPPING.items():
            object.__setattr__(self, name, given.get(name, default))
        self._check()
        self._require_used(given)

    @classmethod
    def exact(cls, learning_rate: float, **settings: Any) -> OptimizerDescriptor:
        """Uses every setting literally: only `applies_gradient_clipping`, by default False, decides, as in ML Compute.

        Example:
            >>> OptimizerDescriptor.exact(0.1, gradient_clip_max=0.5).applies_gradient_clipping
            False
        """
        made = cls(learning_rate, **{name: value for name, value in settings.items() if name not in _DECIDING})
        decided = {"applies_gradient_clipping": False, **CLIPPING, "custom_global_norm": 0.0}
        for name, default in decided.items():
            object.__setattr__(made, name, settings.get(name, default))
        made._check()
        return made

    def changed(self, **settings: Any) -> OptimizerDescriptor:
        """The same with other settings, used literally.

        Example:
            >>> OptimizerDescriptor(0.1, gradient_rescale=2.0).changed(learning_rate=0.2).gradient_rescale
            2.0
        """
        return self.exact(**{**{one.name: getattr(self, one.name) for one in fields(self)}, **settings})

    def _require_used(self, given: Mapping[str, Any]) -> None:
        """Rejects a norm that this kind of clipping does not use."""
        kind = self.gradient_clipping_type
        by_value = "maximum_clipping_norm" in given and "gradient_clipping_type" not in given
        if by_value or (self.custom_global_norm and kind is not GradientClippingType.BY_GLOBAL_NORM):
            name = "maximum_clipping_norm" if by_value else "custom_global_norm"
            norms = "BY_NORM or BY_GLOBAL_NORM" if by_value else "BY_GLOBAL_NORM"
            raise ArgumentError(
                "OptimizerDescriptor",
                f"{name} is {getattr(self, name)}, which clipping {kind.debug_description.lower()} does not use",
                fix=f"pass gradient_clipping_type={norms}",
            )

    def _check(self) -> None:
        for one in fields(self):
            if one.type == "float":
                in_range("OptimizerDescriptor", one.name, getattr(self, one.name))
        member("OptimizerDescriptor", "gradient_clipping_type", self.gradient_clipping_type, GradientClippingType)
        member("OptimizerDescriptor", "regularization_type", self.regularization_type, RegularizationType)
        switch("OptimizerDescriptor", "applies_gradient_clipping", self.applies_gradient_clipping)
        check_bounds("OptimizerDescriptor", self)


CLIPPING: dict[str, Any] = {
    "gradient_clipping_type": GradientClippingType.BY_VALUE,
    "gradient_clip_max": 1.0,
    "gradient_clip_min": -1.0,
    "maximum_clipping_norm": 1.0,
}
_DECIDING = {"applies_gradient_clipping", "custom_global_norm", *CLIPPING}


def check_bounds(where: str, settings: Any) -> None:
    """Rejects contradictory clipping bounds."""
    low, high = settings.gradient_clip_min, settings.gradient_clip_max
    if low > high:
        raise ArgumentError(where, f"gradient_clip_min {low} is above gradient_clip_max {high}", fix="swap them")


def member(where: str, name: str, value: Any, kind: type[RawEnum]) -> None:
    """Rejects anything but a member of an enumeration."""
    if not isinstance(value, kind):
        raise ArgumentError(where, f"{name} is {value!r}", fix=f"use a member of {kind.__name__}")


def switch(where: str, name: str, value: Any) -> None:
    """Rejects anything but True and False."""
    if not isinstance(value, bool):
        raise DataTypeError(where, f"{name} is {value!r}", fix="pass True or False")


NOT_NEGATIVE = {
    "learning_rate": 1e-3,
    "learning_rate_factor": 1.0,
    "regularization_scale": 0.01,
    "weight_decay": 0.01,
    "clip_norm": 1.0,
    "clip_value": 1.0,
    "maximum_clipping_norm": 1.0,
    "custom_global_norm": 0.0,
    "momentum": 0.9,
    "momentum_scale": 0.9,
    "epsilon": 1e-8,
}
SHARES = {"beta1": 0.9, "beta2": 0.999, "alpha": 0.99}  # decay factors: with 1, nothing would be learned


def in_range(where: str, name: str, value: Any) -> None:
    """Rejects non-finite numbers and values outside the range of this name, as `torch.optim` does."""
    number(where, name, value)
    if name in NOT_NEGATIVE and value < 0:
        raise ArgumentError(where, f"{name} is {value}", fix=f"pass a number ≥ 0, such as {NOT_NEGATIVE[name]:g}")
    if name in SHARES and not 0 <= value < 1:
        raise ArgumentError(where, f"{name} is {value}, not in [0, 1)", fix=f"use {SHARES[name]:g}")


def number(where: str, name: str, value: Any) -> Any:
    """`value` if it is a finite number; otherwise raises an error that names it."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise DataTypeError(where, f"{name} is {value!r}, not a number", fix="pass a float")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        finite = False
    if not finite:
        raise ArgumentError(where, f"{name} is {value}, not a finite number", fix="check where the value comes from")
    if abs(float(value)) > LARGEST:
        raise ArgumentError(where, f"{name} is {value}, beyond the range of float32", fix="pass a smaller number")
    return value
