"""The models that are measured: each is written once and runs in every library.

A network is a function `network(on, p, x)`: `on` has one library's operators, `p` that library's parameters by name,
`x` the inputs, and the logits come back. To add a model, write the function and a row in `MODELS`; for an operator that
is new here, add a method of its name to `in_stepgraph.py`, `in_pytorch.py` and `in_jax.py`.

Images are `[batch, channels, height, width]`, weights `[outputs, inputs, ...]`; a library that likes another order
changes it before the first step. The end of a parameter's name tells what it starts from: `weights` are random, `gamma`
and `variance` are ones, all else is zeros. `mean` and `variance` are running statistics, which are not trained.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LEARNING_RATE, BETAS = 1e-4, (0.9, 0.999)
EPSILON = 1e-12  # libraries add Adam's ε at different places: so small, it makes no difference
NORMALIZATION_EPSILON, NORMALIZATION_MOMENTUM = 1e-5, 0.9  # the share of the running statistics that is kept

Arrays = dict[str, np.ndarray]
Network = Callable[[Any, dict[str, Any], Any], Any]


def mlp(on: Any, p: dict[str, Any], x: Any) -> Any:
    """784 → 512 → 512 → 10."""
    x = on.relu(on.linear(x, p["full1.weights"], p["full1.biases"]))
    x = on.relu(on.linear(x, p["full2.weights"], p["full2.biases"]))
    return on.linear(x, p["full3.weights"], p["full3.biases"])


def cnn(on: Any, p: dict[str, Any], x: Any) -> Any:
    """Two convolutions, each with a pool, and two fully connected layers, for 28 × 28 pixels."""
    x = on.max_pool(on.relu(on.convolution(x, p["conv1.weights"], p["conv1.biases"])), 2)
    x = on.max_pool(on.relu(on.convolution(x, p["conv2.weights"], p["conv2.biases"])), 2)
    x = on.relu(on.linear(on.flatten(x), p["full1.weights"], p["full1.biases"]))
    return on.linear(x, p["full2.weights"], p["full2.biases"])


def demo(on: Any, p: dict[str, Any], x: Any) -> Any:
    """The network of examples/digits_cnn.py."""
    x = on.convolution(x, p["conv1.weights"], p["conv1.biases"])
    x = on.relu(on.batch_norm(x, p["norm.gamma"], p["norm.beta"], "norm"))
    x = on.relu(on.convolution(x, p["conv2.weights"], p["conv2.biases"]))
    x = on.flatten(on.dropout(on.max_pool(x, 2), 0.2))
    x = on.relu(on.linear(x, p["full1.weights"], p["full1.biases"]))
    return on.linear(x, p["full2.weights"], p["full2.biases"])


@dataclass(frozen=True)
class Model:
    """A network, the shapes of its parameters and statistics, and the shape of a batch.

    Example:
        >>> MODELS["mlp"].parameter_count
        669706
    """

    network: Network
    inputs: tuple[int, ...]  # the whole batch
    shapes: dict[str, tuple[int, ...]]
    classes: int = 10

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return self.inputs[0]

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
        inputs = random.standard_normal(self.inputs, dtype=np.float32)
        return inputs, random.integers(0, self.classes, self.batch_size)

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


def _layers(**weights: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of weights and biases from the shapes of the weights."""
    shapes = {f"{name}.weights": shape for name, shape in weights.items()}
    return shapes | {f"{name}.biases": shape[:1] for name, shape in weights.items()}


def _normalization(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{part}": (channels,) for part in ("gamma", "beta", "mean", "variance")}


MODELS: dict[str, Model] = {
    "mlp": Model(mlp, (128, 784), _layers(full1=(512, 784), full2=(512, 512), full3=(10, 512))),
    "cnn": Model(
        cnn,
        (64, 1, 28, 28),
        _layers(conv1=(32, 1, 3, 3), conv2=(64, 32, 3, 3), full1=(128, 64 * 7 * 7), full2=(10, 128)),
    ),
    "demo": Model(
        demo,
        (32, 1, 8, 8),
        _layers(conv1=(16, 1, 3, 3), conv2=(32, 16, 3, 3), full1=(128, 32 * 4 * 4), full2=(10, 128))
        | _normalization("norm", 16),
    ),
}

# Small, with every operator and with shapes of its own: lets libraries load what they load at first use.
WARM_UP = Model(
    demo,
    (2, 1, 8, 8),
    _layers(conv1=(2, 1, 3, 3), conv2=(3, 2, 3, 3), full1=(4, 3 * 4 * 4), full2=(10, 4)) | _normalization("norm", 2),
)
