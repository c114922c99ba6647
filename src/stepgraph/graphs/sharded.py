"""One update of a training graph in shards: every rank runs its own ones, all make the same update.

A shard is a run of the part `shard`: forward and gradient of some rows, which changes no parameter. What shards leave
behind is summed over all of them, in a fixed order: gradients, each weighted by the rows or labels that count; losses;
the statistics of layers, which start from the same values in each shard. Then the part `update` runs, on every rank.
A rank that fails says so in the first exchange, so that no other waits for it and all continue from before the call.
On a GPU, the device decides by what ranks have told whether the update changes anything; the host learns of it later
(`graphs/verdicts.py`), since looking at once would make the GPU wait for the host in every update.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import is_

import torch

from stepgraph.compiler.ranks import collectives
from stepgraph.compiler.ranks.news import any_replays, calls_of, headers_of, tell_call_
from stepgraph.compiler.ranks.parallel import TREE, Parallel
from stepgraph.compiler.ranks.shards import TreeSum, own
from stepgraph.compiler.step import AGREED, gradient, value
from stepgraph.errors import ExecutionError, NumericsError
from stepgraph.graphs import synchronized, update_graph
from stepgraph.graphs.compilation import Arrays, Compilation
from stepgraph.graphs.division import Division, divided
from stepgraph.graphs.session import Answer, Session, announced
from stepgraph.graphs.shard_update import Update
from stepgraph.graphs.update_graph import Outcome, UpdateGraph, UpdateGraphs
from stepgraph.graphs.verdicts import Verdicts
from stepgraph.layers import over_ranks
from stepgraph.runtime import exchange, rank_calls
from stepgraph.runtime.exchange import Bucket, Pieces
from stepgraph.runtime.execution import Completion, Execution, turn
from stepgraph.runtime.feeds import Data
from stepgraph.runtime.loss_slots import Total
from stepgraph.runtime.rank_calls import RankCall, Told, note_told
from stepgraph.runtime.sliced import Sliced
from stepgraph.runtime.world import World, release_before_leaving
from stepgraph.system.interrupts import Uninterrupted
from stepgraph.types import ExecutionOptions

Made = tuple[Outcome, Outcome | UpdateGraph]  # what an update leaves behind, and who keeps its results


class Shards:
    """Runs the updates of a session in shards.

    Args:
        session: the state between calls.
        parallel: how updates are divided.
        world: the ranks that divide them among themselves.
    """

    def __init__(self, session: Session, parallel: Parallel, world: World) -> None:
        self.session, self.parallel, self.world = session, parallel, world
        self._divisions: dict[int, Division] = {}
        self._compilation: Compilation | None = None  # for which the divisions were made
        self._totals: list[torch.Tensor] = []
        self._viewed: tuple[Sequence[Bucket], list[torch.Tensor], Pieces] = (), [], {}
        self._number = world.place.compared  # counted alike on all ranks
        compiled = session.compilation
        self._can_capture = compiled.device.torch.type in update_graph.CAPTURED
        self._graphs = UpdateGraphs(session, world.is_alone)
        self._verdicts = Verdicts(session, parallel, world)
        if not world.is_alone:
            release_before_leaving(compiled.programs)
            release_before_leaving(self)

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
        likes = {key: division.part.results[key] for _, key in division.results}
        session.check_destinations(outputs_data, likes, division.shapes)
        session.accept(feeds, batch, options)
        timed = ExecutionOptions.PROFILING in options
        execution = Execution(session.device, timed, announced=completion is not None, refusal=session.refusal)
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

    def meet(self, call: RankCall, detail: int = 0) -> None:
        """Makes sure that every rank makes this call; otherwise, all raise an error, and nothing changes.

        Ranks that make an update meanwhile hear of it in its exchange, and refuse the update: nothing else would reach
        them. Where a run goes on, they hear of it before.

        Args:
            call: the call.
            detail: what must be the same on all ranks.
        """
        is_update = call == RankCall.EXECUTE
        self._tell((int(call), *(self.session.switched if is_update else (detail, self._number))), is_update)

    def tell_failure(self, error: Exception, before: int, is_update: bool) -> None:
        """Lets the others hear of an error of this rank instead of waiting. If it came with an exchange, they have.

        Args:
            error: the error.
            before: the exchanges that the rank had started before.
            is_update: whether this rank has failed in an update; in a run, the others wait for one at its place only.
        """
        world, place = self.world, self.world.place
        if not world.is_alone and note_told(error) and place.is_silent_since(before):
            # If what is exchanged cannot be compiled, either, they wait for nothing: the error must still be raised.
            with suppress(Exception), world.telling(error):
                is_awaited = is_update and (place.is_updating or not place.is_running)
                self._tell((RankCall.FAILURE, 0, self._number), is_awaited)

    def _tell(self, told: Told, is_update: bool) -> None:
        """Tells the others what this rank does, where they hear it; raises an error if they do something else."""
        if self.world.is_alone:
            return
        if self.world.place.is_running and not is_update:
            self.world.greet(told)
            return
        with turn(self.session.device), Uninterrupted():
            self._meet(told)

    @torch.inference_mode()
    def _meet(self, told: Told) -> None:
        session, world = self.session, self.world
        batch = next(iter(self._divisions), session.compilation.usual_batch)
        division, execution = self._division(batch), Execution(session.device, False)
        named = [replace(one, name=RankCall(told[0]).exchanged) for one in division.buckets]
        division = replace(division, buckets=tuple(named))
        division.telling.graph = self._number
        update = Update(session, division, {}, ExecutionOptions.NONE, execution, self.parallel.shards)
        update.failure = ExecutionError(f"rank {world.rank} of {world.size}", "this rank makes another call")
        with over_ranks.among(world.gather):
            self._verdicts.settle()
            totals = self._summed(update, own(self.parallel.shards, world.rank, world.size)[-1])
        header = update.header(0.0).clone()
        tell_call_(header, told)
        heard = exchange.gathered(update.numbers, header, division.news, world)[:, 0, : division.news.head].cpu()
        headers, where = headers_of(heard), f"rank {world.rank} of {world.size}"
        apart = rank_calls.disagreement(calls_of(headers), where, self._verdicts.name, [one.graph for one in headers])
        if apart is not None:
            update.failure = apart
            self._let_others_refuse(update, totals, any_replays(heard))

    def _let_others_refuse(self, update: Update, totals: Pieces, others_replay: bool) -> None:
        """Takes part in the update of ranks that make one, if these do not know yet that it is refused."""
        assert update.failure is not None
        state, verdicts = self.session.state, self._verdicts
        update.joins_as, verdicts.batch = verdicts.batch, None
        knows = update.division.shapes and not others_replay  # they look before they join results
        if self.session.compilation.decides and state is not None and not knows:
            state.arrays[AGREED].fill_(False)
            self._joined(update)
            self._apply_with_others(update, totals)
            state.arrays[AGREED].fill_(True)
        raise update.failure

    @torch.inference_mode()
    def _updated(
        self,
        division: Division,
        feeds: Arrays,
        options: ExecutionOptions,
        execution: Execution,
        outputs_data: Data | None,
    ) -> Answer:
        session = self.session
        division.telling.change = self._verdicts.changes.told()
        found = self._replayed(division, feeds, options, execution)
        if found is None:
            found = self._made_in_parts(division, feeds, options, execution)
        self._verdicts.accept(division.batch)
        outcome, results = found
        session.leave(division.results, outcome.results, self._shown(division, outcome.totals))
        if outcome.counts and session.state is not None:
            session.state.updated()
        session.write_outputs(outputs_data, {key.owner: array for key, array in outcome.results.items()})
        return self._answer(results, outcome.results)

    def _made_in_parts(
        self, division: Division, feeds: Arrays, options: ExecutionOptions, execution: Execution
    ) -> Made:
        """Makes an update part by part."""
        update = Update(self.session, division, feeds, options, execution, self.parallel.shards)
        try:
            outcome = self._made(update)
        except BaseException:
            update.roll_back()
            raise
        if self._captures and update.failure is None:
            self._graphs.note(division, update.used)
        return outcome, outcome

    def _made(self, update: Update) -> Outcome:
        """Makes an update, or captures one."""
        world = self.world
        *earlier, last = own(self.parallel.shards, world.rank, world.size)
        with over_ranks.among(world.gather):
            for shard in earlier:
                update.run(shard)
            self._verdicts.settle()
            totals = self._summed(update, last)
        numbers = self._verdicts.told(update)
        results = update.losses(numbers) | self._joined(update)
        update.store_statistics(numbers)
        return Outcome(results, totals, self._applied(update, totals))

    @property
    def _captures(self) -> bool:
        """Whether updates are captured as a whole: nothing between their parts needs the host."""
        compiled = self.session.compilation
        return self._can_capture and not (compiled.checks_numerics or synchronized.sums(compiled))

    def _replayed(
        self, division: Division, feeds: Arrays, options: ExecutionOptions, execution: Execution
    ) -> Made | None:
        """Makes an update by replaying a graph, which is captured first if necessary; None if there is none."""
        profiles = bool(options) and ExecutionOptions.PER_LAYER_PROFILING in options
        graph = None if profiles or self._verdicts.must_look(division) else self._graphs.of(division)
        if graph is None:
            return None
        self._verdicts.settle()
        if graph.is_outdated or not (graph.fits(feeds) or self._captured(graph, division, feeds, options, execution)):
            return None
        if graph.sent is not None:
            division.telling.tell_facts(False, self._verdicts.readiness(graph.executables), replays=True)
        with self.session.writing():
            outcome = graph.replay(feeds)
        self._verdicts.expect(graph, execution)
        return outcome, graph

    def _captured(
        self, graph: UpdateGraph, division: Division, feeds: Arrays, options: ExecutionOptions, execution: Execution
    ) -> bool:
        """Captures an update with this data; returns whether that was possible."""
        if not graph.can_be_captured:
            return False
        if not self.world.is_alone:
            readiness = self._verdicts.readiness(graph.executables)
            division.telling.tell_facts(False, readiness, replays=True)  # nothing of it is captured
        try:
            graph.capture(
                lambda read: self._made(
                    Update(self.session, division, read, options, execution, self.parallel.shards, graph)
                ),
                feeds,
            )
        except Exception as error:  # parts have run, and will run again
            self._graphs.refuse(division, error)
            if not self.world.is_alone:
                collectives.forget(self.world.group)
            return False
        return True

    def forget_changes(self) -> None:
        """Takes what ranks have in common now for the same on all of them."""
        self._verdicts.changes.forget()

    def release(self) -> None:
        """Releases captured collectives."""
        self._graphs.release()

    def _summed(self, update: Update, last: int) -> Pieces:
        """Runs the last shard; returns what this rank updates with, its part of the gradients of all shards.

        A rank that fails, or has nothing to run, exchanges zeros, so that no other waits for it.
        """
        buckets, device = update.division.buckets, self.session.device.torch
        totals: list[torch.Tensor] = []
        if self._exchanges_inside and update.can_run(last):
            ready = partial(self._verdicts.readiness_of, update)
            totals = update.run_and_exchange(last, self.world.group, self.world.rank, ready)
        else:
            update.run(last)
            if update.failure is not None:
                synchronized.take_rest(update.division.part)
        if self.world.is_alone and update.failure is not None:
            raise update.failure
        in_place = len(totals) == len(buckets)  # where a captured shard leaves them in every update
        if not in_place:
            add = exchange.summed if self.parallel.order == TREE else exchange.summed_in_any_order
            sums = update.gradients if update.failure is None else TreeSum(self.parallel.shards)
            totals += add(sums, buckets[len(totals) :], self.world, device)
        apart = device.type == "cuda" and update.captured is None
        if apart and not in_place:  # a captured update reads gradients where they were the last time
            self._totals = self._totals or [torch.empty_like(one) for one in totals]
            totals = [kept.copy_(one) for kept, one in zip(self._totals, totals, strict=True)]
        return self._pieces(buckets, totals, kept=apart)

    def _pieces(self, buckets: Sequence[Bucket], totals: list[torch.Tensor], kept: bool) -> Pieces:
        """The totals by parameter. On a GPU, they are mostly the arrays of the last update, whose views are kept."""
        before, arrays, found = self._viewed
        if buckets is before and all(map(is_, arrays, totals)):
            return found
        found = {}
        for bucket, total in zip(buckets, totals, strict=True):
            found |= bucket.pieces(total, self.world.rank)
        if kept:
            self._viewed = buckets, totals, found
        return found

    @property
    def _exchanges_inside(self) -> bool:
        """Whether the last shard exchanges gradients itself.

        If steps may be rolled back, shards are checked first. A shard with sums over ranks that fails takes part in the
        rest of them before anything else is exchanged.
        """
        compiled = self.session.compilation
        return not (self.world.is_alone or compiled.checks_numerics or synchronized.sums(compiled))

    def _applied(self, update: Update, totals: Pieces) -> bool:
        """Updates the parameters; returns whether that counts as a step. What one rank rolls back, all do."""
        world = self.world
        if update.failure is not None:  # the others make their update, in which this rank has a part
            self._apply_with_others(update, totals)
            return False
        if world.is_alone or not self.session.compilation.checks_numerics:
            return update.update(totals)
        before, failure, counts = update.copies(), None, False
        try:
            counts = update.update(totals)
        except NumericsError as error:
            failure = error
        if not world.any(failure is not None, "whether the update is finite"):
            return counts
        update.put_back(before)
        problem = "the part of the update that another rank makes is not finite; nothing has changed"
        raise failure or ExecutionError(f"rank {world.rank} of {world.size}", problem, fix="see the error of that rank")

    @staticmethod
    def _apply_with_others(update: Update, totals: Pieces) -> None:
        """An update that all ranks refuse: a rank that has failed exchanges what the others wait for."""
        try:
            update.update(totals)
        except ExecutionError:
            assert update.failure is not None
            raise update.failure from None

    def _shown(self, division: Division, totals: Pieces) -> Arrays:
        """Whole gradients that are read through tensors."""
        handles, found = self.session.gradients.handles, {}
        for bucket in division.buckets if handles else ():
            for tensor in (one for one in bucket.tensors if gradient(one) in handles):
                mine = totals[tensor]
                if bucket.slices is not None:
                    what = f"the gradient of '{tensor.label}'"
                    mine = Sliced(tensor, mine, bucket.slices[tensor], self.world).whole(what)
                found[gradient(tensor)] = mine
        return found

    def _joined(self, update: Update) -> Arrays:
        """Results of the whole batch, from the rows of all ranks; zeros if this rank joins those of another batch."""
        found, world, division = {}, self.world, update.division
        if update.joins_as is not None:
            division = self._division(update.joins_as)
        is_own = division is update.division
        counts = [sum(map(division.rows, own(self.parallel.shards, rank, world.size))) for rank in range(world.size)]
        for key, shape in division.shapes.items():
            like = division.joined[key]
            times = shape[0] // division.batch
            mine = torch.zeros((max(counts) * times, *shape[1:]), dtype=like.dtype, device=like.device)
            if is_own and update.rows[key] and update.failure is None:
                torch.cat(update.rows[key], out=mine[: counts[world.rank] * times])
            everyone = world.gather(mine, f"rows of '{key.owner.label}'")()
            found[key] = torch.cat([one[: count * times] for one, count in zip(everyone, counts, strict=True)])
        return found if is_own else {key: found[key].new_zeros(shape) for key, shape in update.division.shapes.items()}

    def _answer(self, results: Outcome | UpdateGraph, found: Arrays) -> Answer:
        compiled = self.session.compilation
        parts = tuple(results.loss(value(node.results[0])) for node in compiled.losses)
        loss = parts[0] if len(parts) == 1 else Total(parts)
        names = compiled.declaration.outputs.items()
        outputs = {name: (t, results.result(value(t))) for name, t in names if value(t) in found}
        return compiled.losses[-1].results[0], loss, loss, compiled.loss_names, outputs

    def _division(self, batch: int) -> Division:
        compiled = self.session.compilation
        if self._compilation is not compiled:  # what is kept may have changed
            self._divisions, self._compilation = {}, compiled
            self._graphs = UpdateGraphs(self.session, self.world.is_alone)
        if batch not in self._divisions:
            division = self._divisions[batch] = divided(compiled, batch, self.parallel.shards)
            division.telling.graph = self._number
        return self._divisions[batch]
