"""What one rank does or fails in before ranks exchange anything: all hear of it at once, and all can go on."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.graphs import compilation, sharded
from stepgraph.runtime import world as worlds
from stepgraph.runtime.execution import Execution
from tests.parallel_runs import NETWORKS, batch, compiled, first_weights, marks, mlp, new, rows, together

HERE = ("refused", "offsets", "agreed")  # kinds of arrays that only steps about which a device decides have
FAILED = "rank 1 failed between two updates; nothing has changed"
FROZEN = "rank 1 has frozen 'FullyConnected1.weights', and rank 0 has not"


@pytest.fixture(autouse=True)
def _undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "DECIDED", compilation.DECIDED)


def is_last() -> bool:
    return os.environ["RANK"] == "1"


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def marked(training: sg.TrainingGraph) -> dict[str, str]:
    return {kind: one for kind, one in marks(training).items() if kind not in HERE}


def updated(training: sg.TrainingGraph, step: int = 0, **more: Any) -> str:
    return error_of(lambda: training.execute(*batch("wide", 13, step), batch_size=13, **more).loss)


# ------------------------------------------------------------------------------------------- the first update


def frozen(training: sg.TrainingGraph) -> str:
    """A parameter is frozen before the first update has compiled anything."""
    first_weights(training).is_updatable = not is_last()
    found = updated(training)
    first_weights(training).is_updatable = True
    return found


def frozen_before_fit(training: sg.TrainingGraph) -> str:
    first_weights(training).is_updatable = not is_last()
    found = error_of(lambda: sg.fit(training, rows(26), batch_size=13, metrics=["accuracy"], progress="quiet"))
    first_weights(training).is_updatable = True
    return found


def wrong_data(training: sg.TrainingGraph) -> str:
    inputs, labels = batch("wide", 13, 0)
    return error_of(lambda: training.execute({"x": inputs["x"][:, :3]} if is_last() else inputs, labels).loss)


def wrong_destination(training: sg.TrainingGraph) -> str:
    return updated(training, outputs_data={"none": np.zeros(3)} if is_last() else None)


def without_memory(training: sg.TrainingGraph) -> str:
    """Compiling the shards of a batch fails once."""
    made = sharded.divided

    def fail(*given: Any) -> Any:
        sharded.divided = made
        raise MemoryError("too large")

    sharded.divided = fail if is_last() else made
    return updated(training)


def wrong_buffers(training: sg.TrainingGraph) -> str:
    weights = first_weights(training)
    if is_last():
        weights.bind_optimizer_data([np.zeros(weights.shape, np.float32)])
    found = updated(training)
    weights.optimizer_data = []
    return found


FIRST: dict[str, tuple[Callable[[sg.TrainingGraph], str], str, str]] = {
    "frozen": (frozen, FROZEN, FROZEN),
    "frozen before fit": (frozen_before_fit, FROZEN, FROZEN),
    "memory": (without_memory, FAILED, "MemoryError: too large"),
    "data": (wrong_data, FAILED, "ShapeError"),
    "destination": (wrong_destination, FAILED, "UnknownNameError"),
    "buffers": (wrong_buffers, FAILED, "DataError"),
}


def failing_first(decides: bool) -> dict[str, Any]:
    """Each of these in front of the first update, which then comes, and averages of what parameters hold by then."""
    if decides:
        compilation.DECIDED = {"cpu"}
    training, began = new("wide"), time.perf_counter()
    before, errors, same = marked(training), {}, True
    for name, (call, *_) in FIRST.items():
        errors[name] = call(training)
        same = same and marked(training) == before
    first_weights(training).torch().mul_(2)
    averages = [one.numpy().tobytes() for one in training.averages.values()]
    found = [updated(training, step) for step in range(2)]
    assert time.perf_counter() - began < 60  # the timeout of an exchange
    return {"errors": errors, "same": same, "after": (averages, found, marked(training))}


def undisturbed() -> Any:
    training = new("wide")
    training.keep_predictions()
    first_weights(training).torch().mul_(2)
    averages = [one.numpy().tobytes() for one in training.averages.values()]
    return averages, [updated(training, step) for step in range(2)], marked(training)


@pytest.mark.parametrize("decides", [False, True])
def test_all_ranks_hear_of_a_first_update_that_one_cannot_make(decides: bool) -> None:
    expected = undisturbed()
    for rank, found in enumerate(together(2, failing_first, decides)):
        assert isinstance(found, dict), found
        for name, (_, *texts) in FIRST.items():
            assert texts[rank] in found["errors"][name], (name, found["errors"][name])
        assert found["same"] and found["after"] == expected


# ---------------------------------------------------------------------------------------------------- compiling


def failing_to_compile() -> dict[str, Any]:
    """One rank compiles something else, or cannot compile: for the first time, again, or in another call."""
    sg.set_seed(5)
    training, began, errors = NETWORKS["wide"](), time.perf_counter(), {}
    first_weights(training).is_updatable = not is_last()
    errors["frozen"] = error_of(lambda: compiled(training))
    first_weights(training).is_updatable = True
    errors["arguments"] = error_of(lambda: compiled(training, fuse="no" if is_last() else False))
    compiled(training)
    errors["arguments again"] = error_of(lambda: compiled(training, fuse="no" if is_last() else False))
    errors["other ranks"] = error_of(lambda: training.compile("cpu") if is_last() else compiled(training))
    first_weights(training).is_updatable = not is_last()
    errors["frozen again"] = error_of(lambda: compiled(training))
    first_weights(training).is_updatable = True
    prepared = compilation.Compilation.prepare

    def fail(*given: Any) -> None:
        raise MemoryError("too large")

    compilation.Compilation.prepare = fail if is_last() else prepared  # type: ignore[method-assign]
    errors["optimizer"] = error_of(lambda: training.compile_optimizer(sg.SGDOptimizer(0.1)))
    errors["outputs"] = error_of(lambda: training.add_outputs({"hidden": training.nodes[0].results[0]}))
    errors["predictions"] = error_of(training.keep_predictions)
    first_weights(training).is_updatable = False
    errors["update"] = updated(training)
    compilation.Compilation.prepare = prepared  # type: ignore[method-assign]
    first_weights(training).is_updatable = True
    wrong: Any = 3 if is_last() else []
    errors["stop"] = error_of(lambda: training.stop_gradient(wrong))
    found = [updated(training, step) for step in range(2)]
    assert time.perf_counter() - began < 60  # the timeout of an exchange
    return {"errors": errors, "after": (found, marked(training))}


def compiled_by_all() -> Any:
    training = new("wide")
    training.stop_gradient([])
    return [updated(training, step) for step in range(2)], marked(training)


def test_all_ranks_hear_of_what_one_cannot_compile() -> None:
    compiling = "rank 1 could not compile"
    expected = {
        "frozen": (FROZEN, FROZEN),
        "arguments": (compiling, "DataTypeError"),
        "arguments again": (FAILED, "DataTypeError"),
        "other ranks": ("ranks call compile with different arguments",) * 2,
        "frozen again": (FROZEN, FROZEN),
        "optimizer": (compiling, "MemoryError"),
        "outputs": (FAILED, "MemoryError"),
        "predictions": (FAILED, "MemoryError"),
        "update": (compiling, "MemoryError"),
        "stop": (FAILED, "DataTypeError"),
    }
    after = compiled_by_all()
    for rank, found in enumerate(together(2, failing_to_compile)):
        assert isinstance(found, dict), found
        for name, texts in expected.items():
            assert texts[rank] in found["errors"][name], (name, found["errors"][name])
        assert found["after"] == after


# ------------------------------------------------------------------------------------------------------- graphs


def crosswise(folder: str, decides: bool) -> tuple[dict[str, str], bool, dict[str, str]]:
    """Two graphs with the same shapes, of which ranks use different ones in the same call."""
    if decides:
        compilation.DECIDED = {"cpu"}
    first, second = new("mlp"), new("mlp")
    own, errors, before = second if is_last() else first, {}, [marked(first), marked(second)]

    def update(training: sg.TrainingGraph) -> str:
        return error_of(lambda: training.execute(*batch("mlp", 13, 0)).loss)

    errors["save"] = error_of(lambda: own.save(f"{folder}/own"))
    errors["outputs"] = error_of(lambda: own.add_outputs({"hidden": own.nodes[0].results[0]}))
    errors["update"] = update(own)
    first_weights(own).is_updatable = False
    errors["frozen"] = update(own)
    first_weights(own).is_updatable = True
    first_weights(first).is_updatable = first_weights(second).is_updatable = not is_last()
    errors["frozen by one"] = update(own)
    first_weights(first).is_updatable = first_weights(second).is_updatable = True
    errors["fit"] = error_of(lambda: sg.fit(own, rows(13), batch_size=13, progress="quiet"))
    same = [marked(first), marked(second)] == before and not Path(folder, "own").exists()
    errors["both"] = "; ".join([update(second), update(first)])
    return errors, same, marked(first)


@pytest.mark.parametrize("decides", [False, True])
def test_ranks_that_use_different_graphs_are_refused(decides: bool, tmp_path: Path) -> None:
    expected = {
        "save": "ranks 0 and 1 call save of different graphs; nothing has changed",
        "outputs": "ranks 0 and 1 call add_outputs of different graphs; nothing has changed",
        "fit": "ranks 0 and 1 call fit of different graphs; nothing has changed",
        "both": "fine; fine",
    }
    alone = new("mlp")
    alone.execute(*batch("mlp", 13, 0))
    for errors, same, marks_of_first in together(2, crosswise, str(tmp_path), decides):
        assert same and marks_of_first == marked(alone)
        for name, error in errors.items():
            text = expected.get(name, "ranks 0 and 1 execute different graphs; nothing has changed")
            assert text in error, (name, error)


# --------------------------------------------------------------------------------------------------------- runs


class Raising(sg.Callback):
    """Raises an error on one rank, where it is told to."""

    def __init__(self, where: str) -> None:
        self.where = where

    def start(self, moment: sg.Moment) -> None:
        self._fail("start", 1)

    def step(self, moment: sg.Moment) -> None:
        self._fail("step", 1)
        if self.where == "failing call" and is_last():
            moment.graph.add_outputs({"other": sg.Tensor((3,))})
        if self.where == "failing update" and is_last():
            moment.graph.execute({"x": np.zeros((13, 3), np.float32)}, {"y": rows(13)[1]})

    def state(self) -> Any:
        self._fail("state", 0)
        return None

    def _fail(self, where: str, rank: int) -> None:
        if self.where == where and os.environ["RANK"] == str(rank):
            raise ValueError("no")


def reading(what: str) -> Callable[[int], Iterator[Any]]:
    """The data of an epoch, which one rank cannot read, or reads with another shape."""

    def read(epoch: int) -> Iterator[Any]:
        if what == "epoch" and is_last():
            raise OSError("no")
        return batches()

    def batches() -> Iterator[Any]:
        for _ in range(3):
            x, y = rows(13)
            if what == "first batch" and is_last():
                raise OSError("no")
            yield (x[:, :3] if what in ("shape", "joined") and is_last() else x), y

    return read


def run_of(training: sg.TrainingGraph, what: str, folder: str) -> str:
    settings: dict[str, Any] = {"callbacks": [Raising(what)], "checkpoints": f"{folder}/{what}"}
    if what == "epochs":
        settings["epochs"] = -1 if is_last() else 1
    if what == "joined":
        settings["accumulate"] = 2
    if what == "record":  # only the first rank writes one
        settings["run"] = f"{folder}/file/run"
    if what == "folder":  # only the first rank looks
        settings["checkpoints"] = f"{folder}/file/checkpoints"
    if what == "resume":  # from a checkpoint that fit has not saved
        settings |= {"resume": True, "checkpoints": f"{folder}/saved" if is_last() else f"{folder}/none"}
    try:
        return str(sg.fit(training, reading(what), progress="quiet", **settings).stopped)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def several_runs(whats: tuple[str, ...], folder: str) -> dict[str, str]:
    training, began = compiled(mlp()), time.perf_counter()
    training.save(f"{folder}/saved", keep=1)
    found = {what: run_of(training, what, folder) for what in whats}
    assert time.perf_counter() - began < 60  # the timeout of an exchange
    return found


def test_a_run_that_one_rank_cannot_begin_or_continue_ends_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    by_first = ("StorageError", "rank 0 failed between two updates")
    expected = {
        "epochs": (FAILED, "ArgumentError: fit: epochs is -1"),
        "resume": (FAILED, "CheckpointError"),
        "record": by_first,
        "folder": by_first,
        "start": (FAILED, "ValueError: no"),
        "epoch": (FAILED, "OSError: no"),
        "first batch": (FAILED, "OSError: no"),
        "shape": (FAILED, "ShapeError"),
        "joined": (FAILED, "Error"),
        "step": (FAILED, "ValueError: no"),
        "failing call": (FAILED, "Error"),
        "failing update": (FAILED, "ShapeError"),
        "state": ("ValueError: no", "rank 0 failed between two updates"),
        "nothing": ("finished", "finished"),
    }
    for rank, found in enumerate(together(2, several_runs, tuple(expected), str(tmp_path))):
        assert isinstance(found, dict), found
        for what, texts in expected.items():
            assert texts[rank] in found[what], (what, found[what])


# ------------------------------------------------------------------------------------------------------ threads


def in_a_thread(call: Callable[[], Any]) -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(error_of(call)))
    thread.start()
    thread.join()
    return found[0]


def refused(training: sg.TrainingGraph, **more: Any) -> Execution:
    """An update with different batches."""
    inputs, labels = batch("mlp", 13, 1)
    inputs["x"][0] += is_last()
    return training.execute(inputs, labels, **more)


def waiting() -> dict[str, Any]:
    """Refused updates of which threads and completion handlers learn, sooner on one rank than on the other."""
    compilation.DECIDED = {"cpu"}
    training, told, given = new("mlp"), [], batch("mlp", 13, 0)
    training.execute(*given)
    before = marked(training)
    execution = refused(training)
    early = in_a_thread(execution.wait) if is_last() else ""
    found = {"next": error_of(lambda: training.execute(*given).loss)}
    found["late"] = early or in_a_thread(execution.wait)
    execution = refused(training)
    found["read"] = error_of(lambda: execution.loss)
    found["saved"] = error_of(training.progress)  # it is known by now
    refused(training, completion=lambda result, error, seconds: told.append(error))
    found["handled"] = f"{type(told[0]).__name__}: {told[0]}"
    assert marked(training) == before
    found["fine"] = error_of(lambda: training.execute(*given).loss)
    return {"errors": found, "marks": marked(training)}


def test_whether_the_next_update_raises_an_error_does_not_depend_on_threads() -> None:
    expected = new("mlp")
    for _ in range(2):
        expected.execute(*batch("mlp", 13, 0))
    for found in together(2, waiting):
        assert isinstance(found, dict), found
        errors = found["errors"]
        assert errors.pop("fine") == errors.pop("saved") == "fine"
        assert all("ranks 0 and 1 have different batches" in one for one in errors.values()), errors
        assert found["marks"] == marked(expected)


def test_a_completion_handler_gets_any_error() -> None:
    class Refusing:
        def require_none(self) -> None:
            raise sg.NumericsError("here", "it is not finite")

    told: list[Any] = []
    execution = Execution(sg.Device.cpu(), timed=False, announced=True, refusal=Refusing())
    execution.announce(lambda result, error, seconds: told.append((result, error)), waited=True)
    ((result, error),) = told
    assert result is None and isinstance(error, sg.NumericsError) and execution.error is error


# -------------------------------------------------------------------------------------------------------- others


class Said(logging.Handler):
    """What has been logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def other_calls(folder: str) -> dict[str, str]:
    """Other things that one rank does by itself, or fails in; a rank whose error nobody comes to hear logs it."""
    training, found, said = new("wide"), {}, Said()
    logging.getLogger("stepgraph").addHandler(said)
    worlds.LATE = 0.1
    if not is_last():
        time.sleep(0.5)
    found["late"] = wrong_data(training)
    found["said"] = "; ".join(said.texts)
    worlds.LATE = 60.0
    found["first"] = updated(training)
    if is_last():
        training.average = 0.5
    found["decay"] = updated(training)
    training.average = 0.9
    found["find"] = error_of(lambda: sg.find_learning_rate(training, reading("first batch"), steps=3))
    with training.averaged():
        found["averaged"] = error_of(lambda: training.save(folder))
    found["last"] = updated(training)
    return found


def test_other_calls_of_one_rank_are_refused_on_all(tmp_path: Path) -> None:
    for rank, found in enumerate(together(2, other_calls, str(tmp_path / "saved"))):
        assert isinstance(found, dict), found
        assert found["first"] == found["last"] == "fine"
        assert (FAILED, "ShapeError")[rank] in found["late"]
        waits = "rank 1 of 2 waits to tell the other ranks of its error: Tensor 'x'"
        assert waits in found["said"] if rank else found["said"] == ""
        assert "decays of averages" in found["decay"]
        assert (FAILED, "OSError: no")[rank] in found["find"]
        assert "the parameters hold their averages" in found["averaged"]


def compiling_alone() -> str:
    """One rank compiles another graph while the other one makes an update; each waits for something else."""
    training, other = mlp(), mlp()
    training.compile("cpu", parallel=sg.Parallel(8, timeout=2))
    if is_last():
        return error_of(lambda: other.compile("cpu", parallel=sg.Parallel(8, timeout=2)))
    return error_of(lambda: training.execute(*batch("mlp", 13, 0)))


def test_ranks_that_wait_for_different_things_say_what() -> None:
    first, second = together(2, compiling_alone)
    assert "this rank exchanges bucket 0" in first
    assert "and meanwhile rank 1 exchanges digests of programs, in compile" in first
    assert "this rank exchanges digests of programs" in second and "and meanwhile rank 0 exchanges" in second
