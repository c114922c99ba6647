"""Plans of graphs that need not be compiled, for worlds that need not exist: traced, never run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from stepgraph.compiler import memory
from stepgraph.compiler.parallel import Parallel
from stepgraph.compiler.program import PartName
from stepgraph.compiler.rank_plan import RankPlan, Shard, rank_plan
from stepgraph.compiler.settings import ChosenDevice, Settings, chosen, divisible, limited, mixed
from stepgraph.compiler.step import Key, KeyKind
from stepgraph.device import Device
from stepgraph.errors import ArgumentError, StateError
from stepgraph.graphs.compilation import Compilation, compiled
from stepgraph.runtime.declaration import Declaration
from stepgraph.runtime.world import ALONE
from stepgraph.tensors.tensor import Tensor

_Asked = tuple[Declaration, Device, Settings, int]


@dataclass
class Plans:
    """What has been planned for a graph, so that a plan for another number of ranks traces nothing."""

    _asked: _Asked | None = None
    _shards: dict[int, Shard] = field(default_factory=dict)

    def of_rank(self, to_plan: Compilation, batch: Any, ranks: Any) -> RankPlan:
        """The plan of one of several ranks, the one that needs the most memory."""
        where = f"{to_plan.declaration.kind}.memory_plan_for"
        if isinstance(ranks, bool) or not isinstance(ranks, Integral) or ranks < 1:
            raise ArgumentError(where, f"ranks is {ranks!r}", fix="pass an integer ≥ 1")
        parallel = to_plan.settings.parallel
        if parallel is None:
            raise StateError(where, "nothing says how ranks divide a batch", fix=f"pass Parallel(shards={ranks})")
        if not to_plan.losses or to_plan.declaration.optimizer is None:
            missing = "optimizer" if to_plan.losses else "loss"
            raise StateError(where, f"the graph has no {missing}, so there is no update to divide", fix="add one")
        rows = to_plan.batch_size(batch)
        return rank_plan(self._shard(to_plan, to_plan.rows_at_once(rows)), parallel, rows, int(ranks))

    def _shard(self, to_plan: Compilation, rows: int) -> Shard:
        settings = to_plan.settings
        if settings.memory_limit is None:  # otherwise, what is recomputed depends on the number of shards
            settings = replace(settings, parallel=Parallel(shards=1))
        asked = to_plan.declaration, to_plan.device, settings, Tensor.switches
        if asked != self._asked:
            self._asked, self._shards = asked, {}
        if rows not in self._shards:
            self._shards[rows] = _shard(to_plan, rows)
        return self._shards[rows]


def to_plan(
    declaration: Declaration,
    now: Compilation | None,
    handles: Mapping[Key, Tensor],
    device: ChosenDevice,
    *,
    before: Device | None,
    compute_type: Any = None,
    memory_limit: Any = None,
    parallel: Any = None,
) -> Compilation:
    """The compilation of a graph, or one with other settings; its tensors need no data, and nothing is traced yet.

    Args:
        declaration: what is planned.
        now: how the graph is compiled, if it is; settings that are None are taken from there.
        handles: gradients that are read through tensors.
        device: the device to plan for.
        before: the device of the graph.
        compute_type: as in `compile`.
        memory_limit: as in `compile`.
        parallel: as in `compile`.
    """
    place = chosen(f"{declaration.kind}.memory_plan_for", device, before)
    settings = Settings.checked(Settings().options, None, None) if now is None else now.settings
    given: dict[str, Any] = {
        "compute_type": mixed(compute_type),
        "memory_limit": limited(memory_limit),
        "parallel": divisible(parallel, settings.options),
    }
    wanted = replace(settings, **{name: one for name, one in given.items() if one is not None})
    if now is not None and (place, wanted) == (now.device, now.settings):
        return now
    if now is not None:
        return replace(now, device=place, settings=wanted).among(ALONE)
    return compiled(declaration, place, wanted, {}, handles, [], needs_data=False).among(ALONE)


def _shard(to_plan: Compilation, rows: int) -> Shard:
    """Traces one shard; what was traced is not kept."""
    step, parts = to_plan.traced_again().programs.settled(PartName.SHARD, rows)
    part, optimizer = parts[PartName.SHARD], step.optimizer
    exchanged = [key.owner for key in part.outputs if key.kind == KeyKind.GRADIENT and key.owner in step.trainable_set]
    sizes = (tensor.descriptor.tensor_allocation_size_in_bytes for tensor in step.trainable)
    return Shard(
        replace(memory.plan(replace(step, shards=0), part), timeline=()),
        copies=sum(tensor.descriptor.element_count for tensor in step.rounded) * 2,  # bytes of half precision
        trained=step.trainable,
        exchanged=tuple(sorted(exchanged, key=lambda tensor: -step.first_use[tensor])),
        uncut=frozenset(t for t in step.trainable if optimizer is None or not optimizer.cuts(step.slots_of(t))),
        slots={tensor: len(step.slots_of(tensor)) for tensor in step.trainable},
        averages=sum(sizes) if step.averages else 0,
    )
