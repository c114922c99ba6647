"""Other ways to compute a convolution and its gradients on the CPU, out of what PyTorch carries.

Which one is fastest depends on shapes and processor; `choose` measures. A way is a function with the arguments of
PyTorch's own operator, so that it can take its place in a traced graph. Adding one is a function and an entry in
`FORWARD`, `DATA` or `WEIGHTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

aten = torch.ops.aten
Array = torch.Tensor


def applies(x: Array, weights: Array, dilation: Sequence[int], transposed: bool, groups: int) -> bool:
    """Whether the other ways compute this convolution: plain images in float32, no dilation, no groups."""
    plain = not transposed and groups == 1 and all(rate == 1 for rate in dilation)
    return plain and x.ndim == 4 and x.dtype == weights.dtype == torch.float32 and x.is_contiguous()


# Forward: functions of (x, weights, biases, stride, padding)


def _onednn(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    return aten.convolution(x, w, b, stride, padding, [1, 1], False, [0, 0], 1)


def _nnpack(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    return aten._nnpack_spatial_convolution(x, w, b, padding, stride)


def _gemm(x: Array, w: Array, b: Array | None, stride: Sequence[int], padding: Sequence[int]) -> Array:
    outputs, _, height, width = w.shape
    rows, shape = _patches(x, height, width, stride, padding)
    flat = w.permute(2, 3, 1, 0).reshape(-1, outputs)
    y = rows @ flat if b is None else torch.addmm(b, rows, flat)
    return y.view(*shape, outputs).permute(0, 3, 1, 2).contiguous()


# Gradient of the source: functions of (gradient, x, weights, stride, padding)


def _data_onednn(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
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


def _weights_onednn(g: Array, x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
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


Way = Callable[..., Any]
FORWARD: dict[str, Way] = {"onednn": _onednn, "nnpack": _nnpack, "gemm": _gemm}
DATA: dict[str, Way] = {"onednn": _data_onednn, "native": _data_native, "flipped": _data_flipped}
WEIGHTS: dict[str, Way] = {"onednn": _weights_onednn, "gemm": _weights_gemm}


def forward_ways() -> dict[str, Way]:
    """Ways for the forward pass; the first is PyTorch's own."""
    return FORWARD if torch.backends.nnpack.is_available() else {k: v for k, v in FORWARD.items() if k != "nnpack"}


def data_ways(w: Array, stride: Sequence[int], padding: Sequence[int]) -> dict[str, Way]:
    """Ways for the gradient of the source."""
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
