"""Other ways to compute a convolution and its gradients out of what PyTorch carries.

Which one is fastest depends on shapes and processor; `measure` tells. A way is a function with the arguments of
PyTorch's own operator, so that it can take its place in a traced graph. Adding one is a function and an entry in
`FORWARD`, `DATA` or `WEIGHTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx

from stepgraph.compiler.kernels.measure import fastest

aten = torch.ops.aten
Array = torch.Tensor
Way = Callable[..., Any]
FEW = 4  # channels
FEWEST, ENOUGH = 8, 1 << 18  # images, and numbers in them, that are measured with


def choose_forward(node: fx.Node) -> None:
    """Puts the fastest way in the place of a convolution."""
    x, w, b, stride, padding, dilation, transposed, _, groups = cast(Any, node.args)
    source, weights, bias = _array(x), _array(w), _array(b)
    if not applies(source, weights, dilation, transposed, groups):
        return
    arguments = (source[: _enough(source)], weights, bias, stride, padding)
    way = fastest("convolution", forward_ways(source), arguments)
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
    arguments = (gradient[:count], source[:count], weights, stride, padding)
    of_data = data_ways(source, weights, stride, padding)
    data = fastest("convolution data", of_data, arguments) if mask[0] else "pytorch"
    kernel = fastest("convolution weights", WEIGHTS, arguments) if mask[1] else "pytorch"
    if (data, kernel) != ("pytorch", "pytorch"):
        node.target, node.args = _backward(data, kernel), (g, x, w, stride, padding, mask)
        node.meta["workspace"] = workspace(kernel, source, weights, stride, padding)


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


@cache
def _backward(data: str, kernel: str) -> Way:
    """All gradients of a convolution, each in its own way."""
    data_way, weights_way = DATA[data], WEIGHTS[kernel]

    def backward(
        g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int], mask: Sequence[bool]
    ) -> list[Array | None]:
        return [
            data_way(g, x, w, stride, padding) if mask[0] else None,
            weights_way(g, x, w, stride, padding) if mask[1] else None,
            g.sum((0, 2, 3)) if mask[2] else None,
        ]

    backward.__name__ = backward.__qualname__ = f"backward_{data}_{kernel}"
    return backward


def _array(node: Any) -> Any:
    return None if node is None else node.meta["val"]


# Forward: functions of (x, weights, biases, stride, padding)


def _pytorch(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    return aten.convolution(x, w, b, stride, padding, [1, 1], False, [0, 0], 1)


def _nnpack(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    return aten._nnpack_spatial_convolution(x, w, b, padding, stride)


def _gemm(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    outputs, _, height, width = w.shape
    rows, shape = _patches(x, height, width, stride, padding)
    flat = w.permute(2, 3, 1, 0).reshape(-1, outputs)
    y = rows @ flat if b is None else torch.addmm(b, rows, flat)
    images = y.view(*shape, outputs).permute(0, 3, 1, 2)
    return images if x.is_cuda else images.contiguous()  # CUDA has channels last everywhere


# Gradient of the source: functions of (gradient, x, weights, stride, padding)


def _data_pytorch(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    mask = [True, False, False]
    return aten.convolution_backward(g, x, w, None, stride, padding, [1, 1], False, [0, 0], 1, mask)[0]


def _data_native(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    mask = [True, False, False]
    return aten._slow_conv2d_backward.output_mask(g.contiguous(), x, w, w.shape[2:], stride, padding, mask)[0]


def _data_flipped(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    """With stride 1, the gradient is a convolution with the kernel turned around."""
    turned = w.flip(2, 3).transpose(0, 1).contiguous()
    rest = [size - 1 - added for size, added in zip(w.shape[2:], padding, strict=True)]
    return aten._nnpack_spatial_convolution(g.contiguous(), turned, None, rest, [1, 1])


# Gradient of the weights: functions of (gradient, x, weights, stride, padding)


def _weights_pytorch(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    mask = [False, True, False]
    return aten.convolution_backward(g, x, w, None, stride, padding, [1, 1], False, [0, 0], 1, mask)[1]


def _weights_gemm(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    outputs, inputs, height, width = w.shape
    rows, _ = _patches(x, height, width, stride, padding)
    product = g.permute(0, 2, 3, 1).reshape(-1, outputs).t() @ rows
    return product.view(outputs, height, width, inputs).permute(0, 3, 1, 2).contiguous()


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
    outputs, channels, height, width = w.shape
    h, wide = x.shape[2] + 2 * padding[0], x.shape[3] + 2 * padding[1]
    windows = ((h - height) // stride[0] + 1) * ((wide - width) // stride[1] + 1)
    # Patches live together with the padded image first, then with the reordered result or gradient.
    return 4 * x.shape[0] * (windows * height * width * channels + max(h * wide * channels, windows * outputs))
