"""What decides the shapes that a layer returns, so that they are found once for all layers that are alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from enum import Enum
from typing import Any

from stepgraph.tensors.tensor import Tensor

_PLAIN = (int, float, str, Enum, type(None))
_UNREAD = ("label", "is_debugging_enabled")  # by any forward
_OURS = "stepgraph."


class _Unknown(Exception):
    """A setting of which nobody knows what it decides, such as a function."""


def likeness(layer: Any) -> Hashable | None:
    """The class and settings of a layer of ours, its tensors by their descriptors; None for any other layer.

    A user's own forward may read what is no setting, and may raise an error that the next call need not raise.
    """
    if not type(layer).__module__.startswith(_OURS):
        return None
    fields = [one.name for one in dataclasses.fields(layer) if one.name not in _UNREAD]
    try:
        return type(layer), layer.device_type, *(_described(getattr(layer, name)) for name in fields)
    except _Unknown:
        return None


def _described(value: Any) -> Hashable:
    """A setting as something that equals only what decides the same; 1, 1.0 and True are different."""
    if isinstance(value, Tensor):
        return Tensor, value.descriptor
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, tuple):
        return tuple(map(_described, value))
    if dataclasses.is_dataclass(value) and type(value).__module__.startswith(_OURS):
        return type(value), *(_described(getattr(value, one.name)) for one in dataclasses.fields(value))
    raise _Unknown
