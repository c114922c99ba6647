"""Implementations of normalization, pools, softmax and sums: PyTorch's numbers, used where chosen, memory known."""

from functools import partial

import numpy as np
import pytest
import torch
from test_memory import measured_peak

import stepgraph as sg
from stepgraph.compiler import trace
from stepgraph.compiler.kernels import choose_operator as operators
from stepgraph.compiler.kernels import cross_entropy, measure, short_rows
from stepgraph.compiler.kernels import normalization_by_rows as normalization
from stepgraph.compiler.kernels.alternatives import CONVOLUTION_WEIGHTS
from stepgraph.compiler.operators import TABLE
from stepgraph.compiler.tuned import MANIFEST, products_by_onednn, sums_by_convolution
from stepgraph.compiler.tuned.sums_by_convolution import sum_by_convolution
from stepgraph.system import torch_private

aten = torch.ops.aten
OPTIONS = sg.GraphCompilationOptions
EPSILON = 1e-5
OF_LIBRARY = 1 << 18  # bytes that oneDNN may need for itself, as BLAS does where nobody sees it


def close(found: torch.Tensor | None, wanted: torch.Tensor | None, tolerance: float) -> None:
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.shape == wanted.shape and found.is_contiguous()
        assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


# Measuring


def test_indices_are_measured_all_over_the_vocabulary() -> None:
    seen: list[torch.Tensor] = []

    def function(g: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        seen.append(indices)
        return g

    arguments = torch.empty(500, 2), torch.empty(500, dtype=torch.int64)
    measure.measure({"one": function, "other": function}, arguments, below=100)
    assert seen[0].min() >= 0 and seen[0].max() < 100 and len(seen[0].unique()) > 90
    measure.measure({"one": function, "other": function}, arguments)
    assert not seen[-1].any()


# Normalization


def images(mean: float, *shape: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(shape, generator=generator) for _ in range(2))
    gamma, beta = (torch.randn(shape[1], generator=generator) for _ in range(2))
    x[:, 0] += mean  # one channel is far from 0
    return g, x * 2, gamma, beta


@pytest.mark.parametrize("shape", [(4, 3, 5, 5), (6, 4, 32), (2, 3, 4, 2, 6)], ids=str)
@pytest.mark.parametrize("mean", [0.0, 3.0, 30.0, 300.0])
def test_normalization_by_rows_is_as_exact_as_pytorchs(mean: float, shape: tuple[int, ...]) -> None:
    """The numbers themselves are rounded, to a part of their distance from 0."""
    g, x, gamma, beta = images(mean, *shape)
    settings = (None, None, True, 0.0, EPSILON)
    found = normalization.normalize_by_rows(x, gamma, beta, *settings)
    exact = aten.native_batch_norm.default(x.double(), gamma.double(), beta.double(), *settings)
    for one, other in zip(found, exact, strict=True):
        close(one, other.float(), 2e-6 * max(1, mean))
    for wanted in ([True, True, True], [True, False, True], [True, True, False]):
        rest = (None, None, *exact[1:], True, EPSILON, wanted)
        of_x = aten.native_batch_norm_backward.default(g.double(), x.double(), gamma.double(), *rest)
        rest = (None, None, *(one.float() for one in exact[1:]), True, EPSILON, wanted)
        for one, other in zip(normalization.gradients_by_rows(g, x, gamma, *rest), of_x, strict=True):
            close(one, None if other is None or not other.numel() else other.float(), 2e-6 * max(1, mean))


def test_constant_and_missing_numbers_do_as_with_pytorch() -> None:
    settings = (None, None, True, 0.0, EPSILON)
    gamma, beta = torch.ones(3), torch.zeros(3)
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    for number in (0.0, 7.0, float("nan")):
        x[:, 1] = number
        found = normalization.normalize_by_rows(x, gamma, beta, *settings)
        for one, other in zip(found, aten.native_batch_norm.default(x, gamma, beta, *settings), strict=True):
            # PyTorch's own rounds `x a + b`, 7 · 316 here, where the result is 0.
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4, equal_nan=True)


# Sums


@torch.inference_mode()
def test_sums_are_pytorchs_in_memory_of_their_own_and_in_given_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    biases, source, weights = (torch.randn(shape, generator=generator) for shape in ((60,), (50, 70), (60, 70)))
    for left in (source, source[:1]):
        wanted = torch.addmm(biases, left, weights.t())
        given = torch.full_like(wanted, float("nan"))
        close(sum_by_convolution(biases, left, weights.t()), wanted, 1e-6)
        assert sum_by_convolution(biases, left, weights.t(), out=given) is given
        close(given, wanted, 1e-6)


def test_sums_by_convolution_are_for_transposed_weights() -> None:
    (offer,) = sums_by_convolution.ROW.offers
    biases, source, weights = torch.empty(60), torch.empty(50, 70), torch.empty(60, 70)
    assert offer.fits((biases, source, weights.t()))
    assert not offer.fits((biases, torch.empty(70, 50).t(), weights.t()))
    assert not offer.fits((biases, source, torch.empty(70, 60)))


# Products


@pytest.mark.skipif(torch_private.onednn_linear is None, reason="needs oneDNN")
def test_products_by_onednn_leave_out_what_onednn_reads_wrong() -> None:
    of_two, of_three = (
        next(one for one in products_by_onednn.ROW.offers if one.operation is operation)
        for operation in (aten.mm.default, aten.addmm.default)
    )
    a, b, c = torch.randn(60, 50), torch.randn(50, 40), torch.randn(40)
    assert of_two.fits((a, b)) and of_two.fits((a[:, ::2], b[::2].contiguous())) and of_three.fits((c, a, b))
    windows = torch.randn(89).unfold(0, 40, 1)
    for second in (windows, b[:, ::2], torch.randn(1, 40).expand(50, 40)):
        assert not of_two.fits((a, second)) and not of_three.fits((c[: second.shape[1]], a, second))
    for vector in (torch.randn(1).expand(40), torch.randn(80)[::2], torch.randn(40, 40)[:, 3], c.double(), c[None]):
        assert not of_three.fits((vector, a, b))
    assert not of_two.fits((a.double(), b.double())) and not of_two.fits((torch.randn(20_000, 1), torch.randn(1, 0)))


def test_large_products_are_measured_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    (of_two, *_) = products_by_onednn.ROW.offers
    a, b = (torch.empty(shape, device="meta") for shape in ((10**6, 4096), (4096, 10**5)))
    assert [tuple(one.shape) for one in of_two.sample((a, b))] == [(256, 4096), (4096, 10**5)]
    assert of_two.sample((a.t()[:, :8], b[:8, :8]))[0].stride() == (1, 4096)
    assert measure.are_large((a, b)) and not measure.are_large((a[:4], b[:4], 5))


def test_a_graph_that_does_not_fit_here_can_be_planned() -> None:
    with sg.without_memory():
        layer = sg.FullyConnectedLayer.create(10**6, 10**6)
        graph, x, y = sg.Graph(), sg.Tensor((64, 10**6)), sg.Tensor((64, 10**6))
        graph.node(layer, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    assert training.memory_plan_for(64, device="cpu").total > 7 << 40


# Softmax


@pytest.mark.parametrize("shape", [(40, 2), (7, 3, 5), (30, 15), (9,)], ids=str)
@pytest.mark.parametrize("name", ["log_softmax", "softmax"])
def test_padded_rows_are_as_exact_as_pytorchs(name: str, shape: tuple[int, ...]) -> None:
    x = 5 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x.view(-1)[0], x.view(-1)[1] = -torch.inf, 80.0
    found = getattr(short_rows, name)(x, -1, False)
    exact = getattr(torch, name)(x.double(), -1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    assert found.shape == x.shape and found.is_contiguous()


def test_only_short_dense_rows_are_padded() -> None:
    x = torch.empty(6, 15)
    assert short_rows.fits((x, 1, False)) and short_rows.fits((x, -1, False))
    others = [(x, 0), (torch.empty(6, 16), 1), (torch.empty(6, 1), 1), (torch.empty(15, 6).t(), 1), (x.double(), 1)]
    assert not any(short_rows.fits((*one, False)) for one in others)


# Memory


@torch.inference_mode()
def test_implementations_need_what_they_say() -> None:
    g, x, gamma, beta = images(0.0, 16, 8, 20, 20)
    statistics = x.mean((0, 2, 3)), torch.ones(8)
    wide, bias = torch.randn(300, 200), torch.randn(300)
    calls = [
        (sum_by_convolution, (bias, wide, wide.t())),
        (operators.max_pool_channels_last, (x, [2, 2], [2, 2], [0, 0])),
        (operators.max_pool_channels_last, (x, [3, 3], [1, 1], [1, 1])),
        (normalization.normalize_by_rows, (x, gamma, beta, None, None, True, 0.0, EPSILON)),
        (normalization.normalize_by_rows, (x + 20, gamma, beta, None, None, True, 0.0, EPSILON)),
        (normalization.gradients_by_rows, (g, x, gamma, None, None, *statistics, True, EPSILON, [True] * 3)),
        (short_rows.log_softmax, (x.view(-1, 10), 1, False)),
        (short_rows.softmax, (x.view(-1, 8, 5), 2, False)),
    ]
    recurrent = {one.function for one in products_by_onednn.ROW.offers if one.operation.namespace == "stepgraph"}
    by_onednn = {one.function for one in products_by_onednn.ROW.offers}
    if torch_private.onednn_linear:
        calls += [(products_by_onednn.product, (one, wide[:150])) for one in (wide[:, :150], wide[:200].t()[:, :150])]
        calls += [(products_by_onednn.product_with_vector, (bias, wide, wide.t()))]
    else:
        recurrent |= by_onednn
    offered = [one for row in MANIFEST for one in row.offers if one.operation != CONVOLUTION_WEIGHTS]
    every = {one.function for one in (*operators.ALTERNATIVES, *offered)}
    assert every - recurrent <= {function for function, _ in calls}
    for function, arguments in calls:
        function(*arguments)
        found: list[object] = []
        call = partial(function, *arguments)
        measured = measured_peak(lambda call=call, found=found: found.append(call()))
        results = sum(one.nbytes for one in (found[0] if isinstance(found[0], tuple) else found))
        workspace = TABLE[function].workspace
        said = results + (workspace(arguments, results) if workspace else 0)
        most = said + (OF_LIBRARY if function in by_onednn else 0)
        assert measured <= most and said <= 1.1 * measured, function


# In graphs


def pictures() -> tuple[sg.TrainingGraph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    sg.set_seed(4)
    x, y, graph = sg.Tensor.image(16, 16, 3, 8), sg.Tensor((8, 16, 16, 16)), sg.Graph()
    hidden = x
    for channels in (3, 16):
        hidden = graph.node(sg.ConvolutionLayer.create(channels, 16, 3), hidden)
        hidden = graph.node(sg.BatchNormalizationLayer.create(16), hidden)
        hidden = graph.node(sg.ActivationLayer.relu(), hidden)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.5))
    training.add_inputs({"x": x}, {"y": y})
    random = np.random.default_rng(0)
    return training, *({name: random.random(t.shape, dtype=np.float32)} for name, t in (("x", x), ("y", y)))


def intensities(classes: int) -> tuple[sg.TrainingGraph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A network that finds a class for each of many pixels."""
    sg.set_seed(4)
    x, y, graph = sg.Tensor((64, 50)), sg.Tensor((64, 100), "int64"), sg.Graph()
    graph.dense(x, 100 * classes).reshape(64, 100, classes)
    loss = sg.LossLayer.softmax_cross_entropy(axis=-1)
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(learning_rate=5.0))
    training.add_inputs({"x": x}, {"y": y})
    random = np.random.default_rng(0)
    return training, {"x": random.random(x.shape, np.float32)}, {"y": random.integers(0, classes, y.shape)}


@pytest.mark.parametrize("gradient", ["pytorch", "gradient"])
def test_a_cross_entropy_of_few_classes_is_padded(gradient: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def pick(operator: str, implementations: dict[str, object], *_: object, **__: object) -> str:
        return (
            gradient if operator == cross_entropy.OPERATOR else "padded" if "padded" in implementations else "pytorch"
        )

    for module in (operators, cross_entropy):
        monkeypatch.setattr(module, "fastest", pick)
    (plain, *data), (chosen, *_) = intensities(5), intensities(5)
    plain.compile(sg.Device.cpu(), OPTIONS.DETERMINISTIC)
    chosen.compile(sg.Device.cpu())
    assert "log_softmax: padded" in str(chosen) and f"cross entropy: {gradient}" in str(chosen)
    for _ in range(5):
        assert chosen.execute(*data).loss == pytest.approx(plain.execute(*data).loss, rel=1e-5)


def test_graphs_use_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = {"native_batch_norm": "rows", "native_batch_norm_backward": "rows"}

    def pick(operator: str, implementations: dict[str, object], *_: object, **__: object) -> str:
        return choice.get(operator.split(".")[1], "pytorch")

    used: set[object] = set()
    choosing = trace.kernels.choose_kernels

    def noting(module: torch.fx.GraphModule, *given: object) -> None:
        choosing(module, *given)
        used.update(node.target for node in module.graph.nodes)

    monkeypatch.setattr(operators, "fastest", pick)
    monkeypatch.setattr(trace.kernels, "choose_kernels", noting)
    (plain, *data), (chosen, *_) = pictures(), pictures()
    plain.compile(sg.Device.cpu(), OPTIONS.DETERMINISTIC)
    assert not used
    chosen.compile(sg.Device.cpu())
    assert {normalization.normalize_by_rows, normalization.gradients_by_rows} <= used
    losses = [(one.execute(*data).loss, other.execute(*data).loss) for one, other in [(plain, chosen)] * 20]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-4)
    assert losses[-1][0] < 0.9 * losses[0][0]
