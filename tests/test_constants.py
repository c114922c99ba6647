"""Constants of a step are computed once; fused steps store what PyTorch's compiler would compute or copy repeatedly."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import stepgraph as sg
from stepgraph.compiler import pipeline
from stepgraph.compiler.passes import concatenations, constants, stored
from stepgraph.compiler.pipeline import TABLE
from stepgraph.system import torch_private

aten = torch.ops.aten
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch's compiler needs a C++ compiler")


def recorded(function: Callable[..., Any], *arrays: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*arrays)


def check_kept(function: Callable[..., Any], module: fx.GraphModule, *arrays: torch.Tensor) -> None:
    """The changed graph computes the same."""
    module.recompile()
    for found, expected in zip(module(*arrays), function(*arrays), strict=True):
        assert torch.equal(found, expected)


def count(graph: fx.Graph, *targets: Any) -> list[int]:
    return [len(graph.find_nodes(op="call_function", target=target)) for target in targets]


# Equal constants


def test_equal_constants_are_computed_once() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        first, second, other = ((torch.arange(n, dtype=torch.float32)[:, None] * 0.1).cos() for n in (4, 4, 1))
        return [x * first, x - second, x + other]

    x = torch.rand(4, 3)
    module = recorded(function, x)
    constants.compute_once(module.graph)
    assert count(module.graph, aten.cos.default, aten.arange.default, aten.unsqueeze.default) == [2, 2, 2]
    check_kept(function, module, x)


def test_filled_written_and_random_arrays_are_not_merged() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        zeros = [torch.zeros(3) for _ in range(2)]
        written = [torch.arange(3.0).neg() for _ in range(2)]
        written[0].add_(x)
        random = [torch.rand(3).neg() for _ in range(2)]
        return [x + one for one in (*zeros, *written, *random)]

    module = recorded(function, torch.rand(3))
    before = [node.target for node in module.graph.nodes]
    constants.compute_once(module.graph)
    assert [node.target for node in module.graph.nodes] == before


def attention(depth: int = 2, **settings: Any) -> sg.TrainingGraph:
    """Blocks of causal attention with grouped heads and rotary positions."""
    sg.set_seed(1)
    x, y, graph = sg.Tensor((2, 8, 16)), sg.Tensor((2, 8, 16)), sg.Graph()
    hidden = x
    for _ in range(depth):
        shared = {"key_value_head_count": 1, "causal": True, "rotary_base": 100.0, "has_biases": False}
        layer = sg.MultiheadAttentionLayer.create(16, 2, **shared, **settings)
        hidden = graph.add(hidden, graph.node(layer, hidden, hidden, hidden))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    return training


def losses(training: sg.TrainingGraph) -> list[float]:
    rows = np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)
    return [training.execute({"x": rows}, {"y": np.roll(rows, 1, 1)}).loss for _ in range(5)]


def test_layers_share_tables_and_masks() -> None:
    training = attention(window=4)
    training.compile("cpu")
    graph = training.compilation.programs.program(2).module.graph
    assert count(graph, aten.cos.default, aten.sin.default, aten.masked_fill.Scalar) == [1, 1, 1]
    assert len(graph.find_nodes(op="call_function", target=torch_private.flash_attention_on_cpu.default)) == 2


# What is stored


def stored_nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node.args[0] for node in graph.find_nodes(op="call_function", target=torch_private.written_to_memory())]


def test_costly_constants_are_stored_where_they_are_small() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        angles = torch.arange(6.0)[:, None] / torch.arange(1.0, 4.0)
        wide = angles.cos().expand(5, 6, 3) + torch.zeros(5, 6, 3)  # as large as what reads it
        halves = torch.cat([-angles.sin(), angles.sin()], -1)
        return [x * wide, torch.cat([x, x], -1) + halves, x - angles]

    x = torch.rand(5, 6, 3)
    module = recorded(function, x)
    stored.store_constants(module.graph)
    found = stored_nodes(module.graph)
    assert [node.target for node in found] == [
        aten.cos.default,
        aten.cat.default,
    ]  # reading angles saves only divisions
    assert not any(user.target is aten.mul.Tensor for node in found for user in node.users)
    check_kept(function, module, x)


def test_what_operators_copy_repeatedly_is_stored() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        turned, paired, once, few = x.sin().t(), x.exp(), x.cos(), x.tan()[:1]
        counted = [torch.histc(one, 4, -1, 1) for one in (turned, turned + 1, once, few, few)]
        return [*counted, turned.histc(2), aten._cdist_forward.default(paired, paired, 2.0, None), 2 * once]

    x = torch.rand(4, 3)
    module = recorded(function, x)
    stored.store_sources(module.graph)
    found = stored_nodes(module.graph)
    assert [node.target for node in found] == [aten.sin.default, aten.exp.default]
    assert all(len(node.users) == 1 for node in found)
    check_kept(function, module, x)


@pytest.mark.parametrize(("place", "readers", "times"), [(None, 2, 1), (None, 1, 0), (1, 2, 0)])
def test_a_number_that_is_looked_up_for_several_arrays_is_stored(place: int | None, readers: int, times: int) -> None:
    def function(x: torch.Tensor, places: torch.Tensor) -> list[torch.Tensor]:
        number = 2 * x[0, places.clamp(max=2) if place is None else place] + 1
        return [x * number + reader for reader in range(readers)]

    arrays = torch.rand(4, 3), torch.tensor([7])
    module = recorded(function, *arrays)
    stored.store_numbers(module.graph)
    assert count(module.graph, torch.ops.stepgraph.written.default) == [times]
    check_kept(function, module, *arrays)


# The code of fused steps


class Waves(sg.Layer):
    """Adds a table of sines to every row."""

    def forward(self, x: torch.Tensor, *, scope: Any) -> torch.Tensor:
        return x + torch.arange(x.shape[-1], dtype=x.dtype, device=x.device).sin()


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The code that PyTorch's compiler generates."""
    found: list[str] = []
    original = torch_private.generated_module

    def generated_module(compiled: Any) -> Any:
        module = original(compiled)
        lines = Path(module.__file__).read_text().splitlines()
        found.append("\n".join(line for line in lines if not line.startswith("#")))  # comments list the operators
        return module

    monkeypatch.setattr(torch_private, "generated_module", generated_module)
    return found


@needs_compiler
def test_a_table_is_computed_in_a_loop_of_its_own(code: list[str]) -> None:
    x, rows = sg.Tensor((6, 40)), np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
    inference = sg.InferenceGraph()
    inference.node(Waves(), x)
    inference.add_inputs({"x": x})
    inference.compile("cpu", fuse=True)
    found = inference.execute({"x": rows}).result
    np.testing.assert_allclose(found, rows + np.sin(np.arange(40)), rtol=1e-5, atol=1e-6)
    (source,) = set(code)
    assert "empty_strided_cpu((40, ), (1, ), torch.float32)" in source


def arguments(source: str, name: str) -> list[set[str]]:
    """The buffers passed to each call of an operator."""
    return [set(re.findall(r"\bbuf\d+\b", call)) for call in re.findall(rf"{name}\.default\((.*)\)", source)]


@needs_compiler
@pytest.mark.deep
def test_fused_layers_share_tables(code: list[str]) -> None:
    training = attention()
    training.compile("cpu", fuse=True)
    plain = attention()
    plain.compile("cpu", fuse=False)
    np.testing.assert_allclose(losses(training), losses(plain), rtol=1e-4)
    (source,) = set(code)
    assert len(re.findall(r"\bcos\(", source)) == 1


class Gated(sg.Layer):
    """Concatenates two functions of the same rows and multiplies them."""

    def forward(self, x: torch.Tensor, *, scope: Any) -> torch.Tensor:
        rows = torch.cat([x * 2, x + 1], 1)
        return rows @ rows.t()


class Paired(sg.Layer):
    """Concatenates rows and two functions of them, element by element, and multiplies them."""

    def forward(self, x: torch.Tensor, *, scope: Any) -> torch.Tensor:
        rows = torch.cat([x, torch.stack([x * 2, x + 1], 2).flatten(1)], 1)
        return rows @ rows.t()


@needs_compiler
@pytest.mark.deep
@pytest.mark.parametrize("layer, width", [(Gated, 60), (Paired, 90)])
def test_the_compiler_takes_parts_that_are_written_together(
    layer: type[sg.Layer], width: int, code: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU it writes neighbouring parts so anyway: operators must be understood and leave nothing behind."""
    rows = tuple(replace(row, applies=lambda step, part: True) if "parts of" in row.name else row for row in TABLE)
    monkeypatch.setattr(pipeline, "TABLE", rows)
    monkeypatch.setattr(concatenations, "LARGE", 0)
    x, array = sg.Tensor((100, 30)), np.random.default_rng(0).standard_normal((100, 30)).astype(np.float32)
    results = []
    for fuse in (True, False):
        inference = sg.InferenceGraph()
        inference.node(layer(), x)
        inference.add_inputs({"x": x})
        inference.compile("cpu", fuse=fuse)
        results.append(inference.execute({"x": array}).result)
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)
    (source,) = set(code)
    assert re.findall(r"empty_strided_cpu\(\((\d+), (\d+)\)", source) == [("100", str(width)), ("100", "100")]
    assert "torch.ops.stepgraph" not in source
    assert len(re.findall(r"^ +cpp_fused\w*\(", source, re.MULTILINE)) == 1


class AttendsTwice(sg.Layer):
    """Attention of scaled rows to themselves with two heads, plus the same with a causal mask."""

    def forward(self, x: torch.Tensor, *, scope: Any) -> torch.Tensor:
        heads = (2 * x).unflatten(-1, (2, -1)).transpose(1, 2)
        both = (F.scaled_dot_product_attention(heads, heads, heads, is_causal=causal) for causal in (False, True))
        return sum(both).transpose(1, 2).flatten(-2)


@needs_compiler
@pytest.mark.deep
def test_fused_operators_read_the_same_array(code: list[str]) -> None:
    x, rows = sg.Tensor((2, 8, 16)), np.random.default_rng(0).standard_normal((2, 8, 16)).astype(np.float32)
    results = []
    for fuse in (True, False):
        inference = sg.InferenceGraph()
        inference.node(AttendsTwice(), x)
        inference.add_inputs({"x": x})
        inference.compile("cpu", fuse=fuse)
        results.append(inference.execute({"x": rows}).result)
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)
    (source,) = set(code)
    first, second = arguments(source, "_scaled_dot_product_flash_attention_for_cpu")
    assert len(first) == 1 and first == second


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "bfloat16"])
def test_fused_attention_on_a_gpu_stores_tables_and_rotated_rows_once(code: list[str], kind: str | None) -> None:
    training, plain = attention(), attention()
    training.compile("gpu", fuse=True, compute_type=kind, tf32=False)
    plain.compile("gpu", fuse=False, compute_type=kind, tf32=False)
    np.testing.assert_allclose(losses(training), losses(plain), rtol=1e-4 if kind is None else 3e-2)
    (source,) = set(code)
    assert len(re.findall(r"\bcos\(", source)) == 1
    if kind is None:  # products compute attention in float32
        return
    called = re.findall(r"(\w*attention\w*)\.default\(", source)
    forward, gradient = ({name for name in called if name.endswith("_backward") is after} for after in (False, True))
    assert len(forward) == len(gradient) == 1
    pairs = zip(arguments(source, *forward), reversed(arguments(source, *gradient)), strict=True)
    assert all(read <= again for read, again in pairs)


def blocks(kind: str | None, *, fuse: bool, depth: int = 2) -> sg.TrainingGraph:
    """Blocks as in Llama: normalization, rotary attention with grouped heads, gated products."""
    sg.set_seed(3)
    x, y, graph = sg.Tensor((2, 64, 64)), sg.Tensor((2, 64, 64)), sg.Graph()
    hidden = x
    for _ in range(depth):
        rows = graph.node(sg.RMSNormalizationLayer.create((64,)), hidden)
        settings = {"key_value_head_count": 2, "causal": True, "rotary_base": 1e4, "has_biases": False}
        hidden = graph.add(hidden, graph.node(sg.MultiheadAttentionLayer.create(64, 4, **settings), rows, rows, rows))
        rows = graph.node(sg.RMSNormalizationLayer.create((64,)), hidden)
        hidden = graph.add(hidden, graph.node(sg.GatedFeedForwardLayer.create(64, 128), rows))
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=1e-2))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("gpu", fuse=fuse, compute_type=kind, tf32=False)
    return training


@pytest.mark.gpu
def test_fused_blocks_on_a_gpu_train_as_unfused_ones(code: list[str]) -> None:
    rows = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    found = []
    for fuse in (True, False):
        training = blocks("bfloat16", fuse=fuse)
        found.append([float(training.execute({"x": rows}, {"y": np.roll(rows, 1, 1)}).loss) for _ in range(10)])
    np.testing.assert_allclose(*found, rtol=3e-2)
    assert found[0][-1] < 0.9 * found[0][0]
    (source,) = set(code)
    assert not re.search(r"torch\.ops\.stepgraph\.(written|filled)", source)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "share"), [(None, 0.01), ("bfloat16", 0.1)])
def test_weights_of_many_blocks_are_read_before_they_are_updated(kind: str | None, share: float) -> None:
    """Their first update has the size of the rate and the sign of the gradient; rounding changes few signs."""
    rows = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    changes = []
    for fuse in (True, False):
        training = blocks(kind, fuse=fuse, depth=10)
        before = {name: one.clone() for name, one in training.state_dict().items()}
        training.execute({"x": rows}, {"y": np.roll(rows, 1, 1)}).wait()
        changes.append({name: one.float() - before[name].float() for name, one in training.state_dict().items()})
    for name, plain in changes[1].items():
        differing = (changes[0][name] - plain).abs() > plain.abs().max() / 2
        assert differing.float().mean() < share, name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings", [{}, {"rotary_interleaved": True}, {"rotary_dimension": 32}, {"key_value_head_count": 8}], ids=str
)
def test_gradients_of_large_rotary_attention_are_written_to_their_places(
    settings: dict[str, Any], code: list[str]
) -> None:
    shape, found = (4, 512, 512), []
    rows = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    for fuse in (True, False):
        sg.set_seed(3)
        x, y, graph = sg.Tensor(shape), sg.Tensor(shape), sg.Graph()
        shared = {"causal": True, "rotary_base": 1e4, "has_biases": False, "key_value_head_count": 4, **settings}
        graph.add(x, graph.node(sg.MultiheadAttentionLayer.create(512, 8, **shared), x, x, x))
        training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.AdamOptimizer(learning_rate=1e-3))
        training.add_inputs({"x": x}, {"y": y})
        training.compile("gpu", fuse=fuse, compute_type="bfloat16")
        found.append([float(training.execute({"x": rows}, {"y": np.roll(rows, 1, 1)}).loss) for _ in range(10)])
    np.testing.assert_allclose(*found, rtol=1e-2)
    (source,) = set(code)
    assert not re.search(r"torch\.ops\.stepgraph\.(written|filled)", source)
