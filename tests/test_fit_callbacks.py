"""Callbacks: when they are called, what they see, how they stop a run, and those that stepgraph ships."""

import csv
import errno
import json
import math
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepgraph as sg
from stepgraph.fitting import trained
from tests.fit_runs import BATCH, arrays, parameters, renewed

BATCHES = 6  # of an epoch
QUIET: dict[str, Any] = {"progress": "quiet"}


class Diary(sg.Callback):
    """Writes down every call."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def start(self, moment: sg.Moment) -> None:
        self.lines.append(("start", moment.epoch, moment.step, moment.resumed))

    def step(self, moment: sg.Moment) -> None:
        self.lines.append(("step", moment.epoch, moment.step))

    def epoch(self, moment: sg.Moment) -> None:
        self.lines.append(("epoch", moment.epoch, moment.step))

    def checkpoint(self, moment: sg.Moment) -> None:
        assert moment.path is not None and moment.path.is_dir()
        self.lines.append(("checkpoint", moment.epoch, moment.step))

    def end(self, moment: sg.Moment) -> None:
        self.lines.append(("end", moment.epoch, moment.step, moment.stopped))


class Stopping(sg.Callback):
    """Stops at one of the moments, after some updates."""

    def __init__(self, name: str, step: int, reason: str = "enough") -> None:
        self.at, self.reason = step, reason
        setattr(self, name, self._stop)

    @property
    def listens_to_steps(self) -> bool:
        return True

    def _stop(self, moment: sg.Moment) -> None:
        if moment.step >= self.at:
            moment.stop(self.reason)


def test_the_moments_of_a_run_in_order(tmp_path: Path) -> None:
    diary = Diary()
    sg.fit(renewed(), arrays(), epochs=2, callbacks=[diary], checkpoints=tmp_path, save_every=4, **QUIET)
    one = [("step", 1, n) for n in range(1, 5)] + [("checkpoint", 1, 4), ("step", 1, 5), ("step", 1, 6)]
    two = [("step", 2, 7), ("step", 2, 8), ("checkpoint", 2, 8), *[("step", 2, n) for n in range(9, 13)]]
    assert diary.lines == [
        ("start", 1, 0, False),
        *one,
        *(("epoch", 1, 6), ("checkpoint", 1, 6)),
        *two,
        *(("checkpoint", 2, 12), ("epoch", 2, 12), ("checkpoint", 2, 12)),
        ("end", 2, 12, "finished"),
    ]


def test_what_a_callback_reads_is_what_the_history_says() -> None:
    found: list[tuple[float, float, list[float]]] = []

    class Reading(sg.Callback):
        def step(self, moment: sg.Moment) -> None:
            found.append((moment.loss, moment.learning_rate, list(moment.history.losses)))
            assert moment.graph is training and moment.steps == 12 and moment.epochs == 2
            assert 0 <= moment.metrics["accuracy"] <= 1

        def epoch(self, moment: sg.Moment) -> None:
            row = moment.history.epochs[-1]
            assert moment.loss == row["loss"] and moment.epoch == row["epoch"]
            names = ["accuracy", "validation loss", "validation accuracy"]
            assert moment.metrics == {name: row[name] for name in names}

    training, plain = renewed(), renewed(1)
    settings: dict[str, Any] = {"epochs": 2, "metrics": ["accuracy"], "validation": arrays(9, 1), **QUIET}
    history = sg.fit(training, arrays(), callbacks=[Reading()], **settings)
    expected = sg.fit(plain, arrays(), **settings)
    assert parameters(training) == parameters(plain) and history.steps == expected.steps
    assert [(loss, rate) for loss, rate, _ in found] == [(loss, rate) for _, loss, rate in expected.steps]
    assert [losses for _, _, losses in found] == [expected.losses[:n] for n in range(1, 13)]


def test_a_step_without_readers_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = trained.read_losses
    monkeypatch.setattr("stepgraph.fitting.loop.Loop.seldom", (64, 1e9))
    monkeypatch.setattr("stepgraph.fitting.trained.read_losses", lambda given: reads.append(len(given)) or read(given))
    for callbacks in ([], [sg.Callback()], [Diary()]):  # none, one that overrides nothing, one that reads no loss
        sg.fit(renewed(), arrays(), callbacks=callbacks, **QUIET)
    assert reads == [BATCHES] * 3


def test_a_callback_that_listens_to_no_steps_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(sg.Callback, "step", lambda self, moment: called.append(1))

    class Quiet(sg.Callback):
        def epoch(self, moment: sg.Moment) -> None:
            pass

    sg.fit(renewed(), arrays(), callbacks=[Quiet()], **QUIET)
    assert not called


@pytest.mark.parametrize("moment, at, steps, epochs", [("step", 8, 8, 1), ("epoch", 6, 6, 1), ("start", 0, 0, 0)])
def test_a_stop_is_resumed_where_it_was(tmp_path: Path, moment: str, at: int, steps: int, epochs: int) -> None:
    whole, resumed, diary = renewed(), renewed(1), Diary()
    settings: dict[str, Any] = {"epochs": 3, "metrics": [sg.accuracy], **QUIET}
    uninterrupted = sg.fit(whole, arrays(), **settings)
    stopping = [Stopping(moment, at), diary]  # the second one is still told
    history = sg.fit(renewed(2), arrays(), checkpoints=tmp_path, callbacks=stopping, **settings)
    assert history.stopped == "enough" and len(history.steps) == steps and len(history.epochs) == epochs
    assert diary.lines[-1] == ("end", 1 + (moment == "step") if steps else 0, steps, "enough")
    diary = Diary()
    again = sg.fit(resumed, arrays(), checkpoints=tmp_path, resume=True, callbacks=[diary], **settings)
    assert again.steps == uninterrupted.steps and parameters(resumed) == parameters(whole)
    if steps:
        assert diary.lines[0] == ("start", 2, steps, True)
        assert [line for line in diary.lines if line[0] == "epoch"] == [("epoch", 2, 12), ("epoch", 3, 18)]


def test_the_first_reason_counts_and_a_reason_has_a_default() -> None:
    stops = [Stopping("epoch", 1, "first"), Stopping("epoch", 1, "second")]
    assert sg.fit(renewed(), arrays(), epochs=5, callbacks=stops, **QUIET).stopped == "first"

    class Plain(sg.Callback):
        def epoch(self, moment: sg.Moment) -> None:
            moment.stop()

    assert sg.fit(renewed(), arrays(), epochs=5, callbacks=[Plain()], **QUIET).stopped == "stopped by a callback"


@pytest.mark.parametrize("where", ["start", "step", "epoch", "checkpoint", "end"])
def test_an_exception_ends_the_run_and_the_others_are_told(tmp_path: Path, where: str) -> None:
    class Failing(sg.Callback):
        pass

    def fail(self: Any, moment: sg.Moment) -> None:
        if moment.step >= 8 or where in ("start", "end"):
            raise LookupError(where)

    setattr(Failing, where, fail)
    before, after = Diary(), Diary()
    kept: dict[str, Any] = {"epochs": 3, "checkpoints": tmp_path, **QUIET}
    training = renewed()
    with pytest.raises(LookupError, match=where):
        sg.fit(training, arrays(), callbacks=[before, Failing(), after], **kept)
    assert before.lines[-1][0] == "end" and (before.lines[-1][3] == "failed") is (where != "end")
    assert (after.lines == []) is (where == "start")
    if where != "start":
        assert after.lines[-1][0] == "end"
    assert training.optimizer.time_step == 1 + before.lines[-1][2]  # whole updates only
    whole, resumed = renewed(), renewed(1)
    sg.fit(whole, arrays(), epochs=3, **QUIET)
    sg.fit(resumed, arrays(), resume=True, **kept)
    assert parameters(resumed) == parameters(whole)


def test_a_callback_keeps_its_state_in_checkpoints(tmp_path: Path) -> None:
    class Counting(sg.Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def epoch(self, moment: sg.Moment) -> None:
            self.seen.append(moment.epoch)

        def state(self) -> Any:
            return {"seen": self.seen}

        def resume(self, state: Any) -> None:
            self.seen = list(state["seen"])

    kept: dict[str, Any] = {"checkpoints": tmp_path, "resume": True, **QUIET}
    sg.fit(renewed(), arrays(), epochs=2, callbacks=[Diary(), Counting()], **kept)
    counting, new = Counting(), Counting()
    sg.fit(renewed(), arrays(), epochs=3, callbacks=[counting, Diary(), new], **kept)
    assert counting.seen == [1, 2, 3] and new.seen == [3]


def test_a_callback_may_set_the_learning_rate() -> None:
    class Halving(sg.Callback):
        def epoch(self, moment: sg.Moment) -> None:
            moment.graph.optimizer.learning_rate = moment.learning_rate / 2

    history = sg.fit(renewed(), arrays(), epochs=3, callbacks=[Halving()], **QUIET)
    assert history["rate"] == [0.01, 0.005, 0.0025]


@pytest.mark.parametrize("given", [3, [lambda moment: None], [Diary]])
def test_what_is_no_callback_is_refused(given: Any) -> None:
    with pytest.raises(sg.DataTypeError, match="callbacks"):
        sg.fit(renewed(), arrays(), callbacks=given, **QUIET)


# Early stopping


def scores(values: list[float]) -> dict[str, Any]:
    coming = iter(values)
    return {"score": lambda prediction, labels: next(coming)}


@pytest.mark.parametrize("spelling", ["arguments", "callback"])
@pytest.mark.parametrize("folder", [False, True])
def test_the_best_epoch_is_restored(tmp_path: Path, spelling: str, folder: bool) -> None:
    stopping: dict[str, Any] = {"watch": "score", "patience": 2, "restore_best": True}
    given = stopping if spelling == "arguments" else {"callbacks": [sg.EarlyStopping(**stopping)]}
    training, best = renewed(), renewed(1)
    metrics = scores([0.1, 0.9, math.nan, 0.5])
    place = {"checkpoints": tmp_path} if folder else {}
    history = sg.fit(training, arrays(BATCH), epochs=9, metrics=metrics, **given, **place, **QUIET)
    assert (history.best_epoch, history.stopped, len(history.epochs)) == (2, "no improvement", 4)
    sg.fit(best, arrays(BATCH), epochs=2, **QUIET)
    mine, wanted = ([t.numpy() for layer in one.layers for t in layer.parameters.values()] for one in (training, best))
    for a, b in zip(mine, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    if folder:  # the series continues from the last epoch, not from the best
        again = renewed(2)
        again.restore(tmp_path)
        assert again.optimizer.time_step == 5 and parameters(again) != parameters(best)


def test_the_best_epoch_before_a_resume_is_restored(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"checkpoints": tmp_path, "watch": "score", "restore_best": True, "resume": True, **QUIET}
    values = [0.1, 0.9, 0.3, 0.4, 0.5, 0.2]
    sg.fit(renewed(), arrays(BATCH), epochs=3, metrics=scores(values[:3]), **kept)
    training, best = renewed(), renewed(1)
    history = sg.fit(training, arrays(BATCH), epochs=6, metrics=scores(values[3:]), **kept)
    assert history.best_epoch == 2 and len(history.epochs) == 6
    sg.fit(best, arrays(BATCH), epochs=2, **QUIET)
    for layer, wanted in zip(training.layers, best.layers, strict=True):
        for name, tensor in layer.parameters.items():
            np.testing.assert_array_equal(tensor.numpy(), wanted.parameters[name].numpy())


def test_an_interrupted_run_keeps_its_last_parameters(tmp_path: Path) -> None:
    training, plain = renewed(), renewed(1)
    metrics = scores([0.9, 0.1, 0.2])
    stop = [Stopping("step", 3, "interrupted")]
    sg.fit(
        training, arrays(BATCH), epochs=9, metrics=metrics, watch="score", restore_best=True, callbacks=stop, **QUIET
    )
    sg.fit(plain, arrays(BATCH), epochs=3, **QUIET)
    assert parameters(training) == parameters(plain)


def test_nothing_but_nan_restores_nothing() -> None:
    training = renewed()
    metrics = scores([math.nan] * 3)
    history = sg.fit(training, arrays(BATCH), epochs=3, metrics=metrics, watch="score", restore_best=True, **QUIET)
    assert history.best_epoch is None and training.optimizer.time_step == 4


def test_any_number_of_the_history_can_be_watched() -> None:
    metrics = {"accuracy": "accuracy", "lowest": lambda prediction, labels: prediction.amin()}
    settings: dict[str, Any] = {"validation": arrays(9, 1), "metrics": metrics}
    for name in ("loss", "accuracy", "validation loss", "validation lowest", "rate", "seconds", "waiting"):
        history = sg.fit(renewed(), arrays(), epochs=2, watch=name, **settings, **QUIET)
        row = name if name in ("rate", "seconds", "waiting") or name.startswith("validation ") else f"validation {name}"
        best = max if row.split()[-1] in ("accuracy", "lowest") else min
        assert history[row][(history.best_epoch or 1) - 1] == best(history[row])
    with pytest.raises(sg.UnknownNameError, match="watch is 'acuracy'"):
        sg.fit(renewed(), arrays(), watch="acuracy", **settings, **QUIET)
    with pytest.raises(sg.UnknownNameError, match="watch is 'validation loss'"):
        sg.fit(renewed(), arrays(), watch="validation loss", **QUIET)


def test_two_spellings_at_once_are_refused() -> None:
    with pytest.raises(sg.ArgumentError, match="patience= was passed besides EarlyStopping"):
        sg.fit(renewed(), arrays(), patience=3, callbacks=[sg.EarlyStopping()], **QUIET)
    with pytest.raises(sg.ArgumentError, match="2 EarlyStopping"):
        sg.fit(renewed(), arrays(), callbacks=[sg.EarlyStopping(), sg.EarlyStopping()], **QUIET)
    for wrong in ({"patience": 0}, {"better": "more"}):
        with pytest.raises(sg.ArgumentError, match=next(iter(wrong))):
            sg.EarlyStopping(**wrong)


def test_one_early_stopping_serves_two_runs() -> None:
    stopping = sg.EarlyStopping(patience=1, watch="score")
    for values in ([0.9, 0.1], [0.2, 0.1]):
        history = sg.fit(renewed(), arrays(BATCH), epochs=5, metrics=scores(values), callbacks=[stopping], **QUIET)
        assert len(history.epochs) == 2 and history.best_epoch == 1


# NaN


def spoiled() -> tuple[np.ndarray, np.ndarray]:
    """Rows of which those from 20 on are NaN: the loss is from update 3 on."""
    x, y = arrays()
    x[20:] = np.nan
    return x, y


def test_nan_ends_a_run_and_says_where_to_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings: dict[str, Any] = {"shuffle": False, "epochs": 4, "checkpoints": tmp_path, "save_every": 1}
    history = sg.fit(renewed(), spoiled(), progress="plain", **settings)
    assert history.stopped == "nan" and len(history.epochs) == 0 and math.isnan(history.losses[-1])
    assert "the loss is nan in step 3: training.check_numerics()" in capsys.readouterr().out
    assert "in step 3" in str(history) and "nan" in str(history)
    healthy = renewed(1)
    assert healthy.restore(tmp_path).notes["fit"]["place"]["step"] == 2  # nothing was saved since
    assert all(np.isfinite(t.numpy()).all() for layer in healthy.layers for t in layer.parameters.values())


def test_nan_may_continue() -> None:
    history = sg.fit(renewed(), spoiled(), shuffle=False, epochs=2, on_nan="continue", **QUIET)
    assert history.stopped == "finished" and math.isnan(history["loss"][1]) and history.best_epoch is None
    with pytest.raises(sg.ArgumentError, match="on_nan is 'ignore'"):
        sg.fit(renewed(), arrays(), on_nan="ignore", **QUIET)


def test_after_nan_the_best_epoch_is_restored() -> None:
    def data(epoch: int) -> Any:
        x, y = arrays(BATCH) if epoch < 2 else (np.full_like(arrays(BATCH)[0], np.nan), arrays(BATCH)[1])
        return [(x, y)]

    training = renewed()
    history = sg.fit(training, data, epochs=9, restore_best=True, **QUIET)
    assert history.stopped == "nan" and history.best_epoch in (1, 2)
    assert all(np.isfinite(t.numpy()).all() for layer in training.layers for t in layer.parameters.values())


def test_an_infinite_loss_is_pointed_out_and_goes_on() -> None:
    training = infinite()
    history = sg.fit(training, (np.ones((4, 1), np.float32), np.full((4, 1), -1e30, np.float32)), epochs=2, **QUIET)
    assert history.losses == [math.inf, math.inf] and history.stopped == "finished" and history.best_epoch is None
    assert "the loss is inf in step 1" in history.notes[0]


def infinite() -> sg.TrainingGraph:
    """A graph that learns nothing, whose squared errors may exceed float32."""
    x, y, graph = sg.Tensor((4, 1)), sg.Tensor((4, 1)), sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(1, 1), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.0))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    return training


# Logs


def test_a_csv_file_has_every_epoch(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.csv"
    kept: dict[str, Any] = {"checkpoints": tmp_path / "kept", "validation": arrays(9, 1), "resume": True, **QUIET}
    metrics = {"accuracy": "accuracy", "confusion": "confusion"}
    sg.fit(renewed(), arrays(), epochs=2, callbacks=[sg.CSVLog(path)], metrics=["accuracy"], **kept)
    history = sg.fit(renewed(), arrays(), epochs=4, callbacks=[sg.CSVLog(path)], metrics=metrics, **kept)
    lines = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(line["validation loss"]) for line in lines] == history["validation loss"]
    assert [int(line["epoch"]) for line in lines] == [1, 2, 3, 4] and "confusion" not in lines[0]
    assert sorted(one.name for one in path.parent.iterdir()) == ["run.csv"]


def test_a_log_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, full = Path.write_text, [False]

    def writing(self: Path, *arguments: Any, **settings: Any) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *arguments, **settings)

    class Filling(sg.Callback):
        def epoch(self, moment: sg.Moment) -> None:
            full[0] = moment.epoch in (1, 2)

    monkeypatch.setattr(Path, "write_text", writing)
    log = sg.CSVLog(tmp_path / "run.csv")
    history = sg.fit(renewed(), arrays(), epochs=4, callbacks=[Filling(), log], **QUIET)
    assert history.stopped == "finished" and len((tmp_path / "run.csv").read_text().splitlines()) == 5
    assert [note for note in history.notes if "No space left" in note] == history.notes and len(history.notes) == 1
    assert "No space left" in str(history)
    assert caplog.text.count("CSVLog could not write") == 1


def test_tensorboard_shows_epochs_and_some_updates(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    history = sg.fit(
        renewed(), arrays(), epochs=2, callbacks=[sg.TensorBoard(tmp_path, every=4)], metrics=["accuracy"], **QUIET
    )
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [one.step for one in events.Scalars("loss")] == [6, 12]
    assert [one.value for one in events.Scalars("accuracy")] == pytest.approx(history["accuracy"])
    losses = {step: loss for step, loss, _ in history.steps}
    assert {one.step: one.value for one in events.Scalars("step loss")} == pytest.approx(
        {step: losses[step] for step in (4, 8, 12)}
    )


def test_weights_and_biases_gets_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class FakeRun:
        def log(self, numbers: dict[str, Any], step: int) -> None:
            json.dumps(numbers)
            sent.append((step, numbers))
            if step == 6:
                raise ConnectionError("no network")

        def finish(self, exit_code: int) -> None:
            sent.append(("finish", exit_code))

    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: sent.append(settings) or FakeRun()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = sg.WeightsAndBiases(every=5, project="digits")
    history = sg.fit(renewed(), arrays(), epochs=2, callbacks=[log], **QUIET)
    assert sent[0]["project"] == "digits" and sent[-1] == ("finish", 0)
    assert [step for step, _ in sent[1:-1]] == [5, 6, 10, 12] and sent[-2][1]["loss"] == history["loss"][1]
    assert len(history.notes) == 1 and "no network" in history.notes[0]


@pytest.mark.parametrize(
    "module, make, package",
    [
        ("torch.utils.tensorboard", lambda: sg.TensorBoard("x"), "tensorboard"),
        ("wandb", sg.WeightsAndBiases, "wandb"),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, module: str, make: Any, package: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(sg.StateError, match=f"pip install {package}"):
        make()


def test_logs_refuse_senseless_settings() -> None:
    with pytest.raises(sg.ArgumentError, match="every is 0"):
        sg.TensorBoard("x", every=0)


# Checkpoints that cannot be written


def test_a_full_disk_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save, calls = sg.TrainingGraph.save, []

    def saving(self: Any, path: Any, **settings: Any) -> Path:
        calls.append(path)
        if 2 <= len(calls) <= 3:
            raise sg.StorageError(f"{path}", "it cannot be written: No space left on device", fix="make room")
        return save(self, path, **settings)

    monkeypatch.setattr(sg.TrainingGraph, "save", saving)
    diary, training, plain = Diary(), renewed(), renewed(1)
    history = sg.fit(training, arrays(), epochs=4, checkpoints=tmp_path, watch="rate", callbacks=[diary], **QUIET)
    sg.fit(plain, arrays(), epochs=4, **QUIET)
    assert history.stopped == "finished" and parameters(training) == parameters(plain)
    failed, again = history.notes
    assert "the checkpoint after step 6 could not be written" in failed and "No space left" in failed
    assert again.startswith("checkpoints are written again since step")
    assert caplog.text.count("could not be written") == 1
    assert [line for line in diary.lines if line[0] == "checkpoint"][-1] == ("checkpoint", 4, 24)
    resumed = sg.fit(renewed(1), arrays(), epochs=4, checkpoints=tmp_path, resume=True, watch="rate", **QUIET)
    assert resumed.notes == history.notes


def test_a_report_that_fails_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("unexpected")

    for name in ("epoch", "steps", "look"):
        monkeypatch.setattr(f"stepgraph.report.recorder.Recorder.{name}", broken)
    history = sg.fit(renewed(), arrays(), epochs=2, run=tmp_path, **QUIET)
    assert history.stopped == "finished" and history.notes == ["the report of the run is incomplete: unexpected"]


# Waiting for data


def test_the_share_of_time_that_waits_for_data_is_measured(tmp_path: Path) -> None:
    def slow(epoch: int) -> Any:
        for _ in range(4):
            time.sleep(0.02)
            yield arrays(BATCH)

    for prefetch in (0, 2):
        history = sg.fit(renewed(), slow, epochs=2, prefetch=prefetch, run=tmp_path / str(prefetch), **QUIET)
        assert 0.3 < history["waiting"][1] <= 1
        assert "waiting" in str(history)
    history = sg.fit(renewed(), arrays(), epochs=2, **QUIET)
    assert 0 <= history["waiting"][1] < 0.9
