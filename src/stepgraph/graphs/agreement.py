"""What must be true before ranks train a graph together, and what they then have in common."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import fx

from stepgraph import draw
from stepgraph.compiler import phases
from stepgraph.compiler.kernels.preferences import kind
from stepgraph.compiler.program import Phase, Program, fake, reached
from stepgraph.compiler.step import KeyKind, gradient, value
from stepgraph.errors import ArgumentError, StateError
from stepgraph.graphs.compilation import Compilation
from stepgraph.graphs.session import Session
from stepgraph.runtime.rank_calls import listed, note_told
from stepgraph.runtime.world import World
from stepgraph.tensors.extents import can_be_cut

logger = logging.getLogger("stepgraph")
_FAILED = "-" * 16  # in place of a digest
SLICED = (KeyKind.STATE, KeyKind.AVERAGE)  # what each rank has a part of


def require_divisible(compiled: Compilation) -> None:
    """Rejects a graph whose batches cannot be cut into shards."""
    where, declared = f"{compiled.declaration.kind}.compile", compiled.declaration
    if not compiled.losses or declared.optimizer is None:
        missing = "optimizer" if compiled.losses else "loss"
        raise StateError(where, f"the graph has no {missing}, so there is no update to divide", fix=f"add a {missing}")
    if declared.user_gradients:
        owner = next(iter(declared.user_gradients))
        problem = f"{owner!r} takes a gradient from outside, which cannot be cut into shards"
        raise StateError(where, problem, fix="compile without parallel")
    for tensor in compiled.feeds.tensors:
        if not can_be_cut(tensor.shape):
            problem = f"{compiled.feeds.titles[tensor]} has no rows that can be cut into shards: {list(tensor.shape)}"
            raise ArgumentError(where, problem, fix="make its first extent BATCH or a multiple, and no other")
    program = compiled.programs.outline(compiled.rows_at_once(compiled.feeds.batch))
    for key in phases.extract(program, {Phase.FORWARD}, []).written:
        if key.kind == KeyKind.VALUE and key.owner not in program.step.statistics:
            name = program.step.names.get(key.owner, key.owner.label)
            problem = f"the forward pass changes the parameter '{name}', which shards would do differently"
            raise StateError(where, problem, fix="leave maximum_norm out, or compile without parallel")


def warn_of_shared_rows(compiled: Compilation) -> None:
    """Warns of a layer that combines the rows of a batch, such as a mean over them: a shard has only its own rows.

    The extents of its results show it: of a result with a gradient, exactly one must follow the number of rows. Layers
    that combine rows inside, as batch normalization does, are not found.
    """
    rows = compiled.rows_at_once(compiled.feeds.batch)
    program = compiled.programs.outline(rows)
    few, many = (compiled.step(count, True).descriptors for count in (int(rows), int(rows) * compiled.shards))
    names = draw.unique_names(node.layer for node in compiled.nodes)
    batched = {tensor for tensor in compiled.feeds.tensors if compiled.feeds.is_batched(tensor)}
    fed = [node for key, node in program.inputs.items() if key.owner in batched]
    read = reached(fed, lambda node: node.users)
    # A loss that the graph computes is combined by rows, as its layer says.
    combined = {t for one in compiled.losses if not one.layer.takes_labels for t in one.sources}
    for node in (one for one in compiled.nodes if compiled.shards > 1 and not one.is_loss):
        for tensor in (one for one in node.results if one not in combined):
            shapes = few[tensor].shape, many[tensor].shape
            follows = sum(one != other for one, other in zip(*shapes, strict=True))
            if follows != 1 and gradient(tensor) in program.outputs and program.outputs[value(tensor)] in read:
                logger.warning(
                    "'%s' combines the rows of a batch, but only those of its own shard: the numbers differ from those "
                    "of a graph without parallel",
                    names[node.layer],
                )
                return


def digest(compiled: Compilation) -> str:
    """Identifies what a rank computes: its operators, shapes, settings and versions."""
    program = compiled.programs.outline(compiled.rows_at_once(compiled.feeds.batch))
    optimizer, settings = compiled.declaration.optimizer, compiled.settings
    assert optimizer is not None
    numbers = {name: one for name, one in optimizer.settings.items() if isinstance(one, int | float)}
    facts = [
        (sys.modules["stepgraph"].__version__, torch.__version__, compiled.device.torch.type),
        kind() if compiled.device.torch.type == "cpu" else (),
        (int(settings.options), settings.compute_type, settings.parallel, compiled.feeds.batch),
        (optimizer.rule, sorted(numbers.items()), compiled.declaration.average),
        [
            compiled.numbered(some)
            for some in (compiled.declaration.outputs.values(), compiled.declaration.kept_outputs)
        ],
        compiled.declaration.keeps_predictions,
        _signatures(program),
        _operators(program),
    ]
    return hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]


def _signatures(program: Program) -> list[tuple[str, Any, Any]]:
    """What the program reads, without optimizer state, of which each rank has its own part."""
    inputs = ((key, fake(node)) for key, node in program.inputs.items() if key.kind not in SLICED)
    return [(key.kind, tuple(one.shape), one.dtype) for key, one in inputs]


def _operators(program: Program) -> list[tuple[Any, ...]]:
    """What runs before the update, which differs between ranks; by numbers, since names depend on what is around."""
    learned = [gradient(tensor) for tensor in program.step.trainable if gradient(tensor) in program.outputs]
    part = phases.extract(program, {Phase.FORWARD, Phase.GRADIENT}, learned)
    numbers = {node: number for number, node in enumerate(part.module.graph.nodes)}

    def by_number(node: fx.Node) -> Any:
        return f"#{numbers[node]}"

    shown = ((one, fx.map_arg((one.args, one.kwargs), by_number)) for one in numbers if one.op != "placeholder")
    return [(one.op, _named(one.target), *settings) for one, settings in shown]


def _named(target: Any) -> str:
    """An operator without the address of its function, which differs between processes."""
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, FunctionType) else str(target)


@contextmanager
def compiling(world: World) -> Iterator[None]:
    """Around compiling: if it fails on this rank, the others hear of it where they compare programs."""
    place = world.place
    compared, number = place.compared, place.number
    try:
        yield
    except Exception as error:  # an exchange that has failed is not followed by another
        if not world.is_alone and (place.compared, place.number) == (compared, number) and note_told(error):
            with world.telling(error):
                _compared(_FAILED, world)
        raise


def _compared(mine: str, world: World) -> list[str]:
    """The digests of all ranks."""
    world.place.compared += 1
    sent = torch.tensor(list(mine.encode()), dtype=torch.uint8, device=world.device)
    return [bytes(one).decode() for one in world.gather(sent, "digests of programs, in compile")().tolist()]


def require_same(compiled: Compilation, world: World) -> None:
    """Rejects, on every rank, a rank that computes something else than the first one, or cannot compile."""
    found, where = _compared(digest(compiled), world), f"{compiled.declaration.kind}.compile"
    failed = [rank for rank, one in enumerate(found) if one == _FAILED]
    if failed:
        raise StateError(where, f"{listed(failed)} could not compile", fix="see the error of that rank")
    other = next((rank for rank, one in enumerate(found) if one != found[0]), None)
    if other is not None:
        _require_same_frozen(compiled, world, where)
        raise StateError(
            where,
            f"rank {other} has another program than rank 0",
            rank_0=found[0],
            **{f"rank_{other}": found[other]},
            fix="compile the same graph, with the same settings and versions, on processors of one kind",
        )


def _require_same_frozen(compiled: Compilation, world: World, where: str) -> None:
    """Rejects parameters that only some ranks have frozen, by their names; all ranks have other programs then."""
    mine = "".join("f" if tensor in compiled.frozen else "-" for tensor in compiled.held)
    found = world.gather_texts(mine, "which parameters are frozen")
    if {*map(len, found)} != {len(mine)}:  # of different graphs
        return
    names = draw.parameter_names(compiled.nodes)
    for tensor, flags in zip(compiled.held, zip(*found, strict=True), strict=True):
        frozen, others = ([rank for rank, one in enumerate(flags) if (one == "f") == is_so] for is_so in (True, False))
        if frozen and others:
            has, have_not = ("has" if len(some) == 1 else "have" for some in (frozen, others))
            name = names.get(tensor, tensor.label)
            problem = f"{listed(frozen)} {has} frozen '{name}', and {listed(others)} {have_not} not"
            raise StateError(where, problem, fix="freeze and unfreeze the same parameters on every rank")


@torch.inference_mode()
def share_state(session: Session, world: World) -> None:
    """Gives every rank the parameters, statistics and seed of the first one.

    Each rank has its own part of the optimizer's state and of the averages, which have not learned anything yet.
    """
    if not world.is_alone:
        for array in (one for key, one in session.arrays().items() if key.kind not in SLICED):
            array.copy_(world.share(array, "the first parameters"))
