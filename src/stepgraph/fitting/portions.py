"""Batches in parts: the most rows that fit into the memory of a device, decided from the memory plan.

Nothing is tried out: the plans of two small sizes tell about where the limit lies, and the plan of the chosen size
confirms it. Sizes far above the limit are not even planned, since planning may time single operators.
"""

from __future__ import annotations

import math
import os
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stepgraph import draw
from stepgraph.compiler.program import PartName
from stepgraph.device import Device
from stepgraph.errors import ArgumentError, DataTypeError, MemoryLimitError, StateError
from stepgraph.fitting.data import Source
from stepgraph.fitting.trained import Trained
from stepgraph.layers.dropout import DropoutLayer
from stepgraph.layers.embedding import EmbeddingLayer
from stepgraph.layers.normalization import BatchNormalizationLayer
from stepgraph.tensors.extents import BatchExtent, can_be_cut, shape_at

AUTO = "auto"
USED = 0.9  # of the free memory: allocators do not use the rest
SAMPLE = 16  # rows of the second size that is planned
NEAR = 1.25  # how far above the expected number of rows a plan is worth making
UNITS = {"": 1, "B": 1} | {f"{unit}{end}": 1000**n for n, unit in enumerate("KMGT", 1) for end in ("B", "")}
UNITS |= {f"{unit}iB": 1024**n for n, unit in enumerate("KMGT", 1)}


def bytes_of(limit: Any) -> int | str | None:
    """A limit in bytes, given as a number or as text such as `"4 GiB"`; `"auto"` and None stay.

    Example:
        >>> bytes_of("1.5 KiB"), bytes_of("2 MB"), bytes_of(300)
        (1536, 2000000, 300)
    """
    if limit is None or limit == AUTO:
        return limit
    if isinstance(limit, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", limit)
        units = {unit.lower(): size for unit, size in UNITS.items()}
        if found is None or found[2].lower() not in units:
            raise ArgumentError("fit", f"memory_limit is {limit!r}", fix='use bytes, "4 GiB" or "auto"')
        limit = int(float(found[1]) * units[found[2].lower()])
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise DataTypeError("fit", f"memory_limit is {limit!r}", fix='use bytes, "4 GiB" or "auto"')
    if limit <= 0:
        raise ArgumentError("fit", f"memory_limit is {limit}", fix="pass a positive number of bytes")
    return limit


class Portions:
    """Finds the most rows of a batch that fit.

    Args:
        graph: the graph; its own memory limit counts, too.
        sources: the data of training, and of validation if there is any.
        limit: bytes, as `memory_plan.total` counts them, or `"auto"`: what the device has free now.
        accumulates: whether several batches make one update, so that even whole ones run in separate passes.
    """

    def __init__(self, graph: Trained, sources: list[Source], limit: int | str, accumulates: bool = False) -> None:
        self.graph, self.compilation = graph, graph.training.require_session("fit").compilation
        # Programs of its own: what is only planned is not kept.
        layout = self.compilation.programs.channels_last
        self.programs, self.accumulates = replace(self.compilation, channels_last=layout).programs, accumulates
        self.evaluates = len(sources) > 1
        self.sizes = _batch_sizes(sources, self.compilation.feeds.batch)
        self.needed = cache(self._needed)
        own = self.compilation.settings.memory_limit
        self.limit = min(self._free() if limit == AUTO else int(limit), own or sys.maxsize)

    @property
    def largest(self) -> int:
        """Rows of the largest batch."""
        return max(self.sizes)

    def find(self) -> int:
        """The most rows that run at once, of batches in as few parts as possible."""
        rows = self.largest
        if not self.accumulates and rows <= self._expected(True) * NEAR and self.needed(rows, True) <= self.limit:
            return rows
        expected = self._expected(False)
        if expected < 1:
            problem = f"even one row at a time needs {draw.size(self.needed(1, False))}"
            raise MemoryLimitError("fit", f"{problem}, the limit is {draw.size(self.limit)}", fix="raise memory_limit")
        least = 1 if self.accumulates else 2
        count = max(-(-rows // expected), least)
        while not self._fits(count):
            count += max(1, count // 16)
        while count > least and -(-rows // (count - 1)) <= expected * NEAR and self._fits(count - 1):
            count -= 1
        if count > 1:
            self._require_rows()
        return -(-rows // count)

    def _require_rows(self) -> None:
        """Rejects data that cannot be divided."""
        feeds = self.compilation.feeds
        for tensor in feeds.tensors:
            if not can_be_cut(tensor.shape):
                problem = f"{feeds.titles[tensor]} cannot be divided with the batch: {list(tensor.shape)}"
                fix = "raise memory_limit, or make its first extent BATCH or a multiple, and no other"
                raise ArgumentError("fit", problem, fix=fix)

    def _expected(self, whole: bool) -> int:
        """The rows that fit, by a straight line through the plans of two small sizes; 0 if not even one does."""
        few = min(self.largest, SAMPLE)
        one, some = self.needed(1, whole), self.needed(few, whole)
        slope = max((some - one) / max(few - 1, 1), 1e-9)
        return 0 if one > self.limit else int(min(1 + (self.limit - one) / slope, sys.maxsize))

    def remark(self, portion: int) -> str:
        """What a run that uses it says."""
        parts = -(-self.largest // portion)
        rows = f"{portion} row{'s' * (portion > 1)}"
        text = f"batches of {self.largest} rows run in {parts} parts of at most {rows}, which fit into "
        text += draw.size(self.limit)
        layers = [node.layer for node in self.compilation.nodes]
        if any(isinstance(one, BatchNormalizationLayer) for one in layers):
            text += "; batch normalization uses the statistics of each part, not of the whole batch"
        if any(one.statistics for one in layers if not isinstance(one, BatchNormalizationLayer)):
            text += "; running statistics are updated by each part"
        if any(isinstance(one, DropoutLayer) for one in layers):
            text += "; dropout draws other masks than for the whole batch"
        if any(isinstance(one, EmbeddingLayer) and one.descriptor.scales_gradient_by_frequency for one in layers):
            text += "; embeddings scale gradients by the frequency of indices in each part"
        return text

    def _fits(self, count: int) -> bool:
        return self.needed(-(-self.largest // count), False) <= self.limit

    def _needed(self, rows: int, whole: bool) -> int:
        """Bytes for batches in parts of some rows; `whole` batches make their updates in one call."""
        captures = self.graph.device.torch.type == "cuda"
        plans = []
        for part in (PartName.STEP if whole else PartName.SHARD, *[PartName.EVALUATION] * self.evaluates):
            plans.append(self.programs.plan_for(part, rows))
        lasting = plans[0].total - plans[0].intermediates
        if not captures:
            return lasting + max(plan.intermediates for plan in plans)
        # Each captured graph keeps its memory, and there is one for each part and number of rows; updates need little.
        together = sum(plan.intermediates for plan in plans) * self._shapes(rows)
        return lasting + together + 2 * rows * self._row_bytes()

    def _shapes(self, portion: int) -> int:
        """How many numbers of rows occur when batches are divided."""
        found = set()
        for rows in self.sizes:
            size = -(-rows // -(-rows // portion))
            found |= {size, rows % size or size}
        return len(found)

    def _row_bytes(self) -> int:
        """Bytes of the data of a row."""
        feeds = self.compilation.feeds
        batched = ((t, math.prod(shape_at(t.shape, feeds.batch, 1))) for t in feeds.tensors if feeds.is_batched(t))
        return sum(count * tensor.data_type.element_size for tensor, count in batched)

    def _free(self) -> int:
        """What the device has free, and what the graph has already taken for good."""
        plan = self.graph.training.memory_plan
        return int(free(self.graph.device) * USED) + plan.total - plan.intermediates


def _batch_sizes(sources: list[Source], declared: int) -> set[int]:
    """The numbers of rows of batches; of data that does not show them, those that the graph declares."""
    found: set[int] = set()
    for one in sources:
        sizes = one.sizes
        if not sizes and isinstance(declared, BatchExtent):
            problem = "memory_limit plans the rows of a batch, which neither the graph nor the data shows beforehand"
            fix = "pass a list or a DataLoader with batch_size, or declare the number of rows instead of BATCH"
            raise ArgumentError(one.reader.what, problem, fix=fix)
        found |= sizes or {declared}
    return found


def free(device: Device) -> int:
    """Free bytes of a device's memory."""
    kind = device.torch.type
    if kind == "cuda":
        unused = torch.cuda.memory_reserved(device.torch) - torch.cuda.memory_allocated(device.torch)
        return int(torch.cuda.mem_get_info(device.torch)[0]) + unused
    if kind == "mps":
        return int(torch.mps.recommended_max_memory()) - int(torch.mps.current_allocated_memory())
    return min(_of_machine(), _of_container())


def _of_machine() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (found := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        return int(found[1]) * 1024
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:  # macOS does not say how much of it is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    raise StateError("fit", "this system does not say how much memory is free", fix='pass memory_limit="4 GiB"')


def _of_container(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """What a container may still use; unlimited without one."""
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return max(int((folder / most).read_text()) - int((folder / used).read_text()), 0)
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return sys.maxsize
