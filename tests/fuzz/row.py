"""One row per kind of layer: how its settings are drawn, how stepgraph builds it, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import stepgraph as sg
from tests.fuzz.recipe import Op, Settings, Shape

if TYPE_CHECKING:
    from tests.fuzz.draw import Draw

Array = torch.Tensor
Arrays = Mapping[str, Array]
Tensors = Mapping[str, sg.Tensor]


@dataclass
class Drawn:
    """A node as it was drawn: what it reads, its settings, and shape and kind of each of its parameters."""

    sources: tuple[int, ...]
    settings: Settings = field(default_factory=dict)
    parameters: dict[str, tuple[Shape, str]] = field(default_factory=dict)


@dataclass
class Context:
    """What an evaluation knows beside the sources.

    Args:
        training: whether layers run in training mode.
        rows: the batch size.
        batch: the declared one.
        mask: of a dropout layer, taken from the run that is checked.
        updates: new values of statistics and rewritten dictionaries, by field.
        rounded: what rounding may make of an array inside a layer, and of its gradient.
    """

    training: bool
    rows: int
    batch: int
    mask: Array | None = None
    updates: dict[str, Array] = field(default_factory=dict)
    rounded: Callable[[Array], Array] = lambda array: array


Results = Array | tuple[Array, ...]


@dataclass(frozen=True)
class Row:
    """One kind of layer.

    Args:
        layer: its class.
        draw: settings and sources that fit what is there, or None.
        build: the layer of stepgraph.
        evaluate: the same in plain PyTorch, written from the documentation, in any precision.
        image: whether graphs of images are made of it.
        weight: how often it is drawn.
        statistics: parameters that the forward pass changes and no optimizer does.
        packs: whether its tensors may have other shapes with as many elements.
    """

    layer: type[sg.Layer]
    draw: Callable[[Draw], Drawn | None]
    build: Callable[[Settings, Tensors], sg.Layer]
    evaluate: Callable[..., Results]
    image: bool = False
    weight: float = 1.0
    statistics: tuple[str, ...] = ()
    packs: bool = True


def shaped(op: Op, name: str, array: Array) -> Array:
    """A parameter with the extents that the layer of an op gives it."""
    return array.reshape(op.shapes.get(name, array.shape))


def several(tensors: Mapping[str, Any], name: str) -> list[Any] | None:
    """The members of a sequence of tensors, `name.0`, `name.1` and so on; None where there is none."""
    found = [tensors[f"{name}.{i}"] for i in range(len(tensors)) if f"{name}.{i}" in tensors]
    return found or None
