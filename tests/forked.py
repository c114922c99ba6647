"""Processes of their own for tests, forked from one that has imported and compiled before."""

import multiprocessing
from multiprocessing.context import ForkServerContext


def forked() -> ForkServerContext:
    """Python keeps one such process for each that asks, as its first caller wants it. So all callers want the same."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.warm"])
    return context
