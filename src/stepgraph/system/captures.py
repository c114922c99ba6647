"""Recording work as a CUDA graph while other threads use the device.

A thread that waits for the whole device breaks every capture that is under way on it, whatever its mode, and gets an
error itself. PyTorch's compiler waits like that when it measures kernels in the background; a user's threads may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from stepgraph.system import torch_private

Result = TypeVar("Result")
ATTEMPTS, PAUSE = 20, 0.05  # seconds
_BROKEN = "due to a previous error during capture"
_kept: list[torch.cuda.CUDAGraph] = []  # PyTorch's allocators refer to graphs whose capture has failed


def capture(run: Callable[[], Result], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of what `run` launches, and what it returns; again, if another thread has broken the capture.

    Nothing runs during a capture, so another attempt changes nothing.
    """
    for attempt in range(ATTEMPTS):
        try:
            return _captured(run, device)
        except RuntimeError as error:
            if _BROKEN not in str(error) or attempt == ATTEMPTS - 1:
                raise
            time.sleep(PAUSE)
    raise AssertionError("the last attempt returns or raises")


def met_capture(error: BaseException) -> bool:
    """Whether an operation failed because another thread was capturing at that moment."""
    return isinstance(error, RuntimeError) and "captur" in str(error)


def _captured(run: Callable[[], Result], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    problem: Exception | None = None
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            try:
                found = run()
            except Exception as error:
                problem = error
                raise
        return graph, found
    except BaseException as error:
        graph.reset()
        _kept.append(graph)
        torch_private.end_allocations(device, pool)
        # The end of a capture fails whatever the reason: the first error tells more.
        raise (problem or error) from None
