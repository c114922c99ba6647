"""A sum over the processes that train together, as an operator of a recorded step, with its own gradient.

Every rank runs one shard, and all run the same operators in the same order. The arrays of all ranks are gathered and
added in the order of the ranks, so that every rank has the same bits. Each contribution changes the sum of every rank,
so the gradient of a contribution is the sum of the gradients of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

Array = torch.Tensor
Gather = Callable[[Array, str], Callable[[], Array]]  # starts to gather; what it returns waits for `[rank, ...]`


@dataclass
class _Exchange:
    """How the arrays of all ranks are gathered, and how many sums the running shard has taken."""

    gather: Gather
    taken: int = 0

    def sum(self, x: Array) -> Array:
        self.taken += 1
        first, *others = self.gather(x, "statistics of a batch")()
        total = first.clone()
        for one in others:
            total += one
        return total


_exchange: ContextVar[_Exchange | None] = ContextVar("stepgraph_sum_over_ranks", default=None)


@contextmanager
def among(gather: Gather) -> Iterator[None]:
    """Inside the block, sums are over the ranks whose arrays `gather` collects; outside, over this process alone."""
    token = _exchange.set(_Exchange(gather))
    try:
        yield
    finally:
        _exchange.reset(token)


def run(x: Array) -> Array:
    """The sum over all ranks; a copy of `x` if there are no others."""
    exchange = _exchange.get()
    return x.clone() if exchange is None else exchange.sum(x)


def take_rest(wanted: Sequence[Array]) -> None:
    """Takes part in the remaining sums of a shard that has failed on this rank, so that no other rank waits for it.

    Args:
        wanted: arrays like those of all sums of the shard, in order.
    """
    exchange = _exchange.get()
    for like in wanted[exchange.taken :] if exchange is not None else ():
        run(torch.full(like.shape, torch.nan, dtype=like.dtype, device=like.device))


sum_over_ranks: Any = torch.library.custom_op("stepgraph::sum_over_ranks", run, mutates_args=())


@sum_over_ranks.register_fake
def _(x: Array) -> Array:
    return torch.empty_like(x)


def _gradient(context: Any, gradient: Array) -> Array:
    found: Array = sum_over_ranks(gradient)
    return found


sum_over_ranks.register_autograd(_gradient)
