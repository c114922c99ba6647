"""One row of the conformance table: a layer, what to feed it, and what it must give."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepgraph.layers.layer import Layer

Source = Callable[[np.random.Generator], np.ndarray]


def normal(*shape: int) -> Source:
    """A float64 source with standard normal values."""
    return lambda generator: generator.standard_normal(shape)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Source:
    """A float64 source with uniform values."""
    return lambda generator: generator.uniform(low, high, shape)


@dataclass(frozen=True)
class Bad:
    """Sources a layer must refuse: their shapes (or arrays), the error's class and words that its message must have."""

    sources: tuple[Any, ...]
    error: type[Exception]
    words: str


@dataclass(frozen=True)
class Case:
    """A layer under test.

    `make` builds a fresh layer; `sources` draw its sources (floating ones as float64, index and mask sources with their
    own type); `reference(*sources, **tensors)` is NumPy float64 written from the specification, not from our code, and
    gets the layer's tensors by field name; `twin` is the same with torch arrays through PyTorch's own function.
    A `deep` case runs only in `make test-deep`.
    """

    name: str
    make: Callable[[], Layer]
    sources: tuple[Source, ...]
    reference: Callable[..., Any]
    twin: Callable[..., Any] | None = None
    training: bool = True
    differentiable: bool = True
    bad: tuple[Bad, ...] = ()
    deep: bool = False
