"""Names in drawings: layers, their parameters, their kinds, the shapes of tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from stepgraph.tensors.tensor import Tensor
from stepgraph.types import RawEnum

if TYPE_CHECKING:
    from stepgraph.layers.layer import Layer
    from stepgraph.layers.node import Node


def unique_names(layers: Iterable[Layer]) -> dict[Layer, str]:
    """A name for each layer: its label, numbered if several layers share it, skipping numbers that are labels."""
    ordered = list(dict.fromkeys(layers))
    shared = Counter(layer.label for layer in ordered)
    numbered = {label: _free(label, shared) for label in shared}
    return {layer: layer.label if shared[layer.label] == 1 else next(numbered[layer.label]) for layer in ordered}


def _free(label: str, taken: Collection[str]) -> Iterator[str]:
    """The label with increasing numbers, skipping those that are labels themselves."""
    return (name for name in (f"{label}{number}" for number in count(1)) if name not in taken)


def parameter_names(nodes: Sequence[Node]) -> dict[Any, str]:
    """Names of layers, and of their parameters as `layer.field`."""
    layers = unique_names(node.layer for node in nodes)
    tensors = {t: f"{name}.{field}" for layer, name in layers.items() for field, t in layer.parameters.items()}
    return {**layers, **tensors}


def loss_names(nodes: Sequence[Node]) -> dict[Node, str]:
    """A name for each loss: its layer's, with a number if the layer compares several predictions."""
    layers = unique_names(node.layer for node in nodes)
    found: dict[Node, str] = {}
    used: Counter[Layer] = Counter()
    for node in nodes:
        if node.is_loss:
            used[node.layer] += 1
            found[node] = layers[node.layer] if used[node.layer] == 1 else f"{layers[node.layer]} {used[node.layer]}"
    return found


def kind(layer: Layer) -> str:
    """The kind of a layer, as it shows itself."""
    return layer.shown_kind


def variant(layer: Layer) -> str:
    """The variant of a layer (`ReLU`, `Add`, `Max`), if its kind has several; otherwise empty."""
    settings = (layer, getattr(layer, "descriptor", None))
    for name in ("operation", "activation_type", "pooling_type", "loss_type", "reduction_type", "padding_type"):
        for one in settings:
            if isinstance(chosen := getattr(one, name, None), RawEnum):
                return chosen.debug_description
    return ""


def extents(tensor: Tensor) -> str:
    """A tensor's shape, as `64×10`."""
    return "×".join(map(str, tensor.shape))


def flows(tensor: Tensor, node: Node, stopped: Collection[Tensor]) -> bool:
    """Whether a gradient flows back from `node` to the producer of `tensor`."""
    return tensor not in stopped and tensor.data_type.is_floating and tensor not in node.labels
