"""A run that was stopped, wherever that was, goes on as if it had not been."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from tests.fit_runs import BATCH, SETTINGS, arrays, network, parameters

BATCHES = 6  # of an epoch


class Stopped(Exception):
    """A run that broke off."""


@pytest.fixture(autouse=True)
def ctrl_c_counts() -> Iterator[None]:
    """Python ignores Ctrl-C where it was started in the background; here it must not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def breaking(after: int) -> Any:
    """A metric that breaks a run off."""
    count = 0

    def metric(prediction: torch.Tensor, labels: torch.Tensor) -> float:
        nonlocal count
        count += 1
        if count > after:
            raise Stopped
        return float(count)

    return metric


def numbers(history: sg.History) -> tuple:
    """What of a history does not depend on the clock."""
    rows = [
        {name: value for name, value in row.items() if name not in ("seconds", "waiting")} for row in history.epochs
    ]
    return rows, history.steps, history.best_epoch, history.stopped


@pytest.mark.parametrize(
    "after, settings",
    [(4, {}), (13, {"accumulate": 4}), (13, {"batch_size": 5, "schedule": sg.WarmupCosine(0.02, 3)})],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, after: int, settings: dict) -> None:
    everything: dict[str, Any] = {**SETTINGS, **settings, "validation": arrays(11, 4)}
    whole = network()
    uninterrupted = sg.fit(whole, arrays(), **everything)
    kept: dict[str, Any] = {"checkpoints": tmp_path, "save_every": 1, "resume": True}
    with pytest.raises(Stopped):
        metrics = {"accuracy": sg.accuracy, "confusion": sg.ConfusionMatrix(3), "breaks": breaking(after)}
        sg.fit(network(), arrays(), **everything | {"metrics": metrics}, **kept)
    sg.set_seed(99)  # seed and order come from the checkpoint
    resumed = network()
    history = sg.fit(resumed, arrays(), **everything, **kept)
    assert parameters(resumed) == parameters(whole)
    if after == 4:  # within the first epoch: that of the metrics is complete too
        assert numbers(history) == numbers(uninterrupted)
    else:
        assert history.steps == uninterrupted.steps and history["accuracy"] == uninterrupted["accuracy"]


@pytest.mark.parametrize("metrics", [[], [sg.accuracy], {"one": lambda p, y: 1.0, "accuracy": sg.accuracy}], ids=len)
def test_a_run_goes_on_with_other_metrics(tmp_path: Path, metrics: Any) -> None:
    kept: dict[str, Any] = {"checkpoints": tmp_path, "resume": True, "progress": "quiet"}
    first = {"accuracy": sg.accuracy, "breaks": breaking(8)}
    with pytest.raises(Stopped):
        sg.fit(network(), arrays(), epochs=3, metrics=first, save_every=1, **kept)
    history = sg.fit(network(), arrays(), epochs=3, metrics=metrics, **kept)
    assert len(history["loss"]) == 3 and history["breaks"][1:] == [None, None]
    assert len(str(history).splitlines()) > 4 and "breaks" in history._repr_html_()
    if "one" in metrics:  # its mean is over the rows it has seen, also in the epoch in which it came in
        assert history["one"] == [None, 1.0, 1.0]


def test_another_watched_number_has_another_best(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"checkpoints": tmp_path, "resume": True, "progress": "quiet", "metrics": [sg.accuracy]}
    sg.fit(network(), arrays(), epochs=2, **kept)
    history = sg.fit(network(), arrays(), epochs=3, watch="accuracy", better="lower", **kept)
    assert history.best_epoch == 3  # the first of its kind: no loss competes with it


def test_batches_of_a_function_and_of_a_seeded_loader_go_on_too(tmp_path: Path) -> None:
    x, y = map(torch.from_numpy, arrays())

    def loader() -> Any:
        data = torch.utils.data.TensorDataset(x, y)
        return torch.utils.data.DataLoader(data, BATCH, shuffle=True, generator=torch.Generator())

    def batches(epoch: int) -> Any:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        return ((x[rows], y[rows]) for rows in order.split(BATCH))

    for name, make in (("loader", loader), ("function", lambda: batches)):
        whole, resumed = network(), network()
        uninterrupted = sg.fit(whole, make(), epochs=3, progress="quiet")
        kept: dict[str, Any] = {"checkpoints": tmp_path / name, "save_every": 1, "resume": True, "progress": "quiet"}
        with pytest.raises(Stopped):
            sg.fit(network(), make(), epochs=3, metrics={"breaks": breaking(8)}, **kept)
        history = sg.fit(resumed, make(), epochs=3, **kept)
        assert history.losses == uninterrupted.losses and parameters(resumed) == parameters(whole)
        assert history.losses[:BATCHES] != history.losses[BATCHES : 2 * BATCHES]


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
def test_ctrl_c_ends_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.fit_runs", tmp_path, "9"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "interrupted in epoch 2 after step 7, saved" in done.stdout  # 6 updates, 2 batches of validation
    assert done.stdout.splitlines()[-1] == "interrupted True"  # as before the run
    whole, resumed = network(), network()
    settings = {**SETTINGS, "validation": arrays(9, 1)}
    uninterrupted = sg.fit(whole, arrays(), **settings)
    history = sg.fit(resumed, arrays(), checkpoints=tmp_path, resume=True, **settings)
    assert history.steps == uninterrupted.steps and parameters(resumed) == parameters(whole)


def test_an_interruption_while_validating_repeats_only_the_validation(tmp_path: Path) -> None:
    class Interrupting(list):
        """Batches that are stopped at once the first time."""

        def __iter__(self) -> Any:
            if not seen:
                seen.append(True)
                signal.raise_signal(signal.SIGINT)
            return super().__iter__()

    seen: list[bool] = []
    x, y = arrays(11, 4)
    settings: dict[str, Any] = {**SETTINGS, "validation": Interrupting([(x, y)]), "prefetch": 0}
    kept: dict[str, Any] = {"checkpoints": tmp_path, "resume": True}
    history = sg.fit(network(), arrays(), **settings, **kept)
    assert history.stopped == "interrupted" and history.epochs == [] and len(history.steps) == BATCHES
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    whole, resumed = network(), network()
    uninterrupted = sg.fit(whole, arrays(), **settings)
    assert numbers(sg.fit(resumed, arrays(), **settings, **kept)) == numbers(uninterrupted)
    assert parameters(resumed) == parameters(whole)


def test_an_interruption_between_accumulated_batches_makes_no_update_of_some(tmp_path: Path) -> None:
    x, y = arrays()
    batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]

    def interrupting(epoch: int) -> Any:
        for i, batch in enumerate(batches):
            if i == 2 and epoch == 1:
                signal.raise_signal(signal.SIGINT)
            yield batch

    settings: dict[str, Any] = {"epochs": 3, "accumulate": 4, "prefetch": 0, "progress": "quiet"}
    kept: dict[str, Any] = {"checkpoints": tmp_path, "resume": True}
    history = sg.fit(network(), interrupting, **settings, **kept)
    assert history.stopped == "interrupted" and len(history.steps) == 2
    whole, resumed = network(), network()
    uninterrupted = sg.fit(whole, batches, **settings)
    assert numbers(sg.fit(resumed, batches, **settings, **kept)) == numbers(uninterrupted)
    assert parameters(resumed) == parameters(whole)


def test_the_second_ctrl_c_ends_at_once() -> None:
    def twice(prediction: torch.Tensor, labels: torch.Tensor) -> float:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        sg.fit(network(), arrays(), metrics={"twice": twice}, progress="quiet")


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    found: list[sg.History] = []
    thread = threading.Thread(target=lambda: found.append(sg.fit(network(), arrays(), progress="quiet")))
    thread.start()
    thread.join()
    assert found[0].stopped == "finished"


def test_checkpoints_are_rotated_and_the_best_stays(tmp_path: Path) -> None:
    values = iter([0.1, 0.9, 0.2, 0.3, 0.4])
    metrics = {"score": lambda prediction, labels: next(values)}
    settings: dict[str, Any] = {"metrics": metrics, "watch": "score", "checkpoints": tmp_path, "keep": 2}
    history = sg.fit(network(), arrays(BATCH), epochs=5, progress="quiet", **settings)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["best", "checkpoint-000004", "checkpoint-000005"] and history.best_epoch == 2
    best = network()
    assert best.restore(tmp_path / "best").notes["fit"]["place"]["epoch"] == 2
    by_hand = network()
    sg.fit(by_hand, arrays(BATCH), epochs=2, progress="quiet")
    assert parameters(best) == parameters(by_hand)


def test_a_run_that_is_over_stays_over(tmp_path: Path) -> None:
    frozen = network(sg.SGDOptimizer(learning_rate=0.0), dropout=0.0)
    settings: dict[str, Any] = {"checkpoints": tmp_path, "patience": 2, "shuffle": False, "progress": "quiet"}
    first = sg.fit(frozen, arrays(), epochs=9, **settings)
    again = sg.fit(frozen, arrays(), epochs=9, resume=True, **settings)
    assert numbers(first) == numbers(again) and len(again.epochs) == 3
    longer = sg.fit(frozen, arrays(), epochs=4, resume=True, **settings | {"patience": None})
    assert len(longer.epochs) == 4 and longer.stopped == "finished"


def test_checkpoints_of_another_run_are_left_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoints": tmp_path, "watch": "loss", "progress": "quiet"}
    sg.fit(network(), arrays(), epochs=3, **settings)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    training = network()
    untouched = parameters(training)
    with pytest.raises(sg.ArgumentError, match=r"already checkpoints in .*\n.*pass resume=True"):
        sg.fit(training, arrays(), epochs=1, **settings)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert parameters(training) == untouched


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    training = network()
    training.save(tmp_path / "other", keep=1)
    with pytest.raises(sg.CheckpointError, match="not saved by fit"):
        sg.fit(training, arrays(), checkpoints=tmp_path / "other", resume=True)
    kept: dict[str, Any] = {"checkpoints": tmp_path / "run", "save_every": 1, "resume": True, "progress": "quiet"}
    with pytest.raises(Stopped):
        sg.fit(network(), arrays(), metrics={"breaks": breaking(3)}, **kept)
    before = parameters(training)
    with pytest.raises(sg.CheckpointError, match="other batches"):
        sg.fit(training, arrays(), batch_size=4, **kept)
    with pytest.raises(sg.CheckpointError, match="other batches"):
        sg.fit(training, tuple(one[:-1] for one in arrays()), **kept)
    assert parameters(training) == before


def test_numbers_that_json_does_not_have_survive(tmp_path: Path) -> None:
    values = iter([np.nan, np.inf, 1.0, 1.0])
    metrics = {"score": lambda prediction, labels: next(values)}
    settings: dict[str, Any] = {"checkpoints": tmp_path, "metrics": metrics, "watch": "score", "progress": "quiet"}
    sg.fit(network(), arrays(BATCH), epochs=2, **settings)
    history = sg.fit(network(), arrays(BATCH), epochs=3, resume=True, **settings)
    assert repr(history["score"]) == "[nan, inf, 1.0]"
