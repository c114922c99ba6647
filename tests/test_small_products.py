"""Narrow products as sums: the same numbers, and only where rows are short or terms few."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.tuned.narrow_products import by_columns, by_terms, expand_narrow_products

aten = torch.ops.aten


def changed(function, *arrays) -> list[object]:
    """What a function consists of, after its numbers were compared."""
    module = make_fx(function, tracing_mode="fake")(*arrays)
    expand_narrow_products(module.graph)
    module.recompile()
    for found, exact in zip(module(*arrays), function(*(one.double() for one in arrays)), strict=True):
        assert (found - exact).abs().max() <= 2e-6 * exact.abs().max()  # sums of some fifty terms, which may cancel
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def classifier(x, w, v, b):
    leaves = [one.detach().requires_grad_() for one in (x, w, v, b)]
    x, w, v, b = leaves
    return torch.autograd.grad(F.linear(torch.relu(x @ w), v, b).logsumexp(1).sum(), leaves)


def test_the_last_layer_of_a_classifier():
    torch.manual_seed(0)
    shapes = (50, 40), (40, 30), (10, 30), (10,)
    targets = changed(classifier, *map(torch.randn, shapes))
    assert targets.count(by_columns) == targets.count(by_terms) == 1  # forward, and the gradient of what it reads
    assert targets.count(aten.mm.default) == 4 and aten.addmm.default not in targets


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.ones(20, 40), torch.ones(40, 17)),
        (torch.ones(20, 1025), torch.ones(1025, 10)),
        (torch.ones(40, 20).t(), torch.ones(40, 10)),  # each sum would go across memory
        (torch.ones(20, 10, dtype=torch.float64), torch.ones(10, 17, dtype=torch.float64)),
    ],
)
def test_other_products_stay(left, right):
    assert changed(lambda a, b: (a @ b,), left, right)[-1] is aten.mm.default
