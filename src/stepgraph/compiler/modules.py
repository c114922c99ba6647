"""Recorded operators as a module, without what torch.fx remembers about every module for good.

For tracebacks torch.fx keeps the source of each module it makes as long as the process lives. A program that compiles
again and again, for one batch size after the other, would grow by that; nobody reads these sources, since parts run as
code of our own.
"""

from __future__ import annotations

import linecache
from typing import Any

from torch import fx

from stepgraph.system import torch_private


class Module(fx.GraphModule):
    """A graph module whose source is forgotten."""

    def recompile(self) -> Any:
        code = super().recompile()
        forget_source(self)
        return code


def forget_source(module: fx.GraphModule) -> None:
    """Drops the source of a module that somebody else has made."""
    key = type(module).forward.__code__.co_filename
    torch_private.module_sources().pop(key, None)
    linecache.cache.pop(key, None)
