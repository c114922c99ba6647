"""Kernels in Triton's language: where they run, how they are launched, and as operators of PyTorch.

Triton compiles a kernel when it is launched for the first time, and caches it for later runs. It comes with PyTorch's
CUDA builds for Linux, so modules named `…_kernels` are imported only where `run_on` allows it. Their operators exist
from then on: code that an earlier process compiled calls them by name, and imports nothing.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from stepgraph.system.torch_private import FakeTensor

GENERATIONS = (8, 9, 10, 12)  # of NVIDIA's GPUs: Ampere, Hopper, Blackwell
# A step may launch a kernel while another is being fused. Triton says that a kernel is loaded before it is, and two
# threads would compile it twice.
_loading = threading.RLock()


def run_on(device: torch.device, generations: Collection[int] = GENERATIONS) -> bool:
    """Whether the device is a GPU of these generations and Triton is there."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    if not torch.cuda.is_available():  # a step can be recorded for a GPU on a machine without one
        return False
    return torch.cuda.get_device_capability(device)[0] in generations


def operator(function: Callable[..., Any]) -> Any:
    """The function as an operator that PyTorch's compiler does not look into. To trace it is to compile its kernels."""
    made = torch.library.custom_op(f"stepgraph::{function.__name__}", function, mutates_args=())
    made.register_fake(function)
    return made


def define_operators(device: torch.device) -> None:
    """Defines all operators that fused code for a device may call, whether or not a pass has asked for them."""
    if run_on(device):
        _import_kernels()


@cache
def _import_kernels() -> None:
    package = importlib.import_module(__name__.rpartition(".")[0])
    for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if one.name.endswith("_kernels"):
            importlib.import_module(one.name)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: int) -> None:
    """Runs a kernel. Given arrays without memory it only prepares what such a call will need, which takes seconds."""
    (array, *_) = (one for one in arguments if isinstance(one, torch.Tensor))
    with torch.cuda.device(array.device), _loading:
        if isinstance(array, FakeTensor):
            known = (one.dtype if isinstance(one, torch.Tensor) else one for one in arguments)
            compiled = kernel.warmup(*known, grid=grid, **settings)
            with suppress(Exception):  # it only saves time: a launch loads what is not loaded
                _ = compiled[grid]  # builds Triton's launcher and loads the kernel
        else:
            kernel[grid](*arguments, **settings)
