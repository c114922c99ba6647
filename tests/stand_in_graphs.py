"""Captures without a GPU: operators are recorded, undone, and run again by a replay, while no Python code runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.compiler import operators
from stepgraph.graphs import compilation, update_graph
from stepgraph.runtime import steady_views
from stepgraph.system import captures, surroundings

READING = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"}  # what a capture forbids


class Graph(TorchDispatchMode):
    """Stands for a CUDA graph; as there, the arrays of a capture have the same memory in every replay."""

    replays = 0  # of all graphs

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Any, Any]] = {}  # memory from outside, and what it had
        self.inside: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator._schema.name in READING:
            raise RuntimeError(f"{operator} is not permitted when stream is capturing")
        for one in _arrays((args, kwargs)):
            memory = one.untyped_storage()
            if memory.data_ptr() not in self.inside | {*self.before}:
                self.before[memory.data_ptr()] = memory, memory.clone()
        found = operator(*args, **(kwargs or {}))
        outside = {*self.before}
        self.inside |= {one.untyped_storage().data_ptr() for one in _arrays(found)} - outside
        self.operators.append((operator, args, kwargs or {}, found))
        return found

    def undo(self) -> None:
        for memory, content in self.before.values():
            memory.copy_(content)

    @torch.inference_mode()
    def replay(self) -> None:
        Graph.replays += 1
        now: dict[int, torch.Tensor] = {}  # what a replay has in place of the arrays of the capture

        def of_now(one: Any) -> Any:
            return now.get(id(one), one) if isinstance(one, torch.Tensor) else one

        for operator, args, kwargs, found in self.operators:
            made = operator(*pytree.tree_map(of_now, args), **pytree.tree_map(of_now, kwargs))
            now |= {id(one): other for one, other in zip(_arrays(found), _arrays(made), strict=True)}
        for *_, found in self.operators:
            for one in _arrays(found):
                memory, other = one.untyped_storage(), now[id(one)].untyped_storage()
                if memory.data_ptr() in self.inside and memory.data_ptr() != other.data_ptr():
                    memory.copy_(other)


def _arrays(tree: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]


def capture(run: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
    graph = Graph()
    try:
        with graph:
            found = run()
    finally:
        graph.undo()
    return graph, found


def captured(job: Any, *given: Any) -> Any:
    """What a job returns in a process where updates are captured, and the device decides about them, as on a GPU."""
    compilation.DECIDED = compilation.GUARDED = update_graph.CAPTURED = {"cpu"}
    stand_in(setattr)
    return job(*given)


def stand_in(change: Callable[[Any, str, Any], object]) -> None:
    """Lets these graphs take the place of CUDA's; `change` is `setattr`, or that of a test which undoes it."""
    change(captures, "capture", capture)
    change(surroundings, "reach", lambda *_: False)  # nothing hides operators from the recording,
    change(operators, "call_directly", lambda _: None)  # and nothing that only the CPU has takes their place
    change(steady_views, "staying", lambda *_: frozenset())
    Graph.replays = 0
