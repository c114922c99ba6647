"""A step recorded as a graph of operators.

`trace` records `walk.run`, the plain PyTorch iteration, once: the traced program is the reference by construction.
Every recorded operator has its layer and phase.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler import filters, kernels
from stepgraph.compiler.modules import Module, forget_source
from stepgraph.compiler.program import Program, adopt_tags, fake, reached
from stepgraph.compiler.randomness import refuse_random
from stepgraph.compiler.recorder import Unsupported, record
from stepgraph.compiler.step import (
    AGREED,
    NUMBERS,
    OFFSETS,
    REFUSED,
    SCALE,
    SEEDS,
    SHARE,
    STREAM,
    Key,
    KeyKind,
    Step,
    average,
    gradient,
    rounded,
    state,
    user_gradient,
    value,
)
from stepgraph.compiler.walk import run
from stepgraph.errors import StateError
from stepgraph.system import forks, surroundings, torch_private
from stepgraph.tensors.tensor import Tensor, TensorDescriptor

logger = logging.getLogger("stepgraph")
# PyTorch's tracer keeps the current layer in process-wide state, so only one recording or fusion runs at a time.
recording = threading.RLock()
forks.wait_for(recording)
surroundings.hold_forks_first()


def trace(step: Step) -> Program:
    """Records `run(step, …)` on arrays without memory, whatever modes the caller is in."""
    keys = input_keys(step)
    with surroundings.tracing():
        module, outputs = _recorded(step, keys)
    program = Program.of(module, keys, outputs, step)
    _require_gradients(program)
    return program


def _recorded(step: Step, keys: Sequence[Key]) -> tuple[fx.GraphModule, list[Key]]:
    """The operators of one iteration, and their outputs in order."""
    outputs = list[Key]()

    def function(*arrays: torch.Tensor) -> list[torch.Tensor]:
        results = run(step, dict(zip(keys, arrays, strict=True)))
        outputs[:] = results
        return list(results.values())

    fakes = arguments(step)
    with recording, traceback.preserve_node_meta(), torch.autograd.set_multithreading_enabled(False):
        recorded = _operators(function, fakes)
    adopt_tags(recorded.graph)
    refuse_random(recorded.graph, step)
    return Module(recorded, recorded.graph), outputs


def _operators(function: Callable[..., list[torch.Tensor]], fakes: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The operators that a function calls."""
    try:
        return record(function, fakes)
    except Unsupported as reason:
        logger.debug("recording with make_fx: %s", reason)
    recorded = make_fx(function, tracing_mode="fake")(*fakes)
    for node in reversed(recorded.graph.nodes):
        if _has_failed(node):
            recorded.graph.erase_node(node)
    forget_source(recorded)
    return recorded


def _has_failed(node: fx.Node) -> bool:
    """Whether an operator has no result, as where a layer tried another one after that."""
    returns = isinstance(node.target, torch_private.OpOverload) and torch_private.schema(node.target).returns
    return bool(returns) and not node.users and fake(node) is None


def _require_gradients(program: Program) -> None:
    """Rejects a step that would never change a trainable tensor although a loss depends on it."""
    step = program.step
    missing = {tensor: node for tensor, node in step.reached.items() if gradient(tensor) not in program.outputs}
    losses = [program.outputs[value(node.results[0])] for node in step.losses] if missing else []
    read = reached(losses, lambda node: node.all_input_nodes)
    for tensor, node in missing.items():
        if program.inputs[value(tensor)] in read and not node.layer.may_stop_gradients:
            name = step.names.get(tensor, tensor.label)
            raise StateError(
                node.where,
                f"'{name}' is trainable and the loss depends on it, but no gradient reaches it",
                fix="keep its forward differentiable (no detach, no no_grad), freeze the layer with "
                "disable_update=True, or stop gradients explicitly with stop_gradient",
            )


def input_keys(step: Step) -> list[Key]:
    """What a step reads, in a fixed order."""
    keys = [value(tensor) for tensor in (*step.feeds, *step.held)] + [STREAM]
    if step.guarded:
        keys += [REFUSED, OFFSETS] if step.shards else [REFUSED]
    if step.differentiates:
        keys += [user_gradient(tensor) for tensor in step.seeded]
        if step.optimizer is not None:
            owned = [tensor for tensor in step.trainable if tensor in step.owned]
            keys += [state(tensor, i) for tensor in owned for i in range(len(step.slots_of(tensor)))]
            keys.append(NUMBERS)
            if step.averages:
                keys += [*map(average, owned), SHARE]
            keys += map(rounded, step.rounded)
            if step.decides:
                keys.append(AGREED)
        if step.scales_loss:
            keys.append(SCALE)
        if step.seeds_losses:
            keys.append(SEEDS)
    return keys


def arguments(step: Step) -> list[torch.Tensor]:
    """What a step reads, in the order of `input_keys`, as arrays without memory."""
    shapes = step.descriptors
    mode = torch_private.FakeTensorMode(allow_non_fake_inputs=True)
    orders = {rounded(tensor): strides for tensor, strides in filters.strides(step).items()}
    signatures = ((*_signature(step, shapes, key), orders.get(key)) for key in input_keys(step))
    return [torch_private.without_memory(mode, *one, step.device) for one in signatures]


def _signature(step: Step, shapes: Mapping[Tensor, TensorDescriptor], key: Key) -> tuple[tuple[int, ...], torch.dtype]:
    match key.kind:
        case KeyKind.VALUE | KeyKind.USER_GRADIENT:
            return shapes[key.owner].shape, key.owner.data_type.torch
        case KeyKind.STATE | KeyKind.AVERAGE:
            return step.state_shape(key.owner), key.owner.data_type.torch
        case KeyKind.ROUNDED:
            assert step.compute_type is not None
            return key.owner.shape, step.compute_type
        case KeyKind.NUMBERS:
            return step.numbers_shape, kernels.number_type(step.device)
        case KeyKind.SHARE:
            return (1,), torch.float32
        case KeyKind.SCALE:
            return (2,), torch.float32
        case KeyKind.REFUSED | KeyKind.OFFSETS:
            return (len(step.guarded),), torch.int64
        case KeyKind.AGREED:
            return (1,), torch.bool
        case KeyKind.SEEDS:
            return (len(step.losses),), torch.float32
        case _:
            return (2,), torch.int64
