"""The models that are measured: a network, its first numbers, and a batch, the same for every library.

To add a model, write its function in `networks.py` and a row in `MODELS` and in `SMALL`; for an operator that is new
here, add a method of its name to `in_stepgraph.py`, `in_pytorch.py` and `in_jax.py`.

The end of a parameter's name tells what it starts from: `weights` are random, `gamma` and `variance` are ones, all else
is zeros. `mean` and `variance` are running statistics, which are not trained.

Programs measure the standing set unless told otherwise. The further models are a control group: nothing is to be tuned
for them, so a gain on the standing set that is missing there comes from tuning for its shapes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import networks
from benchmarks.networks import Shapes, layers, normalization

BETAS = (0.9, 0.999)
EPSILON = 1e-12  # libraries add Adam's ε at different places: so small, it makes no difference
NORMALIZATION_EPSILON, NORMALIZATION_MOMENTUM = 1e-5, 0.9  # the share of the running statistics that is kept

Arrays = dict[str, np.ndarray]
Network = Callable[[Any, dict[str, Any], Any], Any]


@dataclass(frozen=True)
class Model:
    """A network, the shapes of its parameters and statistics, and the shape of a batch.

    Example:
        >>> MODELS["mlp"].parameter_count
        669706
    """

    network: Network
    inputs: tuple[int, ...]  # the whole batch, as the CPU has it
    shapes: Shapes
    cuda_batch: int
    classes: int = 10
    learning_rate: float = 1e-4
    vocabulary: int = 0  # inputs are numbers of tokens below this
    labels_each: int = 1  # labels of one sample: of its tokens, steps or pixels
    flattened: Shapes = field(
        default_factory=dict
    )  # weights that read flat images, and those [channels, height, width]

    def of_batch(self, size: int) -> "Model":
        """The same model with another batch size."""
        return replace(self, inputs=(size, *self.inputs[1:]), cuda_batch=size)

    def on(self, device: str) -> "Model":
        """The same model with the batch size for a device."""
        return self.of_batch(self.cuda_batch) if device == "cuda" else self

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""
        return self.inputs[0]

    @property
    def label_count(self) -> int:
        """Labels of a batch."""
        return self.batch_size * self.labels_each

    @property
    def has_images(self) -> bool:
        """Whether the order of channels and pixels in memory matters."""
        return len(self.inputs) == 4

    @property
    def parameter_count(self) -> int:
        """Numbers that are trained."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if not _is_statistic(name))

    def parameters(self) -> Arrays:
        """What is trained, at its first values: the same at every call, in new memory."""
        return {name: value for name, value in self._values().items() if not _is_statistic(name)}

    def statistics(self) -> Arrays:
        """What the forward pass keeps, at its first values."""
        return {name: value for name, value in self._values().items() if _is_statistic(name)}

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and class numbers: the same at every call."""
        random = np.random.default_rng(1)
        if self.vocabulary:
            inputs = random.integers(0, self.vocabulary, self.inputs)
        else:
            inputs = random.standard_normal(self.inputs, dtype=np.float32)
        return inputs, random.integers(0, self.classes, self.label_count)

    def _values(self) -> Arrays:
        random = np.random.default_rng(0)
        return {name: _first_value(name, shape, random) for name, shape in self.shapes.items()}


def _first_value(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if name.endswith(".weights"):
        scale = math.sqrt(2 / math.prod(shape[1:]))
        return (scale * random.standard_normal(shape)).astype(np.float32)
    return np.full(shape, name.endswith((".gamma", ".variance")), np.float32)


def _is_statistic(name: str) -> bool:
    return name.endswith((".mean", ".variance"))


def _mlp(batch: int, *widths: int, cuda_batch: int) -> Model:
    weights = {f"full{i}": (b, a) for i, (a, b) in enumerate(pairwise(widths), 1)}
    network = partial(networks.perceptron, layers=len(weights))
    return Model(network, (batch, widths[0]), layers(**weights), cuda_batch)


def _cnn(batch: int, size: int, conv1: int, conv2: int, hidden: int, cuda_batch: int) -> Model:
    pixels = conv2, size // 4, size // 4
    weights = layers(
        conv1=(conv1, 1, 3, 3), conv2=(conv2, conv1, 3, 3), full1=(hidden, math.prod(pixels)), full2=(10, hidden)
    )
    return Model(networks.cnn, (batch, 1, size, size), weights, cuda_batch, flattened={"full1.weights": pixels})


def _demo(batch: int, conv1: int, conv2: int, hidden: int, cuda_batch: int) -> Model:
    pixels = conv2, 4, 4
    weights = layers(
        conv1=(conv1, 1, 3, 3), conv2=(conv2, conv1, 3, 3), full1=(hidden, math.prod(pixels)), full2=(10, hidden)
    )
    shapes = weights | normalization("norm", conv1)
    return Model(networks.demo, (batch, 1, 8, 8), shapes, cuda_batch, flattened={"full1.weights": pixels})


def _transformer(
    batch: int, tokens: int, width: int, depth: int, heads: int, vocabulary: int, cuda_batch: int
) -> Model:
    network = partial(networks.transformer, layers=depth, heads=heads)
    shapes = networks.transformer_shapes(vocabulary, tokens, width, depth, vocabulary)
    return Model(
        network, (batch, tokens), shapes, cuda_batch, classes=vocabulary, vocabulary=vocabulary, labels_each=tokens
    )


def _autoencoder(batch: int, pixels: int, hidden: int, code: int, classes: int, cuda_batch: int) -> Model:
    widths = pixels, hidden, code, hidden, pixels * classes
    weights = {f"full{i}": (b, a) for i, (a, b) in enumerate(pairwise(widths), 1)}
    network = partial(networks.autoencoder, layers=len(weights), classes=classes)
    shapes = layers(**weights)
    return Model(network, (batch, pixels), shapes, cuda_batch, classes=classes, labels_each=pixels)


def _separable(batch: int, size: int, channels: tuple[int, ...], strides: tuple[int, ...], cuda_batch: int) -> Model:
    network, shapes = partial(networks.separable, strides=strides), networks.separable_shapes(channels, 10)
    return Model(network, (batch, channels[0], size, size), shapes, cuda_batch)


def _dense(batch: int, size: int, growth: int, blocks: int, depth: int, cuda_batch: int) -> Model:
    network = partial(networks.dense, blocks=blocks, layers=depth)
    shapes = networks.dense_shapes(3, growth, blocks, depth, 10)
    return Model(network, (batch, 3, size, size), shapes, cuda_batch)


def _unet(batch: int, size: int, width: int, levels: int, classes: int, cuda_batch: int) -> Model:
    network, shapes = partial(networks.unet, levels=levels), networks.unet_shapes(3, width, levels, classes)
    return Model(network, (batch, 3, size, size), shapes, cuda_batch, classes=classes, labels_each=size * size)


def _bilstm(batch: int, steps: int, features: int, hidden: int, depth: int, classes: int, cuda_batch: int) -> Model:
    shapes = networks.bilstm_shapes(features, hidden, depth, classes)
    return Model(networks.bilstm, (batch, steps, features), shapes, cuda_batch, classes=classes, labels_each=steps)


def _encoder(
    batch: int, steps: int, features: int, width: int, inner: int, depth: int, heads: int, cuda_batch: int
) -> Model:
    network = partial(networks.encoder, layers=depth, heads=heads)
    shapes = networks.encoder_shapes(features, steps, width, inner, depth, 10)
    return Model(network, (batch, steps, features), shapes, cuda_batch)


FURTHER = ("autoencoder", "separable", "dense", "unet", "bilstm", "encoder")
SLOW = 1e-5  # at 1e-4 the loss of ResNet-18 falls to a tenth in three steps, and rounding grows as fast

MODELS: dict[str, Model] = {
    "mlp": _mlp(128, 784, 512, 512, 10, cuda_batch=4096),
    "cnn": _cnn(64, 28, 32, 64, hidden=128, cuda_batch=1024),
    "resnet18": Model(
        networks.resnet18, (32, 3, 32, 32), networks.resnet18_shapes(3, 10), cuda_batch=512, learning_rate=SLOW
    ),
    "lstm": Model(networks.lstm, (32, 100, 64), networks.lstm_shapes(64, 256, 10), cuda_batch=128),
    "transformer": _transformer(8, 128, 256, 4, heads=8, vocabulary=256, cuda_batch=64),
    "tiny": _mlp(1, 32, 32, 10, cuda_batch=1),
    "demo": _demo(32, 16, 32, hidden=128, cuda_batch=32),
    "autoencoder": _autoencoder(96, 784, hidden=300, code=36, classes=8, cuda_batch=1536),
    "separable": _separable(24, 48, (3, 20, 40, 72, 72, 136, 136), strides=(1, 2, 1, 2, 1), cuda_batch=384),
    "dense": _dense(16, 36, growth=12, blocks=3, depth=4, cuda_batch=256),
    "unet": _unet(6, 60, width=20, levels=2, classes=5, cuda_batch=96),
    "bilstm": _bilstm(24, 60, 40, hidden=120, depth=2, classes=12, cuda_batch=192),
    "encoder": _encoder(4, 500, 24, width=144, inner=400, depth=3, heads=6, cuda_batch=48),
}
STANDING = tuple(name for name in MODELS if name not in FURTHER)

# The same networks, so small that they run in no time; their shapes are their own.
SMALL: dict[str, Model] = {
    "mlp": _mlp(3, 5, 6, 7, 10, cuda_batch=3),
    "cnn": _cnn(2, 8, 2, 3, hidden=4, cuda_batch=2),
    "resnet18": Model(
        networks.resnet18, (4, 3, 16, 16), networks.resnet18_shapes(3, 10, 16), cuda_batch=4, learning_rate=SLOW
    ),
    "lstm": Model(networks.lstm, (3, 5, 4), networks.lstm_shapes(4, 6, 10), cuda_batch=3),
    "transformer": _transformer(2, 5, 8, 2, heads=2, vocabulary=11, cuda_batch=2),
    "tiny": _mlp(1, 4, 3, 10, cuda_batch=1),
    "demo": _demo(2, 2, 3, hidden=4, cuda_batch=2),
    "autoencoder": _autoencoder(3, 6, hidden=5, code=2, classes=3, cuda_batch=3),
    "separable": _separable(3, 12, (3, 4, 6), strides=(2,), cuda_batch=3),
    "dense": _dense(3, 8, growth=2, blocks=2, depth=1, cuda_batch=3),
    "unet": _unet(2, 8, width=2, levels=1, classes=3, cuda_batch=2),
    "bilstm": _bilstm(3, 5, 4, hidden=3, depth=2, classes=4, cuda_batch=3),
    "encoder": _encoder(2, 7, 3, width=6, inner=10, depth=1, heads=2, cuda_batch=2),
}
# Large steps, or the first losses of so few parameters would hardly differ and a wrong gradient would not show. With
# this rate no input of a ReLU comes closer to 0 than 3e-5 in 20 steps, so that rounding decides nothing there.
SMALL |= {name: replace(SMALL[name], learning_rate=3e-3) for name in FURTHER}
