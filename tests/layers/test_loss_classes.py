"""Cross entropies along any axis, with ignored labels, label weights and both means, against float64."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.layer import Scope
from stepgraph.layers.loss import LossDescriptor, LossLayer, LossType
from stepgraph.tensors.tensor import TensorDescriptor
from stepgraph.types import ReductionType

NONE, SUM, MEAN = ReductionType.NONE, ReductionType.SUM, ReductionType.MEAN
KINDS = {"softmax": LossLayer.softmax_cross_entropy, "categorical": LossLayer.categorical_cross_entropy}
SHAPES = {((5, 7, 4), -1), ((5, 4, 3, 2), 1), ((3, 2, 4, 5), -2), ((4, 6), 0)}
Array = torch.Tensor


def drawn(kind: str, shape: tuple[int, ...], axis: int, ignored: int | None) -> tuple[Array, Array]:
    """A prediction and class indices, a third of them ignored."""
    generator = torch.Generator().manual_seed(len(shape) + axis)
    y = torch.randn(shape, generator=generator, dtype=torch.float64)
    y = y.softmax(axis) if kind == "categorical" else y
    axis %= len(shape)
    without = shape[:axis] + shape[axis + 1 :]
    t = torch.randint(0, shape[axis], without, generator=generator)
    if ignored is not None:
        t = torch.where(torch.arange(t.numel()).view(without) % 3 == 0, ignored, t)
    return y, t


def weights(what: str, shape: tuple[int, ...], axis: int) -> Array | None:
    axis %= len(shape)
    shapes = {
        "one": (1,),
        "samples": shape[:1],
        "labels": shape[:axis] + shape[axis + 1 :],
        "elements": shape,
    }
    if what == "no":
        return None
    generator = torch.Generator().manual_seed(7)
    return torch.rand(shapes[what], generator=generator, dtype=torch.float64) + 0.5


def expected(kind: str, y: Array, t: Array, w: Array | None, what: str, d: LossDescriptor) -> Array:
    """The definition, with the classes last."""
    axis = d.axis % y.ndim
    last = y.movedim(axis, -1)
    counts = torch.ones_like(t, dtype=torch.bool) if d.ignored_label is None else t != d.ignored_label
    hot = F.one_hot(t.where(counts, 0), last.shape[-1]).double()
    soft = hot * (1 - d.label_smoothing) + d.label_smoothing / last.shape[-1]
    logarithms = last.log_softmax(-1) if kind == "softmax" else last.log()
    if w is None:
        each = torch.ones_like(hot)
    elif what == "elements":
        each = w.movedim(axis, -1).expand_as(hot)
    elif what == "samples":
        each = w.view(-1, *[1] * (y.ndim - 1)).expand_as(y).movedim(axis, -1)
    else:
        each = (w.unsqueeze(-1) if what == "labels" else w).expand_as(hot)
    target = hot if kind == "categorical" else soft
    losses = torch.where(counts, -(each * target * logarithms).sum(-1), 0.0)
    match d.reduction_type:
        case ReductionType.SUM:
            losses = losses.sum().reshape(1)
        case ReductionType.MEAN:
            by_weights = d.divides_by_weights and w is not None
            divisor = (hot * each).sum(-1)[counts].sum() if by_weights else counts.sum()
            losses = (losses.sum() / divisor).reshape(1) if counts.any() else losses.sum().reshape(1) * 0
    return losses * d.weight


@pytest.mark.parametrize(("shape", "axis"), sorted(SHAPES), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_equals_the_definition(kind: str, shape: tuple[int, ...], axis: int) -> None:
    smoothings = (0.0, 0.2) if kind == "softmax" else (0.0,)
    weighted = ("no", "one", "labels", "elements") if axis == 0 else ("no", "one", "samples", "labels", "elements")
    means = ((MEAN, False), (MEAN, True), (SUM, False), (NONE, False))
    for ignored, what, (how, by_weights), smoothing in product((None, -100, 1), weighted, means, smoothings):
        settings: dict[str, Any] = {"label_smoothing": smoothing, "divides_by_weights": by_weights, "weight": 0.7}
        layer = KINDS[kind](how, axis=axis, ignored_label=ignored, **settings)
        y, t = drawn(kind, shape, axis, ignored)
        w = weights(what, shape, axis)
        leaf, exact = y.float().requires_grad_(), y.clone().requires_grad_()
        sources = [one.float() for one in ([] if w is None else [w])]
        found = layer.forward(leaf, t, *sources, scope=Scope({}))
        wanted = expected(kind, exact, t, w, what, layer.descriptor)
        case = f"ignored {ignored}, weights of {what}, {how!s}, by weights: {by_weights}, smoothing {smoothing}"
        torch.testing.assert_close(found.double(), wanted, rtol=2e-6, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}")
        seed = torch.linspace(0.5, 1.5, wanted.numel(), dtype=torch.float64).view_as(wanted)
        slope = torch.autograd.grad(found, leaf, seed.float())[0].double()
        right = torch.autograd.grad(wanted, exact, seed)[0]
        torch.testing.assert_close(slope, right, rtol=2e-6, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}")


@pytest.mark.parametrize("how", [NONE, SUM, MEAN], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_words_equal_pytorch(ignored: int, smoothing: float, how: ReductionType) -> None:
    y, t = drawn("softmax", (5, 7, 4), -1, ignored)
    layer = LossLayer.softmax_cross_entropy(how, axis=-1, ignored_label=ignored, label_smoothing=smoothing)
    leaf, exact = y.float().requires_grad_(), y.clone().requires_grad_()
    found = layer.forward(leaf, t, scope=Scope({}))
    name = {NONE: "none", SUM: "sum", MEAN: "mean"}[how]
    wanted = F.cross_entropy(
        exact.reshape(-1, 4), t.reshape(-1), ignore_index=ignored, label_smoothing=smoothing, reduction=name
    )
    torch.testing.assert_close(found.double().reshape(wanted.shape), wanted, rtol=2e-6, atol=1e-6)
    slopes = torch.autograd.grad(found.sum(), leaf)[0].double(), torch.autograd.grad(wanted.sum(), exact)[0]
    torch.testing.assert_close(*slopes, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("classes", [3, 5])
def test_class_weights_are_those_of_pytorch(classes: int) -> None:
    """Weights of elements that only depend on the class, divided by, are PyTorch's `weight=`."""
    y, t = drawn("softmax", (6, classes), 1, -100)
    each = torch.arange(1.0, classes + 1)
    layer = LossLayer.softmax_cross_entropy(ignored_label=-100, divides_by_weights=True, label_smoothing=0.1)
    found = layer.forward(y.float(), t, each.expand(6, classes), scope=Scope({}))
    wanted = F.cross_entropy(y, t, weight=each.double(), label_smoothing=0.1)
    torch.testing.assert_close(found.double(), wanted.reshape(1), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("what", ["no", "samples", "elements"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_labels_that_count_has_loss_and_gradient_0(kind: str, what: str, smoothing: float) -> None:
    y, t = drawn(kind, (5, 7, 4), -1, -100)
    y[0, 0, 0] = 0  # its logarithm is infinite
    w = weights(what, (5, 7, 4), -1)
    for by_weights in (False, True):
        layer = KINDS[kind](axis=-1, ignored_label=-100, label_smoothing=smoothing, divides_by_weights=by_weights)
        leaf = y.float().requires_grad_()
        loss = layer.forward(leaf, torch.full_like(t, -100), *([] if w is None else [w.float()]), scope=Scope({}))
        assert loss.item() == 0
        assert not torch.autograd.grad(loss, leaf)[0].any()


@pytest.mark.parametrize("make", [LossLayer.mean_squared_error, LossLayer.hinge, LossLayer.cosine_distance])
def test_weights_that_are_all_0_give_loss_and_gradient_0(make: Any) -> None:
    leaf = torch.randn(4, 3, requires_grad=True)
    loss = make(divides_by_weights=True).forward(leaf, torch.ones(4, 3), torch.zeros(4), scope=Scope({}))
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, leaf)[0].any()


def test_weights_that_cancel_do_not_hide_the_division() -> None:
    loss = LossLayer.mean_squared_error(divides_by_weights=True)
    assert loss.forward(torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([1.0, -1.0]), scope=Scope({})).isinf()


@pytest.mark.parametrize(
    ("make", "formula"),
    [
        (LossLayer.mean_squared_error, lambda y, t: (y - t) ** 2),
        (LossLayer.mean_absolute_error, lambda y, t: (y - t).abs()),
        (LossLayer.huber, lambda y, t: F.huber_loss(y, t, reduction="none")),
        (LossLayer.hinge, lambda y, t: torch.relu(1 - (2 * t - 1) * y)),
        (LossLayer.sigmoid_cross_entropy, lambda y, t: F.binary_cross_entropy_with_logits(y, t, reduction="none")),
        (LossLayer.log, lambda y, t: -t * (y + 1e-7).log() - (1 - t) * (1 - y + 1e-7).log()),
    ],
)
def test_losses_of_elements_divide_by_weights(make: Any, formula: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    y, t = (torch.rand((4, 3), generator=generator, dtype=torch.float64) for _ in range(2))
    for w in (torch.rand(4, generator=generator), torch.rand((4, 3), generator=generator), torch.tensor([2.5])):
        found = make(divides_by_weights=True).forward(y, t, w.double(), scope=Scope({}))
        wide = (w if w.ndim == 2 else w.view(-1, 1)).double().expand(4, 3)
        torch.testing.assert_close(found, ((formula(y, t) * wide).sum() / wide.sum()).reshape(1))


def test_a_mean_of_float16_losses_does_not_overflow() -> None:
    y, t = torch.full((9000, 2), 20.0, dtype=torch.float16), torch.zeros(9000, dtype=torch.int64)
    y[:, 0] = 0
    loss = LossLayer.softmax_cross_entropy(ignored_label=-100).forward(y, t, scope=Scope({}))
    assert loss.dtype is torch.float16 and loss.item() == pytest.approx(20)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"axis": 1.0}, "axis is 1.0"),
        ({"axis": True}, "axis is True"),
        ({"ignored_label": "pad"}, "ignored_label is 'pad'"),
        ({"ignored_label": False}, "ignored_label is False"),
        ({"ignored_label": 2**63}, "ignored_label is 9223372036854775808"),
        ({"divides_by_weights": 1}, "divides_by_weights is 1"),
        ({"divides_by_weights": True, "reduction_type": SUM}, "divides_by_weights is for a mean"),
        ({"type": LossType.HUBER, "axis": -1}, "Huber has no classes, but axis is -1"),
        ({"type": LossType.HUBER, "ignored_label": 0}, "Huber has no classes"),
    ],
)
def test_refused_settings(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        LossDescriptor(**{"type": LossType.SOFTMAX_CROSS_ENTROPY, **settings})
    assert problem in str(caught.value)


WORDS, INDICES = TensorDescriptor((8, 20, 30)), TensorDescriptor((8, 20), "int64")


def test_another_axis_is_suggested() -> None:
    with pytest.raises(ShapeError, match=r"labels \[8, 20\] do not match the prediction \[8, 20, 30\]") as caught:
        LossLayer.softmax_cross_entropy().infer(WORDS, INDICES)
    assert "pass axis=-1 if the classes are dimension 2" in str(caught.value)


@pytest.mark.parametrize(("axis", "shape"), [(3, (8, 20, 30)), (-4, (8, 20, 30)), (-1, (8,)), (2, (8, 20))])
def test_an_axis_that_is_not_there(axis: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=f"the prediction has no dimension {axis} for the classes"):
        LossLayer.softmax_cross_entropy(axis=axis).infer(TensorDescriptor(shape), INDICES)


def test_ignored_labels_are_class_indices() -> None:
    with pytest.raises(ShapeError, match=r"ignored_label is -100, but labels .* are not class indices"):
        LossLayer.softmax_cross_entropy(axis=-1, ignored_label=-100).infer(WORDS, WORDS)


def test_weights_of_elements_do_not_divide_distances() -> None:
    with pytest.raises(ShapeError, match=r"label weights \[8, 20\] belong to elements"):
        LossLayer.cosine_distance(divides_by_weights=True).infer(*[TensorDescriptor((8, 20))] * 3)
