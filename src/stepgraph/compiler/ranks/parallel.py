"""How an update is divided among processes: the setting that `compile` takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from stepgraph.errors import ArgumentError

TREE, ANY = ORDERS = ("tree", "any")


@dataclass(frozen=True)
class Parallel:
    """Trains in one process, or in all that torchrun started, with the same program.

    The batch of an update is cut into `shards` parts, whatever the number of processes. Each process, a rank, runs
    its parts one after another, and all make the same update with the sum of the gradients. With the order
    `"tree"`, sums are taken in a fixed order over the parts, so that any number of ranks computes the same bits.

    Args:
        shards: the parts of a batch, at least as many as there are ranks; a multiple of that divides the work evenly.
            Batch normalization and dropout work on each part by itself.
        order: `"tree"`, or `"any"` for the order of the communication library, which depends on the number of ranks.
        timeout: seconds after which a rank stops waiting for the others.

    Example:
        >>> training.compile("cpu", parallel=Parallel(shards=8))  # doctest: +SKIP
    """

    shards: int
    order: str = TREE
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if isinstance(self.shards, bool) or not isinstance(self.shards, Integral) or self.shards < 1:
            raise ArgumentError("Parallel", f"shards is {self.shards!r}", fix="pass an integer ≥ 1")
        if self.order not in ORDERS:
            raise ArgumentError("Parallel", f"order is {self.order!r}", fix='use "tree" or "any"')
        seconds = self.timeout
        if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < seconds < math.inf:
            raise ArgumentError("Parallel", f"timeout is {seconds!r}", fix="pass a positive number of seconds")
