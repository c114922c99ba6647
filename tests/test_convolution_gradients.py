"""Gradients of a convolution apart: the same bits, and that of the source needs no values of the source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.passes.convolution_gradients import BOTH, ONE, needing, separate
from stepgraph.compiler.program import Phase, note

SETTINGS = [1, 1], [1, 1], [1, 1], False, [0, 0], 1


def arrays() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 3, 5, 5), (2, 4, 5, 5), (4, 3, 3, 3), (2, 3, 5, 5)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def separated(function: Any) -> tuple[fx.GraphModule, set[fx.Node]]:
    """Gradients as a function of an array like the source, the gradient, the filters and the source; what needs it."""
    module = make_fx(function, tracing_mode="fake")(*arrays())
    for node in module.graph.find_nodes(op="call_function", target=BOTH):
        note(node, layer="convolution", phase=Phase.GRADIENT)
    like, *_, source = module.graph.find_nodes(op="placeholder")
    needed = set[fx.Node]().union(*(needing(user, source) for user in source.users))
    separate(source, like)
    module.recompile()
    for one, other in zip(module(*arrays()), function(*arrays()), strict=True):
        assert torch.equal(one, other)
    return module, needed


@pytest.mark.parametrize(
    ("mask", "masks"),
    [
        ([True, True, False], [[True, False, False], [False, True, False]]),
        ([True, True, True], [[True, False, False], [False, True, True]]),
        ([True, False, False], [[True, False, False]]),
        ([False, True, False], [[False, True, False]]),
    ],
)
def test_the_gradient_of_a_source_reads_only_a_shape(mask: list[bool], masks: list[list[bool]]) -> None:
    def gradients(_: Any, g: Any, w: Any, x: Any) -> list[Any]:
        found = torch.ops.aten.convolution_backward(g, x, w, [4], *SETTINGS, mask)
        return [one for one, wanted in zip(found, mask, strict=True) if wanted]

    module, needed = separated(gradients)
    like, *_, source = module.graph.find_nodes(op="placeholder")
    found = module.graph.find_nodes(op="call_function", target=BOTH)
    assert [node.args[10] for node in found] == masks
    assert [node.args[1] for node in found] == [like if wanted[0] else source for wanted in masks]
    needing_values = {node.args[1] for node in needed}
    assert 0 not in needing_values and needing_values >= {index for index in (1, 2) if mask[index]}


@pytest.mark.parametrize("which", [0, 1])
def test_so_does_the_operator_for_one_gradient(which: int) -> None:
    def gradient(_: Any, g: Any, w: Any, x: Any) -> list[Any]:
        order = list((x, w)[which].stride())
        return [torch.ops.stepgraph.convolution_backward(g, x, w, None, *SETTINGS, which, order)]

    module, needed = separated(gradient)
    like, *_, source = module.graph.find_nodes(op="placeholder")
    (found,) = module.graph.find_nodes(op="call_function", target=ONE)
    assert found.args[1] is (source if which else like)
    assert needed == ({found} if which else set())


def test_an_array_that_is_also_a_gradient_is_needed() -> None:
    def gradients(like: Any, g: Any, w: Any, x: Any) -> list[Any]:
        square = w[:3, :3]
        found = torch.ops.aten.convolution_backward(x, x, square, None, *SETTINGS, [True, True, False])
        return list(found[:2])

    module, needed = separated(gradients)
    (node,) = module.graph.find_nodes(op="call_function", target=BOTH)
    assert needed == {node} and node.args[10] == [True, True, False]
