"""The LSTM, stacked and in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from stepgraph.errors import ArgumentError
from stepgraph.layers import recurrence
from stepgraph.layers.activation import ActivationDescriptor, ActivationType
from stepgraph.layers.found import found_at_node, last_extent
from stepgraph.layers.layer import Layer, ParameterOf, Scope
from stepgraph.layers.lstm_kernel import one_direction
from stepgraph.layers.lstm_steps import lstm_steps
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import RandomInitializerType, RawEnum

Array = torch.Tensor
SIGMOID, TANH = ActivationDescriptor(ActivationType.SIGMOID), ActivationDescriptor(ActivationType.TANH)
GATE_ACTIVATIONS = (SIGMOID, SIGMOID, TANH, SIGMOID)


class LSTMResultMode(RawEnum):
    """What an LSTM returns."""

    OUTPUT = 0, "Output"
    OUTPUT_AND_STATES = 1, "Output and States"  # output, final h, final c


@dataclass(frozen=True)
class LSTMDescriptor:
    """Sizes and modes of an LSTM.

    Args:
        input_size: features of the source.
        hidden_size: features of one direction's output.
        layer_count: stacked layers; each reads the outputs of the one below.
        uses_biases: whether gates have biases.
        batch_first: sources and outputs are `[batch, steps, features]`, else (ours) `[steps, batch, features]`.
        is_bidirectional: a second direction runs from the last step to the first; its features follow the forward
            ones.
        returns_sequences: return the outputs of all steps; otherwise of each direction's last one, as one step.
        dropout: the fraction of a layer's outputs dropped in training before the next layer.
        result_mode: whether the final states are results as well.

    Example:
        >>> LSTMDescriptor(64, 256, is_bidirectional=True).direction_count
        2
    """

    input_size: int
    hidden_size: int
    layer_count: int = 1
    uses_biases: bool = field(default=True, kw_only=True)
    batch_first: bool = field(default=True, kw_only=True)
    is_bidirectional: bool = field(default=False, kw_only=True)
    returns_sequences: bool = field(default=True, kw_only=True)
    dropout: float = field(default=0.0, kw_only=True)
    result_mode: LSTMResultMode = field(default=LSTMResultMode.OUTPUT, kw_only=True)

    def __post_init__(self) -> None:
        recurrence.check_sizes("LSTMDescriptor", self)
        if not isinstance(self.result_mode, LSTMResultMode):
            raise ArgumentError(
                "LSTMDescriptor", f"the result_mode is {self.result_mode!r}", fix="use a member of LSTMResultMode"
            )

    @property
    def direction_count(self) -> int:
        """1, or 2 if bidirectional."""
        return 2 if self.is_bidirectional else 1

    def input_sizes(self) -> list[int]:
        """Features that each layer reads, first to last and direction by direction: the order of the tensors."""
        return recurrence.input_sizes(self)


class LSTMLayer(Layer):
    """Long short-term memory. For each step, in each layer and direction:

        i = σ(Wᵢ x + Uᵢ h + Pᵢ c + bᵢ)
        f = σ(W_f x + U_f h + P_f c + b_f)
        g = tanh(W_g x + U_g h + P_g c + b_g)
        c ← f c + i g
        o = σ(Wₒ x + Uₒ h + Pₒ c + bₒ)          (with the new c)
        h ← o tanh(c)

    Shapes: `x` `[batch, steps, inputs]` → `[batch, steps, directions * hidden]`, or `[batch, 1, …]` without
    `returns_sequences`. Sources are `x`; `x, h0, c0` with initial states `[layers, directions, batch, hidden]`, else 0;
    and either of them followed by `lengths`, int32 or int64 `[batch]`, in any order of lengths. After its end a
    sequence has output 0 and keeps its states; the backward direction starts at each sequence's own end. Results are
    the output, and with `OUTPUT_AND_STATES` the final `h` and `c`, shaped like `h0`.

    Tensors come gate by gate (input, forget, candidate, output), layer by layer, all forward layers before all
    backward ones, in any shape of the right size: `input_weights` `[hidden, inputs]`, `hidden_weights`
    `[hidden, hidden]`, `biases` `[hidden]`, `peephole_weights` `[hidden, hidden]`, or `[hidden]` for a diagonal (ours).

    Same as `torch.nn.LSTM`, which has two biases per gate and no peepholes, orders layer before direction and requires
    packed sequences for several lengths.

    Example:
        >>> layer = LSTMLayer.create(8, 16, returns_sequences=False)
        >>> layer.infer(TensorDescriptor((32, 100, 8)))[0].shape
        (32, 1, 16)
    """

    descriptor: LSTMDescriptor
    input_weights: Sequence[Tensor]
    hidden_weights: Sequence[Tensor]
    peephole_weights: Sequence[Tensor] | None = None
    biases: Sequence[Tensor] | None = None
    gate_activations: Sequence[ActivationDescriptor] = GATE_ACTIVATIONS
    output_result_activation: ActivationDescriptor = TANH

    default_label = "LSTM"
    source_counts = (1, 4)
    input_weights_parameters = ParameterOf("input_weights")
    hidden_weights_parameters = ParameterOf("hidden_weights")
    peephole_weights_parameters = ParameterOf("peephole_weights")
    biases_parameters = ParameterOf("biases")

    def __post_init__(self) -> None:
        hidden, sizes = self.descriptor.hidden_size, self.descriptor.input_sizes()
        square = hidden * hidden
        for name, counts in (
            ("input_weights", [{hidden * inputs} for inputs in sizes]),
            ("hidden_weights", [{square} for _ in sizes]),
            ("peephole_weights", [{square, hidden} for _ in sizes]),
            ("biases", [{hidden} for _ in sizes]),
        ):
            order = "four per layer (input, forget, candidate, output)"
            recurrence.require_tensors(self, name, self.descriptor, counts, each=4, order=order)
        if self.biases is not None and not self.descriptor.uses_biases:
            raise ArgumentError(
                self.where,
                f"{len(self.biases)} biases were passed, but uses_biases is False",
                fix="leave one of them out",
            )
        activations = tuple(self.gate_activations)
        if len(activations) != 4 or not all(isinstance(one, ActivationDescriptor) for one in activations):
            raise ArgumentError(
                self.where,
                f"gate_activations are {self.gate_activations!r}",
                fix="pass four ActivationDescriptors: input, forget, candidate, output",
            )
        object.__setattr__(self, "gate_activations", activations)

    @property
    def is_standard(self) -> bool:
        """Whether there are no peepholes and only the usual activations: the fast case."""
        usual = (GATE_ACTIVATIONS, TANH)
        return self.peephole_weights is None and (self.gate_activations, self.output_result_activation) == usual

    @classmethod
    @found_at_node("input_size", last_extent)
    def create(
        cls,
        input_size: int,
        hidden_size: int,
        layer_count: int = 1,
        *,
        peepholes: bool = False,
        gate_activations: Sequence[ActivationDescriptor] = GATE_ACTIVATIONS,
        output_result_activation: ActivationDescriptor = TANH,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
        **settings: Any,
    ) -> LSTMLayer:
        """A layer with new weights in their natural shapes and, unless `uses_biases=False`, zero biases.

        Other settings are those of `LSTMDescriptor`.
        """
        descriptor = LSTMDescriptor(input_size, hidden_size, layer_count, **settings)
        sizes = recurrence.gate_sizes(descriptor, gates=4)
        square = [hidden_size] * len(sizes)
        return cls(
            descriptor,
            recurrence.new_weights(sizes, hidden_size, initializer),
            recurrence.new_weights(square, hidden_size, initializer),
            recurrence.new_weights(square, hidden_size, initializer) if peepholes else None,
            [Tensor((hidden_size,), fill=0.0) for _ in sizes] if descriptor.uses_biases else None,
            gate_activations,
            output_result_activation,
            label=label,
        )

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks `x`, or `x, h0, c0`, and optionally `lengths`."""
        x, (states, lengths) = sources[0], _separate(sources[1:])
        batch = recurrence.check_sequences(self, x, self.input_weights[0], self.descriptor)
        if lengths is not None:
            recurrence.check_lengths(self, lengths, batch)
        for name, state in zip(("h0", "c0"), states, strict=False):
            recurrence.check_state(self, name, state, x, batch, self.descriptor)

    def forward(self, x: Array, *others: Array, scope: Scope) -> Array | tuple[Array, ...]:
        """The output, and optionally the final states."""
        settings, (states, lengths) = self.descriptor, _separate(others)
        run = partial(self._run, scope=scope)
        y, finals = recurrence.stacked(x, states, lengths, settings=settings, state_count=2, run=run, scope=scope)
        return y if settings.result_mode is LSTMResultMode.OUTPUT else (y, *finals)

    def _run(
        self, x: Array, first: Sequence[Any], lengths: Array | None, layer: int, direction: int, *, scope: Scope
    ) -> tuple[Array, Array, Array]:
        """One direction of one layer: with the fast operator, or step by step for other equations."""
        hidden, (h0, c0) = self.descriptor.hidden_size, first
        start = 4 * (direction * self.descriptor.layer_count + layer)

        def gates(tensors: Sequence[Tensor], *shape: int) -> list[Array]:
            return [scope.array(one, *shape) for one in tensors[start : start + 4]]

        weights = gates(self.input_weights, hidden, -1), gates(self.hidden_weights, hidden, -1)
        biases = None if self.biases is None else gates(self.biases, hidden)
        if self.is_standard:
            return one_direction(x, *weights, biases, h0, c0, lengths, direction == 1)
        peepholes = None if self.peephole_weights is None else self.peephole_weights[start : start + 4]
        return lstm_steps(
            x,
            torch.cat(weights[0]),
            torch.cat(weights[1]),
            None if biases is None else torch.cat(biases),
            h0,
            c0,
            lengths,
            None if peepholes is None else [_matrix_or_diagonal(scope.array(one), hidden) for one in peepholes],
            gate_activations=self.gate_activations,
            output_activation=self.output_result_activation,
            reverse=direction == 1,
        )


def _separate(others: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """The states `h0, c0`, if any, and the lengths, if any: they are the last of one or three."""
    return (others[:-1], others[-1]) if len(others) in (1, 3) else (others, None)


def _matrix_or_diagonal(weights: Array, hidden: int) -> Array:
    return weights.reshape(hidden, hidden) if weights.numel() == hidden * hidden else weights.reshape(hidden)
