"""The LSTM's operators: the rules of `torch.library`, what a trace shows, and CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.layers.layer import Scope
from stepgraph.layers.lstm_kernel import lstm, lstm_gradient, sequence_lengths
from tests.layers.cases_recurrent import Setting
from tests.layers.test_recurrent import arrays, assert_all_close, run, sources


def operands(reverse: bool, full: bool) -> tuple[Any, ...]:
    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    rest = (leaf(8), leaf(3, 2), leaf(3, 2), torch.tensor([2, 4, 0])) if full else (None,) * 4
    return (leaf(4, 3, 5), leaf(8, 5), leaf(8, 2), *rest, reverse)


@pytest.mark.parametrize(
    ("reverse", "full"),
    [
        (False, False),
        (True, True),
        *(pytest.param(*mixed, marks=pytest.mark.deep) for mixed in ((False, True), (True, False))),
    ],
)
def test_operators_keep_the_rules_of_torch_library(reverse: bool, full: bool) -> None:
    given = operands(reverse, full)
    torch.library.opcheck(lstm, given)
    output, h, c, gates, cells = (one.detach() for one in lstm(*given))
    c0 = given[5] if full else None
    seeds = (torch.randn_like(output), torch.randn_like(h), torch.randn_like(c))
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for sent in (seeds, (None, *seeds[1:]), (seeds[0], None, None)):
        arguments = (gates, cells, given[2].detach(), None if c0 is None else c0.detach(), *sent, reverse)
        torch.library.opcheck(lstm_gradient, arguments, test_utils=checks)
    torch.library.opcheck(sequence_lengths, (torch.tensor([1, 2], dtype=torch.int32), 4), test_utils=checks)


@pytest.mark.parametrize("setting", [Setting(), Setting(layers=2, both=True, lengths=(1, 2, 3))])
def test_traced_layer_has_one_operator_for_each_layer_and_direction(setting: Setting) -> None:
    layer = setting.layer()
    own = {tensor: array.detach() for tensor, array in arrays(layer).items()}
    x, *others = (one.detach() for one in sources(setting))

    def step(x: torch.Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(layer.forward(leaf, *others, scope=Scope(own)).sum(), leaf)

    nodes = [
        str(node.target) for node in make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x).graph.nodes
    ]
    for name in ("stepgraph.lstm.default", "stepgraph.lstm_gradient.default"):
        assert nodes.count(name) == setting.layers * setting.directions


def test_weights_that_nobody_asks_for_cost_no_product() -> None:
    layer = Setting().layer()
    own = {tensor: array.detach() for tensor, array in arrays(layer).items()}
    wanted = layer.hidden_weights[0]
    own[wanted].requires_grad_()

    def step(x: torch.Tensor, weights: torch.Tensor) -> Any:
        leaf = weights.detach().requires_grad_()
        result = layer.forward(x, scope=Scope({**own, wanted: leaf}))
        return torch.autograd.grad(result.sum(), leaf)

    x = sources(Setting())[0].detach()
    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x, own[wanted].detach()).graph
    assert [str(node.target) for node in graph.nodes].count("aten.mm.default") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("setting", [Setting(), Setting(layers=2, both=True, lengths=(2, 4, 0), states_in=True)])
def test_cuda_equals_the_cpu(setting: Setting) -> None:
    layer, inputs = setting.layer(), sources(setting)
    wanted = run(layer, inputs)
    own = {tensor: array.detach().cuda().requires_grad_() for tensor, array in arrays(layer).items()}
    leaves = [one.detach().cuda().requires_grad_(one.requires_grad) for one in inputs]
    result = layer.forward(*leaves, scope=Scope(own))
    torch.testing.assert_close(result.cpu(), wanted.results[0])
    sent = torch.randn(result.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).cuda()
    found = torch.autograd.grad(result, [*(one for one in leaves if one.requires_grad), *own.values()], sent)
    assert_all_close([one.cpu() for one in found], wanted.gradients)
