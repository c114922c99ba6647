"""Which GPUs run the kernels of tuned code; only fused steps call them, and compile them when they are fused."""

from __future__ import annotations

import torch

from stepgraph.compiler.triton_launch import run_on

HOPPER = (9,)
OFF = 255  # where a maximum is, if ReLU has made it 0
ROOMY = (9, 10)  # those whose shared memory holds the tiles of an attention


def fit(x: torch.Tensor) -> bool:
    """Whether kernels of this kind compute in the array's type, on its device."""
    return x.dtype is torch.float32 and run_on(x.device)
