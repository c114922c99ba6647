"""Which gradients of convolutions' weights go to tiles, and that numbers stay; a formula stands in for the kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.passes import simplification
from stepgraph.compiler.tuned import weight_gradients_in_tiles as weight_gradients
from stepgraph.compiler.tuned.weight_gradients_in_tiles import BACKWARD, tile_weight_gradients


def formula(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Each tap sees the source shifted by one pixel or none."""
    windows = F.pad(x, (1, 1, 1, 1)).unfold(2, x.shape[2], 1).unfold(3, x.shape[3], 1)
    return torch.einsum("nohw,ncijhw->ocij", g, windows)


def gradients(wanted: str, **settings):
    """A function of images, weights and biases that differentiates a convolution by some of them."""

    def function(x, w, b):
        named = {"x": x.detach(), "w": w.detach(), "b": b.detach()}
        leaves = [named[name].requires_grad_() for name in wanted]
        y = torch.conv2d(*named.values(), **settings)
        return torch.autograd.grad(y.square().sum(), leaves)

    return function


def operators(monkeypatch: pytest.MonkeyPatch, function, *arrays) -> list[object]:
    """What is left of a function, after its numbers were compared."""
    monkeypatch.setattr(weight_gradients, "of_weights", formula)
    module = make_fx(function, tracing_mode="fake")(*arrays)
    simplification.simplify(module)
    tile_weight_gradients(module.graph)
    module.graph.lint()
    module.recompile()
    for found, right in zip(module(*arrays), function(*arrays), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-3)
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def arrays(outputs: int = 32, inputs: int = 64, kernel: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, inputs, 5, 7).contiguous(memory_format=torch.channels_last)
    return [x, torch.randn(outputs, inputs, kernel, kernel), torch.randn(outputs)]


@pytest.mark.parametrize("wanted", ["xwb", "wb", "w", "wx"])
def test_tiles_stand_in_for_gradients_of_weights(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    targets = operators(monkeypatch, gradients(wanted, padding=1), *arrays())
    assert targets.count(formula) == 1 and BACKWARD not in targets


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"padding": 0}, arrays()),
        ({"padding": 1, "stride": 2}, arrays()),
        ({"padding": 2, "dilation": 2}, arrays()),
        ({"padding": 2}, arrays(kernel=5)),
        ({"padding": 1}, arrays(outputs=48)),
        ({"padding": 1}, arrays(inputs=128)),
        ({"padding": 1}, [arrays()[0].contiguous(), *arrays()[1:]]),
        ({"padding": 1}, [one.double() for one in arrays()]),
    ],
)
def test_others_stay(monkeypatch: pytest.MonkeyPatch, settings, given) -> None:
    targets = operators(monkeypatch, gradients("w", **settings), *given)
    assert BACKWARD in targets and formula not in targets


def test_no_gradient_of_weights_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BACKWARD in operators(monkeypatch, gradients("x", padding=1), *arrays())
