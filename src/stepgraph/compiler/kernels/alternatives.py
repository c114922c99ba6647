"""What the compiler knows about an implementation that competes with PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.compiler.kernels.measure import GAIN, Implementation

CONVOLUTION_WEIGHTS = "convolution weights"  # the gradient of a convolution's weights alone: PyTorch has no operator


@dataclass(frozen=True)
class Alternative:
    """An implementation of one operation.

    Args:
        operation: the operator of PyTorch that it replaces, or `CONVOLUTION_WEIGHTS`.
        name: a short name, unique for the operation.
        function: takes the arguments of the operation.
        fits: whether it supports these arguments; arrays have no memory.
        workspace: its workspace in bytes, from its arguments and the bytes of its results.
        takes_out: whether it writes into the memory that is passed as `out`.
        gain: the share of PyTorch's time that it must stay below to be chosen.
        scales: whether its time is proportional to the number of images, so that some of them suffice to measure it.
        sample: smaller arguments to measure with, for the same choice.
        deviation: the standard deviation of the numbers it is measured with.
    """

    operation: Any
    name: str
    function: Implementation
    fits: Callable[[Sequence[Any]], bool]
    workspace: Callable[[Sequence[Any], int], int] | None = None
    takes_out: bool = False
    gain: float = GAIN
    scales: bool = False
    sample: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None
    deviation: float = 1.0
