"""The networks that are measured, each written once for every library, and the shapes of their parameters.

A network is a function `network(on, p, x)`: `on` has one library's operators, `p` that library's parameters by name,
`x` the inputs, and the logits come back, one row for each label.

Images are `[batch, channels, height, width]`, weights `[outputs, inputs, ...]`, sequences `[batch, steps, features]`; a
library that likes another order changes it before the first step. The four gates of an LSTM (input, forget, candidate,
output) are stacked in one array, and so are query, key and value of an attention. Weights of transposed convolutions
alone are `[inputs, outputs, ...]`.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

Parameters = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))  # of ResNet-18: channels, and the stride of the first block


def perceptron(on: Any, p: Parameters, x: Any, layers: int) -> Any:
    """Fully connected layers with ReLU between them."""
    for i in range(1, layers):
        x = on.relu(on.linear(x, p[f"full{i}.weights"], p[f"full{i}.biases"]))
    return on.linear(x, p[f"full{layers}.weights"], p[f"full{layers}.biases"])


mlp, tiny = partial(perceptron, layers=3), partial(perceptron, layers=2)


def cnn(on: Any, p: Parameters, x: Any) -> Any:
    """Two convolutions, each with a pool, and two fully connected layers, for 28 × 28 pixels."""
    x = on.max_pool(on.relu(on.convolution(x, p["conv1.weights"], p["conv1.biases"])), 2)
    x = on.max_pool(on.relu(on.convolution(x, p["conv2.weights"], p["conv2.biases"])), 2)
    return tiny(on, p, on.flatten(x))


def demo(on: Any, p: Parameters, x: Any) -> Any:
    """The network of examples/03_digits_cnn.py."""
    x = on.convolution(x, p["conv1.weights"], p["conv1.biases"])
    x = on.relu(on.batch_norm(x, p["norm.gamma"], p["norm.beta"], "norm"))
    x = on.relu(on.convolution(x, p["conv2.weights"], p["conv2.biases"]))
    return tiny(on, p, on.flatten(on.dropout(on.max_pool(x, 2), 0.2)))


def resnet18(on: Any, p: Parameters, x: Any) -> Any:
    """ResNet-18 with the 3 × 3 stem that is usual for 32 × 32 pixels; convolutions have no biases."""

    def normalized(x: Any, name: str, stride: int = 1) -> Any:
        x = on.convolution(x, p[f"{name}.weights"], None, stride)
        return on.batch_norm(x, p[f"{name}.gamma"], p[f"{name}.beta"], name)

    x = on.relu(normalized(x, "stem"))
    for stage, (_, first_stride) in enumerate(STAGES):
        for block, stride in enumerate((first_stride, 1)):
            name = f"stage{stage}.block{block}"
            shortcut = normalized(x, f"{name}.shortcut", stride) if f"{name}.shortcut.weights" in p else x
            x = on.relu(normalized(x, f"{name}.conv1", stride))
            x = on.relu(on.add(normalized(x, f"{name}.conv2"), shortcut))
    return on.linear(on.mean_of_pixels(x), p["full.weights"], p["full.biases"])


def lstm(on: Any, p: Parameters, x: Any) -> Any:
    """One LSTM; its output at the last step is classified."""
    return on.linear(on.last_of_lstm(x, p, "lstm"), p["full.weights"], p["full.biases"])


def transformer(on: Any, p: Parameters, x: Any, layers: int, heads: int) -> Any:
    """An encoder with normalization first: every token sees all others and gets a class of its own."""

    def linear(x: Any, name: str) -> Any:
        return on.linear(x, p[f"{name}.weights"], p[f"{name}.biases"])

    def normalized(x: Any, name: str) -> Any:
        return on.layer_norm(x, p[f"{name}.gamma"], p[f"{name}.beta"])

    x = on.add_parameter(on.embedding(x, p["tokens.weights"]), p["positions.weights"])
    for i in range(layers):
        x = on.add(x, on.attention(normalized(x, f"layer{i}.norm1"), p, f"layer{i}.attention", heads))
        inner = on.gelu(linear(normalized(x, f"layer{i}.norm2"), f"layer{i}.full1"))
        x = on.add(x, linear(inner, f"layer{i}.full2"))
    return on.rows(linear(normalized(x, "norm"), "full"))


def autoencoder(on: Any, p: Parameters, x: Any, layers: int, classes: int) -> Any:
    """Fully connected layers through a narrow one and back: every pixel gets one of a few intensities."""
    return on.split_rows(perceptron(on, p, x, layers), classes)


def separable(on: Any, p: Parameters, x: Any, strides: Sequence[int]) -> Any:
    """Like MobileNet: each block filters every channel by itself, with a stride, then mixes the channels."""

    def activated(x: Any, name: str) -> Any:
        return on.relu(on.batch_norm(x, p[f"{name}.gamma"], p[f"{name}.beta"], name))

    x = activated(on.convolution(x, p["stem.weights"], None, 2), "stem")
    for i, stride in enumerate(strides):
        x = activated(on.depthwise_convolution(x, p[f"block{i}.depth.weights"], stride), f"block{i}.depth")
        x = activated(on.convolution(x, p[f"block{i}.point.weights"], None), f"block{i}.point")
    return on.linear(on.mean_of_pixels(x), p["full.weights"], p["full.biases"])


def dense(on: Any, p: Parameters, x: Any, blocks: int, layers: int) -> Any:
    """Like DenseNet: a layer sees the feature maps of all layers before it in its block."""

    def activated(x: Any, name: str) -> Any:
        return on.relu(on.batch_norm(x, p[f"{name}.gamma"], p[f"{name}.beta"], name))

    def convolved(x: Any, name: str) -> Any:
        return on.convolution(activated(x, name), p[f"{name}.weights"], None)

    x = on.convolution(x, p["stem.weights"], None)
    for block in range(blocks):
        if block:
            x = on.average_pool(convolved(x, f"transition{block}"), 2)
        for i in range(layers):
            x = on.concatenate(x, convolved(x, f"block{block}.layer{i}"))
    return on.linear(on.mean_of_pixels(activated(x, "norm")), p["full.weights"], p["full.biases"])


def unet(on: Any, p: Parameters, x: Any, levels: int) -> Any:
    """Down to small images and up again; the way up also sees the large ones. Every pixel gets a class."""

    def twice(x: Any, name: str) -> Any:
        for i in (1, 2):
            x = on.relu(on.convolution(x, p[f"{name}.conv{i}.weights"], p[f"{name}.conv{i}.biases"]))
        return x

    kept = []
    for i in range(levels):
        kept.append(twice(x, f"down{i}"))
        x = on.max_pool(kept[-1], 2)
    x = twice(x, "bottom")
    for i in reversed(range(levels)):
        x = on.transposed_convolution(x, p[f"up{i}.grow.weights"], p[f"up{i}.grow.biases"])
        x = twice(on.concatenate(kept[i], x), f"up{i}")
    return on.pixels_as_rows(on.convolution(x, p["classes.weights"], p["classes.biases"]))


def bilstm(on: Any, p: Parameters, x: Any) -> Any:
    """A stacked LSTM in both directions; its output at every step is classified."""
    return on.rows(on.linear(on.lstm_both_ways(x, p, "lstm"), p["full.weights"], p["full.biases"]))


def encoder(on: Any, p: Parameters, x: Any, layers: int, heads: int) -> Any:
    """An encoder of measured values, not tokens, with normalization last; the mean over all steps is classified."""

    def linear(x: Any, name: str) -> Any:
        return on.linear(x, p[f"{name}.weights"], p[f"{name}.biases"])

    def normalized(x: Any, name: str) -> Any:
        return on.layer_norm(x, p[f"{name}.gamma"], p[f"{name}.beta"])

    x = on.add_parameter(linear(x, "values"), p["positions.weights"])
    for i in range(layers):
        x = normalized(on.add(x, on.attention(x, p, f"layer{i}.attention", heads)), f"layer{i}.norm1")
        inner = on.relu(linear(x, f"layer{i}.full1"))
        x = normalized(on.add(x, linear(inner, f"layer{i}.full2")), f"layer{i}.norm2")
    return linear(on.mean_of_steps(x), "full")


def layers(**weights: tuple[int, ...]) -> Shapes:
    """Shapes of weights and biases from the shapes of the weights."""
    shapes = {f"{name}.weights": shape for name, shape in weights.items()}
    return shapes | {f"{name}.biases": shape[:1] for name, shape in weights.items()}


def normalization(name: str, channels: int) -> Shapes:
    """Parameters and running statistics of a batch normalization."""
    return {f"{name}.{part}": (channels,) for part in ("gamma", "beta", "mean", "variance")}


def resnet18_shapes(channels: int, classes: int, narrow: int = 1) -> Shapes:
    """Parameters of `resnet18`; `narrow` divides the width of every stage."""
    shapes: Shapes = {}

    def normalized(name: str, *weights: int) -> None:
        shapes.update({f"{name}.weights": weights} | normalization(name, weights[0]))

    inputs = STAGES[0][0] // narrow
    normalized("stem", inputs, channels, 3, 3)
    for stage, (full_width, stride) in enumerate(STAGES):
        width = full_width // narrow
        for block in range(2):
            name = f"stage{stage}.block{block}"
            normalized(f"{name}.conv1", width, inputs, 3, 3)
            normalized(f"{name}.conv2", width, width, 3, 3)
            if block == 0 and (stride != 1 or inputs != width):
                normalized(f"{name}.shortcut", width, inputs, 1, 1)
            inputs = width
    return shapes | layers(full=(classes, inputs))


def lstm_shapes(inputs: int, hidden: int, classes: int) -> Shapes:
    """Parameters of `lstm`."""
    recurrent = {"lstm.input.weights": (4 * hidden, inputs), "lstm.hidden.weights": (4 * hidden, hidden)}
    return recurrent | {"lstm.biases": (4 * hidden,)} | layers(full=(classes, hidden))


def transformer_shapes(vocabulary: int, tokens: int, width: int, depth: int, classes: int) -> Shapes:
    """Parameters of `transformer`."""
    shapes = {"tokens.weights": (vocabulary, width), "positions.weights": (tokens, width)}
    for i in range(depth):
        attention, norms = f"layer{i}.attention", (f"layer{i}.norm1", f"layer{i}.norm2")
        shapes |= layers(**{f"{attention}.joint": (3 * width, width), f"{attention}.output": (width, width)})
        shapes |= layers(**{f"layer{i}.full1": (4 * width, width), f"layer{i}.full2": (width, 4 * width)})
        shapes |= {f"{norm}.{part}": (width,) for norm in norms for part in ("gamma", "beta")}
    return shapes | {"norm.gamma": (width,), "norm.beta": (width,)} | layers(full=(classes, width))


def separable_shapes(channels: Sequence[int], classes: int) -> Shapes:
    """Parameters of `separable`: the channels of the image, of the stem and of every block."""
    shapes = {"stem.weights": (channels[1], channels[0], 3, 3)} | normalization("stem", channels[1])
    for i, (inputs, outputs) in enumerate(pairwise(channels[1:])):
        shapes |= {f"block{i}.depth.weights": (inputs, 1, 3, 3)} | normalization(f"block{i}.depth", inputs)
        shapes |= {f"block{i}.point.weights": (outputs, inputs, 1, 1)} | normalization(f"block{i}.point", outputs)
    return shapes | layers(full=(classes, channels[-1]))


def dense_shapes(channels: int, growth: int, blocks: int, depth: int, classes: int) -> Shapes:
    """Parameters of `dense`; `growth` channels are added by a layer, and a transition keeps half of them."""
    width = 2 * growth
    shapes: Shapes = {"stem.weights": (width, channels, 3, 3)}
    for block in range(blocks):
        if block:
            name = f"transition{block}"
            shapes |= {f"{name}.weights": (width // 2, width, 1, 1)} | normalization(name, width)
            width //= 2
        for i in range(depth):
            name = f"block{block}.layer{i}"
            shapes |= {f"{name}.weights": (growth, width, 3, 3)} | normalization(name, width)
            width += growth
    return shapes | normalization("norm", width) | layers(full=(classes, width))


def unet_shapes(channels: int, width: int, levels: int, classes: int) -> Shapes:
    """Parameters of `unet`; `width` channels at full size, twice as many with each level down."""
    shapes: Shapes = {}
    widths = [width << i for i in range(levels + 1)]
    for i, (inputs, outputs) in enumerate(pairwise([channels, *widths])):
        name = f"down{i}" if i < levels else "bottom"
        shapes |= layers(**{f"{name}.conv1": (outputs, inputs, 3, 3), f"{name}.conv2": (outputs, outputs, 3, 3)})
    for i, (outputs, inputs) in enumerate(pairwise(widths)):
        shapes |= {f"up{i}.grow.weights": (inputs, outputs, 2, 2), f"up{i}.grow.biases": (outputs,)}
        shapes |= layers(**{f"up{i}.conv1": (outputs, 2 * outputs, 3, 3), f"up{i}.conv2": (outputs, outputs, 3, 3)})
    return shapes | layers(classes=(classes, width, 1, 1))


def bilstm_shapes(inputs: int, hidden: int, depth: int, classes: int) -> Shapes:
    """Parameters of `bilstm`."""
    shapes: Shapes = {}
    for i in range(depth):
        for name in (f"lstm.layer{i}.forward", f"lstm.layer{i}.backward"):
            shapes |= {f"{name}.input.weights": (4 * hidden, 2 * hidden if i else inputs)}
            shapes |= {f"{name}.hidden.weights": (4 * hidden, hidden), f"{name}.biases": (4 * hidden,)}
    return shapes | layers(full=(classes, 2 * hidden))


def encoder_shapes(features: int, steps: int, width: int, inner: int, depth: int, classes: int) -> Shapes:
    """Parameters of `encoder`; `inner` is the width between two fully connected layers."""
    shapes = layers(values=(width, features)) | {"positions.weights": (steps, width)}
    for i in range(depth):
        attention, norms = f"layer{i}.attention", (f"layer{i}.norm1", f"layer{i}.norm2")
        shapes |= layers(**{f"{attention}.joint": (3 * width, width), f"{attention}.output": (width, width)})
        shapes |= layers(**{f"layer{i}.full1": (inner, width), f"layer{i}.full2": (width, inner)})
        shapes |= {f"{norm}.{part}": (width,) for norm in norms for part in ("gamma", "beta")}
    return shapes | layers(full=(classes, width))
