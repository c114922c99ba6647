"""One update on one rank: its shards one after another, what they leave behind, and the update itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from math import nan
from typing import Any

import torch

from stepgraph.compiler import collectives
from stepgraph.compiler.news import DTYPE, HEADER, tell_notes_, weighted
from stepgraph.compiler.program import PartName
from stepgraph.compiler.shards import TreeSum
from stepgraph.compiler.step import (
    AGREED,
    HEARD,
    NEWS,
    OFFSETS,
    REFUSED,
    STREAM,
    Key,
    gradient,
    partial_sum,
    piece,
    total,
    value,
)
from stepgraph.errors import ExecutionError, StateError
from stepgraph.graphs.compilation import Arrays
from stepgraph.graphs.division import Division, shares
from stepgraph.graphs.session import Session
from stepgraph.random import seed_of_shard
from stepgraph.runtime.amounts import amount
from stepgraph.runtime.executable import Executable
from stepgraph.runtime.execution import Execution
from stepgraph.runtime.profile import Profile
from stepgraph.tensors import writes
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import ExecutionOptions

SAMPLE = 16  # elements of an array that ranks compare


@dataclass
class Update:
    """One update on one rank.

    Attributes:
        gradients: the gradients of its shards, summed as far as possible; an array per bucket.
        numbers: what `losses` and `store_statistics` combine, in one float64 array per shard.
        rows: results of its shards that are joined.
        failure: the error of a shard that could not run.
        ran: the executables of its shards.
        heard: what all ranks have told, if the last shard has exchanged it.
        agreed: whether the update counts, where the device decides it; None if it does.
    """

    session: Session
    division: Division
    feeds: Arrays
    options: ExecutionOptions
    execution: Execution
    shards: int
    gradients: TreeSum = field(init=False)
    numbers: TreeSum = field(init=False)
    rows: dict[Key, list[torch.Tensor]] = field(init=False)
    failure: Exception | None = None
    profiles: list[Profile] = field(default_factory=list)
    ran: set[Executable] = field(default_factory=set)
    heard: torch.Tensor | None = None
    agreed: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.gradients, self.numbers = TreeSum(self.shards), TreeSum(self.shards)
        self.rows = {key: [] for key in self.division.shapes}
        state = self.session.state
        assert state is not None
        self.stream, self.factors = state.arrays[STREAM], state.loss_factors
        self.notes, self.offsets = state.arrays.get(REFUSED), state.arrays.get(OFFSETS)
        self.statistics = {key: key.owner.array() for key in self.division.news.statistics}
        self.before = {key: array.clone() for key, array in self.statistics.items()}
        self.position = self.stream.clone()

    def header(self, readiness: float) -> torch.Tensor:
        """What this rank tells about itself, as `HEADER` names it.

        A sample shows whether ranks have the same batch: a weighted sum of a few elements of each array.
        """
        flat = [array.reshape(-1) for array in self.feeds.values()]
        few = torch.cat([one[:: max(1, len(one) // SAMPLE)].double() for one in flat])
        failed = self.failure is not None
        found = _header(failed, self.division.batch, self.division.news.notes, readiness, few.device).clone()
        sample = few.nan_to_num_(posinf=0, neginf=0).dot(_weights(len(few), few.device))
        found[HEADER.index("sample")] = sample.asinh_()  # large ones differ by their ratio
        if self.notes is not None:
            tell_notes_(found, self.notes)
        return found

    @cached_property
    def shares(self) -> torch.Tensor:
        """The share of each shard in each loss."""
        if self.division.shares is not None:
            return self.division.shares
        losses = self.session.compilation.losses
        cut = range(len(self.division.spans))
        amounts = [
            [amount(node, self.division.rows(s), partial(self._given, self._cut(s))) for node in losses] for s in cut
        ]
        return shares(amounts, losses, self.session.device.torch)

    def can_run(self, shard: int) -> bool:
        """Whether a shard has rows, and none before it has failed."""
        return self.failure is None and self.division.rows(shard) > 0

    def run(self, shard: int) -> None:
        """Runs a shard and adds what it computed; one without rows stands for zeros."""
        if self.failure is not None:
            return
        found = self._ran(PartName.SHARD, shard) if self.can_run(shard) else None
        if self.failure is None:
            flat = None if found is None else [bucket.flat(found) for bucket in self.division.buckets]
            self.gradients.add((0, shard), flat)
            self._keep(found, shard)

    def run_and_exchange(self, shard: int, group: str, rank: int, readiness: Callable[[], float]) -> list[torch.Tensor]:
        """Runs the last shard of this rank, which exchanges the gradients and news; returns its totals by bucket.

        If it fails, zeros are the totals of the buckets that it has sent.

        Args:
            shard: the shard.
            group: the name of the ranks.
            rank: this one.
            readiness: whether this rank can run fused operators.
        """
        before, buckets = collectives.started(group), self.division.buckets
        sums = {
            partial_sum(bucket, place): one
            for place, node in enumerate(self.gradients.in_order)
            for bucket, one in enumerate(self.gradients.sums[node] or ())
        }
        found = self._ran(PartName.LAST, shard, lambda: sums | {NEWS: self._news(shard, readiness())})
        if found is None:
            sent = collectives.started(group) - before
            is_late = sent > len(buckets)  # the others have heard that this rank can go on
            if (is_late or collectives.is_broken(group)) and self.failure is not None:
                raise self.failure
            collectives.finish_all(group)
            device = self.session.device.torch
            return [bucket.zeros(device, rank) for bucket in buckets[:sent]]
        self.heard, self.agreed = found[HEARD], found.get(AGREED)
        self._keep_rows(found)
        return [found[total(bucket)] for bucket in range(len(buckets))]

    def _news(self, shard: int, readiness: float) -> torch.Tensor:
        """What this rank tells in its last shard: a header, the sums of earlier ones, and the shares of this one."""
        (height, width), header = self.division.news.shape, self.header(readiness)
        found = torch.zeros(height + 1, width, dtype=DTYPE, device=header.device)
        found[0, : len(header)] = header
        for place, node in enumerate(self.numbers.in_order, start=1):
            (numbers,) = self.numbers.sums[node] or ()
            found[place, : len(numbers)] = numbers
        found[-1, : len(self.shares[shard])] = self.shares[shard]
        return found

    def _ran(self, part: PartName, shard: int, more: Callable[[], Arrays] | None = None) -> Arrays | None:
        """What a shard computes. An error is kept, for the other ranks must hear of it first."""
        rows, arrays = self.division.rows(shard), self._cut(shard)
        try:
            self.factors.copy_(self.shares[shard])
            if self.offsets is not None:
                self.offsets.copy_(self.division.offsets[shard])
            self.stream.copy_(torch.stack([seed_of_shard(self.position[0], shard), self.position[1]]))
            self._restore_statistics()
            binding = self.session.bound(part, rows)
            self.ran.add(binding.executable)
            try:
                return self._run(binding, arrays if more is None else arrays | more())
            except ExecutionError:
                self.session.require_indices(self.division.batch, self.feeds)  # an error names a row of the batch
                raise
        except Exception as error:  # whatever it is, it must not leave the other ranks waiting
            self.failure = error
            return None

    def _keep(self, found: Arrays | None, shard: int) -> None:
        """Adds the small numbers of a shard, and keeps its rows of results."""
        if found is None:
            self.numbers.add((0, shard), None)
            return
        losses, rows = [found[key] for key in self.division.losses], self.division.rows(shard)
        self.numbers.add((0, shard), [weighted(losses, [*self.statistics.values()], self.shares[shard], rows)])
        self._keep_rows(found)

    def _keep_rows(self, found: Arrays) -> None:
        for key, arrays_of_key in self.rows.items():
            arrays_of_key.append(found[key].clone())

    def _run(self, binding: Any, arrays: Arrays) -> Arrays:
        found = self.session.run(binding, arrays, self.options, self.execution)
        if self.execution.profile is not None:
            self.profiles.append(self.execution.profile)
        return found

    def losses(self, numbers: torch.Tensor) -> Arrays:
        """The losses that are one number, of the whole batch."""
        if self.agreed is not None:
            numbers = torch.where(self.agreed, numbers[: len(self.division.losses)], torch.nan)
        found, single = dict(zip(self.division.losses, numbers, strict=False)), self.division.single
        return {key: found[key].to(like.dtype).reshape(like.shape) for key, like in single.items()}

    def store_statistics(self, numbers: torch.Tensor) -> None:
        """Sets statistics to the mean over the rows of all shards, and moves the random stream on."""
        counts = [array.numel() for array in self.statistics.values()]
        means = (numbers[len(self.division.losses) :] / self.division.batch).split(counts)
        for (key, array), mean in zip(self.statistics.items(), means, strict=True):
            new = mean.view(array.shape)
            array.copy_(new if self.agreed is None else torch.where(self.agreed, new, self.before[key]))
        self.stream.copy_(self.position)
        if STREAM in self.division.part.written:
            self.stream[1].add_(1 if self.agreed is None else self.agreed[0])
        self.factors.fill_(1)

    def update(self, totals: Mapping[Tensor, torch.Tensor]) -> bool:
        """Updates the parameters with the gradients of all shards; returns whether that counts as a step."""
        binding = self.session.bound(PartName.UPDATE, self.division.rows(0))
        key = gradient if binding.executable.step.ownership is None else piece
        self._run(binding, {key(tensor): array for tensor, array in totals.items()})
        if self.profiles:
            self.execution.profile = Profile.sum_of(self.profiles)
        return binding.executable.counts_steps

    @property
    def executables(self) -> list[Executable]:
        """What this rank runs in an update like this one."""
        return [*self.ran, self.session.bound(PartName.UPDATE, self.division.rows(0)).executable]

    def copies(self) -> Arrays:
        """Copies of everything that the update changes."""
        binding = self.session.bound(PartName.UPDATE, self.division.rows(0))
        persistent = self.session.arrays()
        return {key: persistent[key].clone() for key in binding.executable.part.written}

    def put_back(self, copies: Arrays) -> None:
        """Undoes an update."""
        persistent = self.session.arrays()
        for key, array in copies.items():
            persistent[key].copy_(array)
        writes.note()

    def roll_back(self) -> None:
        """Continues from before the call."""
        self._restore_statistics()
        self.stream.copy_(self.position)
        self.factors.fill_(1)

    def _restore_statistics(self) -> None:
        for key, array in self.statistics.items():
            array.copy_(self.before[key])

    def _cut(self, shard: int) -> Arrays:
        """The rows of a shard; what has no rows is passed whole."""
        return {key: self._rows(key.owner, array, shard) for key, array in self.feeds.items()}

    def _rows(self, tensor: Tensor, array: torch.Tensor, shard: int) -> torch.Tensor:
        if not self.session.compilation.feeds.is_batched(tensor):
            return array
        start, stop = self.division.spans[shard]
        times = array.shape[0] // self.division.batch
        return array[start * times : stop * times]

    def _given(self, arrays: Arrays, tensor: Tensor) -> torch.Tensor:
        """The labels of a shard, to be counted."""
        found = arrays.get(value(tensor))
        if found is not None:
            return found
        if tensor in {made for node in self.session.compilation.nodes for made in node.results}:
            problem = f"{tensor!r} is computed by a layer, so that its labels cannot be counted before a shard runs"
            raise StateError("execute", problem, fix="pass the labels as data, or compile without parallel")
        return tensor.torch()


@lru_cache(maxsize=16)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, count + 1, dtype=torch.float64, device=device)


@lru_cache(maxsize=16)
def _header(failed: bool, rows: int, notes: int, readiness: float, device: torch.device) -> torch.Tensor:
    """A header without its sample and notes; copying one to a GPU in every step would wait for it."""
    numbers = {"failed": nan if failed else 0, "rows": rows, "readiness": readiness}
    return torch.tensor([*(numbers.get(name, 0.0) for name in HEADER), *[0.0] * notes], dtype=DTYPE, device=device)
