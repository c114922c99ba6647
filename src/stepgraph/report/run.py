"""A run read back from its folder, even while it is being written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepgraph.errors import RunError, StorageError, reason
from stepgraph.report.record import FILE, LARGEST, check_header
from stepgraph.system.storage import open_regular, storage, whole

BELOW = 6  # runs listed in an error


class Run:
    """The current contents of a run's record. Raises if the folder holds none, or one that cannot be read.

    Args:
        folder: the folder passed to `fit(run=…)`.

    Attributes:
        begins: one entry for each time training started or resumed, with command and environment.
        steps: `(step, loss, rate)` of every update that counts: updates that a killed run made after its last
            checkpoint and a resumed one repeated appear once.
        speeds: `(last step, rows, seconds)` of each time losses were read.
        ranks: for each of several processes its step time, the share of waiting, and memory, as recorded last.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with storage(folder, "read"):
            if not folder.is_dir():
                raise StorageError(f"{folder}", "there is no such folder", fix="pass the folder of a run")
            if not (folder / FILE).exists():
                raise _no_run(folder)
        self._clear()
        self.update()
        if not self.begins:
            raise RunError(f"{folder}", f"{FILE} ends before training began", fix="use another run")

    def _clear(self) -> None:
        self._offset = self._line = 0
        self.begins: list[dict[str, Any]] = []
        self.graph: dict[str, Any] = {}
        self.memory: dict[str, Any] = {}
        self.steps: list[tuple[int, float, float]] = []
        self.speeds: list[tuple[int, int, float]] = []
        self.epochs: list[dict[str, Any]] = []
        self.ranks: list[dict[str, Any]] = []
        self.distributions: list[dict[str, Any]] = []
        self.profiles: list[dict[str, Any]] = []
        self.missing: list[dict[str, Any]] = []
        self.end: dict[str, Any] | None = None

    @property
    def status(self) -> str:
        """`"running"` until an end is recorded (a killed run never has one), else why it ended."""
        return "running" if self.end is None else str(self.end["stopped"])

    @property
    def size(self) -> int:
        """Bytes of the record that have been read."""
        return self._offset

    def update(self) -> bool:
        """Reads what was appended since the last time; returns whether there was anything."""
        path = self.folder / FILE
        with storage(self.folder, "read"), open_regular(path, RunError) as file:
            size = file.seek(0, 2)
            if size > LARGEST:
                problem = f"{FILE} has {size:,} bytes, more than the maximum of {LARGEST:,}"
                raise RunError(f"{self.folder}", problem, fix="use another run")
            if size < self._offset:  # another run has replaced it
                self._clear()
            file.seek(self._offset)
            appended = whole(file, size - self._offset, self.folder, RunError)
        complete = appended[: appended.rfind(b"\n") + 1]  # the last line may be incomplete
        for line in complete.splitlines():
            self._line += 1
            self._take(line)
        self._offset += len(complete)
        return bool(complete)

    def _take(self, line: bytes) -> None:
        if self._line == 1:
            check_header(self.folder, line)
            return
        try:
            entry = json.loads(line)
            take = _TAKERS.get(entry.pop("kind"))  # kinds unknown to this version are ignored
            if take is not None:
                take(self, entry)
        except Exception as error:  # a line may contain anything
            raise RunError(
                f"{self.folder}",
                f"line {self._line} of {FILE} is damaged: {type(error).__name__}: {reason(error)}",
                fix=f"remove the line from {FILE}, or use another run",
            ) from None

    def take_begin(self, entry: dict[str, Any]) -> None:
        """Drops what was done after the checkpoint that a run resumes from, since it will be repeated."""
        step, epoch = entry["step"], entry["epoch"]
        self.begins.append(entry)
        self.steps = [one for one in self.steps if one[0] <= step]
        self.speeds = [one for one in self.speeds if one[0] <= step]
        self.epochs = [one for one in self.epochs if one["epoch"] <= epoch]
        self.distributions = [one for one in self.distributions if one["step"] <= step]
        self.profiles = [one for one in self.profiles if one["step"] <= step]
        self.ranks, self.end = [], None

    def take_steps(self, entry: dict[str, Any]) -> None:
        losses, rates = entry["loss"], entry["rate"]
        rates = rates if isinstance(rates, list) else [rates] * len(losses)
        for place, (loss, rate) in enumerate(zip(losses, rates, strict=True)):
            self.steps.append((entry["first"] + place, float(loss), float(rate)))
        self.speeds.append((entry["first"] + len(losses) - 1, entry["rows"], entry["seconds"]))

    def take_epoch(self, entry: dict[str, Any]) -> None:
        self.epochs.append({name: _number(value) for name, value in entry["numbers"].items()})

    def take_end(self, entry: dict[str, Any]) -> None:
        self.end = {"step": entry["step"], "stopped": entry["stopped"], **entry}

    def take_distributions(self, entry: dict[str, Any]) -> None:
        known = [one for one in self.distributions if one["step"] < entry["step"]]
        self.distributions = [*known, {"parameters": {}, "gradients": {}, **entry}]

    def take_profile(self, entry: dict[str, Any]) -> None:
        self.profiles.append({"step": entry["step"], "when": entry["when"], "rows": entry["rows"], **entry})


def _no_run(folder: Path) -> RunError:
    """Names runs one or two folders below, if there are any."""
    with storage(folder, "read"):
        below = sorted({f"{path.parent}" for depth in ("*", "*/*") for path in folder.glob(f"{depth}/{FILE}")})
    problem = f"it holds no run: there is no {FILE}"
    if not below:
        return RunError(f"{folder}", problem, fix="pass a folder that fit(run=…) wrote")
    shown = ", ".join(below[:BELOW]) + (f" and {len(below) - BELOW} more" if len(below) > BELOW else "")
    return RunError(f"{folder}", problem, below_it=shown, fix="pass one of those below it")


def _number(value: Any) -> Any:
    """NaN and infinities are stored as text."""
    return float(value) if isinstance(value, str) else value


_TAKERS: dict[str, Callable[[Run, dict[str, Any]], None]] = {
    "begin": Run.take_begin,
    "graph": lambda run, entry: setattr(run, "graph", entry),
    "memory": lambda run, entry: setattr(run, "memory", entry),
    "steps": Run.take_steps,
    "epoch": Run.take_epoch,
    "ranks": lambda run, entry: setattr(run, "ranks", list(entry["ranks"])),
    "distributions": Run.take_distributions,
    "profile": Run.take_profile,
    "missing": lambda run, entry: run.missing.append(entry),
    "end": Run.take_end,
}
