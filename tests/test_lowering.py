"""How layers are recorded for a GPU, looked at on the CPU."""

import gc
import weakref

import torch
import torch.nn.functional as F

import stepgraph as sg
from stepgraph.compiler.lowering import lowered
from stepgraph.compiler.step import Step
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
