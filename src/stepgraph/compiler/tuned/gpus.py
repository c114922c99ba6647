"""Which GPUs run our own kernels; only fused steps call them.

The kernels are written in Triton's language. They are compiled when a step that needs them is fused, and cached by
Triton for later runs. Triton comes with PyTorch's CUDA builds for Linux, so modules named `…_kernels` are imported
only where `fit` or `run_on` allows it.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

import torch

GENERATIONS = (8, 9, 10, 12)  # of NVIDIA's GPUs: Ampere, Hopper, Blackwell
HOPPER = (9,)
OFF = 255  # where a maximum is, if ReLU has made it 0
ROOMY = (9, 10)  # those whose shared memory holds the tiles of an attention


def fit(x: torch.Tensor) -> bool:
    """Whether kernels of this kind compute in the array's type, on its device."""
    return x.dtype is torch.float32 and run_on(x.device, GENERATIONS)


def run_on(device: torch.device, generations: Collection[int]) -> bool:
    """Whether the device is a GPU of these generations and Triton is there."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in generations
