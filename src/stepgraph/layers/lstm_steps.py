"""One direction of an LSTM, step by step, following the equation: for peepholes and custom activations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from stepgraph.layers.activation import ActivationDescriptor, activate

Array = torch.Tensor


def lstm_steps(
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    biases: Array | None,
    h0: Array | None,
    c0: Array | None,
    lengths: Array | None,
    peepholes: Sequence[Array] | None,
    *,
    gate_activations: Sequence[ActivationDescriptor],
    output_activation: ActivationDescriptor,
    reverse: bool,
) -> tuple[Array, Array, Array]:
    """Outputs `[steps, batch, hidden]` of `x` `[steps, batch, inputs]`, and the final `h` and `c` `[batch, hidden]`.

    Weights and biases hold the stacked gates: input, forget, candidate, output. Peepholes are four
    matrices `[hidden, hidden]` or diagonals `[hidden]`. Sequences that have ended, or in reverse not begun, keep their
    states and output 0.
    """
    steps, batch, _ = x.shape
    hidden = hidden_weights.shape[1]
    act_i, act_f, act_g, act_o = (partial(activate, descriptor=one) for one in gate_activations)
    act_c = partial(activate, descriptor=output_activation)
    p_i, p_f, p_g, p_o = peepholes or (None, None, None, None)
    h = x.new_zeros(batch, hidden) if h0 is None else h0
    c = x.new_zeros(batch, hidden) if c0 is None else c0
    inputs = F.linear(x, input_weights, biases).unbind()
    going = None if lengths is None else running(steps, lengths)[..., None].unbind()
    outputs = []
    for t in reversed(range(steps)) if reverse else range(steps):
        i, f, g, o = (inputs[t] + F.linear(h, hidden_weights)).split(hidden, 1)
        i, f, g = act_i(_look(i, c, p_i)), act_f(_look(f, c, p_f)), act_g(_look(g, c, p_g))
        new_c = f * c + i * g
        new_h = act_o(_look(o, new_c, p_o)) * act_c(new_c)
        if going is None:
            h, c = new_h, new_c
        else:
            h, c, new_h = torch.where(going[t], new_h, h), torch.where(going[t], new_c, c), new_h * going[t]
        outputs.append(new_h)
    return torch.stack(outputs[::-1] if reverse else outputs), h, c


def running(steps: int, lengths: Array) -> Array:
    """`[steps, batch]`: whether each sequence has that step."""
    return torch.arange(steps, device=lengths.device)[:, None] < lengths


def _look(gate: Array, c: Array, weights: Array | None) -> Array:
    """The gate plus `P c`, for peephole weights that are a matrix or a diagonal."""
    if weights is None:
        return gate
    return torch.addmm(gate, c, weights.t()) if weights.ndim == 2 else torch.addcmul(gate, c, weights)
