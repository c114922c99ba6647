"""The results of all operators of a graph as arrays without memory, computed once for operators that are alike.

PyTorch's compiler computes them again after it has changed a graph, operator by operator, which takes seconds. A result
without memory depends only on the operator, its settings and the layouts of what it reads. A network repeats its
blocks, so most results are like an earlier one, in other memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from stepgraph.compiler.expansion import Unexpandable, key_of, layout_of
from stepgraph.compiler.program import mutates, set_fake
from stepgraph.system import torch_private

SHOWN = (torch.Tensor, int, float)
VARYING = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class _Known(NamedTuple):
    """The result of an operator, and for each of its arrays which source it shares memory with, if any."""

    result: Any
    owners: tuple[int | None, ...]


def propagate(graph: fx.Graph, arrays: Sequence[torch.Tensor]) -> bool:
    """Sets the fakes of all nodes, as PyTorch would; returns False if there are constants.

    Args:
        graph: operators that change nothing but inputs.
        arrays: its inputs, arrays without memory.
    """
    if any(node.op not in ("placeholder", "call_function", "output") for node in graph.nodes):
        return False
    mode, known = arrays[0].fake_mode, dict[Any, _Known]()  # type: ignore[attr-defined]
    placeholders = graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = dict(zip(placeholders, map(torch_private.snapshot, arrays), strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            values[node] = _result(node, values, mode, known)
        elif node.op == "output":
            values[node] = fx.map_arg(node.args[0], values.__getitem__)
        shown = fx.node.map_aggregate(values[node], lambda one: one if isinstance(one, SHOWN) else None)
        if shown is not None:
            set_fake(node, shown)
    return True


def _result(node: fx.Node, values: Mapping[fx.Node, Any], mode: Any, known: dict[Any, _Known]) -> Any:
    sources: dict[fx.Node, int] = {}
    key = _key(node, values, sources)
    given = [values[one] for one in sources]
    if key in known:
        return _alike(known[key], given)
    function: Any = node.target
    positional, named = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    with mode:
        result = function(*positional, **named)
    if key is not None and (owners := _owners(result, given)) is not None:
        known[key] = _Known(result, owners)
    return result


def _key(node: fx.Node, values: Mapping[fx.Node, Any], sources: dict[fx.Node, int]) -> Any:
    """What decides a result; None if more does."""
    target = node.target
    if not isinstance(target, torch_private.OpOverload) or mutates(node) or not VARYING.isdisjoint(target.tags):
        return None
    try:
        settings = key_of((node.args, node.kwargs), sources)
        return target, settings, tuple(_described(values[one]) for one in sources)
    except Unexpandable:
        return None


def _described(value: Any) -> Any:
    """An array by its layout, anything else as it is."""
    return layout_of(value) if isinstance(value, torch.Tensor) else key_of(value, {})


def _owners(result: Any, given: Sequence[Any]) -> tuple[int | None, ...] | None:
    """Which source each array of a result shares memory with; None if they share new memory or begin inside it."""
    memory = [_memory(one) if isinstance(one, torch.Tensor) else None for one in given]
    arrays = _arrays(result)
    owners = tuple(memory.index(one) if (one := _memory(array)) in memory else None for array in arrays)
    new = [array for array, owner in zip(arrays, owners, strict=True) if owner is None]
    if len({_memory(array) for array in new}) < len(new) or any(array.storage_offset() for array in new):
        return None
    return owners


def _alike(known: _Known, given: Sequence[Any]) -> Any:
    """The same result in new memory, or in that of other sources."""
    owners = iter(known.owners)

    def again(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        owner = next(owners)
        return torch_private.another(value) if owner is None else torch_private.placed(value, given[owner])

    return fx.node.map_aggregate(known.result, again)


def _arrays(result: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    torch_private.tree_map_only(torch.Tensor, found.append, result)
    return found


def _memory(array: torch.Tensor) -> int:
    return torch_private.identity(array.untyped_storage())
