"""Copies batches to a GPU ahead of time, in a stream of their own, while steps run in another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from stepgraph.compiler.step import Limit
from stepgraph.fitting.data import Batch
from stepgraph.runtime.indices import within
from stepgraph.system import streams
from stepgraph.tensors.tensor import Tensor

Names = tuple[Mapping[str, Tensor], ...]


class Transfer:
    """Batches on their way to a GPU.

    Args:
        device: the GPU.
        names: the tensors of inputs, labels and label weights.
        limits: which of them are indices, and into what. A batch with one out of range stays on the host, where the
            call refuses it at once.
    """

    def __init__(self, device: torch.device, names: Names, limits: Mapping[Tensor, Limit]) -> None:
        self._device, self._names, self._limits = device, names, limits
        self._stream = streams.beside(device)

    def moved(self, batch: Batch) -> Batch:
        """The batch on the device, complete; called by the thread that prepares batches.

        That thread waits for the copy, so a slow copy counts as time in which the loop waits for data. The loop itself
        waits for neither.
        """
        batch = batch.pinned()
        if not self._is_accepted(batch):
            return batch
        with torch.cuda.stream(self._stream):
            parts = tuple({name: self._copied(one) for name, one in part.items()} for part in batch.parts)
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        copied.synchronize()
        return Batch(parts, batch.rows, origin=batch.parts)

    def taken(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; their memory is not used again before the steps that read it are done."""
        for batch in batches:
            if batch.origin is not None:
                stream = torch.cuda.current_stream(self._device)
                for array in (one for part in batch.parts for one in part.values() if isinstance(one, torch.Tensor)):
                    array.record_stream(stream)
            yield batch

    def _copied(self, values: Any) -> Any:
        return values.to(self._device, non_blocking=True) if isinstance(values, torch.Tensor) else values

    def _is_accepted(self, batch: Batch) -> bool:
        """Whether all data is on the host, and all indices are in range."""
        return all(
            one.is_cpu and (tensor not in self._limits or within(one, self._limits[tensor]))
            for names, part in zip(self._names, batch.parts, strict=True)
            for tensor, one in ((names[name], one) for name, one in part.items())
            if isinstance(one, torch.Tensor)
        )
