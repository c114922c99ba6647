"""Recording work as a CUDA graph while other threads use the device.

A thread that waits for the whole device breaks every capture that is under way on it, whatever its mode, and gets an
error itself. PyTorch's compiler waits like that when it measures kernels in the background; a user's threads may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from stepgraph.system import streams, torch_private

Result = TypeVar("Result")
ATTEMPTS, PAUSE = 20, 0.05  # seconds
RESTS = 10  # seconds without an attempt, if other threads have broken all of these
_BROKEN, _FORBIDDEN = "due to a previous error during capture", "not permitted when stream is capturing"
_kept: list[torch.cuda.CUDAGraph] = []  # PyTorch's allocators refer to graphs whose capture has failed


class Broken(Exception):
    """Another thread has broken the capture; the cause is what was raised first."""


def capture(run: Callable[[], Result], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph of what `run` launches, and what it returns; again, if another thread has broken the capture.

    Nothing runs during a capture, so another attempt changes nothing. Raises `Broken` if each attempt was broken.
    """
    for _ in range(ATTEMPTS - 1):
        with suppress(Broken):
            return _captured(run, device)
        time.sleep(PAUSE)
    return _captured(run, device)


def met_capture(error: BaseException) -> bool:
    """Whether an operation failed because another thread was capturing at that moment."""
    return isinstance(error, RuntimeError) and "captur" in str(error)


def _captured(run: Callable[[], Result], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    first: Exception | None = None
    try:
        with torch.cuda.graph(graph, pool, streams.of_captures(device), capture_error_mode="thread_local"):
            try:
                found = run()
            except Exception as error:
                first = error
                raise
        return graph, found
    except BaseException as error:
        graph.reset()
        _kept.append(graph)
        torch_private.end_allocations(device, pool)
        # In a broken capture every launch fails, each library with its own words; only the end is certain to say why.
        if _BROKEN in str(error) and _FORBIDDEN not in str(first):
            raise Broken(str(first or error)) from first or error
        raise first or error from None
