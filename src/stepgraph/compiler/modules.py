"""Recorded operators as a module, without the source that torch.fx keeps permanently for every module.

For tracebacks, torch.fx keeps the source of each module for the lifetime of the process. A program that compiles
repeatedly, for one batch size after another, would leak memory. Nothing reads these sources, since parts run as
our own generated code.
"""

from __future__ import annotations

import linecache
from typing import Any

import torch
from torch import fx

from stepgraph.system import torch_private


class Module(fx.GraphModule):
    """A graph module that generates its source when it is first called, which few are, and then discards it."""

    def recompile(self) -> Any:
        # Each module has a class of its own, made by torch.fx for this assignment.
        type(self).forward = _generate_and_run

    def generate(self) -> None:
        """Makes the function of the operators as they are now."""
        super().recompile()
        forget_source(self)


def _generate_and_run(module: Module, *arrays: torch.Tensor) -> Any:
    module.generate()
    return module(*arrays)


def forget_source(module: fx.GraphModule) -> None:
    """Discards the source of a module created elsewhere."""
    key = type(module).forward.__code__.co_filename
    torch_private.module_sources().pop(key, None)
    linecache.cache.pop(key, None)
