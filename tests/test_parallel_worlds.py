"""Any number of ranks computes the same bits: worlds of 1 to 4 processes on this machine."""

import io
import os
import signal
import time
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from tests.parallel_runs import NETWORKS, batch, compiled, marks, mlp, new, together, trained

DEEP = pytest.mark.deep


alone = cache(trained)
ORDINARY = {2: ("transformer",), 3: ("mlp", "heads"), 4: ("cnn",)}


def several(names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    return {name: trained(name) for name in names}


@pytest.mark.parametrize(
    "world, names",
    [*ORDINARY.items(), *(pytest.param(world, tuple(NETWORKS), marks=DEEP, id=f"{world}-all") for world in ORDINARY)],
)
def test_every_world_computes_the_same_bits(world: int, names: tuple[str, ...]) -> None:
    expected = {name: alone(name) for name in names}
    assert together(world, several, names) == [expected] * world


# ------------------------------------------------------------------------------------------------------------ fit


def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    (inputs, labels) = batch("mlp", count, 9)
    return inputs["x"], labels["y"]


def fitted(folder: str, epochs: int, **settings: Any) -> dict[str, Any]:
    """Trains up to an epoch, from the latest checkpoint if there is one; other ranks begin with other numbers."""
    sg.set_seed(3 + int(os.environ.get("RANK", "0")))
    training = compiled(mlp())
    data = {"validation": rows(9), "batch_size": 13, "metrics": ["accuracy"], "progress": "plain", **settings}
    history = sg.fit(training, rows(44), epochs=epochs, checkpoints=folder, resume=True, **data)
    times = ("seconds", "waiting")
    timeless = [{name: one for name, one in row.items() if name not in times} for row in history.epochs]
    return {"epochs": timeless, "steps": history.steps, "marks": marks(training), "stopped": history.stopped}


def shown(folder: str, epochs: int) -> tuple[dict[str, Any], int]:
    """The same, and how many epochs this rank has shown."""
    with redirect_stdout(io.StringIO()) as printed:
        found = fitted(folder, epochs)
    return found, sum(line.startswith("epoch") for line in printed.getvalue().splitlines())


def test_a_run_continues_with_another_number_of_ranks(tmp_path: Path) -> None:
    expected = fitted(str(tmp_path / "alone"), 3)
    for epoch, world in enumerate((3, 2), start=1):
        found, lines = zip(*together(world, shown, str(tmp_path / "several"), epoch), strict=True)
        assert all(one == found[0] for one in found)
        assert lines == (1, *[0] * (world - 1))  # only the first rank shows progress
    assert fitted(str(tmp_path / "several"), 3) == expected


def accumulated(folder: str) -> dict[str, Any]:
    return fitted(folder, 2, accumulate=2, save_every=1)


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


def differing() -> None:
    wide = int(os.environ["RANK"])
    x, y, graph = sg.Tensor((sg.BATCH, 6)), sg.Tensor((sg.BATCH, 3)), sg.Graph()
    graph.dense(graph.dense(x, 8 + wide), 3)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    try:
        compiled(training)
    finally:
        assert training.session is None


def unequal_batches() -> None:
    training = new("mlp")
    training.execute(*batch("mlp", 13, seed=0))
    before = marks(training)
    try:
        training.execute(*batch("mlp", 13, seed=int(os.environ["RANK"])))
    finally:
        assert marks(training) == before


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


def test_ranks_that_do_not_fit_are_refused_by_all() -> None:
    found = together(2, differing)
    assert all("StateError" in one and "rank 1 has another program" in one for one in found)
    digests = [line.split()[-1] for line in found[0].splitlines() if "rank" in line.split()[0]]
    assert len(set(digests[-2:])) == 2 and all(digest in found[1] for digest in digests[-2:])
    for job, rows_of_second in ((unequal_batches, 13), (unequal_rows, 14)):
        for answer in together(2, job):
            assert f"different batches, of 13 and {rows_of_second} rows" in answer


def test_no_rank_waits_for_one_that_has_failed() -> None:
    first, second = together(2, failing)
    assert "rank 1 failed in this step; nothing has changed" in first
    assert second.startswith("DataError") and "99" in second


def hanging() -> None:
    training = mlp()
    training.compile("cpu", parallel=sg.Parallel(4, timeout=2))
    if os.environ["RANK"] == "1":
        time.sleep(6)
        return
    training.execute(*batch("mlp", 13, 0))


def test_a_rank_that_hangs_is_noticed() -> None:
    first, second = together(2, hanging)
    assert "rank 0 of 2: the other ranks could not be reached to exchange bucket 0" in first
    assert "(gradients of 4 parameters, 'FullyConnected2.weights' to 'FullyConnected1.biases')" in first
    assert second is None


@DEEP
@pytest.mark.parametrize("order", ["tree", "any"])
def test_more_ranks_than_rows(order: str) -> None:
    for found in together(4, few_rows, order):
        assert found == pytest.approx(few_rows(order), rel=1e-5)


def few_rows(order: str) -> list[float]:
    training = new("mlp", parallel={"order": order})
    return [training.execute(*batch("mlp", 2, 0)).loss for _ in range(5)]  # type: ignore[misc]
