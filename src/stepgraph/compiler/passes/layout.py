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

from stepgraph.compiler import phases
from stepgraph.compiler.kernels import measure
from stepgraph.compiler.kernels.choose_operator import LARGE
from stepgraph.compiler.kernels.preferences import prefers_last
from stepgraph.compiler.program import Part, Phase, Program
from stepgraph.compiler.step import Fusion, Step, gradient, value
from stepgraph.compiler.trace import arguments
from stepgraph.layers.convolution import ConvolutionLayer, ConvolutionType
from stepgraph.layers.node import Node
from stepgraph.layers.pooling import PoolingLayer, PoolingType

FIRST, LAST = "channels first", "channels last"
GAIN = 0.96  # for a whole step, even this is a large gain
TOLERANCE = 1e-2  # rounding decides which of two nearly equal pixels a pool selects, and so where its gradient goes
Record = Callable[[Step], Program]
Settle = Callable[[Part, Step], Part]


def is_open(step: Step) -> bool:
    """Whether the layout can matter: convolutions in float32 with pooling between them, and nothing else decides."""
    decided = step.device.type != "cpu" or step.channels_last or step.compute_type is not None
    if decided or not step.chooses_kernels or step.fusion is Fusion.FIRST:
        return False
    return any(map(_has_implementations, step.nodes)) and any(_is_large_pool(node, step) for node in step.nodes)


def choose(step: Step, record: Record, settle: Settle) -> Step:
    """The step in its faster layout; both are tried, unless the choice is known or a rule decides.

    Args:
        step: a step for which the layout is open.
        record: the passes that turn a step into a program.
        settle: the passes that turn a part into what runs.
    """
    steps = {FIRST: step, LAST: replace(step, channels_last=True)}
    if not step.measures_kernels:
        return steps[LAST if prefers_last(step) else FIRST]
    operator, given = f"layout {_digest(step)}", arguments(step)
    chosen = measure.remembered(operator, steps, given)
    if chosen is None:
        trials = {name: _losses_and_gradients(record(one), settle) for name, one in steps.items()}
        chosen = measure.fastest(operator, trials, given, gain=GAIN, tolerance=TOLERANCE, warm=True)
    return steps[chosen]


def _has_implementations(node: Node) -> bool:
    """Whether this is a convolution of which other implementations than PyTorch's exist."""
    if not isinstance(node.layer, ConvolutionLayer):
        return False
    settings = node.layer.descriptor
    plain = settings.type is ConvolutionType.STANDARD and settings.group_count == 1 and settings.dimensions == 2
    return plain and settings.dilation_rate_in_x == settings.dilation_rate_in_y == 1


def _is_large_pool(node: Node, step: Step) -> bool:
    if not isinstance(node.layer, PoolingLayer) or node.layer.descriptor.type is not PoolingType.MAX:
        return False
    if node.layer.descriptor.dimensions != 2:
        return False
    if not step.measures_kernels:  # a rule must not depend on the batch with which a run happens to begin
        return True
    rows = step.batch[1] / step.batch[0]  # the declared shape has the declared batch
    return rows * node.sources[0].descriptor.element_count >= LARGE


def _digest(step: Step) -> str:
    """Distinguishes a step from others with the same inputs: its layers, with their settings and shapes."""
    layers = [
        (type(node.layer).__name__, repr(getattr(node.layer, "descriptor", "")), [t.shape for t in node.results])
        for node in step.nodes
    ]
    return hashlib.sha256(repr((layers, step.batch, step.differentiates)).encode()).hexdigest()[:16]


def _losses_and_gradients(program: Program, settle: Settle) -> Callable[..., Sequence[torch.Tensor]]:
    """Forward and gradient pass as a function of everything the program reads, which it does not change."""
    step = program.step
    results = [value(node.results[0]) for node in step.losses or step.nodes[-1:]]
    gradients = [gradient(tensor) for tensor in step.trainable]
    wanted = [key for key in (*results, *gradients) if key in program.outputs]
    part = phases.extract(program, {Phase.FORWARD, Phase.GRADIENT}, wanted)
    part = settle(part, step)  # the trial must respect the memory limit of the step
    position = {key: index for index, key in enumerate(program.inputs)}
    changed = frozenset(part.written)

    def run(*arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        given = ((key, arrays[position[key]]) for key in part.inputs)
        return part.module(*(array.clone() if key in changed else array for key, array in given))

    return run
