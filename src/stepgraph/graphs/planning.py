"""Plans of graphs that need not be compiled, for worlds that need not exist: traced, never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from operator import attrgetter
from typing import Any

from stepgraph.compiler.ranks.parallel import Parallel
from stepgraph.compiler.ranks.plan import RankPlan, Shard, rank_plan
from stepgraph.compiler.settings import SAME_DEVICE, ChosenDevice, Settings, chosen, divisible, limited, mixed
from stepgraph.compiler.step import Key
from stepgraph.device import Device
from stepgraph.errors import ArgumentError, StateError
from stepgraph.graphs.compilation import Compilation, compiled
from stepgraph.runtime.declaration import Declaration
from stepgraph.runtime.world import ALONE
from stepgraph.tensors.tensor import Tensor

_Asked = tuple[Declaration, Device, Settings, int]


@dataclass
class Plans:
    """The shards that were planned last, so that a plan for another number of ranks traces nothing."""

    _asked: _Asked | None = None
    _shards: dict[int, Shard] = field(default_factory=dict)  # by rows: those of a batch have at most two sizes

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
        if parallel.shards < int(ranks):
            problem = f"{parallel.shards} shards cannot be divided among {ranks} ranks"
            raise ArgumentError(where, problem, fix=f"use at least {ranks} shards, or fewer ranks")
        rows = to_plan.batch_size(batch)
        largest, least = to_plan.rows_at_once(rows), rows // parallel.shards
        shards = self._recorded(to_plan, [largest, least] if 0 < least < largest else [largest])
        # A smaller shard may need more: what it holds between updates depends on sizes.
        return max((rank_plan(one, parallel, largest, int(ranks)) for one in shards), key=attrgetter("total"))

    def _recorded(self, to_plan: Compilation, sizes: Sequence[int]) -> list[Shard]:
        settings = to_plan.settings
        several = settings.parallel is not None and settings.parallel.shards > 1
        if several and settings.memory_limit is None:  # otherwise, what is recomputed depends on the number of shards
            settings = replace(settings, parallel=Parallel(shards=2))
        asked = to_plan.declaration, to_plan.device, settings, Tensor.switches
        if asked != self._asked or not self._shards.keys() >= {*sizes}:
            self._asked, self._shards = asked, {rows: _recorded(to_plan, rows) for rows in sizes}
        return [self._shards[rows] for rows in sizes]


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
    where = f"{declaration.kind}.memory_plan_for"
    if device is SAME_DEVICE and before is None:
        raise StateError(where, "the graph is not compiled, and no device is given", fix='pass device="cpu"')
    place = chosen(where, device, before)
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


def _recorded(to_plan: Compilation, rows: int) -> Shard:
    """Traces one shard."""
    step, part = to_plan.traced_again().programs.shard(rows)
    return Shard(replace(step, ownership=None), part)
