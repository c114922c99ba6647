"""Looks into a training step without taking part in it.

A whole step drops its gradients as early as it can, and a profile has to run operators one by one. Both are done here
on copies of everything that a step changes (parameters, optimizer state, statistics, the random stream), so that
training goes on bit for bit as if nobody had looked.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import torch

from stepgraph import draw
from stepgraph.compiler import memory, phases, recompute
from stepgraph.compiler.in_place import in_place
from stepgraph.compiler.step import STREAM, Fusion, Key, gradient, value
from stepgraph.compiler.trace import Program
from stepgraph.compiler.walk import FORWARD, GRADIENT
from stepgraph.data import Batch
from stepgraph.errors import MemoryLimitError
from stepgraph.runtime.executable import Executable
from stepgraph.runtime.execution import turn
from stepgraph.runtime.profile import profile
from stepgraph.tensor import Tensor
from stepgraph.training import TrainingGraph

PROFILES, SECONDS = 5, 1.0  # profiles whose median is told, unless they take longer than this together

Rows = list[tuple[str, str, float, int]]


class Probe:
    """Gradients and profiles of a compiled training graph, by looking only."""

    def __init__(self, training: TrainingGraph) -> None:
        self.training = training
        self._made: tuple[Program, Executable] | None = None

    def gradients(self, batch: Batch) -> dict[Tensor, torch.Tensor]:
        """The gradients that an update with this batch would use, by parameter, before clipping and rescaling.

        Random layers draw what they will draw in that update.
        """
        arrays = self._arrays(batch)
        executable = self._executable(batch.rows)
        for key in (STREAM, *map(value, executable.step.statistics)):  # all that these two phases change
            arrays[key] = arrays[key].clone()
        with self._turn():
            found = executable.apart(arrays)
        return {key.owner: array for key, array in found.items()}

    def profile(self, batch: Batch) -> Rows:
        """Layer, phase, seconds and bytes made by each row of a step: the median of a few runs, longest first."""
        executable = self.training._programs.executable("step", batch.rows)
        device, plan = self.training._require_compiled("fit").torch, self.training.memory_plan
        copied = plan.parameters + plan.statistics + plan.optimizer_state
        _require_within(self.training._memory_limit, plan.total + copied)
        runs: list[Rows] = []
        began = time.perf_counter()
        with self._turn():
            while len(runs) < PROFILES and (not runs or time.perf_counter() - began < SECONDS):
                arrays = self._arrays(batch)
                arrays |= {key: array.clone() for key, array in self.training._arrays().items()}
                given = [arrays[key] for key in executable.part.inputs]
                runs.append(list(profile(executable.part, given, device)[1].rows))
        return _median(runs)

    def _arrays(self, batch: Batch) -> dict[Key, torch.Tensor]:
        training = self.training
        training._ready("fit")  # as the update that follows would do
        device = training._require_compiled("fit")
        feeds = training._feeds.arrays(training._feeds.named(*batch.parts), batch.rows, device)
        return {**training._arrays(), **feeds, **training._seeds(batch.rows)}

    def _executable(self, rows: int) -> Executable:
        """Forward and gradient in one piece that gives the gradients of what is trained, and nothing else."""
        program = self.training._programs.program(rows)
        if self._made is None or self._made[0] is not program:
            step = program.step
            wanted = [gradient(t) for t in step.trainable if gradient(t) in program.outputs]
            part = phases.extract(program, {FORWARD, GRADIENT}, wanted)
            if step.memory_limit is not None:
                part = recompute.fit(step, part, step.memory_limit)
                _require_within(step.memory_limit, memory.plan(step, part).total)
            # Few runs are not worth fusing for.
            self._made = program, Executable(in_place(part), replace(step, fusion=Fusion.NEVER))
        return self._made[1]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        device = self.training._require_compiled("fit")
        with turn(device):
            if device.torch.type == "cpu":
                yield
                return
            with torch.accelerator.device_index(device.torch.index):
                yield


def _require_within(limit: int | None, needed: int) -> None:
    if limit is not None and needed > limit:
        raise MemoryLimitError(
            "report", f"looking into the step needs {draw.size(needed)}, the graph's memory_limit is {draw.size(limit)}"
        )


def _median(runs: list[Rows]) -> Rows:
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for layer, phase, took, _ in (row for run in runs for row in run):
        seconds[layer, phase].append(took)
    rows = [(layer, phase, median(seconds[layer, phase]), size) for layer, phase, _, size in runs[0]]
    return sorted(rows, key=lambda row: -row[2])
