"""The state between calls of a compiled graph, and how one call runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any
from zlib import crc32

import torch

from stepgraph.compiler import filters
from stepgraph.compiler.program import PartName, fake
from stepgraph.compiler.settings import require_options
from stepgraph.compiler.step import REFUSED, STREAM, Key, KeyKind, Limit, value
from stepgraph.device import Device
from stepgraph.errors import DataError, ExecutionError, NumericsError, UnknownNameError
from stepgraph.graphs.compilation import Arrays, Compilation
from stepgraph.runtime import execution as executions
from stepgraph.runtime.executable import Binding, Executable
from stepgraph.runtime.execution import Completion, Execution
from stepgraph.runtime.feeds import MOST, Data, Feeds, Names, Passed, Usual
from stepgraph.runtime.gradients import Gradients, seeds, starts_at
from stepgraph.runtime.indices import Indices
from stepgraph.runtime.loss_slots import Loss, Total
from stepgraph.runtime.profile import profile
from stepgraph.runtime.refusal import Check, Refusal, explanation
from stepgraph.runtime.rollback import explained, rolled_back_unless_finite, tried
from stepgraph.runtime.state import TrainingState
from stepgraph.runtime.verdict import Verdict
from stepgraph.system.interrupts import Uninterrupted
from stepgraph.tensors import buffers, writes
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import DataType, ExecutionOptions

_Bound = tuple[Sequence[Tensor], Sequence[torch.Tensor | None]]  # feeds, and what was bound to them at a call
# The outcome of a call: the tensor it is for, its array, the loss, the names of the losses, and the outputs by name.
Answer = tuple[
    Tensor | None,
    executions.Found | None,
    torch.Tensor | Loss | Total | None,
    tuple[str, ...],
    executions.Outputs,
]
NOTHING: Answer = (None, None, None, (), executions.NO_OUTPUTS)
FAILED = "the last call failed before it was computed"
DROPPED = "a whole call keeps its loss, last result and outputs; declare it with add_outputs"
LARGE = "a training step does not keep an output of this size unasked"
KEEP = "keep it with add_outputs({name: result})"
# Looking up a member of an enumeration takes longer.
_STEP, _NONE, _SKIP = PartName.STEP, ExecutionOptions.NONE, ExecutionOptions.SKIP_WRITING_INPUT_DATA_TO_DEVICE
_current = attrgetter("current")
_is_updatable = attrgetter("is_updatable")
_NOTHING: Arrays = {}


@dataclass(slots=True)
class LastCall:
    """The last call: batch size, step number, data, and whether its random numbers have been used up."""

    batch: int
    step: int | None
    feeds: Arrays
    drew: bool = False


class Session:
    """The state that a compiled graph keeps between calls.

    Args:
        compilation: what to run.
        state: optimizer buffers, live numbers and the random stream; None if nothing is trained.
        gradients: the gradients of the last gradient pass.
        elsewhere: the gradients of linked graphs.
        before: the session that this one replaces.
    """

    def __init__(
        self,
        compilation: Compilation,
        state: TrainingState | None,
        gradients: Gradients,
        elsewhere: Callable[[], Sequence[Gradients]],
        before: Session | None,
    ) -> None:
        self.compilation, self.state = compilation, state
        self.gradients, self.elsewhere = gradients, elsewhere
        self.device: Device = compilation.device
        self.feeds: Feeds = compilation.feeds  # names declared later raise an error
        self.saved: Arrays = {}  # what the forward pass saved for the gradient pass
        self.forward_batch: int | None = None
        self.last: LastCall | None = None
        self.takes_seeds = False
        if state is not None:
            step = compilation.programs.outline(compilation.rows_at_once(self.feeds.batch)).step
            self.takes_seeds = bool(step.seeded)
            state.keep_rounded(step.rounded, step.compute_type, filters.strides(step))
        self.starts_at_losses = bool(compilation.losses) and not self.takes_seeds  # and nowhere else
        self._updatable, self._switches = [one not in compilation.frozen for one in compilation.held], -1
        self.written: Arrays = {} if before is None else before.written
        self.given: _Bound = ((), ()) if before is None else before.given
        self.holding: tuple[tuple[Tensor, Key], ...] = () if before is None else before.holding
        self._indices: dict[int, Indices] = {}
        self._raising: set[int] = set()  # batch sizes for which operators themselves detect indices out of range
        stream = torch.zeros(2, dtype=torch.int64, device=self.device.torch) if state is None else None
        self._stream: Arrays = {} if stream is None else {STREAM: stream}
        self._refusal = self._new_refusal()
        self.verdict: Verdict | None = None  # on the last update of several ranks
        self._runs_plainly = not compilation.checks_numerics  # unless options ask for something else
        self._usual: Usual | None = None  # the data of the last call, if others can be compared with it

    @property
    def is_outdated(self) -> bool:
        """Whether the set of updatable parameters has changed since the programs were built."""
        switches = Tensor.switches
        if switches == self._switches:
            return False
        if self._updatable != [*map(_is_updatable, self.compilation.held)]:
            return True
        self._switches = switches
        return False

    @property
    def switched(self) -> tuple[int, int]:
        """Which parameters are updatable now, as a number, and the first that is frozen now, from 1, or unfrozen: -1.

        Both are 0 if nothing has changed.
        """
        now = [*map(_is_updatable, self.compilation.held)]
        first = next(
            (i for i, (one, before) in enumerate(zip(now, self._updatable, strict=True), 1) if one != before), 0
        )
        return (crc32(bytes(now)) + 1, -first if now[first - 1] else first) if first else (0, 0)

    # Arrays that stay between calls

    def memory(self) -> list[Any]:
        """What `arrays` depends on: if none of it changed, the arrays are the same. Checked in every call."""
        return [None if self.state is None else self.state.arrays, *map(_current, self.compilation.held)]

    def arrays(self) -> Arrays:
        """Arrays that persist between calls."""
        compiled = self.compilation
        if self.state is not None:
            self.state.round(again=True)
        held = {value(tensor): tensor.array() for tensor in compiled.held}
        constants = {value(tensor): array for tensor, array in compiled.constants.items()}
        return {**held, **constants, **(self._stream if self.state is None else self.state.arrays)}

    def bound(self, part: PartName, batch: int) -> Binding:
        """A part with the arrays that persist between calls, looked up again if a tensor was bound to other memory."""
        state, programs = self.state, self.compilation.programs
        executable = programs.executable(part, batch)
        if programs.switches and part is _STEP and state is not None and batch in programs.switches:
            executable = programs.switches[batch].at(state.next_update)
        binding = executable.bound(self.memory(), self.arrays)
        if state is not None and state.rounded:
            state.round()
        return binding

    def seeds(self, batch: int) -> Arrays:
        """Gradients from outside for a batch size."""
        program = self.compilation.programs.program(batch)
        if not program.step.seeded:
            return {}
        return seeds(program, self.compilation.declaration.user_gradients, self.elsewhere())

    def seed(self, tensor: Tensor, given: Any, batch: int) -> torch.Tensor:
        """A gradient from outside for a result, passed with a call."""
        made = self.compilation.programs.program(batch).outputs.get(value(tensor))
        if made is None:
            problem, fix = f"{tensor!r} is not a result of this graph", "pass what node() returned"
            raise UnknownNameError("execute_gradient", problem, fix=fix)
        like = fake(made)
        array = buffers.read(given, like.shape, tensor.data_type, f"gradient of Tensor '{tensor.label}'", exact=True)
        return array.to(self.device.torch, non_blocking=True)

    def has_seed(self, batch: int) -> bool:
        """Whether a whole step has a starting point for gradients: a loss, a written gradient, or a final scalar."""
        compiled = self.compilation
        if compiled.losses or any(t.has_data for t in compiled.declaration.user_gradients.values()):
            return True
        program = compiled.programs.program(batch)
        return any(starts_at(tensor, program) for tensor in program.step.seeded)

    # One call

    def read(self, passed: Passed, asked: int | None, options: ExecutionOptions) -> tuple[Arrays, int]:
        """The arrays of a call's feeds, and its batch size; with `SKIP_WRITING…`, those of the last call.

        Without a batch size that is `asked` for, arrays with more rows than the call reads are rejected.
        """
        usual = self._usual
        if asked is None and options is _NONE and usual is not None:
            again = usual.arrays(passed)
            if again is not None:
                return again, usual.batch
        if type(options) is not ExecutionOptions:
            require_options(options, ExecutionOptions)
        skips = options is not _NONE and _SKIP in options
        given: Mapping[Tensor, Any] = self.feeds.named(*passed)
        batch = self.batch_size(asked, given, skips)
        if skips:  # data bound since the last call takes precedence
            bound = dict(zip(*self.given, strict=True))
            given = {key.owner: one for key, one in self.written.items() if key.owner.current is bound[key.owner]}
        looks = self.compilation.checks_indices and batch not in self._raising
        indices = self._indices_of(batch) if looks else None
        found = self.feeds.arrays(given, batch, self.device, indices, not asked, self.compilation.images)
        is_comparable = asked is None and not skips and not looks
        self._usual = Usual.of(passed, given, found, batch) if is_comparable else None
        return found, batch

    def batch_size(self, asked: int | None, given: Mapping[Tensor, object], skips: bool = False) -> int:
        """The batch size of a call: as asked, as declared, or as many rows as its data has."""
        if asked or not self.feeds.is_open:
            return self.feeds.batch if asked is None else self.compilation.batch_size(asked)
        self.feeds.batch_size(asked)
        return self.last.batch if skips and self.last is not None else self.feeds.rows(given)

    def _indices_of(self, batch: int) -> Indices:
        """Which feeds are indices, and into what, for a batch size."""
        found = self._indices.get(batch)
        if found is None:
            if len(self._indices) >= MOST:
                self._indices.clear()
            compiled = self.compilation
            found = self._indices[batch] = Indices(compiled.step(batch, True), self.feeds.titles)
            known = compiled.programs.executables.get((compiled.whole, batch))
            if known is not None and known.runs_alone:  # in one thread, an index out of range raises an ordinary error
                self._raising.add(batch)
        return found

    def require_indices(self, batch: int, arrays: Mapping[Key, torch.Tensor]) -> None:
        """Raises if a call has failed because of an index out of range."""
        self._indices_of(batch).require_all(arrays)

    def in_range(self, tensor: Tensor, array: torch.Tensor) -> torch.Tensor:
        """A feed's array as a step reads it: a step that checks indices itself replaces those out of range."""
        if self._refusal is None or array.device != self.device.torch:  # checked before, on the host
            return array
        return self._indices_of(self.compilation.usual_batch).in_range(value(tensor), array)

    @property
    def index_limits(self) -> dict[Tensor, Limit]:
        """The feeds that are indices, and what they may be, for the usual batch size."""
        limits = self._indices_of(self.compilation.usual_batch).limits
        return {key.owner: limit for key, limit in limits.items()}

    def _new_refusal(self) -> Refusal | None:
        note = None if self.state is None else self.state.arrays.get(REFUSED)
        if note is None:
            return None
        return Refusal(note, explanation(self.compilation.guarded, self.feeds.titles), self.refused)

    @property
    def refusal(self) -> Check | None:
        """What the device notes about indices out of range; None if it checks none."""
        return self._refusal

    def refused(self) -> None:
        """Continues from before the call that the device has refused; it and those after it changed nothing."""
        assert self.state is not None
        self.state.refused()
        self.forget_passes()
        self._refusal = self._new_refusal()

    def require_accepted(self) -> None:
        """Raises if the device has refused a call: an index was out of range, or another rank has failed."""
        if self.verdict is None and self._refusal is None:
            return
        with executions.turn(self.device):
            if self.verdict is not None:
                self.verdict.require_known()
            if self._refusal is not None:
                self._refusal.require_none()

    def accept(self, feeds: Arrays, batch: int, options: ExecutionOptions) -> None:
        """Remembers the data of a call that has passed all checks."""
        if not options or _SKIP not in options:
            tensors = self.feeds.tensors
            self.written, self.given = feeds, (tensors, [*map(_current, tensors)])
        self.last = LastCall(batch, self.next_step, feeds)

    @property
    def next_step(self) -> int | None:
        """The number of the next update."""
        optimizer = self.compilation.declaration.optimizer
        return None if optimizer is None else optimizer.time_step

    def launch(
        self,
        binding: Binding,
        arrays: Mapping[Key, torch.Tensor],
        options: ExecutionOptions,
        completion: Completion | None,
        keep: Callable[[Arrays], Answer],
        discard: Callable[[], None] | None = None,
    ) -> Execution:
        """Runs an executable and lets `keep` store its results; returns the handle.

        `discard` makes room for them: what stays readable must not be in memory twice.

        The caller has held its turn on the device since it read its data, so calls of other threads see nothing of
        this one. An interrupt is handled before or after, never in between.
        """
        timed = bool(options) and ExecutionOptions.PROFILING in options
        execution = Execution(self.device, timed, announced=completion is not None, refusal=self._refusal)
        with Uninterrupted():
            # If the call can still be refused or undone, the earlier results must survive it.
            if discard is not None and binding.executable.allocates and not self.compilation.checks_numerics:
                discard()
            try:
                execution.finish(*keep(self.run(binding, arrays, options, execution)))
            except (ExecutionError, NumericsError) as error:
                self.require_indices(binding.executable.step.batch[1], arrays)
                execution.fail(error)
                if completion is None:
                    raise
        return execution

    def run(
        self, binding: Binding, arrays: Mapping[Key, torch.Tensor], options: ExecutionOptions, execution: Execution
    ) -> Arrays:
        """Runs an executable once and returns its results."""
        executable = binding.executable
        if executable.is_fused and executable.runs_alone:  # such operators were not looked at when data was read
            batch = executable.step.batch[1]
            (self._indices.get(batch) or self._indices_of(batch)).require_all(arrays)
        noted = writes.note() if executable.writes_tensors else None
        if self._runs_plainly and not options:
            found = executable(binding, arrays)
        else:
            found = self._run_as_asked(binding, arrays, options, execution)
        if noted is not None and self.state is not None:
            self.state.rounded_at = noted  # its copies were written, too
        return found

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around a replay that writes to parameters, and to their copies."""
        noted = writes.note()
        yield
        if self.state is not None:
            self.state.rounded_at = noted

    def _run_as_asked(
        self, binding: Binding, arrays: Mapping[Key, torch.Tensor], options: ExecutionOptions, execution: Execution
    ) -> Arrays:
        """The same; profiled, or rolled back if something is not finite, as asked."""
        executable = binding.executable
        profiles = bool(options) and ExecutionOptions.PER_LAYER_PROFILING in options
        if not profiles and not self.compilation.checks_numerics:
            return executable(binding, arrays)

        def run() -> Arrays:
            if not profiles:
                return executable(binding, arrays)
            with executable.settings():
                found, execution.profile = profile(executable.part, binding.filled(arrays), executable.step.device)
            return found

        if not self.compilation.checks_numerics:
            return run()

        def explain(found: Arrays, after: Arrays) -> NumericsError:
            before = {**self.arrays(), **arrays}
            trial = tried(self.compilation.programs, executable, before, found, after)
            return explained(trial, self.compilation.declaration.kind, self.next_step, self.feeds.titles, bool(after))

        return rolled_back_unless_finite(run, binding, arrays, explain)

    # Results

    def leave(self, results: tuple[tuple[Tensor, Key], ...], found: Arrays, gradients: Arrays) -> None:
        """Makes what a whole step has computed readable, and what earlier calls have left unreadable."""
        self.hold(results, found)
        if self.last is not None:
            self.last.drew = True
        self.forget_passes(gradients)

    def store(self, executable: Executable, found: Arrays) -> None:
        """Stores what a whole step, or a forward pass alone, has computed."""
        others = executable.others
        self.leave(executable.results, found, {key: found[key] for key in others} if others else _NOTHING)
        if executable.counts_steps and self.state is not None:
            self.state.updated()

    def hold(self, results: tuple[tuple[Tensor, Key], ...], found: Arrays) -> None:
        """Makes results readable through their tensors, and results of earlier calls unreadable."""
        if self.holding is not results:
            readable = {*dict(self.holding), *self.compilation.compared}
            for tensor in readable - dict(results).keys():
                tensor.hold(None, DROPPED)
            self.holding = results
        for tensor, key in self.holding:
            tensor.hold(found[key])

    def discard_results(self) -> None:
        """Releases the results of earlier calls."""
        for tensor, _ in self.holding:
            tensor.hold(None, FAILED)

    def discard_passes(self) -> None:
        """Releases the results of earlier calls, and what a forward pass saved for its gradient pass."""
        self.discard_results()
        self.saved, self.forward_batch = {}, None

    def discard_everything(self) -> None:
        """Releases what earlier calls left behind, gradients included."""
        self.discard_results()
        self.forget_passes()

    def answer(self, executable: Executable, found: Arrays, evaluated: bool = False) -> Answer:
        """The loss or, without a loss, the last result; and the declared outputs.

        A call that only `evaluated` also returns its predictions if no outputs are declared.
        """
        compiled = self.compilation
        names = compiled.declaration.outputs or (compiled.predictions if evaluated else None)
        outputs = self.outputs(executable, found, names) if names else executions.NO_OUTPUTS
        if not compiled.losses:
            last = compiled.nodes[-1].results[0]
            return last, executable.result(found, value(last)), None, (), outputs
        loss = executable.loss(found)
        return compiled.losses[-1].results[0], loss, loss, compiled.loss_names, outputs

    def outputs(self, executable: Executable, found: Mapping[Key, torch.Tensor], names: Names) -> executions.Outputs:
        """Those of the named tensors that a call has computed, unaffected by later calls."""
        keys = ((name, tensor, self.gradients.key(tensor)) for name, tensor in names.items())
        return {name: (tensor, executable.result(found, key)) for name, tensor, key in keys if key in found}

    def forget_passes(self, found: Mapping[Key, torch.Tensor] = MappingProxyType({})) -> None:
        """Discards the state of separate passes; the gradients that a whole step `found` become readable instead."""
        if self.saved or self.forward_batch is not None:
            self.saved, self.forward_batch = {}, None
        self.gradients.forget(found)

    def has_drawn(self) -> None:
        """Marks the random numbers of the last call as used."""
        if self.last is not None:
            self.last.drew = True

    def repeated_forward(self) -> Arrays:
        """Reruns the forward pass with the same data and random numbers, for programs built since then."""
        saved, batch = self.saved, self.forward_batch
        if batch is None:
            return {}
        feeds = {value(t): saved[value(t)] for t in self.feeds.tensors}
        arrays = self.arrays() | feeds
        executable = self.compilation.programs.executable(PartName.FORWARD, batch)
        moving = {key: arrays[key].clone() for key in {STREAM, *executable.part.written}}
        moving[STREAM][1] -= 1
        return feeds | executable(executable.bind(arrays | moving), {})

    # Outputs

    def check_destinations(
        self,
        outputs_data: Data | None,
        likes: Mapping[Key, torch.Tensor],
        shapes: Mapping[Key, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        """Rejects, before anything runs, memory for outputs that are not declared, not computed or do not fit.

        Args:
            outputs_data: memory by name.
            likes: what the call computes, as arrays without memory.
            shapes: those of outputs that have others than these.
        """
        outputs = self.compilation.declaration.outputs
        for name, destination in (outputs_data or {}).items():
            if name not in outputs:
                known = ", ".join(f"'{one}'" for one in outputs) or "none"
                problem = f"'{name}' is not an output of this graph"
                raise UnknownNameError("execute", problem, known=known, fix="declare it with add_outputs")
            tensor, like = outputs[name], likes.get(self.gradients.key(outputs[name]))
            where = f"Tensor '{tensor.label}' (output '{name}')"
            if like is None:
                is_optional = tensor in self.compilation.declaration.named_only
                problem, fix = (LARGE, KEEP) if is_optional else ("this pass does not compute it", "leave it out")
                raise DataError(where, problem, fix=fix)
            shape = shapes.get(self.gradients.key(tensor), like.shape)
            buffers.destination(destination, shape, DataType.of(like.dtype), where)

    def write_outputs(self, outputs_data: Data | None, found: Mapping[Tensor, torch.Tensor]) -> None:
        """Copies results into the caller's memory."""
        for name, destination in (outputs_data or {}).items():
            tensor = self.compilation.declaration.outputs[name]
            buffers.write(found[tensor], destination, f"Tensor '{tensor.label}' (output '{name}')")


def announced(execution: Execution, options: ExecutionOptions, completion: Completion | None) -> Execution:
    """Waits for the work if requested, then calls the completion handler; not while others wait for it."""
    if not options and completion is None:
        return execution
    synchronous = ExecutionOptions.SYNCHRONOUS in options
    if synchronous and execution.error is None:
        execution.wait()
    if completion is not None:
        execution.announce(completion, waited=synchronous)
    return execution


def results_of(found: Mapping[Key, torch.Tensor]) -> dict[Tensor, torch.Tensor]:
    """The results in `found`, by tensor."""
    kind = KeyKind.VALUE
    return {key.owner: array for key, array in found.items() if key.kind == kind}
