"""The traced programs and executables of one compilation, by batch size; each is made when it is first asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from stepgraph.compiler import layout, memory, phases, recompute
from stepgraph.compiler.held import hold
from stepgraph.compiler.in_place import in_place
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.phases import Part
from stepgraph.compiler.step import Fusion, Key, Step, value
from stepgraph.compiler.trace import Program, trace
from stepgraph.compiler.walk import FORWARD
from stepgraph.runtime.block import Block
from stepgraph.runtime.executable import Executable

logger = logging.getLogger("stepgraph")


class Programs:
    """What a compiled graph can run.

    Args:
        step: what to compute for a batch size, in training or inference mode.
        kept: what stays readable after one whole call.
        channels_last: where images have their channels, if that is known already.
    """

    def __init__(
        self, step: Callable[[int, bool], Step], kept: Callable[[], Sequence[Key]], channels_last: bool | None = None
    ) -> None:
        self._step, self._kept = step, kept
        self.channels_last = channels_last
        self._traced: dict[tuple[int, bool], Program] = {}
        self.executables: dict[tuple[str, int], Executable] = {}
        self._block = Block()

    def program(self, batch: int, training: bool = True) -> Program:
        """The traced step for a batch size."""
        if (batch, training) not in self._traced:
            step = self._step(batch, training)
            if self.channels_last is None:  # the first program decides for all others
                program = layout.traced(step)
                self.channels_last = program.step.channels_last
            else:
                program = trace(replace(step, channels_last=self.channels_last))
            self._traced[batch, training] = program
        return self._traced[batch, training]

    def executable(self, part: str, batch: int) -> Executable:
        """A part of the step: `step`, `forward`, `gradient`, `update`, `forward only`, `inference` or `evaluation`."""
        if (part, batch) not in self.executables:
            if self.executables:
                logger.info("compiling %s for batch size %d", part, batch)
            program = self.program(batch, training=part not in ("inference", "evaluation"))
            for name, one in self._parts(part, program).items():
                self.executables[name, batch] = Executable(_settled(name, one, program.step), program.step, self._block)
        return self.executables[part, batch]

    def plan(self, part: str, batch: int) -> MemoryPlan:
        """What a part would need for a batch size; nothing is made that could run."""
        program = self.program(batch, training=part != "inference")
        return memory.plan(program.step, _settled(part, self._parts(part, program)[part], program.step))

    def keeping_anew(self) -> Programs:
        """The same programs, with executables that keep what is to be kept now."""
        other = Programs(self._step, self._kept, self.channels_last)
        other._traced, other._block = self._traced, self._block
        return other

    def _parts(self, part: str, program: Program) -> dict[str, Part]:
        match part:
            case "step" | "inference":
                whole, limit = phases.whole(program, self._kept()), program.step.memory_limit
                return {part: whole if limit is None else recompute.fit(program.step, whole, limit)}
            case "evaluation":
                return {part: phases.whole(program, [value(t) for node in program.step.nodes for t in node.results])}
            case "forward only":
                return {part: phases.extract(program, {FORWARD}, [k for k in self._kept() if k.kind == "value"])}
            case _:
                three = phases.split(program)
                return {"forward": three.forward, "gradient": three.gradient, "update": three.update}


def _settled(name: str, part: Part, step: Step) -> Part:
    """The part with its memory decided. A limit was kept without holding any, and a compiler plans for itself."""
    part = in_place(part)
    holds = name == "step" and step.device.type == "cpu" and step.memory_limit is None and step.chooses_kernels
    return hold(part) if holds and step.fusion is not Fusion.FIRST else part
