"""Steps whose images have their channels last, as on a GPU, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from stepgraph.compiler import layout, pipeline
from stepgraph.compiler.program import Program
from stepgraph.compiler.step import Step


@contextmanager
def channels_last() -> Iterator[None]:
    """What is compiled inside has its channels last, wherever measuring would have put them."""

    def traced(step: Step) -> Program:
        return pipeline.program(replace(step, channels_last=True))

    with patch.object(layout, "traced", traced):
        yield
