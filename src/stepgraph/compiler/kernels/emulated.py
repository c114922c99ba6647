"""What float16 and bfloat16 cost on CPUs that only emulate them.

PyTorch multiplies such numbers one at a time there. A product is measured once, and its time kept like a choice among
implementations.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from stepgraph.compiler.kernels import half
from stepgraph.compiler.kernels.measure import Implementations, choice
from stepgraph.system import surroundings

logger = logging.getLogger("stepgraph")
aten = torch.ops.aten
# Rows and columns of the factors. A small emulated product takes 12 ms, the next one would take a second. Without
# emulation, a small one takes microseconds, which are mostly spent before it is computed, so a larger one decides.
SMALL, LARGER = 64, 256
ENOUGH = 1e-3  # seconds that a product takes if they are spent computing it
MARGIN = 1.5  # times as slow as float32, from which to warn
TOLERANCE = 0.05  # for products of rounded factors
OWN, DETOUR = "float32", "rounded"
_warned: set[torch.dtype] = set()


def warn_once(kind: torch.dtype) -> None:
    """Warns, the first time in a process, if products in this type are much slower than in float32 on this CPU."""
    if kind in _warned:
        return
    _warned.add(kind)
    slower, detour = factors(kind)
    if slower < MARGIN:
        return
    logger.warning(
        "this CPU only emulates %s: PyTorch's products are %s slower than in float32. Computed in float32 and rounded "
        "afterwards, they take %s as long as in float32 alone. compute_type saves memory here, but no time",
        _name(kind),
        _times(slower),
        _times(detour),
    )


def factors(kind: torch.dtype) -> tuple[float, float]:
    """How many times as long as in float32 a product takes in this type, and in float32 with a rounded result."""
    found = _seconds(kind, SMALL)
    if max(found.values()) < ENOUGH:
        found = _seconds(kind, LARGER)
    return found[_name(kind)] / found[OWN], found[DETOUR] / found[OWN]


def _seconds(kind: torch.dtype, side: int) -> Mapping[str, float]:
    """How long a product of this size takes in each implementation."""
    with surroundings.tracing():
        for one in (torch.float32, kind):
            _factors(one, side)  # made outside the measurement
        return choice(operator(kind), implementations(kind), (side,), tolerance=TOLERANCE).seconds


def operator(kind: torch.dtype) -> str:
    """What is measured, as the file of choices calls it."""
    return f"product in {_name(kind)}"


def implementations(kind: torch.dtype) -> Implementations:
    """A product in float32, in this type, and in float32 with a result that is rounded to it, by the factors' size."""
    rounded: Any = half.IMPLEMENTATIONS[aten.mm.default]
    return {
        OWN: lambda side: aten.mm.default(*_factors(torch.float32, side)),
        _name(kind): lambda side: aten.mm.default(*_factors(kind, side)),
        DETOUR: lambda side: rounded(*_factors(kind, side)),
    }


def fails(kind: torch.dtype) -> bool:
    """Whether PyTorch's products in this type fail inside oneDNN before PyTorch computes them in another way.

    It prints the stack of the failure then, and stops using oneDNN in the whole process. Seen with PyTorch 2.13 on ARM
    processors without bfloat16, for a second factor that is transposed.
    """
    return bool(torch.backends.mkldnn.enabled) and _fails(kind)


@cache
def _fails(kind: torch.dtype) -> bool:
    with surroundings.tracing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a, b = _factors(kind, SMALL)
        torch.mm(a, b.t())  # unlike the operator, the function warns through Python
    failed = not torch.backends.mkldnn.enabled
    torch.backends.mkldnn.set_flags(True)
    return failed


@cache
def _factors(kind: torch.dtype, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two square matrices, the same for every type except for rounding."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.empty(side, side).normal_(generator=generator).to(kind) for _ in range(2))
    return a, b


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _times(factor: float) -> str:
    return f"{factor:.2g} times" if factor < 10 else f"{factor:,.0f} times"
