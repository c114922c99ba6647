"""Gradients between the passes: found, added up, and readable through tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from stepgraph.compiler.step import Key
from stepgraph.tensor import Tensor


class Gradients:
    """The gradients of the last gradient pass of one training graph."""

    def __init__(self) -> None:
        self.found: dict[Key, torch.Tensor] = {}
        self.shown: dict[Key, torch.Tensor] = {}
        self.handles: dict[Key, Tensor] = {}
        self.used = False

    def handle(self, key: Key, like: Tensor) -> Tensor:
        """The tensor through which a gradient is read; the same one each time."""
        if key not in self.handles:
            self.handles[key] = Tensor(like.descriptor, label=f"gradient of {like.label}")
            self.handles[key].hold(self.shown.get(key), "no gradient pass has computed it")
        return self.handles[key]

    def replace(self, found: Mapping[Key, torch.Tensor]) -> None:
        """Takes the gradients of a new pass."""
        self.found, self.used = dict(found), False
        self.show(found)

    def show(self, found: Mapping[Key, torch.Tensor]) -> None:
        """Makes gradients readable, and those that were not found unreadable."""
        self.shown = {key: array for key, array in found.items() if key.kind != "value"}
        for key, handle in self.handles.items():
            handle.hold(found.get(key), "the last pass did not compute it")

    def forget(self) -> None:
        """Drops everything but the tensors to read through."""
        self.found, self.used = {}, False
        self.show({})

    def by_handle(self, found: Mapping[Key, torch.Tensor]) -> dict[Tensor, torch.Tensor]:
        """What was found, by the tensor it is read through."""
        return {handle: found[key] for key, handle in self.handles.items() if key in found}

    def to_add_to(self, keys: Sequence[Key]) -> dict[Key, torch.Tensor]:
        """Gradients that no update has used yet. On a GPU they are copied: a replay writes over the last results."""
        found = {} if self.used else {key: self.found[key] for key in keys if key in self.found}
        return {key: array if array.is_cpu else array.clone() for key, array in found.items()}


@torch.inference_mode()
def added(kept: dict[Key, torch.Tensor], new: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """`new`, with its gradients added in place to the kept ones."""
    if kept:
        torch._foreach_add_(list(kept.values()), [new[key] for key in kept])
    return {**new, **kept}
