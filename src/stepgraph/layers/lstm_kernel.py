"""One direction of an LSTM with the usual activations over whole sequences: an operator with its own gradient.

One matrix product serves the inputs of all steps, and one per weight gradient serves all steps; what is left in
the loops is the product with the hidden weights and a few element-wise operators, in place.

Everything is time-major. The four gates are adjacent in the order output, input, forget, candidate: the first
three share one sigmoid, the last three one product with the cell's gradient.

A sequence that has ended (`lengths`) has output and input gate 0 and forget gate 1: its cell does not change, its
output is 0 and its derivatives vanish, without a mask inside the loops. That also holds for the backward direction
until a sequence's own last step is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from stepgraph.errors import ArgumentError

Array = torch.Tensor
# `added + a b`, written to the last argument if it is an array.
Product = Callable[[Array, Array, Array | None, Array | None], Array]


def by_blas(a: Array, b: Array, added: Array | None, out: Array | None) -> Array:
    """A product, with an array or a vector that is added, as PyTorch computes it."""
    return torch.mm(a, b, out=out) if added is None else torch.addmm(added, a, b, out=out)


@torch.library.custom_op("stepgraph::sequence_lengths", mutates_args=())
def sequence_lengths(lengths: Array, steps: int) -> Array:
    """`lengths` as int64; values outside 0 to `steps` are an error on the CPU and are clamped elsewhere."""
    if lengths.is_cpu and bool(((lengths < 0) | (lengths > steps)).any()):
        raise ArgumentError(
            "a recurrent layer",
            f"sequence lengths are {lengths.tolist()}, but there are {steps} steps",
            fix="use 0 to steps",
        )
    return lengths.clamp(0, steps).to(torch.int64)


@sequence_lengths.register_fake
def _(lengths: Array, steps: int) -> Array:
    return torch.empty_like(lengths, dtype=torch.int64)


def one_direction(
    x: Array,
    input_weights: Sequence[Array],
    hidden_weights: Sequence[Array],
    biases: Sequence[Array] | None,
    h0: Array | None,
    c0: Array | None,
    lengths: Array | None,
    reverse: bool,
) -> tuple[Array, Array, Array]:
    """Outputs `[steps, batch, hidden]`, and the final `h` and `c`, `[batch, hidden]`.

    Weights and biases are those of the four gates: input, forget, candidate, output. As a function of PyTorch's own
    kind, it can be replaced while a layer is recorded.
    """
    given = x, input_weights, hidden_weights, biases, h0, c0, lengths, reverse
    if has_torch_function((x,)):
        return handle_torch_function(one_direction, (x,), *given)
    weights = [_joined(one) for one in (input_weights, hidden_weights)]
    return lstm(x, *weights, None if biases is None else _joined(biases), h0, c0, lengths, reverse)[:3]


def _joined(gates: Sequence[Array]) -> Array:
    i, f, g, o = gates
    return torch.cat([o, i, f, g])


@torch.library.custom_op("stepgraph::lstm", mutates_args=())
def lstm(
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    biases: Array | None,
    h0: Array | None,
    c0: Array | None,
    lengths: Array | None,
    reverse: bool,
) -> tuple[Array, Array, Array, Array, Array]:
    """Outputs `[steps, batch, hidden]` and final `h` and `c` `[batch, hidden]`; then gates and cells of all steps.

    Args:
        x: `[steps, batch, inputs]`.
        input_weights, hidden_weights, biases: `[4 hidden, inputs]`, `[4 hidden, hidden]`, `[4 hidden]`.
        h0, c0: `[batch, hidden]`; default 0.
        lengths: of the sequences, int64 `[batch]`; default: all steps.
        reverse: run from the last step to the first.
    """
    return run(x, input_weights, hidden_weights, biases, h0, c0, lengths, reverse)


def run(
    *given: Any, out: Sequence[Array | None] = (None,) * 5, product: Product = by_blas
) -> tuple[Array, Array, Array, Array, Array]:
    """`lstm` with the same arguments; outputs, gates and cells are written to `out` where it has memory for them.

    `product` multiplies by weights.
    """
    x, input_weights, hidden_weights, biases, h0, c0, lengths, reverse = given
    steps, batch, inputs = x.shape
    hidden = hidden_weights.shape[1]
    weights = hidden_weights.t().contiguous()
    output, _, _, gates, cells = out
    output, cells = (x.new_empty(steps, batch, hidden) if one is None else one for one in (output, cells))
    flat = None if gates is None else gates.view(-1, 4 * hidden)
    gates = product(x.reshape(-1, inputs), input_weights.t(), biases, flat).view(steps, batch, 4 * hidden)
    if h0 is not None:
        gates[_edge(gates, lengths, end=reverse)] += h0 @ weights
    if lengths is not None:
        _freeze(gates.view(steps, batch, 4, hidden), lengths)
    h, c = None, gates.new_zeros(batch, hidden) if c0 is None else c0
    sigmoids = gates[:, :, : 3 * hidden]
    o, i, f, g = gates.split(hidden, 2)
    arrays = (one.unbind() for one in (gates, sigmoids, o, i, f, g, cells, output))
    for gate, sigmoid, o, i, f, g, cell, result in _steps(reverse, *arrays):
        if h is not None:
            product(h, weights, gate, gate)
        sigmoid.sigmoid_()
        g.tanh_()
        c = torch.mul(f, c, out=cell).addcmul_(i, g)
        h = torch.tanh(c, out=result).mul_(o)
    h_n = output[_edge(output, lengths, end=not reverse)].clone()
    if lengths is not None and h0 is not None:
        h_n = torch.where(lengths[:, None] > 0, h_n, h0)
    return output, h_n, c.clone(), gates, cells


@lstm.register_fake
def _(
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    biases: Array | None,
    h0: Array | None,
    c0: Array | None,
    lengths: Array | None,
    reverse: bool,
) -> tuple[Array, Array, Array, Array, Array]:
    steps, batch, _ = x.shape
    hidden = hidden_weights.shape[1]
    state, all_steps = (batch, hidden), (steps, batch, hidden)
    shapes = (all_steps, state, state, (steps, batch, 4 * hidden), all_steps)
    output, h_n, c_n, gates, cells = (x.new_empty(shape) for shape in shapes)
    return output, h_n, c_n, gates, cells


@torch.library.custom_op("stepgraph::lstm_gradient", mutates_args=())
def lstm_gradient(
    gates: Array,
    cells: Array,
    hidden_weights: Array,
    c0: Array | None,
    d_output: Array | None,
    d_h: Array | None,
    d_c: Array | None,
    reverse: bool,
) -> tuple[Array, Array]:
    """Gradients of the gates before their activation, for all steps, and of `c0`.

    What the derivatives need from the forward pass is computed for all steps together; the loop multiplies it by the
    gradients of `h` and `c` as they arrive.
    """
    return run_gradient(gates, cells, hidden_weights, c0, d_output, d_h, d_c, reverse)


def run_gradient(
    *given: Any, out: Sequence[Array | None] = (None, None), product: Product = by_blas
) -> tuple[Array, Array]:
    """`lstm_gradient` with the same arguments; gradients of the gates are written to `out` if it has memory.

    `product` multiplies by weights.
    """
    gates, cells, hidden_weights, c0, d_output, d_h, d_c, reverse = given
    steps, batch, hidden = cells.shape
    d_gates = torch.empty_like(gates) if out[0] is None else out[0]
    factors = _factors(gates, cells, c0, reverse, d_gates)
    forget = gates[:, :, 2 * hidden : 3 * hidden]
    by_h, by_c = d_gates[:, :, :hidden], d_gates[:, :, hidden:].view(steps, batch, 3, hidden)
    arrays = (one.unbind() for one in (factors, d_gates, by_h, by_c, forget))
    incoming = [None] * steps if d_output is None else d_output.unbind()
    dh = gates.new_zeros(batch, hidden) if d_h is None else d_h.clone()
    dc = gates.new_zeros(batch, hidden) if d_c is None else d_c.clone()
    later, dc_once = None, dc[:, None]
    for d_out, factor, gate, gate_by_h, gates_by_c, f in _steps(not reverse, incoming, *arrays):
        if later is not None:
            product(later, hidden_weights, d_out, dh)
        elif d_out is not None:
            dh.add_(d_out)
        dc.addcmul_(dh, factor)
        gate_by_h.mul_(dh)
        gates_by_c.mul_(dc_once)
        dc.mul_(f)
        later = gate
    return d_gates, dc


@lstm_gradient.register_fake
def _(
    gates: Array,
    cells: Array,
    hidden_weights: Array,
    c0: Array | None,
    d_output: Array | None,
    d_h: Array | None,
    d_c: Array | None,
    reverse: bool,
) -> tuple[Array, Array]:
    return torch.empty_like(gates), cells.new_empty(cells.shape[1:])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Array, ...]) -> None:
    *arrays, ctx.reverse = inputs
    result, _, _, gates, cells = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arrays, result, gates, cells)


def _differentiate(ctx: Any, d_output: Array | None, d_h: Array | None, d_c: Array | None, *_: Any) -> tuple[Any, ...]:
    x, input_weights, hidden_weights, _, h0, c0, lengths, output, gates, cells = ctx.saved_tensors
    reverse, (needs_x, needs_input, needs_hidden, needs_biases, needs_h0, needs_c0, *_) = (
        ctx.reverse,
        ctx.needs_input_grad,
    )
    last = d_h
    if d_h is not None and lengths is not None and not reverse:  # each sequence's last output is its final h
        d_output = torch.zeros_like(output) if d_output is None else d_output
        d_output, last = d_output.index_put(_edge(output, lengths, end=True), d_h, accumulate=True), None
    d_gates, d_c0 = lstm_gradient(gates, cells, hidden_weights, c0, d_output, last, d_c, reverse)
    flat, first = d_gates.flatten(0, 1), d_gates[_edge(d_gates, lengths, end=reverse)]
    d_x = (flat @ input_weights).view(x.shape) if needs_x else None
    d_input_weights = flat.t() @ x.reshape(-1, x.shape[2]) if needs_input else None
    d_hidden_weights = _hidden_weights_gradient(d_gates, output, first, h0, reverse) if needs_hidden else None
    d_biases = flat.sum(0) if needs_biases else None
    d_h0 = first @ hidden_weights if needs_h0 else None
    if d_h0 is not None and d_h is not None and lengths is not None:  # an empty sequence passes h0 on
        d_h0 = d_h0 + torch.where(lengths[:, None] > 0, 0, d_h)
    return d_x, d_input_weights, d_hidden_weights, d_biases, d_h0, d_c0 if needs_c0 else None, None, None


lstm.register_autograd(_differentiate, setup_context=_remember)


def _hidden_weights_gradient(d_gates: Array, output: Array, first: Array, h0: Array | None, reverse: bool) -> Array:
    """`Σ_t d_gates[t]ᵀ h[t - 1]`, in reverse `h[t + 1]`."""
    later, earlier = (d_gates[:-1], output[1:]) if reverse else (d_gates[1:], output[:-1])
    total = later.flatten(0, 1).t() @ earlier.flatten(0, 1)
    return total if h0 is None else torch.addmm(total, first.t(), h0)


def _factors(gates: Array, cells: Array, c0: Array | None, reverse: bool, derivatives: Array) -> Array:
    """`∂h/∂c`; in `derivatives`, for each gate, the factor of the gradient of `h` (output) or `c` (others)."""
    hidden, factors = cells.shape[2], cells.tanh()
    o, i, f, g = gates.split(hidden, 2)
    d_o, d_i, d_f, d_g = derivatives.split(hidden, 2)
    later, earlier, first = (slice(-1), slice(1, None), -1) if reverse else (slice(1, None), slice(-1), 0)
    _sigmoid_backward(factors, o, grad_input=d_o)
    _sigmoid_backward(g, i, grad_input=d_i)
    _sigmoid_backward(cells[earlier], f[later], grad_input=d_f[later])
    _tanh_backward(i, g, grad_input=d_g)
    _tanh_backward(o, factors, grad_input=factors)
    if c0 is None:
        d_f[first] = 0
    else:
        _sigmoid_backward(c0, f[first], grad_input=d_f[first])
    return factors


_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


def _freeze(gates: Array, lengths: Array) -> None:
    """Sets the gates `[steps, batch, 4, hidden]` of ended sequences to values that activate to 0, 0 and 1."""
    ended = torch.arange(len(gates), device=gates.device)[:, None] >= lengths
    gates[:, :, :2].masked_fill_(ended[..., None, None], -torch.inf)
    gates[:, :, 2].masked_fill_(ended[..., None], torch.inf)


def _edge(array: Array, lengths: Array | None, *, end: bool) -> Any:
    """Index of every sequence's first or last step in an array `[steps, batch, ...]`."""
    if not end:
        return 0
    if lengths is None:
        return len(array) - 1
    return (lengths - 1).clamp_min(0), torch.arange(len(lengths), device=lengths.device)


def _steps(reverse: bool, *arrays: Sequence[Any]) -> Iterator[Any]:
    """The slices of the arrays for each step, in order."""
    return zip(*(reversed(one) for one in arrays), strict=True) if reverse else zip(*arrays, strict=True)
