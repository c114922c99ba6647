"""The traced programs and executables of one compilation, by batch size; each is built on first use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from stepgraph.compiler import fused_cache, memory, outline, phases, pipeline
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.program import Part, PartName, Phase, Program
from stepgraph.compiler.ranks.plan import own_plan
from stepgraph.compiler.step import Fusion, Key, KeyKind, Step, gradient, value
from stepgraph.errors import StateError
from stepgraph.runtime.arena import Arena
from stepgraph.runtime.executable import Executable
from stepgraph.runtime.switch import Switch, switches
from stepgraph.system import openmp
from stepgraph.system.garbage import FullCollectionsDeferred
from stepgraph.system.interrupts import Uninterrupted
from stepgraph.tensors.extents import BatchExtent

logger = logging.getLogger("stepgraph")
PASSES = (PartName.FORWARD, PartName.GRADIENT, PartName.UPDATE)
WITHOUT_TRAINING = (PartName.INFERENCE, PartName.EVALUATION)  # parts that leave layers in inference mode
KeptKeys = Callable[[Program | None], Sequence[Key]]
MOST = 32  # batch sizes that stay compiled, besides the first; the least recently used one is evicted


class Programs:
    """The programs that a compiled graph can run.

    Args:
        step: what to compute for a batch size, in training or inference mode.
        kept: what stays readable after one whole call, which may depend on the program of a training step.
        require_fit: raises if the plan of a part for a batch size exceeds the memory limit; receives the caller's name.
        channels_last: the memory layout of images, if already known.
    """

    def __init__(
        self,
        step: Callable[[int, bool], Step],
        kept: KeptKeys,
        require_fit: Callable[[MemoryPlan, PartName, int, str], None],
        channels_last: bool | None = None,
    ) -> None:
        self._step, self._kept, self._require_fit = step, kept, require_fit
        self.channels_last = channels_last
        self.is_recording = False
        self._traced: dict[tuple[int, bool], Program] = {}
        self._outlines: dict[bool, Program] = {}
        self.executables: dict[tuple[PartName, int], Executable] = {}
        self.switches: dict[int, Switch] = {}  # of steps that are fused at a fixed step, by batch size
        self.plans: dict[tuple[PartName, int], MemoryPlan] = {}
        self._recent: dict[int, None] = {}  # batch sizes, the most recently used last
        self.last_batch: int | None = None  # the batch size used last; None before the first
        self._arena = Arena()

    def program(self, batch: int, training: bool = True) -> Program:
        """The traced step for a batch size."""
        if (batch, training) not in self._traced:
            # An interrupt inside PyTorch's tracer may end the process or leave a tracing mode enabled permanently.
            with Uninterrupted():
                program = self._recorded(self._asked(batch, training))
            self._traced[batch, training] = program
            self._use(batch)
        return self._traced[batch, training]

    def outline(self, batch: int, training: bool = True) -> Program:
        """The traced step for a batch size; for `BATCH`, that of any batch size, to look at its structure.

        Before the first call it is recorded for a few rows, without choosing implementations.
        """
        if not isinstance(batch, BatchExtent):
            return self.program(batch, training)
        known = [program for (_, trains), program in self._traced.items() if trains == training]
        if known:
            return known[-1]
        if training not in self._outlines:
            with Uninterrupted():
                step = replace(self._asked(int(batch), training), chooses_kernels=False, memory_limit=None)
                self._outlines[training] = pipeline.program(step)
        return self._outlines[training]

    def _asked(self, batch: int, training: bool) -> Step:
        """What to compute; meanwhile, a linked graph may ask what this one computes for it."""
        self.is_recording = True
        try:
            return self._step(batch, training)
        finally:
            self.is_recording = False

    def _recorded(self, step: Step) -> Program:
        if step.fusion is Fusion.LATER:
            fused_cache.read_ahead()
        if self.channels_last is None:  # the first program decides for all others
            self.channels_last = pipeline.decided(step).channels_last
        return pipeline.program(replace(step, channels_last=self.channels_last))

    def executable(self, part: PartName, batch: int, call: str = "execute") -> Executable:
        """A part of the step for a batch size; built if it is not there yet."""
        found = self.executables.get((part, batch))
        if found is None:
            if self.executables:
                logger.info("compiling %s for batch size %d", part, batch)
            self._make(part, batch, call)
            found = self.executables[part, batch]
        if batch != self.last_batch:
            self._use(batch)
        return found

    def in_use(self, part: PartName, batch: int) -> Executable:
        """What runs an existing part: its executable, or the fused one that has taken over."""
        switch = self.switches.get(batch) if part is PartName.STEP else None
        fused = None if switch is None else switch.fused
        return fused or self.executables[part, batch]

    @property
    def plan(self) -> MemoryPlan:
        """The memory that whole calls need: the maximum over everything compiled so far, fused or not yet."""
        known = [(key, plan) for key, plan in [*self.plans.items()] if key in self.executables]  # another thread adds
        plans = (self.in_use(*key).fused_plan or plan for key, plan in known)
        return max(plans, key=lambda plan: plan.total, default=MemoryPlan())

    def plan_for(self, part: PartName, batch: int) -> MemoryPlan:
        """The memory that a part would need for a batch size; no executable is built."""
        step, parts = self.settled(part, batch)
        return self._plan(part, step, parts)

    def _plan(self, part: PartName, step: Step, parts: Mapping[PartName, Part]) -> MemoryPlan:
        if part in PASSES:
            return memory.plan_passes(step, parts)
        if part == PartName.SHARD and not step.shards:  # one of the batches of an update
            return memory.plan_accumulating(step, parts)
        return own_plan(step, parts) if PartName.LAST in parts else memory.plan(step, parts[part])

    def settled(self, part: PartName, batch: int) -> tuple[Step, dict[PartName, Part]]:
        """A part, or all three passes, ready to run."""
        with FullCollectionsDeferred():
            program = self.program(batch, training=part not in WITHOUT_TRAINING)
            parts = self._parts(part, program)
            return program.step, {name: pipeline.settled(one, program.step, name) for name, one in parts.items()}

    def shard(self, batch: int) -> tuple[Step, Part]:
        """The part `shard` as it was recorded."""
        program = self.program(batch)
        return program.step, self._shard(program)

    def report(self, part: PartName, batch: int) -> pipeline.Report:
        """The passes that ran for a part and their effects; they are rerun for this."""
        step = self.program(batch, training=part != PartName.INFERENCE).step
        return pipeline.report(step, part, lambda program: self._parts(part, program)[part])

    def keep(self, key: Key) -> bool:
        """Whether all whole calls that are built return a result."""
        built = (one.part.outputs for (name, _), one in self.executables.items() if name not in PASSES)
        return all(key in outputs for outputs in built)

    def shared(
        self,
        step: Callable[[int, bool], Step],
        kept: KeptKeys,
        require_fit: Callable[[MemoryPlan, PartName, int, str], None],
        rebuilds: bool,
    ) -> Programs:
        """The same programs for another compilation; if it `rebuilds`, with executables of its own."""
        other = Programs(step, kept, require_fit, self.channels_last)
        other._traced, other._recent, other._arena = self._traced, self._recent, self._arena
        other._outlines = self._outlines
        if not rebuilds:
            other.executables, other.plans, other.last_batch = self.executables, self.plans, self.last_batch
            other.switches = self.switches
        return other

    def release(self) -> None:
        """Releases the memory of steps, because others replace them.

        Programs and executables refer to each other. Python's collector would find them later; until then, the memory
        of the old steps would be in use beside that of the new ones.
        """
        for one in self.executables.values():
            one.release()
        self._arena.release()

    def _make(self, part: PartName, batch: int, call: str) -> None:
        """Plans everything, and rejects it if it does not fit, before building an executable."""
        step, parts = self.settled(part, batch)
        plan = self._plan(part, step, parts)
        self._require_fit(plan, part, batch, call)
        if step.memory_limit is not None and part not in pipeline.WHOLE:
            step = replace(step, fusion=Fusion.NEVER)  # what one pass leaves for the next is not in its own plan
        is_first = all(name is not part for name, _ in self.executables)
        made = {(name, batch): Executable(one, step, self._arena, None, is_first) for name, one in parts.items()}
        if part in pipeline.WHOLE:
            self.plans[part, batch] = plan
        if part is PartName.STEP and switches(parts[part], step):
            threads = torch.get_num_threads()
            self.switches[batch] = Switch(made[part, batch], lambda: self._for_the_compiler(batch, threads))
        self.executables |= made

    def _for_the_compiler(self, batch: int, threads: int) -> tuple[Part, Step]:
        """A whole step recorded as if it were fused before the first call.

        This calls the layers again, which may do something else by now than what has run until then. The numbers of
        threads may differ, too, by which implementations are chosen.
        """
        again = replace(self._asked(batch, True), channels_last=bool(self.channels_last))
        with openmp.threads(threads):
            first, now = (self._whole(one) for one in (self.program(batch), pipeline.program(again)))
        if not outline.are_alike(first, now):
            raise StateError("execute", "a layer computes something else than when the graph was compiled")
        step = replace(again, fusion=Fusion.FIRST)
        return pipeline.settled(self._whole(pipeline.program(step)), step, PartName.STEP), step

    def _whole(self, program: Program) -> Part:
        return self._parts(PartName.STEP, program)[PartName.STEP]

    def _use(self, batch: int) -> None:
        """Marks a batch size as used, and evicts the least recently used one."""
        self._recent.pop(batch, None)
        self._recent[batch], self.last_batch = None, batch
        first = next((size for size, _ in self._traced), batch)
        while len(self._recent) > MOST + 1:
            oldest = next(size for size in self._recent if size != first)
            del self._recent[oldest]
            logger.info("discarding the programs for batch size %d", oldest)
            self._traced = {key: one for key, one in self._traced.items() if key[0] != oldest}
            self.executables = {key: one for key, one in self.executables.items() if key[1] != oldest}
            self.plans = {key: one for key, one in self.plans.items() if key[1] != oldest}
            self.switches.pop(oldest, None)

    def _parts(self, part: PartName, program: Program) -> dict[PartName, Part]:
        limit = program.step.memory_limit
        match part:
            case PartName.STEP | PartName.INFERENCE:
                return {part: phases.whole(program, self._kept(program))}
            case PartName.SHARD | PartName.LAST:
                both = self._shard(program)
                last = {} if program.step.ownership is None else {PartName.LAST: both}
                return {PartName.SHARD: both, **last, PartName.UPDATE: phases.split(program).update}
            case PartName.EVALUATION:
                every = [value(t) for node in program.step.nodes for t in node.results]
                return {part: phases.whole(program, every if limit is None else self._kept(None))}
            case PartName.FORWARD_ONLY:
                results = [key for key in self._kept(None) if key.kind == KeyKind.VALUE]
                return {part: phases.extract(program, {Phase.FORWARD}, results)}
            case _:
                three = phases.split(program)
                return dict(zip(PASSES, (three.forward, three.gradient, three.update), strict=True))

    def _shard(self, program: Program) -> Part:
        learned = [gradient(tensor) for tensor in program.step.trainable]
        wanted = [key for key in (*self._kept(program), *learned) if key in program.outputs]
        return phases.extract(program, {Phase.FORWARD, Phase.GRADIENT}, list(dict.fromkeys(wanted)))
