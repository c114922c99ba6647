"""Ranks take fused operators in the same update, or none of them does.

Compilers take different times on different ranks. Each rank tells the others in every update whether its own parts are
ready; as all see the same answers, all switch behind the same exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum

from stepgraph.runtime.executable import Executable


class Readiness(IntEnum):
    """What a rank tells the others about its fused operators."""

    PENDING = 0
    READY = 1
    FAILED = 2


def readiness(parts: Collection[Executable]) -> Readiness:
    """What to tell the others about the parts that this rank runs in an update."""
    if any(one.fusion_has_failed for one in parts):
        return Readiness.FAILED
    return Readiness.READY if all(one.can_run_fused for one in parts) else Readiness.PENDING


def settle(parts: Collection[Executable], told: Sequence[float]) -> None:
    """Switches the parts of this rank as all ranks do.

    Args:
        parts: what this rank runs in an update.
        told: the readiness of each rank.
    """
    failed = next((rank for rank, one in enumerate(told) if one == Readiness.FAILED), None)
    for part in parts:
        if failed is not None:
            part.unfuse(f"rank {failed} could not fuse its operators")
        elif all(one == Readiness.READY for one in told):
            part.take_fused()
