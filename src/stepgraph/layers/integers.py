"""Which integers all readers of a tensor accept, to draw random ones."""

from __future__ import annotations

from collections.abc import Sequence

from stepgraph.layers.gru import GRULayer
from stepgraph.layers.node import Node
from stepgraph.layers.recurrent import LSTMLayer
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import DataType


def accepted(tensor: Tensor, nodes: Sequence[Node]) -> tuple[int, int]:
    """The least integer that all readers accept, and one more than the largest; 0 and 2 where no reader says more.

    Lengths of sequences have at least one step, so that there is something to compute.
    """
    limits, least = list[int](), 0
    for node in (node for node in nodes if tensor in node.arguments):
        limits.extend(limit for position, limit in _limits(node).items() if node.arguments[position] is tensor)
        if isinstance(node.layer, LSTMLayer | GRULayer):
            limits.append(int(node.sources[0].shape[1 if node.layer.descriptor.batch_first else 0]) + 1)
            least = 1
    return least, 2 if tensor.data_type is DataType.BOOLEAN else int(min(limits, default=2))


def _limits(node: Node) -> dict[int, int]:
    return node.layer.index_limits(*(one.descriptor for one in node.arguments))
