"""Operators that are opaque to PyTorch's compiler: it calls them unchanged and keeps their strides.

They replace operators that it miscompiles on a GPU. Each describes the bug and where it was seen; remove it when
every supported PyTorch is correct.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from stepgraph.compiler.program import call, fake, inherit, remove_dead

aten = torch.ops.aten
BIASES = 2  # the index among the gradients of a convolution


def hide(graph: fx.Graph) -> None:
    """Hides operators that PyTorch's compiler for GPUs miscompiles."""
    for node in list(graph.nodes):
        if node.target is aten.convolution.default and _may_lie_either_way(*node.args[:2]):
            _hide_convolution(node)
        elif node.target is aten.convolution_backward.default and _may_lie_either_way(*node.args[:3]):
            _hide_convolution_backward(node)
    remove_dead(graph)


def _hide_convolution(node: fx.Node) -> None:
    """Hides a convolution; kernels that read its result add the biases, which PyTorch would do in one of its own."""
    x, weights, biases, *settings = node.args
    if biases is None:
        _replace(node, "convolution", *node.args)
        return
    with node.graph.inserting_before(node):
        bare = call(node, aten.convolution.default, (x, weights, None, *settings))
        each = call(node, aten.view.default, (biases, [1, -1, 1, 1]))
        node.replace_all_uses_with(call(node, aten.add.Tensor, (bare, each)))
    _replace(bare, "convolution", *bare.args)


def _hide_convolution_backward(node: fx.Node) -> None:
    for one in list(node.users):  # `getitem`, one per gradient
        which = one.args[1]
        if which == BIASES:
            gradient = node.args[0]
            assert isinstance(gradient, fx.Node)
            others = [axis for axis in range(fake(gradient).ndim) if axis != 1]
            with node.graph.inserting_before(one):
                total = call(one, aten.sum.dim_IntList, (gradient, others))
            one.replace_all_uses_with(total)
        else:
            _replace(one, "convolution_backward", *node.args[:-1], which)


def _replace(node: fx.Node, name: str, *arguments: Any) -> None:
    """Replaces an operator with another whose result keeps the recorded layout."""
    operator = getattr(torch.ops.stepgraph, name).default
    with node.graph.inserting_before(node):
        new = node.graph.call_function(operator, (*arguments, list(fake(node).stride())))
    node.replace_all_uses_with(inherit(new, node))


def _may_lie_either_way(*nodes: Any) -> bool:
    """Whether strides do not determine if channels are first or last, as with a single channel.

    PyTorch's compiler, its fakes and cuDNN then interpret meaningless strides differently.
    """
    arrays = (fake(node) for node in nodes)
    both = torch.contiguous_format, torch.channels_last
    return any(one.ndim == 4 and all(one.is_contiguous(memory_format=order) for order in both) for one in arrays)


def _convolution(
    x: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    order: list[int],
) -> torch.Tensor:
    settings = stride, padding, dilation, transposed, output_padding, groups
    return _ordered(aten.convolution(x, weights, biases, *settings), order)


def _convolution_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    which: int,
    order: list[int],
) -> torch.Tensor:
    settings = bias_sizes, stride, padding, dilation, transposed, output_padding, groups
    mask = [which == 0, which == 1, False]
    return _ordered(aten.convolution_backward(gradient, x, weights, *settings, mask)[which], order)


def _ordered(found: torch.Tensor, order: list[int]) -> torch.Tensor:
    return found if list(found.stride()) == order else found.new_empty_strided(found.shape, order).copy_(found)


for _function in (_convolution, _convolution_backward):
    # PyTorch can derive fakes from what they call, so each operator is its own fake.
    torch.library.custom_op(f"stepgraph::{_function.__name__[1:]}", _function, mutates_args=()).register_fake(_function)
