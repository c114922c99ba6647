"""Layers that need something of the whole batch, such as its mean: every rank must run exactly one shard of it."""

from __future__ import annotations

import torch

from stepgraph.compiler.program import Part, fake
from stepgraph.errors import ArgumentError, StateError
from stepgraph.graphs.compilation import Compilation
from stepgraph.layers import over_ranks
from stepgraph.layers.node import Node
from stepgraph.runtime.world import World


def require_one_shard_each(compiled: Compilation, world: World) -> None:
    """Rejects synchronized layers if ranks would run several shards, one after another, or none."""
    node, shards = _first(compiled), compiled.shards
    if node is not None and shards not in (1, world.size):
        problem = f"the layer is synchronized, but there are {shards} shards for {world.size} rank"
        raise StateError(
            node.where,
            problem + "s" * (world.size != 1),
            fix=f"use Parallel(shards={world.size}), start {shards} ranks with torchrun, or leave synchronized out",
        )


def require_rows(compiled: Compilation, batch: int) -> None:
    """Rejects, on every rank, a batch that leaves a rank without rows, for which the others would wait."""
    node = _first(compiled) if batch < compiled.shards else None
    if node is not None:
        problem = (
            f"a batch of {batch} rows leaves some of {compiled.shards} ranks without rows for a synchronized layer"
        )
        raise ArgumentError(node.where, problem, fix=f"pass at least {compiled.shards} rows")


def take_rest(part: Part) -> None:
    """Takes part in the sums that a failed shard has not reached, so that no other rank waits for them."""
    operator = torch.ops.stepgraph.sum_over_ranks.default
    over_ranks.take_rest([fake(node) for node in part.nodes if node.target is operator])


def sums(compiled: Compilation) -> bool:
    """Whether shards take sums over ranks."""
    return compiled.shards > 1 and _first(compiled) is not None


def _first(compiled: Compilation) -> Node | None:
    return next((node for node in compiled.nodes if node.layer.is_synchronized), None)
