"""What drawings call things: layers, their parameters, their kinds, the shapes of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from stepgraph.tensor import Tensor

if TYPE_CHECKING:
    from stepgraph.graph import Node
    from stepgraph.layer import Layer


def unique_names(layers: Iterable[Layer]) -> dict[Layer, str]:
    """A name for each layer: its label, numbered where several layers share it."""
    ordered = list(dict.fromkeys(layers))
    shared = Counter(layer.label for layer in ordered)
    taken: dict[str, int] = {}
    names = {}
    for layer in ordered:
        taken[layer.label] = taken.get(layer.label, 0) + 1
        names[layer] = layer.label if shared[layer.label] == 1 else f"{layer.label}{taken[layer.label]}"
    return names


def parameter_names(nodes: Sequence[Node]) -> dict[Any, str]:
    """Names of layers, and of their parameters as `layer.field`."""
    layers = unique_names(node.layer for node in nodes)
    tensors = {t: f"{name}.{field}" for layer, name in layers.items() for field, t in layer.parameters.items()}
    return {**layers, **tensors}


def kind(layer: Layer) -> str:
    """What a layer is, in a word: its class without `Layer`."""
    return type(layer).__name__.removesuffix("Layer")


def extents(tensor: Tensor) -> str:
    """A tensor's shape, as `64×10`."""
    return "×".join(map(str, tensor.shape))


def flows(tensor: Tensor, node: Node, stopped: Collection[Tensor]) -> bool:
    """Whether a gradient goes back from `node` to what made `tensor`."""
    return tensor not in stopped and tensor.data_type.is_floating and tensor not in node.labels
