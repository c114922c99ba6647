"""The names of a graph's results in an ONNX file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stepgraph import draw
from stepgraph.interop.module import Prediction
from stepgraph.layers.layer import Layer
from stepgraph.layers.node import Node
from stepgraph.tensors.tensor import Tensor


def value_names(prediction: Prediction) -> dict[Tensor, str]:
    """Names of all results: those of outputs, else of their layers, numbered if a layer has several.

    Operators have no such name if a layer returns what it was given, or what another one returned.
    """
    found = {tensor: name for name, tensor in reversed(list(prediction.outputs.items()))}
    taken = {*prediction.inputs, *prediction.outputs, *prediction.names}
    for tensor, name in result_names(prediction.nodes).items():
        if tensor not in found:
            found[tensor] = unused(name, taken)
    return found


def result_names(nodes: Sequence[Node]) -> dict[Tensor, str]:
    """The layer of each result, in order, with a number if it has several."""
    layers = draw.unique_names(node.layer for node in nodes)
    counts = Counter(node.layer for node in nodes for _ in node.results)
    seen: Counter[Layer] = Counter()
    found = {}
    for node in nodes:
        for tensor in node.results:
            seen[node.layer] += 1
            found[tensor] = layers[node.layer] + (f" ({seen[node.layer]})" if counts[node.layer] > 1 else "")
    return found


def unused(name: str, taken: set[str]) -> str:
    """`name`, with a number if it is taken; takes it."""
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}#{count}"
    taken.add(found)
    return found
