"""Recorded operators as a module, without the source that torch.fx keeps permanently for every module.

For tracebacks, torch.fx keeps the source of each module for the lifetime of the process. A program that compiles
repeatedly, for one batch size after another, would leak memory. Nothing reads these sources, since parts run as
our own generated code.
"""

from __future__ import annotations

import linecache
from typing import Any

from torch import fx

from stepgraph.system import torch_private


class Module(fx.GraphModule):
    """A graph module whose source is discarded."""

    def recompile(self) -> Any:
        code = super().recompile()
        forget_source(self)
        return code


def forget_source(module: fx.GraphModule) -> None:
    """Discards the source of a module created elsewhere."""
    key = type(module).forward.__code__.co_filename
    torch_private.module_sources().pop(key, None)
    linecache.cache.pop(key, None)
