"""The memory that the steps of one graph use for their results: see `compiler/passes/held.py`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from stepgraph.compiler.passes.held import Allocation


class Arena:
    """One piece of memory for all batch sizes, since only one step runs at a time; it grows if necessary."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self.users: weakref.WeakSet[ArenaViews] = weakref.WeakSet()

    def of(self, size: int) -> torch.Tensor:
        """At least `size` bytes, the same memory as long as it suffices."""
        if self.memory is None or len(self.memory) < size:
            self.release()  # so that the old and the new memory never exist at once
            with torch.inference_mode():  # operators that overwrite such arrays have less to note
                self.memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self.memory

    def release(self) -> None:
        """Releases the memory until the next call."""
        for user in self.users:
            user.forget()
        self.memory = None


class ArenaViews:
    """One executable's results as views of an arena: attributes of the module that its function reads."""

    def __init__(self, arena: Arena, size: int, allocations: Mapping[str, Allocation], module: Any) -> None:
        self._arena, self._size, self._allocations, self._module = arena, size, allocations, module
        self._memory: torch.Tensor | None = None
        arena.users.add(self)

    def forget(self) -> None:
        """Releases the memory until the next call."""
        self._memory = None
        for name in self._allocations:
            setattr(self._module, name, None)

    def prepare(self) -> None:
        """Creates the attributes, again if the arena has grown."""
        if self._memory is not None and self._memory is self._arena.memory:
            return
        memory = self._arena.of(self._size)
        with torch.inference_mode():
            for name, (like, offset) in self._allocations.items():
                base = memory[offset : offset + like.untyped_storage().nbytes()].view(like.dtype)
                place = base.storage_offset() + like.storage_offset()
                setattr(self._module, name, base.as_strided(like.shape, like.stride(), place))
        self._memory = memory
