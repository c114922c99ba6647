"""Callbacks that write a run down for other programs: a CSV file, TensorBoard, Weights & Biases.

None of them ends a run: if one cannot write, it warns once, the history says so, and it tries again.
"""

from __future__ import annotations

import csv
import io
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from stepgraph.errors import ArgumentError, StateError, readable, reason
from stepgraph.fitting.callbacks import Callback, Moment
from stepgraph.fitting.history import History
from stepgraph.system.storage import as_path, storage

logger = logging.getLogger("stepgraph")


class Log(Callback, ABC):
    """The base of logs: numbers per epoch and, every `every` updates, loss and learning rate.

    Reading the loss of an update synchronizes with a GPU, so a log does it rarely. Of several ranks, the first one
    writes.
    """

    def __init__(self, every: int | None = None) -> None:
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ArgumentError(type(self).__name__, f"every is {every!r}", fix="pass an integer ≥ 1, or None")
        self.every, self.warned, self.writes = every, False, True

    @property
    def listens_to_steps(self) -> bool:
        return self.every is not None

    def begin(self, moment: Moment) -> None:
        """Opens what is written to; an error here is raised, since the training has not begun."""

    @abstractmethod
    def write(self, history: History, step: int, numbers: Mapping[str, float]) -> None:
        """Writes numbers of an update."""

    def finish(self, moment: Moment) -> None:
        """Closes it."""

    def start(self, moment: Moment) -> None:
        self.warned, self.writes = False, moment.graph.world.is_first
        if self.writes:
            self.begin(moment)

    def step(self, moment: Moment) -> None:
        if self.writes and self.every is not None and moment.step % self.every == 0:
            numbers = {"step loss": moment.loss, "step rate": moment.learning_rate}
            self._tried(moment, lambda: self.write(moment.history, moment.step, numbers))

    def epoch(self, moment: Moment) -> None:
        if not self.writes:
            return
        history = moment.history
        known = {name: one for name, one in history.epochs[-1].items() if not isinstance(one, list) and name != "step"}
        self._tried(moment, lambda: self.write(history, moment.step, known))

    def end(self, moment: Moment) -> None:
        if self.writes:
            self._tried(moment, lambda: self.finish(moment))

    def _tried(self, moment: Moment, writing: Callable[[], None]) -> None:
        try:
            writing()
        except Exception as error:  # of any library: a log that fails must not end hours of training
            if not self.warned:
                self.warned = True
                text = readable(f"{type(self).__name__} could not write: {reason(error)}")
                moment.history.notes.append(text)
                logger.warning("training continues, but %s", text)


class CSVLog(Log):
    """Writes one line per epoch to a CSV file, with the names of the history as its head.

    The file is replaced as a whole: it always has all epochs of the run, also those before a resume.

    Args:
        path: the file.

    Example:
        >>> fit(training, data, callbacks=[CSVLog("run.csv")])  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = as_path("CSVLog", path)

    def begin(self, moment: Moment) -> None:
        self.write(moment.history, moment.step, {})

    def write(self, history: History, step: int, numbers: Mapping[str, float]) -> None:
        """Writes a new file and puts it in place: a later epoch may have other names, and a disk may be full."""
        names = history.shown_names()
        text = io.StringIO()
        lines = csv.DictWriter(text, names, restval="", extrasaction="ignore", lineterminator="\n")
        lines.writeheader()
        lines.writerows(history.epochs)
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with storage(self.path, "written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                beside.write_text(text.getvalue(), encoding="utf-8")
                beside.replace(self.path)
            finally:
                beside.unlink(missing_ok=True)


class TensorBoard(Log):
    """Writes what TensorBoard shows: every number of an epoch, and loss and learning rate of some updates.

    Needs the package `tensorboard`: `pip install 'stepgraph[tensorboard]'`.

    Args:
        folder: the folder of the event files; a resumed run replaces what it repeats.
        every: also write each this many updates; None writes epochs only.

    Example:
        >>> fit(training, data, callbacks=[TensorBoard("runs/first")])  # doctest: +SKIP
    """

    def __init__(self, folder: str | os.PathLike[str], every: int | None = 50) -> None:
        super().__init__(every)
        self.folder: Path = as_path("TensorBoard", folder)
        self._writer_class = _needed("torch.utils.tensorboard", "TensorBoard", "tensorboard").SummaryWriter
        self._writer: Any = None

    def begin(self, moment: Moment) -> None:
        with storage(self.folder, "written"):
            self._writer = self._writer_class(str(self.folder), purge_step=moment.step + 1 if moment.resumed else None)

    def write(self, history: History, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, moment: Moment) -> None:
        self._writer.close()


class WeightsAndBiases(Log):
    """Sends the numbers to Weights & Biases. Needs the package `wandb`.

    Args:
        every: also send each this many updates; None sends epochs only.
        settings: passed to `wandb.init`, such as `project` and `name`.

    Example:
        >>> fit(training, data, callbacks=[WeightsAndBiases(project="digits")])  # doctest: +SKIP
    """

    def __init__(self, every: int | None = 50, **settings: Any) -> None:
        super().__init__(every)
        self.settings, self._run = settings, None
        self._wandb = _needed("wandb", "WeightsAndBiases", "wandb")

    def begin(self, moment: Moment) -> None:
        self._run = self._wandb.init(**{"resume": "allow" if moment.resumed else None, **self.settings})

    def write(self, history: History, step: int, numbers: Mapping[str, float]) -> None:
        assert self._run is not None
        self._run.log(dict(numbers), step=step)

    def finish(self, moment: Moment) -> None:
        assert self._run is not None
        self._run.finish(exit_code=1 if moment.stopped == "failed" else 0)


def _needed(module: str, name: str, package: str) -> Any:
    """A module that an optional package brings."""
    try:
        return import_module(module)
    except ImportError as error:
        problem = f"it needs {package}, which is not installed"
        raise StateError(name, problem, fix=f"pip install {package}") from error
