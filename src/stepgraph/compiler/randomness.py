"""Random numbers come from the graph's own stream; PyTorch's random operators are rejected by name.

They read PyTorch's global generator: a run could not be resumed, phases could not be repeated, and a result
recomputed under a memory limit would use other random numbers than the gradient expects.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from stepgraph.compiler.program import notes
from stepgraph.compiler.step import Step
from stepgraph.random import draws_from_generator, refusal


def refuse_random(graph: fx.Graph, step: Step) -> None:
    """Raises at the first recorded operator that draws from PyTorch's generator, naming its layer."""
    for node in graph.nodes:
        if is_random(node):
            name = notes(node).layer
            where = next((one.where for one in step.nodes if step.names.get(one.layer, one.layer.label) == name), name)
            raise refusal(where, _name(node.target))


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws from PyTorch's generator."""
    return draws_from_generator(node.target, node.args, node.kwargs)


def _name(target: Any) -> str:
    return str(target).rpartition(".")[0]
