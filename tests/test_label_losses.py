"""Cross entropies that read half-precision predictions without a float32 copy, compared with float64."""

import copy
import re
from collections import defaultdict
from dataclasses import replace
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._inductor.fx_passes import pad_mm
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from stepgraph.compiler import memory, phases, pipeline, verifier
from stepgraph.compiler.kernels import emulated, half, label_losses
from stepgraph.compiler.modules import Module
from stepgraph.compiler.passes import held, in_place
from stepgraph.compiler.passes.loss_with_gradient import join_losses
from stepgraph.compiler.passes.pad_classes import pad_classes
from stepgraph.compiler.program import Part, PartName, Phase, call, fake, notes, operators
from stepgraph.compiler.step import Fusion
from stepgraph.system import torch_private

HALF = [torch.bfloat16, torch.float16]
IGNORED = -100
MEAN, SUM, NONE = sg.ReductionType.MEAN, sg.ReductionType.SUM, sg.ReductionType.NONE
aten, ours = torch.ops.aten, torch.ops.stepgraph


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators compute in several blocks, and also what is too small for them."""
    monkeypatch.setattr(label_losses, "LARGE", 0)
    monkeypatch.setattr(label_losses, "BLOCK", 512)


AT_ONCE = label_losses.formula_with_gradient, label_losses.run_with_gradient
ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def drawn(
    samples: int, classes: int, inner: int, dtype: torch.dtype, device: str = "cpu", order: tuple[int, ...] = (0, 1, 2)
) -> tuple[torch.Tensor, ...]:
    """Predictions whose dimensions lie in memory in this order, labels of which some are ignored, and gradients."""
    generator = torch.Generator().manual_seed(samples * 1000 + classes)
    y = (3 * torch.randn(samples, classes, inner, generator=generator)).to(dtype)
    back = tuple(order.index(axis) for axis in range(3))
    t = torch.randint(0, classes, (samples, inner), generator=generator)
    t[torch.rand(t.shape, generator=generator) < 0.3] = IGNORED
    g = torch.randn(samples, inner, generator=generator)
    return y.permute(order).contiguous().permute(back).to(device), t.to(device), g.to(device)


def exact(y: torch.Tensor, t: torch.Tensor, g: torch.Tensor, smoothing: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses and the gradient of the predictions, by PyTorch in float64."""
    wide = y.detach().double().requires_grad_()
    losses = F.cross_entropy(wide, t, reduction="none", ignore_index=IGNORED, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(losses, wide, g.double())
    return losses.detach(), gradient


def assert_gradient(found: torch.Tensor, wanted: torch.Tensor, like: torch.Tensor) -> None:
    """Within one rounding to half precision; float16 has no exponents below 2⁻²⁴."""
    assert (found.dtype, found.shape) == (like.dtype, like.shape)
    torch.testing.assert_close(found.double(), wanted, rtol=torch.finfo(like.dtype).eps, atol=1e-6)


@ON_BOTH
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("samples", "classes", "inner", "order"),
    [
        (1, 1, 1, (0, 1, 2)),
        (5, 1, 3, (0, 1, 2)),
        (13, 101, 1, (0, 1, 2)),
        (13, 101, 1, (1, 0, 2)),
        (3, 7, 35, (0, 1, 2)),
        (3, 7, 35, (0, 2, 1)),
        (2, 37, 19, (2, 1, 0)),
        (9, 5003, 1, (0, 1, 2)),
        (0, 5, 1, (0, 1, 2)),
    ],
)
def test_losses_and_gradients_are_those_in_float64(
    samples: int,
    classes: int,
    inner: int,
    order: tuple[int, ...],
    smoothing: float,
    dtype: torch.dtype,
    device: str,
) -> None:
    y, t, g = drawn(samples, classes, inner, dtype, device, order)
    wanted, gradient = exact(y, t, g, smoothing)
    leaf = y.clone().requires_grad_()
    found, kept = label_losses.label_losses(leaf, t, IGNORED, smoothing)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    (got,) = torch.autograd.grad(found, leaf, g)
    assert_gradient(got, gradient, y)
    assert got.stride() == torch.empty_like(y).stride()
    plain, numbers = label_losses.formula(y, t, IGNORED, smoothing) if samples else (found, kept)
    torch.testing.assert_close(plain, found.detach(), rtol=1e-5, atol=1e-5)
    assert_gradient(label_losses.formula_of_gradient(y, t, g, numbers.unbind(), IGNORED, smoothing), gradient, y)
    over = y.clone()
    assert label_losses.run_gradient_in_place(over, t, g, kept, IGNORED, smoothing) is over
    assert torch.equal(over, got)
    for run in AT_ONCE if samples else AT_ONCE[1:]:
        both, values = run(y, t, g, IGNORED, smoothing)
        torch.testing.assert_close(values.double(), wanted, rtol=1e-5, atol=1e-5)
        assert_gradient(both, gradient, y)
    over = y.clone()
    assert label_losses.run_with_gradient_in_place(over, t, g, IGNORED, smoothing)[0] is over
    assert torch.equal(over, both)


@ON_BOTH
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("classes", "width"), [(7, 64), (1000, 1024), (8192, 8256), (20000, 20032), (40000, 40032), (70000, 70016)]
)
def test_padding_has_no_part_in_losses_and_gradients(classes: int, width: int, smoothing: float, device: str) -> None:
    y, t, g = drawn(5, classes, 1, torch.bfloat16, device)
    g = g[:1].expand(5, 1)  # as in a mean: one number for all rows
    wanted, gradient = exact(y, t, g, smoothing)
    padded = torch.cat([y, torch.full((5, width - classes, 1), torch.nan, dtype=y.dtype, device=device)], 1)
    for run in (
        label_losses.formula_with_gradient,
        label_losses.run_with_gradient,
        label_losses.run_with_gradient_in_place,
    ):
        found, losses = run(padded, t, g, IGNORED, smoothing, classes)
        torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-5)
        assert_gradient(found[:, :classes], gradient, y)
        assert (found[:, classes:] == 0).all()
    assert found is padded


@pytest.mark.deep
def test_the_operators_keep_the_rules_of_torch_library() -> None:
    y, t, g = drawn(6, 9, 2, torch.bfloat16)
    _, kept = label_losses.run(y, t, IGNORED, 0.1)
    torch.library.opcheck(ours.label_losses.default, (y.clone().requires_grad_(), t, IGNORED, 0.1))
    torch.library.opcheck(ours.label_losses_gradient.default, (y, t, g, kept, IGNORED, 0.1))
    torch.library.opcheck(ours.label_losses_gradient_.default, (y, t, g, kept, IGNORED, 0.1))
    t = t.clamp(max=6)
    torch.library.opcheck(ours.label_losses_with_gradient.default, (y, t, g, IGNORED, 0.1, 7))
    torch.library.opcheck(ours.label_losses_with_gradient_.default, (y, t, g, IGNORED, 0.1, 7))


@ON_BOTH
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("classes", [9, 5000])
def test_masked_and_broken_predictions_are_as_in_pytorch(dtype: torch.dtype, classes: int, device: str) -> None:
    y, t, g = drawn(8, classes, 1, dtype, device)
    t = t.clamp(min=0)
    y[0, (t[0] + 1) % classes] = -torch.inf
    y[1, t[1, 0]] = -torch.inf
    y[2, 3] = torch.nan
    y[3, 3] = torch.inf
    y[4] = -torch.inf
    y[5, :-1] = -torch.inf  # the first blocks of a row are masked
    t[5] = classes - 1
    y[6] = torch.nan
    found, kept = label_losses.run(y, t, IGNORED, 0.0)
    leaf = y.float().requires_grad_()
    wanted = F.cross_entropy(leaf, t, reduction="none")
    torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
    (gradient,) = torch.autograd.grad(wanted, leaf, g)
    got = label_losses.run_gradient(y, t, g, kept, IGNORED, 0.0)
    torch.testing.assert_close(got, gradient.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)
    for run in AT_ONCE:
        both, values = run(y, t, g, IGNORED, 0.0)
        torch.testing.assert_close(values, wanted.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(both, gradient.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6, equal_nan=True)


@ON_BOTH
@pytest.mark.parametrize("classes", [9, 20000])
def test_predictions_far_below_zero(classes: int, device: str) -> None:
    """`exp` of their distance to 0 would overflow."""
    y, t, g = drawn(4, classes, 1, torch.bfloat16, device)
    y = y - 300
    wanted, gradient = exact(y, t, g, 0.0)
    losses, kept = label_losses.run(y, t, IGNORED, 0.0)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-5)
    assert_gradient(label_losses.run_gradient(y, t, g, kept, IGNORED, 0.0), gradient, y)
    for run in AT_ONCE:
        both, losses = run(y, t, g, IGNORED, 0.0)
        torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-5)
        assert_gradient(both, gradient, y)


@ON_BOTH
def test_huge_predictions_and_gradients(device: str) -> None:
    y = torch.tensor([[1e4, -1e4, 1e4, 9984.0], [-1e4, 0.0, 1e4, 1e4]], device=device).bfloat16().unsqueeze(2)
    t, g = torch.tensor([[0], [3]], device=device), torch.tensor([[1.0], [1e6]], device=device)
    wanted, gradient = exact(y, t, g, 0.0)
    found, kept = label_losses.run(y, t, IGNORED, 0.0)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    assert_gradient(label_losses.run_gradient(y, t, g, kept, IGNORED, 0.0), gradient, y)
    for run in AT_ONCE:
        both, values = run(y, t, g, IGNORED, 0.0)
        torch.testing.assert_close(values.double(), wanted, rtol=1e-6, atol=1e-6)
        assert_gradient(both, gradient, y)
    overflowing = label_losses.run_gradient(y.clamp(-6e4, 6e4).half(), t, g, kept, IGNORED, 0.0)
    assert overflowing[1].isinf().any() and overflowing[0].isfinite().all()  # the loss scale is too large


def network(
    shape: tuple[int, ...],
    axis: int,
    compute_type: str | None,
    *,
    weighted: bool = False,
    width: int = 16,
    hidden: bool = False,
    **loss: Any,
) -> Any:
    """A product, or two, in front of a softmax cross entropy, and data for it. The classes end up along `axis`."""
    sg.set_seed(1)
    labels = shape[:axis] + shape[axis + 1 :]
    last = (*labels, shape[axis])
    x, y, w = sg.Tensor((*labels, width)), sg.Tensor(labels, "int64"), sg.Tensor(labels)
    graph = sg.Graph()
    source = graph.node(sg.FullyConnectedLayer.create(width, width), x) if hidden else x
    logits = graph.node(sg.FullyConnectedLayer.create(width, shape[axis]), source)
    order = list(range(len(last) - 1))
    order.insert(axis, len(last) - 1)
    if order != sorted(order):
        logits = graph.node(sg.TransposeLayer(order), logits)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(axis=axis, **loss), sg.SGDOptimizer(0.5))
    training.add_inputs({"x": x}, {"y": y}, *[{"w": w}] * weighted)
    training.compile("cpu", compute_type=compute_type)
    random = np.random.default_rng(0)
    classes = random.integers(0, shape[axis], labels)
    if loss.get("ignored_label") is not None:
        classes[random.random(labels) < 0.4] = loss["ignored_label"]
    data = [{"x": random.standard_normal((*labels, width)).astype(np.float32)}, {"y": classes}]
    weights = [{"w": random.random(labels).astype(np.float32)}] if weighted else []
    return training, logits, (*data, *weights)


def targets(training: sg.TrainingGraph) -> set[Any]:
    """The operators of a whole step."""
    parts = training.session.compilation.programs.settled(PartName.STEP, training.session.feeds.batch)[1]
    return {node.target for node in parts[PartName.STEP].module.graph.nodes}


def reduced(logits: torch.Tensor, labels: np.ndarray, weights: np.ndarray | None, axis: int, **loss: Any) -> Any:
    """The loss in float64, written with logarithms and one-hot labels."""
    t, ignored, s = torch.from_numpy(labels), loss.get("ignored_label"), loss.get("label_smoothing", 0.0)
    counts = torch.ones(t.shape) if ignored is None else (t != ignored).double()
    hot = F.one_hot(t * (counts > 0), logits.shape[axis]) * (1 - s) + s / logits.shape[axis]
    each = -(hot * logits.double().log_softmax(axis).movedim(axis, -1)).sum(-1) * counts
    w = torch.ones(t.shape).double() if weights is None else torch.from_numpy(weights).double()
    each = each * w
    match loss.get("reduction_type", MEAN):
        case sg.ReductionType.NONE:
            return each
        case sg.ReductionType.SUM:
            return each.sum()
    return each.sum() / ((w * counts).sum() if loss.get("divides_by_weights") else counts.sum())


@pytest.mark.parametrize(
    ("kind", "shape", "axis", "weighted", "loss"),
    [
        ("bfloat16", (12, 9), 1, False, {}),
        ("float16", (12, 9), 1, True, {"divides_by_weights": True}),
        ("bfloat16", (4, 3, 9), 2, False, {"ignored_label": IGNORED, "label_smoothing": 0.1}),
        ("bfloat16", (4, 3, 9), 2, True, {"ignored_label": IGNORED}),
        ("float16", (4, 9, 3, 2), 1, False, {"reduction_type": SUM, "label_smoothing": 0.1}),
        ("bfloat16", (4, 9, 3, 2), 1, True, {"reduction_type": NONE, "ignored_label": 2}),
        ("bfloat16", (4, 3, 9, 2), 2, True, {"divides_by_weights": True, "ignored_label": IGNORED}),
        ("float16", (4, 3, 9, 2), 2, False, {"reduction_type": NONE}),
    ],
    ids=str,
)
def test_every_variant_in_a_graph(
    kind: str, shape: tuple[int, ...], axis: int, weighted: bool, loss: dict[str, Any]
) -> None:
    training, logits, data = network(shape, axis, kind, weighted=weighted, **loss)
    assert {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}.isdisjoint(targets(training))
    if kind == "float16":
        training.loss_scale = 8.0  # what overflows is not compared
    training.bind({**data[0], **data[1], **(data[2] if weighted else {})})
    found = training.execute_forward().loss
    leaf = logits.torch().double().requires_grad_()
    wanted = reduced(leaf, data[1]["y"], data[2]["w"] if weighted else None, axis, **loss)
    np.testing.assert_allclose(found, wanted.detach().numpy(), rtol=1e-5, atol=1e-5)
    training.execute_gradient()
    (handle,) = training.source_gradient_tensors(training.layers[-1])[:1]
    (gradient,) = torch.autograd.grad(wanted.sum(), leaf)
    rounding = torch.finfo(getattr(torch, kind)).eps
    torch.testing.assert_close(handle.torch().double(), gradient, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_training_in_half_precision_follows_float32(kind: str) -> None:
    rounded, _, data = network((8, 5, 300), 2, kind, ignored_label=IGNORED)
    full, *_ = network((8, 5, 300), 2, None, ignored_label=IGNORED)
    if kind == "float16":
        rounded.loss_scale = 8.0  # no update is skipped
    for _ in range(6):
        assert rounded.execute(*data).loss == pytest.approx(full.execute(*data).loss, rel=0.02)


def test_small_and_deterministic_losses_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    ours_, _, data = network((8, 5, 30), 2, "bfloat16", label_smoothing=0.1)
    exact_, *_ = network((8, 5, 30), 2, "bfloat16", label_smoothing=0.1)
    exact_.compile("cpu", compute_type="bfloat16", deterministic=True)
    assert label_losses.run_with_gradient_in_place in targets(ours_)
    assert aten.nll_loss_forward.default in targets(exact_)
    for _ in range(3):
        assert ours_.execute(*data).loss == pytest.approx(exact_.execute(*data).loss, rel=1e-3)
    monkeypatch.setattr(label_losses, "LARGE", 8 * 5 * 30 + 1)
    small, *_ = network((8, 5, 30), 2, "bfloat16")
    assert aten.nll_loss_forward.default in targets(small)


def settled(training: sg.TrainingGraph, name: PartName = PartName.STEP) -> Part:
    """The whole step after the passes for a part of this name; it is valid after each."""
    assert training.compilation is not None
    program = training.compilation.programs.program(training.session.feeds.batch or 8)
    part = phases.whole(program, training.compilation.kept(program))
    before = part.results
    for row in pipeline.rows(pipeline.PART, program.step, name):
        part = row.run(part, program.step)
        verifier.check(part, before)
    return part


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_law_holds_after_every_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_losses, "stays_one", lambda y: True)
    training, *_ = network((8, 5, 30), 2, "bfloat16")
    part = settled(training)
    before = part.results
    assert label_losses.run_with_gradient_in_place in {node.target for node in part.nodes}
    assert training.compilation is not None
    step = replace(training.compilation.programs.program(8).step, device=torch.device(kind), fusion=Fusion.FIRST)
    for row in pipeline.rows(pipeline.FUSED, step, None):
        row.run(part.module, step)
        verifier.check(part, before)
    assert ours.label_losses_with_gradient.default not in {node.target for node in part.nodes}


# Losses together with their gradients


@pytest.mark.parametrize(
    ("reduction", "weighted"),
    [(MEAN, True), *(pytest.param(*one, marks=pytest.mark.deep) for one in ((SUM, False), (NONE, True)))],
)
def test_a_step_computes_the_same_as_its_phases(reduction: sg.ReductionType, weighted: bool) -> None:
    given: dict[str, Any] = {"weighted": weighted, "reduction_type": reduction, "ignored_label": IGNORED}
    whole, _, data = network((6, 4, 21), 2, "float16", **given)
    apart, *_ = network((6, 4, 21), 2, "float16", **given)
    operators = targets(whole)
    assert label_losses.run_with_gradient_in_place in operators
    assert operators.isdisjoint({ours.label_losses.default, label_losses.run_gradient_in_place})
    for _ in range(3):
        found = whole.execute(*data).loss
        apart.bind({name: array for one in data for name, array in one.items()})
        np.testing.assert_array_equal(apart.execute_forward().loss, found)
        apart.execute_gradient()
        apart.execute_optimizer_update()
    for mine, theirs in zip(whole.layers, apart.layers, strict=True):
        for name, tensor in mine.parameters.items():
            np.testing.assert_array_equal(tensor.numpy(), theirs.parameters[name].numpy())


def test_losses_wait_for_the_gradient_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads the losses is then part of it, and the plan counts the predictions once."""
    monkeypatch.setattr(held, "hold", lambda part: part)  # results are counted one by one
    training, *_ = network((6, 4, 210), 2, "bfloat16")
    joint, apart = settled(training), settled(training, PartName.TRIAL)
    (node,) = (node for node in joint.nodes if node.target is label_losses.run_with_gradient_in_place)
    assert notes(node).phase is Phase.GRADIENT
    assert notes(joint.returned[0]).phase is Phase.GRADIENT
    assert label_losses.run_gradient_in_place in {node.target for node in apart.nodes}
    assert memory.peak(joint) <= memory.peak(apart)


def test_gradients_that_depend_on_losses_stay_apart() -> None:
    """As do those that come from somewhere else than the losses, and losses with two of them."""

    def square(part: Part) -> None:
        (gradient,) = part.module.graph.find_nodes(op="call_function", target=ours.label_losses_gradient.default)
        kept = gradient.args[3]
        with gradient.graph.inserting_before(gradient):
            losses = call(gradient, getitem, (kept.args[0], 0))
            gradient.update_arg(2, call(gradient, aten.mul.Tensor, (gradient.args[2], losses)))

    def differ(part: Part) -> None:
        (gradient,) = part.module.graph.find_nodes(op="call_function", target=ours.label_losses_gradient.default)
        gradient.update_arg(5, 0.1)

    training, *_ = network((6, 4, 21), 2, "bfloat16")
    assert training.compilation is not None
    program = training.compilation.programs.program(6)
    for change in (square, differ):
        part = phases.whole(program, training.compilation.kept(program))
        change(part)
        joined = join_losses(part)
        verifier.check(joined, part.results)
        assert ours.label_losses_with_gradient.default not in {node.target for node in joined.nodes}


def _apart(y: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    _, kept = ours.label_losses(y, t, IGNORED, 0.0)
    return (ours.label_losses_gradient(y, t, g, kept, IGNORED, 0.0),)


def _joint(y: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ours.label_losses_with_gradient(y, t, g, IGNORED, 0.0)


def _twice(y: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return *_joint(y, t, g), *_joint(y, t, 2 * g)


@pytest.mark.parametrize("function", [_apart, _joint, _twice])
@pytest.mark.parametrize("source", ["passed in", "read later", "computed"])
def test_gradients_overwrite_only_what_nothing_needs(
    function: Any, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(label_losses, "stays_one", lambda y: True)

    def run(y: torch.Tensor, t: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if source == "passed in":
            return function(y.view(5, 9, 1), t, g)
        doubled = 2 * y
        found = function(doubled.view(5, 9, 1), t, g)
        return found if source == "computed" else (*found, doubled.sin())

    given = drawn(5, 9, 1, torch.bfloat16)
    module = make_fx(run, tracing_mode="fake")(*given)
    label_losses.expand(module.graph)
    module.recompile()
    copies = len(module.graph.find_nodes(op="call_function", target=aten.clone.default))
    calls = 2 if function is _twice else 1
    assert copies == (calls - 1 if source == "computed" else calls)
    before = given[0].clone()
    for found, wanted in zip(module(*given), run(*given), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(given[0], before)


# Padded classes


def padded(part: Part) -> dict[Any, list[fx.Node]]:
    """The operators of a part whose classes were padded, by what they compute."""
    graph = Module(part.module, copy.deepcopy(part.module.graph))
    in_place.out_of_place(graph.graph)
    pad_classes(graph.graph)
    found: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in operators(graph.graph):
        found[node.target].append(node)
    return found


def test_products_and_losses_use_one_padded_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_losses, "stays_one", lambda y: True)
    monkeypatch.setattr(half, "applies", lambda node: False)
    monkeypatch.setattr(emulated, "fails", lambda kind: False)
    training, *_ = network((6, 4, 301), 2, "bfloat16", hidden=True)
    found = padded(settled(training))
    (both,) = found[ours.label_losses_with_gradient.default]
    assert both.args[-1] == 301
    assert fake(both)[0].shape == (24, 320, 1)
    predictions, *_ = (node for node in found[aten.addmm.default] if 320 in fake(node).shape)
    assert fake(predictions).shape == (24, 320)
    shapes = {tuple(fake(one).shape) for node in found[aten.mm.default] for one in node.all_input_nodes}
    assert {(24, 320), (320, 16), (320, 24)} <= shapes
    assert not any(301 in shape for shape in shapes)
    (total,) = (node for node in found[aten.sum.dim_IntList] if 320 in fake(node).shape)
    assert fake(total).shape == (1, 320)


@pytest.mark.parametrize(("classes", "axis"), [(320, 2), (304, 2), (301, 1)])
def test_what_is_aligned_or_no_product_is_not_padded(classes: int, axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_losses, "stays_one", lambda y: True)
    monkeypatch.setattr(half, "applies", lambda node: False)
    monkeypatch.setattr(emulated, "fails", lambda kind: False)
    shape = (6, 4, classes) if axis == 2 else (6, classes, 4)
    training, *_ = network(shape, axis, "bfloat16")
    assert aten.constant_pad_nd.default not in padded(settled(training))


def test_soft_labels_are_compared_in_float32() -> None:
    x, y = sg.Tensor((4, 16)), sg.Tensor((4, 9))
    graph = sg.Graph()
    graph.node(sg.FullyConnectedLayer.create(16, 9), x)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", compute_type="bfloat16")
    assert ours.label_losses.default not in targets(training)
    assert np.isfinite(training.execute({"x": np.ones((4, 16), "f")}, {"y": np.full((4, 9), 1 / 9, "f")}).loss)


def test_an_index_out_of_range_changes_nothing() -> None:
    training, _, (x, y) = network((8, 9), 1, "bfloat16")
    before = [t.numpy().copy() for layer in training.layers for t in layer.parameters.values()]
    y["y"][3] = 9
    with pytest.raises(sg.DataError, match="row 3 holds the class index 9, but Loss takes 0 to 8"):
        training.execute(x, y)
    after = [t.numpy() for layer in training.layers for t in layer.parameters.values()]
    assert all(map(np.array_equal, before, after))


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where a CPU has no bfloat16
def test_fused_steps_compute_the_same() -> None:
    plain, _, data = network((8, 5, 300), 2, "bfloat16", ignored_label=IGNORED)
    fused, *_ = network((8, 5, 300), 2, "bfloat16", ignored_label=IGNORED)
    fused.compile("cpu", fuse=True, compute_type="bfloat16")
    for _ in range(3):
        assert fused.execute(*data).loss == pytest.approx(plain.execute(*data).loss, rel=1e-2)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_the_gradient_is_written_to_predictions_that_the_compiler_has_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs it pads products whose rows are not aligned; the predictions are then a view with other strides."""
    monkeypatch.setattr(label_losses, "stays_one", lambda y: True)
    monkeypatch.setattr(half, "applies", lambda node: False)  # the product itself has to be in half precision
    monkeypatch.setattr(emulated, "fails", lambda kind: False)
    padded = []
    for name in ("should_pad", "_should_pad"):
        monkeypatch.setattr(pad_mm, name, lambda *given, **more: padded.append(given) or True)
    monkeypatch.setattr(pad_mm, "get_alignment_size", lambda array: 8)
    plain, _, data = network((65, 301), 1, "bfloat16", ignored_label=IGNORED, width=30)
    fused, *_ = network((65, 301), 1, "bfloat16", ignored_label=IGNORED, width=30)
    fused.compile("cpu", fuse=True, compute_type="bfloat16")
    assert padded
    for _ in range(3):
        assert fused.execute(*data).loss == pytest.approx(plain.execute(*data).loss, rel=1e-3)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_fused_steps_have_one_array_of_padded_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_losses, "stays_one", lambda y: True)
    monkeypatch.setattr(half, "applies", lambda node: False)
    monkeypatch.setattr(emulated, "fails", lambda kind: False)
    rows = (replace(row, applies=lambda *_: True) if row.name == "pad classes" else row for row in pipeline.TABLE)
    monkeypatch.setattr(pipeline, "TABLE", tuple(rows))
    codes, generated = [], torch_private.generated_module

    def note_code(one: Any) -> Any:
        module = generated(one)
        codes.append(Path(str(module.__file__)).read_text())
        return module

    monkeypatch.setattr(torch_private, "generated_module", note_code)
    given: dict[str, Any] = {"ignored_label": IGNORED, "width": 32, "hidden": True}
    plain, logits, data = network((13, 5, 301), 2, "bfloat16", **given)
    fused, predictions, _ = network((13, 5, 301), 2, "bfloat16", **given)
    fused.compile("cpu", fuse=True, compute_type="bfloat16")
    for _ in range(3):
        assert fused.execute(*data).loss == pytest.approx(plain.execute(*data).loss, rel=1e-3)
    np.testing.assert_allclose(predictions.numpy(), logits.numpy(), rtol=0.05, atol=0.05)
    allocated = re.findall(r"empty_strided_cpu\(\((65, \d{3}|13, 5, \d{3}).*torch\.(\w+)\)", codes[-1])
    assert sorted(allocated) == [("13, 5, 301", "float32"), ("65, 320", "bfloat16")]


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [5003, 30522])
def test_fused_losses_of_classes_that_are_not_aligned(classes: int) -> None:
    given: dict[str, Any] = {"ignored_label": IGNORED, "width": 512, "hidden": True}
    plain, _, data = network((64, 128, classes), 2, "bfloat16", **given)
    fused, *_ = network((64, 128, classes), 2, "bfloat16", **given)
    plain.compile("cuda", compute_type="bfloat16", fuse=False)
    fused.compile("cuda", compute_type="bfloat16", fuse=True)
    for _ in range(4):
        assert fused.execute(*data).loss == pytest.approx(plain.execute(*data).loss, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("classes", [10, 5000, 5003])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_on_cuda(classes: int, fuse: bool, kind: str) -> None:
    rounded, _, data = network((32, 64, classes), 2, kind, ignored_label=IGNORED, label_smoothing=0.1)
    full, *_ = network((32, 64, classes), 2, None, ignored_label=IGNORED, label_smoothing=0.1)
    rounded.compile("cuda", compute_type=kind, fuse=fuse)
    if kind == "float16":
        rounded.loss_scale = 8.0
    for _ in range(6):
        assert rounded.execute(*data).loss == pytest.approx(full.execute(*data).loss, rel=0.02)
