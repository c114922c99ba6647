"""Everything a checkpoint stores about one graph, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stepgraph.compiler.settings import Settings
from stepgraph.compiler.step import Key
from stepgraph.runtime.declaration import Declaration
from stepgraph.runtime.state import Progress
from stepgraph.tensors.tensor import Tensor


@dataclass(frozen=True)
class Kept:
    """Everything about a graph that is needed to continue.

    Args:
        declaration: its wiring and names.
        settings: the settings of its compilation; None if it was not compiled.
        constants: inputs that are not fed, with their data.
        progress: the training state outside the tensors.
        handles: gradients that are read through tensors.
        origin: the names that the tensors of an imported model have there.
    """

    declaration: Declaration
    settings: Settings | None
    constants: Mapping[Tensor, torch.Tensor]
    progress: Progress
    handles: Mapping[Key, Tensor]
    origin: Mapping[str, Tensor]
