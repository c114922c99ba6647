"""Arrays that reach a fused step's updates beside PyTorch's compiler, because nothing else reads or writes them.

An update changes several arrays of every parameter: optimizer buffers and, if layers read rounded copies, the parameter
itself. For each array that an operator changes, the compiler makes a copy, propagates it through a dozen passes, and
removes it at the end. That takes a large share of its time, and it can gain nothing from arrays that it does not
compute with.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels.update import BY_KERNEL, launch_kernel

_call = threading.local()  # `arrays`: those of the call that runs in this thread
_library = torch.library.Library("stepgraph", "FRAGMENT")
# What an update changes: `seen` in the order of the negative `places`, the others by their places among the arrays of
# the call. Parameters come first, then buffers by slot, then copies.
_library.define(
    "update_beside_(Tensor(a!)[] seen, Tensor[] gradients, Tensor numbers, Tensor? norm, Tensor? finite, "
    "int[] places, int copies, int kernel) -> ()"
)
SEEN = -1


@torch.library.impl(_library, "update_beside_", "CompositeExplicitAutograd")
def update_beside(
    seen: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    numbers: torch.Tensor,
    norm: torch.Tensor | None,
    finite: torch.Tensor | None,
    places: Sequence[int],
    copies: int,
    kernel: int,
) -> None:
    """`update_by_kernel_` with arrays of the call."""
    following = iter(seen)
    arrays = [next(following) if place == SEEN else _call.arrays[place] for place in places]
    end, count = len(arrays) - copies, len(gradients)
    launch_kernel(arrays[:count], gradients, arrays[count:end], arrays[end:], numbers, norm, finite, kernel)


@torch.library.register_fake("stepgraph::update_beside_", lib=_library)
def _(*_: object) -> None:
    return None


@contextmanager
def passing(arrays: Sequence[torch.Tensor]) -> Iterator[None]:
    """Lets updates find the arrays of a call, until it ends."""
    before = getattr(_call, "arrays", ())
    _call.arrays = arrays
    try:
        yield
    finally:
        _call.arrays = before


def pass_beside(graph: fx.Graph) -> None:
    """Removes the inputs that only one update has to do with; the update takes them from the call."""
    places = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
    for update in graph.find_nodes(op="call_function", target=BY_KERNEL):
        parameters, gradients, states, copies, numbers, norm, finite, kernel = update.args
        changed: list[Any] = [*parameters, *states, *copies]
        unseen = {one for one in changed if one in places and list(one.users) == [update]} - {*gradients, numbers}
        if not unseen.issuperset(changed):  # the compiler removes an operator that changes nothing
            update.target = torch.ops.stepgraph.update_beside_.default
            update.args = (
                [one for one in changed if one not in unseen], gradients, numbers, norm, finite,
                [places[one] if one in unseen else SEEN for one in changed], len(copies), kernel,
            )  # fmt: skip
            for one in unseen:
                graph.erase_node(one)
