"""What kernels read for gradients of batch normalization in fused steps on a GPU; the passes run on recorded graphs."""

from typing import Any

import pytest
import torch
from torch import fx

from stepgraph.compiler.kernels import batch_norm
from stepgraph.compiler.passes import absorbed
from stepgraph.compiler.passes.recompute_fused import recompute_by_default
from stepgraph.compiler.passes.shared_gradients import store_gradients
from stepgraph.compiler.program import Phase, fake, notes
from tests.test_recompute_default import changed, recorded

aten = torch.ops.aten
CHANNELS = 8


def images(seed: int, *, offset: float = 0.0) -> torch.Tensor:
    made = torch.randn(4, CHANNELS, 6, 6, generator=torch.Generator().manual_seed(seed))
    return (made + offset).bfloat16().contiguous(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absorbed, "SMALL", images(0).nbytes // 2)


def normalize(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> Any:
    return batch_norm.normalized_by_sums(x, gamma, beta, None, None, True, 0.0, 1e-5)


def normalize_gradient(dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, *statistics: torch.Tensor) -> Any:
    """As PyTorch's compiler expands it."""
    mean, inverse = (one.view(1, -1, 1, 1) for one in statistics)
    dy, centred, count = dy.float(), x.float() - mean, x.numel() // x.shape[1]
    along = (dy * centred).sum([0, 2, 3], keepdim=True) / count
    level = dy.sum([0, 2, 3], keepdim=True) / count
    dx = (dy - level - centred * inverse * inverse * along) * inverse * gamma.view(1, -1, 1, 1)
    return dx.to(x.dtype)


def masked(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(y <= 0, torch.zeros((), dtype=dy.dtype), dy)


def block(a: torch.Tensor, g: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *affine: torch.Tensor) -> Any:
    """Two normalized convolutions with a residual sum; `g` is the gradient from a product behind it."""
    gammas, betas = affine[:2], affine[2:]
    x = torch.conv2d(a, w)
    y, *statistics = normalize(x, gammas[0], betas[0])
    r = torch.relu(y)
    x2 = torch.conv2d(r, v)
    y2, *statistics2 = normalize(x2, gammas[1], betas[1])
    end = torch.relu(y2 + a)
    product = torch.conv2d(end, v)
    yield
    backward = torch.ops.aten.convolution_backward.default
    settings = None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    behind, dv = backward(g, end, v, *settings, [True, True, False])[:2]
    total = masked(behind + product, end)
    dx2 = normalize_gradient(total, x2, gammas[1], *statistics2)
    dr, dv2 = backward(dx2, r, v, *settings, [True, True, False])[:2]
    dx = normalize_gradient(masked(dr, r), x, gammas[0], *statistics)
    da, dw = backward(dx, a, w, *settings, [True, True, False])[:2]
    yield [dv, dv2, dw, torch.conv2d(da + total, w)]


def arrays() -> list[torch.Tensor]:
    filters = [torch.randn(CHANNELS, CHANNELS, 1, 1).bfloat16() for _ in range(2)]
    return [images(1), images(2), *filters, *(torch.rand(CHANNELS) + 0.5 for _ in range(4))]


def test_a_mask_is_computed_from_what_a_kernel_reads_anyway() -> None:
    given = arrays()
    step = recorded(block, *given)
    after = changed(step, recompute_by_default, *given)
    # The ReLU inside the block is recomputed; that behind the residual sum would need another array.
    assert (len(masks_read(step.graph)), len(masks_read(after))) == (2, 1)


def masks_read(graph: fx.Graph) -> list[fx.Node]:
    """Comparisons of the gradient pass that read a ReLU of the forward pass from memory."""
    found = graph.find_nodes(op="call_function", target=aten.le.Scalar)
    return [node for node in found if notes(absorbed.made(node.args[0])).phase is Phase.FORWARD]


def test_a_gradient_of_three_arrays_is_stored_once() -> None:
    given = arrays()

    def passes(graph: fx.Graph) -> None:
        recompute_by_default(graph)
        store_gradients(graph)

    after = changed(recorded(block, *given), passes, *given)
    stored = [node for node in after.nodes if "force_stride" in str(node.target) and fake(node).dim() == 4]
    large = [node for node in stored if not absorbed.is_small(node)]
    assert [node.args[0].target for node in large] == [aten.where.self]
    assert fake(large[0]).dtype is torch.bfloat16  # not its copy in float32
    assert len(large[0].users) == 2


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_normalization_by_sums_agrees_with_float64(affine: bool, offset: float) -> None:
    x = images(3, offset=offset)
    gamma, beta = (torch.rand(CHANNELS) + 0.5, torch.randn(CHANNELS)) if affine else (None, None)
    wide = [None if one is None else one.double() for one in (x, gamma, beta)]
    right = aten.native_batch_norm.default(*wide, None, None, True, 0.0, 1e-5)
    found = normalize(x, gamma, beta)  # type: ignore[arg-type]
    torch.testing.assert_close(found[0].double(), right[0], rtol=1e-2, atol=1e-2)
    for one, other in zip(found[1:], right[1:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
