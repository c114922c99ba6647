"""PyTorch's recurrent networks, layer by layer, with stepgraph's own recurrences.

PyTorch's operators keep what the gradient needs in a form that a recording cannot hold (LSTM on the CPU), and drop
elements between their layers with its own generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepgraph.layers.gru import gru_direction
from stepgraph.layers.lstm_kernel import one_direction

Array = torch.Tensor
State = Sequence[Array]


def is_packed(given: Sequence[Any]) -> bool:
    """Whether the arguments of a recurrent network are packed sequences."""
    return isinstance(given[3], list | tuple)


def in_type(given: Sequence[Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments with all arrays in one type."""

    def convert(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [convert(one) for one in value]
        return value.to(dtype) if isinstance(value, torch.Tensor) else value

    return tuple(convert(one) for one in given)


def recurrent(function: Any, given: Sequence[Any], drop: Callable[[Array], Array]) -> tuple[Array, ...]:
    """The output and final states of `torch.lstm`, `torch.gru`, `torch.rnn_tanh` or `torch.rnn_relu`.

    Args:
        function: which of them.
        given: its arguments.
        drop: dropout of the output of all layers but the last.
    """
    x, state, weights, has_biases, layers, _, train, both_ways, batch_first = given
    states = state if isinstance(state, list | tuple) else (state,)
    directions, each = (2 if both_ways else 1), len(weights) // layers
    x, ends = x.transpose(0, 1) if batch_first else x, []
    for i in range(layers):
        first = [one[i * directions : (i + 1) * directions] for one in states]
        x, *end = _layer(
            function, drop(x) if i else x, first, weights[i * each : (i + 1) * each], has_biases, both_ways, train
        )
        ends.append(end)
    return (x.transpose(0, 1) if batch_first else x, *(torch.cat(one) for one in zip(*ends, strict=True)))


def _layer(
    function: Any, x: Array, first: State, weights: Sequence[Array], has_biases: bool, both_ways: bool, train: bool
) -> tuple[Array, ...]:
    """One layer: outputs `[steps, batch, features]`, and final states `[directions, batch, hidden]`."""
    each = len(weights) // (2 if both_ways else 1)
    run = _DIRECTIONS.get(function)
    if run is None or each != (4 if has_biases else 2):  # another equation, or a projection of the output
        begin = first if function is torch.lstm else first[0]
        return function(x, begin, weights, has_biases, 1, 0.0, train, both_ways, False)
    found = [
        run(x, weights[i * each : (i + 1) * each], [one[i] for one in first], bool(i))
        for i in range(2 if both_ways else 1)
    ]
    outputs, *ends = zip(*found, strict=True)
    return (torch.cat(outputs, -1) if both_ways else outputs[0], *(torch.stack(one) for one in ends))


def _lstm(x: Array, weights: Sequence[Array], first: State, reverse: bool) -> tuple[Array, ...]:
    inputs, hidden, *biases = weights
    gates = biases[0] + biases[1] if biases else None
    joined = None if gates is None else gates.chunk(4)
    h, c = first
    return one_direction(x, inputs.chunk(4), hidden.chunk(4), joined, h, c, None, reverse)


def _gru(x: Array, weights: Sequence[Array], first: State, reverse: bool) -> tuple[Array, ...]:
    inputs, hidden, *biases = weights
    size = hidden.shape[1]
    bias = candidate = None
    if biases:  # the hidden bias of the candidate is multiplied by the reset gate, the others are sums
        bias = torch.cat([biases[0][: 2 * size] + biases[1][: 2 * size], biases[0][2 * size :]])
        candidate = biases[1][2 * size :]
    return gru_direction(x, inputs, hidden, bias, candidate, first[0], None, reverse=reverse, reset_after=True)


_DIRECTIONS: dict[Any, Callable[..., tuple[Array, ...]]] = {torch.lstm: _lstm, torch.gru: _gru}
