"""Rolls back and explains runs that produce non-finite values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from stepgraph.compiler.program import PartName
from stepgraph.compiler.step import NUMBERS, SCALE, STREAM, Key, KeyKind, gradient, value
from stepgraph.errors import NumericsError
from stepgraph.runtime.blame import unread
from stepgraph.runtime.executable import Binding, Executable
from stepgraph.runtime.finite import all_finite
from stepgraph.runtime.numerics import report
from stepgraph.runtime.programs import PASSES, WITHOUT_TRAINING, Programs
from stepgraph.runtime.trial import Trial, replay
from stepgraph.tensors.tensor import Tensor

Arrays = dict[Key, torch.Tensor]
_COMPLETE = (*PASSES, PartName.EVALUATION)  # parts that return everything they compute


def rolled_back_unless_finite(
    run: Callable[[], Arrays],
    binding: Binding,
    arrays: Mapping[Key, torch.Tensor],
    explain: Callable[[Arrays, Arrays], NumericsError],
) -> Arrays:
    """Returns the results of a run. If any are not finite, it is rolled back and `explain` creates the error.

    Args:
        run: runs once, on the bound arrays and the others.
        binding: the part that runs, with the arrays that persist.
        arrays: the others.
        explain: receives what was found, and what was written and rolled back.
    """
    executable = binding.executable
    memory = dict(zip(executable.part.inputs, binding.filled(arrays), strict=True))
    before = {key: memory[key].clone() for key in executable.part.written}
    found = run()
    if all_finite(_left_behind(executable, found, {key: memory[key] for key in before})):
        return found
    after = {key: memory[key].clone() for key in before}
    with torch.inference_mode():
        for key, array in before.items():
            memory[key].copy_(array)
    raise explain(found, after)


def tried(programs: Programs, executable: Executable, before: Arrays, found: Arrays, after: Arrays) -> Trial:
    """A run that was rolled back, with all its results: those it returned, or those of another run on copies."""
    name, batch = next(key for key, one in programs.executables.items() if one is executable)
    if name in _COMPLETE:
        return Trial(executable.step, before, found, after)
    return replay(programs.program(batch, name not in WITHOUT_TRAINING), before)


def explained(trial: Trial, kind: str, step: int | None, titles: Mapping[Tensor, str], changed: bool) -> NumericsError:
    """The error for a run that was rolled back; `changed`: it had written to arrays that persist."""
    found = report(trial, step, titles)
    if found.ok:
        return NumericsError(
            f"{kind}.execute",
            "the compiled step produced a NaN or an infinity, but not when run operator by operator",
            fix="also compile with DETERMINISTIC and check whether the error persists",
        )
    kept = {"rolled_back": "parameters, optimizer state and statistics are as before this call"}
    return found.error(**(kept if changed else {}))


def _left_behind(executable: Executable, found: Arrays, memory: Arrays) -> list[torch.Tensor]:
    """What must be finite after a run: results that no layer reads, trained gradients, and written arrays."""
    step = executable.step
    results = map(value, unread(step.nodes))
    gradients = [] if step.scales_loss else map(gradient, step.trainable)
    # Copies follow parameters; one too large for their type shows in the results of the next step.
    written = [a for key, a in memory.items() if key not in (STREAM, NUMBERS, SCALE) and key.kind != KeyKind.ROUNDED]
    return [*(found[key] for key in (*results, *gradients) if key in found), *written]
