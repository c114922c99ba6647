"""Winograd's algorithm for the gradient of a 3×3 kernel: PyTorch's numbers, in the memory that the plan says."""

import pytest
import torch

import stepgraph as sg
from benchmarks.in_stepgraph import Stepgraph
from benchmarks.models import MODELS
from stepgraph.compiler.kernels import channels_first
from stepgraph.compiler.kernels import choose_convolution as convolution
from stepgraph.compiler.kernels.channels_last import is_last
from stepgraph.compiler.operators import TABLE
from stepgraph.compiler.tuned import row, winograd
from tests.test_kernels import DATA, network
from tests.test_memory import measured_peak

ORDERS = {"first": torch.contiguous_format, "last": torch.channels_last}
OFFERS = {one.name: one for one in winograd.ROW.offers}
SHAPES = [  # images, channels, height, width, outputs, padding
    (4, 3, 8, 8, 5, (1, 1)),
    (5, 4, 9, 7, 3, (1, 1)),
    (3, 2, 8, 10, 4, (0, 0)),
    (3, 2, 7, 6, 4, (0, 2)),
    (2, 3, 5, 11, 2, (2, 0)),
    (1, 1, 3, 3, 1, (0, 0)),
    (1, 1, 6, 6, 4, (2, 2)),
    (7, 5, 12, 4, 1, (1, 1)),
]


def arrays(shape: tuple, order: torch.memory_format, kind: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """The gradient of the result, the source and the weights."""
    n, channels, height, width, outputs, (top, left) = shape
    generator = torch.Generator().manual_seed(3)
    sizes = (
        (n, outputs, height + 2 * top - 2, width + 2 * left - 2),
        (n, channels, height, width),
        (outputs, channels, 3, 3),
    )
    return [torch.randn(size, generator=generator, dtype=kind).contiguous(memory_format=order) for size in sizes]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OFFERS)
@pytest.mark.parametrize("layout", ORDERS)
def test_the_gradient_is_pytorchs(monkeypatch: pytest.MonkeyPatch, layout: str, name: str, shape: tuple) -> None:
    arguments = (*arrays(shape, ORDERS[layout]), (1, 1), shape[-1])
    order = ORDERS[layout if is_last(arguments[0]) else "first"]  # with one channel both are the same
    wanted = channels_first.weights_pytorch(*arguments)
    function = OFFERS[name].function
    found = [function(*arguments)]
    monkeypatch.setattr(winograd, "_even", lambda total, _: min(total, 3))  # three images and outputs at a time
    found.append(function(*arguments))
    for one in found:
        assert one.shape == wanted.shape and one.is_contiguous(memory_format=order)
        assert (one - wanted).abs().max() <= 1e-10 * wanted.abs().max()


@pytest.mark.parametrize("name", OFFERS)
def test_float32_stays_far_within_the_tolerance(name: str) -> None:
    arguments = (*arrays((8, 32, 32, 32, 32, (1, 1)), torch.channels_last, torch.float32), (1, 1), (1, 1))
    exact = channels_first.weights_pytorch(*(one.double() for one in arguments[:3]), *arguments[3:])
    found = OFFERS[name].function(*arguments)
    assert (found - exact).abs().max() <= 2e-5 * exact.abs().max()


def test_it_is_offered_for_3x3_and_stride_1_only() -> None:
    for channels, name in ((8, "winograd"), (64, "winograd 4")):
        x, g = torch.empty(2, channels, 8, 8), torch.empty(2, 4, 8, 8)
        assert _fitting(g, x, torch.empty(4, channels, 3, 3), (1, 1), (1, 1)) == [name]
        for kernel, stride in (((5, 5), (1, 1)), ((3, 1), (1, 1)), ((3, 3), (2, 2)), ((3, 3), (1, 2))):
            assert _fitting(g, x, torch.empty(4, channels, *kernel), stride, (1, 1)) == []


def _fitting(*arguments: object) -> list[str]:
    return [name for name, one in OFFERS.items() if one.fits(arguments)]


MEMORY = [  # of several portions, of one, of many channels: products are kept, or made for some outputs at a time
    (64, 32, 14, 14, 64, (1, 1)),
    (8, 16, 16, 16, 16, (1, 1)),
    (6, 64, 31, 33, 32, (1, 1)),
    (8, 256, 4, 4, 320, (1, 1)),
]


@pytest.mark.parametrize("shape", MEMORY, ids=str)
@pytest.mark.parametrize("name", OFFERS)
@pytest.mark.parametrize("layout", ORDERS)
def test_the_workspace_is_the_measured_one(layout: str, name: str, shape: tuple) -> None:
    g, x, w = arrays(shape, ORDERS[layout], torch.float32)
    function, arguments = OFFERS[name].function, (g, x, w, (1, 1), shape[-1])
    with torch.inference_mode():
        function(*arguments)
        peak = measured_peak(lambda: function(*arguments))
    planned = TABLE[function].workspace(arguments, w.nbytes)
    assert peak - w.nbytes == pytest.approx(planned, rel=0.02)


def chosen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(convolution, "fastest", lambda _, known, __: name if name in known else "pytorch")
    monkeypatch.setattr(winograd, "MANY", 1 if name == "winograd 4" else 1 << 30)
    monkeypatch.setattr(winograd.ROW, "condition", row.on_cpu)  # on other processors too


@pytest.mark.parametrize("name", OFFERS)
def test_the_plan_counts_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    chosen(monkeypatch, name)
    net = Stepgraph(MODELS["cnn"], "cpu", dropout=True)
    net.step()
    assert net.training.memory_plan.intermediates == pytest.approx(measured_peak(net.step), rel=0.1)


@pytest.mark.parametrize("name", OFFERS)
def test_it_trains_like_the_reference(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plain = network(sg.GraphCompilationOptions.DETERMINISTIC)
    chosen(monkeypatch, name)
    other = network()
    assert f"convolution weights: {name} ×1" in str(other)
    for _ in range(20):
        assert other.execute(*DATA).loss == pytest.approx(plain.execute(*DATA).loss, rel=1e-4)
