"""Whether images have their channels first or last in memory, for a whole step on the CPU.

Pooling vectorizes over channels if they are last, and products over patches need no reordering then. Other
convolutions prefer channels first, so no operator can decide alone. The step is traced in both layouts, each with
its own fastest kernels, and the two are timed once on synthetic data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from stepgraph.compiler import phases, pipeline
from stepgraph.compiler.kernels import measure
from stepgraph.compiler.program import PartName, Phase, Program, fake, notes
from stepgraph.compiler.step import Fusion, Step, gradient, value

FIRST, LAST = "channels first", "channels last"
GAIN = 0.96  # for a whole step, even this is a large gain
TOLERANCE = 1e-2  # rounding decides which of two nearly equal pixels a pool selects, and so where its gradient goes


def traced(step: Step) -> Program:
    """The step as a program in its faster layout; if either is possible, both are tried."""
    first = pipeline.program(step)
    if not _is_open(first):
        return first
    operator = f"layout {_digest(first)}"
    arguments = [fake(node) for node in first.inputs.values()]
    known = measure.remembered(operator, (FIRST, LAST), arguments)
    if known == FIRST:
        return first
    last = pipeline.program(replace(step, channels_last=True))
    implementations = {FIRST: _losses_and_gradients(first), LAST: _losses_and_gradients(last)}
    chosen = measure.fastest(operator, implementations, arguments, gain=GAIN, tolerance=TOLERANCE, warm=True)
    return last if chosen == LAST else first


def _digest(program: Program) -> str:
    """Distinguishes a program from others with the same inputs: its operators, with the shapes of their results."""
    found = (fake(node) for node in program.nodes)
    shapes = [tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in found]
    targets = [getattr(node.target, "__qualname__", str(node.target)) for node in program.nodes]
    return hashlib.sha256(repr(list(zip(targets, shapes, strict=True))).encode()).hexdigest()[:16]


def _is_open(program: Program) -> bool:
    """Whether the layout can matter: convolutions in float32 with pooling between them, and nothing else decides."""
    step = program.step
    if step.device.type != "cpu" or not step.chooses_kernels or step.fusion is Fusion.FIRST or step.channels_last:
        return False
    names = [(notes(node).implementation or ("",))[0] for node in program.nodes]
    return step.compute_type is None and "convolution" in names and "max_pool2d_with_indices" in names


def _losses_and_gradients(program: Program) -> Callable[..., Sequence[torch.Tensor]]:
    """Forward and gradient pass as a function of everything the program reads, which it does not change."""
    step = program.step
    results = [value(node.results[0]) for node in step.losses or step.nodes[-1:]]
    gradients = [gradient(tensor) for tensor in step.trainable]
    wanted = [key for key in (*results, *gradients) if key in program.outputs]
    part = phases.extract(program, {Phase.FORWARD, Phase.GRADIENT}, wanted)
    part = pipeline.settled(part, step, PartName.TRIAL)  # the trial must respect the memory limit of the step
    position = {key: index for index, key in enumerate(program.inputs)}
    changed = frozenset(part.written)

    def run(*arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        given = ((key, arrays[position[key]]) for key in part.inputs)
        return part.module(*(array.clone() if key in changed else array for key, array in given))

    return run
