"""Rows of the conformance table: dropout.

The reference writes the counter-based stream down a second time, in NumPy's wrapping 32-bit arithmetic: a mask is a
published function of (seed, step, salt, index), so that runs can be resumed and devices agree.
"""

from collections.abc import Callable

import numpy as np

from stepgraph.errors import DataTypeError
from stepgraph.layers.dropout import DropoutLayer
from tests.layers.case import Bad, Case, normal

SEED, STEP, SALT = 1, 2, 0  # the stream and the node's salt under which the table is checked


def mixed(value: np.ndarray | int) -> np.ndarray:
    """The 32-bit finalizer: xor with the upper bits, multiply, twice, and xor once more."""
    bits = np.atleast_1d(np.asarray(value)).astype(np.uint64).astype(np.uint32)
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    return bits ^ (bits >> np.uint32(16))


def mask(shape: tuple[int, ...], rate: float, seed: int, step: int, salt: int) -> np.ndarray:
    key = mixed(mixed(seed + salt).astype(np.uint64) + np.uint64(step)).astype(np.uint64)
    factor, offset = mixed(key + np.uint64(1)) | np.uint32(1), mixed(key + np.uint64(2))
    bits = mixed(np.arange(np.prod(shape), dtype=np.uint32) * factor + offset)
    return (bits.view(np.int32).astype(np.int64) + 2**31 >= round(rate * 2**32)).reshape(shape)


def dropped(rate: float, seed: int = 0) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: x * mask(x.shape, rate, SEED, STEP, SALT + 7919 * seed) / (1 - rate)


BAD = (Bad((np.zeros((2, 3), np.int32),), DataTypeError, "int32"),)

CASES: list[Case] = [
    Case("dropout", lambda: DropoutLayer(0.5), (normal(4, 6, 5),), dropped(0.5), bad=BAD),
    Case("dropout-low-rate", lambda: DropoutLayer(0.1), (normal(8, 12),), dropped(0.1)),
    Case(
        "dropout-high-rate",
        lambda: DropoutLayer(0.9),
        (
            normal(
                60,
            ),
        ),
        dropped(0.9),
    ),
    Case("dropout-seeded", lambda: DropoutLayer(0.25, seed=42), (normal(2, 3, 4, 5),), dropped(0.25, 42)),
    Case("dropout-rate-zero", lambda: DropoutLayer(0.0), (normal(3, 4),), lambda x: x, lambda x: x),
    Case("dropout-inference", lambda: DropoutLayer(0.5), (normal(3, 4),), lambda x: x, lambda x: x, training=False),
]
