"""Attention in a sliding window, block by block: memory grows with `L · window`, not with `L²`.

Queries are taken in blocks at least as long as the window, so that each block sees only its own keys, those of the
block before and, unless it is causal, those of the block after. All blocks are computed at once, as further sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from stepgraph.layers.attending import as_added

Array = torch.Tensor
SHORTEST = 64  # the shortest block: products of fewer rows waste the units that compute them


@dataclass(frozen=True)
class Sliding:
    """How `steps` queries and keys are divided.

    Args:
        steps: the number of queries, and of keys that have a position.
        window: a query sees keys less than this away.
        causal: whether it sees only earlier ones, and its own.
    """

    steps: int
    window: int
    causal: bool

    @property
    def size(self) -> int:
        """The length of a block."""
        return max(self.window, SHORTEST)

    @property
    def count(self) -> int:
        """The number of blocks, the last one filled up."""
        return -(-self.steps // self.size)

    @property
    def seen(self) -> int:
        """The blocks of keys that a block of queries sees."""
        return 2 if self.causal else 3

    @property
    def pays(self) -> bool:
        """Whether a query then meets at most half as many keys."""
        return 2 * self.seen * self.size <= self.steps

    def queries(self, q: Array, *, folded: bool) -> Array:
        """`[N, heads, L, d] → [blocks, N heads, size, d]`, or `[blocks N, heads, size, d]` if `folded`."""
        return self._as_sequences(self._blocks(q, before=0, after=0), folded=folded)

    def keys(self, k: Array, *, folded: bool) -> Array:
        """The same for keys or values, each block with its neighbors; appended rows are seen by every block."""
        seen = self._seen(k[:, :, : self.steps])
        rows = k[:, :, self.steps :].expand(self.count, *(-1,) * 4)
        return self._as_sequences(torch.cat([seen, rows], 3) if k.shape[2] > self.steps else seen, folded=folded)

    def mask(self, given: Array | None, *, keys: int, like: Array) -> Array:
        """An additive mask `[blocks, 1, size, seen]`, or `[blocks N, 1, size, seen]` with a mask `[N, 1, 1, keys]`."""
        block = torch.arange(self.count, device=like.device)[:, None, None] * self.size
        query = block + torch.arange(self.size, device=like.device)[:, None]
        key = block - self.size + torch.arange(self.seen * self.size, device=like.device)
        distance = query - key
        hidden = (distance >= self.window) | (distance < 0 if self.causal else distance <= -self.window)
        # Queries after the end see the keys there: a row without any would divide 0 by 0.
        hidden = hidden | (key < 0) | ((key >= self.steps) & (query < self.steps))
        added = F.pad(as_added(hidden, like.dtype), (0, keys - self.steps))
        if given is None:
            return added[:, None]
        own = self.keys(given.transpose(2, 3), folded=True).transpose(2, 3)
        return (own.unflatten(0, (self.count, -1)) + added[:, None, None]).flatten(0, 1)

    def joined(self, heads: Array, batch: int) -> Array:
        """The result of all blocks as `[N, heads, L, d]`."""
        apart = heads.reshape(self.count, batch, -1, *heads.shape[2:])
        return apart.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.steps]

    def _blocks(self, x: Array, *, before: int, after: int) -> Array:
        """`[N, heads, L, d] → [blocks, N, heads, size, d]`, with blocks of zeros before and after."""
        rest = self.count * self.size - x.shape[2]
        padded = F.pad(x, (0, 0, before * self.size, after * self.size + rest))
        return padded.unflatten(2, (-1, self.size)).permute(2, 0, 1, 3, 4)

    def _seen(self, k: Array) -> Array:
        blocks = self._blocks(k, before=1, after=self.seen - 2)
        return torch.cat([blocks[first : first + self.count] for first in range(self.seen)], 3)

    @staticmethod
    def _as_sequences(blocks: Array, *, folded: bool) -> Array:
        return blocks.flatten(0, 1) if folded else blocks.flatten(1, 2)
