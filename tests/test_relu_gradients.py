"""Gradients of ReLU that read less: the same numbers, and no reading of what can be computed again."""

import torch
import torch.nn.functional as F
from torch._inductor.inductor_prims import force_stride_order as keep
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler import simplification
from stepgraph.compiler.pooling import RELU_GRADIENT
from stepgraph.compiler.tuned.relu_gradients import mask_again, read_less


def block(x, w, v, scale, shift):
    """A residual block, and the gradients of all its parameters."""
    w, v, scale, shift = leaves = [one.detach().requires_grad_() for one in (w, v, scale, shift)]

    def normalized(z):
        return torch.native_batch_norm(z, scale, shift, None, None, True, 0.0, 1e-5)[0]

    hidden = torch.relu(normalized(torch.conv2d(x, w, padding=1)))
    first = torch.relu(normalized(torch.conv2d(hidden, v, padding=1)))
    last = torch.relu(normalized(torch.conv2d(first, v, padding=1)) + hidden)
    return torch.autograd.grad(last.square().sum(), leaves)


def arrays():
    torch.manual_seed(0)
    shapes = (4, 3, 9, 9), (6, 3, 3, 3), (6, 6, 3, 3), (6,), (6,)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def check(given) -> list[object]:
    """What the rewritten block consists of, after its numbers were compared."""
    module = make_fx(block, tracing_mode="fake")(*given)
    simplification.simplify(module)
    read_less(module.graph, keep=keep)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    for found, right in zip(module(*given), block(*given), strict=True):
        torch.testing.assert_close(found, right)
    return [node.target for node in module.graph.nodes]


def test_signs_are_computed_again_and_shared_gradients_written():
    targets = check(arrays())
    # One behind a normalization, one that the shortcut reads too, and the first, whose gradient is a sum.
    assert targets.count(mask_again) == targets.count(keep) == 1 and targets.count(RELU_GRADIENT) == 2


def test_a_plain_relu_stays():
    def function(x, w):
        w = w.detach().requires_grad_()
        return torch.autograd.grad(F.relu(x @ w).sum(), w)[0]

    module = make_fx(function, tracing_mode="fake")(torch.randn(3, 4), torch.randn(4, 5))
    before = str(module.graph)
    read_less(module.graph, keep=keep)
    assert str(module.graph) == before
