"""Convolutions: standard, transposed and depthwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from stepgraph.errors import ArgumentError, ShapeError
from stepgraph.layers.found import channels, found_at_node
from stepgraph.layers.layer import Layer, ParameterOf, Scope
from stepgraph.layers.window import Numbers, Pair, Size, WindowDescriptor, by, require_room, require_window
from stepgraph.random import initialize
from stepgraph.tensors.tensor import Tensor, TensorDescriptor
from stepgraph.types import PaddingPolicy, RandomInitializerType, RawEnum


class ConvolutionType(RawEnum):
    """Kinds of convolution."""

    STANDARD = 0, "Standard"
    TRANSPOSED = 1, "Transposed"
    DEPTHWISE = 2, "Depthwise"


@dataclass(frozen=True)
class ConvolutionDescriptor(WindowDescriptor):
    """The settings of a convolution. One number applies to all axes; a pair is `(height, width)`.

    Args:
        kernel_sizes: the size of a filter in pixels.
        input_feature_channel_count: channels of the source.
        output_feature_channel_count: channels of the result; for a depthwise convolution a multiple of the inputs.
        type: standard, transposed or depthwise.
        group_count: groups of independent channels; a depthwise convolution keeps 1.
        strides: pixels from one window to the next.
        dilation_rates: pixels from one tap of a filter to the next.
        padding_policy: how windows treat the border.
        padding_sizes: pixels added on both sides; only `USE_PADDING_SIZE` uses them.
        dimensions: 1 for sequences `[batch, channels, steps]`, 2 for images, 3 for volumes
            `[batch, channels, depth, height, width]`.

    Example:
        >>> ConvolutionDescriptor((3, 5), 8, 16, strides=2).kernel_width
        5
        >>> ConvolutionDescriptor(3, 8, 16, dimensions=1).weights_shape
        (16, 8, 3)
    """

    kernel_sizes: Size
    input_feature_channel_count: int
    output_feature_channel_count: int
    _: KW_ONLY
    type: ConvolutionType = ConvolutionType.STANDARD
    group_count: int = 1
    strides: Size = 1
    dilation_rates: Size = 1
    padding_policy: PaddingPolicy = PaddingPolicy.SAME
    padding_sizes: Size = 0
    dimensions: int = 2

    def __post_init__(self) -> None:
        self._normalize()
        object.__setattr__(self, "type", ConvolutionType.of_raw(self.__class__.__name__, "type", self.type))
        inputs, outputs, groups = self.input_feature_channel_count, self.output_feature_channel_count, self.group_count
        where = "ConvolutionDescriptor"
        for name in ("input_feature_channel_count", "output_feature_channel_count", "group_count"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ArgumentError(where, f"{name} is {count!r}", fix="pass an integer ≥ 1")
        if self.uses_depthwise_convolution and (groups != 1 or outputs % inputs):
            problem = f"a depthwise convolution cannot take {inputs} channels to {outputs} with group_count {groups}"
            raise ArgumentError(where, problem, fix="make the outputs a multiple of the inputs, leave group_count at 1")
        if inputs % groups or outputs % groups:
            problem = f"{groups} groups do not divide {inputs} input and {outputs} output channels"
            raise ArgumentError(where, problem, fix="use a group_count that divides both")

    @classmethod
    def transposed(
        cls,
        kernel_sizes: Size,
        input_feature_channel_count: int,
        output_feature_channel_count: int,
        **settings: Any,
    ) -> ConvolutionDescriptor:
        """A transposed convolution; other settings as for `ConvolutionDescriptor`."""
        channels = input_feature_channel_count, output_feature_channel_count
        return cls(kernel_sizes, *channels, type=ConvolutionType.TRANSPOSED, **settings)

    @classmethod
    def depthwise(
        cls, kernel_sizes: Size, input_feature_channel_count: int, channel_multiplier: int = 1, **settings: Any
    ) -> ConvolutionDescriptor:
        """A depthwise convolution with `channel_multiplier` filters per channel; other settings as above."""
        channels = input_feature_channel_count, input_feature_channel_count * channel_multiplier
        return cls(kernel_sizes, *channels, type=ConvolutionType.DEPTHWISE, **settings)

    @property
    def is_convolution_transpose(self) -> bool:
        """Whether the type is transposed."""
        return self.type is ConvolutionType.TRANSPOSED

    @property
    def uses_depthwise_convolution(self) -> bool:
        """Whether the type is depthwise."""
        return self.type is ConvolutionType.DEPTHWISE

    @property
    def weights_shape(self) -> Numbers:
        """The natural shape of the weights, `[outputs, inputs / groups, height, width]`, for every type."""
        inputs = 1 if self.uses_depthwise_convolution else self.input_feature_channel_count // self.group_count
        return self.output_feature_channel_count, inputs, *self.kernel_sizes  # type: ignore[misc]

    def padding(self, *sizes: int) -> tuple[Pair, ...]:
        """Pixels (before, after) added to each axis of a source of this size, or removed from a transposed result.

        A transposed result whose stride is wider than its window loses a negative number: it gains pixels of bias.
        """
        if not self.is_convolution_transpose or self.padding_policy is not PaddingPolicy.SAME:
            return super().padding(*sizes)
        totals = [span - stride for span, (_, stride, _, _) in zip(self.extents, self.axes, strict=True)]
        return tuple((max(total, 0) // 2, total - max(total, 0) // 2) for total in totals)

    def transposed_sizes(self, *sizes: int) -> Numbers:
        """Pixels of a transposed convolution's result along every axis: `(n - 1) s + e - before - after`."""
        axes = zip(sizes, self.axes, self.extents, self.padding(*sizes), strict=True)
        return tuple((size - 1) * stride + span - sum(lost) for size, (_, stride, _, _), span, lost in axes)


class ConvolutionLayer(Layer):
    """`y[o, p] = b[o] + Σᵢₖ W[o, i, k] x[i, s p + d k - before]`: filters slide over an image without being flipped.

    Shapes: `[batch, inputs, height, width] → [batch, outputs, height', width']`; with `dimensions=1`,
    `[batch, inputs, steps] → [batch, outputs, steps']`; with `dimensions=3`, volumes with a depth before the height.
    With `e = (kernel - 1) d + 1` an axis of `n` pixels becomes

    | policy | standard, depthwise | transposed |
    |---|---|---|
    | `SAME` | `ceil(n / s)` | `n s` |
    | `VALID` | `floor((n - e) / s) + 1` | `(n - 1) s + e` |
    | `USE_PADDING_SIZE` | `floor((n + 2 p - e) / s) + 1` | `(n - 1) s + e - 2 p` |

    An odd total of `SAME` padding has its extra pixel at the bottom and right. Transposed is the adjoint in space:
    `y[o, s p + d k - before] += W[o, i, k] x[i, p]`. Depthwise: result channel `i m + q` is channel `i` with its
    filter `q` of `m`.

    Weights hold `outputs * (inputs / groups) * height * width` numbers in any shape, output-major for every type
    (`[outputs, inputs / groups, height, width]`, Apple's `[1, outputs * inputs, height, width]`); biases `outputs`.

    Unlike in `torch.nn.Conv1d`, `Conv2d` and `Conv3d`, the default padding is `SAME`, with strides too; unlike in
    `torch.nn.ConvTranspose2d`, the weights of a transposed convolution are output-major.

    Example:
        >>> ConvolutionLayer.create(3, 16, 5, strides=2).infer(TensorDescriptor((8, 3, 33, 32)))[0].shape
        (8, 16, 17, 16)
        >>> ConvolutionLayer.create(3, 16, 5, dimensions=1).infer(TensorDescriptor((8, 3, 100)))[0].shape
        (8, 16, 100)
    """

    weights: Tensor
    biases: Tensor | None
    descriptor: ConvolutionDescriptor

    default_label = "Convolution"
    weights_parameter = ParameterOf("weights")
    biases_parameter = ParameterOf("biases")

    def __post_init__(self) -> None:
        shape = self.descriptor.weights_shape
        for name, tensor, wanted in (("weights", self.weights, shape), ("biases", self.biases, shape[:1])):
            count = math.prod(wanted)
            if tensor is not None and tensor.descriptor.element_count != count:
                raise ShapeError(
                    self.where,
                    f"the {name} hold {tensor.descriptor.element_count} numbers, but the descriptor needs {count}",
                    fix=f"pass {name} of shape {list(wanted)}, or use ConvolutionLayer.create(...)",
                    **{name: tensor.descriptor},
                )

    @classmethod
    @found_at_node("inputs", channels)
    def create(
        cls,
        inputs: int,
        outputs: int,
        kernel_sizes: Size,
        *,
        type: ConvolutionType = ConvolutionType.STANDARD,
        group_count: int = 1,
        strides: Size = 1,
        dilation_rates: Size = 1,
        padding_policy: PaddingPolicy | None = None,
        padding_sizes: Size | None = None,
        dimensions: int = 2,
        biases: bool = True,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
    ) -> ConvolutionLayer:
        """A layer with new weights `[outputs, inputs / groups, height, width]` and optional zero biases `[outputs]`.

        Without a policy, the padding is `padding_sizes` if passed, otherwise `SAME`.
        """
        default = PaddingPolicy.SAME if padding_sizes is None else PaddingPolicy.USE_PADDING_SIZE
        descriptor = ConvolutionDescriptor(
            kernel_sizes,
            inputs,
            outputs,
            type=type,
            group_count=group_count,
            strides=strides,
            dilation_rates=dilation_rates,
            padding_policy=default if padding_policy is None else padding_policy,
            padding_sizes=0 if padding_sizes is None else padding_sizes,
            dimensions=dimensions,
        )
        shape = descriptor.weights_shape
        fan_in, groups = math.prod(shape[1:]), inputs // shape[1]
        values = initialize(initializer, shape, fan_in, outputs // groups * math.prod(shape[2:]))
        bias = Tensor((outputs,), fill=0.0) if biases else None
        return cls(Tensor(shape, data=values), bias, descriptor, label=label)

    def check(self, *sources: TensorDescriptor) -> None:
        """Checks that the source is a batch of images with `inputs` channels and leaves at least one pixel."""
        super().check(*sources)
        self.require_type(sources[0], self.weights)
        source, inputs = sources[0], self.descriptor.input_feature_channel_count
        require_window(self, source, self.descriptor)
        if source.shape[1] != inputs:
            problem = f"the source has {source.shape[1]} channels, but the layer takes {inputs}"
            raise ShapeError(
                self.where, problem, source=source, fix=f"pass {inputs} channels, or change the descriptor"
            )
        if self.descriptor.is_convolution_transpose:
            sizes = self.descriptor.transposed_sizes(*source.shape[2:])
            if min(sizes) < 1:
                problem = f"the padding {self.descriptor.padding_sizes} leaves {by(sizes)} pixels"
                raise ShapeError(self.where, problem, source=source, fix="use smaller padding_sizes")
        else:
            require_room(self, source, self.descriptor)

    def forward(self, x: torch.Tensor, *, scope: Scope) -> torch.Tensor:
        """The convolution of the descriptor's type."""
        descriptor = self.descriptor
        weights = scope.array(self.weights, *descriptor.weights_shape)
        biases = None if self.biases is None else scope.array(self.biases, descriptor.output_feature_channel_count)
        return CONVOLUTIONS[descriptor.type](
            x,
            weights,
            biases,
            stride=descriptor.strides,
            dilation=descriptor.dilation_rates,
            padding=descriptor.padding(*x.shape[2:]),
            groups=x.shape[1] // weights.shape[1],
        )


def convolve(
    x: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor | None,
    *,
    stride: Numbers,
    dilation: Numbers,
    padding: Sequence[Pair],
    groups: int,
) -> torch.Tensor:
    """`y[o, p] = b[o] + Σᵢₖ W[o, i, k] x[i, s p + d k - before]`; `padding` is (before, after) of each axis."""
    if x.ndim == 3:  # an image of one row, so that everything that is fast for images is fast for sequences
        window: dict[str, Any] = {"stride": (1, *stride), "dilation": (1, *dilation), "padding": ((0, 0), *padding)}
        return convolve(x.unsqueeze(2), weights.unsqueeze(2), biases, **window, groups=groups).squeeze(2)
    befores = tuple(before for before, _ in padding)
    missing = [after - before for before, after in padding]
    if any(missing):
        x = F.pad(x, [n for one in reversed(missing) for n in (0, one)])
    function = F.conv2d if x.ndim == 4 else F.conv3d
    return function(x, weights, biases, stride, befores, dilation, groups)


def convolve_transposed(
    x: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor | None,
    *,
    stride: Numbers,
    dilation: Numbers,
    padding: Sequence[Pair],
    groups: int,
) -> torch.Tensor:
    """`y[o, s p + d k - before] += W[o, i, k] x[i, p]`; `padding` is removed from each axis (before, after)."""
    if x.ndim == 3:
        window: dict[str, Any] = {"stride": (1, *stride), "dilation": (1, *dilation), "padding": ((0, 0), *padding)}
        return convolve_transposed(x.unsqueeze(2), weights.unsqueeze(2), biases, **window, groups=groups).squeeze(2)
    befores = tuple(before for before, _ in padding)
    gains, losses = ([max(sign * (before - after), 0) for before, after in padding] for sign in (1, -1))
    input_major = weights.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    function = F.conv_transpose2d if x.ndim == 4 else F.conv_transpose3d
    y = function(x, input_major, biases, stride, befores, gains, groups, dilation)
    for axis, lost in enumerate(losses, 2):
        y = y.narrow(axis, 0, y.shape[axis] - lost) if lost else y
    return y


CONVOLUTIONS: dict[ConvolutionType, Callable[..., torch.Tensor]] = {
    ConvolutionType.STANDARD: convolve,
    ConvolutionType.TRANSPOSED: convolve_transposed,
    ConvolutionType.DEPTHWISE: convolve,
}
