"""Observes a training step without affecting it.

A whole step drops its gradients as early as it can, and a profile must run operators one by one. Both run here
on copies of everything that a step changes (parameters, optimizer state, statistics, the random stream), so that
training continues bit for bit as if nothing had been observed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from stepgraph import draw
from stepgraph.compiler import memory, phases, pipeline
from stepgraph.compiler.program import PartName, Phase, Program
from stepgraph.compiler.step import Fusion, gradient
from stepgraph.errors import MemoryLimitError
from stepgraph.graphs.compilation import Compilation
from stepgraph.graphs.training import TrainingGraph
from stepgraph.runtime.executable import Executable
from stepgraph.runtime.execution import turn
from stepgraph.runtime.profile import Profile
from stepgraph.runtime.trial import on_copies
from stepgraph.tensors.tensor import Tensor


class Batch(Protocol):
    """The data of one call: inputs, labels and label weights, each by name."""

    @property
    def parts(self) -> tuple[Mapping[str, Any], ...]:
        """Inputs, labels and label weights."""

    @property
    def rows(self) -> int:
        """The batch size."""


class Probe:
    """Gradients and profiles of a compiled training graph, without changing it."""

    def __init__(self, training: TrainingGraph) -> None:
        self.training = training
        self._made: tuple[Program, Executable] | None = None

    def gradients(self, batch: Batch) -> dict[Tensor, torch.Tensor]:
        """The gradients that an update with this batch would use, by parameter, before clipping and rescaling.

        Random layers draw the same numbers as in that update.
        """
        session = self.training.refreshed("fit")  # as the next update would do
        feeds = session.feeds.arrays(session.feeds.named(*batch.parts), batch.rows, session.device)
        arrays = {**session.arrays(), **feeds, **session.seeds(batch.rows)}
        executable = self._executable(session.compilation, batch.rows)
        with turn(session.device):
            found, _ = on_copies(executable, arrays)
        return {key.owner: array for key, array in found.items()}

    def profile(self, batch: Batch, runs: int) -> Profile:
        """Time by layer and phase of a step with this batch, the minimum over several runs."""
        plan = self.training.memory_plan
        copied = plan.parameters + plan.statistics + plan.optimizer_state
        limit = self.training.require_session("fit").compilation.settings.memory_limit
        _require_within(limit, plan.total + copied)
        return self.training.profile(*batch.parts, batch_size=batch.rows, repeat=runs)

    def _executable(self, compiled: Compilation, rows: int) -> Executable:
        """Forward and gradient as one part that returns only the gradients of trained tensors."""
        program = compiled.programs.program(rows)
        if self._made is None or self._made[0] is not program:
            step = replace(program.step, fusion=Fusion.NEVER, chooses_kernels=False)  # not worthwhile for a few runs
            wanted = [gradient(t) for t in step.trainable if gradient(t) in program.outputs]
            part = phases.extract(program, {Phase.FORWARD, Phase.GRADIENT}, wanted)
            part = pipeline.settled(part, step, PartName.TRIAL)
            if step.memory_limit is not None:
                _require_within(step.memory_limit, memory.plan(step, part).total)
            self._made = program, Executable(part, step)
        return self._made[1]


def _require_within(limit: int | None, needed: int) -> None:
    if limit is not None and needed > limit:
        raise MemoryLimitError(
            "report",
            f"observing the step needs {draw.size(needed)}, but the memory_limit is {draw.size(limit)}",
        )
