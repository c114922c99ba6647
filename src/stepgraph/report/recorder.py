"""Writes a run folder while `fit` trains.

Per update it only compares two numbers; losses are written when `fit` reads them anyway. Parameters are observed
before a few updates, at growing intervals. Gradients and profiles cost about one extra step each: gradients are
recorded at least twice and a profile once, and more often if the budget allows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from stepgraph import draw
from stepgraph.errors import RunError, StepgraphError, StorageError, readable, reason
from stepgraph.graphs.training import TrainingGraph
from stepgraph.report import facts, page, structure
from stepgraph.report.budget import Budget
from stepgraph.report.distribution import distribution, short
from stepgraph.report.probe import Batch, Probe
from stepgraph.report.record import Record, check_new
from stepgraph.report.run import Run

logger = logging.getLogger("stepgraph")
PAGE_SECONDS = 10.0  # the page is rewritten after an epoch if it is older than this
ALWAYS = 2  # gradients recorded whatever they cost
QUICK = 0.01  # seconds per gradient pass up to which a profile is the best of three runs


class Unrecorded:
    """Writes nothing: used by a run without a folder."""

    next_look: int | None = None
    problems: Sequence[str] = ()  # what the report lacks, and why

    def begin(self, step: int, epoch: int, total: int | None, resumed: bool, settings: Mapping[str, Any]) -> None:
        """Training starts or resumes."""

    def epoch_begins(self) -> None:
        """An epoch begins."""

    def look(self, step: int, batch: Batch) -> None:
        """Update `step`, from 1, is about to start with this batch; called when `next_look` is reached."""

    def steps(self, losses: Sequence[tuple[int, float, float]], rows: int) -> None:
        """Updates `(step, loss, rate)` that were read, and the total rows they have seen."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch has ended."""

    def ranks(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """What each of several ranks has done up to an update."""

    def end(self, step: int, stopped: str, who: str | None = None) -> None:
        """Training has ended; `who` says which of several ranks have stopped it."""


class Recorder(Unrecorded):
    """Writes the record of a run, and its page."""

    def __init__(self, training: TrainingGraph, folder: Path, resume: bool) -> None:
        check_new(folder, resume)
        self.training, self.folder = training, folder
        self.probe, self.failed, self.warned = Probe(training), set[str](), set[str]()
        self.problems: list[str] = []
        self.unsaid: str | None = None  # why the last lines are missing from the record
        self.began = self.read_at = time.perf_counter()
        self.page_at = self.began
        self.batch: Batch | None = None
        self.looks = self.profiles = 0
        self.gradient_seconds = self.page_seconds = 0.0  # the durations of the last ones

    def begin(self, step: int, epoch: int, total: int | None, resumed: bool, settings: Mapping[str, Any]) -> None:
        self.budget = Budget()
        self.record = Record(self.folder)
        try:
            with self.budget.spending():
                self._write_beginning(step, epoch, total, resumed, settings)
                self.read_back = Run(self.folder)
        except BaseException:
            self.record.close()
            raise
        self.next_look = step + 1
        self.read_at = time.perf_counter()

    def _write_beginning(
        self, step: int, epoch: int, total: int | None, resumed: bool, settings: Mapping[str, Any]
    ) -> None:
        device = self.training.require_session("fit").device
        self.record.add(
            "begin",
            time=_now(),
            step=step,
            epoch=epoch,
            total=total,
            resumed=resumed,
            command=facts.command(self.folder),
            environment=facts.environment(device),
            settings=facts.settings(settings),
        )
        self.record.add("graph", **structure.graph(self.training))
        self.record.add("memory", **structure.plan(self.training))

    def epoch_begins(self) -> None:
        self.read_at = time.perf_counter()

    def look(self, step: int, batch: Batch) -> None:
        self._wait()  # for pending updates: their time does not count as observation
        spent = self.budget.spent
        self.batch = batch
        self._write_distributions(step, batch)
        if self.looks == 2:  # the first steps warm up caches
            self._write_profile(step, "early")
        self.next_look = look_after(step)
        self.read_at += self.budget.spent - spent  # excluded from the training time

    def steps(self, losses: Sequence[tuple[int, float, float]], rows: int) -> None:
        if not losses:
            return
        now = time.perf_counter()
        rates = [rate for _, _, rate in losses]
        self._add(
            "steps",
            first=losses[0][0],
            loss=[short(loss) for _, loss, _ in losses],
            rate=rates[0] if len(set(rates)) == 1 else rates,
            rows=rows,
            seconds=round(now - self.read_at, 6),
            at=round(now - self.began, 3),
        )
        self.read_at = now

    def epoch(self, row: Mapping[str, Any]) -> None:
        self._add("epoch", at=round(time.perf_counter() - self.began, 3), numbers=dict(row))
        old = time.perf_counter() - self.page_at > PAGE_SECONDS
        if self.page_seconds == 0 or (old and self.budget.has_room(self.page_seconds)):
            self._write_page()

    def ranks(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if rows:
            self._add("ranks", step=step, ranks=[{**row, "seconds": short(row["seconds"])} for row in rows])

    def end(self, step: int, stopped: str, who: str | None = None) -> None:
        try:
            if self.batch is not None and stopped != "failed":
                self._wait()
                self._write_distributions(step + 1, self.batch)
                if not self.profiles or self.budget.has_room(self.gradient_seconds):
                    self._write_profile(step, "end")
            at, looking = (round(one, 3) for one in (time.perf_counter() - self.began, self.budget.spent))
            more = {} if who is None else {"who": who}
            self._add("end", time=_now(), step=step, stopped=stopped, at=at, looking=looking, **more)
            self._write_page()
        finally:
            self.record.close()

    def _write_page(self) -> None:
        spent = self.budget.spent
        with self.budget.spending(), self._optional("page"):
            self.read_back.update()
            page.write(self.folder / page.FILE, [self.read_back])
        self.page_at, self.page_seconds = time.perf_counter(), self.budget.spent - spent

    # Observing the step

    @torch.inference_mode()
    def _write_distributions(self, step: int, batch: Batch) -> None:
        """Parameters before update `step`, and the gradients of its first batch if there is time."""
        self.looks += 1
        compiled = self.training.require_session("fit").compilation
        names = draw.parameter_names(compiled.nodes)
        with self.budget.spending():
            found = {names.get(t, t.label): distribution(t.array()) for t in compiled.trainable}
        gradients: dict[str, Any] = {}
        if self.looks <= ALWAYS or self.budget.has_room(self.gradient_seconds):
            spent = self.budget.spent
            with self.budget.spending():
                for tensor, array in self._tried("gradients", lambda: self.probe.gradients(batch), {}).items():
                    gradients[names.get(tensor, tensor.label)] = distribution(array, by_magnitude=True)
            self.gradient_seconds = self.budget.spent - spent
        self._add("distributions", step=step, parameters=found, gradients=gradients)

    def _write_profile(self, step: int, when: str) -> None:
        batch, runs = self.batch, 3 if self.gradient_seconds <= QUICK else 1
        assert batch is not None
        with self.budget.spending():
            found = self._tried("profile", lambda: self.probe.profile(batch, runs), None)
        if found is not None:
            self.profiles += 1
            rows = [list(row) for row in found.rows]
            self._add("profile", step=step, when=when, rows_in_batch=batch.rows, runs=runs, rows=rows)

    def _wait(self) -> None:
        device = self.training.require_session("fit").device.torch
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    def _tried(self, what: str, looking: Any, otherwise: Any) -> Any:
        """The result of an observation. If it fails, training continues and the record says why."""
        if what in self.failed:
            return otherwise
        try:
            return looking()
        except (StepgraphError, RuntimeError) as error:
            self.failed.add(what)
            problem = f"{error.where}: {error.problem}" if isinstance(error, StepgraphError) else reason(error)
            self._add("missing", what=what, why=problem)
            self._warn(f"the report will have no {what} from now on: {problem}")
            return otherwise

    # A full disk affects the report, never the training

    def _add(self, kind: str, **fields: Any) -> None:
        """Appends a line; a failed write is noted in the record as soon as there is space again."""
        with self._optional("record"):
            if self.unsaid is not None:
                self.record.add("missing", what="lines of the record", why=self.unsaid)
                self.unsaid = None
            self.record.add(kind, **fields)

    @contextmanager
    def _optional(self, what: str) -> Iterator[None]:
        """Lets training continue if the file system, or someone who changes the folder, causes an error."""
        try:
            yield
        except (StorageError, RunError) as error:
            if what == "record":
                self.unsaid = error.problem
            if what not in self.warned:
                self.warned.add(what)
                message = f"the {what} of its report could not be written: {error.where}: {error.problem}"
                self._warn(f"training continues, but {message}")

    def _warn(self, message: str) -> None:
        self.problems.append(readable(message))
        logger.warning("%s", readable(message))


def look_after(step: int) -> int:
    """The next update to observe: ten later, and from update 20 on half as far again.

    Example:
        >>> [first := 1] and [first := look_after(first) for _ in range(7)]
        [11, 21, 31, 46, 69, 103, 154]
    """
    return max(step + 10, step * 3 // 2)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
