"""What one rank alone does: whatever would let ranks train differently, all of them learn, and say the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.compiler.step import STREAM
from stepgraph.report.run import Run
from tests.parallel_runs import batch, compiled, first_weights, marks, mlp, new, rows, together

RANK = "RANK"


# ---------------------------------------------------------------------------------------- one rank ends a run


class Ending(sg.Callback):
    """Ends a run after some steps or epochs, in different ways on different ranks."""

    def __init__(self, ways: dict[int, tuple[str, int, str]]) -> None:
        self.kind, self.at, self.how = ways.get(int(os.environ[RANK]), ("", 0, ""))

    def step(self, moment: sg.Moment) -> None:
        self._end("step", moment.step, moment)

    def epoch(self, moment: sg.Moment) -> None:
        self._end("epoch", moment.epoch, moment)

    def _end(self, kind: str, place: int, moment: sg.Moment) -> None:
        if (kind, place) != (self.kind, self.at):
            return
        if self.how == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        else:
            moment.stop(self.how)


def ended(folder: str, ways: dict[int, tuple[str, int, str]]) -> dict[str, Any]:
    training, said = compiled(mlp()), []

    class Listening(sg.Callback):
        def end(self, moment: sg.Moment) -> None:
            said.append(moment.stopped)

    callbacks = [Ending(ways), Listening()]
    history = sg.fit(training, rows(44), batch_size=13, epochs=3, callbacks=callbacks, run=folder, progress="quiet")
    return {"why": [history.stopped, *said], "notes": history.notes, "steps": len(history.steps), "shown": str(history)}


@pytest.mark.parametrize(
    "world, ways, why, who, steps",
    [
        (2, {1: ("step", 2, "too hot")}, "too hot", "rank 1 asked to stop: too hot", 2),
        (3, {2: ("epoch", 1, "enough")}, "enough", "rank 2 asked to stop: enough", 4),
        (2, {1: ("step", 3, "Ctrl-C")}, "interrupted", "rank 1 received Ctrl-C", 3),
        (2, {0: ("step", 2, "enough"), 1: ("step", 2, "enough")}, "enough", None, 2),
        (
            3,
            {1: ("step", 2, "ein Grund äöü"), 2: ("step", 2, "Ctrl-C")},
            "interrupted",
            "rank 1 asked to stop: ein Grund äöü; rank 2 received Ctrl-C",
            2,
        ),
    ],
)
def test_all_ranks_say_who_has_ended_a_run(
    world: int, ways: dict[int, Any], why: str, who: str | None, steps: int, tmp_path: Path
) -> None:
    for found in together(world, ended, str(tmp_path), ways):
        assert found["why"] == [why, why] and found["steps"] == steps, found
        assert found["notes"] == [] if who is None else [who]
        assert who is None or who in found["shown"]
    end = Run(tmp_path).end
    assert end is not None and (end["stopped"], end.get("who")) == (why, who)


def read_by_one(folder: str) -> list[Any]:
    """One rank looks at the loss in each step, and so finds a NaN before the others do."""

    class Looking(sg.Callback):
        def step(self, moment: sg.Moment) -> None:
            if os.environ[RANK] == "1":
                assert moment.loss != 0

    training, (x, y) = compiled(mlp()), rows(44)
    x[20] = np.nan
    history = sg.fit(
        training, (x, y), batch_size=13, shuffle=False, callbacks=[Looking()], checkpoints=folder, progress="quiet"
    )
    return [history.stopped, len(history.steps), [*Path(folder).iterdir()]]


def test_a_nan_that_one_rank_reads_first_ends_the_run_of_all(tmp_path: Path) -> None:
    assert together(2, read_by_one, str(tmp_path)) == [["nan", 2, []]] * 2


def judged(folder: str) -> dict[str, Any]:
    """Ranks measure different things: times, and a metric that is random."""
    training, random = compiled(mlp()), np.random.default_rng(int(os.environ[RANK]))

    def noise(prediction: Any, labels: Any) -> float:
        return random.random()

    settings: dict[str, Any] = {"batch_size": 13, "epochs": 6, "metrics": {"noise": noise}, "progress": "quiet"}
    watched = sg.fit(training, rows(44), watch="noise", patience=2, restore_best=True, checkpoints=folder, **settings)
    timed = sg.fit(training, rows(44), watch="seconds", patience=1, checkpoints=f"{folder}/other", **settings)
    return {"epochs": [watched.epochs, timed.epochs], "stopped": [watched.stopped, timed.stopped]}


def test_ranks_judge_epochs_by_the_numbers_of_the_first(tmp_path: Path) -> None:
    first, second = together(2, judged, str(tmp_path))
    assert first == second and isinstance(first, dict), first


# ---------------------------------------------------------------------------------- one rank writes by itself


def one_number(training: sg.TrainingGraph) -> None:
    first_weights(training).torch()[3, 2] += 1


def by_numpy(training: sg.TrainingGraph) -> None:
    first_weights(training).data[...] = first_weights(training).numpy()[::-1].copy()


def bound(training: sg.TrainingGraph) -> None:
    tensor = first_weights(training)
    tensor.bind_and_write_data(np.ones(tensor.shape, np.float32), training.device)


def loaded(training: sg.TrainingGraph) -> None:
    training.load_state_dict({name: one * 1.5 for name, one in training.state_dict().items()})


def restored(training: sg.TrainingGraph) -> None:
    training.restore(os.environ["CHECKPOINT"])


def a_statistic(training: sg.TrainingGraph) -> None:
    (tensor,) = [one for layer in training.layers for name, one in layer.statistics.items() if name == "mean"]
    tensor.torch().add_(0.5)


WRITERS = {one.__name__: one for one in (one_number, by_numpy, bound, loaded, restored, a_statistic)}


def tried(training: sg.TrainingGraph, name: str, step: int) -> str:
    try:
        training.execute(*batch(name, 13, step), batch_size=13)
    except sg.ExecutionError as error:
        return str(error)
    return "fine"


def written_by_one(kind: str, folder: str, network: str) -> dict[str, Any]:
    """A write on the last rank, which is refused until the others have made it, too."""
    os.environ["CHECKPOINT"] = folder
    training, write = new(network), WRITERS[kind]
    last = int(os.environ["WORLD_SIZE"]) - 1 == int(os.environ[RANK])
    training.execute(*batch(network, 13, 0), batch_size=13)
    training.save(folder)
    training.execute(*batch(network, 13, 1), batch_size=13)
    if last:
        write(training)
    before = marks(training)
    errors = [tried(training, network, step) for step in (2, 3)]
    same = marks(training) == before
    if not last:
        write(training)
    after = tried(training, network, 2)
    return {"errors": errors, "same": same, "after": after, "marks": marks(training)}


def written_by_all(kind: str, folder: str, network: str) -> Any:
    os.environ["CHECKPOINT"] = folder
    training = new(network)
    for step in range(2):
        training.execute(*batch(network, 13, step), batch_size=13)
    WRITERS[kind](training)
    training.execute(*batch(network, 13, 2), batch_size=13)
    return marks(training)


@pytest.mark.parametrize(
    "kind, world, network, name",
    [
        ("one_number", 2, "mlp", "FullyConnected1.weights"),
        ("by_numpy", 3, "mlp", "FullyConnected1.weights"),
        ("bound", 2, "mlp", "FullyConnected1.weights"),
        ("loaded", 3, "mlp", "FullyConnected1.weights"),
        ("restored", 2, "cnn", "Convolution1.weights"),
        ("a_statistic", 2, "cnn", "BatchNorm.mean"),
    ],
)
def test_what_one_rank_writes_is_refused_until_all_have_written_it(
    kind: str, world: int, network: str, name: str, tmp_path: Path
) -> None:
    found = together(world, written_by_one, kind, str(tmp_path), network)
    others = "rank 0 has not" if world == 2 else "ranks 0 and 1 have not"
    text = f"rank {world - 1} has written to '{name}' since the last update, and {others}"
    for one in found:
        assert all(text in error for error in one["errors"]), one
        assert one["same"] and one["after"] == "fine"
    assert [one["marks"] for one in found] == [written_by_all(kind, str(tmp_path), network)] * world


def read_by_first() -> Any:
    """Looking at parameters on one rank changes nothing, whether their arrays are kept or not."""
    training, kept = new("mlp"), []
    for step in range(4):
        if os.environ.get(RANK, "0") == "0":
            assert all(np.isfinite(one.numpy()).all() for layer in training.layers for one in layer.parameters.values())
            kept.append(first_weights(training).torch())
        training.execute(*batch("mlp", 13, step), batch_size=13)
    return marks(training)


def test_one_rank_may_read_alone() -> None:
    assert together(2, read_by_first) == [read_by_first()] * 2


def kept_array() -> list[str]:
    """An array that one rank keeps, and writes to later."""
    training, found = new("mlp"), []
    kept = first_weights(training).torch() if os.environ[RANK] == "1" else None
    for step in range(4):
        if kept is not None and step == 2:
            kept[0, 0] = 7
        found.append(tried(training, "mlp", step))
    return found


def test_a_write_to_an_array_that_a_rank_has_kept_is_refused() -> None:
    for found in together(2, kept_array):
        assert found[:2] == ["fine"] * 2 and all("rank 1 has written to" in one for one in found[2:])


def different_writes() -> str:
    training = new("mlp")
    first_weights(training).torch().fill_(float(os.environ[RANK]))
    return tried(training, "mlp", 0)


def test_different_writes_are_refused() -> None:
    for found in together(2, different_writes):
        assert "ranks 0 and 1 have written different numbers to 'FullyConnected1.weights'" in found


def compiled_again() -> Any:
    """Compiling gives every rank the numbers of the first."""
    training = new("mlp")
    if os.environ.get(RANK, "0") == "1":
        one_number(training)
    compiled(training)
    training.execute(*batch("mlp", 13, 0), batch_size=13)
    return marks(training)


def test_compiling_again_gives_all_ranks_the_numbers_of_the_first() -> None:
    assert together(2, compiled_again) == [compiled_again()] * 2


def other_numbers(kind: str) -> list[str]:
    """One rank has another random stream, or another scale of the loss; then it has that of the others again."""
    training = new("cnn", compute_type="float16" if kind == "scale" else None)
    found = [tried(training, "cnn", 0)]
    state, last = training.require_session("test").state, os.environ[RANK] == "1"
    assert state is not None
    scale, stream = training.loss_scale, state.arrays[STREAM]
    if last and scale is not None:
        training.loss_scale = scale / 2
    elif last:
        stream[1] += 1
    found.append(tried(training, "cnn", 1))
    if scale is not None:
        training.loss_scale = scale  # on every rank, since it begins to count finite steps again
    elif last:
        stream[1] -= 1
    return [*found, tried(training, "cnn", 1)]


@pytest.mark.filterwarnings("ignore")  # of float16 on the CPU
@pytest.mark.parametrize("kind", ["stream", "scale"])
def test_ranks_with_another_random_stream_or_loss_scale_are_refused(kind: str) -> None:
    for first, second, third in together(2, other_numbers, kind):
        assert first == third == "fine" and "random streams or loss scales" in second
