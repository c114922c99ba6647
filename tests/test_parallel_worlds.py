"""Any number of ranks computes the same bits: worlds of 1 to 4 processes on this machine."""

import io
import os
import signal
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.ranks.news import HEADER, TOLERANCE, Layout
from stepgraph.compiler.step import KeyKind
from stepgraph.graphs.telling import Telling
from stepgraph.runtime import world as worlds
from tests.parallel_runs import NETWORKS, batch, fitted, marks, new, together, trained

DEEP = pytest.mark.deep


alone = cache(trained)
ORDINARY = {2: ("transformer",), 3: ("mlp", "heads"), 4: ("cnn", "imported")}


def several(names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    return {name: trained(name) for name in names}


@pytest.mark.parametrize(
    "world, names",
    [*ORDINARY.items(), *(pytest.param(world, tuple(NETWORKS), marks=DEEP, id=f"{world}-all") for world in ORDINARY)],
)
def test_every_world_computes_the_same_bits(world: int, names: tuple[str, ...]) -> None:
    expected = {name: alone(name) for name in names}
    assert together(world, several, names) == [expected] * world


def overlapping(rounds: int) -> bool:
    """Starts many collectives before it waits for the first; whether each brings what it should."""
    ranks, right = worlds.joined(torch.device("cpu"), 60), True
    for first in range(rounds):
        waits = [ranks.gather(torch.full((3,), 99.0 * ranks.rank + first + i), "rows") for i in range(50)]
        for i, wait in enumerate(waits):
            right = right and wait().tolist() == [[first + i] * 3, [99 + first + i] * 3]
    return right


def test_collectives_may_overlap() -> None:
    assert together(2, overlapping, 10) == [True, True]


def kinds() -> set[str]:
    """The collectives of the communication library that an update makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        new("wide").execute(*batch("wide", 13, 0))
    return {one.key for one in profile.key_averages() if one.key.startswith("c10d::")}


def test_no_collective_of_gloo_has_a_long_name() -> None:
    """Gloo's threads note names without a lock, and memory that a long one takes may be freed twice."""
    for found in together(2, kinds):
        assert "c10d::_allgather_base_" in found and "c10d::allgather_into_tensor_coalesced_" not in found


# ------------------------------------------------------------------------------------------------------------ fit


def shown(folder: str, epochs: int, network: str) -> tuple[dict[str, Any], int]:
    """The same, and how many epochs this rank has shown."""
    with redirect_stdout(io.StringIO()) as printed:
        found = fitted(folder, epochs, network=network)
    return found, sum(line.startswith("epoch") for line in printed.getvalue().splitlines())


@pytest.mark.parametrize("network, worlds", [("mlp", (3, 2)), pytest.param("wide", (4, 3), marks=DEEP)])
def test_a_run_continues_with_another_number_of_ranks(tmp_path: Path, network: str, worlds: tuple[int, int]) -> None:
    expected = fitted(str(tmp_path / "alone"), 3, network=network)
    for epoch, world in enumerate(worlds, start=1):
        found, lines = zip(*together(world, shown, str(tmp_path / "several"), epoch, network), strict=True)
        assert all(one == found[0] for one in found)
        assert lines == (1, *[0] * (world - 1))  # only the first rank shows progress
    assert fitted(str(tmp_path / "several"), 3, network=network) == expected


def accumulated(folder: str) -> dict[str, Any]:
    """A model with groups, clipping and averages, whose updates have two batches."""
    return fitted(folder, 2, accumulate=2, save_every=1, network="imported")


def test_several_batches_make_one_update(tmp_path: Path) -> None:
    expected = accumulated(str(tmp_path / "alone"))
    assert together(2, accumulated, str(tmp_path / "two")) == [expected] * 2
    assert expected["epochs"][-1]["step"] == 4


def interrupted(folder: str) -> tuple[str, int]:
    """One rank gets Ctrl-C in the third step; all stop after it, with a checkpoint."""

    class Pressed(sg.Callback):
        def step(self, moment: sg.Moment) -> None:
            if moment.step == 3 and os.environ["RANK"] == "1":
                signal.raise_signal(signal.SIGINT)

    found = fitted(folder, 5, callbacks=[Pressed()])
    return found["stopped"], len(found["steps"])


def test_all_ranks_stop_when_one_is_interrupted(tmp_path: Path) -> None:
    assert together(2, interrupted, str(tmp_path)) == [("interrupted", 3)] * 2
    assert fitted(str(tmp_path), 2) == fitted(str(tmp_path / "whole"), 2)


# ------------------------------------------------------------------------------------------------ what goes wrong


def unequal_batches() -> None:
    training = new("mlp")
    training.execute(*batch("mlp", 13, seed=0))
    before = marks(training)
    try:
        training.execute(*batch("mlp", 13, seed=int(os.environ["RANK"])))
    finally:
        assert marks(training) == before


def unequal_numbers() -> None:
    training = new("mlp")
    training.execute(*batch("mlp", 13, seed=0))
    before, rate = marks(training)[KeyKind.VALUE], training.optimizer.learning_rate
    if os.environ["RANK"] == "1":
        training.optimizer.learning_rate = rate * 1.001
    try:
        training.execute(*batch("mlp", 13, seed=0))
    finally:
        assert marks(training)[KeyKind.VALUE] == before
        training.optimizer.learning_rate = rate
        training.execute(*batch("mlp", 13, seed=0))


def unequal_rows() -> None:
    new("mlp").execute(*batch("mlp", 13 + int(os.environ["RANK"]), seed=0))


def failing() -> None:
    """A label that only the second rank looks at is out of range; afterwards both go on."""
    training = new("cnn")
    before = marks(training)
    (inputs, labels) = batch("cnn", 16, 1)
    labels["y"][12] = 99
    try:
        training.execute(inputs, labels)
    finally:
        assert marks(training) == before
        training.execute(*batch("cnn", 16, 0))


def test_ranks_with_other_batches_are_refused_by_all() -> None:
    for job, rows_of_second in ((unequal_batches, 13), (unequal_rows, 14)):
        for answer in together(2, job):
            assert f"different batches, of 13 and {rows_of_second} rows" in answer


def test_ranks_with_other_numbers_of_the_optimizer_are_refused_by_all() -> None:
    """Each would update its slice with its own."""
    for answer in together(2, unequal_numbers):
        assert "different learning rates or other numbers of the optimizer" in answer


def test_a_learning_rate_counts_beside_large_numbers() -> None:
    told = Telling(Layout((), (), 2), 8, torch.device("cpu")), Telling(Layout((), (), 2), 8, torch.device("cpu"))
    tokens = torch.full((8, 4096), 50_000)
    for one, rate in zip(told, (1e-4, 1.1e-4), strict=True):
        one.tell_header(False, 0.0, False, [tokens, torch.tensor([rate, float("inf")], dtype=torch.float64)])
    first, second = (one.header[HEADER.index("sample")].item() for one in told)
    assert abs(first - second) > TOLERANCE


def test_no_rank_waits_for_one_that_has_failed() -> None:
    for answer in together(2, failing):
        assert answer.startswith("DataError") and "row 12 holds the class index 99" in answer


@DEEP
@pytest.mark.parametrize("order", ["tree", "any"])
def test_more_ranks_than_rows(order: str) -> None:
    for found in together(4, few_rows, order):
        assert found == pytest.approx(few_rows(order), rel=1e-5)


def few_rows(order: str) -> list[float]:
    training = new("mlp", parallel={"order": order})
    return [training.execute(*batch("mlp", 2, 0)).loss for _ in range(5)]  # type: ignore[misc]
