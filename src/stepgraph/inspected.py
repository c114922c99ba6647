"""What a compiled graph tells about itself."""

from __future__ import annotations

from rich.console import Group, RenderableType

from stepgraph import draw
from stepgraph.compiled import CompiledGraph
from stepgraph.compiler.memory import MemoryPlan


class InspectedGraph(CompiledGraph):
    """A compiled graph that can be looked at: as text, as a picture, for numbers that are not finite."""

    @property
    def memory_plan(self) -> MemoryPlan:
        """What the compiled graph needs, by kind; all zero before `compile`."""
        return self._plan

    @property
    def device_memory_size(self) -> int:
        """Bytes of all intermediates and optimizer state; known after `compile`, 0 before."""
        return self._plan.device_memory_size

    @property
    def executables(self) -> list[tuple[str, int]]:
        """What has been compiled so far, as (part, batch size): it grows only when something new is asked for."""
        return list(self._programs.executables)

    def __rich__(self) -> RenderableType:
        title = f"{type(self).__name__} on {self.device}" if self.device else f"{type(self).__name__}, not compiled"
        parts: list[RenderableType] = [draw.table(self._compiled or self.nodes, title)]
        if self.device:
            parts += ["", str(self._plan)]
        return Group(*parts)
