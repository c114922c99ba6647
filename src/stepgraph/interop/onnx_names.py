"""The names of a graph's results in an ONNX file."""

from __future__ import annotations

from collections import Counter

from stepgraph.interop.module import Prediction
from stepgraph.layers.layer import Layer
from stepgraph.tensors.tensor import Tensor


def value_names(prediction: Prediction) -> dict[Tensor, str]:
    """Names of all results: those of outputs, else of their layers, numbered if a layer has several.

    Operators have no such name if a layer returns what it was given, or what another one returned.
    """
    found = {tensor: name for name, tensor in reversed(prediction.outputs.items())}
    taken = {*prediction.inputs, *prediction.outputs, *prediction.names}
    for tensor, name in result_names(prediction).items():
        if tensor not in found:
            found[tensor] = unused(name, taken)
    return found


def result_names(prediction: Prediction) -> dict[Tensor, str]:
    """The layer of each result, in order, with a number if it has several."""
    layers = prediction.layers
    counts = Counter(node.layer for node in prediction.nodes for _ in node.results)
    seen: Counter[Layer] = Counter()
    found = {}
    for node in prediction.nodes:
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
