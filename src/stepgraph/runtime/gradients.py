"""Gradients between the passes: stored, accumulated, and readable through tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from stepgraph.compiler.program import Program, copied_as, fake, same_order
from stepgraph.compiler.step import Key, gradient, user_gradient, value
from stepgraph.system import torch_private
from stepgraph.tensors import buffers
from stepgraph.tensors.tensor import Tensor


class Gradients:
    """The gradients of the last gradient pass of one training graph."""

    def __init__(self) -> None:
        self.found: dict[Key, torch.Tensor] = {}
        self.shown: Mapping[Key, torch.Tensor] = {}
        self.handles: dict[Key, Tensor] = {}
        self.sums: dict[Key, torch.Tensor] = {}
        self.used = False
        self.are_known = False  # a pass has run, even if it computed none

    def handle(self, key: Key, like: Tensor) -> Tensor:
        """The tensor through which a gradient is read; the same one each time."""
        if key not in self.handles:
            self.handles[key] = Tensor(like.descriptor, label=f"gradient of {like.label}")
            self.handles[key].hold(self.shown.get(key), "no gradient pass has computed it")
        return self.handles[key]

    def key(self, tensor: Tensor) -> Key:
        """The key of what a tensor shows: a gradient, or its own value."""
        return next((key for key, handle in self.handles.items() if handle is tensor), value(tensor))

    def replace(self, found: Mapping[Key, torch.Tensor]) -> None:
        """Stores the gradients of a new pass."""
        self.found, self.used, self.are_known = dict(found), False, True
        self.show(found)

    def show(self, found: Mapping[Key, torch.Tensor]) -> None:
        """Makes gradients readable, and those that were not computed unreadable."""
        self.shown = found
        for key, handle in self.handles.items():
            handle.hold(found.get(key), "the last pass did not compute it")

    def forget(self, found: Mapping[Key, torch.Tensor]) -> None:
        """Drops everything but the handles; these show what was `found`."""
        if self.are_known:
            self.found, self.used, self.are_known = {}, False, False
        if self.handles or found or self.shown:  # after most calls there is nothing to show
            self.show(found)

    def by_handle(self, found: Mapping[Key, torch.Tensor]) -> dict[Tensor, torch.Tensor]:
        """What was computed, by handle."""
        return {handle: found[key] for key, handle in self.handles.items() if key in found}

    @torch.inference_mode()
    def to_add_to(self, keys: Sequence[Key]) -> dict[Key, torch.Tensor]:
        """Gradients that no update has used yet, in separate memory that stays the same between passes."""
        kept = {} if self.used else {key: self.found[key] for key in keys if key in self.found}
        for key, array in kept.items():
            if key not in self.sums or self.sums[key].shape != array.shape:
                self.sums[key] = torch.empty_like(array, memory_format=torch.contiguous_format)
            if self.sums[key] is not array:
                self.sums[key].copy_(array)
        return {key: self.sums[key] for key in kept}


def seeds(program: Program, written: Mapping[Tensor, Tensor], others: Sequence[Gradients]) -> dict[Key, torch.Tensor]:
    """Gradients from outside: user gradients or those of linked graphs; otherwise zero, or one to start from."""
    found = {}
    for tensor in program.step.seeded:
        like = fake(program.outputs[value(tensor)])
        handed = [other.found[gradient(tensor)] for other in others if gradient(tensor) in other.found]
        if tensor in written and written[tensor].has_data:
            mine = written[tensor]
            handed.append(buffers.read(mine.array(), like.shape, mine.data_type, mine.where))
        if not handed:
            fill = float(starts_at(tensor, program))
            handed = [torch.full(like.shape, fill, dtype=tensor.data_type.torch, device=program.step.device)]
        key = user_gradient(tensor)
        found[key] = _laid_out(_sum(handed), fake(program.inputs[key]))
    return found


def starts_at(tensor: Tensor, program: Program) -> bool:
    """Whether the reverse walk starts at `tensor` by default: a single number that serves as the loss."""
    return tensor in program.step.starts and fake(program.outputs[value(tensor)]).numel() == 1


def summed(program: Program, mine: Gradients, others: Sequence[Gradients]) -> dict[Key, torch.Tensor]:
    """Gradients of one graph plus those that linked graphs computed for the same parameters."""
    found = dict(mine.found)
    for key in map(gradient, program.step.trainable):
        shared = [other.found[key] for other in others if key in other.found]
        if shared:
            total = _sum([*([found[key]] if key in found else []), *shared])
            found[key] = _laid_out(total, fake(program.outputs[key])) if key in program.outputs else total
    return found


@torch.inference_mode()
def added(kept: dict[Key, torch.Tensor], new: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    """`new`, with its gradients added in place to the kept ones."""
    if kept:
        torch_private.foreach_add_(list(kept.values()), [new[key] for key in kept])
    return {**new, **kept}


def _sum(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    return arrays[0] if len(arrays) == 1 else torch.stack(list(arrays)).sum(0)


def _laid_out(array: torch.Tensor, believed: torch.Tensor) -> torch.Tensor:
    """An array in the layout that the program was recorded for: that of another graph's gradient may differ."""
    return array if same_order(array, believed) else copied_as(array, believed.stride())
