"""Other ways to compute a convolution and its gradients out of what PyTorch carries.

Which one is fastest depends on shapes and processor; `measure` tells. A way is a function with the arguments of
PyTorch's own operator, so that it can take its place in a traced graph. Adding one is a function and an entry in
`FORWARD`, `DATA` or `WEIGHTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx

from stepgraph.compiler.kernels.measure import WAY, fastest

aten = torch.ops.aten
Array = torch.Tensor
Way = Callable[..., Any]
FEW = 4  # channels
PATCHES = 1 << 19  # numbers
FEWEST, ENOUGH = 8, 1 << 18  # images, and numbers in them, that are measured with


def choose_forward(node: fx.Node) -> None:
    """Puts the fastest way in the place of a convolution."""
    x, w, b, stride, padding, dilation, transposed, _, groups = cast(Any, node.args)
    source, weights, bias = _array(x), _array(w), _array(b)
    if not applies(source, weights, dilation, transposed, groups):
        return
    arguments = (source[: _enough(source)], weights, bias, stride, padding)
    way = fastest("convolution", forward_ways(source), arguments)
    node.meta[WAY] = ("convolution", way)
    if way != "pytorch":
        node.target, node.args = FORWARD[way], (x, w, b, stride, padding)
        node.meta["workspace"] = workspace(way, source, weights, stride, padding)


def choose_backward(node: fx.Node) -> None:
    """Puts the fastest ways in the place of a convolution's gradients, each in its own."""
    g, x, w, _, stride, padding, dilation, transposed, _, groups, mask = cast(Any, node.args)
    gradient, source, weights = _array(g), _array(x), _array(w)
    if not applies(source, weights, dilation, transposed, groups):
        return
    count = _enough(source)
    some, rest = gradient[:count], (weights, stride, padding)
    of_data = data_ways(source, *rest)
    data = fastest("convolution data", of_data, (some, [count, *source.shape[1:]], *rest)) if mask[0] else "pytorch"
    kernel = fastest("convolution weights", WEIGHTS, (some, source[:count], *rest)) if mask[1] else "pytorch"
    if (data, kernel) != ("pytorch", "pytorch"):
        others = (w, stride, padding)
        calls = {
            1: (WEIGHTS[kernel], (g, x, *others)),
            0: (DATA[data], (g, list(source.shape), *others)),
            2: (_bias_gradient, (g,)),
        }
        found = _separate(node, calls)
        if 0 in found:
            found[0].meta[WAY] = ("convolution data", data)
        if 1 in found:
            found[1].meta[WAY] = ("convolution weights", kernel)
            found[1].meta["workspace"] = workspace(kernel, source, weights, stride, padding)
    else:
        node.meta[WAY] = ("convolution gradients", "pytorch")


def _separate(node: fx.Node, calls: dict[int, tuple[Way, tuple[Any, ...]]]) -> dict[int, fx.Node]:
    """One operator for each gradient instead of one for all: what only one of them reads is freed earlier."""
    found = {}
    results = {user.args[1]: user for user in node.users}
    for index, (way, arguments) in calls.items():
        if index in results and node.meta["val"][index] is not None:
            with node.graph.inserting_before(node):
                found[index] = node.graph.call_function(way, arguments)
            found[index].meta = dict(node.meta) | {"val": node.meta["val"][index]}
            results[index].replace_all_uses_with(found[index])
    for user in results.values():
        node.graph.erase_node(user)
    node.graph.erase_node(node)
    return found


def applies(x: Array, weights: Array, dilation: Sequence[int], transposed: bool, groups: int) -> bool:
    """Whether the other ways compute this convolution: plain images in float32, no dilation, no groups.

    On a GPU cuDNN is asked to choose among its own; only images of few channels, which leave its matrix units idle,
    are worth another way.
    """
    plain = not transposed and groups == 1 and all(rate == 1 for rate in dilation)
    plain = plain and x.ndim == 4 and x.dtype == weights.dtype == torch.float32
    if x.is_cuda:
        return plain and x.shape[1] <= FEW
    return plain and x.is_contiguous()


def _enough(images: Array) -> int:
    """How many images to measure with: the time goes with their number, the fastest way hardly does."""
    return len(images) if images.is_cuda else min(len(images), max(FEWEST, ENOUGH // images[0].numel()))


def _array(node: Any) -> Any:
    return None if node is None else node.meta["val"]


# Forward: functions of (x, weights, biases, stride, padding)


def _pytorch(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    return aten.convolution(x, w, b, stride, padding, [1, 1], False, [0, 0], 1)


def _nnpack(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    return aten._nnpack_spatial_convolution(x, w, b, padding, stride)


def _gemm(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    outputs, _, height, width = w.shape
    flat = w.permute(2, 3, 1, 0).reshape(-1, outputs)
    found = None
    for start, images in _portions(x, _at_once(x, w, stride, padding)):
        rows, (n, *extents) = _patches(images, height, width, stride, padding)
        y = (rows @ flat if b is None else torch.addmm(b, rows, flat)).view(n, *extents, outputs).permute(0, 3, 1, 2)
        if x.is_cuda:  # all at once, and channels last
            return y
        found = x.new_empty(len(x), outputs, *extents) if found is None else found
        found[start : start + n] = y
        del rows, y  # before the next ones are made
    assert found is not None
    return found


# Gradient of the source: functions of (gradient, the source's extents, weights, stride, padding)


def _data_pytorch(g: Array, size: Sequence[int], w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    mask = [True, False, False]
    return aten.convolution_backward(g, _shaped(g, size), w, None, stride, padding, [1, 1], False, [0, 0], 1, mask)[0]


def _data_native(g: Array, size: Sequence[int], w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    mask, kernel = [True, False, False], w.shape[2:]
    return aten._slow_conv2d_backward.output_mask(g.contiguous(), _shaped(g, size), w, kernel, stride, padding, mask)[0]


def _data_flipped(g: Array, size: Sequence[int], w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    """With stride 1, the gradient is a convolution with the kernel turned around."""
    turned = w.flip(2, 3).transpose(0, 1).contiguous()
    rest = [size - 1 - added for size, added in zip(w.shape[2:], padding, strict=True)]
    return aten._nnpack_spatial_convolution(g.contiguous(), turned, None, rest, [1, 1])


def _shaped(g: Array, size: Sequence[int]) -> Array:
    """Stands for a source of which only the extents are read; it has no memory to speak of."""
    return g.new_empty(1).expand(*size)


def _bias_gradient(g: Array) -> Array:
    return g.sum((0, 2, 3))


# Gradient of the weights: functions of (gradient, x, weights, stride, padding)


def _weights_pytorch(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    mask = [False, True, False]
    return aten.convolution_backward(g, x, w, None, stride, padding, [1, 1], False, [0, 0], 1, mask)[1]


def _weights_gemm(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    outputs, inputs, height, width = w.shape
    total = None
    for start, images in _portions(x, _at_once(x, w, stride, padding)):
        rows, _ = _patches(images, height, width, stride, padding)
        by_output = g[start : start + len(images)].permute(0, 2, 3, 1).reshape(-1, outputs).t()
        total = by_output @ rows if total is None else total.addmm_(by_output, rows)
        del rows, by_output  # before the next ones are made
    assert total is not None
    if x.is_cuda:
        return total.view(outputs, height, width, inputs).permute(0, 3, 1, 2).contiguous()
    for some in total.split(_rows_at_once(w)):  # channels first, row by row in place
        some.copy_(some.view(len(some), -1, inputs).transpose(1, 2).reshape(len(some), -1))
    return total.view(w.shape)


def _rows_at_once(w: Array) -> int:
    return max(1, PATCHES // w[0].numel())


def _portions(x: Array, count: int) -> Iterator[tuple[int, Array]]:
    """`count` images at a time, and the number of the first."""
    for start in range(0, len(x), count):
        yield start, x[start : start + count]


def _at_once(x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> int:
    """How many images' patches are made at once: what fits into a cache, and a bound on the memory it takes."""
    if x.is_cuda:
        return len(x)
    return max(1, PATCHES // (_windows(x, w, stride, padding) * w[0].numel()))


def _windows(x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> int:
    """How many places of an image the kernel visits."""
    sizes = zip(x.shape[2:], w.shape[2:], stride, padding, strict=True)
    rows, columns = ((extent + 2 * added - size) // step + 1 for extent, size, step, added in sizes)
    return rows * columns


def _patches(
    x: Array, height: int, width: int, stride: Sequence[int], padding: Sequence[int]
) -> tuple[Array, tuple[int, int, int]]:
    """What each window sees, a row each: `[n * rows * columns, height * width * channels]`; and (n, rows, columns)."""
    n, channels = x.shape[:2]
    (top, left), (down, right) = padding, stride
    padded = F.pad(x.permute(0, 2, 3, 1), (0, 0, left, left, top, top)).contiguous()
    _, h, w, _ = padded.shape
    rows, columns = (h - height) // down + 1, (w - width) // right + 1
    size, strides = (n, rows, columns, height, width, channels), (h * w, down * w, right, w, 1)
    seen = padded.as_strided(size, (*(step * channels for step in strides), 1))
    return seen.reshape(n * rows * columns, -1), (n, rows, columns)


FORWARD: dict[str, Way] = {"pytorch": _pytorch, "nnpack": _nnpack, "gemm": _gemm}
DATA: dict[str, Way] = {"pytorch": _data_pytorch, "native": _data_native, "flipped": _data_flipped}
WEIGHTS: dict[str, Way] = {"pytorch": _weights_pytorch, "gemm": _weights_gemm}


def forward_ways(x: Array) -> dict[str, Way]:
    """Ways for the forward pass; the first is PyTorch's own."""
    has_nnpack = not x.is_cuda and torch.backends.nnpack.is_available()
    return FORWARD if has_nnpack else {name: way for name, way in FORWARD.items() if name != "nnpack"}


def data_ways(x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> dict[str, Way]:
    """Ways for the gradient of the source."""
    if x.is_cuda:
        return {"pytorch": _data_pytorch}
    fits = all(size - 1 - added >= 0 for size, added in zip(w.shape[2:], padding, strict=True))
    turns = fits and all(step == 1 for step in stride) and torch.backends.nnpack.is_available()
    return DATA if turns else {name: way for name, way in DATA.items() if name != "flipped"}


def workspace(way: str, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> int:
    """Bytes a way needs beside its arguments and its result."""
    if way != "gemm":
        return 0
    outputs, channels = w.shape[:2]
    count, windows = min(len(x), _at_once(x, w, stride, padding)), _windows(x, w, stride, padding)
    padded = (x.shape[2] + 2 * padding[0]) * (x.shape[3] + 2 * padding[1]) * channels
    # Patches live together with the padded image first, then with the reordered result or gradient; at the end some of
    # the gradient of the weights is there twice, the second time in their order.
    again = w.numel() if x.is_cuda else min(outputs, _rows_at_once(w)) * w[0].numel()
    return 4 * max(count * (windows * w[0].numel() + max(padded, windows * outputs)), again)
