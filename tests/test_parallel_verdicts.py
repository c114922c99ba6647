"""Updates about which the device decides, as on a GPU: what one rank refuses no rank makes, and all learn of it."""

import os
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.graphs import compilation
from stepgraph.graphs.shard_update import Update
from stepgraph.runtime import world as worlds
from tests.parallel_runs import NETWORKS, batch, expect_refusal, first_weights, marks, new, rows, together, trained
from tests.test_parallel_slices import as_torchrun_would

HERE = ("refused", "offsets", "agreed")  # kinds of arrays that only these steps have


@pytest.fixture(autouse=True)
def _undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "DECIDED", compilation.DECIDED)
    monkeypatch.setattr(compilation, "GUARDED", compilation.GUARDED)


def decided(job: Any, *given: Any) -> Any:
    """What a job returns where the device decides and checks indices."""
    compilation.DECIDED = compilation.GUARDED = {"cpu"}
    return job(*given)


def same(found: dict[str, str]) -> dict[str, str]:
    return {kind: one for kind, one in found.items() if kind not in HERE}


def several(names: tuple[str, ...]) -> dict[str, dict[str, str]]:
    return {name: same(trained(name, 6)) for name in names}


@pytest.mark.parametrize(
    "world, names",
    [(2, ("cnn",)), pytest.param(3, ("heads", "transformer", "wide", "imported"), marks=pytest.mark.deep)],
)
def test_the_bits_are_those_of_a_host_that_looks(world: int, names: tuple[str, ...]) -> None:
    expected = several(names)
    assert together(world, decided, several, names) == [expected] * world
    assert decided(several, names) == expected


def tried(call: Any) -> str:
    try:
        call()
    except sg.StepgraphError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def refused(kind: str, reads: bool) -> dict[str, Any]:
    """An update that one rank cannot make, between some that count; a loop that `reads` looks at every loss."""
    training = new("cnn")
    training.execute(*batch("cnn", 13, 0), batch_size=13)
    before, (inputs, labels) = same(marks(training)), batch("cnn", 13, 1)
    steps = training.optimizer.time_step
    last = os.environ["RANK"] == "1"
    run, weights = Update.run_and_exchange, first_weights(training)
    if kind == "write" and last:
        weights.torch().mul_(2)
    elif kind == "label":
        labels["y"][11] = 99  # in the last shards
    elif kind == "batch" and last:
        inputs["x"][0] += 1
    elif kind == "failure" and last:

        def fail(update: Update, *given: Any) -> Any:
            update.failure = sg.ExecutionError("execute", "out of order")
            return []

        Update.run_and_exchange = fail  # type: ignore[method-assign]
    execution = training.execute(inputs, labels, batch_size=13)
    Update.run_and_exchange = run  # type: ignore[method-assign]
    predicted = sg.predict(training, batch("cnn", 4, 0)[0])["output"].tobytes()  # reads statistics, before it is known
    next_one = batch("cnn", 13, 1)
    error = tried(lambda: execution.loss if reads else training.execute(*next_one, batch_size=13))
    again = tried(lambda: execution.loss)
    if kind == "write":
        repeated = tried(lambda: training.execute(*next_one, batch_size=13).loss)
        assert repeated == error, (repeated, error)  # as long as ranks differ
        weights.torch().mul_(0.5 if last else 1)
        predicted = sg.predict(training, batch("cnn", 4, 0)[0])["output"].tobytes()
    same_state = same(marks(training)) == before and training.optimizer.time_step == steps
    losses = [training.execute(*batch("cnn", 13, step), batch_size=13).loss for step in (1, 2)]
    return {
        "error": error,
        "again": again,
        "same state": same_state,
        "after": (predicted, losses, same(marks(training))),
    }


def undisturbed() -> Any:
    training = new("cnn")
    training.execute(*batch("cnn", 13, 0), batch_size=13)
    predicted = sg.predict(training, batch("cnn", 4, 0)[0])["output"].tobytes()
    losses = [training.execute(*batch("cnn", 13, step), batch_size=13).loss for step in (1, 2)]
    return predicted, losses, same(marks(training))


@pytest.mark.parametrize(
    "kind, reads",
    [
        ("label", True),
        ("failure", False),
        ("write", True),
        pytest.param("write", False, marks=pytest.mark.deep),
        pytest.param("label", False, marks=pytest.mark.deep),
        pytest.param("batch", False, marks=pytest.mark.deep),
        pytest.param("failure", True, marks=pytest.mark.deep),
    ],
)
def test_what_one_rank_refuses_changes_nothing_on_any(kind: str, reads: bool) -> None:
    first, second = together(2, decided, refused, kind, reads)
    expect_refusal(kind, first["error"], second["error"])
    after = undisturbed()
    for one in (first, second):
        assert one["again"] == one["error"]  # the call itself says so whenever it is asked
        assert one["same state"] and one["after"] == after


def alone() -> str:
    training = new("cnn")
    before, (inputs, labels) = same(marks(training)), batch("cnn", 13, 1)
    labels["y"][11] = -7
    error = tried(lambda: training.execute(inputs, labels, batch_size=13).loss)
    assert same(marks(training)) == before
    return error


def test_a_single_process_names_the_row_of_the_batch() -> None:
    assert "row 11 holds the class index -7" in decided(alone)


def fitted_wrongly() -> tuple[str, bool]:
    training = new("mlp")
    before = same(marks(training))
    x, y = rows(13)
    y = np.where(np.arange(13) == 12, 50, y)
    error = tried(lambda: sg.fit(training, (x, y), batch_size=13, epochs=1, progress="quiet", shuffle=False))
    return error, same(marks(training)) == before


def test_fit_raises_the_error_on_every_rank() -> None:
    for error, unchanged in together(2, decided, fitted_wrongly):
        assert "row 12 holds the class index 50" in error and unchanged


def saving(folder: str) -> str:
    training = new("mlp")
    inputs, labels = batch("mlp", 13, 1)
    labels["y"][0] = 50
    training.execute(inputs, labels)
    return tried(lambda: training.save(folder)) + tried(lambda: training.save(folder))


def test_a_checkpoint_is_not_written_behind_a_refused_update(tmp_path: Any) -> None:
    for told in together(2, decided, saving, str(tmp_path / "saved")):
        assert "row 0 holds the class index 50" in told and told.endswith("fine")


def overflowing() -> Any:
    """Float16: an infinite gradient skips an update, a refused one leaves the scale."""
    training = new("wide", compute_type="float16", parallel={"order": "tree"})
    training.loss_scale = 2.0**24
    found = [training.execute(*batch("wide", 16, step)).loss for step in range(4)]
    inputs, labels = batch("wide", 16, 4)
    labels["y"][15] = 70
    scale = training.loss_scale
    error = tried(lambda: training.execute(inputs, labels).loss)
    assert "row 15" in error and training.loss_scale == scale, error
    return found, training.loss_scale, training.optimizer.time_step, same(marks(training))


@pytest.mark.deep
def test_loss_scaling_and_refusals() -> None:
    first, second = together(2, decided, overflowing)
    assert first == second and first[1] < 2.0**24


def without_waiting(name: str, exchanges: bool) -> dict[str, Any]:
    """Trains on one GPU, where nothing between two calls may wait for it, and refuses a batch."""
    worlds.ALWAYS_EXCHANGES = exchanges
    sg.set_seed(5)
    training = NETWORKS[name]()
    training.compile("cuda", parallel=sg.Parallel(2, timeout=60), tf32=False, fuse=False)
    given = [[{key: torch.from_numpy(one).cuda() for key, one in part.items()} for part in batch(name, 16, 0)]]
    given += [[{key: one.clone() for key, one in part.items()} for part in given[0]]]
    losses = [training.execute(*given[0]).loss for _ in range(6)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        executions = [training.execute(*given[0]) for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    losses += [one.loss for one in executions]
    held = lambda: [one.torch().clone() for one in training.require_session("test").compilation.held]  # noqa: E731
    before, steps = held(), training.optimizer.time_step
    given[1][1]["y"].view(-1)[-1] = 99
    wrong = training.execute(*given[1])
    unseen = all(map(torch.equal, before, held()))
    error = tried(lambda: wrong.loss)
    losses += [training.execute(*given[0]).loss for _ in range(2)]
    counted = training.optimizer.time_step - steps
    return {"losses": losses, "unchanged": unseen, "error": error, "counted": counted}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_a_gpu_decides_without_waiting_for_the_host(name: str) -> None:
    found = as_torchrun_would(
        f"[without_waiting({name!r}, exchanges) for exchanges in (False, True)]", "tests.test_parallel_verdicts"
    )
    alone, exchanging = found
    assert exchanging["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    for one in found:
        assert one["unchanged"] and one["counted"] == 2 and "row 15" in one["error"] and "99" in one["error"]
    assert "found by" in exchanging["error"]
