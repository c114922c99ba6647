"""A training loop: epochs over data, validation, schedules, accumulation, checkpoints, and a history.

It uses only what your own program could use: `execute`, the three phases, `learning_rate`, `save`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from math import inf, isfinite, isnan
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from stepgraph.checkpoint.codec import of_kind
from stepgraph.checkpoint.files import as_path, check_keep, latest, read, read_description
from stepgraph.checkpoint.restoring import understood
from stepgraph.errors import ArgumentError, CheckpointError, DataTypeError, UnknownNameError
from stepgraph.fitting.data import Source, source
from stepgraph.fitting.history import History
from stepgraph.fitting.metrics import Metric, Tally, by_name
from stepgraph.fitting.progress import Quiet, display
from stepgraph.fitting.schedule import Schedule, WarmupCosine
from stepgraph.fitting.trained import Trained, read_losses, until
from stepgraph.graphs.training import TrainingGraph
from stepgraph.report.record import CHECKPOINTS
from stepgraph.report.recorder import Recorder, Unrecorded
from stepgraph.runtime.loss_slots import Loss
from stepgraph.system.storage import plain, real, require_writable

Metrics = Metric | Sequence[Metric] | Mapping[str, Metric]


def fit(
    training: TrainingGraph,
    data: Any,
    *,
    epochs: int = 1,
    validation: Any = None,
    batch_size: int | None = None,
    shuffle: bool = True,
    schedule: Schedule | None = None,
    metrics: Metrics = (),
    accumulate: int = 1,
    watch: str = "loss",
    better: str = "auto",
    patience: int | None = None,
    run: str | os.PathLike[str] | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    keep: int = 3,
    save_every: int | None = None,
    resume: bool = False,
    prefetch: int | None = None,
    progress: str = "auto",
) -> History:
    """Trains a compiled graph. Ctrl-C ends it after the current step, with a checkpoint; a second one immediately.

    Args:
        training: a compiled training graph with a loss and an optimizer. The optimizer does the clipping.
        data: arrays, as `(inputs, labels)` or `(inputs, labels, label weights)`, each part an array or a dictionary by
            name, or one dictionary by name; a dataset with columns; or batches of that form: a list, a `DataLoader`,
            any iterable, or a function that returns one for each epoch.
        epochs: the total number of epochs, including those before a `resume`.
        validation: data of the same kinds, evaluated in inference mode after each epoch.
        batch_size: rows of a batch, for arrays and datasets; by default, the graph's own, or 32 if it
            declares `BATCH`. The last batch may be short.
        shuffle: shuffle the rows in each epoch, from the graph's seed. Batches keep their own order.
        schedule: the learning rate of update n, from 0: any function of n, or `WarmupCosine`.
        metrics: functions `(prediction, labels) → number`: one, a list, or a dictionary by name.
        accumulate: batches whose gradients form one update. A mean loss is averaged over all their rows.
        watch: the loss or metric that determines the best epoch; that of the validation data, if any.
        better: `"lower"`, `"higher"`, or `"auto"`: lower for the loss, higher for a metric.
        patience: stop after this many epochs without improvement; an epoch whose watched number is NaN never improves.
        run: a folder for everything about the run: the record, `report.html`, and the checkpoints.
        checkpoints: a folder for a series of the newest `keep` checkpoints, and the best epoch in `best`. With `run`,
            the default is the folder `checkpoints` in it.
        keep: how many checkpoints of the series to keep.
        save_every: also save after this many updates, not only after each epoch.
        resume: continue from the latest checkpoint of the folder, if there is one.
        prefetch: batches prepared ahead by a thread; by default 2 where it pays off, 0 for arrays on the CPU.
        progress: `"rich"`, `"plain"`, `"quiet"`, or `"auto"`: rich on a terminal, else plain.

    Example:
        >>> history = fit(training, (pictures, classes), epochs=5, metrics=[accuracy])  # doctest: +SKIP
        >>> history["accuracy"]  # doctest: +SKIP
        [0.91, 0.95, 0.96, 0.97, 0.97]
    """
    graph, named = Trained(training), by_name(metrics)
    folder = None if run is None else as_path("fit", run)
    settings = _Settings(
        epochs=_count("epochs", epochs, 0),
        accumulate=_count("accumulate", accumulate, 1),
        schedule=_checked_schedule(schedule),
        watch=_watched(watch, named),
        higher=_higher(better, watch),
        patience=_optional_count("patience", patience, 1),
        folder=as_path("fit", checkpoints) if checkpoints is not None else folder and folder / CHECKPOINTS,
        keep=check_keep(keep) or 1,
        save_every=_optional_count("save_every", save_every, 1),
        prefetch=_optional_count("prefetch", prefetch, 0),
    )
    train = source(training, data, _optional_count("batch_size", batch_size, 1), shuffle)
    test = None if validation is None else source(training, validation, batch_size, what="validation", strict=False)
    _require_repeating(epochs, train, test)
    if folder is not None:
        graph.compile_for(train)  # a record begins with the step's memory plan
    recorder = Unrecorded() if folder is None else Recorder(training, folder, resume)
    loop = _Run(graph, settings, train, test, named, display(progress, epochs, graph.device), recorder)
    loop.position.shape = {"batch_size": batch_size, "shuffle": bool(shuffle), "accumulate": accumulate}
    if resume:
        _check_notes(settings.folder, named)
        loop.go_on()
    if settings.folder is not None:
        require_writable(settings.folder)  # fail now, not after the first epoch
    with _interruptible() as interrupted:
        loop.run(interrupted)
    return loop.history


def evaluate(
    training: TrainingGraph,
    data: Any,
    *,
    batch_size: int | None = None,
    metrics: Metrics = (),
    prefetch: int | None = None,
) -> dict[str, Any]:
    """The loss and metrics of data, in inference mode; nothing is learned.

    Example:
        >>> evaluate(training, (pictures, classes), metrics=[accuracy])  # doctest: +SKIP
        {'loss': 0.11, 'accuracy': 0.97}
    """
    graph, named = Trained(training, learns=False), by_name(metrics)
    batches = source(training, data, _optional_count("batch_size", batch_size, 1))
    tally = graph.evaluated(batches, named, _optional_count("prefetch", prefetch, 0))
    return tally.values()


@dataclass(frozen=True)
class _Settings:
    """The checked settings of `fit`."""

    epochs: int
    accumulate: int
    schedule: Schedule | None
    watch: str
    higher: bool
    patience: int | None
    folder: Path | None
    keep: int
    save_every: int | None
    prefetch: int | None


@dataclass
class _Position:
    """The position of a run: what a checkpoint needs, besides the graph's own state, to continue bit for bit."""

    origin: int  # position of the graph's random stream when the run began: a second run uses another order
    epoch: int = 0
    batch: int = 0  # batches of this epoch so far
    step: int = 0  # updates of the run so far
    seconds: float = 0.0  # of this epoch
    best: float | None = None
    waited: int = 0  # epochs since the best
    shape: dict[str, Any] = field(default_factory=dict)


class _Run:
    """The loop."""

    seldom = (64, 0.25)  # losses are read after this many, or this many seconds: each read synchronizes with the GPU

    def __init__(
        self,
        graph: Trained,
        settings: _Settings,
        train: Source,
        test: Source | None,
        metrics: Mapping[str, Metric],
        screen: Quiet,
        recorder: Unrecorded,
    ) -> None:
        self.graph, self.settings, self.train, self.test = graph, settings, train, test
        self.metrics, self.screen, self.recorder = metrics, screen, recorder
        self.optimizer = graph.optimizer
        self.seed, origin = graph.stream
        self.position, self.history, self.tally = _Position(origin), History(), Tally(metrics)
        self.unread: list[_Unread] = []
        self.pointed_out = False
        self.read_at = time.perf_counter()
        self.schedule, self.resumed = settings.schedule, False
        if isinstance(self.schedule, WarmupCosine) and self.schedule.steps is None:
            self.schedule = replace(self.schedule, steps=self._known_total())

    def run(self, interrupted: Callable[[], bool]) -> None:
        """Runs epochs until the last one, until nothing improves, or until interrupted."""
        self._begin_record()
        self.screen.begin(self.position.step)
        try:
            while self.position.epoch < self.settings.epochs and not self._gave_up():
                began = time.perf_counter() - self.position.seconds
                self._train_epoch(interrupted)
                tally = None if interrupted() else self._validate(interrupted)
                self.position.seconds = time.perf_counter() - began
                if interrupted():
                    self._stop()
                    return
                self._close_epoch(tally)
            self.history.stopped = "no improvement" if self._gave_up() else "finished"
        finally:
            self.screen.end()
            self.graph.release()
            self.recorder.end(self.position.step, self.history.stopped or "failed")

    def _train_epoch(self, interrupted: Callable[[], bool]) -> None:
        position, settings = self.position, self.settings
        self.recorder.epoch_begins()
        epoch = self.train.epoch(position.epoch, (self.seed, position.origin), position.batch)
        with self.graph.fed(epoch, self.train, settings.prefetch) as batches:
            coming = until(batches, interrupted)
            while group := list(islice(coming, settings.accumulate)):
                if interrupted() and len(group) < settings.accumulate:
                    break  # no partial updates
                if self.schedule is not None:
                    self._set_rate(self.schedule(position.step))
                if position.step + 1 == self.recorder.next_look:
                    self.recorder.look(position.step + 1, group[0])
                tally = self.tally if self.metrics else None
                losses = self.graph.update(group, tally)
                position.step, position.batch = position.step + 1, position.batch + len(group)
                self.unread.append(_Unread(position.step, self.optimizer.learning_rate, losses))
                self._look_at_losses()
                if settings.save_every and position.step % settings.save_every == 0:
                    self._save()
        self._read_losses()

    def _validate(self, interrupted: Callable[[], bool]) -> Tally | None:
        if self.test is None:
            return None
        return self.graph.evaluated(self.test, self.metrics, self.settings.prefetch, interrupted)

    def _close_epoch(self, tested: Tally | None) -> None:
        position, folder = self.position, self.settings.folder
        found = {} if tested is None else {f"validation {name}": value for name, value in tested.values().items()}
        times = {"rate": self.optimizer.learning_rate, "seconds": position.seconds}
        row = {"epoch": position.epoch + 1, "step": position.step, **self.tally.values(), **found, **times}
        self.history.epochs.append(row)
        value = row[self._watched]
        is_best = self._is_better(value)
        if is_best:
            position.best, position.waited, self.history.best_epoch = value, 0, row["epoch"]
        else:
            position.waited += 1
        position.epoch, position.batch, position.seconds, self.tally = position.epoch + 1, 0, 0.0, Tally(self.metrics)
        # Before the checkpoint: a run that resumes from it does not repeat the epoch.
        self.recorder.epoch(row)
        if folder is not None and is_best:
            self.graph.training.save(folder / "best", notes=self._notes())
        self._save()
        self.screen.epoch(row)

    @property
    def _watched(self) -> str:
        """The name of the number that determines the best epoch."""
        return self.settings.watch if self.test is None else f"validation {self.settings.watch}"

    def _is_better(self, value: float) -> bool:
        """Whether this is the best value so far. NaN never is, nor is an infinity of the wrong sign."""
        best, higher = self.position.best, self.settings.higher
        if best is None or isnan(best):
            best = -inf if higher else inf
        return value > best if higher else value < best

    def _gave_up(self) -> bool:
        return self.settings.patience is not None and self.position.waited >= self.settings.patience

    def _stop(self) -> None:
        self.history.stopped = "interrupted"
        self._save()
        where = "" if self.settings.folder is None else f", saved in {self.settings.folder}"
        self.screen.line(f"interrupted in epoch {self.position.epoch + 1} after step {self.position.step}{where}")

    def _set_rate(self, rate: float) -> None:
        if rate != self.optimizer.learning_rate:  # takes effect in this update; nothing is compiled
            self.optimizer.learning_rate = rate

    # Reading losses infrequently

    def _look_at_losses(self) -> None:
        if len(self.unread) >= self.seldom[0] or time.perf_counter() - self.read_at > self.seldom[1]:
            recent = self._read_losses()
            rate = self.optimizer.learning_rate

            def numbers() -> dict[str, Any]:
                return {**self.tally.values(), "loss": recent, "rate": rate}

            self.screen.step(self.position.epoch + 1, self.position.step, self._total(), numbers)

    def _read_losses(self) -> float:
        """Reads all pending losses; returns their mean."""
        values = iter(read_losses([loss for one in self.unread for loss, _ in one.losses]))
        means, rows_read = [], 0
        for one in self.unread:
            found = [(next(values), rows) for _, rows in one.losses]
            for loss, rows in found:
                self.tally.add_loss(loss, rows)
                rows_read += rows
            means.append(sum(loss * rows for loss, rows in found) / sum(rows for _, rows in found))
            self.history.add_step(one.step, means[-1], one.rate)
            self._point_out(one.step, means[-1])
        read = [(one.step, mean, one.rate) for one, mean in zip(self.unread, means, strict=True)]
        self.recorder.steps(read, rows_read)
        self.unread, self.read_at = [], time.perf_counter()
        return sum(means) / len(means) if means else float("nan")

    def _point_out(self, step: int, loss: float) -> None:
        """Reports once where to look when the loss is no longer finite."""
        if not isfinite(loss) and not self.pointed_out:
            self.pointed_out = True
            self.screen.line(
                f"the loss is {loss} in step {step}: training.check_numerics() shows what is not finite now, and "
                "compiling with GraphCompilationOptions.CHECK_NUMERICS stops at the layer that produces it"
            )

    def _total(self) -> int | None:
        """Updates of the whole run, if the number of batches is known."""
        batches = self.train.batches
        return None if batches is None else -(-batches // self.settings.accumulate) * self.settings.epochs

    def _known_total(self) -> int:
        total = self._total()
        if total is None:
            raise ArgumentError("fit", "the number of updates is unknown: the data has no length", fix="pass steps=")
        return total

    # The record and checkpoints

    def _begin_record(self) -> None:
        settings = {**asdict(self.settings), "schedule": self.schedule, "metrics": list(self.metrics)}
        settings |= {"optimizer": self.optimizer, "batches": self.train.batches, **self.position.shape}
        settings["better"] = "higher" if settings.pop("higher") else "lower"
        self.recorder.begin(self.position.step, self.position.epoch, self._total(), self.resumed, settings)

    def _save(self) -> None:
        if self.settings.folder is not None:
            self._read_losses()
            self.graph.training.save(self.settings.folder, keep=self.settings.keep, notes=self._notes())

    def _notes(self) -> dict[str, Any]:
        state = {"place": asdict(self.position), "tally": self.tally.state()}
        return {"fit": {**plain(state), "history": self.history.state(), "watched": self._watched_how()}}

    def _watched_how(self) -> list[str]:
        return [self._watched, "higher" if self.settings.higher else "lower"]

    def go_on(self) -> None:
        """Restores the latest checkpoint, if there is one."""
        folder, shape = self.settings.folder, self.position.shape
        if folder is None:
            raise ArgumentError("fit", "resume needs checkpoints to continue from", fix="pass checkpoints=folder")
        if latest(folder) is None:
            return
        notes = read(folder).description["notes"].get("fit")
        if notes is None:
            raise CheckpointError(f"{folder}", "its latest checkpoint was not saved by fit", fix="pass another folder")
        position = _Position(**real(notes["place"]))
        if position.batch and position.shape != shape:
            raise CheckpointError(
                f"{folder}",
                f"it was saved within an epoch, which cannot continue with other batches: {shape}",
                saved=position.shape,
                fix="pass the same batch_size, shuffle and accumulate",
            )
        self.graph.training.restore(folder)
        self.seed, _ = self.graph.stream
        self.position, self.history = position, History.from_state(notes["history"])
        self.position.shape, self.resumed = shape, True
        if notes.get("watched", self._watched_how()) != self._watched_how():
            self.position.best, self.position.waited = None, 0  # they belong to another number
        self.tally.resume(real(notes["tally"]))


@dataclass(frozen=True)
class _Unread:
    """The losses of one update, with the rows of their batches, still on the device."""

    step: int
    rate: float
    losses: list[tuple[torch.Tensor | Loss, int]]


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Makes the first Ctrl-C a request to stop; the second one does what it did before."""
    asked = threading.Event()
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if in_main else None
    if before is None or before == signal.SIG_IGN:
        yield asked.is_set
        return

    def ask(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


# Checking arguments


def _count(name: str, given: Any, least: int) -> int:
    if isinstance(given, bool) or not isinstance(given, Integral) or given < least:
        raise ArgumentError("fit", f"{name} is {given!r}", fix=f"pass an integer ≥ {least}")
    return int(given)


def _optional_count(name: str, given: Any, least: int) -> int | None:
    return None if given is None else _count(name, given, least)


def _checked_schedule(schedule: Any) -> Schedule | None:
    if schedule is not None and not callable(schedule):
        raise DataTypeError(
            "fit", f"schedule is {schedule!r}, not a function", fix="pass a function of the update's number"
        )
    return schedule


def _watched(watch: str, metrics: Mapping[str, Metric]) -> str:
    if watch not in ("loss", *metrics):
        raise UnknownNameError("fit", f"watch is {watch!r}", known=", ".join(("loss", *metrics)), fix="use one")
    if getattr(metrics.get(watch), "adds_up", False):
        raise ArgumentError(
            "fit", f"watch is '{watch}', which is not a single number", fix="watch the loss or another metric"
        )
    return watch


def _higher(better: str, watch: str) -> bool:
    if better not in ("auto", "lower", "higher"):
        raise ArgumentError("fit", f"better is {better!r}", fix='use "auto", "lower" or "higher"')
    return better == "higher" or (better == "auto" and watch != "loss")


def _require_repeating(epochs: int, *sources: Source | None) -> None:
    for one in sources:
        if one is not None and epochs > 1 and not one.repeats:
            problem = f"the {one.reader.what} is an iterator, exhausted after one epoch of {epochs}"
            raise ArgumentError("fit", problem, fix="pass a list, or a function of the epoch that returns an iterator")


def _check_notes(folder: Path | None, metrics: Mapping[str, Metric]) -> None:
    """Rejects, before anything changes, a latest checkpoint whose notes `fit` cannot continue from."""
    path = None if folder is None else latest(folder)
    if path is None:
        return
    with understood(path):
        notes = read_description(path)["notes"].get("fit")
        if notes is not None:  # otherwise another program saved it, which is reported when it is read
            position, history = _Position(**real(notes["place"])), History.from_state(notes["history"])
            Tally(metrics).resume(real(notes["tally"]))
            for name in ("origin", "epoch", "batch", "step", "waited"):
                of_kind(int, getattr(position, name))
            of_kind(int, history.every)
            for row in history.epochs:
                of_kind(int, row["epoch"])
