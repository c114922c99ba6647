"""One compilation of a declaration: what to compute for each batch size, and the programs that compute it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any
from zlib import crc32

import torch

from stepgraph import draw
from stepgraph.compiler import filters
from stepgraph.compiler.memory import MemoryPlan
from stepgraph.compiler.passes.exchange import gradient_buckets
from stepgraph.compiler.passes.recompute import largest_batch
from stepgraph.compiler.program import PartName, Program, fake
from stepgraph.compiler.ranks.parallel import TREE, Parallel
from stepgraph.compiler.ranks.slices import Ownership, Traffic, slices, traffic
from stepgraph.compiler.settings import Settings, fusion_of
from stepgraph.compiler.step import Key, Limit, Step, gradient, layer_tensors, source_gradient, value
from stepgraph.device import Device
from stepgraph.errors import ArgumentError, DataError, MemoryLimitError, StateError, StepgraphError
from stepgraph.layers.node import Node
from stepgraph.optimizers import assigned, require_matches
from stepgraph.runtime.blame import unread
from stepgraph.runtime.declaration import Declaration
from stepgraph.runtime.feeds import Data, Feeds, Names, merged
from stepgraph.runtime.programs import PASSES, Programs
from stepgraph.runtime.world import ALONE, World, joined
from stepgraph.tensors import buffers
from stepgraph.tensors.extents import BatchExtent
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import GraphCompilationOptions as Options

Arrays = dict[Key, torch.Tensor]
LARGEST = 1 << 24  # numbers of a prediction up to which a training step keeps it unasked: 64 MiB in float32

ROUNDED = {"cuda"}  # where copies of parameters in the compute type are kept: on the CPU, anyone can write to memory
DECIDED = {"cuda"}  # where the device decides if ranks can make an update: reading what they have told synchronizes
GUARDED = {"cuda"}  # where steps check indices: an operator cannot refuse one, and looking at them synchronizes


@dataclass(frozen=True, eq=False)
class Compilation:
    """A declaration compiled for a device. It changes nothing else and is replaced as a whole.

    Args:
        declaration: what is compiled, with the loss attached.
        device: where it runs.
        settings: the options of `compile`.
        constants: inputs that are not fed, with their data.
        held: parameters, statistics and constants of the layers.
        handles: gradients that are read through tensors.
        group: the compilations of all linked graphs, including this one.
        index: its index in the group.
        channels_last: the layout of images, if earlier programs of the graph have decided it.
    """

    declaration: Declaration
    device: Device
    settings: Settings
    constants: Mapping[Tensor, torch.Tensor]
    held: tuple[Tensor, ...]
    handles: Mapping[Key, Tensor]
    group: list[Compilation]
    index: int
    channels_last: bool | None = None

    @cached_property
    def programs(self) -> Programs:
        """The programs that can run; each is built on first use."""
        return Programs(self.step, self.kept, self.require_fit, self.channels_last)

    def renewed(self, group: list[Compilation], declaration: Declaration) -> Compilation:
        """The same with other details of the declaration, in a new group, which it joins."""
        layout = self.programs.channels_last
        new = replace(self, declaration=declaration, group=group, index=len(group), channels_last=layout)
        group.append(new)
        return new

    def redeclared(self, *, rebuilds: bool = False, **declared: Any) -> Compilation:
        """The same programs for another declaration, which `rebuilds` executables if they must keep other results."""
        new = replace(self, declaration=replace(self.declaration, **declared))
        new.__dict__["frozen"] = self.frozen
        new.__dict__["programs"] = self.programs.shared(new.step, new.kept, new.require_fit, rebuilds)
        return new

    # What is computed

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, the loss included."""
        return self.declaration.nodes

    @cached_property
    def feeds(self) -> Feeds:
        """The tensors that receive data in each call."""
        return self.declaration.feeds

    @cached_property
    def losses(self) -> tuple[Node, ...]:
        """The losses, whose sum a call minimizes."""
        return tuple(node for node in self.nodes if node.is_loss)

    @cached_property
    def loss_names(self) -> tuple[str, ...]:
        """The names of the losses, in order."""
        return tuple(draw.loss_names(self.nodes).values())

    @cached_property
    def predictions(self) -> Names:
        """The results that the graph is asked for, by name."""
        return self.declaration.predictions

    def numbered(self, tensors: Iterable[Tensor]) -> int:
        """A number for some tensors in their order, which other ranks have for them, too."""
        everything = [*self.feeds.tensors, *self.held, *(made for node in self.nodes for made in node.results)]
        places = {tensor: place for place, tensor in enumerate(everything)}
        return crc32(repr([places.get(tensor, -1) for tensor in tensors]).encode())

    @cached_property
    def whole(self) -> PartName:
        """The name of the part that runs a whole call, or a shard of one."""
        if not self.declaration.trains:
            return PartName.INFERENCE
        return PartName.SHARD if self.is_divided else PartName.STEP

    @cached_property
    def shards(self) -> int:
        """The parts of an update's batch; 0 if `parallel` does not say it."""
        parallel = self.settings.parallel
        return parallel.shards if parallel is not None and self.declaration.trains else 0

    @cached_property
    def is_divided(self) -> bool:
        """Whether updates run in shards. The only shard of a single rank is a whole step."""
        return self.shards > 1 or not self.world.is_alone

    @property
    def _parallel(self) -> Parallel | None:
        """What other ranks must be able to repeat; None if there cannot be any, so that a step is an ordinary one."""
        parallel = self.settings.parallel
        return None if parallel is not None and parallel.shards == 1 and self.world.is_alone else parallel

    @cached_property
    def world(self) -> World:
        """The ranks that divide updates among themselves, joined when it is first asked."""
        parallel = self.settings.parallel
        if parallel is None or not self.shards:
            return ALONE
        found = joined(self.device.torch, parallel.timeout)
        if parallel.shards < found.size:
            problem = f"{parallel.shards} shards cannot be divided among {found.size} ranks"
            raise ArgumentError("compile", problem, fix=f"use at least {found.size} shards, or fewer ranks")
        return found

    @property
    def ownership(self) -> Ownership | None:
        """Which rank updates which part of every trained tensor; None if there is only one."""
        declared, world = self.declaration, self.world
        optimizer = declared.optimizer
        if world.is_alone or optimizer is None:
            return None
        cut = slices(self.trainable, lambda tensor: optimizer.cuts(declared.slots(tensor)), world.size)
        parallel = self.settings.parallel
        ordered = parallel is not None and parallel.order == TREE
        return Ownership(world.rank, world.size, world.group, cut, ordered)

    @property
    def traffic(self) -> Traffic:
        """The bytes that this rank sends to others in an update."""
        step, parts = self.programs.settled(PartName.SHARD, self.usual_batch)
        if step.ownership is None:
            return Traffic(0, 0)
        ranks, together = step.ownership, gradient_buckets(parts[PartName.SHARD], step)
        return traffic(ranks.slices, together, step.shards, ranks.size, ranks.rank, order=ranks.is_ordered)

    def rows_at_once(self, batch: int) -> int:
        """The rows that a training program runs for a batch: all of them, or those of the largest shard."""
        return -(-batch // self.shards) if self.shards and not isinstance(batch, BatchExtent) else batch

    @cached_property
    def checks_numerics(self) -> bool:
        """Whether a run that produces non-finite values is rolled back."""
        return Options.CHECK_NUMERICS in self.settings.options

    @cached_property
    def checks_indices(self) -> bool:
        """Whether indices are checked before a call. On other devices operators raise if one is out of range."""
        return Options.FUSE_LAYERS in self.settings.options or self.device.torch.type != "cpu"

    @cached_property
    def images(self) -> frozenset[Tensor]:
        """Feeds that may have their channels last in memory."""
        return filters.images(self.step(int(self.feeds.batch), False))

    @property
    def guards_indices(self) -> bool:
        """Whether a step checks indices on the device, and shows in its losses that one is out of range.

        Linked graphs would not know it of one another, and a step that is rolled back would forget it. Ranks tell each
        other, where the device decides about their update.
        """
        alone = len(self.group) == 1 and not self.checks_numerics
        tells = not self.shards or self.world.is_alone or self.decides
        return self.device.torch.type in GUARDED and bool(self.losses) and alone and tells

    @property
    def decides(self) -> bool:
        """Whether the device decides if an update counts. A step that may be rolled back is looked at anyway."""
        return self.device.torch.type in DECIDED and not (self.world.is_alone or self.checks_numerics)

    @property
    def guarded(self) -> dict[Tensor, Limit]:
        """Tensors whose indices a step checks, and what they may be; in the order of its notes."""
        return self.step(int(self.feeds.batch), True).guarded if self.guards_indices else {}

    def step(self, batch: int, training: bool) -> Step:
        """What to compute for a batch size."""
        settings, device = self.settings, self.device.torch
        plain = Step(
            self.nodes,
            self.feeds.tensors,
            device,
            (self.feeds.batch, batch),
            compute_type=settings.compute_type,
            chooses_kernels=settings.chooses_kernels,
            measures_kernels=settings.chooses_kernels and self._parallel is None,
            # The matrix units of GPUs read channels last; any other layout would be converted before each convolution.
            channels_last=device.type == "cuda" and Options.DETERMINISTIC not in settings.options,
            fusion=fusion_of(settings.options, device, self._parallel),
            guards=self.guards_indices,
            precision=settings.precision,
            memory_limit=settings.memory_limit,
            names=draw.parameter_names(self.nodes),
        )
        return self._learning(plain) if training and self.declaration.trains else plain

    def _learning(self, plain: Step) -> Step:
        declared, handed = self.declaration, self._handed_back()
        return replace(
            plain,
            training=True,
            trainable=self.trainable,
            wanted=self.wanted,
            optimizer=declared.optimizer,
            slots={tensor: declared.slots(tensor) for tensor in self.trainable},
            groups=self.groups(),
            shards=self.shards if self.is_divided else 0,
            ownership=self.ownership,
            decides=self.decides,
            averages=declared.optimizer is not None and declared.average is not None,
            rounds=self.device.torch.type in ROUNDED,
            seeded=self.seeded(),
            starts=frozenset(self.terminal) - {*declared.user_gradients, *self.read_elsewhere},
            shared=handed & {*self.trainable},
            stopped=declared.stopped,
            all_gradients=Options.COMPUTE_ALL_GRADIENTS in self.settings.options,
        )

    def groups(self) -> dict[Tensor, int]:
        """The optimizer's group of each trained tensor; raises an error if a group selects nothing."""
        optimizer = self.declaration.optimizer
        if optimizer is None or not optimizer.selections:
            return {}
        sharing = [one for one in self.group if one.declaration.optimizer is optimizer]
        # A graph that will be linked may have only some of the parameters.
        if len(self.group) > 1 or Options.LINK_GRAPHS not in self.settings.options:
            names = {tensor: own for one in sharing for tensor, own in one.declaration.parameter_names.items()}
            require_matches(f"{self.declaration.kind}.compile", optimizer.selections, names)
        found = assigned(optimizer.groups, self.declaration.parameter_names)
        return {tensor: found[tensor] for tensor in self.trainable} if optimizer.groups else {}

    def batch_size(self, given: int | None) -> int:
        """The batch size of a call; rejected if it differs from the declared one and the result has other rows."""
        declared = self.feeds.batch
        if given is None:
            return declared
        batch = self.feeds.batch_size(given)
        if batch == declared or self.feeds.is_open:
            return batch
        ends = [node.sources[0] for node in self.losses] or self.nodes[-1].results
        rows = {tensor.shape[0] for tensor in ends}
        if not rows & {declared, 1}:
            raise ArgumentError(
                "execute",
                f"batch_size is {batch}, but the first input has {declared} rows and the result {rows.pop()}",
                fix="declare an input whose first dimension is the batch first, or pass batch_size=None",
            )
        return batch

    @property
    def usual_batch(self) -> int:
        """The rows that programs usually run: the declared ones, or those of their largest shard.

        For `BATCH`, the most of a whole call so far, before the first those of the last program, if there is one.
        """
        if not self.feeds.is_open:
            return self.rows_at_once(self.feeds.batch)
        whole = (rows for part, rows in self.programs.executables if part == self.whole)
        return int(max(whole, default=self.programs.last_batch or self.feeds.batch))

    def prepare(self, call: str) -> None:
        """Builds what a call with the declared batch size runs; with `BATCH`, checks what can be checked before."""
        if self.feeds.is_open:
            self.programs.outline(self.feeds.batch, self.declaration.trains)
        else:
            self.programs.executable(self.whole, self.rows_at_once(self.feeds.batch), call)

    # What stays readable after a call

    def kept(self, program: Program | None = None) -> list[Key]:
        """What a whole call keeps. A training step, the `program`, keeps large predictions only if somebody asks.

        The gradient of a prediction that is not kept can overwrite it.
        """
        unasked = [t for t in self.unasked if program is None or self._keeps_unasked(t, program)]
        found = [value(tensor) for tensor in dict.fromkeys([*self._asked_results(), *unasked])]
        if self.declaration.trains:
            found += self._kept_gradients()
        return list(dict.fromkeys([*found, *map(value, unread(self.nodes))])) if self.checks_numerics else found

    @cached_property
    def compared(self) -> tuple[Tensor, ...]:
        """The predictions: the results that losses compare with labels."""
        made = {t for node in self.nodes for t in node.results}
        losses = [node for node in self.losses if node.layer.takes_labels]
        return tuple(dict.fromkeys(t for node in losses for t in node.sources if t in made))

    @property
    def unasked(self) -> list[Tensor]:
        """Results that may be asked for: predictions, and what has only a name."""
        made = {t for node in self.nodes for t in node.results}
        return [*self.compared, *(t for t in self.declaration.optional_outputs if t in made)]

    def _keeps_unasked(self, prediction: Tensor, program: Program) -> bool:
        step = program.step
        if not step.differentiates or self.declaration.keeps_predictions or self.checks_numerics:
            return True
        return fake(program.outputs[value(prediction)]).numel() <= LARGEST or prediction in self.read_elsewhere

    def _asked_results(self) -> list[Tensor]:
        """Results that stay readable after every whole call."""
        nodes = self.nodes
        watched = [t for node in self._watched() for t in node.results]
        losses = [t for node in self.losses for t in node.results]
        made = {t for node in nodes for t in node.results}
        wanted = [*self.declaration.kept_outputs, *nodes[-1].results, *losses, *watched]
        return [tensor for tensor in wanted if tensor in made]

    def _kept_gradients(self) -> list[Key]:
        """Gradients that were declared as outputs, or that belong to layers being debugged."""
        nodes, declared = self._watched(), set(self.declaration.outputs.values())
        keys = [key for key, handle in self.handles.items() if handle in declared]
        keys += [source_gradient(node, i) for node in nodes for i in range(len(node.sources))]
        keys += [gradient(t) for node in nodes for t in node.results]
        return [*dict.fromkeys(keys), *(gradient(t) for t in self.trainable if self.checks_numerics)]

    def _watched(self) -> list[Node]:
        debugging = Options.DEBUG_LAYERS in self.settings.options
        return [node for node in self.nodes if debugging and node.layer.is_debugging_enabled]

    # What is learned, alone or with linked graphs

    @cached_property
    def frozen(self) -> frozenset[Tensor]:
        """The tensors that were not updatable when the graph was compiled: all its programs see the same ones."""
        return frozenset(tensor for tensor in (*self.held, *self._candidates) if not tensor.is_updatable)

    @property
    def _candidates(self) -> dict[Tensor, None]:
        """The tensors that this graph updates if they are updatable, and no other graph updates them."""
        return dict.fromkeys((*(t for node in self.nodes for t in node.trained), *self.declaration.parameters))

    @property
    def trainable(self) -> tuple[Tensor, ...]:
        """The tensors that this graph updates."""
        left_out = self.frozen | self._owned_elsewhere
        return tuple(t for t in self._candidates if t.data_type.is_floating and t not in left_out)

    @property
    def others(self) -> list[Compilation]:
        """The compilations of the graphs linked with this one."""
        return [one for index, one in enumerate(self.group) if index != self.index]

    @property
    def _owned_elsewhere(self) -> set[Tensor]:
        """Parameters that another graph of a linked group updates: the first whose nodes train them."""
        before, after = _trained_by(self.group[: self.index]), _trained_by(self.group[self.index + 1 :])
        if not after:
            return before
        left = {t for node in self.nodes for t in node.layer.parameters.values()} - _trained_by([self])
        return before | (left & after)

    def seeded(self) -> tuple[Tensor, ...]:
        """Results that take an outside gradient: a user gradient, one of a linked graph, or the last without a loss."""
        results = [t for node in self.nodes for t in node.results if t.data_type.is_floating]
        last = {*self.terminal} - self.read_elsewhere
        asked = {*self.declaration.user_gradients, *last, *self._handed_back()}
        return tuple(t for t in results if t in asked)

    @property
    def terminal(self) -> tuple[Tensor, ...]:
        """The last results, if there is no loss after them."""
        return () if self.losses else self.nodes[-1].results

    @property
    def read_elsewhere(self) -> set[Tensor]:
        """Results that linked graphs read."""
        return {tensor for one in self.others for tensor in one.feeds.tensors}

    @property
    def wanted(self) -> frozenset[Tensor]:
        """Inputs that are results of linked graphs and can have a gradient, and parameters that those graphs update."""
        made = {t for one in self.others for node in one.nodes for t in node.results}
        handed = (t for t in self.feeds.tensors if t in made and t.data_type.is_floating)
        return frozenset(handed) | frozenset(self._owned_elsewhere)

    def _handed_back(self) -> frozenset[Tensor]:
        """Tensors for which linked graphs compute gradients."""
        return frozenset[Tensor]().union(*(one.hands_back() for one in self.others))

    def hands_back(self) -> set[Tensor]:
        """The tensors whose gradients linked graphs want and receive: those on which a loss depends."""
        if self.programs.is_recording:  # graphs that read one another rely on it
            return {*self.wanted}
        found = self.programs.outline(self.feeds.batch).outputs
        return {tensor for tensor in self.wanted if gradient(tensor) in found}

    @property
    def exchanges(self) -> bool:
        """Whether this graph exchanges gradients with a linked one."""
        if len(self.group) == 1:
            return False
        made = {t for node in self.nodes for t in node.results}
        return bool(self.wanted or made & self.read_elsewhere)

    # What it needs

    def memory_plan_for(self, batch: int) -> MemoryPlan:
        """The memory that a whole call would need with another batch size; nothing is kept."""
        if isinstance(batch, bool) or not isinstance(batch, Integral) or batch < 1:
            raise ArgumentError("memory_plan_for", f"batch_size is {batch!r}", fix="pass a number of rows")
        return self.traced_again().programs.plan_for(self.whole, self.rows_at_once(self.batch_size(batch)))

    def traced_again(self) -> Compilation:
        """The same without its programs, to trace others and forget them."""
        return replace(self, channels_last=self.programs.channels_last).among(self.world)

    def among(self, world: World) -> Compilation:
        """Itself, with ranks that need not be asked for."""
        self.__dict__["world"] = world
        return self

    def require_fit(self, plan: MemoryPlan, part: str, batch: int, call: str) -> None:
        """Rejects a plan that exceeds the memory limit; the error shows which batch size would fit."""
        limit, needed = self.settings.memory_limit, plan.total
        if limit is None or needed <= limit:
            return
        rows = "" if batch == self.feeds.batch else f" (batch_size={batch})"
        where = f"{self.declaration.kind}.{call}{rows}"
        persistent = f"{needed - plan.intermediates:,} bytes of parameters, statistics and optimizer state"
        if part == PartName.SHARD:
            where = f"{self.declaration.kind}.{call}"
            kind = "a shard" if self.is_divided else "one of the batches of an update,"
            problem = f"{kind} of {batch} rows needs {needed:,} bytes even with recomputation; the limit is {limit:,}"
            fix = f"use {'more shards or ' * self.is_divided}smaller batches, or raise the limit"
        elif part != PartName.STEP:
            problem = f"'{part}' needs {needed:,} bytes, the limit is {limit:,}"
            whole = "run whole steps with execute, which can recompute results, or raise the limit"
            fix = whole if part in PASSES else "use fewer rows, or raise the limit"
        elif call == "add_outputs":
            problem = f"with these outputs the step needs {needed:,} bytes, the limit is {limit:,}"
            fix = "declare fewer outputs, or raise the limit"
        else:
            problem = f"the step needs {needed:,} bytes even with recomputation; the limit is {limit:,}"
            largest = largest_batch(self._needed, batch, needed, limit)
            fix = f"use a batch size of at most {largest}" if largest else "no batch size fits: raise the limit"
        raise MemoryLimitError(where, problem, persistent=persistent, fix=fix)

    def _needed(self, batch: int) -> int | None:
        """Bytes of the step for another batch size; None if the graph cannot run with it."""
        try:
            return self.memory_plan_for(batch).total
        except StepgraphError:
            return None


def compiled(
    declaration: Declaration,
    device: Device,
    settings: Settings,
    constants: Mapping[Tensor, torch.Tensor],
    handles: Mapping[Key, Tensor],
    group: list[Compilation],
    *,
    needs_data: bool = True,
) -> Compilation:
    """A checked compilation of the declaration; nothing is traced yet. It joins the group.

    Only a compilation that is planned but never run needs no data.
    """
    for tensor in declaration.parameters if needs_data else ():
        tensor.array()  # raises, with the tensor's name, if there is nothing to train
    declared = declaration.with_loss()
    if not declared.nodes:
        raise StateError(f"{declared.kind}.compile", "the graph has no layers", fix="add nodes first")
    feeds = declared.feeds.find(declared.nodes, {*constants, *declared.parameters})
    declared = replace(declared, feeds=feeds)
    declared.require_outputs(declared.outputs, handles.values())
    held = _held(declared.nodes, {*feeds.tensors, *constants}, needs_data)
    found = Compilation(declared, device, settings, constants, held, handles, group, len(group))
    group.append(found)
    return found


def read_constants(tensors: Names, data: Data, device: Device) -> dict[Tensor, torch.Tensor]:
    """Inputs that are constant, with their data on the device."""
    found = {}
    for name, tensor in merged("constant input", {}, tensors).items():
        where, values = f"Tensor '{tensor.label}' ('{name}')", data.get(name, tensor.data)
        if values is None:
            raise DataError(where, "the constant input has no data", fix="pass it in input_tensors_data")
        found[tensor] = buffers.read(values, tensor.shape, tensor.data_type, where).to(device.torch, copy=True)
    return found


def _held(nodes: Sequence[Node], given: Collection[Tensor], needs_data: bool) -> tuple[Tensor, ...]:
    """Parameters, statistics and constants of the layers; to run, each must hold data."""
    other = {*given, *(t for node in nodes for t in node.results)}
    found: dict[Tensor, None] = {}
    for node in nodes:
        for tensor in (*node.arguments, *layer_tensors(node)):
            if needs_data and tensor not in other and not tensor.has_data:
                raise DataError(
                    node.where,
                    "one of its tensors holds no data",
                    tensor=repr(tensor),
                    fix="create it with data, fill or random, not in without_memory(), or write data with "
                    "bind_and_write_data",
                )
            if tensor not in other:
                found[tensor] = None
    return tuple(found)


def _trained_by(graphs: Iterable[Compilation]) -> set[Tensor]:
    """The parameters that nodes of these graphs train."""
    return {tensor for one in graphs for node in one.nodes for tensor in node.trained}
