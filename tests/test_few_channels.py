"""Which convolutions of few channels our kernels compute in fused steps, and, where Triton is, their numbers."""

import copy
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from stepgraph.compiler import phases, pipeline
from stepgraph.compiler.kernels import choose_convolution, few_channels
from stepgraph.compiler.kernels.few_channels import CONVOLUTION, GRADIENTS, convolved, convolved_gradient
from stepgraph.compiler.modules import Module
from stepgraph.compiler.passes import simplification
from stepgraph.compiler.program import Part, fake
from stepgraph.compiler.verifier import check

aten = torch.ops.aten
LAST, FIRST = torch.channels_last, torch.contiguous_format
HAS_TRITON = find_spec("triton") is not None
# Loops call `int` on an array of one element.
IS_TOO_OLD = HAS_TRITON and version("triton").startswith("3.6.") and Version(np.__version__) >= Version("2.4")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton comes with PyTorch for CUDA")
@pytest.mark.skipif(IS_TOO_OLD, reason="Triton 3.6 interprets no loops with NumPy 2.4")
def test_the_interpreter_gives_pytorchs_numbers() -> None:
    """In a process of its own, because Triton decides when it is imported whether it interprets."""
    command = [sys.executable, "-m", "tests.few_channels_runs"]
    root = Path(__file__).parents[1]
    ran = subprocess.run(
        command, cwd=root, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


def arrays(
    channels: int = 3, dtype: torch.dtype = torch.bfloat16, order: torch.memory_format = LAST
) -> list[torch.Tensor]:
    """Images, weights and biases."""
    torch.manual_seed(0)
    x, w, b = torch.randn(2, channels, 9, 8), torch.randn(6, channels, 3, 3), torch.randn(6)
    return [x.to(dtype).contiguous(memory_format=order), w.to(dtype).contiguous(memory_format=order), b.to(dtype)]


def gradients(wanted: str, turns: bool = False, **settings: Any) -> Any:
    """A function of images, weights and biases: a convolution, and its gradients by some of them."""

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        named = {"x": x.detach(), "w": w.detach(), "b": b.detach()}
        leaves = [named[name].requires_grad_() for name in wanted]
        y = torch.conv2d(*named.values(), **settings)
        z = y.clone(memory_format=LAST) if turns else y
        return [z.detach(), *torch.autograd.grad(z, leaves, z.detach())]

    return function


def formula(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, stride: Any, padding: Any) -> torch.Tensor:
    return torch.conv2d(x, w, b, stride, padding).contiguous(memory_format=LAST)


def gradient_formula(g: torch.Tensor, x: torch.Tensor, shape: Any, stride: Any, padding: Any) -> torch.Tensor:
    return torch.nn.grad.conv2d_weight(x, shape, g, stride, padding).contiguous(memory_format=LAST)


def targets(monkeypatch: pytest.MonkeyPatch, function: Any, *given: torch.Tensor) -> list[Any]:
    """The operators after the pass, whose numbers are compared; formulas stand for the kernels."""
    monkeypatch.setattr(few_channels, "run_on", lambda device: True)
    module = make_fx(function, tracing_mode="fake")(*given)
    simplification.simplify(module)
    few_channels.convolve_few_channels(module.graph)
    module.graph.lint()
    found = [node.target for node in module.graph.nodes if node.op == "call_function"]
    stand_ins = {convolved: formula, convolved_gradient: gradient_formula}
    for node in module.graph.nodes:
        node.target = stand_ins.get(node.target, node.target)
    module.recompile()
    for one, right in zip(module(*given), function(*given), strict=True):
        torch.testing.assert_close(one, right, rtol=0.02, atol=0.1)
        assert one.stride() == right.stride()
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["wb", "w"])
def test_convolutions_and_gradients_of_weights_are_replaced(
    monkeypatch: pytest.MonkeyPatch, wanted: str, dtype: torch.dtype
) -> None:
    found = targets(monkeypatch, gradients(wanted, stride=2, padding=1), *arrays(dtype=dtype))
    assert (found.count(convolved), found.count(convolved_gradient)) == (1, 1)
    assert found.count(choose_convolution.bias_gradient) == wanted.count("b")
    assert not {CONVOLUTION, GRADIENTS} & {*found}


def test_pytorch_computes_the_gradient_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    found = targets(monkeypatch, gradients("xwb"), *arrays())
    assert {convolved, convolved_gradient, few_channels._of_source} <= {*found} and GRADIENTS not in found
    found = targets(monkeypatch, gradients("x"), *arrays())
    assert GRADIENTS in found and convolved in found and convolved_gradient not in found


def test_a_gradient_with_its_channels_first_is_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        w = w.detach().requires_grad_()
        y = torch.conv2d(x, w, b)
        return [*torch.autograd.grad(y, w, y.detach().contiguous())]

    assert convolved_gradient in targets(monkeypatch, function, *arrays())


def test_one_channel_has_its_result_where_its_copy_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's result has its channels first then; a recorded step copies it (`lowering.py`)."""
    found = targets(monkeypatch, gradients("wb", turns=True, padding=1), *arrays(1, order=FIRST))
    assert {convolved, convolved_gradient} <= {*found} and aten.clone.default not in found
    found = targets(monkeypatch, gradients("wb", padding=1), *arrays(1, order=FIRST))
    assert CONVOLUTION in found


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"dilation": 2}, arrays()),
        ({"groups": 2}, [arrays(4)[0], arrays(2)[1], arrays()[2]]),
        ({}, arrays(5)),
        ({}, arrays(dtype=torch.float32)),
        ({}, arrays(order=FIRST)),
    ],
)
def test_others_stay(monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], given: list[torch.Tensor]) -> None:
    found = targets(monkeypatch, gradients("wb", **settings), *given)
    assert CONVOLUTION in found and GRADIENTS in found
    assert not {convolved, convolved_gradient} & {*found}


def recorded(channels: int) -> Part:
    """A step in half precision with channels last, as on CUDA: a convolution, a pool and another convolution."""
    x, y, graph = sg.Tensor((4, channels, 20, 20)), sg.Tensor((4,), "int64"), sg.Graph()
    h = graph.max_pooling(graph.relu(graph.convolution(x, 8, 7, strides=2)), 3, 2)
    h = graph.relu(graph.convolution(h, 16, 3, biases=False))
    graph.node(sg.FullyConnectedLayer.create(16, 5), graph.reshape((4, 16), graph.mean(h, (2, 3))))
    training = sg.TrainingGraph([graph], sg.LossLayer.softmax_cross_entropy(), sg.AdamWOptimizer(0.01))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu(), sg.GraphCompilationOptions.DETERMINISTIC, compute_type="bfloat16")
    step = replace(training.compilation.programs.program(4).step, channels_last=True)
    part = pipeline.settled(phases.whole(pipeline.program(step), training.compilation.kept()), step, None)
    return replace(part, module=Module(part.module, copy.deepcopy(part.module.graph)))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_first_convolution_of_a_recorded_step_is_replaced(monkeypatch: pytest.MonkeyPatch, channels: int) -> None:
    monkeypatch.setattr(few_channels, "run_on", lambda device: True)
    part = recorded(channels)
    before = part.results
    few_channels.convolve_few_channels(part.module.graph)
    check(part, before)
    ours = [node for node in part.module.graph.nodes if node.target in (convolved, convolved_gradient)]
    assert [node.target for node in ours] == [convolved, convolved_gradient]
    assert all(fake(node).is_contiguous(memory_format=LAST) for node in ours)
    assert {CONVOLUTION, GRADIENTS} <= {node.target for node in part.module.graph.nodes}  # those of the second


def test_steps_on_a_cpu_keep_their_operators() -> None:
    module = make_fx(gradients("wb"), tracing_mode="fake")(*arrays())
    few_channels.convolve_few_channels(module.graph)
    assert {CONVOLUTION, GRADIENTS} <= {node.target for node in module.graph.nodes}
