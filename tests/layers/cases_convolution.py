"""Rows of the conformance table: convolutions of every type, policy, stride, dilation and grouping."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from stepgraph.errors import DataTypeError, ShapeError
from stepgraph.layers.convolution import ConvolutionDescriptor, ConvolutionLayer, ConvolutionType
from stepgraph.tensors.tensor import Tensor
from stepgraph.types import PaddingPolicy
from tests.layers.case import Bad, Case, normal


@dataclass(frozen=True)
class Setting:
    """A convolution in plain numbers, every pair as (y, x)."""

    inputs: int
    outputs: int
    kernel: tuple[int, int]
    type: str = "STANDARD"
    groups: int = 1
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    policy: str = "SAME"
    sizes: tuple[int, int] = (0, 0)

    @property
    def blocks(self) -> int:
        """Groups of channels that do not see each other."""
        return self.inputs if self.type == "DEPTHWISE" else self.groups

    def descriptor(self) -> ConvolutionDescriptor:
        return ConvolutionDescriptor(
            self.kernel,
            self.inputs,
            self.outputs,
            type=ConvolutionType[self.type],
            group_count=self.groups,
            strides=self.stride,
            dilation_rates=self.dilation,
            padding_policy=PaddingPolicy[self.policy],
            padding_sizes=self.sizes,
        )

    def layer(self, biases: bool = True, packed: bool = False) -> ConvolutionLayer:
        generator = np.random.default_rng(11)
        depth = self.inputs // self.blocks
        shape = (1, self.outputs * depth, *self.kernel) if packed else (self.outputs, depth, *self.kernel)
        weights = Tensor(shape, data=generator.standard_normal(shape).astype(np.float32))
        shape = (1, self.outputs, 1, 1) if packed else (self.outputs,)
        bias = Tensor(shape, data=generator.standard_normal(shape).astype(np.float32)) if biases else None
        return ConvolutionLayer(weights, bias, self.descriptor())

    def axis(self, size: int, axis: int) -> tuple[int, int]:
        """Extent of the result and pixels before the first one along y (0) or x (1), by the specification's table."""
        k, s, d, p = self.kernel[axis], self.stride[axis], self.dilation[axis], self.sizes[axis]
        e = (k - 1) * d + 1
        if self.type == "TRANSPOSED":
            return {
                "VALID": ((size - 1) * s + e, 0),
                "USE_PADDING_SIZE": ((size - 1) * s - 2 * p + e, p),
                "SAME": (size * s, max(e - s, 0) // 2),
            }[self.policy]
        same = -(-size // s)
        return {
            "VALID": ((size - e) // s + 1, 0),
            "USE_PADDING_SIZE": ((size + 2 * p - e) // s + 1, p),
            "SAME": (same, max((same - 1) * s + e - size, 0) // 2),
        }[self.policy]

    def reference(self, x: np.ndarray, weights: np.ndarray, biases: np.ndarray | None = None) -> np.ndarray:
        """Pixel by pixel: a tap of a window joins one pixel of the finer image with one of the coarser."""
        batch, _, rows, columns = x.shape
        (height, top), (width, left) = self.axis(rows, 0), self.axis(columns, 1)
        y = np.zeros((batch, self.outputs, height, width))
        w = weights.reshape(self.blocks, self.outputs // self.blocks, self.inputs // self.blocks, *self.kernel)
        source = x.reshape(batch, self.blocks, self.inputs // self.blocks, rows, columns)
        result = y.reshape(batch, self.blocks, self.outputs // self.blocks, height, width)
        transposed = self.type == "TRANSPOSED"
        for i, j in np.ndindex((rows, columns) if transposed else (height, width)):
            for k, m in np.ndindex(self.kernel):
                fine = i * self.stride[0] + k * self.dilation[0] - top, j * self.stride[1] + m * self.dilation[1] - left
                here, there = ((i, j), fine) if transposed else (fine, (i, j))
                if 0 <= here[0] < rows and 0 <= here[1] < columns and 0 <= there[0] < height and 0 <= there[1] < width:
                    part = np.einsum("goi,ngi->ngo", w[..., k, m], source[..., here[0], here[1]])
                    result[..., there[0], there[1]] += part
        return y if biases is None else y + biases.reshape(1, -1, 1, 1)

    def twin(self, x: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor | None = None) -> torch.Tensor:
        """The same with PyTorch's functions: pad by hand, or crop the widest transposed result by hand."""
        (height, top), (width, left) = self.axis(x.shape[2], 0), self.axis(x.shape[3], 1)
        depth = self.inputs // self.blocks
        weights = weights.reshape(self.outputs, depth, *self.kernel)
        biases = None if biases is None else biases.reshape(-1)
        if self.type != "TRANSPOSED":
            bottom, right = height * self.stride[0] + 20, width * self.stride[1] + 20  # more than any window reads
            padded = F.pad(x, (left, right, top, bottom))
            return F.conv2d(padded, weights, biases, self.stride, 0, self.dilation, self.blocks)[..., :height, :width]
        input_major = torch.cat([block.transpose(0, 1) for block in weights.chunk(self.groups)])
        y = F.conv_transpose2d(x, input_major, None, self.stride, 0, 0, self.groups, self.dilation)
        y = F.pad(y, (0, max(left + width - y.shape[3], 0), 0, max(top + height - y.shape[2], 0)))
        y = y[..., top : top + height, left : left + width]
        return y if biases is None else y + biases[:, None, None]


def convolution(
    name: str, setting: Setting, *size: int, biases: bool = True, packed: bool = False, **more: Any
) -> Case:
    make: Callable[[], ConvolutionLayer] = lambda: setting.layer(biases, packed)  # noqa: E731
    return Case(
        f"convolution-{name}",
        make,
        (normal(2, setting.inputs, *size),),
        setting.reference,
        setting.twin,
        **more,
    )


BAD = (
    Bad(((2, 4, 6, 6),), ShapeError, "4 channels, but the layer takes 2"),
    Bad(((2, 2, 6),), ShapeError, "3 dimensions"),
    Bad((np.zeros((2, 2, 6, 6), np.int32),), DataTypeError, "int32"),
)
TOO_SMALL = Bad(((1, 2, 2, 6),), ShapeError, "3 × 3 pixels, but the image with its padding has 2 × 6")
EATEN = Bad(((1, 2, 1, 4),), ShapeError, "leaves -1 × 7 pixels")

CASES: list[Case] = [
    convolution("same", Setting(2, 3, (3, 3)), 5, 4, bad=BAD),
    convolution("same-even-kernel", Setting(2, 3, (2, 4)), 5, 4),
    convolution("same-stride-2-odd-total", Setting(2, 3, (3, 3), stride=(2, 2)), 6, 8),
    convolution("same-stride-2-one-axis-odd", Setting(2, 3, (3, 3), stride=(2, 2)), 5, 6),
    convolution("same-stride-wider-than-kernel", Setting(2, 3, (1, 2), stride=(3, 3)), 7, 5),
    convolution("same-dilated", Setting(2, 3, (3, 2), dilation=(2, 3)), 6, 5),
    convolution("valid", Setting(2, 3, (3, 3), policy="VALID"), 5, 6, bad=(TOO_SMALL,)),
    convolution("valid-strided", Setting(2, 2, (3, 2), policy="VALID", stride=(2, 3)), 7, 8),
    convolution("sized", Setting(2, 3, (3, 3), policy="USE_PADDING_SIZE", sizes=(2, 1)), 4, 5),
    convolution("sized-wide", Setting(1, 2, (2, 2), policy="USE_PADDING_SIZE", sizes=(3, 3), stride=(2, 2)), 3, 4),
    convolution("pointwise", Setting(3, 4, (1, 1)), 3, 3),
    convolution("without-biases", Setting(2, 3, (3, 3)), 4, 4, biases=False),
    convolution("packed-weights", Setting(2, 3, (3, 2)), 4, 4, packed=True),
    convolution("groups", Setting(4, 6, (3, 3), groups=2), 4, 5),
    convolution("groups-strided-dilated", Setting(4, 2, (2, 2), groups=2, stride=(2, 1), dilation=(1, 2)), 5, 6),
    convolution("depthwise", Setting(3, 3, (3, 3), "DEPTHWISE"), 4, 5),
    convolution("depthwise-multiplier", Setting(2, 6, (3, 2), "DEPTHWISE", stride=(2, 1)), 5, 4, packed=True),
    convolution("depthwise-dilated-valid", Setting(2, 4, (2, 2), "DEPTHWISE", dilation=(2, 1), policy="VALID"), 5, 4),
    convolution("transposed-valid", Setting(2, 3, (3, 2), "TRANSPOSED", policy="VALID", stride=(2, 2)), 3, 4, bad=BAD),
    convolution("transposed-same", Setting(2, 3, (3, 3), "TRANSPOSED"), 4, 3),
    convolution("transposed-same-odd-total", Setting(2, 3, (3, 4), "TRANSPOSED", stride=(2, 3)), 3, 4),
    convolution("transposed-same-wide-stride", Setting(2, 3, (2, 3), "TRANSPOSED", stride=(3, 2)), 3, 4),
    convolution("transposed-same-even-total", Setting(2, 3, (4, 4), "TRANSPOSED", stride=(2, 2)), 3, 3, packed=True),
    convolution(
        "transposed-sized",
        Setting(2, 3, (3, 3), "TRANSPOSED", policy="USE_PADDING_SIZE", sizes=(2, 1), stride=(1, 2)),
        4,
        3,
        bad=(EATEN,),
    ),
    convolution("transposed-groups", Setting(4, 6, (3, 2), "TRANSPOSED", groups=2, stride=(2, 2)), 3, 3),
    convolution("transposed-dilated", Setting(2, 3, (2, 3), "TRANSPOSED", dilation=(3, 2), policy="VALID"), 3, 3),
    convolution("transposed-same-dilated", Setting(2, 2, (3, 2), "TRANSPOSED", dilation=(2, 2), stride=(2, 2)), 3, 4),
]
