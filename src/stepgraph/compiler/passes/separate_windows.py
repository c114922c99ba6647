"""Transposed convolutions whose windows do not overlap, beside concatenations: as products over pixels.

If the stride is the size of the filters, as in the upward path of a U-Net, every pixel of the source becomes a window
of the result by itself: the result is a product, whose elements only have to be moved. The kernel that writes a
concatenation moves them anyway, and so does one that takes the gradient of a part out of that of a concatenation, which
cuDNN would not read where it is. Elsewhere cuDNN is left to move them.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from stepgraph.compiler.passes.stored import store
from stepgraph.compiler.program import call, fake, remove_dead

aten = torch.ops.aten
LAST = torch.channels_last
ALIGNED = 16  # bytes; products of other rows are slow
LARGE = 2**20  # numbers in a result; smaller ones are not worth another kernel
SOURCE, FILTERS, BIASES = range(3)  # the gradients of a convolution


def multiply_windows(graph: fx.Graph) -> None:
    """Replaces transposed convolutions whose windows do not overlap, where kernels move what they write or read."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        x, filters, _, *settings = node.args
        if _fits(node, x, filters, settings) and all(user.target is aten.cat.default for user in node.users):
            _multiply(node)
    moved = set[fx.Node]()
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        gradient, x, filters, _, *settings, mask = node.args
        is_part = not fake(gradient).is_contiguous(memory_format=LAST)
        if _fits(gradient, x, filters, settings) and is_part and not mask[BIASES]:
            moved.add(_multiply_gradient(node))
    remove_dead(graph)
    store(graph, moved)


def _fits(y: fx.Node, x: fx.Node, filters: fx.Node, settings: list[Any]) -> bool:
    """Whether a large transposed convolution in half precision, channels last, has separate windows."""
    stride, padding, dilation, transposed, more, groups = settings
    own, source = fake(filters), fake(x)
    if not transposed or groups != 1 or own.ndim != 4 or source.itemsize != 2 or fake(y).numel() < LARGE:
        return False
    separate = list(own.shape[2:]) == list(stride) and not any((*padding, *more)) and set(dilation) == {1}
    last = all(one.is_contiguous(memory_format=LAST) for one in (own, source))
    return separate and last and not any(count * own.itemsize % ALIGNED for count in own.shape[:2])


def _multiply(node: fx.Node) -> None:
    """Replaces a convolution by a product whose rows are windows."""
    given: Any = node.args
    x, filters, biases = given[:3]
    images, channels, *_ = fake(node).shape
    (height, width), (rows, columns) = fake(x).shape[2:], fake(filters).shape[2:]
    with node.graph.inserting_before(node):
        product = call(node, aten.mm.default, (_pixels(node, x), _matrix(node, filters)))
        windows = call(node, aten.view.default, (product, [images, height, width, rows, columns, channels]))
        lines = call(node, aten.permute.default, (windows, [0, 1, 3, 2, 4, 5]))
        moved = call(node, aten.clone.default, (lines,), memory_format=torch.contiguous_format)
        pixels = call(node, aten.view.default, (moved, [images, height * rows, width * columns, channels]))
        found = call(node, aten.permute.default, (pixels, [0, 3, 1, 2]))
        if biases is not None:
            found = call(node, aten.add.Tensor, (found, call(node, aten.view.default, (biases, [1, -1, 1, 1]))))
    node.replace_all_uses_with(found)


def _multiply_gradient(node: fx.Node) -> fx.Node:
    """Replaces the gradients of a convolution by products; returns what they read, the windows of the gradient."""
    gradient, x, filters, *_ = node.args
    moved = _windows(node, gradient, filters)
    with node.graph.inserting_before(node):
        windows = call(node, aten.view.default, (moved, [-1, prod(fake(moved).shape[3:])]))
    makers = {SOURCE: _source_gradient, FILTERS: _filter_gradient}
    for one in [user for user in node.users if user.users]:  # `getitem`, one per gradient
        with node.graph.inserting_before(one):
            one.replace_all_uses_with(makers[one.args[1]](one, windows, x, filters))  # type: ignore[index]
    return moved


def _windows(node: fx.Node, gradient: Any, filters: Any) -> fx.Node:
    """The windows of an array, `[images, height, width, rows and columns of a window, channels]`."""
    images, channels, height, width = fake(gradient).shape
    rows, columns = fake(filters).shape[2:]
    split = [images, height // rows, rows, width // columns, columns, channels]
    with node.graph.inserting_before(node):
        last = call(node, aten.permute.default, (gradient, [0, 2, 3, 1]))
        lines = call(node, aten.reshape.default, (last, split))
        windows = call(node, aten.permute.default, (lines, [0, 1, 3, 2, 4, 5]))
        return call(node, aten.clone.default, (windows,), memory_format=torch.contiguous_format)


def _source_gradient(node: fx.Node, windows: fx.Node, x: Any, filters: Any) -> fx.Node:
    images, channels, height, width = fake(x).shape
    turned = call(node, aten.permute.default, (_matrix(node, filters), [1, 0]))
    product = call(node, aten.mm.default, (windows, turned))
    pixels = call(node, aten.view.default, (product, [images, height, width, channels]))
    return call(node, aten.permute.default, (pixels, [0, 3, 1, 2]))


def _filter_gradient(node: fx.Node, windows: fx.Node, x: Any, filters: Any) -> fx.Node:
    inputs, outputs, rows, columns = fake(filters).shape
    turned = call(node, aten.permute.default, (_pixels(node, x), [1, 0]))
    product = call(node, aten.mm.default, (turned, windows))
    split = call(node, aten.view.default, (product, [inputs, rows, columns, outputs]))
    return call(node, aten.permute.default, (split, [0, 3, 1, 2]))


def _pixels(node: fx.Node, x: Any) -> fx.Node:
    """Images as rows, `[pixels, channels]`, where they are."""
    last = call(node, aten.permute.default, (x, [0, 2, 3, 1]))
    return call(node, aten.view.default, (last, [-1, fake(x).shape[1]]))


def _matrix(node: fx.Node, filters: Any) -> fx.Node:
    """Filters as a matrix, `[inputs, pixels of a window * outputs]`, where they are."""
    last = call(node, aten.permute.default, (filters, [0, 2, 3, 1]))
    return call(node, aten.view.default, (last, [fake(filters).shape[0], -1]))
