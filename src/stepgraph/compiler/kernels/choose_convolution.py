"""Chooses the implementation of a convolution and its gradients for the memory layout of their images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, cast

import torch
from torch import fx

from stepgraph.compiler.kernels import channels_first, channels_last
from stepgraph.compiler.kernels.alternatives import CONVOLUTION_WEIGHTS, Alternative
from stepgraph.compiler.kernels.channels_last import LAST, is_last
from stepgraph.compiler.kernels.measure import FEWEST, Implementation, Pick, fastest
from stepgraph.compiler.kernels.patches import at_once, rows_at_once, windows
from stepgraph.compiler.program import fake, inherit, note

aten = torch.ops.aten
Array = torch.Tensor
FEW = 4  # channels
ENOUGH = 1 << 18  # numbers in the images used for measurement
FORWARD, DATA, LAST_SUFFIX = "convolution", "convolution data", ", channels last"
TABLES: dict[str, dict[str, Implementation]] = {  # the implementations by what is measured
    f"{name}{suffix}": kernels
    for layout, suffix in ((channels_first, ""), (channels_last, LAST_SUFFIX))
    for name, kernels in ((FORWARD, layout.FORWARD), (DATA, layout.DATA), (CONVOLUTION_WEIGHTS, layout.WEIGHTS))
}
BY_NNPACK = {"nnpack", "flipped"}


def choose_forward(node: fx.Node, pick: Pick | None = None) -> None:
    """Replaces a convolution with its fastest implementation."""
    x, w, b, stride, padding, dilation, transposed, _, groups = cast(Any, node.args)
    source, weights, bias = _array(x), _array(w), _array(b)
    if not applies(source, weights, dilation, transposed, groups):
        return
    result = _turned_around(node) or node
    layout = _layout(fake(result))
    known = forward_implementations(layout, source)
    arguments = (source[: _enough(source)], weights, bias, stride, padding)
    name = (pick or fastest)(f"{FORWARD}{_suffix(layout)}", known, arguments)
    note(node, implementation=("convolution", name))
    if name == "pytorch":
        return
    inherit(result, node, fake(result))
    result.target, result.args, result.kwargs = known[name], (x, w, b, stride, padding), {}
    note(result, workspace=workspace(layout, name, source, weights, stride, padding))
    if result is not node:
        node.graph.erase_node(node)


def _turned_around(node: fx.Node) -> fx.Node | None:
    """The operator that converts the result to channels last, if it is the only reader: some return that."""
    user = next(iter(node.users))
    turns = user.target is aten.clone.default and user.kwargs.get("memory_format") is LAST
    return user if turns and len(node.users) == 1 else None


def choose_backward(node: fx.Node, offered: Sequence[Alternative], pick: Pick | None = None) -> None:
    """Replaces each gradient of a convolution with its fastest implementation.

    Args:
        node: the operator that computes all of them.
        offered: further alternatives for the gradient of the weights.
        pick: chooses one by its name; by default, they are measured.
    """
    g, x, w, _, stride, padding, dilation, transposed, _, groups, mask = cast(Any, node.args)
    gradient, source, weights = _array(g), _array(x), _array(w)
    if not applies(source, weights, dilation, transposed, groups):
        return
    layout = _layout(gradient)
    count = _enough(source)
    some, rest = gradient[:count], (weights, stride, padding)
    of_data, suffix = data_implementations(layout, source, *rest), _suffix(layout)
    size = [count, *source.shape[1:]]
    data = (pick or fastest)(f"{DATA}{suffix}", of_data, (some, size, *rest)) if mask[0] else "pytorch"
    of_weights, arguments = weights_implementations(layout, source), (some, source[:count], *rest)
    of_weights |= {one.name: one.function for one in offered if _suits(one, (gradient, source, *rest))}
    kernel = (pick or fastest)(f"{CONVOLUTION_WEIGHTS}{suffix}", of_weights, arguments) if mask[1] else "pytorch"
    if (data, kernel) != ("pytorch", "pytorch"):
        others = (w, stride, padding)
        calls = {
            1: (of_weights[kernel], (g, x, *others)),
            0: (layout.DATA[data], (g, list(source.shape), *others)),
            2: (bias_gradient, (g,)),
        }
        found = separate(node, calls)
        if 0 in found:
            # Channels last are converted to the other layout and back, here or inside PyTorch.
            needed = gradient.nbytes + source.nbytes if layout is channels_last else 0
            note(found[0], implementation=("convolution data", data), workspace=needed)
        if 1 in found:
            needed = workspace(layout, kernel, source, weights, stride, padding)
            note(found[1], implementation=(CONVOLUTION_WEIGHTS, kernel), workspace=needed)
    else:
        note(node, implementation=("convolution gradients", "pytorch"))


def _suits(one: Alternative, arguments: Sequence[Any]) -> bool:
    return one.operation == CONVOLUTION_WEIGHTS and one.fits(arguments)


def _layout(images: Array) -> Any:
    """The implementations for images in this layout."""
    return channels_last if is_last(images) else channels_first


def _suffix(layout: ModuleType) -> str:
    return LAST_SUFFIX if layout is channels_last else ""


def separate(node: fx.Node, calls: dict[int, tuple[Implementation, tuple[Any, ...]]]) -> dict[int, fx.Node]:
    """One operator per gradient instead of one for all: what only one of them reads is freed earlier."""
    found = {}
    results = {user.args[1]: user for user in node.users}
    for index, (function, arguments) in calls.items():
        if index in results and fake(node)[index] is not None:
            with node.graph.inserting_before(node):
                found[index] = node.graph.call_function(function, arguments)
            inherit(found[index], node, fake(node)[index])
            results[index].replace_all_uses_with(found[index])
    for user in results.values():
        node.graph.erase_node(user)
    node.graph.erase_node(node)
    return found


def applies(x: Array, weights: Array, dilation: Sequence[int], transposed: bool, groups: int) -> bool:
    """Whether the alternatives support this convolution: plain images in float32, no dilation, no groups."""
    plain = not transposed and groups == 1 and all(rate == 1 for rate in dilation)
    plain = plain and x.ndim == 4 and x.dtype == weights.dtype == torch.float32
    return plain and (x.is_contiguous() or is_last(x))


def _enough(images: Array) -> int:
    """How many images to measure with: time is proportional to their number, the choice hardly depends on it."""
    return min(len(images), max(FEWEST, ENOUGH // images[0].numel()))


def _array(node: Any) -> Any:
    return None if node is None else fake(node)


def bias_gradient(g: Array) -> Array:
    """The sum over images and pixels."""
    return g.sum((0, 2, 3))


def has_nnpack() -> bool:
    """Whether PyTorch has NNPACK, which fails in a process that has not asked."""
    return torch.backends.nnpack.is_available()


def forward_implementations(layout: Any, x: Array) -> dict[str, Implementation]:
    """Implementations of the forward pass; the first is PyTorch's own."""
    usable = {"nnpack": has_nnpack(), "taps": x.shape[1] <= FEW}
    return {name: function for name, function in layout.FORWARD.items() if usable.get(name, True)}


def data_implementations(
    layout: Any, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]
) -> dict[str, Implementation]:
    """Implementations of the gradient of the source."""
    fits = all(size - 1 - added >= 0 for size, added in zip(w.shape[2:], padding, strict=True))
    turns = fits and all(step == 1 for step in stride)
    usable = {"flipped": turns and has_nnpack()}
    return {name: function for name, function in layout.DATA.items() if usable.get(name, True)}


def weights_implementations(layout: Any, x: Array) -> dict[str, Implementation]:
    """Implementations of the gradient of the weights; taps are for few channels."""
    usable = {"taps": x.shape[1] <= FEW}
    return {name: function for name, function in layout.WEIGHTS.items() if usable.get(name, True)}


def workspace(layout: Any, name: str, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> int:
    """Workspace of an implementation in bytes, besides its arguments and its result."""
    outputs, channels = w.shape[:2]
    if name == "nnpack" and layout is channels_last:  # copies of the images and the result in the other layout
        return x.nbytes + 4 * len(x) * windows(x, w, stride, padding) * outputs
    if name not in ("gemm", "taps"):
        return 0
    count, places = min(len(x), at_once(x, w, stride, padding)), windows(x, w, stride, padding)
    padded = (x.shape[2] + 2 * padding[0]) * (x.shape[3] + 2 * padding[1]) * channels
    seen = places * channels * math.prod(w.shape[2:])
    if layout is channels_last:
        return 4 * count * (seen + padded)
    # Patches coexist first with the padded image, then with the reordered result or gradient; at the end part of
    # the gradient of the weights exists twice, the second time in their layout.
    again = min(outputs, rows_at_once(w)) * w[0].numel()
    return 4 * max(count * (seen + max(padded, places * outputs)), again)
