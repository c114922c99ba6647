"""Steps whose images have their channels last, as on a GPU, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from stepgraph.compiler import pipeline


@contextmanager
def channels_last() -> Iterator[None]:
    """What is compiled inside has its channels last, wherever measuring would have put them."""

    with patch.object(pipeline, "decided", lambda step: replace(step, channels_last=True)):
        yield
