"""One update of a training graph in shards: every rank runs its own ones, all make the same update.

A shard is a run of the part `shard`: forward and gradient of some rows, which changes no parameter. What shards leave
behind is summed over all of them, in a fixed order: gradients, each weighted by the rows or labels that count; losses;
the statistics of layers, which start from the same values in each shard. Then the part `update` runs, on every rank.
A rank that fails says so in the first exchange, so that no other waits for it and all continue from before the call.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from stepgraph.compiler import phases
from stepgraph.compiler.parallel import TREE, Parallel
from stepgraph.compiler.program import Part, PartName, Phase, Program, fake
from stepgraph.compiler.shards import TreeSum, most_nodes, own, spans
from stepgraph.compiler.step import STREAM, Key, KeyKind, Step, gradient, value
from stepgraph.errors import ArgumentError, ExecutionError, NumericsError, StateError
from stepgraph.graphs import synchronized
from stepgraph.graphs.compilation import Arrays, Compilation
from stepgraph.graphs.session import Answer, Session, announced
from stepgraph.layers import over_ranks
from stepgraph.layers.node import Node
from stepgraph.random import seed_of_shard
from stepgraph.runtime import exchange
from stepgraph.runtime.amounts import amount, counts_labels, reduction
from stepgraph.runtime.exchange import Buckets
from stepgraph.runtime.execution import Completion, Execution
from stepgraph.runtime.feeds import Data
from stepgraph.runtime.loss_slots import Total
from stepgraph.runtime.profile import Profile
from stepgraph.runtime.world import World
from stepgraph.system.interrupts import Uninterrupted
from stepgraph.tensors.extents import BatchExtent
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import ExecutionOptions, ReductionType

SAMPLE = 16  # elements of an array that ranks compare


def require_divisible(compiled: Compilation) -> None:
    """Rejects a graph whose batches cannot be cut into shards."""
    where, declared = f"{compiled.declaration.kind}.compile", compiled.declaration
    if not compiled.losses or declared.optimizer is None:
        missing = "optimizer" if compiled.losses else "loss"
        raise StateError(where, f"the graph has no {missing}, so there is no update to divide", fix=f"add a {missing}")
    if declared.user_gradients:
        owner = next(iter(declared.user_gradients))
        problem = f"{owner!r} takes a gradient from outside, which cannot be cut into shards"
        raise StateError(where, problem, fix="compile without parallel")
    for tensor in compiled.feeds.tensors:
        follows = [extent for extent in tensor.shape if isinstance(extent, BatchExtent)]
        if follows and (follows != [tensor.shape[0]] or follows[0].offset or follows[0].multiple.denominator > 1):
            problem = f"{compiled.feeds.titles[tensor]} has no rows that can be cut into shards: {list(tensor.shape)}"
            raise ArgumentError(where, problem, fix="make its first extent BATCH or a multiple, and no other")
    program = compiled.programs.outline(compiled.rows_at_once(compiled.feeds.batch))
    for key in phases.extract(program, {Phase.FORWARD}, []).written:
        if key.kind == KeyKind.VALUE and key.owner not in program.step.statistics:
            name = program.step.names.get(key.owner, key.owner.label)
            problem = f"the forward pass changes the parameter '{name}', which shards would do differently"
            raise StateError(where, problem, fix="leave maximum_norm out, or compile without parallel")


def digest(compiled: Compilation) -> str:
    """Identifies what a rank computes: its operators, shapes, settings and versions."""
    program = compiled.programs.outline(compiled.rows_at_once(compiled.feeds.batch))
    optimizer, settings = compiled.declaration.optimizer, compiled.settings
    assert optimizer is not None
    numbers = {name: one for name, one in optimizer.settings.items() if isinstance(one, int | float)}
    facts = [
        (sys.modules["stepgraph"].__version__, torch.__version__, compiled.device.torch.type),
        (int(settings.options), settings.compute_type, settings.parallel, compiled.feeds.batch),
        (optimizer.rule, sorted(numbers.items())),
        _signatures(program),
        program.module.graph,
    ]
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]


def _signatures(program: Program) -> list[tuple[str, Any, Any]]:
    return [(key.kind, tuple(fake(node).shape), fake(node).dtype) for key, node in program.inputs.items()]


def require_same(compiled: Compilation, world: World) -> None:
    """Rejects, on every rank, a rank that computes something else than the first one."""
    mine = digest(compiled)
    sent = torch.tensor(list(mine.encode()), dtype=torch.uint8, device=world.device)
    found = [bytes(one).decode() for one in world.gather(sent, "digests of programs")().tolist()]
    other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if other is not None:
        raise StateError(
            f"{compiled.declaration.kind}.compile",
            f"rank {other} has another program than rank 0",
            rank_0=found[0],
            **{f"rank_{other}": found[other]},
            fix="compile the same graph, with the same settings and versions, on every rank",
        )


@torch.inference_mode()
def share_state(session: Session, world: World) -> None:
    """Gives every rank the parameters, statistics, optimizer state and seed of the first one."""
    if world.size > 1:
        for array in session.arrays().values():
            array.copy_(world.share(array, "the first parameters"))


@dataclass(frozen=True)
class _Division:
    """How batches of one size are divided.

    Args:
        spans: the rows of each shard that has any.
        part: what a shard runs, for as many rows as the first one has.
        losses: the losses, in order.
        shapes: the shapes of results that are joined from those of all shards, row by row.
        shares: the share of each shard in each loss, if the number of rows decides it.
        buckets: the gradients that are exchanged.
    """

    spans: list[tuple[int, int]]
    part: Part
    losses: tuple[Key, ...]
    shapes: Mapping[Key, tuple[int, ...]]
    shares: torch.Tensor | None
    buckets: Buckets

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

    @cached_property
    def statistics(self) -> tuple[Key, ...]:
        """What a shard changes."""
        return tuple(key for key in self.part.written if key.kind == KeyKind.VALUE)

    @cached_property
    def size(self) -> int:
        """How many numbers a shard has for losses and statistics."""
        return len(self.single) + sum(key.owner.descriptor.element_count for key in self.statistics)

    @property
    def batch(self) -> int:
        """The rows of the batch."""
        return self.spans[-1][1]

    def rows(self, shard: int) -> int:
        """The rows of a shard."""
        start, stop = self.spans[shard]
        return stop - start


class Shards:
    """Runs the updates of a session in shards.

    Args:
        session: the state between calls.
        parallel: how updates are divided.
        world: the ranks that divide them among themselves.
    """

    def __init__(self, session: Session, parallel: Parallel, world: World) -> None:
        self.session, self.parallel, self.world = session, parallel, world
        self._divisions: dict[int, _Division] = {}
        self._compilation: Compilation | None = None  # for which the divisions were made
        self._totals: list[torch.Tensor] = []

    def execute(
        self,
        feeds: Arrays,
        batch: int,
        options: ExecutionOptions,
        outputs_data: Data | None,
        completion: Completion | None,
    ) -> Execution:
        """One update with a batch that every rank has; returns what a whole step would."""
        synchronized.require_rows(self.session.compilation, batch)
        session, division = self.session, self._division(batch)
        session.check_destinations(outputs_data, division.part, division.shapes)
        session.accept(feeds, batch, options)
        timed = ExecutionOptions.PROFILING in options
        execution = Execution(session.device, timed, announced=completion is not None)
        with Uninterrupted():
            if not session.compilation.checks_numerics:
                session.discard_everything()
            try:
                execution.finish(*self._updated(division, feeds, options, execution, outputs_data))
            except (ExecutionError, NumericsError) as error:
                execution.fail(error)
                if completion is None:
                    raise
        return announced(execution, options, completion)

    @torch.inference_mode()
    def _updated(
        self,
        division: _Division,
        feeds: Arrays,
        options: ExecutionOptions,
        execution: Execution,
        outputs_data: Data | None,
    ) -> Answer:
        session, world = self.session, self.world
        update = _Update(session, division, feeds, options, execution)
        try:
            with over_ranks.among(world.gather):
                for shard in own(len(division.spans), world.rank, world.size):
                    update.run(shard)
                    if update.failure is not None:
                        synchronized.take_rest(division.part)
                        break
            numbers = self._agreed(update)
            totals = self._summed(update)
            results = update.losses(numbers) | self._joined(update)
            update.store_statistics(numbers)
            counts = update.update(totals)
        except BaseException:
            update.roll_back()
            raise
        session.hold(division.results, results)
        session.has_drawn()
        shown = session.gradients.handles
        session.forget_passes({gradient(t): array for t, array in totals.items() if gradient(t) in shown})
        if counts and session.state is not None:
            session.state.updated()
        session.write_outputs(outputs_data, {key.owner: array for key, array in results.items()})
        return self._answer(results)

    def _summed(self, update: _Update) -> dict[Tensor, torch.Tensor]:
        """The gradients of all shards."""
        buckets, device = update.division.buckets, self.session.device.torch
        add = exchange.summed if self.parallel.order == TREE else exchange.summed_in_any_order
        totals = add(update.gradients, buckets, self.world, device)
        if device.type == "cuda":  # a captured update reads gradients where they were the last time
            self._totals = self._totals or [torch.empty_like(one) for one in totals]
            totals = [kept.copy_(one) for kept, one in zip(self._totals, totals, strict=True)]
        return buckets.by_tensor(totals)

    def _agreed(self, update: _Update) -> torch.Tensor:
        """The sum of the small numbers of all shards; raises if any rank has failed, or has another batch."""
        failure, world, division = update.failure, self.world, update.division
        if world.size == 1:  # nothing to compare, and reading a GPU's numbers would synchronize
            if failure is not None:
                raise failure
            return update.numbers.total[0]
        header = [float(failure is not None), float(division.batch), update.sample]
        most = most_nodes(self.parallel.shards)
        headers, total = exchange.gathered(update.numbers, header, division.size, most, world)
        if failure is not None:
            raise failure
        where = f"rank {world.rank} of {world.size}"
        for rank, (failed, rows, sample) in enumerate(headers):
            if failed:
                problem = f"rank {rank} failed in this step; nothing has changed"
                raise ExecutionError(where, problem, fix=f"see the error of rank {rank}")
            if rows != headers[0][1] or not math.isclose(sample, headers[0][2], rel_tol=1e-9, abs_tol=1e-9):
                problem = f"ranks 0 and {rank} have different batches, of {headers[0][1]:.0f} and {rows:.0f} rows"
                fix = "pass the whole batch, with its rows in the same order, on every rank; each takes its own rows"
                raise ExecutionError(where, problem, fix=fix)
        return total()

    def _joined(self, update: _Update) -> Arrays:
        """Results of the whole batch, from the rows of all ranks."""
        found, world, division = {}, self.world, update.division
        counts = [sum(map(division.rows, own(len(division.spans), rank, world.size))) for rank in range(world.size)]
        for key, shape in division.shapes.items():
            like = division.joined[key]
            times = shape[0] // division.batch
            mine = torch.zeros((max(counts) * times, *shape[1:]), dtype=like.dtype, device=like.device)
            if update.rows[key]:
                torch.cat(update.rows[key], out=mine[: counts[world.rank] * times])
            everyone = world.gather(mine, f"rows of '{key.owner.label}'")()
            found[key] = torch.cat([one[: count * times] for one, count in zip(everyone, counts, strict=True)])
        return found

    def _answer(self, results: Arrays) -> Answer:
        compiled = self.session.compilation
        parts = tuple(results[value(node.results[0])] for node in compiled.losses)
        loss = parts[0] if len(parts) == 1 else Total(parts)
        outputs = {name: (t, results[value(t)]) for name, t in compiled.declaration.outputs.items()}
        return compiled.losses[-1].results[0], loss, loss, compiled.loss_names, outputs

    def _division(self, batch: int) -> _Division:
        compiled = self.session.compilation
        if self._compilation is not compiled:  # what is kept may have changed
            self._divisions, self._compilation = {}, compiled
        if batch not in self._divisions:
            self._divisions[batch] = self._divided(batch)
        return self._divisions[batch]

    def _divided(self, batch: int) -> _Division:
        compiled, pieces = self.session.compilation, spans(batch, self.parallel.shards)
        rows = pieces[0][1]
        executable = compiled.programs.executable(PartName.SHARD, rows)
        part, losses = executable.part, tuple(value(node.results[0]) for node in compiled.losses)
        whole, likes = compiled.step(batch, True).descriptors, part.results
        shapes = {}
        for tensor in _wanted(compiled):
            key, shape = value(tensor), whole[tensor].shape if tensor in whole else ()
            if key in losses and math.prod(shape) == 1:
                continue
            if key not in likes or not _has_rows(shape, tuple(likes[key].shape), batch, rows):
                problem = f"{tensor!r} does not have a row per row of the batch, so that shards could not be joined"
                raise StateError("execute", problem, fix="leave it out of the outputs, or compile without parallel")
            shapes[key] = shape
        buckets = Buckets.of(_by_completion(executable.part, executable.step))
        return _Division(pieces, part, losses, shapes, self._fixed_shares(pieces), buckets)

    def _fixed_shares(self, pieces: list[tuple[int, int]]) -> torch.Tensor | None:
        losses = self.session.compilation.losses
        if any(map(counts_labels, losses)):
            return None
        return shares([[stop - start] * len(losses) for start, stop in pieces], losses, self.session.device.torch)


def _has_rows(whole: tuple[int, ...], shard: tuple[int, ...], batch: int, rows: int) -> bool:
    """Whether a result has as many rows for a whole batch as its shards have together."""
    if not whole or not shard or whole[0] % batch:
        return False
    return whole[0] * rows == shard[0] * batch and whole[1:] == shard[1:]


def _by_completion(part: Part, step: Step) -> list[Tensor]:
    """The tensors whose gradients a shard computes, in the order in which these become complete: last layers first."""
    found = [key.owner for key in part.outputs if key.kind == KeyKind.GRADIENT and key.owner in step.trainable_set]
    return sorted(found, key=lambda tensor: -step.first_use[tensor])


def _wanted(compiled: Compilation) -> list[Tensor]:
    """Results that stay readable after an update: losses, outputs, and predictions that somebody has asked for."""
    asked = compiled.compared if compiled.declaration.keeps_predictions else ()
    losses = [node.results[0] for node in compiled.losses]
    return list(dict.fromkeys([*losses, *compiled.declaration.outputs.values(), *asked]))


def shares(amounts: list[list[Any]], losses: tuple[Node, ...], device: torch.device) -> torch.Tensor:
    """The share of each shard in each loss, as `[shard, loss]`; 1 for losses that are sums.

    Args:
        amounts: by shard and loss, what a mean divides by.
        losses: the losses.
        device: where the shares are.
    """
    counted = torch.stack([torch.stack([torch.as_tensor(one).to(device) for one in row]) for row in amounts]).double()
    total = counted.sum(0)
    found = counted / torch.where(total == 0, 1, total)  # where nothing counts, there is nothing to divide
    means = torch.tensor([reduction(node) is ReductionType.MEAN for node in losses], device=device)
    return torch.where(means, found, 1.0)


@dataclass
class _Update:
    """One update on one rank.

    Attributes:
        gradients: the gradients of its shards, summed as far as possible; an array per bucket.
        numbers: what `losses` and `store_statistics` combine, in one float64 array per shard.
        rows: results of its shards that are joined.
        failure: the error of a shard that could not run.
    """

    session: Session
    division: _Division
    feeds: Arrays
    options: ExecutionOptions
    execution: Execution
    gradients: TreeSum = field(init=False)
    numbers: TreeSum = field(init=False)
    rows: dict[Key, list[torch.Tensor]] = field(init=False)
    failure: Exception | None = None
    profiles: list[Profile] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.division.spans)
        self.gradients, self.numbers = TreeSum(count), TreeSum(count)
        self.rows = {key: [] for key in self.division.shapes}
        state = self.session.state
        assert state is not None
        self.stream, self.factors = state.arrays[STREAM], state.loss_factors
        self.statistics = {key: key.owner.array() for key in self.division.statistics}
        self.before = {key: array.clone() for key, array in self.statistics.items()}
        self.position = self.stream.clone()

    @property
    def sample(self) -> float:
        """A number that shows whether ranks have the same batch: a weighted sum of a few elements of each array."""
        found = torch.zeros((), dtype=torch.float64, device=self.session.device.torch)
        for array in self.feeds.values():
            flat = array.reshape(-1)
            few = flat[:: max(1, len(flat) // SAMPLE)].double().nan_to_num(posinf=0, neginf=0)
            found += (few * torch.arange(1, len(few) + 1, device=few.device)).sum()
        return float(found)

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

    def run(self, shard: int) -> None:
        """Runs a shard and adds what it computed; an error is kept, for the other ranks must hear of it first."""
        rows, arrays = self.division.rows(shard), self._cut(shard)
        try:
            self.factors.copy_(self.shares[shard])
            self.stream.copy_(torch.stack([seed_of_shard(self.position[0], shard), self.position[1]]))
            self._restore_statistics()
            binding = self.session.bound(PartName.SHARD, rows)
            try:
                found = self._run(binding, arrays)
            except ExecutionError:
                self.session.require_indices(rows, arrays)
                raise
        except Exception as error:  # whatever it is, it must not leave the other ranks waiting
            self.failure = error
            return
        self.gradients.add((0, shard), self.division.buckets.flat(found))
        self.numbers.add((0, shard), [self._weighted(found, shard, rows)])
        for key, arrays_of_key in self.rows.items():
            arrays_of_key.append(found[key].clone())

    def _run(self, binding: Any, arrays: Arrays) -> Arrays:
        found = self.session.run(binding, arrays, self.options, self.execution)
        if self.execution.profile is not None:
            self.profiles.append(self.execution.profile)
        return found

    def _weighted(self, found: Arrays, shard: int, rows: int) -> torch.Tensor:
        """Losses times their shares, and statistics times rows."""
        every, single = zip(self.division.losses, self.shares[shard], strict=True), self.division.single
        losses = [found[key].reshape(1).double() * share for key, share in every if key in single]
        statistics = [array.reshape(-1).double() * rows for array in self.statistics.values()]
        return torch.cat([*losses, *statistics]) if losses or statistics else self.shares.new_empty(0)

    def losses(self, numbers: torch.Tensor) -> Arrays:
        """The losses that are one number, of the whole batch."""
        single = self.division.single
        pairs = zip(single.items(), numbers[: len(single)], strict=True)
        return {key: number.to(like.dtype).reshape(like.shape) for (key, like), number in pairs}

    def store_statistics(self, numbers: torch.Tensor) -> None:
        """Sets statistics to the mean over the rows of all shards, and moves the random stream on."""
        counts = [array.numel() for array in self.statistics.values()]
        means = (numbers[len(self.division.single) :] / self.division.batch).split(counts)
        for array, mean in zip(self.statistics.values(), means, strict=True):
            array.copy_(mean.view(array.shape))
        self.stream.copy_(self.position)
        if STREAM in self.division.part.written:
            self.stream[1].add_(1)
        self.factors.fill_(1)

    def update(self, totals: Mapping[Tensor, torch.Tensor]) -> bool:
        """Updates the parameters with the gradients of all shards; returns whether that counts as a step."""
        binding = self.session.bound(PartName.UPDATE, self.division.rows(0))
        self._run(binding, {gradient(tensor): array for tensor, array in totals.items()})
        if self.profiles:
            self.execution.profile = Profile.sum_of(self.profiles)
        return binding.executable.counts_steps

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
