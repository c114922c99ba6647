"""Where the channels of images lie: tried in both orders, chosen for the whole step, the same numbers either way."""

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import pipeline
from stepgraph.compiler.kernels import choose_convolution as convolution
from stepgraph.compiler.kernels import choose_operator as operators
from stepgraph.compiler.kernels import cross_entropy, measure
from stepgraph.compiler.passes import recompute
from stepgraph.compiler.passes.layout import FIRST, LAST

BATCH = 8
RNG = np.random.default_rng(4)
IMAGES, LABELS = RNG.standard_normal((BATCH, 3, 24, 24)).astype(np.float32), np.arange(BATCH) % 4


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What measuring is to find, by operator; PyTorch's own implementation where nothing is said."""
    wanted: dict[str, str] = {}

    def fastest(operator: str, implementations: Mapping[str, object], _: object, **__: object) -> str:
        name = operator.split(" ", maxsplit=1)[0] if operator.startswith("layout") else operator
        return wanted[name] if wanted.get(name) in implementations else next(iter(implementations))

    for module in (convolution, cross_entropy, operators, measure):
        monkeypatch.setattr(module, "fastest", fastest)
    monkeypatch.setattr(measure, "remembered", lambda *_: None)
    yield wanted


def network(
    options: sg.GraphCompilationOptions = sg.GraphCompilationOptions.NONE,
    pools: bool = True,
    memory_limit: int | None = None,
) -> sg.TrainingGraph:
    sg.set_seed(5)
    x, y = sg.Tensor.image(24, 24, 3, BATCH), sg.Tensor((BATCH,), "int64")
    graph = sg.Graph()
    hidden = graph.node(sg.ActivationLayer.relu(), graph.node(sg.ConvolutionLayer.create(3, 16, 3), x))
    hidden = graph.node(sg.PoolingLayer.max(2), hidden) if pools else hidden
    hidden = graph.node(sg.BatchNormalizationLayer.create(8), graph.node(sg.ConvolutionLayer.create(16, 8, 3), hidden))
    hidden = graph.node(sg.DropoutLayer(0.2), graph.reshape((BATCH, -1), hidden))
    graph.node(sg.FullyConnectedLayer.create(hidden.shape[1], 4), hidden)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(learning_rate=1e-3))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), options, memory_limit=memory_limit)
    return training


def losses(training: sg.TrainingGraph, rows: int = BATCH) -> list[float]:
    batch = {"x": IMAGES[:rows]}, {"y": LABELS[:rows]}
    return [training.execute(*batch, batch_size=rows).loss for _ in range(20)]


def every_pair() -> list[Any]:
    """Each implementation of either; the other pairs are left to the deep checks."""
    forward, data = ("pytorch", "gemm", "nnpack", "taps"), ("pytorch", "flipped", "native")
    quick = set(zip(forward, (*data, data[0]), strict=True))
    pairs = product(forward, data)
    return [pytest.param(*one, marks=[] if one in quick else [pytest.mark.deep]) for one in pairs]


@pytest.mark.parametrize(("forward", "data"), every_pair())
def test_channels_last_train_like_the_reference(chosen: dict[str, str], forward: str, data: str) -> None:
    chosen |= {"layout": LAST, "convolution, channels last": forward, "convolution data, channels last": data}
    chosen["convolution weights, channels last"] = "gemm"
    training = network()
    assert training.compilation.programs.channels_last
    np.testing.assert_allclose(losses(training), losses(network(sg.GraphCompilationOptions.DETERMINISTIC)), rtol=1e-4)
    assert "channels last in memory" in str(training)


def test_one_order_serves_all_batch_sizes(chosen: dict[str, str]) -> None:
    chosen["layout"] = LAST
    training, plain = network(), network(sg.GraphCompilationOptions.DETERMINISTIC)
    chosen["layout"] = FIRST
    np.testing.assert_allclose(losses(training, 5), losses(plain, 5), rtol=1e-4)
    assert training.compilation.programs.program(5).step.channels_last and training.memory_plan_for(16).total > 0


@pytest.mark.parametrize(
    "options", [sg.GraphCompilationOptions.DETERMINISTIC, sg.GraphCompilationOptions.NONE], ids=["fixed", "no pools"]
)
def test_where_there_is_nothing_to_gain_nothing_is_tried(
    chosen: dict[str, str], options: sg.GraphCompilationOptions
) -> None:
    chosen["layout"] = LAST
    assert (
        network(options, pools=options != sg.GraphCompilationOptions.NONE).compilation.programs.channels_last is False
    )


def test_a_known_order_is_not_tried_again(chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "remembered", lambda *_: FIRST)
    orders = []
    program = pipeline.program
    monkeypatch.setattr(pipeline, "program", lambda step: orders.append(step.channels_last) or program(step))
    network()
    assert orders == [False]


def test_both_orders_are_timed_on_the_same_work(chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}

    def fastest(_: str, implementations: Mapping[str, Callable], arguments: list[torch.Tensor], **__: object) -> str:
        generator = torch.Generator().manual_seed(0)
        arrays = [measure._filled(one, generator, 1) for one in arguments]
        before = [array.clone() for array in arrays]
        found.update({name: function(*arrays) for name, function in implementations.items()})
        assert all(map(torch.equal, arrays, before))  # what it is given stays
        return LAST

    monkeypatch.setattr(measure, "fastest", fastest)
    network()
    assert len(found[FIRST]) == len(found[LAST]) == 9  # the loss, and a gradient for each parameter
    for one, other in zip(found[FIRST], found[LAST], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_trying_keeps_to_a_memory_limit(chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen["layout"] = LAST
    plain = network()
    limit, fitted = int(0.95 * plain.memory_plan.total), []
    fit = recompute.fit
    monkeypatch.setattr(recompute, "fit", lambda step, part, most: fitted.append(most) or fit(step, part, most))
    limited = network(memory_limit=limit)
    assert fitted == [limit] * 3  # both orders, and the step itself
    assert limited.compilation.programs.channels_last and losses(limited) == losses(plain)


def test_the_pipeline_shows_the_layout_if_it_was_open(chosen: dict[str, str]) -> None:
    chosen["layout"] = LAST
    row = "choose the layout of images"
    found = {one.row.name: one.decision for one in network().pipeline.ran}
    assert found[row] == LAST and LAST in str(network().pipeline)
    fixed = network(sg.GraphCompilationOptions.DETERMINISTIC)
    assert {one.row.name: one.decision for one in fixed.pipeline.ran}[row] == ""


def test_small_images_do_not_wait_for_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "remembered", lambda *_: pytest.fail("the layout was looked up"))
    x = sg.Tensor.image(8, 8, 1, 2)
    graph = sg.Graph()
    graph.node(sg.PoolingLayer.max(2), graph.node(sg.ConvolutionLayer.create(1, 2, 3), x))
    inference = sg.InferenceGraph([graph])
    inference.compile(sg.Device.cpu())
    assert inference.compilation.programs.channels_last is False
