"""Any number of ranks computes the same bits: worlds of 1 to 4 processes on this machine."""

from typing import Any

import pytest

from tests import parallel_runs
from tests.parallel_runs import NETWORKS, together, trained


def everything(names: list[str], steps: int) -> dict[str, dict[str, str]]:
    return {name: trained(name, steps) for name in names}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, str]]:
    return everything([*NETWORKS], parallel_runs.STEPS)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_world_computes_the_same_bits(world: int, alone: dict[str, Any]) -> None:
    for found in together(world, everything, [*NETWORKS], parallel_runs.STEPS):
        assert found == alone
