"""A training loop: epochs over data, validation, schedules, accumulation, checkpoints, and a history.

It uses only what your own program could use: `execute`, the three phases, `learning_rate`, `save`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from stepgraph.checkpoint.files import as_path, check_keep, latest
from stepgraph.errors import ArgumentError
from stepgraph.fitting.callbacks import Callback, Callbacks, EarlyStopping, checked, watcher
from stepgraph.fitting.data import Source, source
from stepgraph.fitting.history import History
from stepgraph.fitting.loop import Loop, Parts, Settings, check_notes
from stepgraph.fitting.metrics import Metric, has_one_number
from stepgraph.fitting.portions import Portions, bytes_of
from stepgraph.fitting.progress import display
from stepgraph.fitting.ranks import require_alike
from stepgraph.fitting.schedule import Schedule
from stepgraph.fitting.schedule import checked as checked_schedule
from stepgraph.fitting.trained import Trained
from stepgraph.graphs.training import TrainingGraph
from stepgraph.report.record import CHECKPOINTS
from stepgraph.report.recorder import Recorder, Unrecorded
from stepgraph.system.interrupts import SIGTERM, end_as_terminated
from stepgraph.system.storage import require_writable

logger = logging.getLogger("stepgraph")
Metrics = str | Metric | Sequence[Any] | Mapping[str, Any]


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
    restore_best: bool = False,
    callbacks: Sequence[Callback] = (),
    on_nan: str = "stop",
    memory_limit: int | str | None = None,
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
        schedule: the learning rate of update n, from 0: any function of n, or a schedule such as `WarmupCosine`.
        metrics: names such as `"accuracy"` and `"f1"`, functions `(prediction, labels) → number`, or objects of
            torchmetrics: one, a list, or a dictionary by name. With several losses, `{"digits": ["accuracy"]}`
            belongs to the loss, or the output, named "digits"; others to the last loss.
        accumulate: batches whose gradients form one update. A mean loss is averaged over all their rows, or over all
            labels that count.
        watch: the number that determines the best epoch, by its name in the history; that of the validation data,
            if any.
        better: `"lower"`, `"higher"`, or `"auto"`: lower for a loss, higher for a metric that does not say otherwise.
        patience: stop after this many epochs without improvement; an epoch whose watched number is NaN never improves.
        restore_best: when the run ends, restore the parameters, their averages and the statistics of the best epoch.
            These four arguments make an `EarlyStopping`.
        callbacks: `Callback` objects, called in this order at the start, after steps, epochs and checkpoints, and at
            the end.
        on_nan: `"stop"` ends the run when the loss is NaN, `"continue"` does not.
        memory_limit: bytes, text such as `"4 GiB"`, or `"auto"` for what the device has free. Batches that need more
            run in as few parts as fit by the memory plan, and make one update as if they had run whole.
        run: a folder for everything about the run: the record, `report.html`, and the checkpoints.
        checkpoints: a folder without any for a series of the newest `keep` checkpoints, and the best epoch in `best`.
            With `run`, the default is the folder `checkpoints` in it.
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
    graph, world = Trained(training), training.world
    with training.telling_failures():
        others, given = checked(callbacks), graph.metrics(metrics)
        stopper = watcher(others, watch=watch, better=better, patience=patience, restore_best=restore_best)
        limit, folder = bytes_of(memory_limit), None if run is None else as_path("fit", run)
        if limit is not None and graph.shards:
            problem = "memory_limit divides batches, but a graph compiled with parallel divides them itself"
            raise ArgumentError("fit", problem, fix="leave memory_limit out, and use more shards")
        settings = Settings(
            epochs=_count("epochs", epochs, 0),
            accumulate=_count("accumulate", accumulate, 1),
            schedule=None if schedule is None else checked_schedule(schedule),
            folder=as_path("fit", checkpoints) if checkpoints is not None else folder and folder / CHECKPOINTS,
            keep=check_keep(keep) or 1,
            save_every=_optional_count("save_every", save_every, 1),
            prefetch=_optional_count("prefetch", prefetch, 0),
            stops_at_nan=_stops(on_nan),
        )
        if settings.folder is None and settings.save_every is not None:
            raise ArgumentError("fit", "save_every needs a folder to save to", fix="pass checkpoints=folder")
        train = source(training, data, _optional_count("batch_size", batch_size, 1), shuffle)
        test = None if validation is None else source(training, validation, batch_size, what="validation", strict=False)
        _require_repeating(epochs, train, test)
        _require_watched(stopper, graph.loss_names, given, test)
        training.meet("fit")
    with world.place.running(), world.telling_failures():  # ranks greet each other from here on
        require_alike(world, "arguments", {"metrics": list(given)}, fix="pass the same arguments on every rank")
        if given:
            training.keep_predictions()
        remarks = [] if limit is None else _limited(graph, train, test, limit, accumulate > 1)
        if folder is not None:
            graph.compile_for(train)  # a record begins with the step's memory plan
        first = world.is_first  # of the ranks that train together: it shows progress and writes files
        recorder = Recorder(training, folder, resume) if folder is not None and first else Unrecorded()
        screen = display(progress if first else "quiet", epochs, graph.device)
        parts = Parts(graph, train, test, given, stopper, Callbacks(others), screen, recorder)
        loop = Loop(parts, settings, {**train.division, "accumulate": accumulate})
        _prepare(loop, resume, remarks)
    _run(loop)
    return loop.history


def _prepare(loop: Loop, resume: bool, remarks: Sequence[str]) -> None:
    """Makes sure that the loop can run, from the latest checkpoint if it resumes."""
    folder, world = loop.settings.folder, loop.world
    require_alike(world, "arguments", loop.call, fix="pass the same arguments on every rank")
    if resume:
        check_notes(folder, loop.parts.metrics)
        loop.go_on()
        place = {"epoch": loop.position.epoch, "batch": loop.position.batch, "step": loop.position.step}
        require_alike(world, "checkpoints", place, fix="use a folder that all ranks can read")
    elif folder is not None and world.is_first and latest(folder) is not None:
        fix = "pass resume=True to continue from the latest, or another folder"
        raise ArgumentError("fit", f"there are already checkpoints in {folder}", fix=fix)
    if folder is not None and world.is_first:
        require_writable(folder)  # fail now, not after the first epoch
    loop.remark(remarks)


def _run(loop: Loop) -> None:
    """Runs the loop; a SIGTERM or SIGHUP that came meanwhile, to any rank, then ends the program."""
    stopping = loop.stopping
    try:
        with stopping.signals:
            loop.run()
    except Exception as error:
        ending = stopping.signals.ending
        if ending is None:
            raise
        logger.error("training failed after %s: %s", "SIGTERM" if ending == SIGTERM else "SIGHUP", error)
        end_as_terminated(ending)
        raise  # the program's own handler has returned
    if stopping.is_terminated or stopping.signals.ending is not None:
        end_as_terminated(stopping.signals.ending or SIGTERM)


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
    graph = Trained(training, "evaluate", learns=False)
    given = graph.metrics(metrics)
    batches = source(training, data, _optional_count("batch_size", batch_size, 1))
    tally = graph.evaluated(batches, given, _optional_count("prefetch", prefetch, 0))
    return tally.values()


# Checking arguments


def _count(name: str, given: Any, least: int) -> int:
    if isinstance(given, bool) or not isinstance(given, Integral) or given < least:
        raise ArgumentError("fit", f"{name} is {given!r}", fix=f"pass an integer ≥ {least}")
    return int(given)


def _optional_count(name: str, given: Any, least: int) -> int | None:
    return None if given is None else _count(name, given, least)


def _require_repeating(epochs: int, *sources: Source | None) -> None:
    for one in sources:
        if one is not None and epochs > 1 and not one.repeats:
            problem = f"the {one.reader.what} is an iterator, exhausted after one epoch of {epochs}"
            raise ArgumentError("fit", problem, fix="pass a list, or a function of the epoch that returns an iterator")


def _stops(on_nan: str) -> bool:
    if on_nan not in ("stop", "continue"):
        raise ArgumentError("fit", f"on_nan is {on_nan!r}", fix='use "stop" or "continue"')
    return on_nan == "stop"


def _require_watched(
    stopper: EarlyStopping, losses: Sequence[str], metrics: Mapping[str, Any], test: Source | None
) -> None:
    """Rejects a watched name that no epoch will have; names that only the first epoch knows are checked there."""
    stopper.decide(metrics, losses)
    shown = [*losses, *metrics]
    names = [*shown, *([] if test is None else [f"validation {name}" for name in shown]), "rate", "seconds", "waiting"]
    if all(map(has_one_number, metrics.values())) or stopper.watch in names:
        metric = metrics.get(stopper.watched(names).removeprefix("validation "))
        if getattr(metric, "adds_up", False):
            problem = f"watch is '{stopper.watch}', which is not a single number"
            raise ArgumentError("fit", problem, fix="watch the loss or another metric")


def _limited(graph: Trained, train: Source, test: Source | None, limit: int | str, accumulates: bool) -> list[str]:
    """Lets batches run in parts that fit, and returns what there is to say about it."""
    portions = Portions(graph, [train] if test is None else [train, test], limit, accumulates)
    graph.portion = portions.find()
    return [portions.remark(graph.portion)] if graph.portion < portions.largest else []
