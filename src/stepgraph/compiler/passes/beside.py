"""Arrays that reach a fused step's updates beside PyTorch's compiler, because nothing else reads or writes them.

An update changes several arrays of every parameter: optimizer buffers and, if layers read rounded copies, the parameter
itself. For each array that an operator changes, the compiler makes a copy, propagates it through a dozen passes, and
removes it at the end. That takes a large share of its time, and it can gain nothing from arrays that it does not
compute with.

It removes the copy of an array that it does compute with only if everything that reads the array comes before the
update, and it moves operators toward what reads their results. So an update also gets results that were computed from
what it changes, and that are needed after it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels.update import BY_KERNEL, launch_kernel
from stepgraph.compiler.passes.absorbed import is_absorbed, is_reduction, users_of
from stepgraph.compiler.program import fake, is_view
from stepgraph.system import torch_private

_call = threading.local()  # `arrays`: those of the call that runs in this thread
_library = torch.library.Library("stepgraph", "FRAGMENT")
# What an update changes: `seen` in the order of the negative `places`, the others by their places among the arrays of
# the call. Parameters come first, then buffers by slot, then copies. Nothing is done to `before`.
_library.define(
    "update_beside_(Tensor(a!)[] seen, Tensor[] gradients, Tensor numbers, Tensor? norm, Tensor? finite, "
    "int[] places, int copies, int kernel, Tensor[] before) -> ()"
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
    before: Sequence[torch.Tensor],
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
            seen = [one for one in changed if one not in unseen]
            update.args = (
                seen, gradients, numbers, norm, finite,
                [places[one] if one in unseen else SEEN for one in changed], len(copies), kernel,
                _computed_before(update, seen),
            )  # fmt: skip
            for one in unseen:
                graph.erase_node(one)


def _computed_before(update: fx.Node, seen: Iterable[fx.Node]) -> list[fx.Node]:
    """What operators outside generated kernels, such as products, compute from these arrays for after the update."""
    readers = dict.fromkeys(reader for one in seen for reader in sorted(users_of(one)) if reader < update)
    known = (one for one in readers if isinstance(one.target, torch_private.OpOverload) and not is_absorbed(one))
    return [one for one in known if isinstance(fake(one), torch.Tensor) and _is_read_after(update, one)]


def _is_read_after(update: fx.Node, result: fx.Node) -> bool:
    """Whether a result is in memory after an update anyway, because a kernel reads it there."""
    found, pending = {result}, [result]
    while pending:
        for user in pending.pop().users:
            if update < user:
                return True
            if user not in found and (is_view(user) or (is_absorbed(user) and not is_reduction(user))):
                found.add(user)
                pending.append(user)
    return False
