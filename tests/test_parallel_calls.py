"""Calls that every rank must make: if one makes another, all say so at once, nothing changes, and all can go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.checkpoint import files
from stepgraph.graphs import compilation
from tests.parallel_runs import batch, compiled, first_weights, marks, mlp, new, rows, together

RANK = "RANK"
NETWORK = "wide"  # parameters that are cut, clipping by the global norm, averages
HERE = ("refused", "offsets", "agreed")  # kinds of arrays that only steps about which a device decides have


@pytest.fixture(autouse=True)
def _undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "DECIDED", compilation.DECIDED)


def frozen(training: sg.TrainingGraph) -> None:
    first_weights(training).is_updatable = False


def unfrozen(training: sg.TrainingGraph) -> None:
    first_weights(training).is_updatable = True


def another_optimizer(training: sg.TrainingGraph) -> None:
    training.compile_optimizer(sg.SGDOptimizer(0.1, momentum=0.9))


def compiled_again(training: sg.TrainingGraph) -> None:
    compiled(training)


def saved(training: sg.TrainingGraph) -> None:
    training.save(os.environ["CHECKPOINT"])


def averages(training: sg.TrainingGraph) -> None:
    assert training.averages


def more_outputs(training: sg.TrainingGraph) -> None:
    training.add_outputs({"hidden": training.nodes[0].results[0]})


def bound(training: sg.TrainingGraph) -> None:
    weights = first_weights(training)
    training.bind_optimizer_data([np.full(weights.shape, one, np.float32) for one in (0.25, 0.5)], weights)


def restored(training: sg.TrainingGraph) -> None:
    """A checkpoint with the parameters that the graph has, and with other optimizer buffers."""
    weights = {name: one.clone() for name, one in training.state_dict().items()}
    training.restore(os.environ["CHECKPOINT"])
    training.load_state_dict(weights)


CALLS: dict[str, tuple[Callable[[sg.TrainingGraph], None], str]] = {
    "frozen": (frozen, "rank 1 has frozen 'FullyConnected1.weights', and rank 0 has not"),
    "unfrozen": (unfrozen, "rank 1 has unfrozen 'FullyConnected1.weights', and rank 0 has not"),
    "compile": (compiled_again, "rank 0 makes an update, and rank 1 calls compile"),
    "save": (saved, "rank 0 makes an update, and rank 1 calls save"),
    "averages": (averages, "rank 0 makes an update, and rank 1 reads averages"),
    "outputs": (more_outputs, "rank 0 makes an update, and rank 1 calls add_outputs"),
    "bound": (bound, "rank 1 has written to the optimizer buffers of 'FullyConnected1.weights' since the last update"),
    "restored": (restored, "rank 1 has written to "),
    "optimizer": (another_optimizer, "rank 0 makes an update, and rank 1 calls compile_optimizer"),
}


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except sg.ExecutionError as error:
        return str(error)
    return ""


def by_one(names: tuple[str, ...], folder: str, decides: bool) -> dict[str, Any]:
    """Each call on the last rank, while the others make an update; then on all ranks."""
    if decides:
        compilation.DECIDED = {"cpu"}
    os.environ["CHECKPOINT"] = folder
    training, last = new(NETWORK), os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    errors, same = {}, True
    for step, name in enumerate(names):
        began = time.perf_counter()
        training.execute(*batch(NETWORK, 13, step), batch_size=13)
        saved(training)
        training.execute(*batch(NETWORK, 13, step), batch_size=13)
        before, call = _marks(training), CALLS[name][0]
        early = error_of(lambda call=call: call(training)) if last else ""
        errors[name] = early or error_of(lambda step=step: training.execute(*batch(NETWORK, 13, step)).loss)
        same = same and (name in ("bound", "restored") or _marks(training) == before)
        if not (last and not early):  # what took effect on this rank alone is now done by the others
            call(training)
        training.execute(*batch(NETWORK, 13, step), batch_size=13)
        assert time.perf_counter() - began < 60, name  # the timeout of an exchange
    return {"errors": errors, "same": same, "marks": _marks(training)}


def by_all(names: tuple[str, ...], folder: str) -> dict[str, str]:
    os.environ["CHECKPOINT"] = folder
    training = new(NETWORK)
    for step, name in enumerate(names):
        training.execute(*batch(NETWORK, 13, step), batch_size=13)
        saved(training)
        training.execute(*batch(NETWORK, 13, step), batch_size=13)
        CALLS[name][0](training)
        training.execute(*batch(NETWORK, 13, step), batch_size=13)
    return _marks(training)


def _marks(training: sg.TrainingGraph) -> dict[str, str]:
    return {kind: one for kind, one in marks(training).items() if kind not in HERE}


@pytest.mark.parametrize(
    "world, names, decides",
    [
        (2, ("frozen", "unfrozen", "bound", "save", "averages", "outputs", "optimizer"), False),
        (2, ("outputs", "bound", "frozen", "compile"), True),
        pytest.param(3, tuple(CALLS), False, marks=pytest.mark.deep),
        pytest.param(2, tuple(CALLS), True, marks=pytest.mark.deep),
    ],
)
def test_what_one_rank_calls_is_refused_at_once(
    world: int, names: tuple[str, ...], decides: bool, tmp_path: Path
) -> None:
    found = together(world, by_one, names, str(tmp_path / "ranks"), decides)
    expected = by_all(names, str(tmp_path / "alone"))
    for one in found:
        assert isinstance(one, dict), one
        for name in names:
            text = CALLS[name][1]
            if world == 3:
                text = text.replace("rank 1 ", "rank 2 ").replace("rank 0 makes", "ranks 0 and 1 make")
                text = text.replace("rank 0 has not", "ranks 0 and 1 have not")
            assert text in one["errors"][name], (name, one["errors"][name])
        assert one["same"]
    assert [one["marks"] for one in found] == [expected] * world


# --------------------------------------------------------------------------------------------------------- runs


class Alone(sg.Callback):
    """Does something on one rank, after the second step, the first epoch or its checkpoint."""

    def __init__(self, what: str, folder: str) -> None:
        self.what, self.folder = what, folder

    def step(self, moment: sg.Moment) -> None:
        if moment.step == 2 and os.environ[RANK] == "1":
            if self.what == "callback":
                raise ValueError("no")
            if self.what == "save":
                moment.graph.save(f"{self.folder}/own")

    def epoch(self, moment: sg.Moment) -> None:
        if self.what == "last epoch" and os.environ[RANK] == "1":
            raise ValueError("no")

    def checkpoint(self, moment: sg.Moment) -> None:
        if self.what == "checkpoint":
            raise ValueError("no")


def loading(what: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches; the last rank has fewer of them, or fails to read one."""
    for step in range(4):
        if step == 2 and os.environ[RANK] == "1":
            if what == "fewer":
                return
            if what == "data":
                raise OSError("no")
        yield rows(13)


class AtTheEnd:
    """A metric that fails on the last rank when its value is computed."""

    def update(self, prediction: Any, labels: Any) -> None:
        pass

    def compute(self) -> float:
        if os.environ[RANK] == "1":
            raise ValueError("no")
        return 0.0

    def reset(self) -> None:
        pass


def metric(what: str) -> Callable[[Any, Any], float]:
    """A metric that fails on the last rank: for a whole batch, or for one of the validation data."""

    def measured(prediction: Any, labels: Any) -> float:
        if os.environ[RANK] == "1" and len(labels) == {"metric": 13, "validation": 5}.get(what):
            raise ValueError("no")
        return 0.0

    return measured


def schedule(step: int) -> float:
    if step == 2 and os.environ[RANK] == "1":
        raise ValueError("no")
    return 0.1


def run_of(what: str, folder: str) -> str:
    training = compiled(mlp())
    settings: dict[str, Any] = {"callbacks": [Alone(what, folder)], "validation": rows(5)}
    if what in ("metric", "validation"):
        settings["metrics"] = {"own": metric(what)}
    if what == "metric's value":
        settings["metrics"] = {"own": AtTheEnd()}
    if what == "schedule":
        settings["schedule"] = schedule
    try:
        history = sg.fit(training, loading(what), checkpoints=folder, progress="quiet", **settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return str(history.stopped)


def several_runs(whats: tuple[str, ...], folder: str) -> dict[str, str]:
    found = {}
    for what in whats:
        began = time.perf_counter()
        found[what] = run_of(what, f"{folder}/{what}")
        assert time.perf_counter() - began < 60, what  # the timeout of an exchange
    return found


def test_what_one_rank_does_in_a_run_ends_it_on_all(tmp_path: Path) -> None:
    failed = "ExecutionError: rank 0 of 2: rank 1 failed between two updates"
    expected = {
        "callback": (failed, "ValueError: no"),
        "last epoch": (failed, "ValueError: no"),
        "data": (failed, "OSError: no"),
        "metric": (failed, "ValueError: no"),
        "metric's value": (failed, "ValueError: no"),
        "schedule": (failed, "ValueError: no"),
        "validation": (failed, "ValueError: no"),
        "checkpoint": ("ValueError: no", "ExecutionError: rank 1 of 2: rank 0 failed between two updates"),
        "save": ("rank 0 goes on with fit, and rank 1 calls save",) * 2,
        "fewer": ("rank 0 has a batch for the next update, and rank 1 has none",) * 2,
        "nothing": ("finished",) * 2,
    }
    for rank, found in enumerate(together(2, several_runs, tuple(expected), str(tmp_path))):
        assert isinstance(found, dict), found
        for what, texts in expected.items():
            assert texts[rank] in found[what], (what, found[what])


# -------------------------------------------------------------------------------------------------------- files


def saved_and_read(folder: str) -> list[Any]:
    """Every rank reads what it has saved at once, though the first one writes slowly, or cannot write."""
    training, write = compiled(mlp()), files.save_file
    if os.environ[RANK] == "0":
        files.save_file = lambda *given: (time.sleep(0.1), write(*given))  # type: ignore[assignment,func-returns-value]
    found: list[Any] = []
    for step in range(2):
        training.execute(*batch("mlp", 13, step))
        training.save(f"{folder}/own", notes={"step": step})
        found.append(training.restore(f"{folder}/own").notes)
    Path(folder, "file").touch()
    with pytest.raises(sg.StorageError):
        training.save(f"{folder}/file/own")
    training.execute(*batch("mlp", 13, 2))
    files.save_file = write
    for _ in range(10):  # each rank writes it, with the same content
        training.inference().save(f"{folder}/predicting")
        found.append(len(sg.load(f"{folder}/predicting").nodes))
    return found


def test_every_rank_can_read_what_it_has_saved(tmp_path: Path) -> None:
    expected = [{"step": 0}, {"step": 1}, *[3] * 10]
    assert together(2, saved_and_read, str(tmp_path)) == [expected] * 2


class Freezing(sg.Callback):
    """Freezes a layer after the first epoch, and unfreezes it after the second."""

    def epoch(self, moment: sg.Moment) -> None:
        first_weights(moment.graph).is_updatable = moment.epoch != 1


def recorded(folder: str) -> Any:
    """The first rank looks into steps for a report, also between freezing and the next update."""
    training = compiled(mlp())
    history = sg.fit(
        training, rows(44), batch_size=13, epochs=3, validation=rows(9), callbacks=[Freezing()], run=folder,
        progress="quiet",
    )  # fmt: skip
    return [one["loss"] for one in history.epochs], marks(training)


def test_ranks_freeze_in_a_recorded_run(tmp_path: Path) -> None:
    sg.set_seed(5)
    expected = recorded(str(tmp_path / "alone"))
    assert together(2, seeded, recorded, str(tmp_path / "ranks")) == [expected] * 2


def seeded(job: Callable[..., Any], *given: Any) -> Any:
    sg.set_seed(5)
    return job(*given)
