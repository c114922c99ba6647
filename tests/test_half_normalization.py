"""Normalization in mixed precision reads and writes half precision, and computes in float32."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler import phases, pipeline
from stepgraph.compiler.kernels import batch_norm, layer_norm
from stepgraph.compiler.passes import half_normalization
from stepgraph.compiler.program import PartName, fake
from stepgraph.compiler.verifier import check
from stepgraph.graphs.training import TrainingGraph

aten, ours = torch.ops.aten, torch.ops.stepgraph
GENERATOR = np.random.default_rng(3)
ROWS = GENERATOR.standard_normal((6, 4, 12)).astype(np.float32)
IMAGES = GENERATOR.standard_normal((6, 2, 8, 8)).astype(np.float32)
OPTIONS = sg.GraphCompilationOptions.DETERMINISTIC


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also on the CPU, where the kernels are the operators that they stand for."""
    monkeypatch.setattr(half_normalization, "DEVICES", {"cpu", "cuda"})
    yield


def rows_network(**settings: Any) -> TrainingGraph:
    sg.set_seed(1)
    x, y, graph = sg.Tensor((6, 4, 12)), sg.Tensor((6, 4, 12)), sg.Graph()
    hidden = graph.node(sg.LayerNormalizationLayer.create((12,)), graph.node(sg.FullyConnectedLayer.create(12, 12), x))
    hidden = graph.node(sg.LayerNormalizationLayer((4, 12)), graph.node(sg.FullyConnectedLayer.create(12, 12), hidden))
    graph.node(sg.FullyConnectedLayer.create(12, 12), hidden)
    return trained(graph, x, y, **settings)


def images_network(**settings: Any) -> TrainingGraph:
    sg.set_seed(1)
    x, y, graph = sg.Tensor((6, 2, 8, 8)), sg.Tensor((6, 2, 8, 8)), sg.Graph()
    hidden = graph.node(sg.ConvolutionLayer.create(2, 4, 3), x)
    hidden = graph.node(sg.BatchNormalizationLayer.create(4), hidden)
    graph.node(sg.ConvolutionLayer.create(4, 2, 3), hidden)
    return trained(graph, x, y, **settings)


def trained(graph: sg.Graph, x: sg.Tensor, y: sg.Tensor, device: str = "cpu", kind: str = "bfloat16") -> TrainingGraph:
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(0.01))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(device, OPTIONS, compute_type=kind)
    return training


def losses(training: TrainingGraph, data: np.ndarray, count: int = 4) -> list[float]:
    return [training.execute({"x": data}, {"y": data}).loss for _ in range(count)]


def targets(training: TrainingGraph) -> list[Any]:
    return [node.target for node in training.compilation.programs.program(6).nodes]


def wide(training: TrainingGraph, shape: tuple[int, ...]) -> int:
    """How many arrays of a shape are converted to float32."""
    nodes = training.compilation.programs.program(6).nodes
    found = [fake(node) for node in nodes if node.target is aten._to_copy.default]
    return sum(one.dtype is torch.float32 and tuple(one.shape) == shape for one in found)


@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("float16", marks=pytest.mark.deep)])
def test_layer_normalization_keeps_every_bit_without_wide_copies(kind: str, everywhere: None) -> None:
    with pytest.MonkeyPatch.context() as before:
        before.setattr(half_normalization, "DEVICES", set[str]())
        plain = rows_network(kind=kind)
        assert aten.native_layer_norm.default in targets(plain)
    half = rows_network(kind=kind)
    assert targets(half).count(ours.layer_norm.default) == targets(half).count(ours.layer_norm_gradient.default) == 2
    # Those that remain: the results of all five layers, and what the loss reads.
    assert wide(half, (6, 4, 12)) == wide(plain, (6, 4, 12)) - 4
    assert losses(half, ROWS) == losses(plain, ROWS)


def test_phases_and_the_law(everywhere: None) -> None:
    whole, parts = rows_network(), rows_network()
    for _ in range(3):
        loss = whole.execute({"x": ROWS}, {"y": ROWS}).loss
        parts.bind_and_write_data({"x": ROWS, "y": ROWS}, {**parts.inputs, **parts.loss_labels}, sg.Device.cpu())
        assert parts.execute_forward().loss == loss
        parts.execute_gradient()
        parts.execute_optimizer_update()
    for training in (whole, images_network()):
        step = training.compilation.programs.program(6).step
        part = phases.whole(pipeline.program(step), training.compilation.kept())
        check(part)
        check(pipeline.settled(part, step, PartName.STEP), part.results)
        on_gpu = replace(step, device=torch.device("cuda"), fusion=pipeline.Fusion.FIRST)
        for row in pipeline.rows(pipeline.FUSED, on_gpu, PartName.STEP):
            row.run(part.module, on_gpu)
        assert not {ours.layer_norm.default, ours.layer_norm_gradient.default} & {node.target for node in part.nodes}


def test_batch_normalization_reads_half_precision(everywhere: None) -> None:
    with pytest.MonkeyPatch.context() as before:
        before.setattr(half_normalization, "DEVICES", set[str]())
        plain = images_network()
    half = images_network()
    assert wide(half, (6, 4, 8, 8)) == wide(plain, (6, 4, 8, 8)) - 2
    np.testing.assert_allclose(losses(half, IMAGES), losses(plain, IMAGES), rtol=1e-3)


@pytest.mark.parametrize("affine", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("shape", [(64, 5), (8, 3, 50), (8, 5, 6, 7), (2, 3, 4, 5, 6)])
def test_statistics_of_a_batch_from_sums_agree_with_float64(shape: tuple[int, ...], affine: tuple[bool, bool]) -> None:
    generator = torch.Generator().manual_seed(0)
    channels, axes = shape[1], [axis for axis in range(len(shape)) if axis != 1]
    scale, offset = (torch.rand(1, channels, *[1] * (len(shape) - 2), generator=generator) for _ in range(2))
    x = (3 * scale * torch.randn(shape, generator=generator) + 50 * offset).bfloat16()  # means larger than deviations
    gamma, beta = (torch.rand(channels, generator=generator) if one else None for one in affine)
    y, mean, inverse = batch_norm.normalized_by_sums(x, gamma, beta, None, None, True, 0.0, 1e-5)
    full = x.double()
    torch.testing.assert_close(mean.double(), full.mean(axes), rtol=1e-6, atol=1e-6)
    wanted = torch.rsqrt(full.var(axes, correction=0) + 1e-5)
    torch.testing.assert_close(inverse.double(), wanted, rtol=1e-4, atol=0)
    given = (None if one is None else one.double() for one in (gamma, beta))
    expected = torch.nn.functional.batch_norm(full, None, None, *given, training=True, eps=1e-5)
    torch.testing.assert_close(y.double(), expected, rtol=0.01, atol=0.01)
    constant = torch.full(shape, 7.0, dtype=torch.bfloat16)
    y, mean, inverse = batch_norm.normalized_by_sums(constant, None, None, None, None, True, 0.0, 1e-5)
    assert not y.any() and (mean == 7).all() and inverse.isfinite().all()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(64, 5), (8, 3, 50), (8, 5, 6, 7), (2, 3, 4, 5, 6)])
def test_gradients_by_factors_agree_with_float64(shape: tuple[int, ...], affine: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    channels, axes = shape[1], [axis for axis in range(len(shape)) if axis != 1]
    means = 50 * torch.rand(1, channels, *[1] * (len(shape) - 2), generator=generator)  # larger than deviations
    x = (3 * torch.randn(shape, generator=generator) + means).bfloat16()
    dy = torch.randn(shape, generator=generator).bfloat16()
    leaves = [x.double().requires_grad_(), *(torch.rand(2, channels, generator=generator).double())]
    gamma, beta = (one.requires_grad_() for one in leaves[1:]) if affine else (None, None)
    expected = torch.nn.functional.batch_norm(leaves[0], None, None, gamma, beta, training=True, eps=1e-5)
    wanted = torch.autograd.grad(expected, [leaves[0], *([gamma, beta] if affine else [])], dy.double())
    mean, inverse = x.double().mean(axes), torch.rsqrt(x.double().var(axes, correction=0) + 1e-5)
    weights = None if gamma is None else gamma.detach().float()
    given = weights, None, None, mean.float(), inverse.float(), True, 1e-5, [True, affine, affine]
    found = batch_norm.gradient_by_factors(dy, x, *given)
    assert found[0].dtype is torch.bfloat16 and found[0].stride() == x.stride()
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=0.005, atol=1e-4 * float(wanted[0].abs().max()))
    for ours_, theirs in zip(found[1:], wanted[1:], strict=False):
        torch.testing.assert_close(ours_.double(), theirs, rtol=1e-4, atol=1e-3)


def test_only_batches_in_half_precision_are_summed(everywhere: None) -> None:
    for kind, count in (("bfloat16", 1), (None, 0)):
        graph = images_network(kind=kind).compilation.programs.program(6).module.graph  # type: ignore[arg-type]
        batch_norm.expand_batch_norms(graph)
        targets = [node.target for node in graph.nodes]
        assert targets.count(batch_norm.normalized_by_sums) == targets.count(batch_norm.gradient_by_factors) == count


def test_rows_too_long_for_the_kernel_stay_in_float32() -> None:
    x = torch.empty(2, layer_norm.LONGEST + 1, dtype=torch.bfloat16, device="meta")
    assert not layer_norm.applies(x, x.shape[1:])
    assert layer_norm.applies(x[:, 1:], [layer_norm.LONGEST])
    assert not layer_norm.applies(x[:, 1:], [layer_norm.LONGEST], torch.empty(3, dtype=torch.float64, device="meta"))
    assert not layer_norm.applies(x[:, 1:].float(), [layer_norm.LONGEST])


LENGTHS = [1, 7, 48, 768, 1000, 1024, 1026, 4095, 4096, 5000, 16384]
CASES = [(length, torch.bfloat16, (True, True)) for length in LENGTHS]
CASES += [(768, torch.float16, (True, True)), (5000, torch.float16, (True, True))]
CASES += [(768, torch.bfloat16, (True, False)), (768, torch.bfloat16, (False, False))]


@pytest.mark.gpu
@pytest.mark.parametrize(("length", "dtype", "affine"), CASES)
def test_the_kernels_agree_with_float64(length: int, dtype: torch.dtype, affine: tuple[bool, bool]) -> None:
    generator = torch.Generator().manual_seed(length)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).cuda()

    rows, shape = (3, 701), (length,)
    x, dy = (2 * random(*rows, length) + 1).to(dtype), random(*rows, length).to(dtype)
    gamma, beta = (1 + random(length) if one else None for one in affine)
    leaves = [None if one is None else one.double().requires_grad_() for one in (x, gamma, beta)]
    expected = torch.nn.functional.layer_norm(leaves[0], shape, *leaves[1:], 1e-5)
    expected.backward(dy.double())
    y, mean, rstd = ours.layer_norm(x, shape, gamma, beta, 1e-5)
    found = ours.layer_norm_gradient(dy, x, shape, mean, rstd, gamma, beta, [True, *affine])
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected.detach(), rtol=step, atol=1e-5)
    torch.testing.assert_close(mean.double(), x.double().mean(-1, keepdim=True), rtol=1e-5, atol=1e-5)
    wanted = leaves[0].grad
    torch.testing.assert_close(found[0].double(), wanted, rtol=step, atol=1e-4 * float(wanted.abs().max()) + 1e-5)
    for ours_, theirs in zip(found[1:], leaves[1:], strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours_.double(), theirs.grad, rtol=1e-4, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [rows_network, images_network])
def test_training_on_a_gpu_follows_the_cpu(make: Any) -> None:
    data = ROWS if make is rows_network else IMAGES
    np.testing.assert_allclose(losses(make(device="cuda"), data), losses(make(), data), rtol=0.03)
