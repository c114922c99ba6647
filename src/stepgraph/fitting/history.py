"""The result of a training run: numbers per epoch and per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.text import Text

from stepgraph import draw
from stepgraph.errors import UnknownNameError
from stepgraph.system.storage import plain, real

_TIMES = ("rate", "seconds", "waiting")


@dataclass
class History:
    """The numbers of a run.

    Args:
        epochs: for each epoch its `epoch` and `step` (both from 1), `loss`, each of several losses by name, metrics,
            the same for the validation data as `validation loss` and so on, the last learning `rate`, `seconds`, and
            `waiting`: the share of them in which the loop waited for data. A run that was resumed with other metrics
            has other names in later epochs.
        steps: `(step, loss, rate)` of updates. A long run keeps every second, then every fourth…, at most `most_steps`.
        every: how many updates each entry of `steps` represents.
        best_epoch: the epoch with the best watched number.
        stopped: why it ended: `"finished"`, `"no improvement"`, `"nan"`, `"interrupted"` by Ctrl-C, `"terminated"` by
            SIGTERM or SIGHUP, or what a callback said. Of several processes that trained together, the same in all.
        notes: what else there is to know: a loss that was not finite, batches that ran in parts, checkpoints or a
            report that could not be written, which of several processes has ended the run.
        ranks: for each of several processes that trained together its `rank`, the `seconds` of an update, the share of
            them spent `waiting` for the others, which is None on GPUs, and its `memory` in bytes: on a GPU, or the peak
            of the process.

    Example:
        >>> history = History([{"epoch": 1, "step": 10, "loss": 0.5, "rate": 0.1, "seconds": 1.0}])
        >>> history["loss"]
        [0.5]
    """

    epochs: list[dict[str, Any]] = field(default_factory=list)
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    every: int = 1
    best_epoch: int | None = None
    stopped: str = ""
    notes: list[str] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)

    most_steps: ClassVar[int] = 20_000

    def __getitem__(self, name: str) -> list[Any]:
        """One number per epoch; None for an epoch that does not have it."""
        known = self._names()
        if name not in known:
            raise UnknownNameError("History", f"there is no '{name}'", known=", ".join(known) or "none", fix="use one")
        return [row.get(name) for row in self.epochs]

    def _names(self) -> list[str]:
        """The names in any epoch; times come last, as in each epoch."""
        found = dict.fromkeys(name for row in self.epochs for name in row)
        return [name for name in found if name not in _TIMES] + [name for name in _TIMES if name in found]

    def shown_names(self) -> list[str]:
        """The names that are a single number in every epoch."""
        return [name for name in self._names() if not any(isinstance(row.get(name), list) for row in self.epochs)]

    @property
    def losses(self) -> list[float]:
        """The loss of each recorded update."""
        return [loss for _, loss, _ in self.steps]

    def add_step(self, step: int, loss: float, rate: float) -> None:
        """Records an update."""
        if step % self.every == 0:
            self.steps.append((step, loss, rate))
        if len(self.steps) > self.most_steps:
            self.every *= 2
            self.steps = [one for one in self.steps if one[0] % self.every == 0]

    def state(self) -> dict[str, Any]:
        """The whole history as JSON values; numbers that JSON lacks become text."""
        steps = [[step, plain(loss), plain(rate)] for step, loss, rate in self.steps]
        found = {"epochs": plain(self.epochs), "steps": steps, "every": self.every, "best_epoch": self.best_epoch}
        return {**found, "notes": list(self.notes)} if self.notes else found

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> History:
        """The history that `state` was created from."""
        steps = [(step, float(loss), float(rate)) for step, loss, rate in state["steps"]]
        notes = [str(one) for one in state.get("notes", ())]
        return cls(real(state["epochs"]), steps, state["every"], state["best_epoch"], notes=notes)

    def __rich__(self) -> RenderableType:
        table = draw.Listing(show_edge=False, pad_edge=False, caption=self.stopped or None, caption_justify="left")
        names = self.shown_names()
        for name in names:
            table.add_column(name, justify="right")
        for row in self.epochs:
            best = self.best_epoch == row["epoch"]
            table.add_row(*(shown(name, row.get(name)) for name in names), style="bold" if best else None)
        notes = [Text(line) for line in self._remarks()]
        return Group(table, *notes) if notes else table

    def _remarks(self) -> list[str]:
        """Notes, and a line per rank."""
        return [*self.notes, *map(_rank, self.ranks)]

    def _repr_html_(self) -> str:
        names = self.shown_names()
        lines = [[shown(name, row.get(name)) for name in names] for row in self.epochs]
        best = next((i for i, row in enumerate(self.epochs) if row["epoch"] == self.best_epoch), None)
        ended = "".join(f"<p>{escape(line)}</p>" for line in (self.stopped, *self._remarks()) if line)
        return draw.styled(f"<div>{draw.html_table(names, lines, best=best)}{ended}</div>")

    def __str__(self) -> str:
        return draw.text(self.__rich__(), width=160)


def _rank(one: Mapping[str, Any]) -> str:
    times = f"{one['seconds'] * 1000:.1f} ms per update"
    if one["waiting"] is not None:
        times += f", {one['waiting']:.0%} of it waiting for other ranks"
    return f"rank {one['rank']}: {times}, {draw.size(one['memory'])}"


def shown(name: str, value: Any) -> str:
    """A number in readable form; empty if there is none."""
    if value is None:
        return ""
    if isinstance(value, int):
        return str(value)
    if name == "waiting":
        return f"{value:.0%}"
    return f"{value:.2f}" if name == "seconds" else f"{value:.4g}" if name == "rate" else f"{value:.4f}"
