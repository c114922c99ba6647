"""The gated recurrent unit (GRU), stacked and in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from stepgraph.errors import ArgumentError
from stepgraph.layers.found import found_at_node, last_extent
from stepgraph.layers.gru_kernel import gru
from stepgraph.layers.layer import Layer, ParameterOf, Scope
from stepgraph.layers.lstm_steps import running
from stepgraph.layers.recurrence import (
    check_lengths,
    check_sequences,
    check_sizes,
    check_state,
    input_sizes,
    require_tensors,
    stacked,
)
from stepgraph.random import initialize
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import RandomInitializerType

Array = torch.Tensor


@dataclass(frozen=True)
class GRUDescriptor:
    """Sizes and modes of a GRU.

    Args:
        input_size: features of the source.
        hidden_size: features of one direction's output.
        layer_count: stacked layers; each reads the outputs of the one below.
        uses_biases: whether gates have biases.
        batch_first: sources and outputs are `[batch, steps, features]`, else `[steps, batch, features]`.
        is_bidirectional: a second direction runs from the last step to the first; its features follow the forward
            ones.
        returns_sequences: return the outputs of all steps; otherwise of each direction's last one, as one step.
        returns_state: whether the final state is a result as well.
        dropout: the fraction of a layer's outputs dropped in training before the next layer.
        reset_after: whether the reset gate multiplies the product with the hidden weights, as in PyTorch, cuDNN and
            Keras, or the state before that product, as in the first publication.

    Example:
        >>> GRUDescriptor(64, 256, is_bidirectional=True).direction_count
        2
    """

    input_size: int
    hidden_size: int
    layer_count: int = 1
    uses_biases: bool = field(default=True, kw_only=True)
    batch_first: bool = field(default=True, kw_only=True)
    is_bidirectional: bool = field(default=False, kw_only=True)
    returns_sequences: bool = field(default=True, kw_only=True)
    returns_state: bool = field(default=False, kw_only=True)
    dropout: float = field(default=0.0, kw_only=True)
    reset_after: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_sizes("GRUDescriptor", self)

    @property
    def direction_count(self) -> int:
        """1, or 2 if bidirectional."""
        return 2 if self.is_bidirectional else 1


class GRULayer(Layer):
    """Gated recurrent unit. For each step, in each layer and direction:

        r = σ(W_r x + U_r h + b_r)
        z = σ(W_z x + U_z h + b_z)
        n = tanh(W_n x + b_n + r (U_n h + d))          (with `reset_after=False`: tanh(W_n x + b_n + U_n (r h)))
        h ← (1 - z) n + z h

    Shapes: `x` `[batch, steps, inputs]` → `[batch, steps, directions * hidden]`, or `[batch, 1, …]` without
    `returns_sequences`. Sources are `x`, then an initial state `h0` `[layers, directions, batch, hidden]`, else 0, and
    `lengths`, int32 or int64 `[batch]`, each only if needed. After its end a sequence has output 0 and keeps its state;
    the backward direction starts at each sequence's own end. Results are the output, and with `returns_state` the final
    state, shaped like `h0`.

    Tensors come gate by gate (reset, update, candidate), layer by layer, all forward layers before all backward ones,
    in any shape of the right size: `input_weights` `[hidden, inputs]`, `hidden_weights` `[hidden, hidden]`, `biases`
    `[hidden]`. `hidden_biases` (`d` above) has one `[hidden]` per layer and direction, only with `reset_after`.

    Same as `torch.nn.GRU`, which has two biases for every gate (their sums are ours; `d` is the second one of the
    candidate), orders layer before direction and requires packed sequences for several lengths.

    Example:
        >>> layer = GRULayer.create(8, 16, returns_sequences=False)
        >>> layer.infer(TensorDescriptor((32, 100, 8)))[0].shape
        (32, 1, 16)
    """

    descriptor: GRUDescriptor
    input_weights: Sequence[Tensor]
    hidden_weights: Sequence[Tensor]
    biases: Sequence[Tensor] | None = None
    hidden_biases: Sequence[Tensor] | None = None

    default_label = "GRU"
    source_counts = (1, 3)
    input_weights_parameters = ParameterOf("input_weights")
    hidden_weights_parameters = ParameterOf("hidden_weights")
    biases_parameters = ParameterOf("biases")
    hidden_biases_parameters = ParameterOf("hidden_biases")

    def __post_init__(self) -> None:
        settings, sizes = self.descriptor, input_sizes(self.descriptor)
        hidden = settings.hidden_size
        gates = "three per layer (reset, update, candidate)"
        for name, counts, each, order in (
            ("input_weights", [{hidden * inputs} for inputs in sizes], 3, gates),
            ("hidden_weights", [{hidden * hidden} for _ in sizes], 3, gates),
            ("biases", [{hidden} for _ in sizes], 3, gates),
            ("hidden_biases", [{hidden} for _ in sizes], 1, "one per layer"),
        ):
            require_tensors(self, name, settings, counts, each=each, order=order)
        for name, allowed, setting in (
            ("biases", settings.uses_biases, "uses_biases"),
            ("hidden_biases", settings.uses_biases, "uses_biases"),
            ("hidden_biases", settings.reset_after, "reset_after"),
        ):
            if getattr(self, name) is not None and not allowed:
                problem = f"{len(getattr(self, name))} {name} were passed, but {setting} is False"
                raise ArgumentError(self.where, problem, fix="leave one of them out")

    @classmethod
    @found_at_node("input_size", last_extent)
    def create(
        cls,
        input_size: int,
        hidden_size: int,
        layer_count: int = 1,
        *,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
        **settings: Any,
    ) -> GRULayer:
        """A layer with new weights in their natural shapes and, unless `uses_biases=False`, zero biases.

        Other settings are those of `GRUDescriptor`.
        """
        descriptor = GRUDescriptor(input_size, hidden_size, layer_count, **settings)
        sizes = [size for size in input_sizes(descriptor) for _ in range(3)]

        def weights(inputs: int) -> Tensor:
            shape = hidden_size, inputs
            return Tensor(shape, data=initialize(initializer, shape, inputs, hidden_size))

        def zeros(count: int, wanted: bool) -> list[Tensor] | None:
            return [Tensor((hidden_size,), fill=0.0) for _ in range(count)] if wanted else None

        return cls(
            descriptor,
            [weights(size) for size in sizes],
            [weights(hidden_size) for _ in sizes],
            zeros(len(sizes), descriptor.uses_biases),
            zeros(len(sizes) // 3, descriptor.uses_biases and descriptor.reset_after),
            label=label,
        )

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks `x`, and optionally `h0` and `lengths`."""
        x, (states, lengths) = sources[0], _separate(sources[1:])
        batch = check_sequences(self, x, self.input_weights[0], self.descriptor)
        if len(states) > 1:
            problem = f"two of the sources are floating besides the sequences: {states[0]} and {states[1]}"
            raise ArgumentError(self.where, problem, fix="pass at most one initial state, then int32 or int64 lengths")
        for state in states:
            check_state(self, "h0", state, x, batch, self.descriptor)
        if lengths is not None:
            check_lengths(self, lengths, batch)

    def forward(self, x: Array, *others: Array, scope: Scope) -> Array | tuple[Array, ...]:
        """The output, and optionally the final state."""
        settings, (states, lengths) = self.descriptor, _separate(others)
        run = partial(self._run, scope=scope)
        y, finals = stacked(x, states, lengths, settings=settings, state_count=1, run=run, scope=scope)
        return (y, *finals) if settings.returns_state else y

    def _run(
        self, x: Array, first: Sequence[Any], lengths: Array | None, layer: int, direction: int, *, scope: Scope
    ) -> tuple[Array, Array]:
        """One direction of one layer."""
        hidden, index = self.descriptor.hidden_size, direction * self.descriptor.layer_count + layer

        def gates(tensors: Sequence[Tensor], *shape: int) -> Array:
            return torch.cat([scope.array(one, *shape) for one in tensors[3 * index : 3 * index + 3]])

        return gru_direction(
            x,
            gates(self.input_weights, hidden, x.shape[2]),
            gates(self.hidden_weights, hidden, hidden),
            None if self.biases is None else gates(self.biases, hidden),
            None if self.hidden_biases is None else scope.array(self.hidden_biases[index], hidden),
            first[0],
            lengths,
            reverse=direction == 1,
            reset_after=self.descriptor.reset_after,
        )


def gru_direction(
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    biases: Array | None,
    hidden_bias: Array | None,
    h0: Array | None,
    lengths: Array | None,
    *,
    reverse: bool,
    reset_after: bool,
) -> tuple[Array, Array]:
    """Outputs `[steps, batch, hidden]` of `x` `[steps, batch, inputs]`, and the final state `[batch, hidden]`.

    Weights and biases hold the stacked gates: reset, update, candidate. A sequence that has ended, or in reverse not
    begun, has update gate 1, so that its state stays without a mask in the recurrence; its output is 0. As a function
    of PyTorch's own kind, it can be replaced while a layer is recorded.
    """
    if has_torch_function((x,)):
        given = x, input_weights, hidden_weights, biases, hidden_bias, h0, lengths
        return handle_torch_function(gru_direction, (x,), *given, reverse=reverse, reset_after=reset_after)
    hidden = hidden_weights.shape[1]
    inputs = F.linear(x, input_weights, biases)
    going = None if lengths is None else running(len(x), lengths)[..., None]
    if going is not None:
        r, z, n = inputs.split(hidden, 2)
        inputs = torch.cat([r, z.masked_fill(~going, torch.inf), n], 2)
    first = x.new_zeros(x.shape[1], hidden) if h0 is None else h0
    states, *_ = gru(inputs.contiguous(), hidden_weights, hidden_bias, first, reverse, reset_after)
    final = states[0 if reverse else -1]
    return states if going is None else states.masked_fill(~going, 0), final


def _separate(others: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """The initial state, if any, and the lengths, if any: the last source, if it holds integers."""
    if others and not _is_floating(others[-1]):
        return others[:-1], others[-1]
    return others, None


def _is_floating(source: Any) -> bool:
    return source.data_type.is_floating if isinstance(source, TensorDescriptor) else source.is_floating_point()
