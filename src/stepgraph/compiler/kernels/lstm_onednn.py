"""One direction of an LSTM by oneDNN, which runs all steps of a sequence in one call, on x86 processors.

Its gates have the order of the layers: input, forget, candidate, output. It knows only the usual activations, float32
and sequences of the same length. For the gradient it keeps about three times as much as our own operator, so steps with
a memory limit leave it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.kernels.measure import Implementations, Pick
from stepgraph.compiler.program import note
from stepgraph.compiler.step import Fusion, Step
from stepgraph.layers import lstm_kernel
from stepgraph.system import torch_private

aten = torch.ops.aten
Array = torch.Tensor
OPERATOR = "lstm"  # as the file of choices calls it
OWN, ONEDNN = "steps", "sequence"
SMALL = 0.05  # numbers for which a recurrence does not amplify rounding
WIDEST = 1 << 24  # weights of a gate from which what is kept is estimated without a call
ENOUGH = 64  # steps to measure with
MANY = 16  # steps from which what is kept is calculated from shorter sequences
KIND, LAYERS = 2, 1  # PyTorch's number of an LSTM, and how many run at once


def applies(step: Step) -> bool:
    """Whether a step may use it. PyTorch's compiler would check the size of what is kept, which is estimated."""
    plain = step.memory_limit is None and step.fusion is not Fusion.FIRST
    return torch.backends.mkldnn.is_available() and plain and step.chooses_kernels


def supports(x: Array, lengths: Array | None) -> bool:
    """Whether it computes these sequences."""
    return x.dtype is torch.float32 and x.numel() > 0 and lengths is None


def compared(given: Sequence[Any], *, trains: bool) -> tuple[Any, ...]:
    """What to choose for: the arguments of `lstm_kernel.one_direction`, which may have no memory, with fewer steps."""
    x, input_weights, hidden_weights, biases, h0, c0, _, reverse = given
    joined = [torch.empty(4 * len(one[0]), *one[0].shape[1:], device="meta") for one in (input_weights, hidden_weights)]
    added = None if biases is None else torch.empty(len(joined[0]), device="meta")
    return x[:ENOUGH], *joined, added, h0, c0, reverse, trains


def is_faster(pick: Pick, arguments: Sequence[Any]) -> bool:
    """Whether it is chosen for what is `compared`."""
    return pick(OPERATOR, IMPLEMENTATIONS, arguments, deviation=SMALL, warm=True) == ONEDNN


def say(node: fx.Node) -> None:
    """Notes what was chosen."""
    note(node, implementation=(OPERATOR, ONEDNN))


def lstm_by_onednn(
    x: Array,
    input_weights: Sequence[Array],
    hidden_weights: Sequence[Array],
    biases: Sequence[Array] | None,
    h0: Array | None,
    c0: Array | None,
    lengths: None,
    reverse: bool,
    *,
    keeps: bool,
) -> tuple[Array, Array, Array]:
    """The same as `lstm_kernel.one_direction`. `keeps` is whether there will be gradients."""
    weights = torch.cat(tuple(input_weights)), torch.cat(tuple(hidden_weights))
    added = None if biases is None else torch.cat(tuple(biases))
    return lstm_onednn(x, *weights, added, h0, c0, reverse, keeps)[:3]


@torch.library.custom_op("stepgraph::lstm_onednn", mutates_args=())
def lstm_onednn(
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    biases: Array | None,
    h0: Array | None,
    c0: Array | None,
    reverse: bool,
    keeps: bool,
) -> tuple[Array, Array, Array, Array]:
    """Outputs `[steps, batch, hidden]`, final `h` and `c` `[batch, hidden]`; then what the gradient needs."""
    return run(x, input_weights, hidden_weights, biases, h0, c0, reverse, keeps)


def run(*given: Any) -> tuple[Array, Array, Array, Array]:
    """`lstm_onednn`, without PyTorch's dispatcher."""
    *arrays, reverse, keeps = given
    x, weights, states = _completed(*arrays)
    settings: tuple[Any, ...] = (reverse, [], KIND, states[0].shape[2], LAYERS, True, False, False, keeps)
    with torch.set_grad_enabled(keeps):  # otherwise it keeps nothing
        output, h, c, kept = aten.mkldnn_rnn_layer.default(x, *weights, *states, *settings)
    return output, h[0], c[0], kept if keeps else x.new_empty(0, dtype=torch.uint8)


@lstm_onednn.register_fake
def _(x: Array, input_weights: Array, hidden_weights: Array, *others: Any) -> tuple[Array, Array, Array, Array]:
    (steps, batch, inputs), hidden = x.shape, hidden_weights.shape[1]
    kept = _kept(steps, batch, inputs, hidden) if others[-1] else 0
    output, h, c = (x.new_empty(shape) for shape in ((steps, batch, hidden), (batch, hidden), (batch, hidden)))
    return output, h, c, x.new_empty(kept, dtype=torch.uint8)


def _kept(steps: int, batch: int, inputs: int, hidden: int) -> int:
    """The bytes that oneDNN keeps for the gradient: so many for each step, which only calls show."""
    sizes, threads = (batch, inputs, hidden), torch.get_num_threads()
    if hidden * (inputs + hidden) > WIDEST:
        return 4 * steps * batch * (16 * hidden + 3 * inputs)
    if steps <= MANY:
        return _seen(steps, *sizes, threads)
    few, many = (_seen(count, *sizes, threads) for count in (MANY // 2, MANY))
    return many + (many - few) * (steps - MANY) // (MANY - MANY // 2)


@cache
def _seen(steps: int, batch: int, inputs: int, hidden: int, threads: int) -> int:
    with torch_private.disable_modes():
        given = (torch.zeros(shape) for shape in ((steps, batch, inputs), (4 * hidden, inputs), (4 * hidden, hidden)))
        return run(*given, None, None, None, False, True)[3].numel()


@torch.library.custom_op("stepgraph::lstm_onednn_gradient", mutates_args=())
def lstm_onednn_gradient(
    x: Array,
    input_weights: Array,
    hidden_weights: Array,
    biases: Array | None,
    h0: Array | None,
    c0: Array | None,
    output: Array,
    h: Array,
    c: Array,
    kept: Array,
    d_output: Array | None,
    d_h: Array | None,
    d_c: Array | None,
    reverse: bool,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Gradients of `x`, both weights, biases, `h0` and `c0`.

    oneDNN also computes in the memory of `kept`, but reads nothing there that an earlier call has written.
    """
    return run_gradient(
        x, input_weights, hidden_weights, biases, h0, c0, output, h, c, kept, d_output, d_h, d_c, reverse
    )


def run_gradient(*given: Any) -> tuple[Array, Array, Array, Array, Array, Array]:
    """`lstm_onednn_gradient`, without PyTorch's dispatcher."""
    *arrays, output, h, c, kept, d_output, d_h, d_c, reverse = given
    x, weights, states = _completed(*arrays)
    incoming = (None if one is None else one.contiguous() for one in (d_output, _stacked(d_h), _stacked(d_c)))
    settings: tuple[Any, ...] = (reverse, KIND, states[0].shape[2], LAYERS, True, True, False, [], False)
    d_x, *d_weights, d_biases, _, d_h0, d_c0 = aten.mkldnn_rnn_layer_backward.default(
        x, *weights, *states, output, h[None], c[None], *incoming, *settings, kept
    )
    return d_x, *d_weights, d_biases, d_h0[0], d_c0[0]


@lstm_onednn_gradient.register_fake
def _(x: Array, input_weights: Array, hidden_weights: Array, *others: Any) -> tuple[Array, ...]:
    h = others[4]
    shapes = (x.shape, input_weights.shape, hidden_weights.shape, len(input_weights), h.shape, h.shape)
    return tuple(x.new_empty(shape) for shape in shapes)


def workspace(given: Sequence[Any], _: int) -> int:
    """What oneDNN was seen to need while it runs: the gates of all steps, reordered weights, and copies.

    Without gradients, nothing is kept that could serve as memory.
    """
    x, input_weights, keeps = given[0], given[1], given[-1]
    copies = (0 if x.is_contiguous() else 1) + (0 if keeps else 1 + (len(input_weights) <= x.shape[2]))
    return _of_both(given) + copies * int(x.nbytes)


def workspace_of_gradient(given: Sequence[Any], _: int) -> int:
    """The same for the gradient: weights are reordered in both directions, and its source is copied, or is zeros."""
    x, *weights = given[:3]
    output, d_output = given[6], given[10]
    copied: list[Any] = [] if x.is_contiguous() else [x]
    copied += [] if d_output is not None and d_output.is_contiguous() else [output]
    return _of_both(given) + sum(int(one.nbytes) for one in (*weights, *copied))


def _of_both(given: Sequence[Any]) -> int:
    x, *weights = given[:3]
    gates = x.shape[0] * x.shape[1] * len(weights[0])
    return int(x.itemsize * (gates + sum(one.numel() for one in weights)))


def _completed(
    x: Array, input_weights: Array, hidden_weights: Array, biases: Array | None, h0: Array | None, c0: Array | None
) -> tuple[Array, list[Array], list[Array]]:
    """Sequences, weights and biases, and first states, with zeros for what is left out."""
    nothing = x.new_zeros(len(input_weights))
    zeros = x.new_zeros(1, x.shape[1], hidden_weights.shape[1])
    states = [zeros if one is None else one[None].contiguous() for one in (h0, c0)]
    return x.contiguous(), [input_weights, hidden_weights, nothing if biases is None else biases, nothing], states


def _stacked(array: Array | None) -> Array | None:
    return None if array is None else array[None]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Array, ...]) -> None:
    *arrays, ctx.reverse, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*arrays, *output)


def _differentiate(ctx: Any, d_output: Array | None, d_h: Array | None, d_c: Array | None, _: Any) -> tuple[Any, ...]:
    gradients = lstm_onednn_gradient(*ctx.saved_tensors, d_output, d_h, d_c, ctx.reverse)
    asked = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(one if needed else None for one, needed in asked), None, None


lstm_onednn.register_autograd(_differentiate, setup_context=_remember)


# What is measured: a pass forward, and back if there are gradients.


def _measured(
    x: Array, of_inputs: Array, of_hidden: Array, biases: Array | None, h0: Any, c0: Any, reverse: bool, trains: bool
) -> tuple[Array, ...]:
    weights = (of_inputs, of_hidden, biases, h0, c0)
    output, h, c, kept = run(x, *weights, reverse, trains)
    if not trains:
        return output, h, c
    return output, h, c, run_gradient(x, *weights, output, h, c, kept, output, None, None, reverse)[0]


def _measured_own(
    x: Array, of_inputs: Array, of_hidden: Array, biases: Array | None, h0: Any, c0: Any, reverse: bool, trains: bool
) -> tuple[Array, ...]:
    own, recurrent = map(_own_order, (of_inputs, of_hidden))
    added = None if biases is None else _own_order(biases)
    output, h, c, gates, cells = lstm_kernel.run(x, own, recurrent, added, h0, c0, None, reverse)
    if not trains:
        return output, h, c
    d_gates, _ = lstm_kernel.run_gradient(gates, cells, recurrent, c0, output, None, None, reverse)
    flat = d_gates.flatten(0, 1)
    for read in (x, output):  # the gradients of the weights
        flat.t() @ read.reshape(-1, read.shape[2])
    flat.sum(0)
    return output, h, c, (flat @ own).view(x.shape)


def _own_order(joined: Array) -> Array:
    """Gates in the order of our own operator: the last one first."""
    return joined.roll(len(joined) // 4, 0)


IMPLEMENTATIONS: Implementations = {OWN: _measured_own, ONEDNN: _measured}
