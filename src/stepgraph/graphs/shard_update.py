"""One update on one rank: its shards one after another, what they leave behind, and the update itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from stepgraph.compiler.program import PartName
from stepgraph.compiler.ranks import collectives
from stepgraph.compiler.ranks.news import tell_notes_, weighted
from stepgraph.compiler.ranks.shards import TreeSum
from stepgraph.compiler.step import (
    AGREED,
    HEARD,
    NEWS,
    NUMBERS,
    OFFSETS,
    REFUSED,
    SCALE,
    SHARE,
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
from stepgraph.graphs.telling import Telling
from stepgraph.graphs.update_graph import PartRows, UpdateGraph
from stepgraph.runtime.amounts import amount
from stepgraph.runtime.executable import Binding, Executable
from stepgraph.runtime.execution import Execution
from stepgraph.runtime.profile import Profile
from stepgraph.system import torch_private
from stepgraph.tensors import writes
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import ExecutionOptions


@dataclass
class Update:
    """One update on one rank.

    Args:
        captured: the graph that it becomes, if it is captured; then errors are raised at once, since no other rank
            waits for a capture.

    Attributes:
        gradients: the gradients of its shards, summed as far as possible; an array per bucket.
        numbers: what `losses` and `store_statistics` combine, in one float64 array per shard.
        rows: results of its shards that are joined.
        failure: the error of a shard that could not run.
        heard: what all ranks have told, if the last shard has exchanged it.
        agreed: whether the update counts, where the device decides it; None if it does.
        joins_as: the rows of the batch whose results other ranks join, if that is another; then this rank has none.
        used: what it has run, by part and rows.
    """

    session: Session
    division: Division
    feeds: Arrays
    options: ExecutionOptions
    execution: Execution
    shards: int
    captured: UpdateGraph | None = None
    gradients: TreeSum = field(init=False)
    numbers: TreeSum = field(init=False)
    rows: dict[Key, list[torch.Tensor]] = field(init=False)
    failure: Exception | None = None
    profiles: list[Profile] = field(default_factory=list)
    used: dict[PartRows, Binding] = field(default_factory=dict)
    heard: torch.Tensor | None = None
    agreed: torch.Tensor | None = None
    joins_as: int | None = None

    def __post_init__(self) -> None:
        self.gradients, self.numbers = TreeSum(self.shards), TreeSum(self.shards)
        self.rows = {key: [] for key in self.division.shapes}
        state = self.session.state
        assert state is not None
        self.stream, self.factors = state.arrays[STREAM], state.loss_factors
        self.notes, self.offsets = state.arrays.get(REFUSED), state.arrays.get(OFFSETS)
        self.statistics = {key: key.owner.array() for key in self.division.news.statistics}
        self.before = {key: array.clone() for key, array in self.statistics.items()}
        self.position = self.stream.clone() if self.division.draws else None
        numbers = (state.arrays[NUMBERS], state.arrays.get(SCALE), state.arrays.get(SHARE), self.position)
        # What must be the same on all ranks.
        self.compared = (*self.feeds.values(), *(one for one in numbers if one is not None))

    def header(self, readiness: float) -> torch.Tensor:
        """What this rank tells about itself, with its notes about indices."""
        telling = self._telling(readiness)
        if self.notes is None:
            return telling.header
        found = telling.header.clone()
        tell_notes_(found, self.notes)
        return found

    @cached_property
    def shares(self) -> Sequence[torch.Tensor]:
        """By shard, its share in each loss."""
        if self.division.shares is not None:
            return self.division.shares
        losses = self.session.compilation.losses
        cut = range(len(self.division.spans))
        amounts = [
            [amount(node, self.division.rows(s), partial(self._given, self._cut(s))) for node in losses] for s in cut
        ]
        return shares(amounts, losses, self.session.device.torch).unbind()

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
        """What this rank tells in its last shard, which adds its notes about indices."""
        telling = self._telling(readiness)
        telling.tell_shards(self.numbers, self.shares[shard])
        return telling.array

    def _telling(self, readiness: float) -> Telling:
        """What this rank tells, with its header."""
        telling = self.division.telling
        telling.tell_header(self.failure is not None, readiness, self.captured is not None, self.compared)
        return telling

    def _ran(self, part: PartName, shard: int, more: Callable[[], Arrays] | None = None) -> Arrays | None:
        """What a shard computes. An error is kept, for the other ranks must hear of it first."""
        rows, arrays = self.division.rows(shard), self._cut(shard)
        try:
            self._prepare(shard)
            binding = self._used(part, rows)
            try:
                return self._run(binding, arrays if more is None else arrays | more())
            except ExecutionError:
                self.session.require_indices(self.division.batch, self.feeds)  # an error names a row of the batch
                raise
        except Exception as error:  # whatever it is, it must not leave the other ranks waiting
            if self.captured is not None:
                raise
            self.failure = error
            return None

    def _prepare(self, shard: int) -> None:
        """Sets what a shard reads besides its rows, as far as it is not there already."""
        if not self.division.is_whole:
            self.factors.copy_(self.shares[shard])
        if self.offsets is not None and not self.division.is_whole:
            self.offsets.copy_(self.division.offsets[shard])
        if self.position is not None:
            torch.bitwise_xor(self.position, self.division.salts[shard], out=self.stream)
        if self.used:
            self._restore_statistics()

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

    def _bound(self, part: PartName, rows: int) -> Binding:
        return self.session.bound(part, rows) if self.captured is None else self.captured.used[part, rows]

    def _used(self, part: PartName, rows: int) -> Binding:
        binding = self.used[part, rows] = self._bound(part, rows)
        return binding

    def _run(self, binding: Binding, arrays: Arrays) -> Arrays:
        if self.captured is not None:
            return binding.executable.include(binding, arrays)
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
        if self.statistics:
            counts = [array.numel() for array in self.statistics.values()]
            means = (numbers[len(self.division.losses) :] / self.division.batch).split(counts)
            found = [mean.view(array.shape) for array, mean in zip(self.statistics.values(), means, strict=True)]
            if self.agreed is not None:
                pairs = zip(found, self.before.values(), strict=True)
                found = [torch.where(self.agreed, new, old) for new, old in pairs]
            torch_private.foreach_copy_([*self.statistics.values()], found)
        if self.position is not None:
            self.stream.copy_(self.position)
            self.stream[1].add_(1 if self.agreed is None else self.agreed[0])
        self._reset_factors()

    def update(self, totals: Mapping[Tensor, torch.Tensor]) -> bool:
        """Updates the parameters with the gradients of all shards; returns whether that counts as a step."""
        binding = self._used(PartName.UPDATE, self.division.rows(0))
        key = gradient if binding.executable.step.ownership is None else piece
        self._run(binding, {key(tensor): array for tensor, array in totals.items()})
        if self.profiles:
            self.execution.profile = Profile.sum_of(self.profiles)
        return binding.executable.counts_steps

    @property
    def executables(self) -> list[Executable]:
        """What this rank runs in an update like this one."""
        update = PartName.UPDATE, self.division.rows(0)
        return [one.executable for one in ({update: self._bound(*update)} | self.used).values()]

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
        if self.position is not None:
            self.stream.copy_(self.position)
        self._reset_factors()

    def _reset_factors(self) -> None:
        if not self.division.is_whole:
            self.factors.fill_(1)

    def _restore_statistics(self) -> None:
        if self.statistics:
            torch_private.foreach_copy_([*self.statistics.values()], [*self.before.values()])

    def _cut(self, shard: int) -> Arrays:
        """The rows of a shard; what has no rows is passed whole."""
        return {key: self._rows(key.owner, array, shard) for key, array in self.feeds.items()}

    def _rows(self, tensor: Tensor, array: torch.Tensor, shard: int) -> torch.Tensor:
        if not self.session.compilation.feeds.is_batched(tensor):
            return array
        start, stop = self.division.spans[shard]
        if stop - start == self.division.batch:
            return array
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
