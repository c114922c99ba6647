"""How layers are recorded for a GPU, looked at on the CPU."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import stepgraph as sg
from stepgraph.compiler.lowering import lowered
from stepgraph.compiler.step import Step
from stepgraph.layers.attending import attend
from stepgraph.layers.layer import Layer, Scope

CUDA = Step((), (), torch.device("cuda"))
GENERATOR = torch.Generator().manual_seed(1)
Q, K, V = (torch.randn(2, 3, 5, 4, generator=GENERATOR) for _ in range(3))


class Own(Layer):
    """Attention in a layer of a user, with whatever settings PyTorch's operator has."""

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, None, 0.0, True)


def test_attention_is_written_out_with_the_same_numbers() -> None:
    layer = sg.MultiheadAttentionLayer.create(8, 2)
    for mask in (None, torch.randn(2, 1, 5, 5, generator=GENERATOR)):

        def forward(sources: object, scope: object, mask: torch.Tensor | None = mask) -> tuple[torch.Tensor, ...]:
            return (F.scaled_dot_product_attention(Q, K, V, mask),)

        (found,) = lowered(CUDA, layer, forward)([], Scope({}))
        assert found is not forward([], None)[0]
        torch.testing.assert_close(found, forward([], None)[0])


@pytest.mark.parametrize("groups", [1, 3, 6])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_causal_and_grouped_attention_keep_their_numbers(groups: int, causal: bool, dtype: torch.dtype) -> None:
    layer = sg.MultiheadAttentionLayer.create(24, 6)
    q, k, v = (torch.randn(2, n, 5, 4, generator=GENERATOR).to(dtype) for n in (6, groups, groups))
    masks = [None] if causal else [None, torch.randn(2, 1, 5, 5, generator=GENERATOR).to(dtype)]
    for mask in masks:

        def forward(sources: object, scope: object, mask: torch.Tensor | None = mask) -> tuple[torch.Tensor, ...]:
            return (attend(q, k, v, mask, causal=causal),)

        (found,) = lowered(CUDA, layer, forward)([], Scope({}))
        torch.testing.assert_close(found, forward([], None)[0])


def test_what_a_gpu_records_for_each_kind_of_attention() -> None:
    """Flash attention takes causal and grouped heads as they are; only float32 over few keys is written out."""
    layer = sg.MultiheadAttentionLayer.create(24, 6)

    def recorded(dtype: torch.dtype, keys: int, groups: int = 6, mask: bool = False) -> list[tuple[int, bool, bool]]:
        seen: list[tuple[int, bool, bool]] = []

        class Watched(TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function is F.scaled_dot_product_attention:
                    seen.append((args[1].shape[1], kwargs["is_causal"], kwargs["enable_gqa"]))
                return function(*args, **(kwargs or {}))

        q, k = (torch.zeros(1, n, keys, 4, dtype=dtype) for n in (6, groups))
        added = torch.zeros(1, 1, keys, keys, dtype=dtype) if mask else None
        with Watched():
            lowered(CUDA, layer, lambda *_: (attend(q, k, k, added, causal=not mask),))([], Scope({}))
        return seen

    assert recorded(torch.float32, 5) == []
    assert recorded(torch.float32, 513) == [(6, True, False)]
    assert recorded(torch.float32, 513, groups=2) == [(6, True, False)]
    assert recorded(torch.bfloat16, 5) == [(6, True, False)]
    assert recorded(torch.bfloat16, 5, groups=2) == [(2, True, True)]
    assert recorded(torch.bfloat16, 5, groups=2, mask=True) == [(6, False, False)]


def test_a_layer_of_a_user_is_recorded_as_it_is_written() -> None:
    def forward(sources: object, scope: object) -> tuple[torch.Tensor, ...]:
        return (Q,)

    assert lowered(CUDA, Own(), forward) is forward


def test_programs_that_were_replaced_are_freed() -> None:
    """Freezing and unfreezing a parameter compiles again each time; nothing of before stays."""
    x, y, graph, layer = sg.Tensor((4, 3)), sg.Tensor((4, 2)), sg.Graph(), sg.FullyConnectedLayer.create(3, 2)
    graph.node(layer, x)
    training = sg.TrainingGraph([graph], sg.LossLayer.mean_squared_error(), sg.SGDOptimizer(learning_rate=0.1))
    training.add_inputs({"x": x}, {"y": y})
    training.compile(sg.Device.cpu())
    earlier = weakref.ref(training.compilation.programs)
    training.stop_gradient([x])
    layer.weights.is_updatable = False
    training.execute({"x": [0.0] * 12}, {"y": [0.0] * 8})
    gc.collect()
    assert earlier() is None
