"""Types that a CPU only emulates: one warning with what was measured, and PyTorch prints no stack."""

import itertools
import logging
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.kernels import emulated, half
from stepgraph.compiler.kernels.choices import CHOICES, Choices
from stepgraph.types import GraphCompilationOptions as Options

SIDE = 48  # large enough for PyTorch to fail where it does
KINDS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(autouse=True)
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not warned yet."""
    monkeypatch.setattr(emulated, "_warned", set())


def compiled(kind: str | None, options: Options = Options.NONE) -> sg.TrainingGraph:
    """Products in all layouts: of a batch with weights, of gradients with either, and between two results."""
    sg.set_seed(1)
    x, y, graph = sg.Tensor((SIDE, SIDE), label="x"), sg.Tensor((SIDE,), "int64"), sg.Graph()
    a, b = (graph.dense(x, SIDE) for _ in range(2))
    product = graph.node(sg.MatMulLayer(sg.MatMulDescriptor(transposes_y=True)), a, b)
    graph.dense(product, 4)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", options, compute_type=kind)
    return training


def losses(training: sg.TrainingGraph) -> list[float]:
    x = 0.1 * np.random.default_rng(0).standard_normal((SIDE, SIDE)).astype(np.float32)
    return [float(training.execute({"x": x}, {"y": np.arange(SIDE) % 4}).loss) for _ in range(4)]


@cache
def in_float32() -> list[float]:
    return losses(compiled(None, Options.DETERMINISTIC))


def compile_one_layer(kind: str | None) -> None:
    graph, x = sg.InferenceGraph(), sg.Tensor((2, 2))
    graph.node(sg.ActivationLayer.relu(), x)
    graph.add_inputs({"x": x})
    graph.compile("cpu", compute_type=kind)


# The warning


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_type_is_warned_about_once(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(emulated, "factors", lambda kind: (7.34, 1.21))
    for _ in range(2):
        compile_one_layer(kind)
    (record,) = [one for one in caplog.records if one.name == "stepgraph"]
    assert record.levelno == logging.WARNING
    assert f"emulates {kind}: PyTorch's products are 7.3 times slower than in float32" in record.message
    assert "1.2 times as long" in record.message


def test_a_fast_type_and_float32_are_not(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(emulated, "factors", lambda kind: (1.4, 1.2))
    for kind in (*KINDS, None):
        compile_one_layer(kind)
    assert not [one for one in caplog.records if one.name == "stepgraph"]
    monkeypatch.setattr(emulated, "factors", lambda kind: pytest.fail("nothing to measure"))
    compile_one_layer(None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_factors_are_measured_once_per_machine(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    CHOICES.forget()
    monkeypatch.setattr(Choices, "file", tmp_path / "kernels.jsonl")
    slower, detour = emulated.factors(KINDS[kind])
    assert slower > 0.01 and detour > 0.5
    found = CHOICES.stored()
    for one in found:
        assert one.question.operator == f"product in {kind}" and set(one.seconds) == {"float32", kind, "rounded"}
    assert [one.question.arguments for one in found] in ([(emulated.SMALL,)], [(emulated.SMALL,), (emulated.LARGER,)])
    assert emulated.factors(KINDS[kind]) == (slower, detour) and CHOICES.stored() == found
    CHOICES.forget()


def has_bfloat16() -> bool:
    """Whether the processor multiplies in bfloat16, as far as PyTorch says."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@pytest.mark.skipif(not has_bfloat16(), reason="needs a processor that multiplies in bfloat16")
def test_a_processor_that_computes_in_a_type_does_not_emulate_it() -> None:
    slower, _ = emulated.factors(torch.bfloat16)
    assert slower < emulated.MARGIN


# In float32 and in the type: microseconds before a call computes and nanoseconds per 16 products; then what the factor
# lies between.
IMAGINED = {"fast, but slow to call": ((10, 1), (90, 0.25), 0.2, 1), "emulated": ((10, 1), (10, 500), 100, 600)}


@pytest.mark.parametrize("kind", IMAGINED)
def test_calls_do_not_count(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is slow to call, but computes fast, is not emulated."""
    CHOICES.forget()
    monkeypatch.setattr(Choices, "file", tmp_path / "kernels.jsonl")
    own, other, least, most = IMAGINED[kind]

    def taking(called: float, computed: float) -> Callable[[int], torch.Tensor]:
        def run(side: int) -> torch.Tensor:
            end = time.perf_counter() + 1e-6 * called + 1e-9 * computed * side**2 * (side // 16)
            while time.perf_counter() < end:
                pass
            return torch.ones(1)

        return run

    names = ("float32", "bfloat16", "rounded")
    made = dict(zip(names, (taking(*own), taking(*other), taking(*own)), strict=True))
    monkeypatch.setattr(emulated, "implementations", lambda kind: made)
    slower, _ = emulated.factors(torch.bfloat16)
    assert least < slower < most
    CHOICES.forget()


# PyTorch's failure


def test_looking_for_the_failure_leaves_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    for enabled in (True, False):
        torch.backends.mkldnn.set_flags(enabled)
        emulated._fails.cache_clear()
        for kind in half.HALF:
            assert emulated.fails(kind) in ((True, False) if enabled else (False,))
        assert torch.backends.mkldnn.enabled == enabled
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("kind", "options"), [("bfloat16", Options.NONE), ("float16", Options.DETERMINISTIC)], ids=str)
def test_products_that_fail_are_computed_in_float32(
    kind: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated, "fails", lambda kind: True)
    monkeypatch.setattr(emulated, "warn_once", lambda kind: None)
    training = compiled(kind, options)
    (executable,) = training.session.compilation.programs.executables.values()
    nodes = executable.part.module.graph.nodes
    assert not [node for node in nodes if node.target in half.IMPLEMENTATIONS]
    assert len([node for node in nodes if node.target in half.IMPLEMENTATIONS.values()]) >= 8
    assert losses(training) == pytest.approx(in_float32(), rel=0.02) and training.memory_plan.workspace > 0


@pytest.mark.parametrize("layer", ["lstm", "gru"])
def test_recurrent_layers_are_too(
    layer: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(kind: str | None) -> list[float]:
        sg.set_seed(1)
        x, y, graph = sg.Tensor((16, 3, 16)), sg.Tensor((16, 3, 12)), sg.Graph()
        graph.node({"lstm": sg.LSTMLayer, "gru": sg.GRULayer}[layer].create(16, 12), x)
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
        training.add_inputs({"x": x}, {"y": y})
        training.compile("cpu", Options.DETERMINISTIC, compute_type=kind)
        random = np.random.default_rng(0)
        data = [random.standard_normal(one.shape).astype(np.float32) for one in (x, y)]
        return [float(training.execute({"x": data[0]}, {"y": data[1]}).loss) for _ in range(3)]

    wanted = trained(None)
    monkeypatch.setattr(emulated, "fails", lambda kind: True)
    monkeypatch.setattr(emulated, "warn_once", lambda kind: None)
    assert trained("bfloat16") == pytest.approx(wanted, rel=0.02)
    assert torch.backends.mkldnn.enabled and capfd.readouterr() == ("", "")


def test_scaled_sums_are_too() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(2, 6, 6, generator=generator).to(torch.bfloat16) for _ in range(3))
    for operator, given in (
        (torch.ops.aten.addmm.default, (c[0], a[0], b[0])),
        (torch.ops.aten.baddbmm.default, (c, a, b)),
    ):
        found = half.IMPLEMENTATIONS[operator](*given, beta=0.5, alpha=2.0)
        exact = operator(*(one.double() for one in given), beta=0.5, alpha=2.0)
        torch.testing.assert_close(found, exact.to(torch.bfloat16), rtol=0.01, atol=1e-5)


EVERY = itertools.product(KINDS, (Options.NONE, Options.DETERMINISTIC, Options.FUSE_LAYERS))
QUICK = [("bfloat16", Options.NONE), ("bfloat16", Options.DETERMINISTIC), ("float16", Options.NONE)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.deep]) for one in EVERY],
    ids=str,
)
def test_nothing_is_printed_and_onednn_stays(
    kind: str, options: Options, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated, "warn_once", lambda kind: None)
    enabled = torch.backends.mkldnn.enabled
    assert losses(compiled(kind, options)) == pytest.approx(in_float32(), rel=0.02)
    assert torch.backends.mkldnn.enabled == enabled and capfd.readouterr() == ("", "")
