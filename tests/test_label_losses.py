"""Cross entropies that read half-precision predictions without a float32 copy, compared with float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._inductor.fx_passes import pad_mm

import stepgraph as sg
from stepgraph.compiler import law, phases, pipeline
from stepgraph.compiler.kernels import emulated, half, label_losses
from stepgraph.compiler.program import PartName
from stepgraph.compiler.step import Fusion

HALF = [torch.bfloat16, torch.float16]
IGNORED = -100
MEAN, SUM, NONE = sg.ReductionType.MEAN, sg.ReductionType.SUM, sg.ReductionType.NONE
aten, ours = torch.ops.aten, torch.ops.stepgraph


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators compute in several blocks, and also what is too small for them."""
    monkeypatch.setattr(label_losses, "LARGE", 0)
    monkeypatch.setattr(label_losses, "BLOCK", 512)


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
    assert_gradient(label_losses.formula_of_gradient(y, t, g, numbers, IGNORED, smoothing), gradient, y)
    over = y.clone()
    assert label_losses.run_gradient_in_place(over, t, g, kept, IGNORED, smoothing) is over
    assert torch.equal(over, got)


@pytest.mark.deep
def test_the_operators_keep_the_rules_of_torch_library() -> None:
    y, t, g = drawn(6, 9, 2, torch.bfloat16)
    _, kept = label_losses.run(y, t, IGNORED, 0.1)
    torch.library.opcheck(ours.label_losses.default, (y.clone().requires_grad_(), t, IGNORED, 0.1))
    torch.library.opcheck(ours.label_losses_gradient.default, (y, t, g, kept, IGNORED, 0.1))
    torch.library.opcheck(ours.label_losses_gradient_.default, (y, t, g, kept, IGNORED, 0.1))


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


@ON_BOTH
def test_huge_predictions_and_gradients(device: str) -> None:
    y = torch.tensor([[1e4, -1e4, 1e4, 9984.0], [-1e4, 0.0, 1e4, 1e4]], device=device).bfloat16().unsqueeze(2)
    t, g = torch.tensor([[0], [3]], device=device), torch.tensor([[1.0], [1e6]], device=device)
    wanted, gradient = exact(y, t, g, 0.0)
    found, kept = label_losses.run(y, t, IGNORED, 0.0)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
    assert_gradient(label_losses.run_gradient(y, t, g, kept, IGNORED, 0.0), gradient, y)
    overflowing = label_losses.run_gradient(y.clamp(-6e4, 6e4).half(), t, g, kept, IGNORED, 0.0)
    assert overflowing[1].isinf().any() and overflowing[0].isfinite().all()  # the loss scale is too large


def network(
    shape: tuple[int, ...],
    axis: int,
    compute_type: str | None,
    *,
    weighted: bool = False,
    width: int = 16,
    **loss: Any,
) -> Any:
    """A product in front of a softmax cross entropy, and data for it. The classes end up along `axis`."""
    sg.set_seed(1)
    labels = shape[:axis] + shape[axis + 1 :]
    last = (*labels, shape[axis])
    x, y, w = sg.Tensor((*labels, width)), sg.Tensor(labels, "int64"), sg.Tensor(labels)
    graph = sg.Graph()
    logits = graph.node(sg.FullyConnectedLayer.create(width, shape[axis]), x)
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
    assert ours.label_losses.default in targets(ours_)
    assert ours.label_losses.default not in targets(exact_)
    for _ in range(3):
        assert ours_.execute(*data).loss == pytest.approx(exact_.execute(*data).loss, rel=1e-3)
    monkeypatch.setattr(label_losses, "LARGE", 8 * 5 * 30 + 1)
    small, *_ = network((8, 5, 30), 2, "bfloat16")
    assert ours.label_losses.default not in targets(small)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_law_holds_after_every_row(kind: str) -> None:
    training, *_ = network((8, 5, 30), 2, "bfloat16")
    assert training.compilation is not None
    program = training.compilation.programs.program(8)
    part = phases.whole(program, training.compilation.kept(program))
    before = part.results
    for row in pipeline.rows(pipeline.PART, program.step, PartName.STEP):
        part = row.run(part, program.step)
        law.check(part, before)
    assert label_losses.run_gradient_in_place in {node.target for node in part.nodes}
    step = replace(program.step, device=torch.device(kind), fusion=Fusion.FIRST)
    for row in pipeline.rows(pipeline.FUSED, step, None):
        row.run(part.module, step)
        law.check(part, before)
    assert ours.label_losses_gradient.default not in {node.target for node in part.nodes}


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


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [5003, 30522])
def test_fused_losses_of_classes_that_are_not_aligned(classes: int) -> None:
    plain, _, data = network((64, 128, classes), 2, "bfloat16", ignored_label=IGNORED, width=512)
    fused, *_ = network((64, 128, classes), 2, "bfloat16", ignored_label=IGNORED, width=512)
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
