"""The learning-rate finder: the loss over learning rates that grow from update to update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise
from typing import Any

import torch

from stepgraph.errors import ArgumentError
from stepgraph.fitting.data import Batch, Source, source
from stepgraph.fitting.trained import Trained
from stepgraph.graphs.training import TrainingGraph
from stepgraph.runtime.state import Progress

SMOOTHING = 0.9  # of the running mean of losses
DIVERGED = 4.0  # times the best loss: larger rates only make it worse


@dataclass(frozen=True)
class LearningRates:
    """The result of `find_learning_rate`.

    Args:
        rates: the learning rates, rising.
        losses: the loss of the update with each of them, before it.
        suggested: the rate at which the smoothed loss falls fastest, a good peak of a schedule; None if it never falls.
    """

    rates: list[float]
    losses: list[float]
    suggested: float | None


def find_learning_rate(
    training: TrainingGraph,
    data: Any,
    *,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
    batch_size: int | None = None,
    shuffle: bool = True,
) -> LearningRates:
    """Trains a few updates with exponentially growing learning rates, and puts the graph back as it was.

    Parameters, statistics, optimizer, learning rate and random numbers are those from before, also if it fails. It
    ends early when the loss diverges.

    Args:
        training: a compiled training graph with a loss and an optimizer.
        data: as in `fit`; repeated if it has fewer batches than `steps`.
        lowest: the first learning rate.
        highest: the last learning rate.
        steps: the number of updates.
        batch_size: rows of a batch, for arrays and datasets.
        shuffle: shuffle the rows, from the graph's seed.

    Example:
        >>> found = find_learning_rate(training, (pictures, classes))  # doctest: +SKIP
        >>> fit(training, (pictures, classes), schedule=OneCycleSchedule(found.suggested))  # doctest: +SKIP
    """
    if not 0 < lowest < highest < math.inf:
        problem = f"lowest is {lowest}, highest is {highest}"
        raise ArgumentError("find_learning_rate", problem, fix="use 0 < lowest < highest")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise ArgumentError("find_learning_rate", f"steps is {steps!r}", fix="pass an integer ≥ 2")
    graph = Trained(training, "find_learning_rate")
    batches = source(training, data, batch_size, shuffle)
    rates = [lowest * (highest / lowest) ** (n / (steps - 1)) for n in range(steps)]
    losses: list[float] = []
    with _put_back(training), graph.fed(_endless(graph, batches), batches, None) as coming:
        best = math.inf
        for rate, batch in zip(rates, islice(_heard(training, coming), steps), strict=False):
            graph.optimizer.learning_rate = rate
            [read] = graph.read(graph.update([batch], None))
            losses.append(sum(read.losses))
            best = min(best, losses[-1])
            if not losses[-1] <= DIVERGED * best and len(losses) > 1:  # NaN included
                break
    return LearningRates(rates[: len(losses)], losses, _steepest(rates, losses))


def _heard(training: TrainingGraph, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; if one cannot be read, other ranks hear of it."""
    while True:
        with training.telling_failures(is_update=True):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _endless(graph: Trained, batches: Source) -> Iterator[Batch]:
    """Epoch after epoch; one if the data has no second."""
    seed = graph.stream
    for number in count():
        yield from batches.epoch(number, seed)
        if not batches.repeats:
            return


@contextmanager
def _put_back(training: TrainingGraph) -> Iterator[None]:
    """Restores everything that training changes."""
    graphs = [(graph, _copied(graph.progress()), _learned(graph)) for graph in training.linked]
    optimizer = training.optimizer
    assert optimizer is not None
    rate = optimizer.learning_rate
    try:
        yield
    finally:
        optimizer.learning_rate = rate
        with torch.inference_mode():
            for graph, progress, tensors in graphs:
                for tensor, array in tensors.items():
                    tensor.overwrite(array)
                    tensor.synchronize_data()
                graph.resume(progress)
                if graph.optimizer is not None and progress.time_step is not None:
                    graph.optimizer.time_step = progress.time_step


def _copied(progress: Progress) -> Progress:
    """The progress in memory of its own."""
    buffers = {t: tuple(array.clone() for array in arrays) for t, arrays in progress.buffers.items()}
    gradients = {t: array.clone() for t, array in progress.gradients.items()}
    averages = {t: array.clone() for t, array in progress.averages.items()}
    return replace(progress, buffers=buffers, gradients=gradients, averages=averages)


def _learned(graph: TrainingGraph) -> dict[Any, torch.Tensor]:
    held = graph.require_session("find_learning_rate").compilation.held
    return {tensor: tensor.array().clone() for tensor in held}


def _steepest(rates: list[float], losses: list[float]) -> float | None:
    """The rate where the smoothed loss falls fastest over the logarithm of the rate."""
    smooth, mean = [], 0.0
    for n, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        smooth.append(mean / (1 - SMOOTHING**n))
    slopes = [after - before for before, after in pairwise(smooth)]
    falling = [(slope, rate) for slope, rate in zip(slopes, rates[1:], strict=False) if slope < 0]
    return min(falling)[1] if falling else None
