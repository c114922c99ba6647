"""What to trace: nodes, which tensors are fed, held or updated, and where gradients flow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from stepgraph.compiler.ranks.slices import Ownership
from stepgraph.errors import ShapeError, StateError, StepgraphError, shown_as
from stepgraph.layers.layer import Layer
from stepgraph.layers.node import Node
from stepgraph.optimizers import Optimizer
from stepgraph.random import Drawn
from stepgraph.system.surroundings import FULL, Precision
from stepgraph.tensors.extents import BatchExtent, shape_at
from stepgraph.tensors.tensor import Tensor, TensorDescriptor


class KeyKind(StrEnum):
    """What an array is. The texts appear in the argument names of generated code."""

    VALUE = "value"
    GRADIENT = "gradient"
    SOURCE_GRADIENT = "source gradient"
    USER_GRADIENT = "user gradient"
    STATE = "state"
    AVERAGE = "average"
    PIECE = "piece"
    PARTIAL = "partial sum"
    TOTAL = "total"
    NEWS = "news"
    HEARD = "heard"
    AGREED = "agreed"
    ROUNDED = "rounded"
    SHARE = "share"
    NUMBERS = "numbers"
    STREAM = "stream"
    SCALE = "scale"
    SEEDS = "seeds"
    REFUSED = "refused"
    OFFSETS = "offsets"
    HANDED_ON = "handed on"


# Python 3.11 needs as long to look up a member of an enum as to hash a key, and calls make keys.
_VALUE, _GRADIENT, _STATE = KeyKind.VALUE, KeyKind.GRADIENT, KeyKind.STATE
_SOURCE_GRADIENT, _USER_GRADIENT = KeyKind.SOURCE_GRADIENT, KeyKind.USER_GRADIENT


class Key(NamedTuple):
    """The name of one array that enters or leaves a program."""

    kind: KeyKind
    owner: Any = None
    position: int = 0


def value(tensor: Tensor) -> Key:
    """The array of a tensor."""
    return Key(_VALUE, tensor)


def gradient(tensor: Tensor) -> Key:
    """The derivative of the loss with respect to a tensor, summed over its readers."""
    return Key(_GRADIENT, tensor)


def source_gradient(node: Node, index: int) -> Key:
    """One node's own contribution to the gradient of one of its sources."""
    return Key(_SOURCE_GRADIENT, node, index)


def user_gradient(tensor: Tensor) -> Key:
    """A gradient that comes from outside the graph."""
    return Key(_USER_GRADIENT, tensor)


def state(parameter: Tensor, index: int) -> Key:
    """One optimizer buffer of a parameter."""
    return Key(_STATE, parameter, index)


def average(parameter: Tensor) -> Key:
    """The moving average of a parameter."""
    return Key(KeyKind.AVERAGE, parameter)


def piece(parameter: Tensor) -> Key:
    """The part of a parameter's gradient that this rank needs for its update."""
    return Key(KeyKind.PIECE, parameter)


def partial_sum(bucket: int, index: int) -> Key:
    """One of the sums that the earlier shards of a rank leave behind, of the gradients of a bucket."""
    return Key(KeyKind.PARTIAL, bucket, index)


def total(bucket: int) -> Key:
    """This rank's part of the gradients of a bucket, summed over all shards."""
    return Key(KeyKind.TOTAL, bucket)


def rounded(parameter: Tensor) -> Key:
    """The copy of a parameter in the compute type."""
    return Key(KeyKind.ROUNDED, parameter)


class Limit(NamedTuple):
    """The upper bound of an index, the layer that requires it, and the indices it ignores, in range or not."""

    extent: int
    where: str
    what: str
    ignored: frozenset[int] = frozenset()

    def allows(self, index: int) -> bool:
        """Whether the layer accepts an index."""
        return 0 <= index < self.extent or index in self.ignored

    def narrowed(self, other: Limit) -> Limit:
        """What both accept; an error names the layer with the smaller range."""
        smaller = self if self.extent <= other.extent else other
        both = (one for one in self.ignored | other.ignored if self.allows(one) and other.allows(one))
        return smaller._replace(ignored=frozenset(both))


NEWS = Key(KeyKind.NEWS)  # what this rank tells the others, see `compiler/ranks/news.py`, and its shares in the losses
HEARD = Key(KeyKind.HEARD)  # what all ranks have told
AGREED = Key(KeyKind.AGREED)  # whether all ranks can make an update, where the device decides it
NUMBERS = Key(KeyKind.NUMBERS)  # the optimizer's live numbers
SHARE = Key(KeyKind.SHARE)  # the weight of new parameters in their moving averages
STREAM = Key(KeyKind.STREAM)  # [seed, step] of the random stream
SCALE = Key(KeyKind.SCALE)  # the loss scale, and the finite steps since it last changed
REFUSED = Key(KeyKind.REFUSED)  # the first index out of range, see `compiler/guard.py`; zeros if there was none
OFFSETS = Key(KeyKind.OFFSETS)  # what to add to the place of an index in a shard, for its place in the batch
SEEDS = Key(KeyKind.SEEDS)  # the factor of each loss's gradient: 1, but for parts of a larger batch


class Fusion(Enum):
    """When PyTorch's compiler fuses operators."""

    NEVER = "never"
    LATER = "in the background, while unfused steps run"
    FIXED = "at a fixed step, if the step is tiny"
    FIRST = "before the first step"


@dataclass(frozen=True, eq=False)
class Step:
    """One iteration over a graph, for one batch size, one device and one mode.

    Args:
        nodes: what to run, in order.
        feeds: tensors passed with each call (inputs, labels, label weights).
        batch: the declared batch size and this step's.
        training: whether layers run in training mode.
        trainable: tensors that the optimizer updates, in a fixed order.
        wanted: other tensors to compute gradients for.
        optimizer: how trainable tensors are updated; None leaves them unchanged.
        slots: the optimizer's buffers of trainable tensors, where they are not the same for all.
        groups: the number of the optimizer's group that each trainable tensor is in; empty if there are no groups.
        shards: the parts of a batch that are run one after another before an update; 0 if batches are not divided.
        ownership: which rank updates which part of every parameter; None if there is only one.
        averages: whether the update also moves an average of each trainable tensor.
        rounds: whether the update also writes trainable tensors in the compute type, for layers that read them so.
        seeded: results that receive a gradient from outside the graph.
        starts: those of them that serve as the loss if they are a single number and no gradient was written.
        shared: trainable tensors for which linked graphs also compute gradients.
        stopped: tensors that pass no gradient back.
        all_gradients: compute all gradients, including those of inputs and frozen parameters.
        compute_type: the type layers compute in, if it differs from what tensors declare.
        chooses_kernels: whether to look for faster implementations.
        measures_kernels: whether they are compared by measuring; otherwise a rule decides, the same on every rank.
        channels_last: whether images between convolutions have their channels last in memory.
        fusion: when PyTorch's compiler fuses operators.
        guards: whether indices are checked on the device, by the step itself; a call that has one out of range changes
            nothing.
        decides: whether the device decides, by what ranks have told each other, if an update changes anything;
            otherwise the host does, before it.
        precision: what a GPU may round float32 factors to.
        memory_limit: bytes that the whole step may need, including parameters and optimizer state.
        names: the names of layers and parameters in profiles and plans.
    """

    nodes: tuple[Node, ...]
    feeds: tuple[Tensor, ...]
    device: torch.device
    batch: tuple[int, int] = (0, 0)
    training: bool = False
    trainable: tuple[Tensor, ...] = ()
    wanted: frozenset[Tensor] = frozenset()
    optimizer: Optimizer | None = None
    slots: Mapping[Tensor, tuple[str, ...]] = field(default_factory=dict)
    groups: Mapping[Tensor, int] = field(default_factory=dict)
    shards: int = 0
    ownership: Ownership | None = None
    averages: bool = False
    rounds: bool = False
    seeded: tuple[Tensor, ...] = ()
    starts: frozenset[Tensor] = frozenset()
    shared: frozenset[Tensor] = frozenset()
    stopped: frozenset[Tensor] = frozenset()
    all_gradients: bool = False
    compute_type: torch.dtype | None = None
    chooses_kernels: bool = True
    measures_kernels: bool = True
    channels_last: bool = False
    fusion: Fusion = Fusion.NEVER
    guards: bool = False
    decides: bool = False
    precision: Precision = FULL
    memory_limit: int | None = None
    names: Mapping[Any, str] = field(default_factory=dict)

    @cached_property
    def held(self) -> tuple[Tensor, ...]:
        """Tensors that keep their arrays between calls: parameters, statistics, constants."""
        other = {*self.feeds, *(tensor for node in self.nodes for tensor in node.results)}
        read = (tensor for node in self.nodes for tensor in (*node.arguments, *layer_tensors(node)))
        return tuple(dict.fromkeys(t for t in (*read, *self.trainable) if t not in other))

    @cached_property
    def fed(self) -> frozenset[Tensor]:
        """`feeds`, as a set."""
        return frozenset(self.feeds)

    @cached_property
    def statistics(self) -> tuple[Tensor, ...]:
        """Tensors that the forward pass changes."""
        return tuple(dict.fromkeys(t for node in self.nodes for t in node.layer.statistics.values()))

    @cached_property
    def trainable_set(self) -> frozenset[Tensor]:
        """`trainable`, as a set."""
        return frozenset(self.trainable)

    @cached_property
    def first_use(self) -> dict[Tensor, int]:
        """The first node that reads a tensor, which is the last one the reverse walk visits."""
        found: dict[Tensor, int] = {}
        for index, node in enumerate(self.nodes):
            for tensor in (*node.sources, *layer_tensors(node)):
                found.setdefault(tensor, index)
        return found

    @cached_property
    def losses(self) -> tuple[Node, ...]:
        """The nodes whose results are minimized."""
        return tuple(node for node in self.nodes if node.is_loss)

    @cached_property
    def seeds_losses(self) -> bool:
        """Whether each loss has a factor: the share of a part in a mean, which may differ from loss to loss."""
        return self.training and (len(self.losses) > 1 or self.shards > 0)

    @cached_property
    def scales_loss(self) -> bool:
        """Whether gradients would vanish in the compute type's narrow range without a scaled loss."""
        return self.compute_type is torch.float16 and self.differentiates

    @property
    def updates_last(self) -> bool:
        """Whether no parameter may be updated before all gradients are known."""
        return self.scales_loss or (self.optimizer is not None and self.optimizer.needs_global_norm)

    @cached_property
    def rounded(self) -> tuple[Tensor, ...]:
        """Trainable tensors that have a copy in the compute type: those that a layer reads in it.

        Nothing writes copies of frozen ones; they are converted in each step.
        """
        if not self.rounds or self.compute_type is None or self.optimizer is None or not self.differentiates:
            return ()
        halves = (node for node in self.nodes if self.compute_type_of(node) is self.compute_type)
        read = {tensor for node in halves for tensor in node.layer.parameters.values()}
        return tuple(t for t in self.trainable if t in read and t.data_type.torch is torch.float32)

    @cached_property
    def rounded_set(self) -> frozenset[Tensor]:
        """`rounded`, as a set."""
        return frozenset(self.rounded)

    def compute_type_of(self, node: Node) -> torch.dtype | None:
        """The type that a node's sources and tensors are converted to; None if they keep theirs."""
        if self.compute_type is None or node.layer.own_precision:
            return None
        return torch.float32 if node.is_loss or node.layer.full_precision else self.compute_type

    def slots_of(self, tensor: Tensor) -> tuple[str, ...]:
        """The optimizer's buffers of a trainable tensor."""
        return self.slots.get(tensor, () if self.optimizer is None else self.optimizer.slots)

    @cached_property
    def owned(self) -> frozenset[Tensor]:
        """Trainable tensors that this rank updates, wholly or in part."""
        return self.trainable_set if self.ownership is None else self.ownership.owned

    def state_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of the optimizer's buffers of a trainable tensor on this rank."""
        return tuple(tensor.shape) if self.ownership is None else self.ownership.shape(tensor)

    @property
    def numbers_shape(self) -> tuple[int, ...]:
        """The shape of the live numbers: one row, or a table with a row per group."""
        assert self.optimizer is not None
        columns = len(self.optimizer.columns)
        return (1 + len(self.optimizer.groups), columns) if self.optimizer.groups else (columns,)

    @cached_property
    def differentiates(self) -> bool:
        """Whether there is anything to differentiate."""
        return self.training and bool(self.losses or self.seeded or self.shared)

    @cached_property
    def active(self) -> frozenset[Tensor]:
        """Tensors through which a gradient flows; all others cost nothing."""
        found = {tensor for tensor in (*self.trainable, *self.wanted) if tensor not in self.stopped}
        if self.all_gradients:
            found |= {t for t in (*self.feeds, *self.held) if t.data_type.is_floating and t not in self.stopped}
        for node in self.nodes:
            if any(t in found for t in (*node.sources, *self.differentiated(node))):
                found |= {t for t in node.results if t.data_type.is_floating and t not in self.stopped}
        return frozenset(found)

    @cached_property
    def reached(self) -> dict[Tensor, Node]:
        """Trainable tensors that a loss depends on through differentiable paths, and the last node that reads each."""
        found: dict[Tensor, Node] = {}
        read = {node.results[0] for node in self.losses} if self.differentiates else set()
        for node in reversed(self.nodes):
            if not read.isdisjoint(node.results):
                own = [t for t in (*node.sources, *self.differentiated(node)) if t in self.active]
                read.update(own)
                found |= {t: node for t in own if t in self.trainable_set and t not in found}
        return found

    @cached_property
    def _learned(self) -> frozenset[Tensor]:
        """Parameters for which gradients are computed, here or for a linked graph."""
        return self.trainable_set | self.wanted

    def differentiated(self, node: Node) -> tuple[Tensor, ...]:
        """The node's own parameters to compute gradients for.

        A frozen layer may share a tensor with a trainable one: it is one parameter, with the sum over all its uses.
        A node for which single parameters are frozen adds nothing to the gradients that others compute for these.
        """
        learned = self._learned
        parameters = dict.fromkeys(node.layer.parameters.values())
        if node.frozen:
            parameters = dict.fromkeys(t for t in parameters if t not in node.frozen or t not in learned)
        if self.all_gradients:
            return tuple(t for t in parameters if t.data_type.is_floating)
        return tuple(t for t in parameters if t in learned)

    def name(self, layer: Layer) -> str:
        """The name of a layer in tables and messages."""
        return self.names.get(layer, layer.label)

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of a fed tensor in this step."""
        return shape_at(tensor.shape, *self.batch) if tensor in self.fed else tensor.shape

    @cached_property
    def index_limits(self) -> dict[Tensor, Limit]:
        """Tensors that layers read as indices, directly or after moving their elements, and the narrowest range."""
        found: dict[Tensor, Limit] = {}
        descriptors = self.descriptors

        def narrow(tensor: Tensor, limit: Limit) -> None:
            if not tensor.data_type.is_floating:
                found[tensor] = limit.narrowed(found.get(tensor, limit))

        for node in reversed(self.nodes):
            own = node.layer.index_limits(*(descriptors[t] for t in node.arguments))
            for position, extent in own.items():
                what = "class index" if node.is_loss else "index"
                limit = Limit(extent, self.name(node.layer), what, node.layer.ignored_indices())
                narrow(node.arguments[position], limit)
            if node.layer.moves:
                for limit in (found[t] for t in node.results if t in found):
                    for tensor in (t for position, t in enumerate(node.sources) if position not in own):
                        narrow(tensor, limit)
        return found

    @cached_property
    def guarded(self) -> dict[Tensor, Limit]:
        """Tensors whose indices the step itself checks: those that come from outside, and those that layers compute.

        What a layer only moves is checked where it comes from, so that an error names a place in the caller's data.
        """
        if not self.guards:
            return {}
        made = {tensor: node for node in self.nodes for tensor in node.results}

        def is_covered(tensor: Tensor) -> bool:
            node = made.get(tensor)
            if node is None:
                return tensor in self.fed
            own = node.layer.index_limits(*(self.descriptors[t] for t in node.arguments))
            moved = [t for position, t in enumerate(node.sources) if position not in own]
            return node.layer.moves and all(is_covered(t) for t in moved)

        fed = {tensor: limit for tensor, limit in self.index_limits.items() if tensor in self.fed}
        read = (
            node.arguments[position]
            for node in self.nodes
            for position in node.layer.index_limits(*(self.descriptors[t] for t in node.arguments))
        )
        others = {tensor: self.index_limits[tensor] for tensor in read if tensor in self.index_limits}
        return fed | {tensor: limit for tensor, limit in others.items() if not is_covered(tensor)}

    @cached_property
    def descriptors(self) -> dict[Tensor, TensorDescriptor]:
        """Descriptors of all tensors at this batch size; raises if a layer fixes the batch dimension."""
        found = {t: TensorDescriptor(self.shape(t), t.data_type) for t in (*self.feeds, *self.held)}
        if self.training and self.batch[0] == self.batch[1]:  # inferred when the nodes were made
            return found | {t: t.descriptor for node in self.nodes for t in node.results}
        for node in self.nodes:
            try:
                with shown_as(node.layer.label, partial(self.name, node.layer)):
                    sources = (found[t] for t in node.arguments)
                    results = node.layer.infer(*sources, batch=self.batch, training=self.training)
            except StepgraphError as error:
                because_of_rows = not isinstance(error, StateError) and not isinstance(error.__cause__, Drawn)
                if self.batch[0] == self.batch[1] or not because_of_rows:
                    raise
                where = node.where.replace(f"'{node.layer.label}'", f"'{self.name(node.layer)}'", 1)
                if isinstance(self.batch[0], BatchExtent):
                    problem = f"cannot run with {self.batch[1]} row{'s' * (self.batch[1] != 1)}: {error.problem}"
                    fix = "pass a number of rows that the layer accepts, or use BATCH where it has a number"
                else:
                    problem = f"cannot run with batch size {self.batch[1]} instead of {self.batch[0]}: {error.problem}"
                    fix = "pass batch_size=None, or do not fix the batch dimension in this layer"
                raise ShapeError(where, problem, fix=fix) from error
            found |= dict(zip(node.results, results, strict=True))
        return found


def layer_tensors(node: Node) -> Iterator[Tensor]:
    """All tensors a node's layer holds."""
    layer = node.layer
    own = {**layer.parameters, **layer.statistics, **layer.constants}
    return (tensor for tensor in own.values() if tensor not in node.labels)
