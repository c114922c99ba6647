"""LSTM and GRU as one ONNX operator per layer and direction, instead of one subgraph per step.

Each direction of a recurrent layer becomes a placeholder with the arguments of the ONNX operator, which has the
semantics of ours: lengths included. Placeholders exist only in exported programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph.layers.torch_recurrent import is_packed

Array = torch.Tensor
_ARGUMENTS = "Tensor x, Tensor w, Tensor r, Tensor? b, Tensor? lengths, Tensor? h0"

torch.library.define("stepgraph::onnx_lstm", f"({_ARGUMENTS}, Tensor? c0, bool reverse) -> (Tensor, Tensor, Tensor)")
torch.library.define("stepgraph::onnx_gru", f"({_ARGUMENTS}, bool reverse, bool reset_after) -> (Tensor, Tensor)")


@torch.library.register_fake("stepgraph::onnx_lstm")
def _(x: Array, w: Array, r: Array, *_: Any) -> tuple[Array, Array, Array]:
    steps, batch, hidden = x.shape[0], x.shape[1], r.shape[2]
    return x.new_empty(steps, 1, batch, hidden), x.new_empty(1, batch, hidden), x.new_empty(1, batch, hidden)


@torch.library.register_fake("stepgraph::onnx_gru")
def _(x: Array, w: Array, r: Array, *_: Any) -> tuple[Array, Array]:
    steps, batch, hidden = x.shape[0], x.shape[1], r.shape[2]
    return x.new_empty(steps, 1, batch, hidden), x.new_empty(1, batch, hidden)


def lstm(
    x: Array,
    input_weights: Sequence[Array],
    hidden_weights: Sequence[Array],
    biases: Sequence[Array] | None,
    h0: Array | None,
    c0: Array | None,
    lengths: Array | None,
    reverse: bool,
) -> tuple[Array, Array, Array]:
    """`one_direction`, in ONNX's order of gates: input, output, forget, candidate."""

    def ordered(gates: Sequence[Array]) -> Array:
        i, f, g, o = gates
        return torch.cat([i, o, f, g])

    b = None if biases is None else _both(ordered(biases), torch.zeros_like(ordered(biases)))
    weights = ordered(input_weights)[None], ordered(hidden_weights)[None]
    output, h, c = torch.ops.stepgraph.onnx_lstm(x, *weights, b, _int32(lengths), _first(h0), _first(c0), reverse)
    return output.squeeze(1), _kept(h.squeeze(0), h0, lengths), _kept(c.squeeze(0), c0, lengths)


def gru(
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    biases: Array | None,
    hidden_bias: Array | None,
    h0: Array | None,
    lengths: Array | None,
    reverse: bool,
    reset_after: bool,
) -> tuple[Array, Array]:
    """`gru_direction`, in ONNX's order of gates: update, reset, candidate."""

    def ordered(gates: Array) -> Array:
        reset, update, candidate = gates.chunk(3)
        return torch.cat([update, reset, candidate])

    b = None
    if biases is not None or hidden_bias is not None:
        zeros = input_weights.new_zeros(len(input_weights))
        own = zeros if biases is None else ordered(biases)
        added = zeros if hidden_bias is None else torch.cat([zeros[: -len(hidden_bias)], hidden_bias])
        b = _both(own, added)
    weights = ordered(input_weights)[None], ordered(hidden_weights)[None]
    output, h = torch.ops.stepgraph.onnx_gru(x, *weights, b, _int32(lengths), _first(h0), reverse, reset_after)
    return output.squeeze(1), _kept(h.squeeze(0), h0, lengths)


def projected_lstm(*given: Any) -> tuple[Array, ...]:
    """`torch.lstm`; a layer with a projection of its output, which ONNX's operator has not, step by step."""
    if is_packed(given):
        return torch.lstm(*given)
    x, state, weights, has_biases, layers, *_, both_ways, batch_first = given
    each = len(weights) // (2 if both_ways else 1)
    if each != (5 if has_biases else 3) or layers != 1 or batch_first:
        return torch.lstm(*given)
    found = [
        _projected(x, weights[i * each : (i + 1) * each], state[0][i], state[1][i], bool(i))
        for i in range(2 if both_ways else 1)
    ]
    outputs, *ends = zip(*found, strict=True)
    return torch.cat(outputs, -1), *(torch.stack(one) for one in ends)


def _projected(x: Array, weights: Sequence[Array], h: Array, c: Array, reverse: bool) -> tuple[Array, Array, Array]:
    inputs, hidden, *biases, projection = weights
    bias = biases[0] + biases[1] if biases else None
    outputs = []
    for step in x.flip(0) if reverse else x:
        i, f, g, o = (F.linear(step, inputs, bias) + F.linear(h, hidden)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = F.linear(o.sigmoid() * c.tanh(), projection)
        outputs.append(h)
    return torch.stack(outputs[::-1] if reverse else outputs), h, c


def _kept(last: Array, first: Array | None, lengths: Array | None) -> Array:
    """The final state; that of an empty sequence is its first one, which ONNX Runtime would set to 0."""
    return last if first is None or lengths is None else torch.where(lengths[:, None] > 0, last, first)


def _both(first: Array, second: Array) -> Array:
    return torch.cat([first, second])[None]


def _first(one: Array | None) -> Array | None:
    return None if one is None else one[None]


def _int32(lengths: Array | None) -> Array | None:
    return None if lengths is None else lengths.to(torch.int32)


def translations() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """What each operator of stepgraph becomes in ONNX."""
    op: Any = import_module("onnxscript").opset18  # what the exporter implements, and converts to other versions

    def direction(reverse: bool) -> str:
        return "reverse" if reverse else "forward"

    def as_lstm(x: Any, w: Any, r: Any, b: Any, lengths: Any, h0: Any, c0: Any, reverse: bool) -> Any:
        return op.LSTM(x, w, r, b, lengths, h0, c0, direction=direction(reverse), hidden_size=r.shape[2])

    def as_gru(x: Any, w: Any, r: Any, b: Any, lengths: Any, h0: Any, reverse: bool, reset_after: bool) -> Any:
        settings = {"direction": direction(reverse), "hidden_size": r.shape[2]}
        return op.GRU(x, w, r, b, lengths, h0, linear_before_reset=int(reset_after), **settings)

    def sequence_lengths(lengths: Any, steps: Any) -> Any:
        return op.Cast(lengths, to=_INT64)

    ours = torch.ops.stepgraph
    return {
        ours.onnx_lstm.default: as_lstm,
        ours.onnx_gru.default: as_gru,
        ours.sequence_lengths.default: sequence_lengths,
    }


_INT64 = 7  # ONNX's number for the type
