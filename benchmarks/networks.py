"""The networks that are measured, each written once for every library, and the shapes of their parameters.

A network is a function `network(on, p, x)`: `on` has one library's operators, `p` that library's parameters by name,
`x` the inputs, and the logits come back, one row for each label.

Images are `[batch, channels, height, width]`, weights `[outputs, inputs, ...]`, sequences `[batch, steps, features]`; a
library that likes another order changes it before the first step. The four gates of an LSTM (input, forget, candidate,
output) are stacked in one array, and so are query, key and value of an attention.
"""

from functools import partial
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
