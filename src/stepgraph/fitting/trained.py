"""A training graph as a loop uses it: updates with one or more batches, evaluation, infrequent reads of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

import torch

from stepgraph.compiler.step import gradient
from stepgraph.errors import DataTypeError, StateError
from stepgraph.fitting.data import Batch, Rows, Source, ahead
from stepgraph.fitting.metrics import Metric, Tally
from stepgraph.graphs.training import TrainingGraph
from stepgraph.layers.loss import LossLayer
from stepgraph.optimizers import Optimizer
from stepgraph.runtime.execution import Execution
from stepgraph.runtime.loss_slots import Loss
from stepgraph.tensors import buffers
from stepgraph.tensors.extents import shape_at
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import ExecutionOptions, ReductionType


class Trained:
    """A training graph as the loop uses it."""

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
        self.is_mean = not isinstance(layer, LossLayer) or layer.descriptor.reduction_type is ReductionType.MEAN

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

    def compile_for(self, data: Source) -> None:
        """Compiles the step for the batches of a graph without a declared batch size, if their size is known."""
        compiled = self.training.require_session("fit").compilation
        if compiled.feeds.is_open and isinstance(data, Rows):
            compiled.programs.executable(compiled.whole, min(data.batch_size, data.count), "fit")

    def update(self, group: Sequence[Batch], tally: Tally | None) -> list[tuple[torch.Tensor | Loss, int]]:
        """One update with the gradients of a group of batches; returns their losses."""
        if len(group) == 1:
            batch = group[0]
            execution = self.training.execute(*batch.parts, batch_size=batch.rows)
            self._compare(batch, tally)
            return [(_loss(execution), batch.rows)]
        found, first, rows = [], group[0].rows, sum(batch.rows for batch in group)
        for batch in group:
            found.append((_loss(self._forward(batch)), batch.rows))
            self._compare(batch, tally)
            # Gradients of a mean are accumulated in units of the first batch's rows, then divided by all rows.
            if len(found) > 1:
                self._scale_gradients(first / batch.rows)
            adding = ExecutionOptions.ACCUMULATE_GRADIENTS if len(found) > 1 else ExecutionOptions.NONE
            self.training.execute_gradient(options=adding)
            self._scale_gradients(batch.rows / first)
        self._scale_gradients(first / rows)
        self.training.execute_optimizer_update()
        return found

    def evaluated(
        self,
        data: Source,
        metrics: Mapping[str, Metric],
        prefetch: int | None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> Tally:
        """Loss and metrics of all batches, in inference mode."""
        tally, losses = Tally(metrics), []
        with self.fed(data.epoch(0, (0,)), data, prefetch) as batches:
            for batch in until(batches, interrupted):
                options = ExecutionOptions.FORWARD_FOR_INFERENCE
                execution = self.training.execute(*batch.parts, batch_size=batch.rows, options=options)
                self._compare(batch, tally if metrics else None)
                losses.append((_loss(execution), batch.rows))
        for value, (_, rows) in zip(read_losses([loss for loss, _ in losses]), losses, strict=True):
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
        shape = shape_at(tensor.shape, self.training.declaration.feeds.batch, batch.rows)
        return tensor.torch() if values is None else buffers.read(values, shape, tensor.data_type, tensor.where)

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
