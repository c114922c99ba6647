"""The loop of `fit`: epochs of updates, validation, checkpoints, and whoever wants to be told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from math import inf, isfinite, isnan
from pathlib import Path
from typing import Any

from stepgraph.checkpoint.codec import of_kind
from stepgraph.checkpoint.files import latest, read, read_description
from stepgraph.checkpoint.restoring import understood
from stepgraph.errors import ArgumentError, CheckpointError, StepgraphError, StorageError, readable, reason
from stepgraph.fitting.callbacks import Callbacks, EarlyStopping, Moment
from stepgraph.fitting.data import Batch, Source
from stepgraph.fitting.history import History
from stepgraph.fitting.losses import Measured, joined
from stepgraph.fitting.metrics import Tally
from stepgraph.fitting.progress import Quiet
from stepgraph.fitting.ranks import Ranks, agreed
from stepgraph.fitting.schedule import Schedule, completed, rate_at
from stepgraph.fitting.stopping import FAILED, FINISHED, NAN, Stopping
from stepgraph.fitting.trained import Trained, until
from stepgraph.report.recorder import Unrecorded
from stepgraph.runtime.rank_calls import OVER, RankCall
from stepgraph.system.storage import plain, real

logger = logging.getLogger("stepgraph")
BEST = "best"  # the folder of the best epoch, in that of the checkpoints


@dataclass(frozen=True)
class Settings:
    """The checked settings of `fit`."""

    epochs: int
    accumulate: int
    schedule: Schedule | None
    folder: Path | None
    keep: int
    save_every: int | None
    prefetch: int | None
    stops_at_nan: bool


@dataclass
class Position:
    """The position of a run: what a checkpoint needs, besides the graph's own state, to continue bit for bit."""

    origin: int  # position of the graph's random stream when the run began: a second run uses another order
    epoch: int = 0
    batch: int = 0  # batches of this epoch so far
    step: int = 0  # updates of the run so far
    seconds: float = 0.0  # of this epoch
    waiting: float = 0.0  # seconds of this epoch in which the loop waited for data
    shape: dict[str, Any] = field(default_factory=dict)
    portion: int | None = None  # rows that run at once


@dataclass(frozen=True)
class Parts:
    """What a run is made of."""

    graph: Trained
    train: Source
    test: Source | None
    metrics: Mapping[str, Any]
    watcher: EarlyStopping
    callbacks: Callbacks
    screen: Quiet
    recorder: Unrecorded


class Loop:
    """A run of `fit`."""

    seldom = (64, 0.25)  # losses are read after this many, or this many seconds: each read synchronizes with the GPU

    def __init__(self, parts: Parts, settings: Settings, shape: dict[str, Any]) -> None:
        self.parts, self.settings, self.graph = parts, settings, parts.graph
        self.world = parts.graph.training.world
        if self.world.size > 1:
            self.seldom = (16, inf)  # time passes differently on each rank, and a NaN must stop all in the same step
        self.optimizer = parts.graph.optimizer
        self.seed, origin = parts.graph.stream
        self.position = Position(origin, shape=shape, portion=parts.graph.portion)
        self.history, self.tally = History(), Tally(parts.metrics)
        self.unread: list[_Unread] = []
        self.last_loss = float("nan")
        self.read_at = time.perf_counter()
        self.stopping, self.ranks = Stopping(self.world), Ranks(self.world, parts.graph.device)
        self.resumed = self.pointed_out = False
        self.unsaved = False  # the last checkpoint could not be written
        self.warned: set[str] = set()
        schedule = settings.schedule
        self.schedule = None if schedule is None else completed(schedule, self._known_total)
        self.rate: float | None = None  # of the next update, if a schedule decides it

    @property
    def call(self) -> dict[str, Any]:
        """What decides how many exchanges a run makes, and when."""
        settings, test = self.settings, self.parts.test
        sizes = {"batches": self.parts.train.batches, "validation batches": None if test is None else test.batches}
        names = ("epochs", "save_every", "stops_at_nan")
        kept = {"checkpoints": settings.folder is not None, "metrics": list(self.parts.metrics)}
        return {**self.position.shape, **sizes, **{name: getattr(settings, name) for name in names}, **kept}

    def run(self) -> None:
        """Runs epochs until the last one, or until something asks to stop."""
        with self.world.telling_failures():  # of the first rank, which alone does this
            self._begin_record()
            self.parts.screen.begin(self.position.step)
        self.world.place.step = self.position.step
        try:
            with self.world.place.running(), self.world.telling_failures():
                self._start()
                while self.position.epoch < self.settings.epochs and not self.stopping.is_due(heeds_signals=False):
                    self._run_epoch()
                self.world.greet((RankCall.STEP_OF_FIT, OVER, 0))  # until here, ranks hear what one does by itself
            self.history.stopped = self.stopping.why or FINISHED
            self.remark([] if self.stopping.who is None else [self.stopping.who])
        finally:
            self._end()

    def _start(self) -> None:
        moment = self._moment(self.position.epoch + 1)
        self.parts.watcher.start(moment)
        if self.parts.watcher.gave_up:  # a run that was over when it was saved
            self.stopping.ask("no improvement")
        self.parts.callbacks.start(moment)

    def _run_epoch(self) -> None:
        began = time.perf_counter() - self.position.seconds
        self._train_epoch()
        tested = None if self.stopping.is_due() else self._validate()
        self.position.seconds = time.perf_counter() - began
        if self.stopping.is_due():
            self._break_off()
        else:
            self._close_epoch(tested)

    def _train_epoch(self) -> None:
        position, settings, recorder = self.position, self.settings, self.parts.recorder
        self._report(recorder.epoch_begins)
        epoch = self.parts.train.epoch(position.epoch, (self.seed, position.origin), position.batch)
        with self.graph.fed(epoch, self.parts.train, settings.prefetch, settings.accumulate) as batches:
            coming = self._timed(until(self._rated(batches), self.stopping))
            while group := list(islice(coming, settings.accumulate)):
                if len(group) < settings.accumulate and self.stopping.is_due():
                    break  # no partial updates
                self._set_rate(self.rate)
                if position.step + 1 == recorder.next_look:
                    self._report(lambda first=group[0]: recorder.look(position.step + 1, first))  # type: ignore[misc]
                with self.ranks.updating():
                    tally = self.tally if self.parts.metrics else None
                    losses = self.graph.update(group, tally)
                position.step, position.batch = position.step + 1, position.batch + len(group)
                self.unread.append(_Unread(position.step, self.optimizer.learning_rate, losses))
                self._look_at_losses()
                if self.parts.callbacks.listen_to_steps:
                    self.parts.callbacks.step(self._moment(position.epoch + 1))
                if settings.save_every and position.step % settings.save_every == 0:
                    self._save(position.epoch + 1)
        self._read_losses()

    def _rated(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; asks for the rate of their update while other ranks can hear that a schedule has failed."""
        for index, batch in enumerate(batches):
            if self.schedule is not None and index % self.settings.accumulate == 0:
                self.rate = rate_at(self.schedule, self.position.step)
            yield batch

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the time until each is ready counts as waiting."""
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.position.waiting += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def _validate(self) -> Tally | None:
        if self.parts.test is None:
            return None
        return self.graph.evaluated(self.parts.test, self.parts.metrics, self.settings.prefetch, self.stopping)

    def _close_epoch(self, tested: Tally | None) -> None:
        position, watcher = self.position, self.parts.watcher
        row = agreed(self.world, self._row(tested))
        self.history.epochs.append(row)
        moment = self._moment(row["epoch"], row)
        watcher.epoch(moment)
        if watcher.is_best:
            self.history.best_epoch = row["epoch"]
        position.epoch, position.batch, self.tally = position.epoch + 1, 0, Tally(self.parts.metrics)
        position.seconds = position.waiting = 0.0
        self._count_ranks()
        # Before the checkpoint: a run that resumes from it does not repeat the epoch.
        self._report(lambda: self.parts.recorder.epoch(row))
        self.parts.callbacks.epoch(moment)
        if self.settings.folder is not None and watcher.is_best:
            self._write(self.settings.folder / BEST)
        self._save(row["epoch"], row)
        self.parts.screen.epoch(row)

    def _count_ranks(self) -> None:
        """Lets the first rank report what each has done so far."""
        self.history.ranks = self.ranks.rows()
        self._report(lambda: self.parts.recorder.ranks(self.position.step, self.history.ranks))

    def _row(self, tested: Tally | None) -> dict[str, Any]:
        """The numbers of the epoch."""
        position = self.position
        found = {} if tested is None else {f"validation {name}": value for name, value in tested.values().items()}
        waiting = min(position.waiting / max(position.seconds, 1e-9), 1.0)
        times = {"rate": self.optimizer.learning_rate, "seconds": position.seconds, "waiting": waiting}
        return {"epoch": position.epoch + 1, "step": position.step, **self.tally.values(), **found, **times}

    def _break_off(self) -> None:
        """Ends a run within an epoch. One whose loss is NaN is not saved: earlier checkpoints are worth more."""
        if self.stopping.why == NAN:
            return
        self._count_ranks()
        self._save(self.position.epoch + 1)
        folder = self.settings.folder
        where = "" if folder is None or self.unsaved else f", saved in {folder}"
        place = f"epoch {self.position.epoch + 1} after step {self.position.step}"
        self.parts.screen.line(f"{self.stopping.why} in {place}{where}")

    def _end(self) -> None:
        stopped = self.history.stopped or FAILED
        inside = self.position.batch > 0
        try:
            moment = self._moment(self.position.epoch + inside, stopped=stopped)
            self.parts.watcher.end(moment)
            self._tell_end(moment)
        finally:
            self.parts.screen.end()
            self._report(lambda: self.parts.recorder.end(self.position.step, stopped, self.stopping.who))
            problems = [*self.parts.screen.problems, *self.parts.recorder.problems]
            self.history.notes += [one for one in problems if one not in self.history.notes]

    def _tell_end(self, moment: Moment) -> None:
        try:
            self.parts.callbacks.end(moment)
        except Exception:  # of a user's callback: it must not hide the error that ended the run
            if moment.stopped != FAILED:
                raise
            logger.exception("a callback failed at the end of a run that had failed")

    def _set_rate(self, rate: float | None) -> None:
        if rate is not None and rate != self.optimizer.learning_rate:  # takes effect in this update, without compiling
            self.optimizer.learning_rate = rate

    # Telling

    def _moment(self, epoch: int, row: Mapping[str, Any] | None = None, **more: Any) -> Moment:
        def numbers() -> tuple[History, Mapping[str, Any]]:
            self._read_losses()
            found = {**self.tally.values(), "loss": self.last_loss} if row is None else row
            return self.history, {name: one for name, one in found.items() if name not in _NOT_METRICS}

        rate, total = self.optimizer.learning_rate, self._total()
        told = (self.graph.training, epoch, self.settings.epochs, self.position.step, total, rate, self.resumed)
        return Moment(*told, read=numbers, ask_to_stop=self.stopping.ask, **more)

    def _report(self, telling: Callable[[], None]) -> None:
        """Writes to the report; whatever goes wrong there does not end the training."""
        try:
            telling()
        except Exception as error:  # of files, drawings or callers' objects: none of them is worth the run
            self._warn("report", f"the report of the run is incomplete: {reason(error)}")

    def _warn(self, what: str, text: str) -> None:
        """Warns once about each kind of problem; the history has it, too."""
        if what not in self.warned:
            self.warned.add(what)
            self.history.notes.append(readable(text))
            logger.warning("training continues, but %s", readable(text))

    # Reading losses infrequently

    def _look_at_losses(self) -> None:
        if len(self.unread) >= self.seldom[0] or time.perf_counter() - self.read_at > self.seldom[1]:
            recent = self._read_losses()
            rate = self.optimizer.learning_rate

            def numbers() -> dict[str, Any]:
                return {**self.tally.values(), "loss": recent, "rate": rate}

            self.parts.screen.step(self.position.epoch + 1, self.position.step, self._total(), numbers)

    def _read_losses(self) -> float:
        """Reads all pending losses; returns their mean."""
        if not self.unread:
            return float("nan")
        batches = iter(self.graph.read([batch for one in self.unread for batch in one.losses]))
        means, rows_read = [], 0
        for one in self.unread:
            found = joined([next(batches) for _ in one.losses], self.graph.losses)  # of an update, as of one batch
            self.graph.add_losses(self.tally, found)
            rows_read += found.rows
            means.append(sum(found.losses))
            self.history.add_step(one.step, means[-1], one.rate)
            self._point_out(one.step, means[-1])
        pending = [(one.step, mean, one.rate) for one, mean in zip(self.unread, means, strict=True)]
        self.unread, self.read_at, self.last_loss = [], time.perf_counter(), means[-1]
        self._report(lambda: self.parts.recorder.steps(pending, rows_read))
        return sum(means) / len(means)

    def _point_out(self, step: int, loss: float) -> None:
        """Says once where to look when the loss is no longer finite; a NaN ends the run, unless it may continue."""
        if isfinite(loss):
            return
        if isnan(loss) and self.settings.stops_at_nan:
            self.stopping.ask(NAN)
        if not self.pointed_out:
            self.pointed_out = True
            text = (
                f"the loss is {loss} in step {step}: training.check_numerics() shows what is not finite now, and "
                "compiling with GraphCompilationOptions.CHECK_NUMERICS stops at the layer that produces it"
            )
            self.history.notes.append(text)
            self.parts.screen.line(text)

    def _total(self) -> int | None:
        """Updates of the whole run, if the number of batches is known."""
        batches = self.parts.train.batches
        return None if batches is None else -(-batches // self.settings.accumulate) * self.settings.epochs

    def _known_total(self) -> int:
        total = self._total()
        if total is None:
            problem = "the number of updates is unknown: the data has no length"
            raise ArgumentError("fit", problem, fix="pass steps= to the schedule")
        return total

    # The record and checkpoints

    def _begin_record(self) -> None:
        watcher = self.parts.watcher
        settings = {**asdict(replace(self.settings, schedule=None)), "schedule": self.schedule}
        settings["on_nan"] = "stop" if settings.pop("stops_at_nan") else "continue"
        settings |= {"metrics": list(self.parts.metrics), "watch": watcher.watch, "patience": watcher.patience}
        settings |= {"better": "higher" if watcher.is_higher_better else "lower", "optimizer": self.optimizer}
        settings |= {"batches": self.parts.train.batches, **self.position.shape}
        self.parts.recorder.begin(self.position.step, self.position.epoch, self._total(), self.resumed, settings)

    def _save(self, epoch: int, row: Mapping[str, Any] | None = None) -> None:
        """Writes the next checkpoint of the series."""
        if self.settings.folder is None:
            return
        self._read_losses()
        if self.stopping.why == NAN:
            return
        path = self._write(self.settings.folder, keep=self.settings.keep)
        if path is not None:
            self.parts.callbacks.checkpoint(self._moment(epoch, row, path=path))

    def _write(self, folder: Path, **settings: Any) -> Path | None:
        """Writes a checkpoint. If that fails, training continues, and the next one is tried again."""
        if not self.world.is_first:
            with suppress(StorageError):  # the first rank says what has failed
                self.graph.training.save(folder)  # it sends its part of the optimizer state
            return None
        try:
            path = self.graph.training.save(folder, notes=self._notes(), **settings)
        except StorageError as error:
            self.unsaved = True
            text = f"the checkpoint after step {self.position.step} could not be written"
            self._warn("checkpoint", f"{text}: {error.where}: {error.problem}")
            return None
        if self.unsaved:
            self.unsaved = False
            self.warned.discard("checkpoint")
            self.history.notes.append(f"checkpoints are written again since step {self.position.step}")
        return path

    def _notes(self) -> dict[str, Any]:
        place = {**asdict(self.position), **self.parts.watcher.state()}
        found = {**plain({"place": place, "tally": self.tally.state()}), "history": self.history.state()}
        states = self.parts.callbacks.state()
        if any(state is not None for _, state in states):
            found["callbacks"] = states
        return {"fit": {**found, "watched": self._watched_how()}}

    def _watched_how(self) -> list[str]:
        """What decides the best epoch."""
        watcher = self.parts.watcher
        name = watcher.watch
        if self.parts.test is not None and not name.startswith("validation "):
            name = f"validation {name}"
        return [name, "higher" if watcher.is_higher_better else "lower"]

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
        position, watched = _place(notes)
        if position.batch and position.shape != shape:
            raise CheckpointError(
                f"{folder}",
                f"it was saved within an epoch, which cannot continue with other batches: {shape}",
                saved=position.shape,
                fix="pass the same data, batch_size, shuffle and accumulate",
            )
        self.graph.training.restore(folder)
        self.seed, _ = self.graph.stream
        self.position, self.history = position, History.from_state(notes["history"])
        self.position.shape, self.resumed = shape, True
        self._take_portion(position)
        same = notes.get("watched", self._watched_how()) == self._watched_how()
        self.parts.watcher.resume(watched if same else {"best": None, "waited": 0})  # it may belong to another number
        self.parts.callbacks.resume(notes.get("callbacks", ()))
        self.tally.resume(real(notes["tally"]))
        if self.parts.watcher.restore_best and same:
            self._keep_best(folder)

    def _take_portion(self, saved: Position) -> None:
        """Divides batches as before the stop, if that fits: other parts would round differently."""
        now = self.graph.portion
        if now is not None and saved.portion is not None:
            self.graph.portion = min(saved.portion, now)
        saved.portion = self.graph.portion

    def remark(self, remarks: Sequence[str]) -> None:
        """Puts remarks into the history and shows them."""
        for text in remarks:
            if text not in self.history.notes:
                self.history.notes.append(text)
            self.parts.screen.line(text)

    def _keep_best(self, folder: Path) -> None:
        """Lets early stopping keep the best epoch, which only its checkpoint has; then returns to the latest one."""
        if self.parts.watcher.best is None:
            return
        try:
            found = self.graph.training.restore(folder / BEST)
        except StepgraphError as error:
            self._warn("best", f"its best epoch cannot be restored: {error.where}: {error.problem}")
            return
        if found.notes.get("fit", {}).get("place", {}).get("epoch") == self.history.best_epoch:
            self.parts.watcher.keep(self.graph.training)
        else:
            self._warn("best", f"its best epoch cannot be restored: {folder / BEST} holds another one")
        self.graph.training.restore(folder)


def check_notes(folder: Path | None, metrics: Mapping[str, Any]) -> None:
    """Rejects, before anything changes, a latest checkpoint whose notes `fit` cannot continue from."""
    path = None if folder is None else latest(folder)
    if path is None:
        return
    with understood(path):
        notes = read_description(path)["notes"].get("fit")
        if notes is not None:  # otherwise another program saved it, which is reported when it is read
            (position, watched), history = _place(notes), History.from_state(notes["history"])
            Tally(metrics).resume(real(notes["tally"]))
            for name in ("origin", "epoch", "batch", "step"):
                of_kind(int, getattr(position, name))
            of_kind(int, watched["waited"])
            of_kind(int, history.every)
            for name, _ in notes.get("callbacks", ()):
                of_kind(str, name)
            for row in history.epochs:
                of_kind(int, row["epoch"])


def _place(notes: Mapping[str, Any]) -> tuple[Position, dict[str, Any]]:
    """The position in the notes of a checkpoint, and the state of early stopping, which is kept with it."""
    place = real(notes["place"])
    watched = {name: place.pop(name) for name in ("best", "waited")}
    return Position(**place), watched


@dataclass(frozen=True)
class _Unread:
    """The losses of one update, by batch and part, still on the device."""

    step: int
    rate: float
    losses: list[list[Measured]]


_NOT_METRICS = ("epoch", "step", "rate", "seconds", "waiting")
