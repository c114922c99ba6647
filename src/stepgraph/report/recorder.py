"""What `fit` calls to write a run folder while it trains.

With each update it compares two numbers; losses are written when `fit` reads them anyway. Looking into the step
(gradients, a profile) costs about one more step, and is done at few updates that lie further and further apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from stepgraph import draw
from stepgraph.data import Batch
from stepgraph.errors import StepgraphError, reason
from stepgraph.report import facts, page, structure
from stepgraph.report.distribution import distribution, short
from stepgraph.report.probe import Probe
from stepgraph.report.record import Record, check_new
from stepgraph.report.run import Run
from stepgraph.training import TrainingGraph

logger = logging.getLogger("stepgraph")
PAGE_SECONDS = 10.0  # the page is made again after an epoch if it is older than this


class Unrecorded:
    """Writes nothing: what a run without a folder calls."""

    next_look: int | None = None

    def begin(self, step: int, epoch: int, total: int | None, resumed: bool, settings: Mapping[str, Any]) -> None:
        """Training begins, or goes on."""

    def epoch_begins(self) -> None:
        """An epoch begins."""

    def look(self, step: int, batch: Batch) -> None:
        """Update `step`, from 1, is about to be made with this batch first; called where `next_look` asks for it."""

    def steps(self, losses: Sequence[tuple[int, float, float]], rows: int) -> None:
        """Updates `(step, loss, rate)` that were read, and the rows they have seen together."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """An epoch is over."""

    def end(self, step: int, stopped: str) -> None:
        """Training is over."""


class Recorder(Unrecorded):
    """Writes the record of a run, and its page."""

    def __init__(self, training: TrainingGraph, folder: Path, resume: bool) -> None:
        check_new(folder, resume)
        self.training, self.folder = training, folder
        self.probe, self.failed = Probe(training), set[str]()
        self.began = self.read_at = time.perf_counter()
        self.page_at = float("-inf")
        self.batch: Batch | None = None
        self.looks = 0

    def begin(self, step: int, epoch: int, total: int | None, resumed: bool, settings: Mapping[str, Any]) -> None:
        self.record = Record(self.folder)
        device = self.training._require_compiled("fit")
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
        self.read_back = Run(self.folder)
        self.next_look = step + 1
        self.read_at = time.perf_counter()

    def epoch_begins(self) -> None:
        self.read_at = time.perf_counter()

    def look(self, step: int, batch: Batch) -> None:
        began = time.perf_counter()
        self.batch, self.looks = batch, self.looks + 1
        self._write_distributions(step, batch)
        if self.looks == 2:  # the first steps warm caches up
            self._write_profile(step, "early")
        self.next_look = look_after(step)
        self.read_at += time.perf_counter() - began  # not the time of training

    def steps(self, losses: Sequence[tuple[int, float, float]], rows: int) -> None:
        if not losses:
            return
        now = time.perf_counter()
        rates = [rate for _, _, rate in losses]
        self.record.add(
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
        self.record.add("epoch", at=round(time.perf_counter() - self.began, 3), numbers=dict(row))
        if time.perf_counter() - self.page_at > PAGE_SECONDS:
            self._write_page()

    def end(self, step: int, stopped: str) -> None:
        try:
            if self.batch is not None and stopped != "failed":
                self._write_distributions(step + 1, self.batch)
                self._write_profile(step, "end")
            at = round(time.perf_counter() - self.began, 3)
            self.record.add("end", time=_now(), step=step, stopped=stopped, at=at)
            self._write_page()
        finally:
            self.record.close()

    def _write_page(self) -> None:
        self.read_back.update()
        page.write(self.folder / page.FILE, [self.read_back])
        self.page_at = time.perf_counter()

    # Looking into the step

    @torch.inference_mode()
    def _write_distributions(self, step: int, batch: Batch) -> None:
        """Parameters before update `step`, and the gradients of its first batch."""
        names = draw.parameter_names(self.training._compiled)
        trained = self.training._trainable()
        found = {names.get(t, t.label): distribution(t.torch()) for t in trained}
        gradients: dict[str, Any] = {}
        for tensor, array in self._tried("gradients", lambda: self.probe.gradients(batch), {}).items():
            gradients[names.get(tensor, tensor.label)] = distribution(array, by_magnitude=True)
        self.record.add("distributions", step=step, parameters=found, gradients=gradients)

    def _write_profile(self, step: int, when: str) -> None:
        batch = self.batch
        assert batch is not None
        found = self._tried("profile", lambda: self.probe.profile(batch), None)
        if found is not None:
            rows = [list(row) for row in found.rows]
            self.record.add("profile", step=step, when=when, rows_in_batch=batch.rows, rows=rows)

    def _tried(self, what: str, looking: Any, otherwise: Any) -> Any:
        """What looking found. Where it fails, for want of memory mostly, training goes on and the record says why."""
        if what in self.failed:
            return otherwise
        try:
            return looking()
        except (StepgraphError, RuntimeError) as error:
            self.failed.add(what)
            problem = f"{error.where}: {error.problem}" if isinstance(error, StepgraphError) else reason(error)
            self.record.add("missing", what=what, why=problem)
            logger.warning("the report will have no %s from here on: %s", what, problem)
            return otherwise


def look_after(step: int) -> int:
    """The next update to look into: ten later, and from update 20 on half as far again.

    Example:
        >>> [first := 1] and [first := look_after(first) for _ in range(7)]
        [11, 21, 31, 46, 69, 103, 154]
    """
    return max(step + 10, step * 3 // 2)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
