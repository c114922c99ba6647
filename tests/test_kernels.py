"""Chosen kernels: every implementation gives PyTorch's numbers, the choice is remembered, and it can be turned off."""

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.kernels import channels_first, channels_last, emulated, half, measure
from stepgraph.compiler.kernels import choose_convolution as conv
from stepgraph.compiler.kernels import choose_operator as operators
from stepgraph.compiler.kernels.alternatives import CONVOLUTION_WEIGHTS
from stepgraph.compiler.kernels.choices import CHOICES, Choices
from stepgraph.compiler.tuned import MANIFEST, products_by_onednn, sums_by_convolution
from stepgraph.compiler.tuned.row import on_cpu
from stepgraph.system import torch_private

aten, ours = torch.ops.aten, torch.ops.stepgraph

SHAPES = [  # batch, channels, size, outputs, kernel, stride, padding
    (4, 3, 9, 5, 3, 1, 1),
    (2, 1, 8, 4, 5, 1, 2),
    (3, 4, 7, 6, 3, 2, 1),
    (2, 4, 6, 3, 1, 1, 0),
    (2, 3, 10, 4, 4, 3, 0),
]


def arrays(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], list[int]]:
    n, channels, size, outputs, kernel, stride, padding = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, channels, size, size, generator=generator)
    w = torch.randn(outputs, channels, kernel, kernel, generator=generator)
    b = torch.randn(outputs, generator=generator)
    return x, w, b, [stride] * 2, [padding] * 2


def close(found: torch.Tensor, wanted: torch.Tensor, order: torch.memory_format = torch.contiguous_format) -> None:
    assert found.shape == wanted.shape and found.is_contiguous(memory_format=order)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


LAYOUTS = {"first": (channels_first, torch.contiguous_format), "last": (channels_last, torch.channels_last)}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_implementations_equal_pytorch(layout: str, shape: tuple[int, ...]) -> None:
    x, w, b, stride, padding = arrays(shape)
    wanted = torch.nn.functional.conv2d(x, w, b, stride, padding)
    kernels, order = LAYOUTS[layout]
    x, w = (one.contiguous(memory_format=order) for one in (x, w))
    for function in conv.forward_implementations(kernels, x).values():
        close(function(x, w, b, stride, padding), wanted, order)
        close(function(x, w, None, stride, padding), wanted - b[:, None, None], order)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_implementations_equal_pytorch(layout: str, shape: tuple[int, ...]) -> None:
    x, w, _, stride, padding = arrays(shape)
    x.requires_grad_()
    w.requires_grad_()
    y = torch.nn.functional.conv2d(x, w, None, stride, padding)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    of_x, of_w = torch.autograd.grad(y, (x, w), g)
    kernels, order = LAYOUTS[layout]
    with torch.no_grad():
        g, x, w = (one.contiguous(memory_format=order) for one in (g, x, w))
        for function in conv.data_implementations(kernels, x, w, stride, padding).values():
            close(function(g, list(x.shape), w, stride, padding), of_x, order)
        for function in conv.weights_implementations(kernels, x).values():
            close(function(g, x, w, stride, padding), of_w, order)


STATISTICS = torch.tensor([[0.5, 2.0], [1.0, -1.0], [0.1, -0.2], [0.3, 0.4]])  # γ, β, means, inverse deviations


def network(options: sg.GraphCompilationOptions = sg.GraphCompilationOptions.NONE) -> sg.TrainingGraph:
    sg.set_seed(2)
    x, y = sg.Tensor.image(12, 12, 3, 8), sg.Tensor((8,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.ActivationLayer.relu(), graph.node(sg.ConvolutionLayer.create(3, 8, 3), x))
    hidden = graph.node(sg.ConvolutionLayer.create(8, 8, 3, strides=2), hidden)
    graph.node(sg.FullyConnectedLayer.create(8 * 36, 4), graph.reshape((8, -1), hidden))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.05))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), options)
    return training


DATA = (
    {"x": np.random.default_rng(0).standard_normal((8, 3, 12, 12)).astype(np.float32)},
    {"y": np.arange(8) % 4},
)


@pytest.mark.parametrize("kernel", ["gemm", "pytorch"])
@pytest.mark.parametrize("data", ["native", "flipped", "pytorch"])
def test_every_choice_trains_like_the_reference(monkeypatch: pytest.MonkeyPatch, data: str, kernel: str) -> None:
    plain = network(sg.GraphCompilationOptions.DETERMINISTIC)
    wanted = {"convolution": "gemm", "convolution data": data, "convolution weights": kernel}
    monkeypatch.setattr(conv, "fastest", lambda what, known, _: wanted[what] if wanted[what] in known else "pytorch")
    chosen = network()
    for _ in range(20):
        assert chosen.execute(*DATA).loss == pytest.approx(plain.execute(*DATA).loss, rel=1e-4)


def test_deterministic_keeps_pytorchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(conv, "fastest", lambda what, *_: asked.append(what) or "pytorch")
    network(sg.GraphCompilationOptions.DETERMINISTIC)
    assert not asked
    network()
    assert asked


def test_a_wrong_implementation_is_never_chosen() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not this shape")

    implementations = {"right": lambda x: x + 1, "wrong": torch.zeros_like, "broken": broken}
    assert measure.measure(implementations, (torch.empty(2, 3),)).chosen == "right"


@pytest.mark.parametrize(("seconds", "gain", "chosen"), [(0.8, 0.9, "b"), (0.95, 0.9, "a"), (1.03, 1.05, "b")])
def test_another_implementation_is_chosen_by_its_gain(
    monkeypatch: pytest.MonkeyPatch, seconds: float, gain: float, chosen: str
) -> None:
    times = {"a": 1.0, "b": seconds}
    monkeypatch.setattr(measure, "_timed", lambda name, *_: (torch.ones(1), measure.Run(times[name], 0.0)))
    assert measure.measure({name: name for name in times}, (), gain=gain).chosen == chosen


def test_the_choice_is_remembered_in_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(Choices, "file", tmp_path / "stepgraph" / "kernels.jsonl")
    measured, found = [], measure.Measurement("pytorch", {"pytorch": 1.0}, {"pytorch": 0.0}, disturbed=False)
    monkeypatch.setattr(measure, "measure", lambda *_: measured.append(1) or found)
    for _ in range(2):
        CHOICES.forget()
        network()
    CHOICES.forget()
    stored = CHOICES.stored()
    assert len(stored) == len(measured) > 0 and {one.chosen for one in stored} == {"pytorch"}


@pytest.mark.parametrize("content", ["", "not json", "[1, 2]"])
def test_a_damaged_cache_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory, content: str
) -> None:
    file = tmp_path / "kernels.json"
    file.write_text(content)
    monkeypatch.setattr(Choices, "file", file)
    CHOICES.forget()
    assert np.isfinite(network().execute(*DATA).loss)
    CHOICES.forget()
    assert CHOICES.stored()


def test_other_implementations_of_single_operators_equal_pytorch() -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = (3 * torch.randn(40, 50, generator=generator) for _ in range(2))
    normalized = g.view(4, 2, 5, 50), x.view(4, 2, 5, 50), STATISTICS[0], None, None, *STATISTICS[2:]
    steps, small = x.view(5, 10, 40), 0.1 * g.view(-1)
    of_lstm, of_gru = ((small[: n * 400].view(n * 10, 40), small[-n * 100 :].view(n * 10, 10)) for n in (4, 3))
    initial = steps[0, :, :10].contiguous()
    *_, gates, cells = ours.lstm.default(steps, *of_lstm, None, None, None, None, False)
    of_gates = (steps[..., :30].contiguous(), of_gru[1], None, initial, False, False)
    arguments = {
        aten.mm.default: (x.t(), g),
        ours.lstm.default: (steps, *of_lstm, small[:40], initial, None, None, True),
        ours.lstm_gradient.default: (gates, cells, of_lstm[1], None, steps[..., :10], initial, None, False),
        ours.gru.default: of_gates,
        ours.gru_gradient.default: (steps[..., 10:20], *ours.gru.default(*of_gates), of_gru[1], initial, False, False),
        aten.addmm.default: (g[0, :40], x, g.t()),
        aten.max_pool2d_with_indices.default: (x.view(2, 4, 10, 25), [3, 3], [2, 2], [1, 1]),
        aten.native_batch_norm.default: (x.view(4, 2, 5, 50), *STATISTICS[:2], None, None, True, 0.0, 1e-3),
        aten.native_batch_norm_backward.default: (*normalized, True, 1e-3, [True] * 3),
        torch_private.log_softmax.default: (x.view(40, 5, 10), 2, False),
        torch_private.softmax.default: (x.view(200, 10), 1, False),
    }
    offered = [one for row in MANIFEST for one in row.offers if one.operation != CONVOLUTION_WEIGHTS]
    for one in (*operators.ALTERNATIVES, *offered):
        given = arguments[one.operation]
        assert one.fits(given)
        wanted, found = one.operation(*given), one.function(*given)
        for a, b in zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]:
            close(a.float(), b.float())


@pytest.mark.parametrize("index", [-1, 0], ids=["other", "pytorch"])
def test_other_operators_train_like_the_reference(monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    asked: list[str] = []

    def pick(operator: str, implementations: dict[str, object], _: object, **rules: object) -> str:
        asked.append(operator)
        return list(implementations)[index]

    def losses(options: sg.GraphCompilationOptions) -> list[float]:
        sg.set_seed(4)
        x, y, graph = sg.Tensor((64, 2, 16, 16)), sg.Tensor((64,), "int64"), sg.Graph()
        hidden = graph.node(sg.BatchNormalizationLayer.create(2), graph.node(sg.BatchNormalizationLayer.create(2), x))
        hidden = graph.node(sg.PoolingLayer.max(2), hidden)
        hidden = graph.node(sg.FullyConnectedLayer.create(128, 256), graph.reshape((64, -1), hidden))
        graph.node(sg.FullyConnectedLayer.create(256, 4), graph.node(sg.ActivationLayer.tanh(), hidden))
        training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-3))
        training.add_inputs({"x": x}, {"y": y})
        training.compile(sg.Device.cpu(), options)
        data = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
        return [training.execute({"x": data}, {"y": np.arange(64) % 4}).loss for _ in range(20)]

    monkeypatch.setattr(operators, "fastest", pick)
    for row in (sums_by_convolution.ROW, products_by_onednn.ROW):
        monkeypatch.setattr(row, "condition", on_cpu)  # on other processors too
    plain, chosen = (losses(one) for one in (sg.GraphCompilationOptions.DETERMINISTIC, sg.GraphCompilationOptions.NONE))
    np.testing.assert_allclose(chosen, plain, rtol=1e-4)
    expected = {"max_pool2d_with_indices", "native_batch_norm", "native_batch_norm_backward", "addmm"}
    expected |= {"mm"} if torch_private.onednn_linear else set()
    assert {name.split(".")[1] for name in asked} == expected


@pytest.mark.parametrize("kind", half.HALF, ids=str)
def test_half_precision_by_way_of_float32_is_rounded_once(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(kind)

    settings = ([2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    x, w, g = drawn(2, 3, 9, 9), drawn(4, 3, 3, 3), drawn(2, 4, 5, 5)
    arguments = {
        "mm": (drawn(5, 40), drawn(40, 6)),
        "addmm": (drawn(6), drawn(5, 40), drawn(40, 6)),
        "bmm": (drawn(2, 5, 40), drawn(2, 40, 6)),
        "baddbmm": (drawn(2, 5, 6), drawn(2, 5, 40), drawn(2, 40, 6)),
        "convolution": (x, w, drawn(4), *settings),
        "convolution_backward": (g, x, w, [4], *settings, [True, True, False]),
    }
    for operator, function in half.IMPLEMENTATIONS.items():
        given = arguments[operator.overloadpacket.__name__]
        exact = operator(*(one.double() if isinstance(one, torch.Tensor) else one for one in given))
        found = function(*given)
        for one, other in zip(found, exact, strict=True) if isinstance(exact, tuple) else [(found, exact)]:
            assert (one is None) == (other is None)
            if one is not None:
                assert one.dtype is kind
                torch.testing.assert_close(one, other.to(kind), rtol=torch.finfo(kind).eps, atol=1e-5)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_trains_alike_by_either_way(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(emulated, "fails", lambda kind: False)  # where PyTorch's own products fail, there is no choice

    def losses(name: str) -> tuple[list[float], int]:
        monkeypatch.setattr(half, "fastest", lambda operator, known, _: asked.append(operator) or name)
        sg.set_seed(2)
        x, y, graph = sg.Tensor.image(12, 12, 3, 8), sg.Tensor((8,), "int64"), sg.Graph()
        hidden = graph.node(sg.ActivationLayer.relu(), graph.node(sg.ConvolutionLayer.create(3, 8, 3), x))
        graph.node(sg.FullyConnectedLayer.create(8 * 144, 4), graph.reshape((8, -1), hidden))
        training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(learning_rate=0.05))
        training.add_inputs({"x": x}, {"y": y})
        training.compile(sg.Device.cpu(), compute_type=kind)
        return [training.execute(*DATA).loss for _ in range(10)], training.memory_plan.workspace

    asked: list[str] = []
    (own, _), (other, workspace) = losses("pytorch"), losses("float32")
    assert {"aten.convolution.default", "aten.convolution_backward.default", "aten.addmm.default"} <= set(asked)
    assert other == pytest.approx(own, rel=20 * torch.finfo(getattr(torch, kind)).eps) and other[-1] < other[0]
    assert workspace > 0  # what is computed twice as wide is counted


def test_float32_does_not_go_by_way_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half, "choose", lambda node: pytest.fail(f"{node} is not in half precision"))
    assert np.isfinite(network().execute(*DATA).loss)


def test_half_precision_may_differ_by_its_own_steps_only() -> None:
    right = torch.tensor([1.0, 0.5], dtype=torch.float16)
    assert measure._agree(right * (1 + 2**-10), right, 1e-4) and not measure._agree(right * 1.02, right, 1e-4)
    assert measure._agree((None, right), (None, right), 1e-4) and not measure._agree((right,), (None,), 1e-4)
