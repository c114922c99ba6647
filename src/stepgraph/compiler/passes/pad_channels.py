"""Pads the results of convolutions in half precision, so that every pixel begins at a multiple of 16 bytes.

A GPU's matrix units are fed 16 bytes at a time. The 21 classes of a pixel take 42, so the last convolution of a U-Net
loads its gradient number by number, at less than half of the memory's speed. Here the filters are padded with zeros:
the convolution leaves unused channels behind those of each pixel, kernels skip them, and the kernel that computes the
gradient writes zeros there. Zeros add nothing, so the numbers are the same.

Only results that generated kernels read are padded, and gradients that these compute: others would have to be copied.
Where a cross entropy does both, `pad_predictions.py` has padded it already.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.passes import hidden  # noqa: F401  defines the operators
from stepgraph.compiler.passes.absorbed import is_absorbed, is_reduction, made, users_of
from stepgraph.compiler.program import call, fake, remove_dead, set_fake, update_views

aten, ours = torch.ops.aten, torch.ops.stepgraph
ALIGNED = 16  # bytes that matrix units read at a time
LARGE = 2**20  # numbers; convolutions of fewer take no longer than the kernel that pads their filters
RESULTS = {aten.convolution.default, ours.convolution.default}
_GRADIENTS = {aten.convolution_backward.default, ours.convolution_backward.default}
_OTHERS = [0, 2, 3]  # all axes but that of the channels
SOURCE = 0  # the index among the gradients of a convolution; those of filters and biases have a padded axis


def pad_channels(graph: fx.Graph) -> None:
    """Pads results and gradients of convolutions, in place."""
    padded: dict[fx.Node, fx.Node] = {}  # filters, by those without padding
    for node in list(graph.nodes):
        if node.target in RESULTS and is_unaligned(node, *node.args[:2]) and _is_read_by_kernels(node):
            _pad_result(node, padded)
    for gradient in dict.fromkeys(node.args[0] for node in graph.nodes if node.target in _GRADIENTS):
        readers = convolutions(gradient)
        bare = not any(map(_sums_biases, readers)) and are_unaligned(readers)
        if bare and _is_computed_for_these(gradient):
            _pad_gradient(gradient, padded)
    remove_dead(graph)
    graph.lint()


def are_unaligned(readers: list[fx.Node]) -> bool:
    """Whether the gradients of these convolutions, all with the same filters, are to be padded."""
    return all(is_unaligned(one, *one.args[1:3]) for one in readers) and len({one.args[2] for one in readers}) == 1


def is_unaligned(node: fx.Node, x: Any, filters: Any) -> bool:
    """Whether the result of a large convolution in half precision is not aligned, although its source is."""
    given: Any = node.args
    y, (transposed, _, groups) = (node, given[6:9]) if node.target in RESULTS else (given[0], given[7:10])
    images = fake(y), fake(x)
    last = all(one.ndim == 4 and one.is_contiguous(memory_format=torch.channels_last) for one in images)
    half = fake(x).is_floating_point() and fake(x).itemsize == 2
    if not last or not half or transposed or groups != 1:
        return False
    return bool(missing(filters)) and not fake(x).shape[1] % _unit(x) and images[0].numel() >= LARGE


def _unit(node: fx.Node) -> int:
    return ALIGNED // fake(node).itemsize


def missing(filters: fx.Node) -> int:
    """How many filters of zeros make their number a multiple of what is aligned."""
    return -len(fake(filters)) % _unit(filters)


def _sums_biases(node: fx.Node) -> bool:
    masks: Any = node.args[10]
    return node.target is aten.convolution_backward.default and masks[2]


def convolutions(gradient: fx.Node) -> list[fx.Node]:
    """The convolutions that this is the gradient of: where it is read for their sources or filters."""
    return [user for user in gradient.users if user.target in _GRADIENTS and user.args[0] is gradient]


def _is_read_by_kernels(node: fx.Node) -> bool:
    """Whether generated kernels read a result; what else reads it would need a copy."""
    return all(is_absorbed(user) or user.target is aten.gather.default for user in users_of(node))


def _is_computed_for_these(gradient: Any) -> bool:
    """Whether a generated kernel computes a gradient, and only convolutions and sums of biases read it."""
    source, known = made(gradient), {*convolutions(gradient), *sums(gradient)}
    computed = source.op == "call_function" and is_absorbed(source) and not is_reduction(source)
    return computed and users_of(source) <= known


def sums(gradient: fx.Node) -> list[fx.Node]:
    """The sums over all pixels."""
    found = (user for user in gradient.users if user.target is aten.sum.dim_IntList and not user.kwargs)
    return [one for one in found if one.args[1:] == (_OTHERS,)]


def _pad_result(node: fx.Node, padded: dict[fx.Node, fx.Node]) -> None:
    _, _, biases, *_ = node.args
    count = fake(node).shape[1]
    with node.graph.inserting_before(node):
        whole = bare_result(node, padded)
        part = call(node, aten.slice.Tensor, (whole, 1, 0, count))
        if biases is not None:
            each = call(node, aten.view.default, (biases, [1, count, 1, 1]))
            part = call(node, aten.add.Tensor, (part, each))
    node.replace_all_uses_with(part)
    update_views(part)


def bare_result(node: fx.Node, padded: dict[fx.Node, fx.Node]) -> fx.Node:
    """The result of a convolution with further filters of zeros, and without biases.

    Args:
        node: the convolution without padding; the other one comes in front of it.
        padded: filters with padding, by those without; these are added.
    """
    x, filters, _, *settings = node.args
    more = padded_filters(filters, padded)
    with node.graph.inserting_before(node):
        return call(node, node.target, (x, more, None, *_reordered(node, settings, len(fake(more)))))


def _reordered(node: fx.Node, settings: list[Any], count: int) -> list[Any]:
    """The settings of a convolution with so many results; an operator of ours ends with their strides."""
    if node.target is not ours.convolution.default:
        return settings
    images, _, *pixels = fake(node).shape
    order = torch.empty(images, count, *pixels, device="meta", memory_format=torch.channels_last).stride()
    return [*settings[:-1], list(order)]


def padded_filters(filters: Any, padded: dict[fx.Node, fx.Node]) -> fx.Node:
    """Filters with zeros behind them."""
    if filters not in padded:
        first = min(filters.users)
        with first.graph.inserting_before(first):
            widths = [0, 0] * (fake(filters).ndim - 1) + [0, missing(filters)]
            padded[filters] = call(first, aten.constant_pad_nd.default, (filters, widths))
    return padded[filters]


def _pad_gradient(gradient: fx.Node, padded: dict[fx.Node, fx.Node]) -> None:
    """Lets convolutions and sums read a gradient with channels of zeros."""
    filters: Any = convolutions(gradient)[0].args[2]
    with gradient.graph.inserting_after(gradient):
        whole = call(gradient, aten.constant_pad_nd.default, (gradient, [0, 0, 0, 0, 0, missing(filters)]))
    with fake(whole).fake_mode:  # an array with one channel has both layouts, and padded it would have the other one
        set_fake(whole, torch.empty_like(fake(whole), memory_format=torch.channels_last))
    read_padded(gradient, whole, padded)


def read_padded(gradient: fx.Node, whole: fx.Node, padded: dict[fx.Node, fx.Node]) -> None:
    """Lets convolutions and sums read a padded gradient.

    Args:
        gradient: without padding.
        whole: with it.
        padded: filters with padding, by those without.
    """
    readers = convolutions(gradient)
    more = padded_filters(readers[0].args[2], padded)
    for one in sums(gradient):
        with one.graph.inserting_before(one):
            total = call(one, one.target, (whole, *one.args[1:]))
            one.replace_all_uses_with(call(one, aten.slice.Tensor, (total, 0, 0, fake(gradient).shape[1])))
    for one in readers:
        _read_padded(one, whole, more)


def _read_padded(node: fx.Node, gradient: fx.Node, filters: fx.Node) -> None:
    """Lets the gradients of one convolution be computed from padded ones."""
    _, x, before, biases, *settings = node.args
    width = None if biases is None else [len(fake(filters))]
    with node.graph.inserting_before(node):
        new = call(node, node.target, (gradient, x, filters, width, *settings))
    alone = node.target is ours.convolution_backward.default
    for one in [node] if alone else [user for user in node.users if user.users]:
        which = settings[-2] if alone else one.args[1]
        with node.graph.inserting_before(one):
            found = new if alone else call(one, getitem, (new, which))
            if which != SOURCE:
                found = call(one, aten.slice.Tensor, (found, 0, 0, len(fake(before))))  # type: ignore[arg-type]
        one.replace_all_uses_with(found)
