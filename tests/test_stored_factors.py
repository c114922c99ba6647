"""Fused steps on a GPU combine sums over a batch once per channel, and not for every element."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.compiler.kernels import batch_norm
from stepgraph.compiler.passes import stored
from stepgraph.compiler.program import Phase, fake, note

ours = torch.ops.stepgraph
IMAGES = 8, 16, 96, 64  # 1.5 MiB: kernels read them from memory
Arrays = tuple[torch.Tensor, ...]


def lowered(function: object, *arrays: torch.Tensor) -> fx.GraphModule:
    """What the compiler gets, after the pass; it computes the same."""
    module = make_fx(function, tracing_mode="fake")(*arrays)
    for node in module.graph.nodes:
        if node.op == "call_function":
            note(node, layer="layer", phase=Phase.GRADIENT)
    wanted = module(*arrays)
    stored.store_factors(module.graph)
    module.recompile()
    for found, one in zip(module(*arrays), wanted, strict=True):
        assert torch.equal(found, one)
    return module


def written(module: fx.GraphModule) -> list[fx.Node]:
    return module.graph.find_nodes(op="call_function", target=ours.written.default)


def drawn() -> Arrays:
    generator = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(IMAGES, generator=generator).bfloat16() for _ in range(2))
    last = torch.channels_last
    return dy.contiguous(memory_format=last), x.contiguous(memory_format=last), torch.rand(16, generator=generator)


def test_factors_of_a_gradient_are_stored() -> None:
    def gradient(dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor) -> Arrays:
        _, mean, inverse = batch_norm.normalized_by_sums(x, gamma, None, None, None, True, 0.0, 1e-5)
        given = gamma, None, None, mean, inverse, True, 1e-5, [True, True, False]
        return batch_norm.gradient_by_factors(dy, x, *given)[:2]

    module = lowered(gradient, *drawn())
    found = written(module)
    assert all(fake(node).numel() == 16 for node in found)
    (output,) = module.graph.find_nodes(op="output")
    pending, read = [output.args[0][0]], set[fx.Node]()  # what the kernel of the gradient reads
    while pending:
        for source in pending.pop().all_input_nodes:
            if source.op == "placeholder" or source in found:
                read.add(source)
            else:
                pending.append(source)
    arrays = [one for one in read if one.op == "placeholder"]
    assert len(arrays) == 2 and len(read) == 2 + 3  # `dy` and `x`, with scale, slope and offset


def test_numbers_of_one_array_are_computed_where_they_are_read() -> None:
    def centered(dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor) -> Arrays:
        return (x.float() - x.float().mean([0, 2, 3], keepdim=True) * 2, dy * gamma.exp().view(1, -1, 1, 1))

    assert not written(lowered(centered, *drawn()))


def test_numbers_of_rows_stay_in_the_kernel_of_their_sums() -> None:
    def by_rows(dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor) -> Arrays:
        rows = x.permute(0, 2, 3, 1).float()
        scale = torch.rsqrt((rows * rows).sum(-1, keepdim=True)) * rows.sum(-1, keepdim=True)
        return (rows * scale,)

    assert not written(lowered(by_rows, *drawn()))


def test_what_only_small_results_read_is_not_stored() -> None:
    def small(dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor) -> Arrays:
        return (x.float().sum([0, 2, 3]) * gamma + gamma,)

    assert not written(lowered(small, *drawn()))
