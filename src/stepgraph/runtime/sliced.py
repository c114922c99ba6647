"""Arrays of which each rank has a slice, and how they become whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepgraph.compiler.ranks.slices import Slice
from stepgraph.runtime.world import World
from stepgraph.tensors.tensor import Tensor


@dataclass(frozen=True, eq=False)
class Sliced:
    """An array like a parameter, of which each rank has a slice. Every rank must ask for the whole at the same time.

    Args:
        tensor: the parameter.
        own: the slice of this rank; None if it has nothing.
        slices: those of all ranks.
        world: the ranks.
    """

    tensor: Tensor
    own: torch.Tensor | None
    slices: tuple[Slice, ...]
    world: World

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its elements."""
        return self.tensor.data_type.torch

    def clone(self) -> Sliced:
        """A copy."""
        return Sliced(self.tensor, None if self.own is None else self.own.clone(), self.slices, self.world)

    def whole(self, what: str) -> torch.Tensor:
        """The whole array, on every rank."""
        everyone = range(self.world.size)
        return self._received([self._flat] * self.world.size, [self.slices[rank].size for rank in everyone], what)

    def on_first(self, what: str) -> torch.Tensor | None:
        """The whole array on the first rank; None on others, which only send their slices."""
        first, nothing = self.world.is_first, self._flat[:0]
        sent = [self._flat, *[nothing] * (self.world.size - 1)]
        if not first:
            self.world.trade(sent, [0] * self.world.size, what)()
            return None
        return self._received(sent, [one.size for one in self.slices], what)

    def _received(self, sent: list[torch.Tensor], counts: list[int], what: str) -> torch.Tensor:
        found = self.world.trade(sent, counts, what)()
        parts = zip(self.slices, found.split(counts), strict=True)
        return torch.cat([part for _, part in sorted(parts, key=lambda one: one[0])]).view(self.tensor.shape)

    @property
    def _flat(self) -> torch.Tensor:
        if self.own is None:
            return torch.empty(0, dtype=self.dtype, device=self.world.device)
        return self.own.reshape(-1)


def whole(array: torch.Tensor | Sliced, what: str) -> torch.Tensor:
    """An array as a whole; every rank must ask for one that is sliced."""
    return array.whole(what) if isinstance(array, Sliced) else array
