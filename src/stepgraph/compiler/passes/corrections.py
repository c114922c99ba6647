"""Works around PyTorch operators that compute wrong numbers, crash, print errors or keep memory for some arrays.

Each entry describes the bug and where it was seen; remove it when every supported PyTorch is correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.kernels import emulated, half
from stepgraph.compiler.program import fake, fakes, inherit, same_order
from stepgraph.system.torch_private import schema

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, *half.RECURRENT}
LOSSES = {
    aten.binary_cross_entropy.default,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
}
REDUCTIONS = {1: aten.mean.default, 2: aten.sum.default}  # by PyTorch's number; 0 reduces nothing


def correct(graph: fx.Graph, device: torch.device) -> None:
    """Makes operators that fail for some arrays read copies in another layout or type, and divides losses."""
    for node in list(graph.nodes):
        if node.target in LOSSES:
            _divide_loss(node)
        elif node.target is aten.avg_pool2d_backward.default and device.type == "cuda":
            _correct_average(node)
        elif node.target is aten.native_batch_norm_backward.default and device.type == "cpu":
            _correct_normalization(node)
        elif node.target is aten.native_group_norm_backward.default and device.type == "cpu":
            _correct_groups(node)
        elif node.target in PRODUCTS and device.type == "cpu":
            _correct_product(node)
        elif node.target is aten.convolution.default and device.type == "cpu":
            _correct_convolution(node)
        elif node.target is aten.convolution_backward.default and device.type == "cpu":
            _correct_filters(node)


def _correct_average(node: fx.Node) -> None:
    """CUDA, PyTorch 2.11: with channels last and any padding, gradients belong to other pixels."""
    images, padding = node.args[1], node.args[4]
    assert isinstance(images, fx.Node)
    assert isinstance(padding, list | tuple)
    if any(padding) and fake(images).is_contiguous(memory_format=torch.channels_last):
        _read_in_order(node, 1)


def _correct_normalization(node: fx.Node) -> None:
    """CPU, PyTorch 2.13: if a dimension is 1, two arrays with different strides are both read with one's strides.

    That dimension's own stride, which no element depends on, decides which one's.
    """
    gradient, images = node.args[:2]
    assert isinstance(gradient, fx.Node)
    assert isinstance(images, fx.Node)
    if 1 in fake(images).shape and not same_order(fake(gradient), fake(images)):
        _read_in_order(node, 0)
        _read_in_order(node, 1)


def _correct_groups(node: fx.Node) -> None:
    """CPU, PyTorch 2.11 to 2.13: reads arrays in other orders as if they were in that of the images.

    Both with channels last is right if the source's gradient is wanted, and crashes if it is not.
    """
    wanted = node.args[9]
    assert isinstance(wanted, list | tuple)
    arrays = [fake(source) for source in node.args[:2] if isinstance(source, fx.Node)]
    if wanted[0] and all(array.is_contiguous(memory_format=torch.channels_last) for array in arrays):
        return
    for position, array in enumerate(arrays):
        # Strides of dimensions of size 1 count too: the kernel takes one channel for channels last.
        if array.stride() != torch.empty(array.shape, device="meta").stride():
            _read_in_order(node, position)


def _correct_product(node: fx.Node) -> None:
    """ARM processors without bfloat16, PyTorch 2.11 to 2.13: prints the stack of a failure and switches oneDNN off.

    Both happen only for some sizes and layouts, but PyTorch's other way is hundreds of times slower than float32.
    """
    kind = fakes(node)[0].dtype
    if kind in half.HALF and emulated.fails(kind):
        half.compute_in_float32(node)


def _correct_filters(node: fx.Node) -> None:
    """x86 processors with bfloat16, PyTorch 2.13: where filters read only padding, their gradient is not written.

    The same happens for images of one channel that are narrower than the stride.
    """
    gradient, images, filters = (fake(one) for one in node.args[:3] if isinstance(one, fx.Node))
    strides, paddings, dilations, transposed = cast(Any, node.args[4:8])
    if images.dtype is not torch.bfloat16:
        return
    small, large = (images, gradient) if transposed else (gradient, images)
    settings = zip(strides, paddings, dilations, strict=True)
    unread = any(map(_reads_only_padding, large.shape[2:], small.shape[2:], filters.shape[2:], settings))
    narrow = images.shape[1] == 1 and any(map(int.__lt__, images.shape[2:], strides))
    if unread or narrow or (transposed and _is_unwritten(small.shape[2:], filters.shape[2:], strides)):
        half.compute_in_float32(node)


def _correct_convolution(node: fx.Node) -> None:
    """x86 processors with AMX, PyTorch 2.13: of some bfloat16 convolutions, parts of the result are not written.

    A transposed convolution computes the gradient of its source in the same way.
    """
    images, filters = (fake(one) for one in node.args[:2] if isinstance(one, fx.Node))
    strides, transposed = cast(Any, node.args[3]), node.args[6]
    is_affected = images.dtype is torch.bfloat16 and not transposed
    if is_affected and _is_unwritten(fake(node).shape[2:], filters.shape[2:], strides):
        half.compute_in_float32(node)


def _is_unwritten(places: Sequence[int], taps: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether that was seen for such shapes: volumes, and results of one column and several rows.

    Args:
        places: how often a filter is applied along each axis.
        taps: the numbers of a filter along each axis.
        strides: its strides.
    """
    one_column = len(places) == 2 and places[1] == 1 < places[0] and taps[1] > 1 and strides[1] > 1
    return (one_column or len(places) == 3) and _has_amx()


@cache
def _has_amx() -> bool:
    if hasattr(torch.cpu, "get_capabilities"):
        return bool(torch.cpu.get_capabilities().get("amx_tile", False))
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _reads_only_padding(extent: int, count: int, taps: int, settings: tuple[int, int, int]) -> bool:
    """Whether one of the taps of a filter along an axis is never at a pixel.

    Args:
        extent: the pixels.
        count: the places of the filter.
        taps: the numbers of the filter.
        settings: its stride, padding and dilation.
    """
    stride, padding, dilation = settings
    starts = range(-padding, -padding + count * stride, stride)
    return any(all(not 0 <= start + tap * dilation < extent for start in starts) for tap in range(taps))


def _divide_loss(node: fx.Node) -> None:
    """All devices, PyTorch 2.11 to 2.13: the reduced loss keeps the memory of the losses of all elements.

    As an operator of its own, the reduction writes to other memory, and computes the same.
    """
    declared = schema(node.target).arguments  # type: ignore[arg-type]
    given = [node.kwargs.get(one.name, one.default_value) for one in declared]
    given[: len(node.args)] = node.args
    place = [one.name for one in declared].index("reduction")
    reduction = REDUCTIONS.get(given[place])
    if reduction is None:
        return
    given[place] = 0
    with node.graph.inserting_before(node):
        elements = node.graph.call_function(node.target, tuple(given))  # type: ignore[arg-type]
    with fake(node).fake_mode:
        inherit(elements, node, node.target(*fx.map_arg(given, fake)))  # type: ignore[operator]
    node.target, node.args, node.kwargs = reduction, (elements,), {}


def _read_in_order(node: fx.Node, position: int) -> None:
    """Makes an operator read a copy of one argument, with its last dimension innermost."""
    source = node.args[position]
    assert isinstance(source, fx.Node)
    array = fake(source)
    with node.graph.inserting_before(node):
        copy = node.graph.call_function(aten.clone.default, (source,), {"memory_format": torch.contiguous_format})
    with array.fake_mode:
        val = torch.empty(array.shape, dtype=array.dtype, device=array.device)
    node.update_arg(position, inherit(copy, node, val))
