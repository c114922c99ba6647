"""A training graph as a loop uses it: updates with one or more batches, evaluation, infrequent reads of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.compiler.step import gradient
from stepgraph.errors import DataTypeError, StateError
from stepgraph.fitting.data import Batch, Source, ahead
from stepgraph.fitting.metrics import Tally
from stepgraph.fitting.named_metrics import Task
from stepgraph.graphs.training import TrainingGraph
from stepgraph.layers.loss import LossLayer
from stepgraph.optimizers import Optimizer
from stepgraph.runtime.execution import Execution
from stepgraph.runtime.loss_slots import Loss
from stepgraph.tensors import buffers
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import ExecutionOptions, ReductionType


@dataclass
class Losses:
    """Losses on the device, of batches that ran whole or in parts.

    Args:
        adds_up: whether the loss of a batch is the sum of those of its parts, not their mean by rows.
        arrays: the losses of all parts.
        rows: the rows of each part.
        parts: how many consecutive parts each batch has.
    """

    adds_up: bool
    arrays: list[torch.Tensor | Loss] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    def add(self, execution: Execution, rows: int) -> None:
        """Adds the loss of a part."""
        self.arrays.append(_loss(execution))
        self.rows.append(rows)

    def by_batch(self, values: Sequence[float]) -> list[tuple[float, int]]:
        """The loss and rows of each batch, once the numbers were read."""
        found, pairs = [], iter(zip(values, self.rows, strict=True))
        for count in self.parts:
            mine = [next(pairs) for _ in range(count)]
            rows = sum(rows for _, rows in mine)
            if count == 1 or self.adds_up:
                found.append((sum(loss for loss, _ in mine), rows))
            else:
                found.append((sum(loss * rows for loss, rows in mine) / rows, rows))
        return found


class Trained:
    """A training graph as the loop uses it.

    Attributes:
        portion: the most rows that run at once; larger batches run in parts. None if there is no limit.
    """

    portion: int | None = None

    def __init__(self, training: TrainingGraph, learns: bool = True) -> None:
        if not isinstance(training, TrainingGraph):
            raise DataTypeError("fit", f"{type(training).__name__} is not a TrainingGraph", fix="pass a TrainingGraph")
        session = training.require_session("fit")
        self.training, self.device = training, session.device
        losses = [node for node in session.compilation.nodes if node.is_loss]
        if not losses:
            raise StateError("fit", "the graph has no loss", fix="pass a loss layer to TrainingGraph")
        if learns and training.optimizer is None:
            raise StateError("fit", "the graph has no optimizer", fix="pass an optimizer to TrainingGraph")
        self.prediction, self.labels = losses[-1].sources[0], (*losses[-1].labels, None)[0]
        self._bound: set[Tensor] = set()
        layer = losses[-1].layer
        # The gradient of a mean weights each row by its share of the batch; others are already sums.
        reduction = layer.descriptor.reduction_type if isinstance(layer, LossLayer) else ReductionType.MEAN
        self.is_mean, self.adds_up = reduction is ReductionType.MEAN, reduction is ReductionType.SUM
        self.task = Task.of(layer, self.prediction, self.labels)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, read once because with a loss scale reading it synchronizes with the device."""
        found = self.training.optimizer
        assert found is not None
        return found

    @property
    def stream(self) -> tuple[int, int]:
        """Seed and position of the graph's random stream."""
        seed, position = self.training.progress().stream or (0, 0)
        return seed, position

    @contextmanager
    def fed(self, batches: Iterator[Batch], origin: Source, prefetch: int | None) -> Iterator[Iterator[Batch]]:
        """Batches, prepared ahead if that pays off."""
        on_gpu = self.device.torch.type == "cuda"
        count = (2 if on_gpu or origin.wants_a_thread else 0) if prefetch is None else prefetch
        if on_gpu and count:
            batches = (batch.pinned() for batch in batches)
        with closing(ahead(batches, count)) as coming:  # type: ignore[type-var]
            yield coming

    def update(self, group: Sequence[Batch], tally: Tally | None) -> Losses:
        """One update with the gradients of a group of batches; returns their losses."""
        losses = Losses(self.adds_up)
        if len(group) == 1 and not self.is_divided(group[0]):
            batch = group[0]
            losses.add(self.training.execute(*batch.parts, batch_size=batch.rows), batch.rows)
            losses.parts.append(1)
            self._compare(batch, tally)
            return losses
        parts = [part for batch in group for part in self._divided(batch, losses)]
        first, rows = parts[0].rows, sum(part.rows for part in parts)
        for part in parts:
            losses.add(self._forward(part), part.rows)
            self._compare(part, tally)
            # Gradients of a mean are accumulated in units of the first part's rows, then divided by all rows.
            adding = len(losses.rows) > 1
            if adding:
                self._scale_gradients(first / part.rows)
            self.training.execute_gradient(
                options=ExecutionOptions.ACCUMULATE_GRADIENTS if adding else ExecutionOptions.NONE
            )
            self._scale_gradients(part.rows / first)
        self._scale_gradients(first / rows)
        self.training.execute_optimizer_update()
        return losses

    def is_divided(self, batch: Batch) -> bool:
        """Whether a batch runs in parts."""
        return self.portion is not None and batch.rows > self.portion

    def _divided(self, batch: Batch, losses: Losses) -> list[Batch]:
        """The parts of a batch, noted in `losses`: as few as possible, of equal size but for the last."""
        if not self.is_divided(batch):
            losses.parts.append(1)
            return [batch]
        assert self.portion is not None
        count = -(-batch.rows // self.portion)
        size = -(-batch.rows // count)
        starts = range(0, batch.rows, size)
        losses.parts.append(len(starts))
        whole = [
            {name: self._rows(names[name], values, batch.rows) for name, values in part.items()}
            for part, names in zip(batch.parts, self._names(), strict=True)
        ]
        return [self._slice(whole, start, min(start + size, batch.rows)) for start in starts]

    def _rows(self, tensor: Tensor, values: Any, rows: int) -> tuple[torch.Tensor, bool]:
        """Data as an array, and whether its rows are those of the batch."""
        batched = tensor.shape[0] == self.training.declaration.feeds.batch
        shape = (rows, *tensor.shape[1:]) if batched else tensor.shape
        return buffers.read(values, shape, tensor.data_type, tensor.where), batched

    @staticmethod
    def _slice(whole: Sequence[Mapping[str, tuple[torch.Tensor, bool]]], start: int, stop: int) -> Batch:
        parts = (
            {name: array[start:stop] if batched else array for name, (array, batched) in part.items()} for part in whole
        )
        return Batch(tuple(parts), stop - start)

    def evaluated(
        self,
        data: Source,
        metrics: Mapping[str, Any],
        prefetch: int | None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Tally:
        """Loss and metrics of all batches, in inference mode."""
        tally, losses = Tally(metrics), Losses(self.adds_up)
        with self.fed(data.epoch(0, (0,)), data, prefetch) as batches:
            for batch in until(batches, interrupted):
                for part in self._divided(batch, losses):
                    options = ExecutionOptions.FORWARD_FOR_INFERENCE
                    execution = self.training.execute(*part.parts, batch_size=part.rows, options=options)
                    self._compare(part, tally if metrics else None)
                    losses.add(execution, part.rows)
        for value, rows in losses.by_batch(read_losses(losses.arrays)):
            tally.add_loss(value, rows)
        return tally

    def release(self) -> None:
        """Releases data that was bound for an update, so that a later call does not use it."""
        for tensor in self._bound:
            tensor.hold(None, "it was bound for one update of fit")
        self._bound.clear()

    def _forward(self, batch: Batch) -> Execution:
        for names, part in zip(self._names(), batch.parts, strict=True):
            tensors = {name: names[name] for name in part}
            self._bound.update(tensors.values())
            self.training.bind_and_write_data(part, tensors, self.device, batch_size=batch.rows, synchronous=False)
        return self.training.execute_forward(batch.rows)

    @torch.inference_mode()
    def _scale_gradients(self, factor: float) -> None:
        """Scales the accumulated gradients, in new memory because parameters may share one pass's arrays."""
        found = self.training.gradients.found
        if not self.is_mean or factor == 1:
            return
        for key in map(gradient, self.training.require_session("fit").compilation.trainable):
            if key in found:
                found[key] = found[key] * factor

    def _compare(self, batch: Batch, tally: Tally | None) -> None:
        """Passes the last prediction to the metrics."""
        if tally is None:
            return
        prediction = self.prediction.torch()
        tally.add(prediction, self._labels(batch).to(prediction.device, non_blocking=True), batch.rows)

    def _labels(self, batch: Batch) -> torch.Tensor:
        tensor = self.labels
        if tensor is None:
            raise StateError("metrics", "the loss has no labels for metrics to compare with", fix="leave metrics out")
        named = (part[name] for part, names in zip(batch.parts, self._names(), strict=True) for name in part
                 if names[name] is tensor)  # fmt: skip
        values = next(named, None)
        return tensor.torch() if values is None else self._rows(tensor, values, batch.rows)[0]

    def _names(self) -> tuple[dict[str, Tensor], ...]:
        return self.training.inputs, self.training.loss_labels, self.training.loss_label_weights


def _loss(execution: Execution) -> torch.Tensor | Loss:
    """The loss on the device; reading the number would synchronize."""
    found = execution.loss_on_device
    assert found is not None
    return found


def read_losses(losses: Sequence[torch.Tensor | Loss]) -> list[float]:
    """Losses as numbers, with one synchronization and one transfer for all. Unreduced losses give their mean."""
    arrays = [loss.array if isinstance(loss, Loss) else loss for loss in losses]
    numbers = [loss.reshape(()) if loss.numel() == 1 else loss.float().mean() for loss in arrays]
    return torch.stack(numbers).tolist() if numbers else []


def until(batches: Iterator[Batch], interrupted: Callable[[], bool]) -> Iterator[Batch]:
    """Batches, until the run is interrupted."""
    while not interrupted():
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception:
            if interrupted():  # the signal also reached a loader's own processes
                return
            raise
        yield batch
