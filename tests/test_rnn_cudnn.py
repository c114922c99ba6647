"""Recurrent layers as they are recorded for cuDNN, whose kernels PyTorch's own cells stand in for on the CPU."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import lowering, rnn_cudnn
from stepgraph.compiler.lowering import lowered
from stepgraph.compiler.step import Step
from stepgraph.layers.layer import Scope
from stepgraph.system import torch_private

CUDA = Step((), (), torch.device("cuda"))
Array = torch.Tensor


def _cells(x: Array, weights: list[Array], h: Array, c: Array | None) -> tuple[Array, ...]:
    settings: tuple[Any, ...] = (True, 1, 0.0, True, False, False)
    return torch.gru(x, h, weights, *settings) if c is None else torch.lstm(x, [h, c], weights, *settings)


def _pack(weights: list[Array], *_: Any) -> Array:
    return torch.cat([one.flatten() for one in weights])


def _run(x: Array, weights: list[Array], _: int, packed: Array, h: Array, c: Array | None, *__: Any) -> Any:
    output, h_last, *c_last = _cells(x, weights, h, c)
    return output, h_last, c_last[0] if c_last else x.new_empty(0), torch.zeros(8, dtype=torch.uint8), packed


def _gradient(
    x: Array, weights: list[Array], _: int, packed: Array, h: Array, c: Array | None, __: Array,
    d_output: Array | None, d_h: Array | None, d_c: Array | None, *others: Any,
) -> Any:  # fmt: skip
    """From the packed weights: the biases that are passed hold nothing."""
    sizes = packed.split([one.numel() for one in weights])
    own = [one.view_as(like) for one, like in zip(sizes, weights, strict=True)]

    def differentiated() -> tuple[Array, ...]:
        leaves = [one.detach().requires_grad_() for one in (x, h, *([] if c is None else [c]), *own)]
        cells = leaves[2] if c is not None else None
        results = _cells(leaves[0], leaves[2 + (c is not None) :], leaves[1], cells)
        pairs = [(one, d) for one, d in zip(results, (d_output, d_h, d_c), strict=False) if d is not None]
        return torch.autograd.grad([one for one, _ in pairs], leaves, [d for _, d in pairs])

    with ThreadPoolExecutor(1) as own_thread:  # this one is inside of an operator, where autograd records nothing
        d_x, d_h0, *rest = own_thread.submit(differentiated).result()
    assert others[-1] == [others[-1][0], True, c is not None, True]
    return d_x, d_h0, *([None] if c is None else rest[:1]), rest[c is not None :]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in (("cudnn_rnn", _run), ("cudnn_rnn_gradient", _gradient), ("cudnn_rnn_pack", _pack)):
        monkeypatch.setattr(torch_private, name, stand_in)
    monkeypatch.setattr(lowering, "supports", lambda dtype, lengths: lengths is None)
    monkeypatch.setattr(rnn_cudnn, "_sizes", lambda *_: (8, 1))


CASES = [
    (sg.LSTMLayer, {"is_bidirectional": True, "result_mode": sg.LSTMResultMode.OUTPUT_AND_STATES}, True),
    (sg.LSTMLayer, {"uses_biases": False}, True),
    (sg.GRULayer, {"is_bidirectional": True, "returns_state": True}, True),
    (sg.GRULayer, {"uses_biases": False}, True),
    (sg.GRULayer, {"returns_sequences": False, "layer_count": 2}, True),
    (sg.GRULayer, {"reset_after": False}, False),  # cuDNN has no such equation
]


@pytest.mark.parametrize(("kind", "settings", "by_cudnn"), CASES)
@pytest.mark.parametrize("starts", [False, True])
def test_cudnn_gets_the_layers_own_equations(
    kind: type[sg.LSTMLayer | sg.GRULayer], settings: dict[str, Any], by_cudnn: bool, starts: bool
) -> None:
    """Results and gradients are those of the layer's own kernel, which other tests compare with float64."""
    layer, random = kind.create(5, 6, **settings), torch.Generator().manual_seed(1)
    tensors = list(layer.parameters.values())
    shape = layer.descriptor.layer_count, layer.descriptor.direction_count, 4, 6
    count = (2 if kind is sg.LSTMLayer else 1) if starts else 0
    sources = [torch.randn(4, 7, 5, generator=random), *(torch.randn(shape, generator=random) for _ in range(count))]
    arrays = [torch.randn(one.shape, generator=random) * 0.5 for one in tensors]
    called: list[Any] = []

    def run(on_cuda: bool) -> list[np.ndarray]:
        leaves = [one.clone().requires_grad_() for one in (*sources, *arrays)]
        own = dict(zip(tensors, leaves[len(sources) :], strict=True))

        def forward(given: Any, scope: Scope) -> tuple[Array, ...]:
            found = layer.forward(*given, scope=scope)
            return found if isinstance(found, tuple) else (found,)

        recorded = lowered(CUDA, layer, forward) if on_cuda else forward
        results = recorded(leaves[: len(sources)], Scope(own))
        called.append(any("cudnn" in name for one in results for name in _history(one.grad_fn)))
        total = sum((one * one).sum() for one in results)
        return [one.detach().numpy() for one in (*results, *torch.autograd.grad(total, leaves))]

    for found, wanted in zip(run(True), run(False), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)
    assert called == [by_cudnn, False]


def _history(function: Any) -> set[str]:
    """The names of all operators that a result depends on."""
    found, stack = set(), [function]
    while stack:
        one = stack.pop()
        if one is not None and one not in found:
            found.add(one)
            stack += [source for source, _ in one.next_functions]
    return {one.name() for one in found}


def test_lengths_stay_with_the_layers_own_kernel() -> None:
    layer = sg.GRULayer.create(3, 4)
    scope = Scope({one: one.torch() for one in layer.parameters.values()})
    x, lengths = torch.randn(2, 5, 3), torch.tensor([5, 2])
    (found,) = lowered(CUDA, layer, lambda given, scope: (layer.forward(*given, scope=scope),))([x, lengths], scope)
    assert found[1, 2:].abs().max() == 0


@pytest.mark.parametrize("kind", [rnn_cudnn.LSTM, rnn_cudnn.GRU])
def test_operators_announce_the_shapes_that_they_return(kind: int) -> None:
    rows = rnn_cudnn.GATES[kind] * 6
    shapes = (7, 4, 5), (rows, 5), (rows, 6), (rows,), (rows,), (4, 6)
    given = [torch.randn(shape) for shape in shapes]
    c0 = torch.randn(4, 6) if kind == rnn_cudnn.LSTM else None

    def run(arrays: list[Array], cells: Array | None) -> list[tuple[int, ...]]:
        x, weights, hidden, _, _, h0 = arrays
        output, h, c, reserve, packed = rnn_cudnn.rnn_cudnn(kind, *arrays, cells)
        seeds = output, h, c if cells is not None else None
        arguments = kind, x, weights, hidden, h0, cells, output, reserve, packed, *seeds
        gradients = rnn_cudnn.rnn_cudnn_gradient(*arguments, True), rnn_cudnn.rnn_cudnn_gradient(*arguments, False)
        return [tuple(one.shape) for one in (output, h, c, reserve, *gradients[0], *gradients[1])]

    with torch_private.FakeTensorMode() as mode:
        announced = run([mode.from_tensor(one) for one in given], None if c0 is None else mode.from_tensor(c0))
    assert announced == run(given, c0)
