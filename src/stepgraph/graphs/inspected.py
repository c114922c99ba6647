"""What a compiled graph tells about itself: how it runs, what it needs, where its numbers stop being finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from rich.console import Group, RenderableType

from stepgraph import draw
from stepgraph.compiler import memory
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.pipeline import Report
from stepgraph.compiler.step import NUMBERS, SCALE, STREAM, Key, gradient, value
from stepgraph.errors import ArgumentError, NumericsError, StateError
from stepgraph.graphs.compiled import CompiledGraph, Found
from stepgraph.runtime.blame import unread
from stepgraph.runtime.description import described
from stepgraph.runtime.executable import Binding, Executable
from stepgraph.runtime.execution import Execution, turn
from stepgraph.runtime.feeds import Data
from stepgraph.runtime.finite import all_finite
from stepgraph.runtime.numerics import NumericsReport, report
from stepgraph.runtime.profile import Profile, profile
from stepgraph.runtime.trial import Trial, everything, replay
from stepgraph.types import ExecutionOptions

_COMPLETE = ("forward", "gradient", "update", "evaluation")  # parts that give everything they compute


class _Batch(NamedTuple):
    """What one more run of a step works on: its batch size, its number, all arrays it reads."""

    batch: int
    step: int | None
    arrays: Found


class InspectedGraph(CompiledGraph):
    """A compiled graph that can be looked at: as text, as a picture, for numbers that are not finite."""

    @property
    def memory_plan(self) -> MemoryPlan:
        """What whole calls need, by kind: the largest of all batch sizes compiled so far; zero before `compile`."""
        return self._programs.plan

    @property
    def device_memory_size(self) -> int:
        """Bytes of all intermediates and optimizer state; known after `compile`, 0 before."""
        return self.memory_plan.device_memory_size

    @property
    def pipeline(self) -> Report:
        """Which passes made the compiled step, and what each did: operators, bytes of intermediates, time.

        Printed, it is a table. The passes run once more for it; the graph stays as it is.
        """
        self._require_compiled("pipeline")
        return self._programs.report("step" if self.trains else "inference", self._feeds.batch)

    @property
    def executables(self) -> list[tuple[str, int]]:
        """What has been compiled so far, as (part, batch size): it grows only when something new is asked for."""
        return list(self._programs.executables)

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = [draw.table(self._compiled or self._shown(), self._title)]
        for text in self._told():
            parts += ["", draw.lines(text)]
        return Group(*parts)

    def _repr_svg_(self) -> str:
        names = {tensor: name for _, name, tensor in self._feeds}
        return draw.svg(self._compiled or self._shown(), self._stopped, names)

    def _repr_html_(self) -> str:
        return draw.graph_html(self._title, self._repr_svg_(), self._compiled or self._shown(), *self._told())

    @property
    def _title(self) -> str:
        return f"{type(self).__name__} on {self.device}" if self.device else f"{type(self).__name__}, not compiled"

    def _told(self) -> list[str]:
        """What a compiled graph adds to its table: the memory plan, and how it runs."""
        if not self.device:
            return []
        lines = [f"  {name:<12}{text}" for name, text in self._described()]
        return [str(self.memory_plan), "\n".join(["How it runs", *lines])]

    def _described(self) -> list[tuple[str, str]]:
        """How the whole step, or the inference pass, runs."""
        part, batch = "step" if self.trains else "inference", self._feeds.batch
        return described(self._programs.program(batch, self.trains), self._programs.executables.get((part, batch)))

    # Running a step once more, to look at it

    def check_numerics(
        self,
        inputs_data: Data | None = None,
        loss_labels_data: Data | None = None,
        loss_label_weights_data: Data | None = None,
        *,
        batch_size: int | None = None,
    ) -> NumericsReport:
        """Names the first layer and phase in which a NaN or an infinity comes up, and changes nothing.

        A step is run once more, operator by operator, on copies of what it would change. What counts is what it leaves
        behind: the loss, trained gradients, parameters, optimizer state and statistics; an infinity that comes to
        nothing on the way does not.

        Args:
            inputs_data: a batch to try. Without one it is that of the last call, with the parameters of now: where its
                update has made them NaN already, the report says so, and `CHECK_NUMERICS` is what stops in time.
            loss_labels_data: its labels.
            loss_label_weights_data: its label weights.
            batch_size: its rows; the tensors' own if not given.

        Example:
            >>> print(training.check_numerics())  # doctest: +SKIP
            Everything is finite in step 12.
        """
        given = (inputs_data, loss_labels_data, loss_label_weights_data)
        device = self._require_compiled("check_numerics")
        with turn(device):
            self._refresh()
            chosen = self._chosen_batch("check_numerics", given, batch_size)
            program = self._programs.program(chosen.batch, self.trains)
            self._require_fit(memory.plan(program.step, everything(program)), "check_numerics", chosen.batch)
            return report(replay(program, chosen.arrays), chosen.step, self._feeds.spoken)

    def profile(
        self,
        inputs_data: Data | None = None,
        loss_labels_data: Data | None = None,
        loss_label_weights_data: Data | None = None,
        *,
        batch_size: int | None = None,
        repeat: int = 3,
    ) -> Profile:
        """Time by layer and phase, measured operator by operator; nothing is learned.

        Waiting for each operator costs time of its own, so the sum is more than a step takes, most of all on a GPU.
        `execute` with `PER_LAYER_PROFILING` measures a step that counts.

        Args:
            inputs_data: a batch; that of the last call if not given.
            loss_labels_data: its labels.
            loss_label_weights_data: its label weights.
            batch_size: its rows; the tensors' own if not given.
            repeat: how often the step runs; each operator counts with its least time.

        Example:
            >>> print(training.profile({"image": images}, {"label": labels}))  # doctest: +SKIP
        """
        if isinstance(repeat, bool) or not isinstance(repeat, int) or repeat < 1:
            raise ArgumentError("profile", f"repeat is {repeat!r}", fix="give a whole number ≥ 1")
        given = (inputs_data, loss_labels_data, loss_label_weights_data)
        device, found = self._require_compiled("profile"), []
        with turn(device):
            self._refresh()
            chosen = self._chosen_batch("profile", given, batch_size)
            executable = self._programs.executable("step" if self.trains else "inference", chosen.batch)
            with executable.settings():
                for _ in range(repeat):
                    read = chosen.arrays
                    copies = {key: read[key].clone() for key in executable.part.written}
                    arrays = executable.bind({**read, **copies}).filled({})
                    found.append(profile(executable.part, arrays, device.torch)[1])
        return Profile.best_of(found)

    def _chosen_batch(self, call: str, given: tuple[Data | None, ...], batch_size: int | None) -> _Batch:
        """The batch that was given, or that of the last call."""
        last = self._last
        if any(data is not None for data in given):
            batch = self._batch_size(batch_size)
            feeds = self._feeds.arrays(self._feeds.named(*given), batch, self._require_compiled(call))
            return _Batch(batch, self._next_step(), self._replayed(batch, again=False) | feeds)
        if last is None:
            raise StateError(
                f"{type(self).__name__}.{call}",
                "nothing has been executed yet",
                fix="execute a step first, or pass a batch",
            )
        return _Batch(last.batch, last.step, self._replayed(last.batch, again=True) | last.feeds)

    def _kept_keys(self) -> list[Key]:
        kept = super()._kept_keys()
        return list(dict.fromkeys([*kept, *map(value, unread(self._compiled))])) if self._checks_numerics else kept

    def _replayed(self, batch: int, again: bool) -> Found:
        """Arrays beside the feeds for running a step once more."""
        return self._arrays()

    def _next_step(self) -> int | None:
        return None if self._optimizer is None else self._optimizer.time_step

    def _run(
        self, binding: Binding, arrays: Mapping[Key, torch.Tensor], options: ExecutionOptions, execution: Execution
    ) -> Found:
        """What one run gives; with `CHECK_NUMERICS`, a run that leaves anything not finite is taken back."""
        if not self._checks_numerics:
            return super()._run(binding, arrays, options, execution)
        executable = binding.executable
        memory = dict(zip(executable.part.inputs, binding.filled(arrays), strict=True))
        before = {key: memory[key].clone() for key in executable.part.written}
        found = super()._run(binding, arrays, options, execution)
        if all_finite(_left_behind(executable, found, {key: memory[key] for key in before})):
            return found
        after = {key: memory[key].clone() for key in before}
        with torch.inference_mode():
            for key, array in before.items():
                memory[key].copy_(array)
        raise self._explained(executable, {**self._arrays(), **arrays}, found, after)

    def _explained(self, executable: Executable, arrays: Found, found: Found, after: Found) -> NumericsError:
        name, batch = next(key for key, one in self._programs.executables.items() if one is executable)
        if name in _COMPLETE:
            trial = Trial(executable.step, arrays, found, after)
        else:
            trial = replay(self._programs.program(batch, name not in ("inference", "evaluation")), arrays)
        told = report(trial, self._next_step(), self._feeds.spoken)
        if told.ok:
            return NumericsError(
                f"{type(self).__name__}.execute",
                "the compiled step made a NaN or an infinity, which it does not when run operator by operator",
                fix="compile with DETERMINISTIC as well and see whether it stays",
            )
        kept: dict[str, Any] = {"taken_back": "parameters, optimizer and statistics are as before this call"}
        return told.error(**(kept if after else {}))


def _left_behind(executable: Executable, found: Found, memory: Found) -> list[torch.Tensor]:
    """What must be finite after a run: results that no layer reads, trained gradients, and what was written."""
    step = executable.step
    results = map(value, unread(step.nodes))
    gradients = [] if step.scales_loss else map(gradient, step.trainable)
    written = [array for key, array in memory.items() if key not in (STREAM, NUMBERS, SCALE)]
    return [*(found[key] for key in (*results, *gradients) if key in found), *written]
