"""The kernels of a step with their arguments, as a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Kernel = Callable[..., None]


class Launch(NamedTuple):
    """A kernel and its arguments."""

    kernel: Kernel
    arguments: list[Any]


class Place(NamedTuple):
    """A position among the arguments of a kernel."""

    arguments: list[Any]
    position: int


class Record(NamedTuple):
    """The kernels of a call in order, and the places of the given arrays and of the results among their arguments."""

    launches: list[Launch]
    given: list[list[Place]]
    results: list[list[Place]]
    like: list[tuple[Any, ...]]  # shapes, strides and types of the results
    allocate: Callable[..., torch.Tensor]
