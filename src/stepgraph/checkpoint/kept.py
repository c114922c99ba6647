"""What a checkpoint keeps of one graph, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stepgraph.compiler.settings import Settings
from stepgraph.compiler.step import Key
from stepgraph.declaration import Declaration
from stepgraph.runtime.state import Progress
from stepgraph.tensors.tensor import Tensor


@dataclass(frozen=True)
class Kept:
    """Everything about a graph that must be there to go on.

    Args:
        declaration: what was wired and named.
        settings: how it was compiled; None where it was not.
        constants: inputs that are not fed, with their data.
        progress: how far training has come.
        handles: gradients that are read through tensors.
    """

    declaration: Declaration
    settings: Settings | None
    constants: Mapping[Tensor, torch.Tensor]
    progress: Progress
    handles: Mapping[Key, Tensor]
