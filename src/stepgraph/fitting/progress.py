"""Progress displays of a training run: a bar on a terminal, lines in a log, or nothing.

Nobody may be there to read them: the reader of a pipe has ended, a terminal was closed, the disk of a log is full. That
does not end training.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from stepgraph.device import Device
from stepgraph.errors import ArgumentError, readable, reason
from stepgraph.fitting.history import shown

logger = logging.getLogger("stepgraph")
MODES = ("auto", "rich", "plain", "quiet")
BAR_SECONDS, LINE_SECONDS = 0.5, 10.0


class Quiet:
    """Shows nothing; the base of the other displays.

    Args:
        epochs: the number of epochs of the run.
        device: the device whose memory is shown.

    Attributes:
        problems: why something could not be shown.
    """

    pause = float("inf")

    def __init__(self, epochs: int, device: Device) -> None:
        self.epochs, self.device = epochs, device
        self.shown_at = self.began = time.perf_counter()
        self.first: int | None = None
        self.problems: list[str] = []

    def begin(self, step: int) -> None:
        """Starts or resumes a run at an update."""
        self.first, self.began = step, time.perf_counter()

    def step(self, epoch: int, step: int, total: int | None, numbers: Callable[[], Mapping[str, Any]]) -> None:
        """Shows the progress if enough time has passed since the last time."""
        if time.perf_counter() - self.shown_at >= self.pause:
            self.show(epoch, step, total, numbers())  # numbers that are read from a GPU now
            self.shown_at = time.perf_counter()

    def show(self, epoch: int, step: int, total: int | None, numbers: Mapping[str, Any]) -> None:
        """Shows the progress."""

    def line(self, text: str) -> None:
        """Prints a permanent line."""

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Reports the end of an epoch."""
        numbers = {name: value for name, value in row.items() if name not in ("epoch", "step", "seconds", "waiting")}
        self.line(
            f"epoch {row['epoch']:>{len(str(self.epochs))}}/{self.epochs}  {one_line(numbers)}  {row['seconds']:.1f} s"
        )

    def end(self) -> None:
        """Ends the run."""

    def left(self, step: int, total: int | None) -> str:
        """Time left, estimated from the updates of this run."""
        done = step - (self.first or 0)
        if not total or not done:
            return ""
        seconds = (time.perf_counter() - self.began) / done * max(total - step, 0)
        return f"{timedelta(seconds=round(seconds))} left"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lets training continue if its output cannot be written; says so once."""
        try:
            yield
        except (OSError, ValueError) as error:  # the second one if the program has closed the file
            if not self.problems:
                self.problems.append(f"its progress could not be shown: {reason(error)}")
                logger.warning("training continues, but %s", self.problems[0])


class Plain(Quiet):
    """Lines for logs."""

    pause = LINE_SECONDS

    def line(self, text: str) -> None:
        # Characters that the terminal cannot encode must not end training.
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a program without a terminal has no stdout
        with self.writing():
            print(readable(text).encode(encoding, "backslashreplace").decode(encoding), flush=True)

    def show(self, epoch: int, step: int, total: int | None, numbers: Mapping[str, Any]) -> None:
        of = "" if total is None else f"/{total}"
        parts = (f"epoch {epoch}/{self.epochs}", f"step {step}{of}", one_line(numbers), self.left(step, total))
        self.line("  ".join(part for part in (*parts, memory(self.device)) if part))


class _Terminal(Console):
    """A console that leaves it to us what a closed pipe means; rich would end the program."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - what rich is handling


class Bar(Quiet):
    """A moving bar, with one line per epoch above it."""

    pause = BAR_SECONDS

    def __init__(self, epochs: int, device: Device) -> None:
        super().__init__(epochs, device)
        # It is redrawn when there is something new, without a thread that takes time from the steps.
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeRemainingColumn(),
            TextColumn("{task.fields[memory]}"),
            console=_Terminal(),
            auto_refresh=False,
            transient=True,
            expand=True,
        )
        self.task = self.bar.add_task("", total=None, epoch=1, epochs=epochs, numbers="", memory="")

    def begin(self, step: int) -> None:
        super().begin(step)
        self.bar.update(self.task, completed=step)
        with self.writing():
            self.bar.start()

    def show(self, epoch: int, step: int, total: int | None, numbers: Mapping[str, Any]) -> None:
        fields: dict[str, Any] = {"epoch": epoch, "numbers": one_line(numbers), "memory": memory(self.device)}
        with self.writing():
            self.bar.update(self.task, completed=step, total=total, refresh=True, **fields)

    def line(self, text: str) -> None:
        with self.writing():
            self.bar.console.print(Text(readable(text)), highlight=False)

    def end(self) -> None:
        with self.writing():
            self.bar.stop()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with super().writing():
            try:
                yield
            except OSError:  # a terminal that is gone does not return, and rich would keep everything for it
                self.bar.console.quiet = True
                raise


def display(mode: str, epochs: int, device: Device) -> Quiet:
    """The display for a mode; `"auto"` is a bar on a terminal and lines elsewhere."""
    if mode not in MODES:
        raise ArgumentError("fit", f"progress is {mode!r}", fix=f"use one of {', '.join(MODES)}")
    if mode == "auto":
        mode = "rich" if Console().is_terminal else "plain"
    return {"rich": Bar, "plain": Plain, "quiet": Quiet}[mode](epochs, device)


def one_line(numbers: Mapping[str, Any]) -> str:
    """Numbers on one line; matrices appear only in the history."""
    parts = (f"{name} {shown(name, value)}" for name, value in numbers.items() if not isinstance(value, list))
    return readable("  ".join(parts))


def memory(device: Device) -> str:
    """Memory in use, as text."""
    used = memory_used(device)
    return "" if used is None else f"{used / 2**20:,.0f} MiB"


def memory_used(device: Device) -> int | None:
    """Bytes in use on the GPU, or the peak of this process; None where the system does not say."""
    kind = device.torch.type
    if kind == "cuda":
        return torch.cuda.memory_allocated(device.torch)
    if kind == "mps":
        return torch.mps.current_allocated_memory()
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
