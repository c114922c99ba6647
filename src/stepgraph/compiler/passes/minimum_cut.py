"""The minimum cut of a network: the cheapest edges that separate its source from its sink (Dinic's algorithm)."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from itertools import pairwise

UNLIMITED = 1 << 62


class Network:
    """A directed graph with capacities, in whole numbers.

    Args:
        source: where flow begins.
        sink: where it ends.
    """

    def __init__(self, source: Hashable, sink: Hashable) -> None:
        self.source, self.sink = source, sink
        self._left: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)  # residual capacities

    def connect(self, start: Hashable, end: Hashable, capacity: int = UNLIMITED) -> None:
        """Adds an edge; of parallel edges, capacities add up."""
        self._left[start][end] = min(UNLIMITED, self._left[start].get(end, 0) + capacity)
        self._left[end].setdefault(start, 0)

    def behind_cut(self) -> set[Hashable]:
        """The nodes on the sink's side of the minimum cut; of several cuts, the one closest to the sink.

        The edges that lead into this set are the cut.
        """
        while depths := self._depths():
            self._block(depths)
        found, waiting = {self.sink}, [self.sink]
        while waiting:
            end = waiting.pop()
            for start in self._left[end]:
                if start not in found and self._left[start][end] > 0:
                    found.add(start)
                    waiting.append(start)
        return found

    def _depths(self) -> dict[Hashable, int]:
        """The distance of each node from the source; empty once no more can flow to the sink."""
        depths, waiting = {self.source: 0}, deque([self.source])
        while waiting:
            start = waiting.popleft()
            for end, capacity in self._left[start].items():
                if capacity > 0 and end not in depths:
                    depths[end] = depths[start] + 1
                    waiting.append(end)
        return depths if self.sink in depths else {}

    def _block(self, depths: dict[Hashable, int]) -> None:
        """Sends flow along shortest paths until each has a full edge."""
        untried = {node: iter(list(ends)) for node, ends in self._left.items()}
        path = [self.source]
        while path:
            if path[-1] == self.sink:
                edges = list(pairwise(path))
                flow = min(self._left[start][end] for start, end in edges)
                for start, end in edges:
                    self._left[start][end] -= flow
                    self._left[end][start] += flow
                full = next(place for place, (start, end) in enumerate(edges) if not self._left[start][end])
                del path[full + 1 :]
                continue
            start = path[-1]
            for end in untried[start]:
                if depths.get(end) == depths[start] + 1 and self._left[start][end] > 0:
                    path.append(end)
                    break
            else:
                path.pop()
