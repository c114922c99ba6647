"""Random numbers come from the graph's own stream; PyTorch's random operators are rejected by name.

They read PyTorch's global generator: a run could not be resumed, phases could not be repeated, and a result
recomputed under a memory limit would use other random numbers than the gradient expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.program import notes
from stepgraph.compiler.step import Step
from stepgraph.errors import ArgumentError
from stepgraph.system.torch_private import OpOverload, schema

_SHARES = ("p", "dropout_p", "dropout")  # dropout probabilities; at 0, the operator draws nothing
_SWITCHES = ("train", "training")


def refuse_random(graph: fx.Graph, step: Step) -> None:
    """Raises at the first recorded operator that draws from PyTorch's generator, naming its layer."""
    for node in graph.nodes:
        if is_random(node):
            name = notes(node).layer
            where = next((one.where for one in step.nodes if step.names.get(one.layer, one.layer.label) == name), name)
            raise ArgumentError(
                where,
                f"its forward calls PyTorch's random operator {_name(node.target)}, which a step cannot reproduce",
                fix="draw from the graph's stream: scope.keep_mask(x, rate), or scope.random(shape) for [0, 1)",
            )


def is_random(node: fx.Node) -> bool:
    """Whether an operator draws from PyTorch's generator."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = _arguments(target, node)
    switched_off = any(given.get(name) is False for name in _SWITCHES)
    drops_nothing = any(isinstance(given.get(name), int | float) and given[name] == 0 for name in _SHARES)
    return not (switched_off or drops_nothing)


def _arguments(target: OpOverload, node: fx.Node) -> Mapping[str, Any]:
    """All arguments by name, including defaults."""
    declared = schema(target).arguments
    defaults = {one.name: one.default_value for one in declared if one.has_default_value()}
    return defaults | {one.name: value for one, value in zip(declared, node.args, strict=False)} | node.kwargs


def _name(target: Any) -> str:
    return str(target).rpartition(".")[0]
