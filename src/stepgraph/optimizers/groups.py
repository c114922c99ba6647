"""Parameter groups: parameters that one optimizer updates with numbers of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from stepgraph.errors import ArgumentError, DataTypeError, StateError, StepgraphError, UnknownNameError, reason
from stepgraph.optimizers.settings import in_range, switch
from stepgraph.tensors.tensor import Tensor

Selector = str | Tensor | Callable[[str, Tensor], bool]
Names = Mapping[Tensor, Sequence[str]]

FROZEN = "frozen"  # the live number of a group that is not updated
UNCLIPPED = {"gradient_clip_max": math.inf, "gradient_clip_min": -math.inf, "maximum_clipping_norm": math.inf}
MOST_NAMES = 12  # shown in a message


class ParameterGroup:
    """Parameters with their own learning rate, weight decay and clipping. Pass groups to any optimizer.

    A parameter belongs to the first group that selects it; the others use the optimizer's own numbers. All settings but
    `parameters` can be assigned at any time, and the next update uses them.

    Args:
        parameters: one selector or several. Text is a pattern for names of `state_dict()`, such as
            `"dense.weights"` or `"*.biases"`; the kind of a layer also stands for its name, so that
            `"*Normalization*.*"` selects the parameters of all normalization layers, whatever their labels. A function
            takes the name and the tensor and returns whether the group has it. A tensor selects itself.
        learning_rate_factor: multiplies the optimizer's learning rate, including one that a schedule sets.
        weight_decay: instead of the optimizer's; None keeps that.
        clipping: whether gradients are clipped as the optimizer is set to. Otherwise they are neither scaled nor
            counted in a global norm.
        frozen: whether parameters and their optimizer state stay as they are. Their gradients are still computed;
            `disable_update=True` and `is_updatable = False` save that.
        numbers: other live numbers of the optimizer, such as `beta2`, instead of its own.

    Example:
        >>> slow = ParameterGroup("encoder*.*", learning_rate_factor=0.1)
        >>> biases = ParameterGroup("*.biases", weight_decay=0)
        >>> optimizer = AdamWOptimizer(3e-4, weight_decay=0.1, groups=[slow, biases])
        >>> slow.frozen = True  # from the next update on
    """

    own: ClassVar[tuple[str, ...]] = ("learning_rate_factor", "weight_decay", "clipping", "frozen")

    parameters: tuple[Selector, ...]
    learning_rate_factor: float
    weight_decay: float | None
    clipping: bool
    frozen: bool
    version: int

    def __init__(
        self,
        parameters: Selector | Sequence[Selector],
        *,
        learning_rate_factor: float = 1.0,
        weight_decay: float | None = None,
        clipping: bool = True,
        frozen: bool = False,
        **numbers: float,
    ) -> None:
        single = isinstance(parameters, str | Tensor) or callable(parameters)
        selectors: tuple[Any, ...] = (parameters,) if single else _several(parameters)
        for one in selectors:
            if not isinstance(one, str | Tensor) and not callable(one):
                raise DataTypeError(
                    "ParameterGroup", f"{one!r} selects no parameters", fix="pass a pattern, a tensor or a function"
                )
        self.__dict__.update(parameters=selectors, overridden=tuple(numbers), version=0, constant="")
        self.learning_rate_factor, self.weight_decay = learning_rate_factor, weight_decay
        self.clipping, self.frozen = clipping, frozen
        for name, value in numbers.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        constant, overridden = self.__dict__["constant"], self.__dict__["overridden"]
        if constant:
            raise StateError("ParameterGroup", f"it belongs to {constant}", fix="assign optimizer.groups[…] instead")
        if name in ("clipping", "frozen"):
            switch("ParameterGroup", name, value)
        elif name in overridden or name == "learning_rate_factor" or (name == "weight_decay" and value is not None):
            in_range("ParameterGroup", name, value)
        elif name != "weight_decay":
            close = get_close_matches(name, self.own, 1) or [self.own[0]]
            raise ArgumentError(
                "ParameterGroup", f"{name} cannot be assigned", fix=f"assign {close[0]}, or create another"
            )
        self.__dict__[name] = value
        self.__dict__["version"] += 1  # a graph compares it to detect assignments

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but the selectors."""
        return {name: self.__dict__[name] for name in (*self.own, *self.__dict__["overridden"])}

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the optimizer's live numbers that the group has its own of."""
        return self.__dict__["overridden"]

    def adopt(self, settings: Mapping[str, Any]) -> None:
        """Assigns what another group with these settings has."""
        for name, value in settings.items():
            setattr(self, name, value)

    def copy(self) -> ParameterGroup:
        """A group with the same selectors and settings."""
        return ParameterGroup(self.parameters, **self.settings)

    def row(self, numbers: Mapping[str, float], stored: Mapping[str, str]) -> dict[str, float]:
        """The live numbers of the group, from those of its optimizer, which stores some under other names."""
        found = {**numbers, **({} if self.clipping else UNCLIPPED), FROZEN: float(self.frozen)}
        found |= {stored.get(name, name): float(self.__dict__[name]) for name in self.numbers}
        found["learning_rate"] *= self.learning_rate_factor
        if self.weight_decay is not None:
            found["regularization_scale"] = float(self.weight_decay)
        return found

    def selects(self, tensor: Tensor, names: Sequence[str]) -> bool:
        """Whether the group has a parameter with these names."""
        return any(_selects(one, tensor, names) for one in self.parameters)

    @property
    def text(self) -> str:
        """The selectors in readable form."""
        return ", ".join(map(_text, self.parameters)) or "nothing"

    def shown(self, names: Mapping[Tensor, str], most: int = 3) -> str:
        """The first selectors in readable form, with tensors by their names in a graph."""
        texts = [names.get(one, _text(one)) if isinstance(one, Tensor) else _text(one) for one in self.parameters]
        more = len(texts) - most
        return self.text if not texts else ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")

    @property
    def changes(self) -> list[str]:
        """What differs from the optimizer, in readable form."""
        found = [] if self.learning_rate_factor == 1 else [f"learning rate × {self.learning_rate_factor:g}"]
        found += [] if self.weight_decay is None else [f"weight decay {self.weight_decay:g}"]
        found += [f"{name} {self.__dict__[name]:g}" for name in self.numbers]
        found += [] if self.clipping else ["not clipped"]
        return [*found, *(["frozen"] if self.frozen else [])]

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.settings.items() if value != _DEFAULTS.get(name, ())}
        return f"ParameterGroup({', '.join([repr(self.text), *(f'{n}={v!r}' for n, v in shown.items())])})"


_DEFAULTS = {"learning_rate_factor": 1.0, "weight_decay": None, "clipping": True, "frozen": False}
_VECTORS = {"beta", "gamma", "bias", "biases"}


def not_a_matrix(name: str, tensor: Tensor) -> bool:
    """Whether a parameter has fewer than 2 dimensions, or is a bias, or the scale or shift of a normalization."""
    return len(tensor.shape) < 2 or not _VECTORS.isdisjoint(name.split(".")[1:])


def _constant(name: str, *groups: ParameterGroup) -> tuple[ParameterGroup, ...]:
    for group in groups:
        group.__dict__["constant"] = name
    return groups


DECAY_MATRICES_ONLY = _constant("DECAY_MATRICES_ONLY", ParameterGroup(not_a_matrix, weight_decay=0.0))
"""Weight decay only for parameters with at least 2 dimensions, which includes embeddings; not for biases and not for
the scale and shift of normalizations, whatever their shape."""


def checked(where: str, groups: Any, own: Sequence[str]) -> tuple[ParameterGroup, ...]:
    """Groups as an optimizer with these own numbers keeps them; those of a constant are copied, to be assignable."""
    given = (groups,) if isinstance(groups, ParameterGroup) else groups
    if not isinstance(given, Sequence) or not all(isinstance(one, ParameterGroup) for one in given):
        raise DataTypeError(where, f"groups is {groups!r}", fix='pass a list: [ParameterGroup("*.biases")]')
    for group in given:
        for name in group.numbers:
            if name not in own:
                close = get_close_matches(name, (*ParameterGroup.own, *own), 1)
                fix = f"pass {close[0]}" if close else f"use {', '.join((*ParameterGroup.own, *own))}"
                raise ArgumentError(where, f"a group sets {name}, which {where} does not have for a group", fix=fix)
    return tuple(group.copy() if group.__dict__["constant"] else group for group in given)


def assigned(groups: Sequence[ParameterGroup], names: Names) -> dict[Tensor, int]:
    """The group of each parameter: 0 for none, otherwise counted from 1; the first that selects it has it."""
    found = {}
    for tensor, own in names.items():
        found[tensor] = next((i for i, group in enumerate(groups, 1) if group.selects(tensor, own)), 0)
    return found


def require_matches(where: str, groups: Sequence[ParameterGroup], names: Names) -> None:
    """Rejects a pattern or a tensor that selects no parameter; a function may select none."""
    for one in (one for group in groups for one in group.parameters):
        if not callable(one) and not any(_selects(one, tensor, own) for tensor, own in names.items()):
            known = list(dict.fromkeys(own[0] for own in names.values()))
            close = _close(one, names) if isinstance(one, str) else []
            more = f" and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
            raise UnknownNameError(
                where,
                f"the group {_text(one)} of the optimizer matches no parameter",
                known=", ".join(known[:MOST_NAMES]) + more,
                fix=f'did you mean "{close[0]}"' if close else "use names of training.state_dict(), or * for any text",
            )


def _close(pattern: str, names: Names) -> list[str]:
    """Existing names that resemble a pattern, and patterns with the same wildcards."""
    found = list(dict.fromkeys(name for own in names.values() for name in own))
    fields = {f"*.{name.partition('.')[2]}" for name in found}
    layers = {f"{name.partition('.')[0]}.*" for name in found}
    return get_close_matches(pattern, [*found, *sorted(fields), *sorted(layers)], 1, cutoff=0.5)


def _selects(one: Selector, tensor: Tensor, names: Sequence[str]) -> bool:
    if isinstance(one, str):
        return any(fnmatchcase(name, one) for name in names)
    if isinstance(one, Tensor):
        return one is tensor
    try:
        return bool(one(names[0] if names else tensor.label, tensor))
    except StepgraphError:
        raise
    except Exception as error:  # a user's function can raise anything
        raise ArgumentError(
            f"ParameterGroup({_text(one)})", f"the function failed: {reason(error)}", fix="take a name and a tensor"
        ) from error


def _several(given: Any) -> tuple[Any, ...]:
    if not isinstance(given, Sequence | set | frozenset | Iterator):
        raise DataTypeError(
            "ParameterGroup", f"{given!r} selects no parameters", fix='pass a pattern such as "*.biases"'
        )
    return tuple(given)


def _text(one: Selector) -> str:
    if isinstance(one, str):
        return one
    return repr(one.label) if isinstance(one, Tensor) else getattr(one, "__name__", repr(one))
