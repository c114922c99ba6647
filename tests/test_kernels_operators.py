"""Implementations of embeddings, normalization, products: PyTorch's numbers, used where chosen, their memory known."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from test_memory import measured_peak

import stepgraph as sg
from stepgraph.compiler import trace
from stepgraph.compiler.kernels import embedding, measure, normalization, operators, products
from stepgraph.compiler.operators import TABLE, Operator

aten = torch.ops.aten
OPTIONS = sg.GraphCompilationOptions
EPSILON = 1e-5


def close(found: torch.Tensor | None, wanted: torch.Tensor | None, tolerance: float) -> None:
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert found.shape == wanted.shape and found.is_contiguous()
        assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


# Embedding


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("padding", [-1, 0, 4])
@pytest.mark.parametrize("name", embedding.IMPLEMENTATIONS)
def test_embedding_gradients_sum_repeated_words(name: str, padding: int, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(6, 50, 16, generator=generator)
    for indices in (torch.randint(0, 9, (6, 50), generator=generator), torch.full((6, 50), 4)):
        found = embedding.IMPLEMENTATIONS[name](g, indices.to(kind), 12, padding, False)
        wanted = torch.zeros(12, 16, dtype=torch.float64)
        for row, word in zip(g.double().reshape(-1, 16), indices.flatten().tolist(), strict=True):
            wanted[word] += row * (word != padding)
        close(found, wanted.float(), 1e-6)
        turned = g.transpose(0, 1).contiguous().transpose(0, 1)  # the same numbers in another order in memory
        close(embedding.IMPLEMENTATIONS[name](turned, indices.to(kind), 12, padding, False), found, 1e-6)


def test_indices_are_measured_all_over_the_vocabulary() -> None:
    seen: list[torch.Tensor] = []

    def function(g: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        seen.append(indices)
        return g

    arguments = torch.empty(500, 2), torch.empty(500, dtype=torch.int64)
    measure.measure({"one": function, "other": function}, arguments, torch.device("cpu"), below=100)
    assert seen[0].min() >= 0 and seen[0].max() < 100 and len(seen[0].unique()) > 90
    measure.measure({"one": function, "other": function}, arguments, torch.device("cpu"))
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


# Products


@pytest.mark.parametrize("function", [products.added_after, products.sum_by_convolution])  # the processor decides
@torch.inference_mode()
def test_sums_are_pytorchs_in_memory_of_their_own_and_in_given_memory(function: Callable[..., torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    biases, source, weights = (torch.randn(shape, generator=generator) for shape in ((60,), (50, 70), (60, 70)))
    whole = torch.randn(50, 90, generator=generator)
    for left in (source, source[:1], whole[:, 20:]):  # the last one's rows are parts of longer ones
        wanted = torch.addmm(biases, left, weights.t())
        given = torch.full_like(wanted, float("nan"))
        close(function(biases, left, weights.t()), wanted, 1e-6)
        assert function(biases, left, weights.t(), out=given) is given
        close(given, wanted, 1e-6)


def test_only_what_goes_to_onednn_may_be_slower_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    biases, source, weights = torch.empty(60), torch.empty(50, 70), torch.empty(60, 70)
    turned = torch.empty(70, 50).t()
    for on_arm in (True, False):
        monkeypatch.setattr(products, "ON_ARM", on_arm)
        assert (products.gain((biases, source, weights.t())) > 1) == on_arm
        assert products.gain((biases, turned, weights.t())) < 1
        assert products.gain((biases, source, torch.empty(70, 60))) < 1


@torch.inference_mode()
def test_a_sum_by_convolution_needs_no_more_than_its_result() -> None:
    biases, source, weights = torch.randn(60), torch.randn(50, 70), torch.randn(60, 70)
    found: list[torch.Tensor] = []
    assert measured_peak(lambda: found.append(products.sum_by_convolution(biases, source, weights.t()))) == 4 * 50 * 60


# Memory


@torch.inference_mode()
def test_implementations_need_what_they_say() -> None:
    g, x, gamma, beta = images(0.0, 16, 8, 20, 20)
    statistics = x.mean((0, 2, 3)), torch.ones(8)
    rows, indices = torch.randn(1000, 4, 32), torch.randint(0, 50, (1000, 4))
    turned = rows.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.randn(300, 200)
    bias, square = torch.randn(300), torch.randn(300, 300)
    gradients = list(embedding.IMPLEMENTATIONS.values())[1:]
    calls = [
        (products.turned, (square.t(), wide.t().contiguous().t())),
        (products.turned_sum, (bias[:200], square.t(), wide.t().contiguous().t())),
        (products.sum_of_right_copied, (bias, wide, wide.t())),
        (products.added_after, (bias, wide, wide.t().contiguous())),
        (products.sum_by_convolution, (bias, wide, wide.t())),
        (operators.sum_by_product, (torch.randn(20_000, 4), [0])),
        (operators.IMPLEMENTATIONS[aten.tanh.default]["sigmoid"], (wide,)),
        (operators.gelu_backward_by_parts, (square, square)),
        (partial(operators.gelu_backward_by_parts, approximate="tanh"), (square, square)),
        (operators.max_pool_channels_last, (x, [2, 2], [2, 2], [0, 0])),
        (operators.max_pool_channels_last, (x, [3, 3], [1, 1], [1, 1])),
        *((products.of_left_copied, (one, one.t().contiguous())) for one in (wide, wide.t())),
        *((products.of_right_copied, (wide, other)) for other in (wide.t(), wide.t().contiguous())),
        (normalization.normalize_by_rows, (x, gamma, beta, None, None, True, 0.0, EPSILON)),
        (normalization.normalize_by_rows, (x + 20, gamma, beta, None, None, True, 0.0, EPSILON)),
        (normalization.gradients_by_rows, (g, x, gamma, None, None, *statistics, True, EPSILON, [True] * 3)),
        *((function, (one, indices, 50, -1, False)) for one in (rows, turned) for function in gradients),
    ]

    def nothing(*_: object) -> int:
        return 0

    known = [pair for one in operators.IMPLEMENTATIONS.values() for pair in one.items()]
    alternatives = {function for name, function in known if name != "pytorch"}
    assert alternatives <= {function for function, _ in calls}
    for function, arguments in calls:
        function(*arguments)
        arrays = [one for one in arguments if isinstance(one, torch.Tensor)]
        found: list[object] = []
        call = partial(function, *arguments)
        measured = measured_peak(lambda call=call, found=found: found.append(call()))
        results = sum(one.nbytes for one in (found[0] if isinstance(found[0], tuple) else found))
        row = TABLE.get(function.func if isinstance(function, partial) else function, Operator())
        said = results + (row.workspace or nothing)(arrays, results)
        block = 4 * 60 * 60  # PyTorch transposes a matrix block by block
        unseen = 8 * 5 * indices.numel()  # what sorting allocates
        assert measured - block <= said <= 1.1 * measured + unseen, function


# In graphs


def words() -> tuple[sg.TrainingGraph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    sg.set_seed(4)
    x, y, graph = sg.Tensor((16, 64), "int64"), sg.Tensor((16, 64, 32)), sg.Graph()
    rows = graph.node(sg.EmbeddingLayer.create(100, 32), x)
    graph.node(sg.FullyConnectedLayer.create(32, 32), rows)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=5.0))
    training.add_inputs({"x": x}, {"y": y})
    random = np.random.default_rng(0)
    return training, {"x": random.integers(0, 100, x.shape)}, {"y": random.random(y.shape, dtype=np.float32)}


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


GRAPHS = [
    (words, {"embedding_dense_backward": "index"}, {embedding.by_index}),
    (words, {"embedding_dense_backward": "scatter"}, {embedding.by_scatter}),
    (
        pictures,
        {"native_batch_norm": "rows", "native_batch_norm_backward": "rows"},
        {normalization.normalize_by_rows, normalization.gradients_by_rows},
    ),
]


@pytest.mark.parametrize(("build", "choice", "functions"), GRAPHS, ids=["index", "scatter", "rows"])
def test_graphs_use_what_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[], tuple[sg.TrainingGraph, dict[str, np.ndarray], dict[str, np.ndarray]]],
    choice: dict[str, str],
    functions: set[object],
) -> None:
    def pick(operator: str, implementations: dict[str, object], *_: object, **__: object) -> str:
        return choice.get(operator.split(".")[1], "pytorch")

    used: set[object] = set()
    choosing = trace.kernels.choose_kernels

    def noting(module: torch.fx.GraphModule, device: torch.device) -> None:
        choosing(module, device)
        used.update(node.target for node in module.graph.nodes)

    monkeypatch.setattr(operators, "fastest", pick)
    monkeypatch.setattr(trace.kernels, "choose_kernels", noting)
    (plain, *data), (chosen, *_) = build(), build()
    plain.compile(sg.Device.cpu(), OPTIONS.DETERMINISTIC)
    assert not used
    chosen.compile(sg.Device.cpu())
    assert functions <= used
    losses = [(one.execute(*data).loss, other.execute(*data).loss) for one, other in [(plain, chosen)] * 20]
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-4)
    assert losses[-1][0] < 0.9 * losses[0][0]


def test_what_is_averaged_by_frequency_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "fastest", lambda what, *_, **__: pytest.fail(what))
    x, y, graph = sg.Tensor((16, 64), "int64"), sg.Tensor((16, 64, 32)), sg.Graph()
    descriptor = sg.EmbeddingDescriptor(100, 32, scales_gradient_by_frequency=True)
    graph.node(sg.EmbeddingLayer(descriptor, sg.Tensor((100, 32), fill=1.0)), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
