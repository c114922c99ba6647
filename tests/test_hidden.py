"""Convolutions that are hidden from PyTorch's compiler for GPUs."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.passes.hidden import hide

aten, ours = torch.ops.aten, torch.ops.stepgraph
PLAIN = [1, 1], [0, 0], [1, 1], False, [0, 0], 1


@pytest.mark.parametrize("biased", [False, True])
def test_biases_are_added_where_the_result_is_read(biased: bool) -> None:
    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [aten.convolution(x, w, b if biased else None, *PLAIN).relu()]

    arrays = torch.rand(2, 8, 4, 3).contiguous(memory_format=torch.channels_last), torch.rand(5, 8, 1, 1), torch.rand(5)
    module = make_fx(run, tracing_mode="fake")(*arrays)
    hide(module.graph)
    module.recompile()
    (node,) = module.graph.find_nodes(op="call_function", target=ours.convolution.default)
    assert node.args[2] is None
    assert len(module.graph.find_nodes(op="call_function", target=aten.add.Tensor)) == biased
    assert not module.graph.find_nodes(op="call_function", target=aten.convolution.default)
    torch.testing.assert_close(module(*arrays), run(*arrays))
