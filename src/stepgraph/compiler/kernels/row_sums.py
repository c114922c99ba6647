"""The memory that PyTorch's sums over rows take on a GPU.

PyTorch divides long columns among blocks of threads, and every thread keeps room for the sums of a whole block: for the
biases of many classes, that is a quarter of their gradient. The sizes of blocks are those of PyTorch's `Reduce.cuh`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

THREADS, WIDEST, VECTOR = 512, 32, 4  # threads of a block, and its columns: each of so many numbers
FEWEST, MOST = 16, 256  # numbers that a thread adds up
RESIDENT = 2048  # threads of a multiprocessor
INDEXED = 1 << 31  # bytes that a kernel reaches; larger arrays are halved and added up one part after another


def workspace(given: Sequence[Any], _: int) -> int:
    """The bytes for a sum of these arguments, if all but the last axes of a contiguous array are added up."""
    array, axes = given[0], given[1]
    count = len(axes) if axes else array.ndim
    leading = sorted(axis % array.ndim for axis in axes or ()) == list(range(count))
    if array.device.type != "cuda" or not leading or count == array.ndim or not array.is_contiguous():
        return 0
    rows, columns = math.prod(array.shape[:count]), math.prod(array.shape[count:])
    while rows > 1 and rows * columns * array.element_size() > INDEXED:
        rows -= rows // 2
    processors = torch.cuda.get_device_properties(array.device).multi_processor_count
    return _bytes(rows, columns, max(4, array.element_size()), processors)


def _bytes(rows: int, columns: int, size: int, processors: int) -> int:
    """The bytes for the sums of a matrix, in numbers of this size."""
    vector = next(one for one in (VECTOR, 2, 1) if columns % one == 0)
    width = min(_power(columns // vector), WIDEST)
    height = min(_power(rows), THREADS // vector // width)
    if rows < min(height * FEWEST, MOST):
        return 0
    each, across = -(-rows // height), -(-columns // vector // width)
    blocks = processors * (RESIDENT // (width * height))
    if each < MOST or across > blocks:
        return 0
    divided = max(min(-(-blocks // across), -(-each // FEWEST)), -(-each // MOST))
    return size * columns * divided * width * vector if divided > 1 else 0


def _power(number: int) -> int:
    """The greatest power of two that is not greater."""
    return 1 << max(number.bit_length() - 1, 0)
