"""Which implementation to use without measuring: a fixed rule by processor and shape.

Measured choices depend on what else ran at the time, so two runs can compute different bits. Ranks that divide updates
among themselves must compute the same ones in any number, on any machine of the same kind. The rules take what usually
wins when measured; where nothing is known about a processor, PyTorch's own implementation stays.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stepgraph.compiler.kernels import lstm_onednn
from stepgraph.compiler.kernels.alternatives import CONVOLUTION_WEIGHTS
from stepgraph.compiler.kernels.measure import Implementations
from stepgraph.compiler.kernels.patches import extents
from stepgraph.compiler.step import Step
from stepgraph.layers.convolution import ConvolutionLayer

aten, ours = torch.ops.aten, torch.ops.stepgraph
Arguments = Sequence[Any]
Names = tuple[str, ...]
SMALLEST = 8  # rows and columns of a result from which transforms of tiles pay
WIDEST = 8  # rows and columns of a kernel that NNPACK transforms in small tiles
MANY, ENOUGH = 64, 32  # outputs and inputs from which Winograd's filtering of weight gradients pays
LARGE = 1 << 17  # numbers from which normalization row by row pays
WIDE = 1 << 8  # pixels of a gray image from which rows of them are faster to multiply than windows
MULTIPLIED = 1 << 21  # multiplications from which oneDNN's products pay
ACROSS = 1 << 7  # columns from which they pay if the first factor is copied


def preferred(operator: str, implementations: Implementations, arguments: Arguments, **_: Any) -> str:
    """The name of the implementation that the rule prefers, of those that exist; otherwise the first, the reference.

    Args:
        operator: the name of the operator.
        implementations: functions of `arguments`, by name.
        arguments: arrays, of which only shape, strides and type matter, and settings.
    """
    rule = _rules().get(operator.split(",", maxsplit=1)[0])  # without the layout of images
    names = () if rule is None else rule(arguments)
    return next((name for name in names if name in implementations), next(iter(implementations)))


def kind() -> tuple[str | bool, ...]:
    """What decides about the rules on this machine; ranks with different ones would compute different bits."""
    return (platform.machine(), torch.backends.nnpack.is_available(), _multiplies_half()) if _rules() else ()


def prefers_last(step: Step) -> bool:
    """Whether images have their channels last in memory: if a convolution reads gray ones.

    Args:
        step: a step with convolutions, and pooling between them.
    """
    read = (node.sources[0] for node in step.nodes if isinstance(node.layer, ConvolutionLayer))
    return _rules() is _ON_LINUX_ARM and any(one.shape[1] == 1 and math.prod(one.shape[2:]) >= WIDE for one in read)


def _rules() -> dict[str, Callable[[Arguments], Names]]:
    """The rules for this processor, by operator."""
    if platform.machine() == "aarch64":
        return _ON_LINUX_ARM
    return _ON_LINUX_AMD if platform.machine() == "x86_64" and _is_amd() else {}


def _convolution(arguments: Arguments) -> Names:
    x, w, _, stride, padding = arguments
    tiled = ("nnpack",) if _is_tiled(extents(x, w, stride, padding), w, stride, padding) else ()
    return ("taps", *tiled) if _is_gray(x) else tiled


def _convolution_data(arguments: Arguments) -> Names:
    _, size, w, stride, padding = arguments
    return ("flipped",) if _is_tiled(size[2:], w, stride, padding) else ("native",)


def _convolution_weights(arguments: Arguments) -> Names:
    _, x, w, _, _ = arguments
    if math.prod(w.shape[2:]) == 1:
        return ()
    if _is_gray(x):
        return ("taps", "gemm")
    filters = ("winograd 4", "winograd") if len(w) >= MANY and w.shape[1] >= ENOUGH else ()
    return (*filters, "gemm")


def _is_tiled(result: Sequence[int], w: torch.Tensor, stride: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the tiles of NNPACK pay for a convolution: stride 1, a kernel of more than a pixel, and enough pixels."""
    fits = all(1 < size <= WIDEST and added < size for size, added in zip(w.shape[2:], padding, strict=True))
    return fits and all(step == 1 for step in stride) and min(result) >= SMALLEST


def _is_gray(x: torch.Tensor) -> bool:
    return x.shape[1] == 1 and math.prod(x.shape[2:]) >= WIDE


def _batch_norm(arguments: Arguments) -> Names:
    x = arguments[0]
    return ("rows",) if x.numel() >= LARGE and math.prod(x.shape[2:]) >= SMALLEST**2 else ()


def _product(arguments: Arguments) -> Names:
    *_, a, b = arguments
    pays = math.prod(a.shape) * b.shape[1] >= MULTIPLIED and (a.is_contiguous() or b.shape[1] >= ACROSS)
    return ("onednn",) if pays else ()


def _steps(states: int, weights: int) -> Callable[[Arguments], Names]:
    """The rule for a recurrent layer, by the positions of an array of all steps and of the hidden weights."""

    def rule(arguments: Arguments) -> Names:
        return ("onednn",) if arguments[states].shape[1] * arguments[weights].numel() >= MULTIPLIED else ()

    return rule


def _half(arguments: Arguments) -> Names:
    return () if _multiplies_half() else ("float32",)


@cache
def _multiplies_half() -> bool:
    """Whether the processor has instructions that multiply bfloat16; others emulate half precision."""
    return re.search(r"\b(bf16|avx512_bf16|amx_bf16)\b", _described()) is not None


@cache
def _is_amd() -> bool:
    return "AuthenticAMD" in _described()


def _described() -> str:
    """What Linux says about the processor; elsewhere nothing."""
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


_PRODUCTS = (aten.mm, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward)
_ON_LINUX_ARM: dict[str, Callable[[Arguments], Names]] = {
    "convolution": _convolution,
    "convolution data": _convolution_data,
    CONVOLUTION_WEIGHTS: _convolution_weights,
    str(aten.addmm.default): lambda arguments: ("convolution", *_half(arguments)),
    str(aten.max_pool2d_with_indices.default): lambda arguments: ("channels last",),
    str(aten.native_batch_norm.default): _batch_norm,
    **{str(one.default): _half for one in _PRODUCTS},
}
_ON_LINUX_AMD: dict[str, Callable[[Arguments], Names]] = {
    str(aten.mm.default): _product,
    str(aten.addmm.default): _product,
    str(ours.lstm.default): _steps(0, 2),
    str(ours.lstm_gradient.default): _steps(0, 2),
    lstm_onednn.OPERATOR: lambda arguments: (lstm_onednn.ONEDNN,),
    str(ours.gru.default): _steps(0, 1),
    str(ours.gru_gradient.default): _steps(0, 4),
}
