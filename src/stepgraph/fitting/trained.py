"""A training graph as a loop uses it: updates with one or more batches, evaluation, infrequent reads of losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from math import isnan
from typing import Any

import torch

from stepgraph.compiler.step import gradient
from stepgraph.errors import DataTypeError, StateError
from stepgraph.fitting.data import Batch, Rows, Source, ahead, kept
from stepgraph.fitting.losses import Amount, Measured, Read, TrainedLoss, assigned, joined, read_losses
from stepgraph.fitting.metrics import Tally
from stepgraph.fitting.stopping import Stopping
from stepgraph.fitting.transfer import Transfer
from stepgraph.graphs.training import TrainingGraph
from stepgraph.optimizers import Optimizer
from stepgraph.runtime.execution import Execution
from stepgraph.runtime.rank_calls import BATCH, NO_BATCH
from stepgraph.tensors import buffers
from stepgraph.tensors.extents import shape_at
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import ExecutionOptions

_Context = AbstractContextManager[None]
Weighting = Callable[[int], _Context]  # of the gradient pass of one part of a group


class Trained:
    """A training graph as the loop uses it.

    Attributes:
        portion: the most rows that run at once; larger batches run in parts. None if there is no limit.
        shards: the parts that the graph itself divides the batch of an update into; 0 if it does not.
    """

    portion: int | None = None

    def __init__(self, training: TrainingGraph, where: str = "fit", learns: bool = True) -> None:
        if not isinstance(training, TrainingGraph):
            raise DataTypeError(where, f"{type(training).__name__} is not a TrainingGraph", fix="pass a TrainingGraph")
        session = training.require_session(where)
        self.training, self.device = training, session.device
        compiled = session.compilation
        self.shards = compiled.shards
        pairs = zip(compiled.loss_names, compiled.losses, strict=True)
        self.losses = [TrainedLoss(name, node) for name, node in pairs]
        if not self.losses:
            raise StateError(where, "the graph has no loss", fix="pass a loss layer to TrainingGraph")
        if learns and training.optimizer is None:
            raise StateError(where, "the graph has no optimizer", fix="pass an optimizer to TrainingGraph")
        self._owners: dict[str, TrainedLoss] = {}  # the loss of each metric

    @property
    def loss_names(self) -> list[str]:
        """The names of losses in a history: that of the sum, and those of several."""
        return ["loss", *(one.name for one in self.losses if len(self.losses) > 1)]

    def metrics(self, metrics: Any) -> dict[str, Any]:
        """Metrics by name; remembers which loss each belongs to."""
        found, self._owners = assigned(metrics, self.losses, self.training.declaration.outputs)
        if any(loss.labels is None for loss in self._owners.values()):
            raise StateError("metrics", "the loss has no labels for metrics to compare with", fix="leave metrics out")
        return found

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
    def fed(
        self, batches: Iterator[Batch], origin: Source, prefetch: int | None, held: int = 1
    ) -> Iterator[Iterator[Batch]]:
        """Batches, prepared ahead if that pays off; the caller uses `held` of them at once."""
        on_gpu = self.device.torch.type == "cuda"
        count = (2 if on_gpu or origin.wants_a_thread else 0) if prefetch is None else prefetch
        if origin.may_overwrite and count + held > 1:
            batches = kept(batches, count + held)
        transfer = self._transfer() if on_gpu and count else None
        if on_gpu and count:
            prepared = Batch.pinned if transfer is None else transfer.moved
            batches = (prepared(batch) for batch in batches)
        with closing(ahead(batches, count)) as coming:  # type: ignore[type-var]
            yield coming if transfer is None else transfer.taken(coming)

    def _transfer(self) -> Transfer | None:
        """How batches are copied to the device ahead of time.

        None if there may be no memory for more than one, or if a call would have to look at indices there.
        """
        session = self.training.require_session("fit")
        compiled, limits = session.compilation, session.index_limits
        if self.portion is not None or compiled.settings.memory_limit is not None:
            return None
        if limits and not compiled.guards_indices:
            return None
        return Transfer(self.device.torch, self._names(), limits)

    def compile_for(self, data: Source) -> None:
        """Compiles the step for the batches of a graph without a declared batch size, if their size is known."""
        compiled = self.training.require_session("fit").compilation
        if compiled.feeds.is_open and isinstance(data, Rows):
            rows = min(data.batch_size, data.count, self.portion or data.count)
            compiled.programs.executable(compiled.whole, compiled.rows_at_once(rows), "fit")

    def update(self, group: Sequence[Batch], tally: Tally | None) -> list[list[Measured]]:
        """One update with the gradients of a group of batches; returns the losses of the parts of each batch.

        Args:
            group: the batches.
            tally: the metrics that see its predictions.
        """
        if self.shards and len(group) > 1:
            with self.training.telling_failures(is_update=True):
                group = [self._joined(group)]
        if len(group) == 1 and not self.is_divided(group[0]):
            batch = group[0]
            execution = self.training.execute(*batch.parts, batch_size=batch.rows)
            self._compare(batch, tally)
            return [[self._measured(execution, batch)]]
        found: list[list[Measured]] = []
        divided = [self._divided(batch) for batch in group]
        combining = self._seeded if len(self.losses) > 1 else self._rescaled
        with combining([part for parts in divided for part in parts]) as weighted:
            index = 0
            for parts in divided:
                found.append([])
                for part in parts:
                    with weighted(index):
                        execution = self.training.add_gradients(*part.parts, batch_size=part.rows, adding=index > 0)
                    found[-1].append(self._measured(execution, part))
                    self._compare(part, tally)
                    index += 1
        self.training.execute_optimizer_update()
        return found

    def is_divided(self, batch: Batch) -> bool:
        """Whether a batch runs in parts."""
        return self.portion is not None and batch.rows > self.portion

    def _divided(self, batch: Batch) -> list[Batch]:
        """The parts of a batch: as few as possible, of equal size but for the last."""
        if not self.is_divided(batch):
            return [batch]
        assert self.portion is not None
        count = -(-batch.rows // self.portion)
        size = -(-batch.rows // count)
        starts = range(0, batch.rows, size)
        whole = [
            {name: self._rows(names[name], values, batch.rows) for name, values in part.items()}
            for part, names in zip(batch.parts, self._names(), strict=True)
        ]
        return [_slice(whole, start, min(start + size, batch.rows)) for start in starts]

    def _joined(self, group: Sequence[Batch]) -> Batch:
        """Several batches as the one that an update in shards is made of; what has no rows must be the same in all."""
        feeds = self.training.require_session("fit").feeds
        parts: list[dict[str, torch.Tensor]] = []
        for kind, names in enumerate(self._names()):
            parts.append({})
            for name, tensor in ((name, names[name]) for name in group[0].parts[kind]):
                shapes = (shape_at(tensor.shape, feeds.batch, batch.rows) for batch in group)
                pairs = zip((batch.parts[kind][name] for batch in group), shapes, strict=True)
                arrays = [buffers.read(values, shape, tensor.data_type, tensor.where) for values, shape in pairs]
                if feeds.is_batched(tensor):
                    parts[-1][name] = torch.cat(arrays)
                elif all(torch.equal(arrays[0], one) for one in arrays):
                    parts[-1][name] = arrays[0]
                else:
                    problem = f"'{name}' has no rows and differs between the batches of one update"
                    raise StateError("fit", problem, fix="leave accumulate out, or compile without parallel")
        return Batch(tuple(parts), sum(batch.rows for batch in group))

    def _rows(self, tensor: Tensor, values: Any, rows: int) -> tuple[torch.Tensor, int]:
        """Data as an array, and how many of its rows belong to one of the batch; 0 if it is the same for all."""
        feeds = self.training.declaration.feeds
        array = buffers.read(values, shape_at(tensor.shape, feeds.batch, rows), tensor.data_type, tensor.where)
        return array, len(array) // rows if feeds.is_batched(tensor) else 0

    @contextmanager
    def _rescaled(self, group: Sequence[Batch]) -> Iterator[Weighting]:
        """The gradients of one loss, combined by what its mean over each batch divides by.

        They are accumulated in units of the first batch, then divided by the whole.
        """
        loss, device = self.losses[0], self.device.torch
        if not loss.is_mean:
            yield lambda index: nullcontext()
            return
        amounts = [_on(loss.amount(batch.rows, partial(self._given, batch)), device) for batch in group]
        units = [_nonzero(amount) for amount in amounts]

        @contextmanager
        def weighted(index: int) -> Iterator[None]:
            if index:
                self._scale_gradients(units[0] / units[index])
            yield
            self._scale_gradients(units[index] / units[0])

        yield weighted
        self._scale_gradients(units[0] / _nonzero(sum(amounts)))

    @contextmanager
    def _seeded(self, group: Sequence[Batch]) -> Iterator[Weighting]:
        """The gradients of several losses: each starts from the share of a batch in that loss's mean."""
        state = self.training.require_session("fit").state
        assert state is not None
        factors = state.loss_factors
        shares = [self._shares(loss, group) for loss in self.losses]

        @contextmanager
        def weighted(index: int) -> Iterator[None]:
            with torch.inference_mode():
                factors.copy_(torch.stack([share[index] for share in shares]))
            yield

        try:
            yield weighted
        finally:
            factors.fill_(1)

    def _shares(self, loss: TrainedLoss, group: Sequence[Batch]) -> torch.Tensor:
        """The share of each batch in the mean of a loss; 1 for a loss that is a sum."""
        device = self.device.torch
        if not loss.is_mean:
            return torch.ones(len(group), device=device)
        amounts = [loss.amount(batch.rows, partial(self._given, batch)) for batch in group]
        counted = torch.stack([torch.as_tensor(one, dtype=torch.float32, device=device) for one in amounts])
        return counted / _nonzero(counted.sum())

    def evaluated(
        self,
        data: Source,
        metrics: Mapping[str, Any],
        prefetch: int | None,
        stopping: Stopping | None = None,
    ) -> Tally:
        """Loss and metrics of all batches, in inference mode."""
        tally = Tally(metrics)
        measured: list[list[Measured]] = []
        with self.fed(data.epoch(0, (0,)), data, prefetch) as batches:
            for batch in until(batches, stopping):
                measured.append([])
                for part in self._divided(batch):
                    options = ExecutionOptions.FORWARD_FOR_INFERENCE
                    execution = self.training.execute(*part.parts, batch_size=part.rows, options=options)
                    self._compare(part, tally if metrics else None)
                    measured[-1].append(self._measured(execution, part))
        for one in self.read(measured):
            self.add_losses(tally, one)
        return tally

    def read(self, batches: Sequence[Sequence[Measured]]) -> list[Read]:
        """The losses of batches, from those of their parts, with one synchronization for all."""
        found = read_losses([part for batch in batches for part in batch])
        if any(isnan(loss) for one in found for loss in one.losses):
            self.training.require_session("fit").require_accepted()
        parts = iter(found)
        return [joined([next(parts) for _ in batch], self.losses) for batch in batches]

    def add_losses(self, tally: Tally, one: Read) -> None:
        """Adds the losses of a batch to a tally."""
        found = zip(self.losses, one.losses, one.amounts, strict=True)
        tally.add_losses({loss.name: (value, None if loss.adds_up else amount) for loss, value, amount in found})

    def _measured(self, execution: Execution, batch: Batch) -> Measured:
        """The losses of a call, on the device; reading the numbers would synchronize."""
        amounts = (loss.amount(batch.rows, partial(self._given, batch)) for loss in self.losses)
        return Measured(execution.losses_on_device, tuple(amounts), batch.rows)

    @torch.inference_mode()
    def _scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Scales the accumulated gradients, in new memory because parameters may share one pass's arrays."""
        found = self.training.gradients.found
        if not isinstance(factor, torch.Tensor) and factor == 1:
            return
        for key in map(gradient, self.training.require_session("fit").compilation.trainable):
            if key in found:
                found[key] = found[key] * factor

    def _compare(self, batch: Batch, tally: Tally | None) -> None:
        """Passes the last predictions to the metrics."""
        if tally is None:
            return
        for loss in self.losses:
            own = [name for name in tally.names if self._owners[name] is loss]
            if own:
                prediction = loss.prediction.torch()
                labels = self._labels(loss, batch).to(prediction.device, non_blocking=True)
                tally.add(prediction, labels, batch.rows, own)

    def _labels(self, loss: TrainedLoss, batch: Batch) -> torch.Tensor:
        assert loss.labels is not None  # checked with the metrics
        return self._array(batch.parts, batch, loss.labels)

    def _given(self, batch: Batch, tensor: Tensor) -> torch.Tensor:
        """The array of a label tensor in a batch, on the host if it came from there: counting labels is free there."""
        return self._array(batch.parts if batch.origin is None else batch.origin, batch, tensor)

    def _array(self, parts: Sequence[Mapping[str, Any]], batch: Batch, tensor: Tensor) -> torch.Tensor:
        named = (part[name] for part, names in zip(parts, self._names(), strict=True) for name in part
                 if names[name] is tensor)  # fmt: skip
        values = next(named, None)
        array = tensor.array() if values is None else self._rows(tensor, values, batch.rows)[0]
        checked = batch.origin is not None
        return array if checked else self.training.require_session("fit").in_range(tensor, array)

    def _names(self) -> tuple[dict[str, Tensor], ...]:
        return self.training.inputs, self.training.loss_labels, self.training.loss_label_weights


def _slice(whole: Sequence[Mapping[str, tuple[torch.Tensor, int]]], start: int, stop: int) -> Batch:
    """Some rows of a batch, from its arrays and how many of their rows belong to one of the batch."""
    parts = (
        {name: array[start * each : stop * each] if each else array for name, (array, each) in part.items()}
        for part in whole
    )
    return Batch(tuple(parts), stop - start)


def _on(amount: Amount, device: torch.device) -> Amount:
    return amount.to(device, non_blocking=True) if isinstance(amount, torch.Tensor) else amount


def _nonzero(amount: Amount) -> Amount:
    """An amount to divide by: where nothing counts, there is nothing to divide."""
    return torch.where(amount == 0, 1, amount) if isinstance(amount, torch.Tensor) else amount


def until(batches: Iterator[Batch], stopping: Stopping | None) -> Iterator[Batch]:
    """Batches, until the run is interrupted."""
    if stopping is not None and stopping.world.size > 1:
        yield from _among_ranks(batches, stopping)
        return
    while stopping is None or not stopping.is_due():
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception:  # of any loader: an interrupt also reaches its processes, which then fail in their own ways
            if stopping is not None and stopping.explains_failures:
                return
            raise
        yield batch


def _among_ranks(batches: Iterator[Batch], stopping: Stopping) -> Iterator[Batch]:
    """The same with other ranks: nobody begins an update before all have a batch for it."""
    while True:
        batch = next(batches, None)
        if stopping.is_due(BATCH if batch is not None else NO_BATCH) or batch is None:
            return
        yield batch
