"""Time and memory by layer and phase, measured operator by operator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import fx

from stepgraph import draw
from stepgraph.compiler.phases import Part
from stepgraph.compiler.step import Key
from stepgraph.compiler.trace import layer_of, phase_of
from stepgraph.errors import ExecutionError, reason


@dataclass(frozen=True)
class Profile:
    """Seconds and bytes made, by layer and phase, largest time first."""

    rows: tuple[tuple[str, str, float, int], ...]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(seconds for _, _, seconds, _ in self.rows)

    def __rich__(self) -> Table:
        table = Table("layer", "phase", title="Profile", title_justify="left", show_edge=False, pad_edge=False)
        for column in ("time", "share", "memory"):
            table.add_column(column, justify="right")
        for layer, phase, seconds, size in self.rows:
            table.add_row(layer, phase, f"{1e3 * seconds:.3f} ms", f"{seconds / self.seconds:.0%}", draw.size(size))
        return table

    def __str__(self) -> str:
        return draw.text(self.__rich__())


def profile(
    part: Part, arrays: Sequence[torch.Tensor], device: torch.device
) -> tuple[dict[Key, torch.Tensor], Profile]:
    """Runs a part once, timing every operator; the results are those of any other run."""
    clock = _Clock(part.module, device)
    try:
        with torch.inference_mode():
            found = clock.run(*arrays)
    except Exception as error:
        raise ExecutionError("execute", f"the device failed: {reason(error)}") from error
    rows = sorted(((*key, *cost) for key, cost in clock.cost.items()), key=lambda row: -row[2])
    return dict(zip(part.outputs, found, strict=True)), Profile(tuple(rows))


class _Clock(fx.Interpreter):
    """Times each operator and waits for it, so that its time is its own."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self.device = device
        self.cost: dict[tuple[str, str], list[Any]] = defaultdict(lambda: [0.0, 0])

    def run_node(self, n: fx.Node) -> Any:
        start = time.perf_counter()
        result = super().run_node(n)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if n.op == "call_function":
            cost = self.cost[layer_of(n), phase_of(n)]
            cost[0] += time.perf_counter() - start
            cost[1] += sum(
                a.nbytes
                for a in (result if isinstance(result, tuple | list) else [result])
                if isinstance(a, torch.Tensor)
            )
        return result
