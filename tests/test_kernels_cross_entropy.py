"""Softmax, cross entropy and its gradient in one: PyTorch's numbers, in the graph where it is chosen."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import pipeline
from stepgraph.compiler.kernels import cross_entropy
from stepgraph.compiler.passes import simplification

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2
OPTIONS = sg.GraphCompilationOptions
LOG_SOFTMAX_BACKWARD = aten._log_softmax_backward_data.default


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To 1e-6 of the largest number."""
    assert found.shape == wanted.shape and found.dtype is wanted.dtype
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("shape", [(40, 7), (40, 300), (3, 5, 4, 6)], ids=str)
@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM], ids=["none", "mean", "sum"])
@pytest.mark.parametrize("name", cross_entropy.IMPLEMENTATIONS)
def test_implementations_equal_pytorch(name: str, reduction: int, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(shape, generator=generator) + 3
    labels = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
    g = torch.randn(labels.shape if reduction == NONE else (), generator=generator)
    weights = torch.rand(shape[1], generator=generator) + 0.5
    some = torch.where(torch.arange(labels.numel()).view_as(labels) % 3 == 0, -100, labels)
    for t, left_out in ((labels, cross_entropy.NO_LABEL), (labels, -100), (some, -100), (labels, 2)):
        for factors in (None, weights):
            found = cross_entropy.IMPLEMENTATIONS[name](x, g, t, factors, reduction, left_out)
            wanted = cross_entropy._pytorch(x.double(), g.double(), t, _double(factors), reduction, left_out)
            for one, other in zip(found, wanted, strict=True):
                close(one, other.float())


def _double(array: torch.Tensor | None) -> torch.Tensor | None:
    return None if array is None else array.double()


@pytest.mark.parametrize("name", cross_entropy.IMPLEMENTATIONS)
def test_extreme_logits_give_what_pytorch_gives(name: str) -> None:
    x = torch.tensor([[300.0, -300.0, 0.0], [1e4, 0.0, 1e4], [-torch.inf, 1.0, 2.0], [5.0, 5.0, 5.0]])
    for labels in ([0, 0, 1, 2], [1, 1, 2, 0]):
        arguments = x, torch.tensor(1.0), torch.tensor(labels), None, SUM, cross_entropy.NO_LABEL
        found = cross_entropy.IMPLEMENTATIONS[name](*arguments)
        for one, other in zip(found, cross_entropy._pytorch(*arguments), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_a_left_out_label_may_have_an_impossible_class_behind_it() -> None:
    x = torch.tensor([[-torch.inf, 1.0], [1.0, 2.0]])  # class 0 stands in for what is left out
    arguments = x, torch.tensor(1.0), torch.tensor([-100, 1]), None, MEAN, -100
    for one, other in zip(cross_entropy._by_gradient(*arguments), cross_entropy._pytorch(*arguments), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", cross_entropy.IMPLEMENTATIONS)
def test_a_label_that_is_no_class_raises(name: str) -> None:
    x, g = torch.zeros(2, 3), torch.tensor(1.0)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy.IMPLEMENTATIONS[name](x, g, torch.tensor([0, 3]), None, MEAN, cross_entropy.NO_LABEL)


Built = tuple[sg.TrainingGraph, dict[str, np.ndarray], tuple[dict[str, np.ndarray], ...]]
CLASSES, BATCH = 80, 256


def build(
    options: OPTIONS = OPTIONS.NONE, *, reduction: str = "MEAN", smoothing: float = 0.0, weighted: bool = False
) -> Built:
    sg.set_seed(3)
    x, y, w = sg.Tensor((BATCH, 12)), sg.Tensor((BATCH,), "int64"), sg.Tensor((BATCH,))
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(12, CLASSES), x)
    loss = sg.LossLayer.softmax_cross_entropy(sg.ReductionType[reduction], label_smoothing=smoothing)
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(learning_rate=0.5 if reduction == "MEAN" else 1e-3))
    training.add_inputs({"x": x}, {"y": y}, *[{"w": w}] * weighted)
    training.compile(sg.Device.cpu(), options)
    random = np.random.default_rng(0)
    data = {"x": random.standard_normal((BATCH, 12)).astype(np.float32)}
    labels = {"y": random.integers(0, CLASSES, BATCH)}
    return training, data, (labels, *[{"w": random.random(BATCH).astype(np.float32)}] * weighted)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[set[object]]]:
    """Lets an implementation be chosen; the list gets the operators of each graph that is traced."""

    def choosing(name: str) -> list[set[object]]:
        monkeypatch.setattr(cross_entropy, "fastest", lambda _, known, *__, **___: name if name in known else "pytorch")
        return found

    found: list[set[object]] = []
    chosen = pipeline.kernels.choose_kernels

    def noting(module: torch.fx.GraphModule, *given: object) -> None:
        chosen(module, *given)
        found.append({node.target for node in module.graph.nodes})

    monkeypatch.setattr(pipeline.kernels, "choose_kernels", noting)
    return choosing


GONE = {aten.nll_loss_backward.default, LOG_SOFTMAX_BACKWARD}  # what the implementation replaces


@pytest.mark.parametrize("weighted", [False, True], ids=["", "label weights"])
@pytest.mark.parametrize("reduction", ["MEAN", "SUM"])
def test_graphs_train_alike_with_it(traced: Callable[[str], list[set[object]]], reduction: str, weighted: bool) -> None:
    operators = traced("gradient")
    settings = {"reduction": reduction, "weighted": weighted}
    (plain, data, labels), (chosen, *_) = build(OPTIONS.DETERMINISTIC, **settings), build(**settings)
    assert len(operators) == 1 and not operators[0] & GONE
    assert "cross entropy: gradient" in str(chosen)
    for _ in range(20):
        assert chosen.execute(data, *labels).loss == pytest.approx(plain.execute(data, *labels).loss, rel=1e-6)


def build_words(options: OPTIONS = OPTIONS.NONE, *, weighted: bool = False) -> Built:
    """Class indices of every step, some ignored, as they come."""
    sg.set_seed(3)
    rows, steps = 32, 8
    x, y, w = sg.Tensor((rows, steps, 12)), sg.Tensor((rows, steps), "int64"), sg.Tensor((rows, steps))
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(12, CLASSES), x)
    loss = sg.LossLayer.softmax_cross_entropy(axis=-1, ignored_label=-100, divides_by_weights=weighted)
    training = sg.TrainingGraph([graph], loss, sg.SGDOptimizer(learning_rate=0.5))
    training.add_inputs({"x": x}, {"y": y}, *[{"w": w}] * weighted)
    training.compile(sg.Device.cpu(), options)
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, (rows, steps))
    labels[random.random((rows, steps)) < 0.3] = -100
    data = {"x": random.standard_normal((rows, steps, 12)).astype(np.float32)}
    return training, data, ({"y": labels}, *[{"w": random.random((rows, steps)).astype(np.float32)}] * weighted)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "label weights"])
def test_ignored_labels_of_steps_train_alike_with_it(
    traced: Callable[[str], list[set[object]]], weighted: bool
) -> None:
    operators = traced("gradient")
    plain, data, labels = build_words(OPTIONS.DETERMINISTIC, weighted=weighted)
    chosen, *_ = build_words(weighted=weighted)
    assert not operators[0] & GONE
    assert not operators[0] & {aten.clone.default, aten.permute.default}, "the prediction is moved"
    for _ in range(10):
        assert chosen.execute(data, *labels).loss == pytest.approx(plain.execute(data, *labels).loss, rel=1e-6)
    nothing = ({"y": np.full((32, 8), -100)}, *labels[1:])
    assert chosen.execute(data, *nothing).loss == 0
    assert np.isfinite(chosen.execute(data, *labels).loss)


def tensors(training: sg.TrainingGraph) -> dict[str, sg.Tensor]:
    return {**training.inputs, **training.loss_labels}


def test_phases_and_gradients_are_those_of_the_whole(traced: Callable[[str], list[set[object]]]) -> None:
    traced("gradient")
    (whole, data, labels), (parts, *_) = build(), build()
    for _ in range(3):
        loss = whole.execute(data, *labels).loss
        parts.bind_and_write_data({**data, **labels[0]}, tensors(parts), sg.Device.cpu())
        assert parts.execute_forward().loss == loss
        parts.execute_gradient()
        parts.execute_optimizer_update()


def test_smoothed_labels_are_left_to_pytorch(traced: Callable[[str], list[set[object]]]) -> None:
    """Half of their gradient is not that of a label."""
    operators = traced("gradient")
    training, data, labels = build(smoothing=0.1)
    assert LOG_SOFTMAX_BACKWARD in operators[0] and np.isfinite(training.execute(data, *labels).loss)


def test_who_else_reads_the_logarithms_still_can() -> None:
    def function(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        logarithms = torch.log_softmax(x, 1)
        loss = torch.nn.functional.nll_loss(logarithms, labels)
        return logarithms.detach(), loss.detach(), torch.autograd.grad(loss, x)[0]

    given = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)), torch.arange(64)
    module = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*given)
    simplification.simplify(module)
    (node,) = (one for one in module.graph.nodes if one.target is LOG_SOFTMAX_BACKWARD)
    found = cross_entropy._match(node)
    assert found is not None
    cross_entropy._replace_gradient(found)
    module.recompile()
    for one, other in zip(module(*given), function(*given), strict=True):
        torch.testing.assert_close(one, other)


def test_it_needs_less_memory(traced: Callable[[str], list[set[object]]]) -> None:
    traced("pytorch")
    before = build()[0].memory_plan.intermediates
    traced("gradient")
    assert build()[0].memory_plan.intermediates < before - BATCH * CLASSES * 3
