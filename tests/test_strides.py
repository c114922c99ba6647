"""Results lie in memory as the recording believes, also where PyTorch's account of an operator is wrong."""

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from stepgraph.compiler import fusion, phases, pipeline
from stepgraph.compiler.passes import corrections, hidden
from stepgraph.compiler.program import fake, same_order
from stepgraph.runtime.strides import laying_out

aten = torch.ops.aten
CPU = sg.Device.cpu()


@torch.library.custom_op("stepgraph_test::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    """Twice the images, with channels last in memory."""
    return (2 * x).contiguous(memory_format=torch.channels_last)


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)  # not where channels really lie


turned.register_autograd(lambda _, g: turned(g))


class Turned(sg.Layer):
    """An operator whose fake says something else about strides than its kernel does."""

    def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
        return turned(x)


def network(layer: sg.Layer, options: sg.GraphCompilationOptions) -> tuple[sg.TrainingGraph, sg.Tensor, sg.Tensor]:
    sg.set_seed(3)
    x, y = sg.Tensor((2, 3, 4, 5)), sg.Tensor((2, 60))
    graph = sg.Graph()
    hidden = graph.node(layer, graph.node(sg.ConvolutionLayer.create(3, 3, 1), x))
    graph.reshape((2, 60), hidden)  # a view, if channels lay first
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU, options)
    return training, x, y


@pytest.mark.parametrize("options", [sg.GraphCompilationOptions.NONE, sg.GraphCompilationOptions.DETERMINISTIC])
def test_what_lies_otherwise_than_recorded_is_put_in_order(
    options: sg.GraphCompilationOptions, caplog: pytest.LogCaptureFixture
) -> None:
    generator = np.random.default_rng(0)
    data = generator.standard_normal((5, 2, 120)).astype(np.float32)

    class Doubled(sg.Layer):
        def forward(self, x: torch.Tensor, *, scope: sg.Scope) -> torch.Tensor:
            return 2 * x

    found: dict[str, list[Any]] = {}
    with caplog.at_level(logging.DEBUG, "stepgraph"):
        for name, layer in (("turned", Turned()), ("plain", Doubled())):
            training, x, y = network(layer, options)
            losses = []
            for step, one in enumerate(data):
                images, labels = one[:, :60].reshape(2, 3, 4, 5), one[:, 60:]
                if step % 2:
                    training.bind_and_write_data({"x": images, "y": labels}, {"x": x, "y": y}, CPU)
                    losses.append(training.execute_forward().loss)
                    training.execute_gradient()
                    training.execute_optimizer_update()
                else:
                    losses.append(training.execute({"x": images}, {"y": labels}).loss)
            losses.append(training.profile({"x": images}, {"y": labels}).seconds > 0)
            losses.append(training.check_numerics({"x": images}, {"y": labels}).ok)
            found[name] = losses
    assert found["turned"] == pytest.approx(found["plain"], rel=1e-6)
    assert "copied into the recorded layout: Turned" in caplog.text


def test_strides_of_single_extents_mean_nothing() -> None:
    one = torch.empty(2, 1, 3)
    assert same_order(one, torch.empty_strided((2, 1, 3), (3, 77, 1)))
    assert not same_order(one, torch.empty_strided((2, 1, 3), (1, 3, 2)))


def test_code_hands_over_results_by_name() -> None:
    source = "def forward(self, x):\n    a = f(x);  x = None\n    b = g(a);  a = None\n    return [b]\n"
    both, last = laying_out(source), laying_out(source, ["b"])
    assert "a = f(x); a = _laid_out('a', a);  x = None" in both and "b = g(a); b = _laid_out('b', b);" in both
    assert "a = f(x);  x = None" in last and "_laid_out('b', b)" in last and "return [b]" in last


def recorded(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.fx.GraphModule:
    """The gradient of a function's sum, as operators."""

    def gradient(images: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(function(images).sum(), images)[0]

    return make_fx(gradient, tracing_mode="fake")(x)


@pytest.mark.parametrize("shape", [(2, 3, 1, 3), (2, 3, 5, 1), (2, 3, 4, 5)])
def test_normalization_is_right_for_a_gradient_in_another_order(shape: tuple[int, ...]) -> None:
    """Behind a transpose the gradient comes with other strides than the images; PyTorch's CPU kernel mixed them up."""
    numbers = np.random.default_rng(1).standard_normal((2, *shape)).astype(np.float32)
    x, y = sg.Tensor(shape), sg.Tensor((shape[0], shape[3], shape[2], shape[1]))
    graph = sg.Graph()
    layer = sg.BatchNormalizationLayer.create(shape[1])
    graph.transpose((0, 3, 2, 1), graph.node(layer, x))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=1.0))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    target = numbers[1].transpose(0, 3, 2, 1).copy()
    before = {name: tensor.data.copy() for name, tensor in layer.parameters.items()}
    training.execute({"x": numbers[0]}, {"y": target})
    gamma, beta = (torch.tensor(before[name], dtype=torch.float64, requires_grad=True) for name in ("gamma", "beta"))
    images = torch.tensor(numbers[0], dtype=torch.float64)
    epsilon = layer.variance_epsilon
    variance, mean = torch.var_mean(images, (0, 2, 3), correction=0, keepdim=True)
    scale, shift = (leaf.reshape(1, -1, 1, 1) for leaf in (gamma, beta))
    normal = (images - mean) / (variance + epsilon).sqrt() * scale + shift
    (normal.permute(0, 3, 2, 1) - torch.tensor(target, dtype=torch.float64)).square().mean().backward()
    for name, leaf in (("gamma", gamma), ("beta", beta)):
        learned = before[name] - layer.parameters[name].data
        np.testing.assert_allclose(learned, leaf.grad.reshape(learned.shape), rtol=1e-4, atol=1e-6)


def in_every_order(array: torch.Tensor) -> list[torch.Tensor]:
    """The same numbers, with the dimensions in every order in memory."""
    orders = [list(order) for order in itertools.permutations(range(array.ndim))]
    return [array.permute(order).contiguous().permute([*map(order.index, range(array.ndim))]) for order in orders]


@pytest.mark.parametrize("shape", [(1, 2, 5, 4), (3, 2, 1, 4), (1, 2, 1, 4), (3, 2, 5, 4), (1, 2, 4), (3, 2, 1)])
def test_normalization_is_right_in_every_order(shape: tuple[int, ...]) -> None:
    """Images that are transposed leave a dimension of size 1 with a stride that PyTorch's CPU kernel misreads."""
    generator = torch.Generator().manual_seed(0)
    g, x = (torch.randn(shape, generator=generator) for _ in range(2))
    channels = [torch.rand(shape[1], generator=generator) for _ in range(3)]
    some = [*in_every_order(g)[::7], g[..., :1].expand(shape)]
    for turned, other in itertools.product(some, in_every_order(x)):
        wanted = _normalization_gradients(turned.contiguous(), other.contiguous(), *channels)
        for found, right in zip(_normalization_gradients(turned, other, *channels), wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def _normalization_gradients(
    g: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The gradients of batch normalization, from arrays copied where the pass inserts copies."""
    settings = None, None, mean, deviation, True, 1e-5, [True] * 3
    return _corrected(aten.native_batch_norm_backward.default, [g, x, weights], *settings)


def _corrected(operator: Any, arrays: list[torch.Tensor], *settings: Any) -> tuple[torch.Tensor, ...]:
    """The operator, called with arrays copied where the pass inserts copies."""
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"array{i}") for i in range(len(arrays))]
    with FakeTensorMode():
        for node, array in zip(nodes, arrays, strict=True):
            node.meta["val"] = torch.empty_strided(array.shape, array.stride())
    call = graph.call_function(operator, (*nodes, *settings))
    corrections.correct(graph, torch.device("cpu"))
    values: dict[Any, Any] = dict(zip(nodes, arrays, strict=True))
    copies = [n for n in graph.nodes if n.target is aten.clone.default]
    values |= {n: values[n.args[0]].clone(memory_format=torch.contiguous_format) for n in copies}
    return operator(*(values.get(n, n) if isinstance(n, torch.fx.Node) else n for n in call.args))


ALL = [True, True, True]
SHAPES = (2, 6, 2, 1), (3, 4, 5, 4), (1, 4, 4, 5), (2, 1, 3, 4)
VOLUME = 2, 4, 3, 2, 2


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        *itertools.product(SHAPES, ([False, True, True], ALL)),
        (VOLUME, ALL),
        pytest.param(VOLUME, [False, True, True], marks=pytest.mark.deep),  # as the images above
    ],
)
def test_group_normalization_is_right_in_every_order(shape: tuple[int, ...], wanted: list[bool]) -> None:
    """PyTorch's CPU kernel reads the gradient with the images' strides; without a source gradient it even crashes."""
    generator = torch.Generator().manual_seed(0)
    g, x, weights = (torch.randn(size, generator=generator) for size in (shape, shape, shape[1:2]))
    sizes = shape[0], shape[1], math.prod(shape[2:]), min(2, shape[1])
    _, mean, deviation = torch.native_group_norm(x, weights, None, *sizes, 1e-5)
    exact = aten.native_group_norm_backward(*(a.double() for a in (g, x, mean, deviation, weights)), *sizes, [True] * 3)
    for turned, other in itertools.product(in_every_order(g)[::5], in_every_order(x)[::3]):
        arrays = [turned, other, mean, deviation, weights]
        found = _corrected(aten.native_group_norm_backward.default, arrays, *sizes, wanted)
        for got, right, asked in zip(found, exact, wanted, strict=True):
            if asked:
                torch.testing.assert_close(got, right.float(), rtol=1e-4, atol=1e-4)


def test_average_pools_with_padding_read_channels_first_on_cuda() -> None:
    """The pass alone: which graphs it changes. Whether the numbers are right then is a test for a GPU."""
    x = torch.randn(2, 3, 6, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    for padding, expected in ((1, 1), (0, 0)):
        module = recorded(lambda images, padding=padding: F.avg_pool2d(images, 3, 2, padding), x)
        corrections.correct(module.graph, torch.device("cuda"))
        clones = [node for node in module.graph.nodes if node.target is torch.ops.aten.clone.default]
        assert len(clones) == expected
        assert all(fake(node).is_contiguous() for node in clones)
        before = len(module.graph.nodes)
        corrections.correct(module.graph, torch.device("cpu"))
        assert len(module.graph.nodes) == before


ONE_CHANNEL = {
    "standard": ((2, 1, 6, 5), (3, 1, 3, 2), False, 1),
    "one pixel": ((2, 4, 1, 1), (3, 4, 1, 1), False, 1),
    "depthwise": ((2, 4, 6, 5), (4, 1, 3, 3), False, 4),
    "transposed": ((2, 1, 6, 5), (1, 3, 2, 2), True, 1),
}


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("case", ONE_CHANNEL)
def test_convolutions_that_may_lie_either_way_are_hidden_from_the_compiler(
    case: str, order: torch.memory_format
) -> None:
    """What takes their place gives the same numbers, with the strides that were recorded."""
    shape, weights, transposed, groups = ONE_CHANNEL[case]
    numbers = torch.Generator().manual_seed(3)
    images, kernel = (torch.randn(one, generator=numbers).contiguous(memory_format=order) for one in (shape, weights))
    biases = torch.randn(weights[1] if transposed else weights[0], generator=numbers)

    def function(*arrays: torch.Tensor) -> list[torch.Tensor]:
        leaves = [array.detach().requires_grad_() for array in arrays]
        found = aten.convolution(*leaves, [1, 1], [0, 0], [1, 1], transposed, [0, 0], groups)
        return [found, *torch.autograd.grad(found.square().sum(), leaves)]

    module = make_fx(function, tracing_mode="fake")(images, kernel, biases)
    expected = module(images, kernel, biases)
    (end,) = module.graph.find_nodes(op="output")
    recorded = [fake(node).stride() for node in end.args[0]]
    hidden.hide(module.graph)
    module.recompile()
    targets = [node.target for node in module.graph.nodes]
    assert aten.convolution.default not in targets and aten.convolution_backward.default not in targets
    found = module(images, kernel, biases)
    assert [one.stride() for one in found] == recorded
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_convolutions_with_one_reading_stay_as_they_are() -> None:
    module = recorded(lambda x: F.conv2d(x, x.new_ones(4, 3, 2, 2)), torch.randn(2, 3, 6, 5).requires_grad_())
    hidden.hide(module.graph)
    assert not any(str(node.target).startswith("stepgraph") for node in module.graph.nodes)
    assert any(node.target is aten.convolution_backward.default for node in module.graph.nodes)


def test_operators_hidden_from_the_compiler_are_described_as_they_are() -> None:
    operators, settings = torch.ops.stepgraph, ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    x, weights = torch.randn(2, 1, 4, 7), torch.randn(3, 1, 2, 2)
    gradient = torch.randn(2, 3, 3, 6)
    for order in ((54, 18, 6, 1), (54, 1, 18, 3)):
        check = torch.library.opcheck
        check(operators.convolution.default, (x, weights, None, *settings, list(order)))
    for which, order in ((0, (28, 28, 7, 1)), (1, (4, 1, 2, 1))):
        check(operators.convolution_backward.default, (gradient, x, weights, None, *settings, which, list(order)))


def test_what_is_fused_for_a_gpu_lies_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes for GPUs, compiled for the CPU: what the forward part hands on is read as it was recorded."""
    monkeypatch.setattr(fusion, "SETTINGS", {})
    x, y, graph = sg.Tensor((4, 1, 8, 6)), sg.Tensor((4, 3, 4, 3)), sg.Graph()
    hidden = graph.node(sg.ConvolutionLayer.create(1, 2, 3, strides=2), x)
    graph.node(sg.ConvolutionLayer.create(2, 3, 3), graph.node(sg.ActivationLayer.relu(), hidden))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=1.0))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(CPU)
    step = replace(training.compilation.step(4, True), channels_last=True, chooses_kernels=False)
    part = phases.split(pipeline.program(step)).forward
    fused = fusion.fuse(part, replace(step, device=torch.device("cuda"))).function
    given = (fake(node) for node in part.placeholders)
    arrays = [torch.rand(one.shape).to(one.dtype).as_strided(one.shape, one.stride()) for one in given]
    results = fused(*(array.clone() for array in arrays))
    assert any(one.ndim == 4 and not one.is_contiguous() for one in results)
    for found, expected, recorded in zip(results, part.module(*arrays), part.results.values(), strict=True):
        assert found.stride() == recorded.stride()
        torch.testing.assert_close(found, expected)


NARROW = [  # images, filters, stride, padding, transposed
    ((5, 2, 5, 1), (1, 2, 2, 3), 2, (1, 2), False),
    ((2, 16, 1, 1), (20, 16, 3, 3), 2, (1, 1), False),
    ((9, 1, 7, 1), (4, 1, 3, 1), 3, (0, 0), False),
    ((9, 1, 7, 2), (4, 1, 1, 1), 3, (0, 0), False),
    ((3, 4, 2, 1), (4, 3, 3, 3), 1, (1, 1), True),
    ((3, 4, 8, 8), (5, 4, 3, 3), 2, (1, 1), False),
]


UNWRITTEN = [  # images, filters, strides, padding, transposed
    ((8, 8, 6, 2), (8, 8, 3, 2), (1, 2), (1, 0), False),
    ((8, 8, 6, 4), (16, 8, 3, 3), (1, 3), (2, 0), False),
    ((8, 8, 3, 5, 3), (8, 8, 5, 3, 5), (2, 1, 3), (2, 1, 1), False),
    ((8, 8, 1, 6, 5), (8, 8, 3, 3, 3), (2, 1, 1), (1, 1, 1), False),
    ((4, 8, 3, 2, 6), (8, 8, 3, 5, 3), (1, 1, 1), (2, 0, 0), True),
    ((4, 8, 4, 1), (8, 8, 3, 3), (1, 3), (1, 0), True),
    ((4, 8, 9, 9), (8, 8, 3, 3), (2, 2), (1, 1), False),
]


@pytest.mark.parametrize(("images", "filters", "strides", "padding", "transposed"), UNWRITTEN)
def test_convolutions_write_their_whole_result(
    images: tuple[int, ...],
    filters: tuple[int, ...],
    strides: tuple[int, ...],
    padding: tuple[int, ...],
    transposed: bool,
) -> None:
    """In bfloat16, processors with AMX leave parts of it, and of the source's gradient, as they find them in memory."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator) for shape in (images, filters))
    zeros, ones = [0] * len(strides), [1] * len(strides)
    settings = ([*strides], [*padding], ones, transposed, zeros, 1)
    g = torch.randn(aten.convolution.default(x, w, None, *settings).shape, generator=generator)

    def both(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = aten.convolution_backward.default(g, x, w, None, *settings, [True, True, False])
        return aten.convolution.default(x, w, None, *settings), *found[:2]

    given = [one.bfloat16() for one in (g, x, w)]
    with FakeTensorMode():
        module = make_fx(both)(*(torch.empty(one.shape, dtype=one.dtype) for one in given))
    corrections.correct(module.graph, torch.device("cpu"))
    module.recompile()
    for _ in range(3):
        poison = [torch.full((size,), 1e36) for size in (64, 256, g.numel() // 2 + 1, g.numel()) for _ in range(4)]
        del poison
        for found, right in zip(module(*given), both(*(one.double() for one in given)), strict=True):
            torch.testing.assert_close(found.double(), right, rtol=0.02, atol=0.02 * right.abs().max().item())


@pytest.mark.parametrize(("images", "filters", "stride", "padding", "transposed"), NARROW)
def test_gradients_of_filters_that_read_only_padding_are_zero(
    images: tuple[int, ...], filters: tuple[int, ...], stride: int, padding: tuple[int, int], transposed: bool
) -> None:
    """In bfloat16, processors that multiply in it leave them as they find them in memory."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator) for shape in (images, filters))
    settings = ([stride] * 2, [*padding], [1, 1], transposed, [0, 0], 1)
    g = torch.randn(aten.convolution.default(x, w, None, *settings).shape, generator=generator)
    for order in (torch.contiguous_format, torch.channels_last):
        given = [one.bfloat16().contiguous(memory_format=order) for one in (g, x, w)]

        def gradients(*arrays: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return aten.convolution_backward.default(*arrays, None, *settings, [True, True, False])[:2]

        with FakeTensorMode():
            fakes = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype) for one in given]
            module = make_fx(gradients)(*fakes)
        corrections.correct(module.graph, torch.device("cpu"))
        module.recompile()
        poison = [torch.full((size,), torch.nan).bfloat16() for size in (64, 256, 1024, 4096) for _ in range(8)]
        del poison
        wanted = gradients(*(one.double() for one in given))
        for found, right in zip(module(*given), wanted, strict=True):
            torch.testing.assert_close(found.double(), right, rtol=0.02, atol=0.02 * right.abs().max().item() + 1e-3)
