"""One direction of an LSTM with the usual activations using cuDNN, which runs all steps of a sequence in one kernel.

Its gates have the order of the layer: input, forget, candidate, output. It does not support sequence lengths: if there
are any, `lstm_kernel` is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from stepgraph.system import torch_private

Array = torch.Tensor
_LSTM = 2  # cuDNN's number for this kind of network


def supports(dtype: torch.dtype, lengths: Array | None) -> bool:
    """Whether cuDNN is available and computes sequences of this type."""
    available = torch.backends.cudnn.is_available() and torch.version.hip is None
    return available and dtype != torch.float64 and lengths is None


def by_cudnn(
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
    hidden = torch.cat(tuple(hidden_weights))
    zeros = x.new_zeros(x.shape[1], hidden.shape[1])
    added = x.new_zeros(len(hidden)) if biases is None else torch.cat(tuple(biases))
    states = (zeros if one is None else one for one in (h0, c0))
    output, h, c, *_ = lstm_cudnn(x.flip(0) if reverse else x, torch.cat(tuple(input_weights)), hidden, added, *states)
    return output.flip(0) if reverse else output, h, c


@torch.library.custom_op("stepgraph::lstm_cudnn", mutates_args=())
def lstm_cudnn(
    x: Array, input_weights: Array, hidden_weights: Array, biases: Array, h0: Array, c0: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Outputs `[steps, batch, hidden]`, final `h` and `c` `[batch, hidden]`; then what the gradient needs."""
    weights = [one.detach() for one in (input_weights, hidden_weights, biases, torch.zeros_like(biases))]
    mode, hidden, projection, layers, batch_first, *_, bidirectional = settings = _settings(hidden_weights)
    sizes = (x.shape[2], mode, hidden, projection, layers, batch_first, bidirectional)
    packed = torch_private.cudnn_rnn_pack(weights, len(weights), *sizes)  # one block, which `weights` now view
    output, h, c, reserve, _ = torch_private.cudnn_rnn(
        x.contiguous(), weights, len(weights), packed, h0[None], c0[None], *settings, [], None
    )
    return output, h[0].clone(), c[0].clone(), reserve, packed


@lstm_cudnn.register_fake
def _(
    x: Array, input_weights: Array, hidden_weights: Array, biases: Array, h0: Array, c0: Array
) -> tuple[Array, Array, Array, Array, Array]:
    steps, batch, inputs = x.shape
    hidden = hidden_weights.shape[1]
    reserve, packed = _sizes(steps, batch, inputs, hidden, x.dtype, x.device)
    state = x.new_empty(batch, hidden)
    return (
        x.new_empty(steps, batch, hidden),
        state,
        torch.empty_like(state),
        x.new_empty(reserve, dtype=torch.uint8),
        x.new_empty(packed),
    )


@torch.library.custom_op("stepgraph::lstm_cudnn_gradient", mutates_args=())
def lstm_cudnn_gradient(
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    h0: Array,
    c0: Array,
    output: Array,
    reserve: Array,
    packed: Array,
    d_output: Array | None,
    d_h: Array | None,
    d_c: Array | None,
    needs_x: bool,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Gradients of `x`, both weights, the biases, `h0` and `c0`."""
    biases = input_weights.new_empty(len(input_weights))
    weights = [input_weights, hidden_weights, biases, biases]
    d_x, d_h0, d_c0, parameters = torch_private.cudnn_rnn_gradient(
        x.contiguous(), weights, len(weights), packed, h0[None], c0[None], output,
        None if d_output is None else d_output.contiguous(), None if d_h is None else d_h[None].contiguous(),
        None if d_c is None else d_c[None].contiguous(), *_settings(hidden_weights), [], None, reserve.clone(),
        [needs_x, True, True, True],
    )  # fmt: skip
    d_x = d_x if needs_x else x.new_empty(0)
    d_input, d_hidden, d_biases, _ = (one.clone() for one in parameters)
    return d_x, d_input, d_hidden, d_biases, d_h0[0].clone(), d_c0[0].clone()


@lstm_cudnn_gradient.register_fake
def _(
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    h0: Array,
    c0: Array,
    output: Array,
    reserve: Array,
    packed: Array,
    d_output: Array | None,
    d_h: Array | None,
    d_c: Array | None,
    needs_x: bool,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    d_input, d_hidden, d_h0, d_c0 = (one.new_empty(one.shape) for one in (input_weights, hidden_weights, h0, c0))
    return x.new_empty(x.shape if needs_x else 0), d_input, d_hidden, x.new_empty(len(input_weights)), d_h0, d_c0


def _remember(ctx: Any, inputs: tuple[Array, ...], output: tuple[Array, ...]) -> None:
    x, input_weights, hidden_weights, _, h0, c0 = inputs
    result, _, _, reserve, packed = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, input_weights, hidden_weights, h0, c0, result, reserve, packed)


def _differentiate(ctx: Any, d_output: Array | None, d_h: Array | None, d_c: Array | None, *_: Any) -> tuple[Any, ...]:
    gradients = lstm_cudnn_gradient(*ctx.saved_tensors, d_output, d_h, d_c, ctx.needs_input_grad[0])
    return tuple(one if needed else None for one, needed in zip(gradients, ctx.needs_input_grad, strict=True))


lstm_cudnn.register_autograd(_differentiate, setup_context=_remember)


def _settings(hidden_weights: Array) -> tuple[Any, ...]:
    """Mode, hidden size, projection, layers, batch first, dropout, training, bidirectional."""
    return _LSTM, hidden_weights.shape[1], 0, 1, False, 0.0, True, False


@cache
def _sizes(
    steps: int, batch: int, inputs: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[int, int]:
    """Bytes that cuDNN keeps for the gradient, and the size of its packed weights: queried, since only cuDNN knows."""
    with torch_private.disable_modes(), torch.no_grad():
        settings: dict[str, Any] = {"dtype": dtype, "device": device}
        shapes = ((steps, batch, inputs), (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,))
        state = torch.zeros(batch, hidden, **settings)
        *_, reserve, packed = lstm_cudnn(*(torch.zeros(shape, **settings) for shape in shapes), state, state)
    return reserve.numel(), packed.numel()
