"""A step run for looking at it: nothing of the graph changes, and everything on the way is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from stepgraph.compiler import phases
from stepgraph.compiler.program import Part, Program
from stepgraph.compiler.step import Fusion, Key, Step
from stepgraph.runtime.executable import Executable

Arrays = Mapping[Key, torch.Tensor]


@dataclass(frozen=True)
class Trial:
    """One run of a step, or of a part, with everything it read and made.

    Args:
        step: what was computed.
        before: arrays as they were: inputs, parameters, optimizer state.
        after: those that the run has changed.
        found: results and gradients.
    """

    step: Step
    before: Arrays
    found: Arrays
    after: Arrays = field(default_factory=dict)


def everything(program: Program) -> Part:
    """A whole step that keeps all it computes."""
    return phases.whole(program, list(program.outputs))


def on_copies(executable: Executable, arrays: Arrays) -> tuple[dict[Key, torch.Tensor], dict[Key, torch.Tensor]]:
    """Runs a part so that nothing changes: what it finds, and the copies that it wrote to."""
    part = executable.part
    after = {key: arrays[key].clone() for key in part.written}
    with executable.settings():
        results = executable.run(executable.bind({**arrays, **after}).filled({}))
    return dict(zip(part.outputs, results, strict=True)), after


def replay(program: Program, arrays: Arrays) -> Trial:
    """Runs a whole step operator by operator and keeps everything; what it changes are copies."""
    step = replace(program.step, fusion=Fusion.NEVER, chooses_kernels=False)  # one run is not worth it
    found, after = on_copies(Executable(everything(program), step), arrays)
    return Trial(step, arrays, found, after)
