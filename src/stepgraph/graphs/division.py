"""How the batches of one size are divided into shards, and what becomes of their results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from stepgraph.compiler.passes.exchange import gradient_buckets, title
from stepgraph.compiler.program import Part, PartName
from stepgraph.compiler.ranks.news import Layout, layout
from stepgraph.compiler.ranks.shards import spans
from stepgraph.compiler.step import STREAM, Key, Step, value
from stepgraph.errors import StateError
from stepgraph.graphs.compilation import Compilation
from stepgraph.graphs.telling import Telling
from stepgraph.layers.node import Node
from stepgraph.random import seed_of_shard
from stepgraph.runtime.amounts import counts_labels, reduction
from stepgraph.runtime.exchange import Bucket
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import ReductionType


@dataclass(frozen=True)
class Division:
    """How batches of one size are divided.

    Args:
        spans: the rows of each shard that has any.
        part: what a shard runs, for as many rows as the first one has.
        losses: the losses, in order.
        shapes: the shapes of results that are joined from those of all shards, row by row.
        shares: the share of each shard in each loss, if the number of rows decides it.
        buckets: the gradients that are exchanged.
        news: what ranks tell each other about a shard.
        offsets: by shard, how many elements of each tensor whose indices it checks are in front of it.
        salts: by shard, what its random stream differs by from that of the whole batch.
    """

    spans: list[tuple[int, int]]
    part: Part
    losses: tuple[Key, ...]
    shapes: Mapping[Key, tuple[int, ...]]
    shares: tuple[torch.Tensor, ...] | None
    buckets: tuple[Bucket, ...]
    news: Layout
    offsets: tuple[torch.Tensor, ...]
    salts: tuple[torch.Tensor, ...]

    @cached_property
    def is_whole(self) -> bool:
        """Whether one shard has all rows, so that the factors of its losses are 1, and nothing is in front of it."""
        return len(self.spans) == 1 and self.shares is not None

    @cached_property
    def draws(self) -> bool:
        """Whether a shard draws random numbers."""
        return STREAM in self.part.written

    @cached_property
    def telling(self) -> Telling:
        """What a rank tells the others in an update."""
        return Telling(self.news, self.batch, self.salts[0].device)

    @cached_property
    def single(self) -> dict[Key, torch.Tensor]:
        """The losses that are one number, as arrays without memory."""
        likes = self.part.results
        return {key: likes[key] for key in self.losses if key not in self.shapes}

    @cached_property
    def joined(self) -> dict[Key, torch.Tensor]:
        """What a shard has of the results that are joined, as arrays without memory."""
        likes = self.part.results
        return {key: likes[key] for key in self.shapes}

    @cached_property
    def results(self) -> tuple[tuple[Tensor, Key], ...]:
        """What stays readable after an update."""
        return tuple((key.owner, key) for key in (*self.single, *self.shapes))

    @property
    def batch(self) -> int:
        """The rows of the batch."""
        return self.spans[-1][1]

    def rows(self, shard: int) -> int:
        """The rows of a shard; 0 if there are fewer rows than shards."""
        start, stop = self.spans[shard] if shard < len(self.spans) else (0, 0)
        return stop - start


def divided(compiled: Compilation, batch: int, shards: int) -> Division:
    """The division of batches of one size."""
    pieces = spans(batch, shards)
    rows = pieces[0][1]
    executable = compiled.programs.executable(PartName.SHARD, rows)
    part, losses = executable.part, tuple(value(node.results[0]) for node in compiled.losses)
    whole, likes = compiled.step(batch, True).descriptors, part.results
    shapes = {}
    for tensor in dict.fromkeys((*_wanted(compiled), *compiled.declaration.optional_outputs)):
        key, shape = value(tensor), whole[tensor].shape if tensor in whole else ()
        if key in losses and math.prod(shape) == 1:
            continue
        if key not in likes or not _has_rows(shape, tuple(likes[key].shape), batch, rows):
            if tensor in compiled.declaration.named_only:
                continue
            problem = f"{tensor!r} does not have a row per row of the batch, so that shards could not be joined"
            raise StateError("execute", problem, fix="leave it out of the outputs, or compile without parallel")
        shapes[key] = shape
    fixed, step = _fixed_shares(compiled, pieces), executable.step
    told, offsets = layout(part, step), _offsets(compiled, step, pieces)
    salts = torch.tensor([[seed_of_shard(0, shard), 0] for shard in range(len(pieces))], device=compiled.device.torch)
    return Division(pieces, part, losses, shapes, fixed, _buckets(part, step), told, offsets, salts.unbind())


def _offsets(compiled: Compilation, step: Step, pieces: list[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
    """How many elements of each guarded tensor are in front of each shard; what has no rows is passed whole."""
    rows = pieces[0][1]
    batched = {tensor for tensor in step.guarded if tensor not in step.fed or compiled.feeds.is_batched(tensor)}
    each = [step.descriptors[one].element_count // rows if one in batched else 0 for one in step.guarded]
    found = [[start * count for count in each] for start, _ in pieces]
    return torch.tensor(found, dtype=torch.int64, device=compiled.device.torch).unbind()


def _buckets(part: Part, step: Step) -> tuple[Bucket, ...]:
    """The gradients that are exchanged together, those that become complete first in front."""
    slices = None if step.ownership is None else step.ownership.slices
    found = gradient_buckets(part, step)
    return tuple(Bucket(one, slices, title(index, one, step)) for index, one in enumerate(found))


def _fixed_shares(compiled: Compilation, pieces: list[tuple[int, int]]) -> tuple[torch.Tensor, ...] | None:
    """By shard, its share in each loss, if rows decide it."""
    losses = compiled.losses
    if any(map(counts_labels, losses)):
        return None
    return shares([[stop - start] * len(losses) for start, stop in pieces], losses, compiled.device.torch).unbind()


def _has_rows(whole: tuple[int, ...], shard: tuple[int, ...], batch: int, rows: int) -> bool:
    """Whether a result has as many rows for a whole batch as its shards have together."""
    if not whole or not shard or whole[0] % batch:
        return False
    return whole[0] * rows == shard[0] * batch and whole[1:] == shard[1:]


def _wanted(compiled: Compilation) -> list[Tensor]:
    """Results that stay readable after an update: losses, outputs, and predictions that somebody has asked for."""
    asked = compiled.compared if compiled.declaration.keeps_predictions else ()
    losses = [node.results[0] for node in compiled.losses]
    return list(dict.fromkeys([*losses, *compiled.declaration.kept_outputs, *asked]))


def shares(amounts: list[list[Any]], losses: tuple[Node, ...], device: torch.device) -> torch.Tensor:
    """The share of each shard in each loss, as `[shard, loss]`; 1 for losses that are sums.

    Args:
        amounts: by shard and loss, what a mean divides by.
        losses: the losses.
        device: where the shares are.
    """
    counted = torch.stack([torch.stack([_number(one, device) for one in row]) for row in amounts])
    total = counted.sum(0)
    found = counted / torch.where(total == 0, 1, total)  # where nothing counts, there is nothing to divide
    means = _flags(tuple(reduction(node) is ReductionType.MEAN for node in losses), device)
    return torch.where(means, found, 1.0)


def _number(one: torch.Tensor | int, device: torch.device) -> torch.Tensor:
    """A number on the device; copying one there would make a GPU wait."""
    if isinstance(one, torch.Tensor):
        return one.to(device, torch.float64)
    return torch.full((), one, dtype=torch.float64, device=device)


@cache  # captured updates read it, so it must stay
def _flags(flags: tuple[bool, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(flags, device=device)
