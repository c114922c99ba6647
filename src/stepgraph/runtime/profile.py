"""Time and memory by layer and phase, measured operator by operator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from rich.table import Table
from torch import fx

from stepgraph import draw
from stepgraph.compiler.program import Part, Phase, notes
from stepgraph.compiler.step import Key
from stepgraph.errors import ExecutionError, reason
from stepgraph.runtime.strides import Layouts
from stepgraph.system import openmp, surroundings

PHASES = tuple(Phase)
COLUMNS = ("layer", *PHASES, "all", "share", "memory")


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer: seconds in each phase, and bytes of the arrays it creates."""

    layer: str
    forward: float = 0.0
    gradient: float = 0.0
    update: float = 0.0
    memory: int = 0

    @property
    def seconds(self) -> float:
        """All phases together."""
        return self.forward + self.gradient + self.update


@dataclass(frozen=True)
class Profile:
    """Seconds and bytes by layer and phase, largest time first. It prints as a table with one row per layer."""

    rows: tuple[tuple[str, str, float, int], ...]

    @property
    def seconds(self) -> float:
        """The total time."""
        return sum(seconds for _, _, seconds, _ in self.rows)

    @property
    def layers(self) -> tuple[LayerCost, ...]:
        """One entry per layer, largest time first; work on a layer's parameters counts for the layer."""
        seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        memory: dict[str, int] = defaultdict(int)
        known = {layer for layer, phase, _, _ in self.rows if phase == Phase.FORWARD}
        for name, phase, spent, size in self.rows:
            owner = name.rpartition(".")[0]
            layer = owner if owner in known and name not in known else name
            seconds[layer][phase] += spent
            memory[layer] += size
        costs = [
            LayerCost(layer, memory=memory[layer], **{phase: by[phase] for phase in Phase})
            for layer, by in seconds.items()
        ]
        return tuple(sorted(costs, key=lambda cost: -cost.seconds))

    def __rich__(self) -> Table:
        title = "Profile, in milliseconds"
        table = draw.Listing(COLUMNS[0], title=title, title_justify="left", show_edge=False, pad_edge=False)
        for column in COLUMNS[1:]:
            table.add_column(column, justify="right")
        *each, total = self._lines()
        for line in each:
            table.add_row(*line)
        table.add_section()
        table.add_row(*total)
        return table

    def __str__(self) -> str:
        return draw.text(self.__rich__())

    def _repr_html_(self) -> str:
        listed = draw.html_table(COLUMNS, self._lines(), words=COLUMNS[:1], last_is_sum=True)
        return draw.styled(f"<div>{listed}</div>")

    def _lines(self) -> list[list[str]]:
        layers, whole = self.layers, self.seconds
        sums = {field: sum(getattr(cost, field) for cost in layers) for field in (*PHASES, "memory")}
        return [
            [
                cost.layer,
                *(_milliseconds(getattr(cost, phase)) for phase in (*PHASES, "seconds")),
                f"{cost.seconds / (whole or 1):.1%}",
                draw.size(cost.memory),
            ]
            for cost in (*layers, LayerCost("together", **sums))
        ]

    @classmethod
    def sum_of(cls, profiles: Sequence[Profile]) -> Profile:
        """The sum over several runs that make one step together."""
        total: dict[tuple[str, str], list[Any]] = defaultdict(lambda: [0.0, 0])
        for one in profiles:
            for layer, phase, seconds, size in one.rows:
                total[layer, phase][0] += seconds
                total[layer, phase][1] += size
        return cls(tuple(sorted(((*key, *cost) for key, cost in total.items()), key=lambda row: -row[2])))

    @classmethod
    def best_of(cls, profiles: Sequence[Profile]) -> Profile:
        """The minimum time of each row over several runs of the same program, which excludes interference."""
        least: dict[tuple[str, str], tuple[float, int]] = {}
        for one in profiles:
            for layer, phase, seconds, size in one.rows:
                least[layer, phase] = min(least.get((layer, phase), (inf, size)), (seconds, size))
        return cls(tuple(sorted(((*key, *cost) for key, cost in least.items()), key=lambda row: -row[2])))


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds else ""


def profile(
    part: Part, arrays: Sequence[torch.Tensor], device: torch.device
) -> tuple[dict[Key, torch.Tensor], Profile]:
    """Runs a part once, timing every operator; the results equal those of any other run."""
    clock = _Clock(part.module, device)
    on_cpu = device.type == "cpu"
    threads = openmp.one_thread() if on_cpu and part.is_tiny else nullcontext()  # products in several have other bits
    try:
        with surroundings.neutral(part.rounded if on_cpu else ()), torch.inference_mode(), threads:
            found = clock.run(*arrays)
    except Exception as error:  # whatever a kernel raises, the caller gets a stepgraph error
        raise ExecutionError("execute", f"the device failed: {reason(error)}") from error
    rows = sorted(((*key, *cost) for key, cost in clock.cost.items()), key=lambda row: -row[2])
    return dict(zip(part.outputs, found, strict=True)), Profile(tuple(rows))


class _Clock(fx.Interpreter):
    """Times each operator separately, synchronizing after each."""

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self.device, self.layouts = device, Layouts(module.graph.nodes)
        self.cost: dict[tuple[str, str], list[Any]] = defaultdict(lambda: [0.0, 0])

    def run_node(self, n: fx.Node) -> Any:
        start = time.perf_counter()
        result = self.layouts.laid_out(n.name, super().run_node(n))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if n.op == "call_function":
            cost = self.cost[notes(n).layer, notes(n).phase]
            cost[0] += time.perf_counter() - start
            cost[1] += sum(
                a.nbytes
                for a in (result if isinstance(result, tuple | list) else [result])
                if isinstance(a, torch.Tensor)
            )
        return result
