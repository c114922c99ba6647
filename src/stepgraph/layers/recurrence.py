"""What recurrent layers share: stacked layers in one or two directions, lengths, and the checks of their sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from stepgraph.errors import ArgumentError, DataTypeError, ShapeError
from stepgraph.layers.dropout import drop
from stepgraph.layers.layer import Layer, Scope
from stepgraph.layers.lstm_kernel import sequence_lengths
from stepgraph.layers.lstm_steps import running
from stepgraph.random import initialize
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import DataType, RandomInitializerType

Array = torch.Tensor
# One direction of one layer: sequences, initial states (or None for each), lengths, layer, direction → output, states
Run = Callable[[Array, Sequence[Any], Array | None, int, int], tuple[Array, ...]]


class Sizes(Protocol):
    """The settings that every recurrent layer has."""

    @property
    def input_size(self) -> int:
        """Features of the source."""

    @property
    def hidden_size(self) -> int:
        """Features of one direction's output."""

    @property
    def layer_count(self) -> int:
        """Stacked layers."""

    @property
    def direction_count(self) -> int:
        """1, or 2 if bidirectional."""

    @property
    def batch_first(self) -> bool:
        """Whether sources are `[batch, steps, features]`."""

    @property
    def returns_sequences(self) -> bool:
        """Whether the outputs of all steps are returned."""

    @property
    def dropout(self) -> float:
        """The fraction of a layer's outputs dropped before the next layer."""


def stacked(
    x: Array,
    states: Sequence[Array],
    lengths: Array | None,
    *,
    settings: Sizes,
    state_count: int,
    run: Run,
    scope: Scope,
) -> tuple[Array, list[Array]]:
    """The output of all layers, and their final states, each `[layers, directions, batch, hidden]`."""
    x = x.transpose(0, 1) if settings.batch_first else x
    if lengths is not None:
        steps = x.shape[0]  # `len` would fix a symbolic number
        lengths = sequence_lengths(lengths, steps)
        x = torch.where(running(steps, lengths)[..., None], x, 0)  # nothing after the end of a sequence matters
    firsts = list(zip(*(state.flatten(0, 1).unbind() for state in states), strict=True))
    finals: list[tuple[Array, ...]] = []
    for layer in range(settings.layer_count):
        if layer and settings.dropout and scope.training:
            x = drop(x, scope.keep_mask(x, settings.dropout, seed=layer), rate=settings.dropout)
        outputs = []
        for direction in range(settings.direction_count):
            first = firsts[len(finals)] if firsts else (None,) * state_count
            output, *last = run(x, first, lengths, layer, direction)
            outputs.append(output)
            finals.append(tuple(last))
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
    if not settings.returns_sequences:
        x = torch.cat([last[0] for last in finals[-settings.direction_count :]], 1)[None]
    shape = settings.layer_count, settings.direction_count, -1, settings.hidden_size
    x = x.transpose(0, 1) if settings.batch_first else x
    return x, [torch.stack(state).view(shape) for state in zip(*finals, strict=True)]


def input_sizes(settings: Sizes) -> list[int]:
    """Features that each layer reads, first to last and direction by direction: the order of the tensors."""
    return [
        settings.hidden_size * settings.direction_count if layer else settings.input_size
        for _ in range(settings.direction_count)
        for layer in range(settings.layer_count)
    ]


def gate_sizes(settings: Sizes, *, gates: int) -> list[int]:
    """`input_sizes`, once for every gate."""
    return [size for size in input_sizes(settings) for _ in range(gates)]


def new_weights(inputs: Sequence[int], hidden: int, initializer: RandomInitializerType) -> list[Tensor]:
    """New weights `[hidden, inputs]`, one for every number of inputs."""
    shapes = [(hidden, count) for count in inputs]
    return [Tensor(shape, data=initialize(initializer, shape, shape[1], hidden)) for shape in shapes]


def check_sizes(where: str, settings: Sizes) -> None:
    """Rejects sizes that are not positive integers, and dropout outside [0, 1)."""
    for name in ("input_size", "hidden_size", "layer_count"):
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError(where, f"{name} is {value!r}", fix="pass an integer ≥ 1")
    if not 0 <= settings.dropout < 1:
        problem = f"dropout is {settings.dropout}, not in [0, 1)"
        raise ArgumentError(where, problem, fix="pass the fraction to drop, e.g. 0.5")


def require_tensors(
    layer: Layer, name: str, settings: Sizes, allowed: Sequence[set[int]], *, each: int, order: str
) -> None:
    """Converts a field to a tuple of tensors, after checking their number and sizes.

    Args:
        layer: whose field it is; None in it stays.
        name: of the field.
        settings: of the layer.
        allowed: the sizes that the tensors of each layer and direction may have.
        each: tensors per layer and direction.
        order: their order, for messages.
    """
    if getattr(layer, name) is None:
        return
    tensors, needed = tuple(getattr(layer, name)), [counts for counts in allowed for _ in range(each)]
    if len(tensors) != len(needed):
        raise ShapeError(
            layer.where,
            f"there are {len(tensors)} {name}, but {settings.layer_count} layers in"
            f" {settings.direction_count} directions need {len(needed)}",
            fix=f"pass {order}, all forward layers first",
        )
    for index, (tensor, counts) in enumerate(zip(tensors, needed, strict=True)):
        if tensor.descriptor.element_count not in counts:
            wanted = " or ".join(str(count) for count in sorted(counts))
            raise ShapeError(
                layer.where,
                f"{name}[{index}] holds {tensor.descriptor.element_count} numbers, but {wanted} are needed",
                tensor=tensor.descriptor,
                fix=f"make it match the descriptor, or use {type(layer).__name__}.create",
            )
    object.__setattr__(layer, name, tensors)


def check_sequences(layer: Layer, x: TensorDescriptor, weights: Tensor, settings: Sizes) -> int:
    """Checks type and shape of the sequences, and returns their number."""
    layer.require_floating(x)
    kind = weights.data_type
    if x.data_type is not kind:
        raise DataTypeError(
            layer.where,
            f"the source is {x.data_type.debug_description}, but the weights are {kind.debug_description}",
            fix="use the same data type for both",
        )
    features, order = settings.input_size, "batch, steps" if settings.batch_first else "steps, batch"
    if x.dimension_count != 3 or x.shape[2] != features:
        raise ShapeError(
            layer.where,
            f"the source is {list(x.shape)}, but [{order}, {features}] is needed",
            source=x,
            fix=f"pass {features} features on the last of three axes, or use another input_size",
        )
    return x.shape[0 if settings.batch_first else 1]


def check_lengths(layer: Layer, lengths: TensorDescriptor, batch: int) -> None:
    """Checks that there is one length per sequence."""
    if lengths.data_type not in (DataType.INT32, DataType.INT64):
        raise DataTypeError(
            layer.where,
            f"the last source is {lengths}, but sequence lengths are integers",
            fix="pass int32 or int64 lengths, after all initial states",
        )
    if lengths.shape != (batch,):
        raise ShapeError(
            layer.where,
            f"the sequence lengths are {list(lengths.shape)}, but the batch has {batch} sequences",
            fix=f"pass lengths of shape [{batch}]",
        )


def check_state(layer: Layer, name: str, state: TensorDescriptor, x: TensorDescriptor, batch: int, to: Sizes) -> None:
    """Checks that an initial state has one row per layer, direction and sequence."""
    needed = TensorDescriptor((to.layer_count, to.direction_count, batch, to.hidden_size), x.data_type)
    if state.shape != needed.shape or state.data_type is not x.data_type:
        problem = f"{name} is {state}, but {needed} is needed"
        raise ShapeError(layer.where, problem, fix="pass states [layers, directions, batch, hidden]")
