"""The recurrence of one direction of a GRU over whole sequences: an operator with its own gradient.

What the inputs add to the gates of all steps is one product outside of it; what is left in the loops is the product
with the hidden weights and a few element-wise operators. Everything is time-major. Gates are adjacent in the order
reset, update, candidate.
"""

from __future__ import annotations

from typing import Any

import torch

from stepgraph.layers.lstm_kernel import Product, by_blas

Array = torch.Tensor


@torch.library.custom_op("stepgraph::gru", mutates_args=())
def gru(
    inputs: Array, hidden_weights: Array, bias: Array | None, h0: Array, reverse: bool, reset_after: bool
) -> tuple[Array, Array, Array]:
    """States of all steps `[steps, batch, hidden]`; then gates and hidden parts of the candidate, for the gradient.

    Args:
        inputs: what the inputs add to each gate, `[steps, batch, 3 hidden]`.
        hidden_weights: `[3 hidden, hidden]`.
        bias: `[hidden]`, added to the hidden part of the candidate; only with `reset_after`.
        h0: `[batch, hidden]`.
        reverse: run from the last step to the first.
        reset_after: whether the reset gate multiplies the product with the hidden weights, or the state before it.
    """
    return run(inputs, hidden_weights, bias, h0, reverse, reset_after)


def run(*given: Any, product: Product = by_blas) -> tuple[Array, Array, Array]:
    """`gru`, without PyTorch's dispatcher. `product` multiplies by weights."""
    inputs, hidden_weights, bias, h0, reverse, reset_after = given
    hidden, weights = hidden_weights.shape[1], hidden_weights.t()
    gates, states, parts = inputs.clone(), *(inputs.new_empty(*inputs.shape[:2], hidden) for _ in range(2))
    h = h0
    for t in _order(len(inputs), reverse):
        both, n = gates[t].split((2 * hidden, hidden), 1)
        r, z = both.split(hidden, 1)
        if reset_after:
            found = product(h, weights, None, None)
            both.add_(found[:, : 2 * hidden]).sigmoid_()
            part = parts[t].copy_(found[:, 2 * hidden :])
            n.addcmul_(r, part if bias is None else part.add_(bias)).tanh_()
        else:
            both.add_(product(h, weights[:, : 2 * hidden], None, None)).sigmoid_()
            n.add_(product(torch.mul(r, h, out=parts[t]), weights[:, 2 * hidden :], None, None)).tanh_()
        h = states[t].copy_(torch.lerp(n, h, z))
    return states, gates, parts


@gru.register_fake
def _(
    inputs: Array, hidden_weights: Array, bias: Array | None, h0: Array, reverse: bool, reset_after: bool
) -> tuple[Array, Array, Array]:
    states, parts = (inputs.new_empty(*inputs.shape[:2], hidden_weights.shape[1]) for _ in range(2))
    return states, torch.empty_like(inputs, memory_format=torch.contiguous_format), parts


@torch.library.custom_op("stepgraph::gru_gradient", mutates_args=())
def gru_gradient(
    d_states: Array,
    states: Array,
    gates: Array,
    parts: Array,
    hidden_weights: Array,
    h0: Array,
    reverse: bool,
    reset_after: bool,
) -> tuple[Array, Array, Array]:
    """Gradients of the gates before their activation, of the hidden parts of the candidate, and of `h0`.

    What the derivatives need from the forward pass is computed for all steps together; the loop multiplies it by the
    gradient of the state as it arrives.
    """
    return run_gradient(d_states, states, gates, parts, hidden_weights, h0, reverse, reset_after)


def run_gradient(*given: Any, product: Product = by_blas) -> tuple[Array, Array, Array]:
    """`gru_gradient`, without PyTorch's dispatcher. `product` multiplies by weights."""
    d_states, states, gates, parts, hidden_weights, h0, reverse, reset_after = given
    hidden, before = states.shape[2], previous(states, h0, reverse=reverse)
    r, z, n = gates.split(hidden, 2)
    by_n, by_z = (1 - z) * (1 - n * n), (before - n) * z * (1 - z)
    by_r = r * (1 - r) * (parts if reset_after else before)
    d_gates, d_parts = torch.empty_like(gates), torch.empty_like(parts)
    weights_rz, weights_n = hidden_weights.split((2 * hidden, hidden))
    dh = torch.zeros_like(h0)
    for t in reversed(_order(len(states), reverse)):
        dh = dh + d_states[t]
        both, dn = d_gates[t].split((2 * hidden, hidden), 1)
        torch.mul(dh, by_n[t], out=dn)
        both[:, hidden:] = dh * by_z[t]
        part = d_parts[t].copy_(dn * r[t] if reset_after else product(dn, weights_n, None, None))
        both[:, :hidden] = (dn if reset_after else part) * by_r[t]
        dh = product(both, weights_rz, dh * z[t], None)
        dh = product(part, weights_n, dh, None) if reset_after else torch.addcmul(dh, part, r[t])
    return d_gates, d_parts, dh.clone()


@gru_gradient.register_fake
def _(
    d_states: Array,
    states: Array,
    gates: Array,
    parts: Array,
    hidden_weights: Array,
    h0: Array,
    reverse: bool,
    reset_after: bool,
) -> tuple[Array, Array, Array]:
    return torch.empty_like(gates), torch.empty_like(parts), h0.new_empty(h0.shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Array, ...]) -> None:
    _, hidden_weights, _, h0, ctx.reverse, ctx.reset_after = inputs
    ctx.save_for_backward(*output, hidden_weights, h0)


def _differentiate(ctx: Any, d_states: Array, *_: Any) -> tuple[Any, ...]:
    states, gates, parts, hidden_weights, h0 = ctx.saved_tensors
    _, needs_weights, needs_bias, needs_h0, *_ = ctx.needs_input_grad
    settings = ctx.reverse, ctx.reset_after
    d_gates, d_parts, d_h0 = gru_gradient(d_states, states, gates, parts, hidden_weights, h0, *settings)
    d_weights = None
    if needs_weights:
        before, hidden = previous(states, h0, reverse=ctx.reverse), states.shape[2]
        both, dn = d_gates.split((2 * hidden, hidden), 2)
        candidate = _product(d_parts, before) if ctx.reset_after else _product(dn, parts)
        d_weights = torch.cat([_product(both, before), candidate])
    d_bias = d_parts.sum((0, 1)) if needs_bias else None
    return d_gates, d_weights, d_bias, d_h0 if needs_h0 else None, None, None


gru.register_autograd(_differentiate, setup_context=_remember)


def previous(states: Array, h0: Array, *, reverse: bool) -> Array:
    """The state before each step."""
    return torch.cat([states[1:], h0[None]] if reverse else [h0[None], states[:-1]])


def _product(gradients: Array, factors: Array) -> Array:
    """The sum over steps and sequences of outer products."""
    return gradients.flatten(0, 1).t() @ factors.flatten(0, 1)


def _order(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)
