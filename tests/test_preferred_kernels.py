"""With `parallel`, a rule by processor and shape chooses implementations: no clock and no file of choices decides."""

import itertools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.kernels import channels_first, channels_last, choose_operator, half, measure, preferences
from stepgraph.compiler.kernels import choose_convolution as convolution
from stepgraph.compiler.kernels.alternatives import CONVOLUTION_WEIGHTS
from stepgraph.compiler.kernels.choices import CHOICES
from stepgraph.compiler.program import notes
from stepgraph.compiler.tuned import MANIFEST
from stepgraph.system import torch_private
from tests.parallel_runs import new

aten, ours = torch.ops.aten, torch.ops.stepgraph
OFFERED = [one for row in MANIFEST for one in row.offers]
IMAGES = [(3, 1, 17, 18), (2, 3, 8, 9), (2, 40, 12, 12), (1, 64, 5, 7)]
KERNELS = [(1, 1, 0), (3, 1, 1), (3, 2, 1), (5, 1, 2), (3, 1, 0), (2, 1, 1), (9, 1, 4)]  # size, stride, padding


@pytest.fixture(params=["aarch64", "x86_64", "AMD"], autouse=True)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64" if request.param == "AMD" else request.param)
    monkeypatch.setattr(preferences, "_is_amd", lambda: request.param == "AMD")
    return request.param


def agrees(operator: str, known: measure.Implementations, arguments: list[Any]) -> str:
    """The name that the rule prefers, after a comparison of its results with the reference."""
    reference, name = next(iter(known)), preferences.preferred(operator, known, arguments)
    if name != reference:
        torch.testing.assert_close(known[name](*arguments), known[reference](*arguments), rtol=1e-3, atol=1e-3)
    return name


def test_preferred_convolutions_compute_what_pytorch_does(processor: str) -> None:
    torch.manual_seed(0)
    used = set()
    for shape, (size, stride, padding), outputs in itertools.product(IMAGES, KERNELS, (5, 64)):
        x, w = torch.randn(shape), torch.randn(outputs, shape[1], size, size)
        steps, border = [stride] * 2, [padding] * 2
        if min(shape[2:]) + 2 * padding < size:
            continue
        for layout, module, order in (
            ("", channels_first, torch.contiguous_format),
            (convolution.LAST_SUFFIX, channels_last, torch.channels_last),
        ):
            images = x.to(memory_format=order)
            g = torch.randn_like(aten.convolution(images, w, None, steps, border, [1, 1], False, [0, 0], 1))
            g = g.to(memory_format=order)
            offered = {one.name: one.function for one in OFFERED if one.operation == CONVOLUTION_WEIGHTS}
            fits = [one.name for one in OFFERED if convolution._suits(one, (g, images, w, steps, border))]
            calls: dict[str, tuple[dict[str, Callable[..., Any]], list[Any]]] = {
                convolution.FORWARD: (
                    convolution.forward_implementations(module, images),
                    [images, w, torch.randn(outputs), steps, border],
                ),
                convolution.DATA: (
                    convolution.data_implementations(module, images, w, steps, border),
                    [g, list(shape), w, steps, border],
                ),
                CONVOLUTION_WEIGHTS: (
                    convolution.weights_implementations(module, images) | {name: offered[name] for name in fits},
                    [g, images, w, steps, border],
                ),
            }
            used |= {(name, agrees(name + layout, *call)) for name, call in calls.items()}
    chosen = {name for _, name in used}
    expected = {"pytorch", "nnpack", "taps", "flipped", "native", "gemm", "winograd", "winograd 4"}
    assert chosen == (expected if processor == "aarch64" else {"pytorch"})


def test_preferred_operators_compute_what_pytorch_does(processor: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 16, 32, 32)
    sums = torch.randn(30), torch.randn(20, 40), torch.randn(30, 40).t()
    numbers = torch.ones(16), torch.zeros(16)
    calls = {
        aten.max_pool2d_with_indices.default: [x, [2, 2], [2, 2]],
        aten.native_batch_norm.default: [x, *numbers, None, None, True, 0.1, 1e-5],
        aten.addmm.default: [*sums],
    }
    found = [chosen(operator, arguments) for operator, arguments in calls.items()]
    assert found == (["channels last", "rows", "convolution"] if processor == "aarch64" else ["pytorch"] * 3)


def chosen(operator: Any, arguments: list[Any]) -> str:
    every = [one for one in (*choose_operator.ALTERNATIVES, *OFFERED) if one.operation is operator]
    known = {"pytorch": operator} | {one.name: one.function for one in every if one.fits(arguments)}
    return agrees(str(operator), known, arguments)


@pytest.mark.skipif(torch_private.onednn_linear is None, reason="needs oneDNN")
def test_large_products_are_computed_by_onednn_on_amd(processor: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(128, 128), torch.randn(128, 128)
    steps, of_inputs, of_hidden = torch.randn(3, 64, 96), 0.1 * torch.randn(512, 96), 0.1 * torch.randn(512, 128)
    state, of_gates = torch.randn(64, 128), 0.1 * torch.randn(384, 128)
    output, _, _, gates, cells = ours.lstm.default(steps, of_inputs, of_hidden, None, None, None, None, False)
    inputs = torch.randn(3, 64, 384)
    states = ours.gru.default(inputs, of_gates, None, state, False, True)
    calls = {
        aten.mm.default: [a, b],
        aten.addmm.default: [a[0], a.t(), b],
        ours.lstm.default: [steps, of_inputs, of_hidden, None, None, None, None, False],
        ours.lstm_gradient.default: [gates, cells, of_hidden, None, output, None, None, False],
        ours.gru.default: [inputs, of_gates, None, state, False, True],
        ours.gru_gradient.default: [output, *states, of_gates, state, False, True],
    }
    for operator, arguments in calls.items():
        assert chosen(operator, arguments) == ("onednn" if processor == "AMD" else "pytorch")
    if processor == "AMD":
        few = b[:, :64].contiguous()
        assert chosen(aten.mm.default, [a, few]) == "pytorch"
        assert chosen(aten.mm.default, [a.repeat(2, 1), few]) == "onednn"
        assert chosen(aten.mm.default, [a.repeat(1, 2).t(), few]) == "pytorch"


@pytest.mark.parametrize("has_instructions", [True, False])
def test_half_precision_is_not_emulated(
    has_instructions: bool, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preferences, "_multiplies_half", lambda: has_instructions)
    for operator, other in half.IMPLEMENTATIONS.items():
        name = preferences.preferred(str(operator), {"pytorch": operator, "float32": other}, [torch.empty(1, 1)] * 3)
        assert name == ("float32" if processor == "aarch64" and not has_instructions else "pytorch")


def kernels(graph: sg.TrainingGraph | sg.InferenceGraph) -> list[Any]:
    programs = graph.require_session("test").compilation.programs
    part = next(iter(programs.executables.values())).part
    return [notes(node).implementation for node in part.nodes if notes(node).implementation]


def test_a_divided_graph_measures_nothing(
    processor: str, nothing_fuses: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object, **__: object) -> None:
        raise AssertionError("it measures")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "measure", measured)
    CHOICES.forget()
    training = new("cnn")
    random = np.random.default_rng(0)
    x, y = random.standard_normal((16, 3, 8, 8)).astype(np.float32), random.integers(0, 3, 16)
    training.execute({"x": x}, {"y": y})
    names = {name for _, name in kernels(training)}
    assert ("nnpack" in names) == (processor == "aarch64" and torch.backends.nnpack.is_available())
    inference = training.inference()
    inference.execute({"x": x})
    sg.predict(training, x)
    assert ("nnpack" in {name for _, name in kernels(inference)}) == ("nnpack" in names)
    assert not list(tmp_path.rglob("*")) and ("by a rule" in str(training)) == bool(names)
    inference.compile("cpu", fuse=False)  # with settings of its own, and without `parallel` among them
    assert not list(tmp_path.rglob("*")) and ("by a rule" in str(inference)) == bool(names)
    CHOICES.forget()


def test_gray_images_have_their_channels_last(processor: str) -> None:
    x, y, graph = sg.Tensor((32, 1, 28, 28)), sg.Tensor((32,), "int64"), sg.Graph()
    graph.dense(graph.reshape((32, -1), graph.node(sg.PoolingLayer.max(2), graph.relu(graph.convolution(x, 16, 3)))), 3)
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamOptimizer(0.01))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu", parallel=sg.Parallel(shards=2))
    assert training.require_session("test").compilation.programs.channels_last == (processor == "aarch64")
    training.execute({"x": np.zeros((32, 1, 28, 28), np.float32)}, {"y": np.zeros(32, np.int64)})
