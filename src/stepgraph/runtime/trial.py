"""Runs a step for inspection: the graph does not change, and every intermediate is kept."""

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
    """One run of a step, or of a part, with everything it read and computed.

    Args:
        step: what was computed.
        before: the arrays before the run: inputs, parameters, optimizer state.
        after: the arrays that the run changed.
        found: results and gradients.
    """

    step: Step
    before: Arrays
    found: Arrays
    after: Arrays = field(default_factory=dict)


def everything(program: Program) -> Part:
    """A whole step that keeps everything it computes."""
    return phases.whole(program, list(program.outputs))


def on_copies(executable: Executable, arrays: Arrays) -> tuple[dict[Key, torch.Tensor], dict[Key, torch.Tensor]]:
    """Runs a part on copies: returns its results and the copies that it wrote to."""
    part = executable.part
    after = {key: arrays[key].clone() for key in part.written}
    with executable.settings():
        results = executable.run(executable.bind({**arrays, **after}).filled({}))
    return dict(zip(part.outputs, results, strict=True)), after


def replay(program: Program, arrays: Arrays) -> Trial:
    """Runs a whole step operator by operator on copies and keeps everything."""
    step = replace(program.step, fusion=Fusion.NEVER, chooses_kernels=False)  # not worthwhile for a single run
    found, after = on_copies(Executable(everything(program), step), arrays)
    return Trial(step, arrays, found, after)
