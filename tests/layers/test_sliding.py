"""Attention in a sliding window, block by block, compared with all queries against all keys in float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import stepgraph as sg
from stepgraph.compiler.lowering import lowered
from stepgraph.compiler.program import fakes
from stepgraph.compiler.step import Step
from stepgraph.layers import sliding
from stepgraph.layers.layer import Scope

N, HEADS, E = 3, 4, 8
CUDA = Step((), (), torch.device("cuda"))


def reference(layer: sg.MultiheadAttentionLayer, x: torch.Tensor, masked: torch.Tensor | None) -> torch.Tensor:
    """The equations of the layer's documentation, with a matrix of all scores."""
    d, steps = layer.descriptor, x.shape[1]
    rows = [None, None] if layer.attention_biases is None else [one.torch().double() for one in layer.attention_biases]

    def project(index: int, source: torch.Tensor) -> torch.Tensor:
        return source @ layer.weights[index].torch().double().T + layer.biases[index].torch().double()

    def split(projected: torch.Tensor, heads: int) -> torch.Tensor:
        return projected.reshape(N, -1, heads, E // HEADS).transpose(1, 2)

    def appended(projected: torch.Tensor, row: torch.Tensor | None) -> torch.Tensor:
        parts = [projected] + ([] if row is None else [row.expand(N, 1, -1)])
        return torch.cat([*parts, projected.new_zeros(N, int(d.adds_zero_attention), projected.shape[2])], 1)

    groups = d.key_value_head_count
    q = split(project(0, x), HEADS)
    k, v = (split(appended(project(i, x), row), groups) for i, row in zip((1, 2), rows, strict=True))
    k, v = (one.repeat_interleave(HEADS // groups, 1) for one in (k, v))
    i, j = torch.arange(steps)[:, None], torch.arange(k.shape[2])
    sees = (i - j < d.window) & (j <= i if d.causal else j - i < d.window) | (j >= steps)
    sees = sees.expand(N, 1, steps, -1)
    if masked is not None:
        sees = sees & ~torch.cat([masked, masked.new_zeros(N, k.shape[2] - steps)], 1)[:, None, None]
    scores = (q @ k.mT / math.sqrt(E // HEADS)).masked_fill(~sees, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    return project(3, (weights @ v).transpose(1, 2).flatten(2))


CASES: list[dict[str, Any]] = [
    {"causal": True, "window": 5, "key_value_head_count": 2},
    {"causal": False, "window": 4},
    {"causal": True, "window": 1, "has_attention_biases": True, "adds_zero_attention": True},
    {"causal": False, "window": 3, "key_value_head_count": 1, "adds_zero_attention": True},
]


@pytest.mark.parametrize("settings", CASES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("on_cuda", [False, True])
def test_blocks_give_the_numbers_of_all_keys(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], masked: bool, on_cuda: bool
) -> None:
    monkeypatch.setattr(sliding, "SHORTEST", 4)
    layer, random = sg.MultiheadAttentionLayer.create(E, HEADS, **settings), torch.Generator().manual_seed(1)
    for one in layer.parameters.values():
        one.torch().copy_(torch.randn(one.shape, generator=random) * 0.5)
    x = torch.randn(N, 43, E, generator=random)
    hidden = torch.rand(N, 43, generator=random) < 0.4 if masked else None
    masks = () if hidden is None else (hidden,)

    def forward(sources: Any, scope: Scope) -> tuple[torch.Tensor, ...]:
        return (layer.forward(*sources, *masks, scope=scope),)

    recorded = lowered(CUDA, layer, forward) if on_cuda else forward
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    scope = Scope({one: one.torch() for one in layer.parameters.values()})
    (found,), wanted = recorded([leaf] * 3, scope), reference(layer, exact, hidden)
    seed = torch.randn(found.shape, generator=random)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
    pair = torch.autograd.grad(found, leaf, seed)[0], torch.autograd.grad(wanted, exact, seed.double())[0]
    torch.testing.assert_close(pair[0].double(), pair[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("causal", "dropout"), [(True, 0.0), (False, 0.0), (True, 0.1)])
def test_no_array_of_a_step_is_as_large_as_all_scores(causal: bool, dropout: float) -> None:
    steps, window = 1024, 64
    x, y = sg.Tensor((1, steps, 4)), sg.Tensor((1, steps, 4))
    graph = sg.Graph()
    graph.node(sg.MultiheadAttentionLayer.create(4, 1, causal=causal, window=window, dropout=dropout), [x, x, x])
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cpu")
    part = training.compilation.programs.executable("step", 1).part
    assert max(array.numel() for node in part.nodes for array in fakes(node)) <= (2 if causal else 3) * steps * window
    assert np.isfinite(training.execute({"x": np.ones(x.shape, "f4")}, {"y": np.zeros(y.shape, "f4")}).loss)


def test_short_sequences_and_masks_of_pairs_stay_whole() -> None:
    layer = sg.MultiheadAttentionLayer.create(E, HEADS, causal=True, window=64)
    assert not sliding.Sliding(255, 64, True).pays and sliding.Sliding(256, 64, True).pays
    scope = Scope({one: one.torch() for one in layer.parameters.values()})
    x = torch.randn(1, 256, E)
    ones = layer.forward(x, x, x, torch.zeros(1, 256, 256), scope=scope)
    torch.testing.assert_close(ones, layer.forward(x, x, x, scope=scope), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("compute_type", [None, "bfloat16"])
def test_cuda_needs_memory_for_the_window_only(compute_type: str | None) -> None:
    steps = 16384
    x, y = sg.Tensor((1, steps, 64)), sg.Tensor((1, steps, 64))
    graph = sg.Graph()
    graph.node(sg.MultiheadAttentionLayer.create(64, 2, causal=True, window=128), [x, x, x])
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile("cuda", fuse=False, compute_type=compute_type)
    torch.cuda.reset_peak_memory_stats()
    data = {"x": np.ones(x.shape, "f4")}, {"y": np.zeros(y.shape, "f4")}
    assert np.isfinite([training.execute(*data).loss for _ in range(3)]).all()
    assert torch.cuda.max_memory_allocated() < 4 * steps * steps  # one matrix of all scores
