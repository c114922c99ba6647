"""Layers as functions of a graph: `graph.relu(x)` wires `ActivationLayer.relu()`.

Written by `python tools/layer_functions.py`; a test compares.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from stepgraph.layers.activation import ActivationDescriptor, ActivationLayer, ActivationType
from stepgraph.layers.arithmetic import ArithmeticLayer, ArithmeticOperation
from stepgraph.layers.attention import MultiheadAttentionLayer
from stepgraph.layers.comparison import ComparisonLayer
from stepgraph.layers.computed_loss import ComputedLossLayer
from stepgraph.layers.convolution import ConvolutionLayer, ConvolutionType
from stepgraph.layers.dropout import DropoutLayer
from stepgraph.layers.embedding import EmbeddingLayer
from stepgraph.layers.feed_forward import GatedFeedForwardLayer
from stepgraph.layers.global_pooling import GlobalPoolingLayer
from stepgraph.layers.gru import GRULayer
from stepgraph.layers.layer import Layer
from stepgraph.layers.layer_normalization import GroupNormalizationLayer, LayerNormalizationLayer, RMSNormalizationLayer
from stepgraph.layers.linear import FullyConnectedLayer
from stepgraph.layers.loss import LossLayer
from stepgraph.layers.normalization import BatchNormalizationLayer, InstanceNormalizationLayer
from stepgraph.layers.padding import PaddingLayer, Sizes
from stepgraph.layers.pooling import PoolingLayer, PoolingType
from stepgraph.layers.products import GramMatrixLayer
from stepgraph.layers.recurrent import GATE_ACTIVATIONS, TANH, LSTMLayer
from stepgraph.layers.reduction import Dimensions, ReductionLayer
from stepgraph.layers.shape import SliceLayer
from stepgraph.layers.softmax import SoftmaxLayer
from stepgraph.layers.upsample import UpsampleLayer
from stepgraph.layers.window import Size
from stepgraph.layers.yolo import Boxes, YOLOLossLayer
from stepgraph.tensors.tensor import Operand, Tensor
from stepgraph.types import PaddingPolicy, RandomInitializerType, ReductionType


class LayerFunctions(ABC):
    """The functions of a graph that wire one layer and return its result, or all of its results as a tuple."""

    @abstractmethod
    def wire(self, layer: Layer, *sources: Operand, loss_labels: Tensor | None = None) -> Any:
        """Wires a layer and returns its result, or all of them."""

    def relu(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.relu`: `max(x, 0)`."""
        return self.wire(ActivationLayer.relu(label=label), x)

    def relu6(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.relu6`: `min(max(x, 0), 6)`."""
        return self.wire(ActivationLayer.relu6(label=label), x)

    def leaky_relu(self, x: Tensor, negative_slope: float = 0.01, *, label: str = "") -> Tensor:
        """`ActivationLayer.leaky_relu`: `x` where `x ≥ 0`, else `negative_slope x`."""
        return self.wire(ActivationLayer.leaky_relu(negative_slope, label=label), x)

    def linear(self, x: Tensor, scale: float, bias: float, *, label: str = "") -> Tensor:
        """`ActivationLayer.linear`: `scale x + bias`."""
        return self.wire(ActivationLayer.linear(scale, bias, label=label), x)

    def sigmoid(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.sigmoid`: `1 / (1 + exp(-x))`."""
        return self.wire(ActivationLayer.sigmoid(label=label), x)

    def hard_sigmoid(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.hard_sigmoid`: `0.2 x + 0.5`, clamped to [0, 1]."""
        return self.wire(ActivationLayer.hard_sigmoid(label=label), x)

    def tanh(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.tanh`: `tanh(x)`."""
        return self.wire(ActivationLayer.tanh(label=label), x)

    def absolute(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.absolute`: `|x|`."""
        return self.wire(ActivationLayer.absolute(label=label), x)

    def soft_plus(self, x: Tensor, beta: float = 1.0, *, label: str = "") -> Tensor:
        """`ActivationLayer.soft_plus`: `log(1 + exp(beta x)) / beta`."""
        return self.wire(ActivationLayer.soft_plus(beta, label=label), x)

    def soft_sign(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.soft_sign`: `x / (1 + |x|)`."""
        return self.wire(ActivationLayer.soft_sign(label=label), x)

    def elu(self, x: Tensor, a: float = 1.0, *, label: str = "") -> Tensor:
        """`ActivationLayer.elu`: `x` where `x ≥ 0`, else `a (exp(x) - 1)`."""
        return self.wire(ActivationLayer.elu(a, label=label), x)

    def relun(self, x: Tensor, a: float, b: float, *, label: str = "") -> Tensor:
        """`ActivationLayer.relun`: The smaller of `b` and a ReLU with slope `a` below 0."""
        return self.wire(ActivationLayer.relun(a, b, label=label), x)

    def log_sigmoid(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.log_sigmoid`: `log(1 / (1 + exp(-x)))`."""
        return self.wire(ActivationLayer.log_sigmoid(label=label), x)

    def selu(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.selu`: The self-normalizing unit: a scaled ELU with fixed constants."""
        return self.wire(ActivationLayer.selu(label=label), x)

    def celu(self, x: Tensor, a: float = 1.0, *, label: str = "") -> Tensor:
        """`ActivationLayer.celu`: `max(0, x) + min(0, a (exp(x / a) - 1))`."""
        return self.wire(ActivationLayer.celu(a, label=label), x)

    def hard_shrink(self, x: Tensor, a: float = 0.5, *, label: str = "") -> Tensor:
        """`ActivationLayer.hard_shrink`: `x` outside `[-a, a]`, else 0."""
        return self.wire(ActivationLayer.hard_shrink(a, label=label), x)

    def soft_shrink(self, x: Tensor, a: float = 0.5, *, label: str = "") -> Tensor:
        """`ActivationLayer.soft_shrink`: `x` moved by `a` towards 0 outside `[-a, a]`, else 0."""
        return self.wire(ActivationLayer.soft_shrink(a, label=label), x)

    def tanh_shrink(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.tanh_shrink`: `x - tanh(x)`."""
        return self.wire(ActivationLayer.tanh_shrink(label=label), x)

    def threshold(self, x: Tensor, threshold: float, replacement: float, *, label: str = "") -> Tensor:
        """`ActivationLayer.threshold`: `x` where `x > threshold`, else `replacement`."""
        return self.wire(ActivationLayer.threshold(threshold, replacement, label=label), x)

    def gelu(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.gelu`.

        `x Φ(x)` in the form `0.5 x (1 + tanh(a (x + b x³)))` with the usual constants.
        """
        return self.wire(ActivationLayer.gelu(label=label), x)

    def gelu_erf(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.gelu_erf`: `x Φ(x)` with the exact normal distribution function; ours."""
        return self.wire(ActivationLayer.gelu_erf(label=label), x)

    def silu(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.silu`: `x / (1 + exp(-x))`, also called Swish; ours."""
        return self.wire(ActivationLayer.silu(label=label), x)

    def hard_swish(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ActivationLayer.hard_swish`: `x (x + 3) / 6`, with 0 below -3 and `x` above 3."""
        return self.wire(ActivationLayer.hard_swish(label=label), x)

    def clamp(self, x: Tensor, minimum: float, maximum: float, *, label: str = "") -> Tensor:
        """`ActivationLayer.clamp`: `min(max(x, minimum), maximum)`."""
        return self.wire(ActivationLayer.clamp(minimum, maximum, label=label), x)

    def add(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ArithmeticLayer.add`: `x + y`."""
        return self.wire(ArithmeticLayer.add(label=label), x, y)

    def subtract(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ArithmeticLayer.subtract`: `x - y`."""
        return self.wire(ArithmeticLayer.subtract(label=label), x, y)

    def multiply(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ArithmeticLayer.multiply`: `x y`."""
        return self.wire(ArithmeticLayer.multiply(label=label), x, y)

    def divide(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ArithmeticLayer.divide`: `x / y`."""
        return self.wire(ArithmeticLayer.divide(label=label), x, y)

    def pow(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ArithmeticLayer.pow`: `x` to the power of `y`."""
        return self.wire(ArithmeticLayer.pow(label=label), x, y)

    def multiply_no_nan(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ArithmeticLayer.multiply_no_nan`: `x y`, and 0 where `y` is 0."""
        return self.wire(ArithmeticLayer.multiply_no_nan(label=label), x, y)

    def divide_no_nan(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ArithmeticLayer.divide_no_nan`: `x / y`, and 0 where `y` is 0."""
        return self.wire(ArithmeticLayer.divide_no_nan(label=label), x, y)

    def minimum(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ArithmeticLayer.min`: The smaller of `x` and `y`."""
        return self.wire(ArithmeticLayer.min(label=label), x, y)

    def maximum(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ArithmeticLayer.max`: The larger of `x` and `y`."""
        return self.wire(ArithmeticLayer.max(label=label), x, y)

    def attention(
        self,
        x: Tensor,
        head_count: int,
        *,
        key: Tensor | None = None,
        value: Tensor | None = None,
        masks: Sequence[Tensor] = (),
        key_width: int | None = None,
        value_width: int | None = None,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
        **settings: Any,
    ) -> Tensor:
        """`MultiheadAttentionLayer.create`.

        A layer with new weights and zero biases; other settings as for `MultiheadAttentionDescriptor`.
        """
        return self.wire(
            MultiheadAttentionLayer.create(
                head_count=head_count,
                key_width=key_width,
                value_width=value_width,
                initializer=initializer,
                label=label,
                **settings,
            ),
            x,
            x if key is None else key,
            (x if key is None else key) if value is None else value,
            *masks,
        )

    def equal(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ComparisonLayer.equal`: `x = y`."""
        return self.wire(ComparisonLayer.equal(label=label), x, y)

    def not_equal(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ComparisonLayer.not_equal`: `x ≠ y`."""
        return self.wire(ComparisonLayer.not_equal(label=label), x, y)

    def less(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ComparisonLayer.less`: `x < y`."""
        return self.wire(ComparisonLayer.less(label=label), x, y)

    def greater(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ComparisonLayer.greater`: `x > y`."""
        return self.wire(ComparisonLayer.greater(label=label), x, y)

    def less_or_equal(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ComparisonLayer.less_or_equal`: `x ≤ y`."""
        return self.wire(ComparisonLayer.less_or_equal(label=label), x, y)

    def greater_or_equal(self, x: Operand, y: Operand, *, label: str = "") -> Tensor:
        """`ComparisonLayer.greater_or_equal`: `x ≥ y`."""
        return self.wire(ComparisonLayer.greater_or_equal(label=label), x, y)

    def computed_loss(
        self, x: Tensor, reduction_type: ReductionType = ReductionType.MEAN, *, label: str = ""
    ) -> Tensor:
        """`ComputedLossLayer`.

        `loss = x` for one number that the graph itself computes: the loss that a model returns, a variational
        bound.
        """
        return self.wire(ComputedLossLayer(reduction_type, label=label), x)

    def convolution(
        self,
        x: Tensor,
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
    ) -> Tensor:
        """`ConvolutionLayer.create`.

        A layer with new weights `[outputs, inputs / groups, height, width]` and optional zero biases `[outputs]`.
        """
        return self.wire(
            ConvolutionLayer.create(
                outputs=outputs,
                kernel_sizes=kernel_sizes,
                type=type,
                group_count=group_count,
                strides=strides,
                dilation_rates=dilation_rates,
                padding_policy=padding_policy,
                padding_sizes=padding_sizes,
                dimensions=dimensions,
                biases=biases,
                initializer=initializer,
                label=label,
            ),
            x,
        )

    def dropout(self, x: Tensor, rate: float, seed: int = 0, *, label: str = "") -> Tensor:
        """`DropoutLayer`.

        `y = x * mask / (1 - rate)` in training, where `mask` is 0 with probability `rate`, else 1; `y = x` in
        inference.
        """
        return self.wire(DropoutLayer(rate, seed, label=label), x)

    def embedding(
        self,
        x: Tensor,
        embedding_count: int,
        embedding_dimension: int,
        *,
        padding_index: int | None = None,
        maximum_norm: float | None = None,
        p_norm: float = 2.0,
        scales_gradient_by_frequency: bool = False,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
    ) -> Tensor:
        """`EmbeddingLayer.create`: A layer with a new dictionary `[count, dimension]`, zero at `padding_index`."""
        return self.wire(
            EmbeddingLayer.create(
                embedding_count,
                embedding_dimension,
                padding_index=padding_index,
                maximum_norm=maximum_norm,
                p_norm=p_norm,
                scales_gradient_by_frequency=scales_gradient_by_frequency,
                initializer=initializer,
                label=label,
            ),
            x,
        )

    def gated_feed_forward(
        self,
        x: Tensor,
        hidden: int,
        outputs: int | None = None,
        *,
        activation: ActivationType | ActivationDescriptor = ActivationType.SILU,
        biases: bool = False,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
    ) -> Tensor:
        """`GatedFeedForwardLayer.create`.

        A layer with new weights and, if wanted, zero biases; by default SwiGLU with as many outputs as inputs.
        """
        return self.wire(
            GatedFeedForwardLayer.create(
                hidden=hidden,
                outputs=outputs,
                activation=activation,
                biases=biases,
                initializer=initializer,
                label=label,
            ),
            x,
        )

    def global_pooling(
        self, x: Tensor, pooling_type: PoolingType, keeps_dimensions: bool = False, *, label: str = ""
    ) -> Tensor:
        """`GlobalPoolingLayer`.

        `y[c] = pool over p of x[c, p]`: the maximum, mean or norm of each channel, over all pixels or steps.
        """
        return self.wire(GlobalPoolingLayer(pooling_type, keeps_dimensions, label=label), x)

    def gru(
        self,
        x: Tensor,
        hidden_size: int,
        layer_count: int = 1,
        *,
        others: Sequence[Tensor] = (),
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
        **settings: Any,
    ) -> Any:
        """`GRULayer.create`.

        A layer with new weights in their natural shapes and, unless `uses_biases=False`, zero biases.
        """
        return self.wire(
            GRULayer.create(
                hidden_size=hidden_size, layer_count=layer_count, initializer=initializer, label=label, **settings
            ),
            x,
            *others,
        )

    def group_normalization(
        self, x: Tensor, group_count: int, *, variance_epsilon: float = 1e-05, label: str = ""
    ) -> Tensor:
        """`GroupNormalizationLayer.create`.

        A layer that starts with beta 0 and gamma 1, each of shape `[channels]`.
        """
        return self.wire(
            GroupNormalizationLayer.create(group_count=group_count, variance_epsilon=variance_epsilon, label=label), x
        )

    def layer_normalization(self, x: Tensor, *, variance_epsilon: float = 1e-05, label: str = "") -> Tensor:
        """`LayerNormalizationLayer.create`.

        A layer that starts with beta 0 and gamma 1, each of shape `normalized_shape`.
        """
        return self.wire(LayerNormalizationLayer.create(variance_epsilon=variance_epsilon, label=label), x)

    def rms_normalization(self, x: Tensor, *, variance_epsilon: float = 1e-06, label: str = "") -> Tensor:
        """`RMSNormalizationLayer.create`: A layer that starts with gamma 1, of shape `normalized_shape`."""
        return self.wire(RMSNormalizationLayer.create(variance_epsilon=variance_epsilon, label=label), x)

    def dense(
        self,
        x: Tensor,
        outputs: int,
        *,
        biases: bool = True,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
    ) -> Tensor:
        """`FullyConnectedLayer.create`.

        A layer with new weights `[outputs, inputs]` and, by default, zero biases `[outputs]`.
        """
        return self.wire(
            FullyConnectedLayer.create(outputs=outputs, biases=biases, initializer=initializer, label=label), x
        )

    def softmax_cross_entropy(
        self,
        x: Tensor,
        labels: Tensor,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        axis: int = 1,
        ignored_label: int | None = None,
        label_smoothing: float = 0.0,
        class_count: int = 1,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> Tensor:
        """`LossLayer.softmax_cross_entropy`.

        `-Σ t log softmax(y)` over the classes along `axis`; `y` are logits.
        """
        return self.wire(
            LossLayer.softmax_cross_entropy(
                reduction_type,
                axis=axis,
                ignored_label=ignored_label,
                label_smoothing=label_smoothing,
                class_count=class_count,
                weight=weight,
                weights=weights,
                divides_by_weights=divides_by_weights,
                label=label,
            ),
            x,
            loss_labels=labels,
        )

    def categorical_cross_entropy(
        self,
        x: Tensor,
        labels: Tensor,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        axis: int = 1,
        ignored_label: int | None = None,
        label_smoothing: float = 0.0,
        class_count: int = 1,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> Tensor:
        """`LossLayer.categorical_cross_entropy`.

        `-Σ t log y` over the classes along `axis`; `y` are probabilities. Smoothing is kept but not used.
        """
        return self.wire(
            LossLayer.categorical_cross_entropy(
                reduction_type,
                axis=axis,
                ignored_label=ignored_label,
                label_smoothing=label_smoothing,
                class_count=class_count,
                weight=weight,
                weights=weights,
                divides_by_weights=divides_by_weights,
                label=label,
            ),
            x,
            loss_labels=labels,
        )

    def sigmoid_cross_entropy(
        self,
        x: Tensor,
        labels: Tensor,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        label_smoothing: float = 0.0,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> Tensor:
        """`LossLayer.sigmoid_cross_entropy`: `-t log σ(y) - (1 - t) log(1 - σ(y))`; `y` are logits."""
        return self.wire(
            LossLayer.sigmoid_cross_entropy(
                reduction_type,
                label_smoothing=label_smoothing,
                weight=weight,
                weights=weights,
                divides_by_weights=divides_by_weights,
                label=label,
            ),
            x,
            loss_labels=labels,
        )

    def log_loss(
        self,
        x: Tensor,
        labels: Tensor,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        epsilon: float = 1e-07,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> Tensor:
        """`LossLayer.log`: `-t log(y + epsilon) - (1 - t) log(1 - y + epsilon)`; `y` are probabilities."""
        return self.wire(
            LossLayer.log(
                reduction_type,
                epsilon=epsilon,
                weight=weight,
                weights=weights,
                divides_by_weights=divides_by_weights,
                label=label,
            ),
            x,
            loss_labels=labels,
        )

    def huber_loss(
        self,
        x: Tensor,
        labels: Tensor,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        delta: float = 1.0,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> Tensor:
        """`LossLayer.huber`: `(y - t)² / 2` up to a distance of `delta`, linear beyond."""
        return self.wire(
            LossLayer.huber(
                reduction_type,
                delta=delta,
                weight=weight,
                weights=weights,
                divides_by_weights=divides_by_weights,
                label=label,
            ),
            x,
            loss_labels=labels,
        )

    def mean_absolute_error(
        self,
        x: Tensor,
        labels: Tensor,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> Tensor:
        """`LossLayer.mean_absolute_error`: `|y - t|`."""
        return self.wire(
            LossLayer.mean_absolute_error(
                reduction_type, weight=weight, weights=weights, divides_by_weights=divides_by_weights, label=label
            ),
            x,
            loss_labels=labels,
        )

    def mean_squared_error(
        self,
        x: Tensor,
        labels: Tensor,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> Tensor:
        """`LossLayer.mean_squared_error`: `(y - t)²`."""
        return self.wire(
            LossLayer.mean_squared_error(
                reduction_type, weight=weight, weights=weights, divides_by_weights=divides_by_weights, label=label
            ),
            x,
            loss_labels=labels,
        )

    def hinge_loss(
        self,
        x: Tensor,
        labels: Tensor,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> Tensor:
        """`LossLayer.hinge`: `max(0, 1 - (2 t - 1) y)`; labels are 0 and 1."""
        return self.wire(
            LossLayer.hinge(
                reduction_type, weight=weight, weights=weights, divides_by_weights=divides_by_weights, label=label
            ),
            x,
            loss_labels=labels,
        )

    def cosine_distance(
        self,
        x: Tensor,
        labels: Tensor,
        reduction_type: ReductionType = ReductionType.MEAN,
        *,
        weight: float = 1.0,
        weights: Tensor | None = None,
        divides_by_weights: bool = False,
        label: str = "",
    ) -> Tensor:
        """`LossLayer.cosine_distance`: `1 - Σ t y` over all elements of a sample; both should have unit length."""
        return self.wire(
            LossLayer.cosine_distance(
                reduction_type, weight=weight, weights=weights, divides_by_weights=divides_by_weights, label=label
            ),
            x,
            loss_labels=labels,
        )

    def batch_normalization(
        self,
        x: Tensor,
        *,
        variance_epsilon: float = 1e-05,
        momentum: float = 0.99,
        synchronized: bool = False,
        label: str = "",
    ) -> Tensor:
        """`BatchNormalizationLayer.create`.

        A layer that starts with mean 0, variance 1, beta 0 and gamma 1, each of shape `[channels]`.
        """
        return self.wire(
            BatchNormalizationLayer.create(
                variance_epsilon=variance_epsilon, momentum=momentum, synchronized=synchronized, label=label
            ),
            x,
        )

    def instance_normalization(
        self,
        x: Tensor,
        *,
        tracks_running_statistics: bool = False,
        variance_epsilon: float = 1e-05,
        momentum: float = 0.99,
        label: str = "",
    ) -> Tensor:
        """`InstanceNormalizationLayer.create`.

        A layer that starts with beta 0 and gamma 1 and, if it tracks statistics, mean 0 and variance 1.
        """
        return self.wire(
            InstanceNormalizationLayer.create(
                tracks_running_statistics=tracks_running_statistics,
                variance_epsilon=variance_epsilon,
                momentum=momentum,
                label=label,
            ),
            x,
        )

    def reflection_padding(self, x: Tensor, padding: Sizes, *, label: str = "") -> Tensor:
        """`PaddingLayer.reflection`: The image mirrored at its border, which is not repeated."""
        return self.wire(PaddingLayer.reflection(padding, label=label), x)

    def symmetric_padding(self, x: Tensor, padding: Sizes, *, label: str = "") -> Tensor:
        """`PaddingLayer.symmetric`: The image mirrored with its border."""
        return self.wire(PaddingLayer.symmetric(padding, label=label), x)

    def zero_padding(self, x: Tensor, padding: Sizes, *, label: str = "") -> Tensor:
        """`PaddingLayer.zero`: Zeros."""
        return self.wire(PaddingLayer.zero(padding, label=label), x)

    def constant_padding(self, x: Tensor, padding: Sizes, value: float, *, label: str = "") -> Tensor:
        """`PaddingLayer.constant`: The same value everywhere."""
        return self.wire(PaddingLayer.constant(padding, value, label=label), x)

    def max_pooling(
        self,
        x: Tensor,
        kernel_sizes: Size,
        strides: Size | None = None,
        *,
        dilation_rates: Size = 1,
        padding_policy: PaddingPolicy | None = None,
        padding_sizes: Size | None = None,
        dimensions: int = 2,
        label: str = "",
    ) -> Tensor:
        """`PoolingLayer.max`: The largest of each window; `VALID`, or `padding_sizes` if passed."""
        return self.wire(
            PoolingLayer.max(
                kernel_sizes,
                strides,
                dilation_rates=dilation_rates,
                padding_policy=padding_policy,
                padding_sizes=padding_sizes,
                dimensions=dimensions,
                label=label,
            ),
            x,
        )

    def average_pooling(
        self,
        x: Tensor,
        kernel_sizes: Size,
        strides: Size | None = None,
        *,
        dilation_rates: Size = 1,
        padding_policy: PaddingPolicy | None = None,
        padding_sizes: Size | None = None,
        dimensions: int = 2,
        count_includes_padding: bool = False,
        label: str = "",
    ) -> Tensor:
        """`PoolingLayer.average`: The mean of each window; `VALID`, or `padding_sizes` if passed."""
        return self.wire(
            PoolingLayer.average(
                kernel_sizes,
                strides,
                dilation_rates=dilation_rates,
                padding_policy=padding_policy,
                padding_sizes=padding_sizes,
                dimensions=dimensions,
                count_includes_padding=count_includes_padding,
                label=label,
            ),
            x,
        )

    def l2_norm_pooling(
        self,
        x: Tensor,
        kernel_sizes: Size,
        strides: Size | None = None,
        *,
        dilation_rates: Size = 1,
        padding_policy: PaddingPolicy | None = None,
        padding_sizes: Size | None = None,
        dimensions: int = 2,
        label: str = "",
    ) -> Tensor:
        """`PoolingLayer.l2_norm`: The Euclidean norm of each window; `VALID`, or `padding_sizes` if passed."""
        return self.wire(
            PoolingLayer.l2_norm(
                kernel_sizes,
                strides,
                dilation_rates=dilation_rates,
                padding_policy=padding_policy,
                padding_sizes=padding_sizes,
                dimensions=dimensions,
                label=label,
            ),
            x,
        )

    def gram_matrix(self, x: Tensor, scale: float, *, label: str = "") -> Tensor:
        """`GramMatrixLayer`.

        `z[b, c, 0, f] = scale Σ x[b, f, h, w] x[b, c, h, w]`: the correlation of each pair of channels of an image.
        """
        return self.wire(GramMatrixLayer(scale, label=label), x)

    def lstm(
        self,
        x: Tensor,
        hidden_size: int,
        layer_count: int = 1,
        *,
        others: Sequence[Tensor] = (),
        peepholes: bool = False,
        gate_activations: Sequence[ActivationDescriptor] = GATE_ACTIVATIONS,
        output_result_activation: ActivationDescriptor = TANH,
        initializer: RandomInitializerType = RandomInitializerType.GLOROT_UNIFORM,
        label: str = "",
        **settings: Any,
    ) -> Any:
        """`LSTMLayer.create`.

        A layer with new weights in their natural shapes and, unless `uses_biases=False`, zero biases.
        """
        return self.wire(
            LSTMLayer.create(
                hidden_size=hidden_size,
                layer_count=layer_count,
                peepholes=peepholes,
                gate_activations=gate_activations,
                output_result_activation=output_result_activation,
                initializer=initializer,
                label=label,
                **settings,
            ),
            x,
            *others,
        )

    def sum(self, x: Tensor, dimensions: Dimensions, *, label: str = "") -> Tensor:
        """`ReductionLayer.sum`: The sum."""
        return self.wire(ReductionLayer.sum(dimensions, label=label), x)

    def mean(self, x: Tensor, dimensions: Dimensions, *, label: str = "") -> Tensor:
        """`ReductionLayer.mean`: The sum divided by the number of elements."""
        return self.wire(ReductionLayer.mean(dimensions, label=label), x)

    def max(self, x: Tensor, dimensions: Dimensions, *, label: str = "") -> Tensor:
        """`ReductionLayer.max`: The largest element."""
        return self.wire(ReductionLayer.max(dimensions, label=label), x)

    def min(self, x: Tensor, dimensions: Dimensions, *, label: str = "") -> Tensor:
        """`ReductionLayer.min`: The smallest element."""
        return self.wire(ReductionLayer.min(dimensions, label=label), x)

    def arg_max(self, x: Tensor, dimension: int, *, label: str = "") -> Tensor:
        """`ReductionLayer.arg_max`: The index of the largest element."""
        return self.wire(ReductionLayer.arg_max(dimension, label=label), x)

    def arg_min(self, x: Tensor, dimension: int, *, label: str = "") -> Tensor:
        """`ReductionLayer.arg_min`: The index of the smallest element."""
        return self.wire(ReductionLayer.arg_min(dimension, label=label), x)

    def l1_norm(self, x: Tensor, dimensions: Dimensions, *, label: str = "") -> Tensor:
        """`ReductionLayer.l1_norm`: The sum of absolute values."""
        return self.wire(ReductionLayer.l1_norm(dimensions, label=label), x)

    def any(self, x: Tensor, dimensions: Dimensions, *, label: str = "") -> Tensor:
        """`ReductionLayer.any`: Whether any element is not 0."""
        return self.wire(ReductionLayer.any(dimensions, label=label), x)

    def all(self, x: Tensor, dimensions: Dimensions, *, label: str = "") -> Tensor:
        """`ReductionLayer.all`: Whether no element is 0."""
        return self.wire(ReductionLayer.all(dimensions, label=label), x)

    def slice(
        self,
        x: Tensor,
        start: tuple[int, ...],
        end: tuple[int, ...],
        stride: tuple[int, ...] | None = None,
        *,
        label: str = "",
    ) -> Tensor:
        """`SliceLayer`.

        Elements from `start` up to, not including, `end`, every `stride`-th, along each dimension of the source.
        """
        return self.wire(SliceLayer(start, end, stride, label=label), x)

    def softmax(self, x: Tensor, dimension: int = 1, *, label: str = "") -> Tensor:
        """`SoftmaxLayer.softmax`: Probabilities that add up to 1 along `dimension`."""
        return self.wire(SoftmaxLayer.softmax(dimension, label=label), x)

    def log_softmax(self, x: Tensor, dimension: int = 1, *, label: str = "") -> Tensor:
        """`SoftmaxLayer.log_softmax`: Logarithms of these probabilities."""
        return self.wire(SoftmaxLayer.log_softmax(dimension, label=label), x)

    def upsample_nearest(self, x: Tensor, shape: tuple[int, ...], *, label: str = "") -> Tensor:
        """`UpsampleLayer.nearest`: Each pixel is the nearest one of the source."""
        return self.wire(UpsampleLayer.nearest(shape, label=label), x)

    def upsample_linear(
        self, x: Tensor, shape: tuple[int, ...], *, aligns_corners: bool = False, label: str = ""
    ) -> Tensor:
        """`UpsampleLayer.linear`: Each pixel is interpolated linearly between the four around it."""
        return self.wire(UpsampleLayer.linear(shape, aligns_corners=aligns_corners, label=label), x)

    def yolo_loss(
        self,
        x: Tensor,
        labels: Tensor,
        anchor_boxes: Boxes,
        *,
        weights: Tensor | None = None,
        label: str = "",
        **settings: Any,
    ) -> Tensor:
        """`YOLOLossLayer.create`.

        A layer for these boxes; other settings are those of `YOLOLossDescriptor`, by name.
        """
        return self.wire(
            YOLOLossLayer.create(anchor_boxes, weights=weights, label=label, **settings), x, loss_labels=labels
        )

    def floor(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.FLOOR)`: floor of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.FLOOR, label=label), x)

    def round(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.ROUND)`: round of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.ROUND, label=label), x)

    def ceil(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.CEIL)`: ceil of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.CEIL, label=label), x)

    def sqrt(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.SQRT)`: sqrt of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.SQRT, label=label), x)

    def rsqrt(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.RSQRT)`: rsqrt of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.RSQRT, label=label), x)

    def sin(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.SIN)`: sin of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.SIN, label=label), x)

    def cos(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.COS)`: cos of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.COS, label=label), x)

    def tan(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.TAN)`: tan of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.TAN, label=label), x)

    def asin(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.ASIN)`: asin of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.ASIN, label=label), x)

    def acos(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.ACOS)`: acos of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.ACOS, label=label), x)

    def atan(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.ATAN)`: atan of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.ATAN, label=label), x)

    def sinh(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.SINH)`: sinh of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.SINH, label=label), x)

    def cosh(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.COSH)`: cosh of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.COSH, label=label), x)

    def asinh(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.ASINH)`: asinh of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.ASINH, label=label), x)

    def acosh(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.ACOSH)`: acosh of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.ACOSH, label=label), x)

    def atanh(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.ATANH)`: atanh of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.ATANH, label=label), x)

    def exp(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.EXP)`: exp of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.EXP, label=label), x)

    def exp2(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.EXP2)`: exp2 of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.EXP2, label=label), x)

    def log(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.LOG)`: log of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.LOG, label=label), x)

    def log2(self, x: Tensor, *, label: str = "") -> Tensor:
        """`ArithmeticLayer(ArithmeticOperation.LOG2)`: log2 of each element."""
        return self.wire(ArithmeticLayer(ArithmeticOperation.LOG2, label=label), x)
