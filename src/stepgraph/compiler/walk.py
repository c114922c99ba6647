"""One iteration in plain PyTorch: forward through the nodes, the reverse walk, the update. This is the reference.

The reverse walk is ours, the local derivative is autograd's: each node runs on detached sources, and on the reverse
walk autograd differentiates that one node. A node's source gradient is therefore its own contribution.

In mixed precision, layers compute in the step's compute type; parameters, statistics, losses and what a caller reads
keep their declared type. Casts are inside the differentiated node, so gradients have the type of the array they
belong to. Layers may read copies of parameters in the compute type, which the update writes (`Step.rounded`). In
float16 the reverse walk starts from a scaled loss, and an update is skipped if a gradient is not finite.

Where a step guards its indices (`guard.py`), it changes nothing if one of them is out of range.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import traceback

from stepgraph.compiler import guard, kernels
from stepgraph.compiler.lowering import lowered
from stepgraph.compiler.program import Phase, tag
from stepgraph.compiler.ranks import block_norms
from stepgraph.compiler.ranks.collectives import of_all_ranks, updated_
from stepgraph.compiler.step import (
    AGREED,
    NUMBERS,
    OFFSETS,
    REFUSED,
    SCALE,
    SEEDS,
    SHARE,
    STREAM,
    Fusion,
    Key,
    Step,
    average,
    gradient,
    layer_tensors,
    piece,
    rounded,
    source_gradient,
    state,
    user_gradient,
    value,
)
from stepgraph.errors import ExecutionError, StepgraphError, reason, shown_as
from stepgraph.layers.failures import explained
from stepgraph.layers.layer import Scope
from stepgraph.layers.node import Node
from stepgraph.optimizers import FROZEN, combined_norm
from stepgraph.system import torch_private
from stepgraph.tensors.tensor import Tensor

Arrays = dict[Key, torch.Tensor]

SMALL = 1 << 16  # elements below which a parameter waits to be updated with others
GROWTH_INTERVAL = 2000  # finite steps after which the loss scale is doubled
LEAST_SCALE, LARGEST_SCALE = 1.0, 2.0**24  # bounds of the scale: 0 and infinity would be permanent


def run(step: Step, arrays: Arrays) -> Arrays:
    """The whole iteration on arrays. Returns everything it computed; parameters and statistics change in place."""
    walk = _Walk(step, arrays)
    walk.guard((*step.feeds, *step.held))
    for index, node in enumerate(step.nodes):
        walk.forward(index, node)
    walk.store_updates()
    if step.differentiates:
        walk.seed()
        for index in reversed(range(len(step.nodes))):
            walk.backward(index, step.nodes[index])
        walk.finish()
    return walk.found


@dataclass
class _Visit:
    """What the reverse walk needs from one node's forward: the leaves to differentiate by, and its results."""

    sources: tuple[torch.Tensor, ...]
    parameters: dict[Tensor, torch.Tensor]
    results: tuple[torch.Tensor, ...]


@dataclass
class _Walk:
    """The state of one run: values so far, incomplete gradients, and what a caller can read."""

    step: Step
    arrays: Arrays
    found: Arrays = field(default_factory=dict)
    values: dict[Tensor, torch.Tensor] = field(default_factory=dict)
    visits: list[_Visit] = field(default_factory=list)
    open: dict[Tensor, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    updates: dict[Tensor, torch.Tensor] = field(default_factory=dict)
    waiting: list[Tensor] = field(default_factory=list)
    claimed: set[int] = field(default_factory=set)
    named: dict[int, SimpleNamespace] = field(default_factory=dict)
    rules: kernels.Rules = field(default_factory=dict)
    changes: dict[int, torch.Tensor] = field(default_factory=dict)
    complete: list[Tensor] = field(default_factory=list)
    drew: bool = False
    notes: dict[Tensor, torch.Tensor] = field(default_factory=dict)
    accepted: torch.Tensor | None = None

    # Forward

    def guard(self, tensors: Iterable[Tensor]) -> None:
        """Replaces indices out of range, and notes the first one of each tensor."""
        for tensor in (one for one in self.step.guarded if one in tensors):
            with _tagged("indices", Phase.FORWARD):
                indices = self._value(tensor)
                self.values[tensor] = guard.clamped(indices, self.step.guarded[tensor])
                self.notes[tensor] = guard.noted(indices, self.values[tensor])

    def forward(self, index: int, node: Node) -> None:
        step = self.step
        sources = tuple(self._leaf(t, t in step.active and t not in node.labels) for t in node.arguments)
        by_parameter = set(step.differentiated(node)) if step.training else set()
        computed = step.compute_type_of(node)
        rounds = computed is step.compute_type
        own = {t: self._leaf(t, t in by_parameter and t not in step.stopped, rounds) for t in layer_tensors(node)}
        with self._tag(node, Phase.FORWARD):
            statistics = set(node.layer.statistics.values())
            # A statistic changes when the forward pass ends; the gradient may need its current value.
            keep = step.differentiates
            cast = {
                t: (array.clone() if keep else array) if t in statistics else _as(array, computed)
                for t, array in own.items()
            }
            scope = Scope(
                cast,
                step.training,
                self.arrays[STREAM],
                index,
                step.batch,
                compute_type=step.compute_type,
                shards=step.shards,
            )
            forward = lowered(step, node.layer, partial(_called, node), sources)
            with shown_as(node.layer.label, partial(step.name, node.layer)):
                results = forward([_as(source, computed) for source in sources], scope)
            results = tuple(
                one if node.is_loss or node.layer.keeps_type(position, one) else _as(one, step.compute_type)
                for position, one in enumerate(results)
            )
            self.drew |= scope.drew
            for tensor, new in scope.updates.items():
                self.values[tensor] = self.updates[tensor] = new.reshape(tensor.shape)
            for tensor, array in zip(node.results, results, strict=True):
                self.values[tensor] = array.detach()
                self.found[value(tensor)] = _declared(self.values[tensor], tensor)
        self.visits.append(_Visit(sources, {t: own[t] for t in own if own[t].requires_grad}, results))
        self.guard(node.results)

    def store_updates(self) -> None:
        """Stores statistics once every layer has run: a forward pass that fails does not change them."""
        accepted = self._store_notes()
        for tensor, new in self.updates.items():
            with _tagged(self.step.names.get(tensor, "statistics"), Phase.FORWARD):
                array = self.arrays[value(tensor)]
                if self.step.scales_loss and new.is_floating_point():  # such a batch makes no update either
                    new = torch.where(new.isfinite(), new, array)
                array.copy_(new if accepted is None else torch.where(accepted, new, array))
            del self.values[tensor]
        if self.drew:
            with _tagged("random stream", Phase.FORWARD):
                self.arrays[STREAM][1].add_(1 if accepted is None else accepted)

    def _store_notes(self) -> torch.Tensor | None:
        """Keeps what was noted about indices; returns whether the call is accepted, None if nothing can refuse it."""
        if not self.notes:
            return None
        with _tagged("indices", Phase.FORWARD):
            every = [self.notes[tensor] for tensor in self.step.guarded]
            found = torch.cat(every) if len(every) > 1 else every[0]
            if self.step.shards:
                found = guard.moved(found, self.arrays[OFFSETS])
            notes = guard.kept(self.arrays[REFUSED], found)
            accepted = guard.accepts(notes)
            for key in (value(node.results[0]) for node in self.step.losses):
                self.found[key] = torch.where(accepted, self.found[key], torch.nan)
            self.arrays[REFUSED].copy_(notes)
        return accepted

    def _value(self, tensor: Tensor) -> torch.Tensor:
        return self.values[tensor] if tensor in self.values else self.arrays[value(tensor)]

    def _leaf(self, tensor: Tensor, differentiable: bool, rounds: bool = False) -> torch.Tensor:
        copied = rounds and tensor in self.step.rounded_set
        leaf = (self.arrays[rounded(tensor)] if copied else self._value(tensor)).detach()
        return leaf.requires_grad_() if differentiable and self.step.differentiates else leaf

    # Gradient

    def seed(self) -> None:
        """Starts the reverse walk: one for each loss value, and gradients from outside."""
        for index, node in enumerate(self.step.losses):
            with self._tag(node, Phase.GRADIENT):
                loss = self._value(node.results[0])
                seed = torch.full(loss.shape, 1.0, dtype=loss.dtype, device=loss.device)
                if self.step.seeds_losses:
                    seed = seed * self.arrays[SEEDS][index].to(seed.dtype)
                self.open[node.results[0]].append(self._scaled(seed))
        for tensor in self.step.seeded:
            self.claimed.add(torch_private.identity(self.arrays[user_gradient(tensor)].untyped_storage()))
            with _tagged("user gradient", Phase.GRADIENT):
                given = self._scaled(self.arrays[user_gradient(tensor)])
                self.open[tensor].append(given.to(self._value(tensor).dtype))

    def backward(self, index: int, node: Node) -> None:
        visit = self.visits[index]
        self.visits[index] = _Visit((), {}, ())  # the layer's own graph is not needed again
        with self._tag(node, Phase.GRADIENT):
            cotangents = {i: self._total(t) for i, t in enumerate(node.results) if t in self.open}
            reached = [i for i in cotangents if visit.results[i].requires_grad]
            if reached:
                self._differentiate(node, visit, reached, cotangents)
        for tensor in self._complete(index, node):
            self._total_parameter(tensor)

    def _differentiate(
        self, node: Node, visit: _Visit, reached: list[int], cotangents: dict[int, torch.Tensor]
    ) -> None:
        sources = {i: leaf for i, leaf in enumerate(visit.sources) if leaf.requires_grad}
        leaves = [*sources.values(), *visit.parameters.values()]
        try:
            derivatives = torch.autograd.grad(
                [visit.results[i] for i in reached], leaves, [cotangents[i] for i in reached], allow_unused=True
            )
        except RuntimeError as error:
            raise ExecutionError(node.where, f"it cannot be differentiated: {reason(error)}") from error
        for i, derivative in zip(sources, derivatives, strict=False):
            if derivative is not None:
                tensor = node.arguments[i]
                self.found[source_gradient(node, i)] = self._unscaled(_declared(derivative, tensor))
                self.open[tensor].append(derivative)
        for tensor, derivative in zip(visit.parameters, derivatives[len(sources) :], strict=True):
            if derivative is not None:
                self.open[tensor].append(_declared(derivative, tensor))

    def _total(self, tensor: Tensor) -> torch.Tensor:
        """The sum of all contributions, as the walk uses it; callers see it unscaled, in its declared type."""
        total, *others = self.open[tensor]
        for further in others:
            total = total + further
        self.found[gradient(tensor)] = self._unscaled(_declared(total, tensor))
        return total

    def _complete(self, index: int, node: Node) -> list[Tensor]:
        """Trainable tensors whose last contribution comes from this node."""
        first_use, trainable = self.step.first_use, self.step.trainable_set
        touched = dict.fromkeys((*node.sources, *layer_tensors(node)))
        last = [t for t in touched if t in trainable and first_use[t] == index]
        return [t for t in last if t in self.open or t in self.step.shared]

    def _scaled(self, array: torch.Tensor) -> torch.Tensor:
        return array * self.arrays[SCALE][0] if self.step.scales_loss else array

    def _unscaled(self, array: torch.Tensor) -> torch.Tensor:
        return array / self.arrays[SCALE][0] if self.step.scales_loss else array

    # Update

    def _total_parameter(self, tensor: Tensor) -> None:
        with _tagged(self.step.names.get(tensor, tensor.label), Phase.GRADIENT):
            if tensor not in self.open:  # its gradient comes entirely from linked graphs
                self.open[tensor].append(torch.zeros_like(self._value(tensor)))
            self._total(tensor)
            self._own(gradient(tensor))
            if self.step.shards:  # gradients are summed in buckets, element by element
                whole = self.found[gradient(tensor)] = self.found[gradient(tensor)].contiguous()
                if self.step.ownership is not None and tensor in self.step.owned:
                    self.found[piece(tensor)] = self.step.ownership.piece(whole, tensor).clone()
        if self.step.optimizer is None:
            return
        self.complete.append(tensor)
        # A large gradient is used immediately and freed; small ones are cheaper to update together, at the end.
        if self.step.updates_last or tensor.descriptor.element_count < SMALL:
            self.waiting.append(tensor)
        else:
            with _tagged("optimizer", Phase.UPDATE):
                allowed = self._allowed()
            self._update([tensor], allowed=allowed)

    def _own(self, key: Key) -> None:
        """Gives a trained gradient its own array if it shares one, with another or with the user: phases go by name."""
        memory = torch_private.identity(self.found[key].untyped_storage())
        if memory in self.claimed:
            self.found[key] = self.found[key].clone()
            memory = torch_private.identity(self.found[key].untyped_storage())
        self.claimed.add(memory)

    def finish(self) -> None:
        """Completes gradients of inputs, and performs deferred updates."""
        for tensor in (*self.step.feeds, *self.step.held):
            if tensor in self.open and gradient(tensor) not in self.found:
                with _tagged(self.step.names.get(tensor, tensor.label), Phase.GRADIENT):
                    self._total(tensor)
        optimizer = self.step.optimizer
        if optimizer is None or not any(gradient(t) in self.found for t in self.step.trainable):
            return
        with _tagged("optimizer", Phase.UPDATE):
            gradients = {t: self._learned(t) for t in self.waiting if t in self.step.owned}
            finite = self._finite(gradients) if self.step.scales_loss else None
            allowed = self._allowed(finite)
            norm = self._norm(gradients) if optimizer.needs_global_norm else None
        self._update(self.waiting, norm, allowed)
        if self.step.ownership is not None:
            self._follow_others()
        with _tagged("optimizer", Phase.UPDATE):
            numbers, column = self.arrays[NUMBERS], optimizer.columns.index("time_step")
            steps = numbers[:, column] if optimizer.groups else numbers[column]
            steps.add_(self._counted(allowed, None if gradients else norm))
            if finite is not None:
                _adapt(self.arrays[SCALE], finite, self._allowed())

    @staticmethod
    def _counted(allowed: torch.Tensor | None, unread: torch.Tensor | None) -> torch.Tensor | float:
        """What an update adds to the number of steps.

        Args:
            allowed: whether it may change anything; None if it may.
            unread: the norm of all gradients on a rank that updates nothing. Other ranks wait for its part in the
                exchange, which would be removed if nothing depended on it. A norm is not negative.
        """
        if unread is None:
            return 1.0 if allowed is None else allowed
        return (unread < 0) + 1.0 if allowed is None else allowed | (unread < 0)

    def _allowed(self, finite: torch.Tensor | None = None) -> torch.Tensor | None:
        """Whether an update may change anything: gradients are finite, no index was out of range, all ranks agree."""
        if not self.notes and not self.step.decides:
            return finite
        if self.accepted is None:
            # Read from where calls keep it: if passes run separately, any of several forward passes may have noted one.
            decides = self.step.decides
            self.accepted = self.arrays[AGREED][0] if decides else guard.accepts(self.arrays[REFUSED])
        return self.accepted if finite is None else self.accepted & finite

    def _finite(self, gradients: Mapping[Tensor, torch.Tensor]) -> torch.Tensor:
        """Whether all gradients that an update uses are finite."""
        each = {tensor: array.isfinite().all() for tensor, array in gradients.items()}
        if self.step.groups:
            each = {tensor: one | self._frozen(self.step.groups[tensor]) for tensor, one in each.items()}
        ranks = self.step.ownership
        if ranks is None:
            return torch.stack(list(each.values())).all()
        failed = [torch.zeros_like(self.arrays[SCALE][0]), *((~one).float() for one in each.values())]
        places = [edge for rank in range(ranks.size) for edge in (rank, rank + 1)]
        everywhere = of_all_ranks(torch.stack(failed).amax(0, keepdim=True), ranks.rank, ranks.size, places)
        return everywhere.sum() == 0

    def _norm(self, gradients: Mapping[Tensor, torch.Tensor]) -> torch.Tensor:
        """The norm of all gradients together, without those of groups that are frozen or not clipped."""
        if self.step.shards:
            each = block_norms.norms(gradients, self.waiting, self.step.ownership, self.arrays[NUMBERS])
        else:
            each = {tensor: torch.linalg.vector_norm(array) for tensor, array in gradients.items()}
        norms = []
        for tensor, norm in each.items():
            if self.step.groups:
                group = self.step.groups[tensor]
                counts = self._numbers(group).maximum_clipping_norm.isfinite() & ~self._frozen(group)
                norm = torch.where(counts, norm, torch.zeros_like(norm))
            norms.append(norm)
        return combined_norm(norms, self._numbers())

    def _learned(self, tensor: Tensor) -> torch.Tensor:
        """The gradient that this rank updates with."""
        return self.found[gradient(tensor) if self.step.ownership is None else piece(tensor)]

    def _follow_others(self) -> None:
        """What depends on whole parameters, of which other ranks have updated parts."""
        arrays, names = self.arrays, self.step.names
        with _tagged("optimizer", Phase.UPDATE), torch.no_grad():
            updated_([arrays[value(tensor)] for tensor in self.complete])
        for tensor in self.complete:
            with _tagged(names.get(tensor, tensor.label), Phase.UPDATE), torch.no_grad():
                if tensor in self.step.rounded_set:
                    arrays[rounded(tensor)].copy_(arrays[value(tensor)])

    def _update(
        self, tensors: Sequence[Tensor], norm: torch.Tensor | None = None, allowed: torch.Tensor | None = None
    ) -> None:
        """Updates parameters, those of one group and with the same buffers and copies together."""
        together: dict[Any, list[Tensor]] = defaultdict(list)
        for tensor in (one for one in tensors if one in self.step.owned):
            alike = self.step.slots_of(tensor), tensor in self.step.rounded_set
            together[self.step.groups.get(tensor, 0), alike].append(tensor)
        for (group, _), members in together.items():
            self._update_alike(members, group, norm, self._permitted(group, allowed))

    def _update_alike(
        self, tensors: Sequence[Tensor], group: int, norm: torch.Tensor | None, allowed: torch.Tensor | None
    ) -> None:
        optimizer = self.step.optimizer
        assert optimizer is not None
        name = self.step.names.get(tensors[0], tensors[0].label) if len(tensors) == 1 else "optimizer"
        ranks = self.step.ownership
        gradients = [self._learned(t) for t in tensors]
        states = [[self.arrays[state(t, i)] for t in tensors] for i in range(len(self.step.slots_of(tensors[0])))]
        copies = [self.arrays[rounded(t)] for t in tensors if t in self.step.rounded_set and ranks is None]
        # PyTorch's compiler fuses a few small updates with what precedes them; others have a kernel.
        few = len(self.step.trainable) <= kernels.MANY
        expanded = few and self.step.fusion is Fusion.FIRST and all(g.numel() < SMALL for g in gradients)
        with _tagged(name, Phase.UPDATE), torch.no_grad():
            parameters = [self.arrays[value(t)] for t in tensors]
            if ranks is not None:
                parameters = [ranks.piece(array, t) for array, t in zip(parameters, tensors, strict=True)]
            arrays = kernels.Update(parameters, gradients, states, self._row(group), copies, norm, allowed)
            kernels.update(optimizer, arrays, partial(self._numbers, group), expanded=expanded, known=self.rules)
            for tensor, parameter in zip(tensors, parameters, strict=True) if self.step.averages else ():
                self._average(tensor, parameter, allowed)

    def _average(self, tensor: Tensor, parameter: torch.Tensor, allowed: torch.Tensor | None) -> None:
        """Moves the average of what was updated of a parameter."""
        share = self.arrays[SHARE][0]
        share = share if allowed is None else share * allowed
        self.arrays[average(tensor)].lerp_(parameter, share.to(parameter.dtype))

    def _permitted(self, group: int, allowed: torch.Tensor | None) -> torch.Tensor | None:
        """Whether updates of a group may change anything, looked up once per run; `allowed` is the same for all."""
        assert self.step.optimizer is not None
        if not self.step.optimizer.groups:
            return allowed
        if group not in self.changes:
            with _tagged("optimizer", Phase.UPDATE):
                changes = ~self._frozen(group)
                self.changes[group] = changes if allowed is None else allowed & changes
        return self.changes[group]

    def _row(self, group: int) -> torch.Tensor:
        """The live numbers of a group."""
        assert self.step.optimizer is not None
        return self.arrays[NUMBERS][group] if self.step.optimizer.groups else self.arrays[NUMBERS]

    def _frozen(self, group: int) -> torch.Tensor:
        assert self.step.optimizer is not None
        return self._row(group)[self.step.optimizer.columns.index(FROZEN)] != 0

    def _numbers(self, group: int = 0) -> SimpleNamespace:
        """The hyperparameters of a group by name, looked up once per run."""
        assert self.step.optimizer is not None
        if group not in self.named:
            with _tagged("optimizer", Phase.UPDATE):
                self.named[group] = kernels.named(self.step.optimizer, self._row(group))
        return self.named[group]

    def _tag(self, node: Node, phase: Phase) -> Any:
        return _tagged(self.step.names.get(node.layer, node.layer.label), phase)


def _adapt(scale: torch.Tensor, finite: torch.Tensor, accepted: torch.Tensor | None = None) -> None:
    """Halves the loss scale after a skipped step, doubles it after many finite ones, within bounds.

    A step that is not `accepted` leaves it as it is.
    """
    current, good = scale.unbind()
    grown = good + 1 >= GROWTH_INTERVAL
    larger = torch.where(grown & (current < LARGEST_SCALE), current * 2, current)
    smaller = torch.where(current > LEAST_SCALE, current / 2, current)
    adapted = torch.stack(
        [
            torch.where(finite, larger, smaller),
            torch.where(finite & ~grown, good + 1, torch.zeros_like(good)),
        ]
    )
    scale.copy_(adapted if accepted is None else torch.where(accepted, adapted, scale))


def _as(array: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return array.to(dtype) if dtype is not None and array.is_floating_point() else array


def _declared(array: torch.Tensor, tensor: Tensor) -> torch.Tensor:
    return array.to(tensor.data_type.torch) if array.is_floating_point() else array


def _called(node: Node, sources: Sequence[torch.Tensor], scope: Scope) -> tuple[torch.Tensor, ...]:
    try:
        results = node.layer.forward(*sources, scope=scope)
    except StepgraphError:
        raise
    except Exception as error:  # whatever a layer's torch code raises, the error names the layer
        known = explained(node.where, node.layer.forward, error)
        if known is not None:
            raise known from error
        shapes = ", ".join(str(list(source.shape)) for source in sources)
        raise ExecutionError(node.where, f"its forward failed: {reason(error)}", sources=shapes) from error
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _tagged(layer: str, phase: Phase) -> Any:
    return traceback.annotate(tag(layer, phase))
