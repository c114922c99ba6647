"""Triton's kernels as operators of PyTorch, compiled ahead while a step is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stepgraph.system.torch_private import FakeTensor


def operator(function: Callable[..., Any]) -> Any:
    """The function as an operator that PyTorch's compiler does not look into. To trace it is to compile its kernels."""
    made = torch.library.custom_op(f"stepgraph::{function.__name__}", function, mutates_args=())
    made.register_fake(function)
    return made


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: int) -> None:
    """Runs a kernel. Given arrays without memory it only compiles what such a call will need, which takes seconds."""
    (array, *_) = (one for one in arguments if isinstance(one, torch.Tensor))
    with torch.cuda.device(array.device):
        if isinstance(array, FakeTensor):
            known = (one.dtype if isinstance(one, torch.Tensor) else one for one in arguments)
            kernel.warmup(*known, grid=grid, **settings)
        else:
            kernel[grid](*arguments, **settings)
