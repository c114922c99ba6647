"""The lifetime of every buffer: the memory that a step needs, known before the first one runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from torch import fx

from stepgraph import draw
from stepgraph.compiler.program import Part, PartName, Phase, fakes, notes, storage, storages
from stepgraph.compiler.step import Step
from stepgraph.system import torch_private
from stepgraph.tensors.tensor import Tensor

Timeline = list[tuple[str, Phase, dict[str, int]]]  # by operator: its layer, its phase, live bytes by kind
_KINDS = {Phase.FORWARD: "activations", Phase.GRADIENT: "gradients"}


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes that a compiled graph needs.

    `activations`, `gradients` and `workspace` are the live bytes at the peak; parameters (with their copies in the
    compute type), optimizer state and statistics live as long as the graph. `timeline` has the live bytes of
    intermediates at each operator, with its layer and phase.
    """

    parameters: int = 0
    optimizer_state: int = 0
    statistics: int = 0
    activations: int = 0
    gradients: int = 0
    workspace: int = 0
    timeline: tuple[tuple[str, str, int], ...] = field(default=(), repr=False)

    @property
    def intermediates(self) -> int:
        """The peak of everything that is allocated and freed within a step."""
        return self.activations + self.gradients + self.workspace

    @property
    def device_memory_size(self) -> int:
        """Intermediates and optimizer state."""
        return self.intermediates + self.optimizer_state

    @property
    def total(self) -> int:
        """Everything."""
        return self.device_memory_size + self.parameters + self.statistics

    def __str__(self) -> str:
        rows = {
            "parameters": self.parameters,
            "optimizer state": self.optimizer_state,
            "running statistics": self.statistics,
            "activations at peak": self.activations,
            "gradients at peak": self.gradients,
            "workspace at peak": self.workspace,
            "total": self.total,
        }
        return "\n".join(["Memory plan", *(f"  {name:<20}{draw.size(size):>12}" for name, size in rows.items())])


def plan(step: Step, part: Part, live: Timeline | None = None) -> MemoryPlan:
    """The plan of a part that runs as a whole.

    Args:
        step: what it computes.
        part: the part.
        live: what it allocates if it does not run operator by operator.
    """
    live = timeline(part) if live is None else live
    peak = max(range(len(live)), key=lambda i: sum(live[i][2].values()), default=None)
    at_peak = live[peak][2] if peak is not None else {}
    learns = step.optimizer is not None and step.differentiates
    shards = step.shards.bit_length() if learns else 0  # sums of gradients that are kept at once, see `shards.py`
    sums = shards * sum(t.descriptor.tensor_allocation_size_in_bytes for t in step.trainable)
    rounded = sum(t.descriptor.element_count for t in step.rounded) * 2  # bytes of half precision
    seeds = sum(t.descriptor.tensor_allocation_size_in_bytes for t in step.seeded)
    learned = {t for node in step.nodes for t in node.layer.parameters.values()} | set(step.trainable)
    return MemoryPlan(
        parameters=sum(t.descriptor.tensor_allocation_size_in_bytes for t in learned) + rounded,
        optimizer_state=optimizer_state(step) if learns else 0,
        statistics=sum(t.descriptor.tensor_allocation_size_in_bytes for t in step.statistics),
        activations=at_peak.get("activations", 0),
        gradients=at_peak.get("gradients", 0) + seeds + sums,
        workspace=at_peak.get("workspace", 0),
        timeline=tuple((layer, phase, sum(kinds.values()) + seeds + sums) for layer, phase, kinds in live),
    )


def optimizer_state(step: Step) -> int:
    """Bytes of optimizer buffers and averages on this rank."""
    return sum(_state(step, tensor) for tensor in step.trainable)


def _state(step: Step, tensor: Tensor) -> int:
    """Bytes of a parameter's optimizer buffers and average on this rank."""
    count = len(step.slots_of(tensor)) + step.averages
    return prod(step.state_shape(tensor)) * count * tensor.data_type.torch.itemsize


def plan_passes(step: Step, parts: Mapping[PartName, Part]) -> MemoryPlan:
    """The plan of a step that runs in several parts: that of the largest, including what the others leave behind.

    The results of the forward pass stay readable until the next one, and gradients during both: passes that
    accumulate add to them.
    """
    results, gradients = left_behind(parts[PartName.FORWARD]), left_behind(parts[PartName.GRADIENT])
    found = []
    for name, part in parts.items():
        own = plan(step, part)
        earlier = 0 if name == PartName.FORWARD else results
        more = replace(own, activations=own.activations + earlier, gradients=own.gradients + gradients)
        found.append(more)
    return max(found, key=lambda one: one.total)


def plan_accumulating(step: Step, parts: Mapping[PartName, Part]) -> MemoryPlan:
    """The plan of an update of several batches: of the forward and gradient pass of one, or of the update.

    Meanwhile the sums of the gradients are kept.
    """
    sums = sum(t.descriptor.tensor_allocation_size_in_bytes for t in step.trainable)
    found = []
    for name, part in parts.items():
        own, earlier = plan(step, part), left_behind(parts[PartName.SHARD]) if name == PartName.UPDATE else 0
        found.append(replace(own, gradients=own.gradients + sums + earlier))
    return max(found, key=lambda one: one.total)


def left_behind(part: Part) -> int:
    """Bytes of what is still alive when a part has run."""
    (births, deaths), last = lifetimes(part), len(part.module.graph.nodes) - 1
    return sum(size for one, (_, size, _) in births.items() if deaths[one] == last)


def peak(part: Part) -> int:
    """The peak bytes of intermediates."""
    return max((sum(kinds.values()) for _, _, kinds in timeline(part)), default=0)


def alive_at_peak(part: Part) -> set[int]:
    """The storages that are alive when a part needs the most memory."""
    births, deaths = lifetimes(part)
    changes: dict[int, int] = defaultdict(int)
    for one, (birth, size, _) in births.items():
        changes[birth] += size
        changes[deaths[one] + 1] -= size
    live = most = peak = 0
    for time in range(len(part.module.graph.nodes)):
        live += changes[time]
        if live > most:
            most, peak = live, time
    return {one for one, (birth, *_) in births.items() if birth <= peak <= deaths[one]}


def holders(part: Part, time: int) -> list[tuple[str, str, str, int]]:
    """What is alive at an operator, counted as in `timeline`: the layer and phase that created it, kind, bytes."""
    nodes = list(part.module.graph.nodes)
    now = nodes.index(part.nodes[time])
    births, deaths = lifetimes(part)
    found: dict[tuple[str, str, str], int] = defaultdict(int)
    for one, (birth, size, kind) in births.items():
        if birth <= now <= deaths[one]:
            kind = "workspace" if deaths[one] == birth else kind
            found[notes(nodes[birth]).layer, notes(nodes[birth]).phase, kind] += size
    if idle := part.held - _used(part, now):
        found["held for other results", "", "workspace"] += idle
    if inside := notes(nodes[now]).workspace:
        found[notes(nodes[now]).layer, notes(nodes[now]).phase, "workspace"] += inside
    return sorted(((*made, size) for made, size in found.items()), key=lambda row: -row[3])


def _used(part: Part, now: int) -> int:
    """Bytes of the arena that are in use."""
    nodes, (births, deaths) = list(part.module.graph.nodes), lifetimes(part)
    alive = ((one, birth, size) for one, (birth, size, _) in births.items() if birth <= now <= deaths[one])
    return sum(size for one, birth, size in alive if is_held(one, nodes[birth]))


def is_held(one: int, node: fx.Node) -> bool:
    """Whether a storage that an operator creates is in the arena (see `held.py`)."""
    return one in notes(node).offsets


def lifetimes(part: Part) -> tuple[dict[int, tuple[int, int, str]], dict[int, int]]:
    """By storage: the operator that creates it, its size and kind; and the last operator that reads it."""
    nodes = list(part.module.graph.nodes)
    entering = {storage(node) for node in nodes if node.op == "placeholder"}
    births: dict[int, tuple[int, int, str]] = {}
    deaths: dict[int, int] = {}
    same: dict[int, int] = {}  # the memory that an in-place operator writes its result into
    for time, node in enumerate(nodes):
        for used in node.all_input_nodes:
            for one in storages(used):
                deaths[same.get(one, one)] = time
        if notes(node).in_place:
            (former,) = storages(node.args[0])
            same[storages(node)[0]] = same.get(former, former)
        if node.op == "call_function":
            for one, size in sizes(node).items():
                if one not in entering and one not in births and one not in same:
                    births[one] = (time, size, kind_of(notes(node).phase))
                    deaths[one] = time
    return births, deaths


def timeline(part: Part) -> Timeline:
    """Live bytes by kind at each operator. Unused bytes of the arena count as workspace."""
    nodes = list(part.module.graph.nodes)
    births, deaths = lifetimes(part)
    changes: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for one, (birth, size, kind) in births.items():
        kind = "workspace" if deaths[one] == birth else kind
        for time, change in ((birth, size), (deaths[one] + 1, -size)):
            changes[time][kind] += change
            changes[time]["workspace"] -= change if is_held(one, nodes[birth]) else 0
    live: dict[str, int] = defaultdict(int, workspace=part.held)
    found = []
    for time, node in enumerate(nodes):
        for kind, size in changes[time].items():
            live[kind] += size
        if node.op == "call_function":
            inside = {"workspace": live["workspace"] + notes(node).workspace}
            found.append((notes(node).layer, notes(node).phase, {**live, **inside}))
    return found


def kind_of(phase: Phase) -> str:
    """What results of a phase count as."""
    return _KINDS.get(phase, "workspace")


def sizes(node: fx.Node) -> dict[int, int]:
    """Bytes of the memory behind each of an operator's results."""
    return {torch_private.identity(array.untyped_storage()): array.untyped_storage().nbytes() for array in fakes(node)}
