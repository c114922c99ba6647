"""One direction of an LSTM or a GRU using cuDNN, which runs all steps of a sequence in one kernel.

Its gates have the order of the layers: input, forget, candidate, output; reset, update, candidate. It knows only the
usual activations of an LSTM, and a GRU's reset gate only after the product with the hidden weights. It does not support
sequence lengths: if there are any, the layers' own kernels are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from stepgraph.system import torch_private

Array = torch.Tensor
LSTM, GRU = 2, 3  # cuDNN's numbers for these kinds of networks
GATES = {LSTM: 4, GRU: 3}


def supports(dtype: torch.dtype, lengths: Array | None) -> bool:
    """Whether cuDNN is available and computes sequences of this type."""
    available = torch.backends.cudnn.is_available() and torch.version.hip is None
    return available and dtype != torch.float64 and lengths is None


def lstm_by_cudnn(
    x: Array,
    input_weights: Sequence[Array],
    hidden_weights: Sequence[Array],
    biases: Sequence[Array] | None,
    h0: Array | None,
    c0: Array | None,
    lengths: None,
    reverse: bool,
) -> tuple[Array, Array, Array]:
    """The same as `lstm_kernel.one_direction`."""
    weights = torch.cat(tuple(input_weights)), torch.cat(tuple(hidden_weights))
    added = x.new_zeros(len(weights[1])) if biases is None else torch.cat(tuple(biases))
    return _directed(LSTM, x, *weights, added, torch.zeros_like(added), h0, c0, reverse)


def gru_by_cudnn(
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    biases: Array | None,
    hidden_bias: Array | None,
    h0: Array | None,
    lengths: None,
    reverse: bool,
    reset_after: bool,
) -> tuple[Array, Array]:
    """The same as `gru.gru_direction` with `reset_after`: only the candidate has a bias inside of the reset gate."""
    hidden = hidden_weights.shape[1]
    added = x.new_zeros(3 * hidden) if biases is None else biases
    inside = x.new_zeros(hidden) if hidden_bias is None else hidden_bias
    inner = torch.cat([x.new_zeros(2 * hidden), inside])
    return _directed(GRU, x, input_weights, hidden_weights, added, inner, h0, None, reverse)[:2]


def _directed(
    kind: int,
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    input_biases: Array,
    hidden_biases: Array,
    h0: Array | None,
    c0: Array | None,
    reverse: bool,
) -> tuple[Array, Array, Array]:
    zeros = x.new_zeros(x.shape[1], hidden_weights.shape[1])
    h0 = zeros if h0 is None else h0
    c0 = (zeros if c0 is None else c0) if kind == LSTM else None
    weights = input_weights, hidden_weights, input_biases, hidden_biases
    output, h, c, *_ = rnn_cudnn(kind, x.flip(0) if reverse else x, *weights, h0, c0)
    return output.flip(0) if reverse else output, h, c


@torch.library.custom_op("stepgraph::rnn_cudnn", mutates_args=())
def rnn_cudnn(
    kind: int,
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    input_biases: Array,
    hidden_biases: Array,
    h0: Array,
    c0: Array | None,
) -> tuple[Array, Array, Array, Array, Array]:
    """Outputs `[steps, batch, hidden]`, final `h` and `c` `[batch, hidden]`; then what the gradient needs.

    `c` is empty for networks without it.
    """
    weights = [one.detach() for one in (input_weights, hidden_weights, input_biases, hidden_biases)]
    mode, hidden, projection, layers, batch_first, *_, bidirectional = settings = _settings(kind, hidden_weights)
    sizes = (x.shape[2], mode, hidden, projection, layers, batch_first, bidirectional)
    packed = torch_private.cudnn_rnn_pack(weights, len(weights), *sizes)  # one block, which `weights` now view
    output, h, c, reserve, _ = torch_private.cudnn_rnn(
        x.contiguous(), weights, len(weights), packed, h0[None], _stacked(c0), *settings, [], None
    )
    return output, h[0].clone(), x.new_empty(0) if c0 is None else c[0].clone(), reserve, packed


@rnn_cudnn.register_fake
def _(kind: int, x: Array, _: Array, hidden_weights: Array, *others: Any) -> tuple[Array, ...]:
    steps, batch, inputs = x.shape
    hidden = hidden_weights.shape[1]
    reserve, packed = _sizes(kind, steps, batch, inputs, hidden, x.dtype, x.device)
    return (
        x.new_empty(steps, batch, hidden),
        x.new_empty(batch, hidden),
        x.new_empty((batch, hidden) if kind == LSTM else 0),
        x.new_empty(reserve, dtype=torch.uint8),
        x.new_empty(packed),
    )


@torch.library.custom_op("stepgraph::rnn_cudnn_gradient", mutates_args=())
def rnn_cudnn_gradient(
    kind: int,
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    h0: Array,
    c0: Array | None,
    output: Array,
    reserve: Array,
    packed: Array,
    d_output: Array | None,
    d_h: Array | None,
    d_c: Array | None,
    needs_x: bool,
) -> tuple[Array, Array, Array, Array, Array, Array, Array]:
    """Gradients of `x`, both weights, both biases, `h0` and `c0`; empty where there is none."""
    biases = input_weights.new_empty(len(input_weights))
    weights, has_cells = [input_weights, hidden_weights, biases, biases], c0 is not None
    d_x, d_h0, d_c0, parameters = torch_private.cudnn_rnn_gradient(
        x.contiguous(), weights, len(weights), packed, h0[None], _stacked(c0), output,
        None if d_output is None else d_output.contiguous(), _stacked(d_h), _stacked(d_c),
        *_settings(kind, hidden_weights), [], None, reserve.clone(), [needs_x, True, has_cells, True],
    )  # fmt: skip
    nothing = x.new_empty(0)
    d_states = d_h0[0].clone(), d_c0[0].clone() if has_cells else nothing.clone()
    return d_x if needs_x else nothing, *(one.clone() for one in parameters), *d_states


@rnn_cudnn_gradient.register_fake
def _(
    kind: int, x: Array, input_weights: Array, hidden_weights: Array, h0: Array, c0: Array | None, *others: Any
) -> tuple[Array, ...]:
    *_, needs_x = others
    biases = input_weights.shape[0]
    shapes = (x.shape if needs_x else 0, input_weights.shape, hidden_weights.shape, biases, biases, h0.shape)
    return (*(x.new_empty(shape) for shape in shapes), x.new_empty(0 if c0 is None else c0.shape))


def _stacked(array: Array | None) -> Array | None:
    """An array of the only layer as cuDNN takes those of all layers."""
    return None if array is None else array[None].contiguous()


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Array, ...]) -> None:
    ctx.kind, x, input_weights, hidden_weights, _, _, h0, c0 = inputs
    result, _, _, reserve, packed = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, input_weights, hidden_weights, h0, c0, result, reserve, packed)


def _differentiate(ctx: Any, d_output: Array | None, d_h: Array | None, d_c: Array | None, *_: Any) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad[1:]
    d_cells = d_c if ctx.kind == LSTM else None
    gradients = rnn_cudnn_gradient(ctx.kind, *ctx.saved_tensors, d_output, d_h, d_cells, needed[0])
    return None, *(one if asked else None for one, asked in zip(gradients, needed, strict=True))


rnn_cudnn.register_autograd(_differentiate, setup_context=_remember)


def _settings(kind: int, hidden_weights: Array) -> tuple[Any, ...]:
    """Mode, hidden size, projection, layers, batch first, dropout, training, bidirectional."""
    return kind, hidden_weights.shape[1], 0, 1, False, 0.0, True, False


@cache
def _sizes(
    kind: int, steps: int, batch: int, inputs: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, int]:
    """Bytes that cuDNN keeps for the gradient, and the size of its packed weights: queried, since only cuDNN knows."""
    rows = GATES[kind] * hidden
    with torch_private.disable_modes(), torch.no_grad():
        settings: dict[str, Any] = {"dtype": dtype, "device": device}
        shapes = ((steps, batch, inputs), (rows, inputs), (rows, hidden), (rows,), (rows,), (batch, hidden))
        given = [torch.zeros(shape, **settings) for shape in shapes]
        *_, reserve, packed = rnn_cudnn(kind, *given, given[-1] if kind == LSTM else None)
    return reserve.numel(), packed.numel()
