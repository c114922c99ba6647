"""The names of settings: ours, ML Compute's, and what other libraries call them."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from typing import Any

from stepgraph.errors import ArgumentError

ELSEWHERE = {  # what other libraries call our settings
    **{"lr": "learning_rate", "rate": "learning_rate", "eps": "epsilon", "betas": "beta1", "rho": "alpha"},
    **{"wd": "weight_decay", "decay": "weight_decay", "l2": "weight_decay", "regularization_scale": "weight_decay"},
    **{"max_norm": "clip_norm", "max_grad_norm": "clip_norm", "clipnorm": "clip_norm", "global_clipnorm": "clip_norm"},
    **{"maximum_clipping_norm": "clip_norm", "clipvalue": "clip_value", "gradient_clip_max": "clip_value"},
    **{"params": "groups", "param_groups": "groups", "parameter_groups": "groups"},
}


class Alias:
    """The documented name of a setting that ML Compute calls differently; both can be passed, read and assigned."""

    def __init__(self, stored: str) -> None:
        self.stored = stored

    def __get__(self, optimizer: Any, kind: type | None = None) -> Any:
        return self if optimizer is None else getattr(optimizer, self.stored)

    def __set__(self, optimizer: Any, value: Any) -> None:
        setattr(optimizer, self.stored, value)


def unknown(kind: type, name: str) -> ArgumentError:
    """The error for a setting that an optimizer does not have, with the one that was probably meant."""
    known = [one for one in dict.fromkeys(documented(kind)) if one != "settings"]
    meant = ELSEWHERE.get(name)
    close = [meant] if meant in known else get_close_matches(name, known, 1)
    fix = f"use {close[0]}" if close else f"use {', '.join(known)}"
    if name == "betas" and "beta2" in known:
        fix = "use beta1 and beta2"
    return ArgumentError(kind.__name__, f"there is no setting {name}", fix=fix)


def documented(kind: type) -> list[str]:
    """The keywords of all constructors of a class."""
    return [
        name for base in kind.__mro__ if "__init__" in vars(base) and base is not object for name in _parameters(base)
    ]


def stored(kind: type) -> dict[str, str]:
    """The names under which a class keeps settings that have an alias."""
    members = {name: value for base in kind.__mro__ for name, value in vars(base).items()}
    return {name: value.stored for name, value in members.items() if isinstance(value, Alias)}


def _parameters(kind: type) -> list[str]:
    found = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    return [name for name, one in found.items() if name != "self" and one.kind is not one.VAR_KEYWORD]


def annotated(optimizer: type) -> frozenset[str]:
    """The names that an optimizer's classes declare."""
    return frozenset(name for base in optimizer.__mro__ for name in getattr(base, "__annotations__", {}))
