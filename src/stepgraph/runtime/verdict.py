"""Updates of several ranks that the device itself accepts or refuses, by what the ranks have told each other.

The host learns of it later: when a loss that is NaN is read, when somebody waits for the call, or in front of what the
next update sends. No rank is ahead of another by more than that, so all of them raise an error, and none is waited for.
Whether the next update raises it depends only on what its own thread has done: threads that wait for a call, such as
those of completion handlers, learn of it sooner on one rank than on another.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cached_property

import torch

from stepgraph.compiler.ranks import news
from stepgraph.errors import ExecutionError, StepgraphError
from stepgraph.runtime import rank_calls
from stepgraph.runtime.rank_calls import listed
from stepgraph.runtime.world import World

Explain = Callable[[torch.Tensor], Exception | None]


class Sent:
    """What ranks have told, on its way to the host.

    Args:
        told: what every rank has told about itself, `[rank, number]`, on the device.
    """

    def __init__(self, told: torch.Tensor) -> None:
        self._copy, self._copied = told, None
        if told.is_cuda:
            self._copy = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            self._copy.copy_(told, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> torch.Tensor:
        """What they have told; waits until they have."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy


class SentAgain:
    """The same of an update that is captured: each replay sends it to one place, and counts.

    The count shows that what is there comes from the last replay, whatever PyTorch says of an event inside a graph.

    Args:
        shape: the shape of what ranks tell.
        device: where they tell it.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._device, self._expected = device, 0
        self._count = torch.zeros(1, dtype=news.DTYPE, device=device)
        on_gpu = device.type == "cuda"
        self._copy = torch.zeros(shape[0] * shape[1] + 1, dtype=news.DTYPE, pin_memory=on_gpu)
        self._numbers = self._copy.numpy()  # the same memory, read without an operator
        self._told = self._copy[:-1].view(shape)
        self._copied = torch.cuda.Event(external=True) if on_gpu else None

    def send(self, told: torch.Tensor) -> None:
        """Copies what ranks have told, in every replay; called during capture."""
        self._count.add_(1)
        self._copy.copy_(torch.cat([told.reshape(-1), self._count]), non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def expect(self) -> None:
        """Must be called before each replay, which overwrites what was sent before."""
        self._expected += 1

    def read(self) -> torch.Tensor:
        """What ranks have told in the last replay; waits until they have."""
        if self._copied is not None:
            self._copied.synchronize()
            if self._numbers[-1] != self._expected:
                torch.cuda.synchronize(self._device)
        return self._told.clone()


class Verdict:
    """Whether one update has counted.

    Args:
        read: waits for what every rank has told about itself, `[rank, number]`, on the host.
        explain: makes the error for that; None if the update has counted.
        report: called once if there is an error, before it is raised.
        has_handler: whether a completion handler gets the error.
    """

    def __init__(
        self,
        read: Callable[[], torch.Tensor],
        explain: Explain,
        report: Callable[[], None],
        has_handler: bool = False,
    ) -> None:
        self._read, self._explain, self._report = read, explain, report
        self._has_handler = has_handler
        self._threads: set[int] = set()  # in which the error has been raised

    @cached_property
    def told(self) -> torch.Tensor:
        """What ranks have told; waits until they have."""
        return self._read()

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
            self._threads.add(threading.get_ident())
            raise self._error

    @property
    def is_refused(self) -> bool:
        """Whether the update has been refused; waits until that is known."""
        return self._error is not None

    @property
    def is_raised(self) -> bool:
        """Whether the error has been raised in this thread, or is left to a completion handler."""
        return self._has_handler or threading.get_ident() in self._threads

    def require_known(self) -> None:
        """Raises if the update has been refused, unless this thread need not be told; waits until that is known."""
        if self.is_refused and not self.is_raised:
            self.require_none()


def disagreement(
    told: torch.Tensor, world: World, refused: Callable[[list[int]], StepgraphError], name: Callable[[int], str]
) -> StepgraphError | None:
    """Why ranks cannot make an update together; None if they can.

    Args:
        told: what each has told about itself.
        world: the ranks.
        refused: makes the error for what a rank has noted about indices.
        name: the name of a tensor that a rank has changed, by its number; behind all tensors, their optimizer buffers.
    """
    where, headers, notes = f"rank {world.rank} of {world.size}", news.headers_of(told), news.notes_of(told)
    first = headers[0]
    apart = rank_calls.disagreement(news.calls_of(headers), where, name, [one.graph for one in headers])
    if apart is not None:
        return apart
    for rank, (header, noted) in enumerate(zip(headers, notes, strict=True)):
        if any(noted):
            error = refused(noted)
            error.facts["found_by"] = f"rank {rank} of {world.size}"
            return error
        if math.isnan(header.failed):
            problem = f"rank {rank} failed in this step; nothing has changed"
            return ExecutionError(where, problem, fix=f"see the error of rank {rank}")
        if header.changed != first.changed:
            fix = "write the same numbers on every rank, or let every rank restore a checkpoint"
            return ExecutionError(where, _written([int(one.which) for one in headers], name), fix=fix)
        if header.rows != first.rows or abs(header.sample - first.sample) >= news.TOLERANCE:
            problem = f"ranks 0 and {rank} have different batches, of {first.rows:.0f} and {header.rows:.0f} rows"
            if header.rows == first.rows:
                problem += (
                    ", or different learning rates or other numbers of the optimizer, decays of averages, random "
                    "streams or loss scales"
                )
            fix = "pass the whole batch, with its rows in the same order, on every rank, which takes its own rows; "
            return ExecutionError(where, problem, fix=f"{fix}assign numbers of the optimizer on every rank")
    return None


def _written(which: list[int], name: Callable[[int], str]) -> str:
    """Which ranks have written to what, by the number of the first tensor that each has changed; 0 is none."""
    ranks = [rank for rank, one in enumerate(which) if one]
    others = [rank for rank, one in enumerate(which) if not one]
    names = " and ".join(name(one - 1) for one in dict.fromkeys(which[rank] for rank in ranks))
    if not others:
        return f"{listed(ranks)} have written different numbers to {names} since the last update"
    has, have_not = ("has" if len(some) == 1 else "have" for some in (ranks, others))
    return f"{listed(ranks)} {has} written to {names} since the last update, and {listed(others)} {have_not} not"
