"""PyTorch's tracer reports every array to whoever listens, and pytest listens to everything: half of the time here."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet_tracer() -> Iterator[None]:
    logger = logging.getLogger("torch.__trace")
    was, logger.propagate = logger.propagate, False
    yield
    logger.propagate = was
