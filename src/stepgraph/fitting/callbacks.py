"""Callbacks: what a program of your own does at five moments of a run, and early stopping, which is one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from stepgraph.errors import ArgumentError, DataTypeError, UnknownNameError
from stepgraph.fitting.history import History
from stepgraph.graphs.training import TrainingGraph
from stepgraph.runtime.state import TrainingState
from stepgraph.tensors import writes
from stepgraph.tensors.tensor import Tensor

NO_IMPROVEMENT = "no improvement"
UNFINISHED = ("interrupted", "terminated", "failed")  # ends of a run that somebody will continue or repair


@dataclass(frozen=True)
class Moment:
    """What is going on when a callback is called; valid until it returns.

    `loss`, `metrics` and `history` are read when they are asked for, which synchronizes with a GPU.

    Args:
        graph: the training graph; you may assign its optimizer's hyperparameters.
        epoch: the current epoch, from 1; at the end, the last one.
        epochs: the number of epochs of the run.
        step: the updates made so far, including those before a resume.
        steps: the updates of the whole run; None if the data has no length.
        learning_rate: that of the last update.
        resumed: whether the run continues from a checkpoint.
        path: the checkpoint that was just written.
        stopped: at the end, why the run ended, as in `History.stopped`; `"failed"` after an exception.
    """

    graph: TrainingGraph
    epoch: int
    epochs: int
    step: int
    steps: int | None
    learning_rate: float
    resumed: bool = False
    path: Path | None = None
    stopped: str = ""
    read: Callable[[], tuple[History, Mapping[str, Any]]] = field(default=lambda: (History(), {}), repr=False)
    ask_to_stop: Callable[[str], None] = field(default=lambda reason: None, repr=False)

    @property
    def history(self) -> History:
        """Everything so far."""
        return self.read()[0]

    @property
    def loss(self) -> float:
        """The loss of the last update; after an epoch, its mean over the rows."""
        return float(self.read()[1]["loss"])

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the epoch so far by name; after an epoch, also the numbers of the validation data."""
        return {name: value for name, value in self.read()[1].items() if name != "loss"}

    def stop(self, reason: str = "stopped by a callback") -> None:
        """Ends the run after this moment, with a checkpoint if there is a folder; `History.stopped` is the reason."""
        self.ask_to_stop(str(reason))


class Callback:
    """The base of callbacks; override the methods you need.

    All callbacks of a run are called in their order, also if one asks to stop. An exception in one ends the run, which
    is raised by `fit` after the others were told the `end`; the latest checkpoint stays as it was, so that a resumed
    run repeats what came after it.

    Example:
        >>> class Patient(Callback):
        ...     def epoch(self, moment):
        ...         if moment.loss < 0.1:
        ...             moment.stop("good enough")
    """

    @property
    def listens_to_steps(self) -> bool:
        """Whether `step` has something to do in this run; a run in which nobody listens does not call it."""
        return type(self).step is not Callback.step

    def start(self, moment: Moment) -> None:
        """Training starts or resumes; `moment.step` is 0 or where it resumes."""

    def step(self, moment: Moment) -> None:
        """An update was made. Without a callback that overrides this, a step costs nothing more."""

    def epoch(self, moment: Moment) -> None:
        """An epoch has ended, with its validation; its checkpoint comes next."""

    def checkpoint(self, moment: Moment) -> None:
        """A checkpoint was written to `moment.path`."""

    def end(self, moment: Moment) -> None:
        """Training has ended, for whatever reason: `moment.stopped`. Called once for each `start`."""

    def state(self) -> Any:
        """What checkpoints keep of this callback, as JSON values; None for nothing."""
        return None

    def resume(self, state: Any) -> None:
        """Continues from what `state` returned; called before `start`."""


class Callbacks:
    """Callbacks as one.

    Attributes:
        listen_to_steps: whether anyone wants to be told about steps.
    """

    def __init__(self, members: Sequence[Callback]) -> None:
        self.members = members
        self.listen_to_steps = any(one.listens_to_steps for one in members)
        self._started: list[Callback] = []

    def start(self, moment: Moment) -> None:
        """Tells all; those that were told are told the end, too."""
        for one in self.members:
            self._started.append(one)
            one.start(moment)

    def step(self, moment: Moment) -> None:
        """Tells all."""
        for one in self.members:
            one.step(moment)

    def epoch(self, moment: Moment) -> None:
        """Tells all."""
        for one in self.members:
            one.epoch(moment)

    def checkpoint(self, moment: Moment) -> None:
        """Tells all."""
        for one in self.members:
            one.checkpoint(moment)

    def end(self, moment: Moment) -> None:
        """Tells all that were told the start, even if one of them fails; then raises its error."""
        failed: list[BaseException] = []
        for one in self._started:
            try:
                one.end(moment)
            except BaseException as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def state(self) -> list[Any]:
        """The state of each, with the name of its class."""
        return [[type(one).__name__, one.state()] for one in self.members]

    def resume(self, states: Sequence[Any]) -> None:
        """Gives each the state of the next saved callback of its class."""
        waiting = list(states)
        for one in self.members:
            found = next((kept for kept in waiting if kept[0] == type(one).__name__), None)
            if found is not None:
                waiting.remove(found)
                if found[1] is not None:
                    one.resume(found[1])


class EarlyStopping(Callback):
    """Finds the best epoch, ends a run that no longer improves, and may give back the best parameters.

    `fit(…, watch=, better=, patience=, restore_best=)` makes one; pass your own instead of these, not besides. A NaN
    is never an improvement.

    Args:
        patience: stop after this many epochs without improvement; None never stops.
        watch: the number that decides, by its name in the history; that of the validation data, if there is one.
        better: `"lower"`, `"higher"`, or `"auto"`: higher for a metric, lower for losses, rates and times.
        restore_best: at the end of the run, restore the parameters, their averages and the statistics of the best
            epoch. A run that was interrupted keeps its last ones, to continue.

    Example:
        >>> EarlyStopping(patience=3, watch="accuracy", restore_best=True).is_higher_better
        True
    """

    def __init__(
        self, patience: int | None = 3, watch: str = "loss", better: str = "auto", restore_best: bool = False
    ) -> None:
        if patience is not None and (isinstance(patience, bool) or not isinstance(patience, Integral) or patience < 1):
            raise ArgumentError("fit", f"patience is {patience!r}", fix="pass an integer ≥ 1")
        if better not in ("auto", "lower", "higher"):
            raise ArgumentError("fit", f"better is {better!r}", fix='use "auto", "lower" or "higher"')
        if not isinstance(restore_best, bool):
            raise DataTypeError("fit", f"restore_best is {restore_best!r}", fix="pass True or False")
        self.patience, self.watch, self.better, self.restore_best = patience, watch, better, restore_best
        self.best: float | None = None
        self.waited = 0  # epochs since the best
        self.is_best = False  # the last epoch
        self._kept: dict[tuple[Tensor, bool], torch.Tensor] | None = None

        self.is_higher_better = better == "higher" or (better == "auto" and not self._is_loss())

    def _is_loss(self) -> bool:
        return self.watch.removeprefix("validation ").split()[-1:] in (["loss"], ["rate"], ["seconds"], ["waiting"])

    def decide(self, metrics: Mapping[str, Any], losses: Sequence[str]) -> None:
        """Asks the watched metric whether higher is better, if it can say, as those of torchmetrics do."""
        name = self.watch.removeprefix("validation ")
        if self.better == "auto" and name in losses:
            self.is_higher_better = False
        metric = metrics.get(name)
        says = getattr(metric, "higher_is_better", None)
        if self.better == "auto" and says is not None:
            self.is_higher_better = bool(says)

    @property
    def gave_up(self) -> bool:
        """Whether it has waited long enough."""
        return self.patience is not None and self.waited >= self.patience

    def watched(self, names: Mapping[str, Any] | Sequence[str]) -> str:
        """The watched name among the names of a history."""
        validated = f"validation {self.watch}"
        found = validated if validated in names else self.watch
        if found not in names:
            raise UnknownNameError("fit", f"watch is {self.watch!r}", known=", ".join(names), fix="use one")
        return found

    def start(self, moment: Moment) -> None:
        if not moment.resumed:
            self.best, self.waited, self._kept = None, 0, None

    def epoch(self, moment: Moment) -> None:
        row = moment.history.epochs[-1]
        self.judge(row[self.watched(row)])
        if self.is_best and self.restore_best:
            self.keep(moment.graph)
        if self.gave_up:
            moment.stop(NO_IMPROVEMENT)

    def judge(self, value: Any) -> None:
        """Compares the number of an epoch with the best one. NaN never wins, nor an infinity of the wrong sign."""
        if isinstance(value, list):
            problem = f"watch is '{self.watch}', which is not a single number"
            raise ArgumentError("fit", problem, fix="watch the loss or another metric")
        worst = -inf if self.is_higher_better else inf
        best = worst if self.best is None or isnan(self.best) else self.best
        self.is_best = value > best if self.is_higher_better else value < best
        if self.is_best:
            self.best, self.waited = value, 0
        else:
            self.waited += 1

    def keep(self, graph: TrainingGraph) -> None:
        """Copies the current parameters, averages and statistics to the host."""
        self._kept = {key: array.to("cpu", copy=True) for key, array in _learned(graph).items()}

    def end(self, moment: Moment) -> None:
        if self.restore_best and self._kept is not None and moment.stopped not in UNFINISHED:
            with torch.inference_mode():
                for key, array in _learned(moment.graph).items():
                    if key in self._kept:
                        array.copy_(self._kept[key])
                writes.note()
                for state in _states(moment.graph):
                    state.note_averages()
                for tensor, _ in self._kept:
                    tensor.synchronize_data()
        self._kept = None

    def state(self) -> Any:
        return {"best": self.best, "waited": self.waited}

    def resume(self, state: Any) -> None:
        self.best, self.waited = state["best"], state["waited"]


def _learned(graph: TrainingGraph) -> dict[tuple[Tensor, bool], torch.Tensor]:
    """The arrays in use of a graph and those linked with it: parameters and statistics, and averages (True)."""
    sessions = [one.require_session("fit") for one in graph.linked]
    found = {(tensor, False): tensor.array() for session in sessions for tensor in session.compilation.held}
    averages = ((tensor, array) for state in _states(graph) for tensor, array in state.own_averages.items())
    return found | {(tensor, True): array for tensor, array in averages}


def _states(graph: TrainingGraph) -> list[TrainingState]:
    sessions = [one.require_session("fit") for one in graph.linked]
    return [session.state for session in sessions if session.state is not None]


def checked(callbacks: Any) -> list[Callback]:
    """Callbacks as a list, if they are some."""
    if isinstance(callbacks, Callback):
        callbacks = [callbacks]
    if not isinstance(callbacks, Sequence):
        raise DataTypeError("fit", f"callbacks is {type(callbacks).__name__}", fix="pass a list of callbacks")
    for one in callbacks:
        if not isinstance(one, Callback):
            problem = f"{one!r} in callbacks is not a Callback"
            raise DataTypeError("fit", problem, fix="pass an instance of a subclass of sg.Callback")
    return list(callbacks)


def watcher(callbacks: list[Callback], **given: Any) -> EarlyStopping:
    """The early stopping of a run, taken out of its callbacks or made from the arguments of `fit`.

    Args:
        callbacks: those of the run.
        given: `watch`, `better`, `patience`, `restore_best`.
    """
    own = [one for one in callbacks if isinstance(one, EarlyStopping)]
    unsaid = {"watch": "loss", "better": "auto", "patience": None, "restore_best": False}
    if len(own) > 1:
        raise ArgumentError("fit", f"callbacks has {len(own)} EarlyStopping", fix="pass one")
    if not own:
        return EarlyStopping(**given)
    if said := [name for name in given if given[name] != unsaid[name]]:
        raise ArgumentError("fit", f"{said[0]}= was passed besides EarlyStopping", fix="pass it to EarlyStopping")
    callbacks.remove(own[0])
    return own[0]
