"""The step in JAX: one jitted function of parameters, statistics and optimizer state, which are donated.

Images are `[batch, height, width, channels]` here, and weights of convolutions `[height, width, inputs, outputs]`: the
order JAX programs use. Weights of transposed convolutions are those of the convolution they are the transpose of.
Weights that read flat images have their columns in that order too.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.models import BETAS, EPSILON, NORMALIZATION_EPSILON, NORMALIZATION_MOMENTUM, Model


class Operators:
    """The operators of `networks.py` as pure functions; new statistics are left in `statistics`."""

    def __init__(self, statistics: dict[str, jax.Array], key: jax.Array, dropout: bool) -> None:
        self.statistics, self.key, self.keeps_all = dict(statistics), key, not dropout
        self.relu, self.gelu, self.add, self.add_parameter = jax.nn.relu, jax.nn.gelu, jnp.add, jnp.add

    def linear(self, x: jax.Array, weights: jax.Array, biases: jax.Array) -> jax.Array:
        return x @ weights.T + biases

    def convolution(self, x: jax.Array, weights: jax.Array, biases: jax.Array | None, stride: int = 1) -> jax.Array:
        order, border = ("NHWC", "HWIO", "NHWC"), (weights.shape[0] // 2,) * 2
        y = jax.lax.conv_general_dilated(x, weights, (stride,) * 2, (border, border), dimension_numbers=order)
        return y if biases is None else y + biases

    def depthwise_convolution(self, x: jax.Array, weights: jax.Array, stride: int) -> jax.Array:
        order, border = ("NHWC", "HWIO", "NHWC"), (weights.shape[0] // 2,) * 2
        strides, groups = (stride, stride), weights.shape[-1]
        return jax.lax.conv_general_dilated(
            x, weights, strides, (border, border), dimension_numbers=order, feature_group_count=groups
        )

    def transposed_convolution(self, x: jax.Array, weights: jax.Array, biases: jax.Array) -> jax.Array:
        strides, order = weights.shape[:2], ("NHWC", "HWIO", "NHWC")
        grown = jax.lax.conv_transpose(x, weights, strides, "VALID", dimension_numbers=order, transpose_kernel=True)
        return grown + biases

    def max_pool(self, x: jax.Array, size: int) -> jax.Array:
        window = (1, size, size, 1)
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")

    def average_pool(self, x: jax.Array, size: int) -> jax.Array:
        window = (1, size, size, 1)
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, window, window, "VALID") / size**2

    def mean_of_pixels(self, x: jax.Array) -> jax.Array:
        return x.mean((1, 2))

    def mean_of_steps(self, x: jax.Array) -> jax.Array:
        return x.mean(1)

    def concatenate(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.concatenate((x, y), -1)

    def batch_norm(self, x: jax.Array, gamma: jax.Array, beta: jax.Array, name: str) -> jax.Array:
        axes = tuple(range(x.ndim - 1))
        batch = {f"{name}.mean": x.mean(axes), f"{name}.variance": x.var(axes)}
        for key, value in batch.items():
            self.statistics[key] = optax.incremental_update(value, self.statistics[key], 1 - NORMALIZATION_MOMENTUM)
        mean, variance = batch.values()
        return gamma * (x - mean) * jax.lax.rsqrt(variance + NORMALIZATION_EPSILON) + beta

    def layer_norm(self, x: jax.Array, gamma: jax.Array, beta: jax.Array) -> jax.Array:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return gamma * (x - mean) * jax.lax.rsqrt(variance + NORMALIZATION_EPSILON) + beta

    def dropout(self, x: jax.Array, rate: float) -> jax.Array:
        if self.keeps_all:
            return x
        self.key, key = jax.random.split(self.key)
        return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)

    def embedding(self, x: jax.Array, weights: jax.Array) -> jax.Array:
        return weights[x]

    def attention(self, x: jax.Array, p: dict[str, jax.Array], name: str, heads: int) -> jax.Array:
        joint = self.linear(x, p[f"{name}.joint.weights"], p[f"{name}.joint.biases"])
        query, key, value = joint.reshape(*x.shape[:2], 3, heads, -1).transpose(2, 0, 3, 1, 4)
        fits = jax.nn.softmax(query @ key.swapaxes(2, 3) / math.sqrt(query.shape[-1]))
        seen = (fits @ value).swapaxes(1, 2).reshape(x.shape)  # a little faster than jax.nn.dot_product_attention
        return self.linear(seen, p[f"{name}.output.weights"], p[f"{name}.output.biases"])

    def last_of_lstm(self, x: jax.Array, p: dict[str, jax.Array], name: str) -> jax.Array:
        return lstm(x, p, name, returns_sequences=False)

    def lstm_both_ways(self, x: jax.Array, p: dict[str, jax.Array], name: str) -> jax.Array:
        depth = sum(key.startswith(f"{name}.") and key.endswith(".forward.biases") for key in p)
        for i in range(depth):
            ways = [lstm(x, p, f"{name}.layer{i}.{way}", way == "backward") for way in ("forward", "backward")]
            x = jnp.concatenate(ways, -1)
        return x

    def flatten(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1)

    def rows(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, x.shape[-1])

    def split_rows(self, x: jax.Array, width: int) -> jax.Array:
        return x.reshape(-1, width)

    def pixels_as_rows(self, x: jax.Array) -> jax.Array:
        return self.rows(x)


def lstm(
    x: jax.Array, p: dict[str, jax.Array], name: str, backward: bool = False, returns_sequences: bool = True
) -> jax.Array:
    """One product for the inputs of all steps; in the scan only the one with the hidden weights is left."""
    gates = (x @ p[f"{name}.input.weights"].T + p[f"{name}.biases"]).swapaxes(0, 1)
    weights = p[f"{name}.hidden.weights"].T

    def step(
        state: tuple[jax.Array, jax.Array], gate: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array | None]:
        h, c = state
        i, f, g, o = jnp.split(gate + h @ weights, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h if returns_sequences else None

    zeros = jnp.zeros((x.shape[0], weights.shape[0]), x.dtype)
    (last, _), outputs = jax.lax.scan(step, (zeros, zeros), gates, reverse=backward)
    return outputs.swapaxes(0, 1) if returns_sequences else last


class Jax:
    """`jax.jit` over the whole step, with `optax.adam`."""

    def __init__(self, model: Model, device: str, dropout: bool) -> None:
        optimizer = optax.adam(model.learning_rate, *BETAS, eps=EPSILON)

        def loss(parameters: Any, statistics: Any, key: Any, inputs: Any, labels: Any) -> Any:
            on = Operators(statistics, key, dropout)
            logits = model.network(on, parameters, inputs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), (on.statistics, on.key)

        def step(parameters: Any, statistics: Any, key: Any, state: Any, inputs: Any, labels: Any) -> Any:
            derivative = jax.value_and_grad(loss, has_aux=True)
            (value, (statistics, key)), gradients = derivative(parameters, statistics, key, inputs, labels)
            updates, state = optimizer.update(gradients, state)
            return value, (optax.apply_updates(parameters, updates), statistics, key, state)

        self.function = jax.jit(step, donate_argnums=(0, 1, 2, 3))
        place = _placing(device)
        values = model.parameters()
        for name, pixels in model.flattened.items():
            values[name] = values[name].reshape(-1, *pixels).transpose(0, 2, 3, 1).reshape(values[name].shape)
        parameters = {name: place(value, (2, 3, 1, 0)) for name, value in values.items()}
        statistics = {name: place(value) for name, value in model.statistics().items()}
        key = jax.device_put(jax.random.key(0), jax.devices(device)[0])
        self.carried = (parameters, statistics, key, optimizer.init(parameters))
        inputs, labels = model.batch()
        self.batch = place(inputs, (0, 2, 3, 1)), place(labels)
        self.last: jax.Array | None = None

    def step(self) -> None:
        self.last, self.carried = self.function(*self.carried, *self.batch)

    def wait(self) -> None:
        jax.block_until_ready((self.last, self.carried))

    @property
    def loss(self) -> float:
        assert self.last is not None
        return float(self.last)


def is_on(device: str) -> bool:
    """Whether this JAX can use the device."""
    try:
        return bool(jax.devices(device))
    except RuntimeError:
        return False


def _placing(device: str) -> Any:
    def place(value: np.ndarray, order: tuple[int, ...] = ()) -> jax.Array:
        value = value.astype(np.int32) if value.dtype == np.int64 else value
        return jax.device_put(value.transpose(order) if len(order) == value.ndim else value, jax.devices(device)[0])

    return place
