"""Updates of several ranks that the device itself accepts or refuses, by what the ranks have told each other.

The host learns of it later: when a loss that is NaN is read, when somebody waits for the call, or in front of what the
next update sends. No rank is ahead of another by more than that, so all of them raise an error, and none is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch

from stepgraph.compiler import news
from stepgraph.errors import ExecutionError, StepgraphError
from stepgraph.runtime.world import World

Explain = Callable[[torch.Tensor], Exception | None]


class Verdict:
    """Whether one update has counted.

    Args:
        told: what every rank has told about itself, `[rank, number]`, on the device.
        explain: makes the error for that, on the host; None if the update has counted.
        report: called once if there is an error, before it is raised.
    """

    def __init__(self, told: torch.Tensor, explain: Explain, report: Callable[[], None]) -> None:
        self._explain, self._report = explain, report
        self._copy, self._copied = told, None
        if told.is_cuda:
            self._copy = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            self._copy.copy_(told, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @cached_property
    def told(self) -> torch.Tensor:
        """What ranks have told; waits until they have."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy

    @cached_property
    def _error(self) -> Exception | None:
        explain, report = self._explain, self._report
        del self._explain, self._report  # whoever keeps a call must not keep its graph
        error = explain(self.told)
        if error is not None:
            report()
        return error

    def require_none(self) -> None:
        """Raises if the update has been refused; waits until that is known."""
        if self._error is not None:
            raise self._error


def disagreement(
    told: torch.Tensor, world: World, refused: Callable[[list[int]], StepgraphError]
) -> StepgraphError | None:
    """Why ranks cannot make an update together; None if they can.

    Args:
        told: what each has told about itself.
        world: the ranks.
        refused: makes the error for what a rank has noted about indices.
    """
    where, first = f"rank {world.rank} of {world.size}", told[0].tolist()
    for rank, (failed, rows, sample, *_) in enumerate(told.tolist()):
        noted = news.notes_of(told[rank])
        if any(noted):
            error = refused(noted)
            error.facts["found_by"] = f"rank {rank} of {world.size}"
            return error
        if math.isnan(failed):
            problem = f"rank {rank} failed in this step; nothing has changed"
            return ExecutionError(where, problem, fix=f"see the error of rank {rank}")
        if rows != first[1] or abs(sample - first[2]) >= news.TOLERANCE:
            problem = f"ranks 0 and {rank} have different batches, of {first[1]:.0f} and {rows:.0f} rows"
            fix = "pass the whole batch, with its rows in the same order, on every rank; each takes its own rows"
            return ExecutionError(where, problem, fix=fix)
    return None
