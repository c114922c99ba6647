"""The positions of boxes in a drawing: rows from top to bottom, few crossings, straight main paths.

Four steps: rows by longest path; a chain of bends for an edge that passes rows; an order in each row by the mean
position of the neighbors (barycenters); then horizontal positions as close as possible to those of the
neighbors without overlap. Each step is linear in boxes, edges and bends, times a fixed number of sweeps.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from itertools import accumulate, pairwise
from math import inf

GAP = 26.0  # between neighbors in a row
BEND = 10.0  # room for an edge that passes a row
_BENDS = 20_000  # in total; other long edges are straight, so that time stays linear
_SWEEPS = 8


@dataclass(frozen=True)
class Edge:
    """From one box to a lower one. Edges of one origin and one style share their path."""

    origin: int
    target: int
    stopped: bool = False


@dataclass
class Placement:
    """Boxes and bends: their rows, their centers, and the bends that an edge passes through."""

    rank: list[int]
    x: list[float]
    bends: dict[Edge, list[int]]
    rows: list[list[int]]


@dataclass
class _Mesh:
    """Boxes and bends, linked from row to row only."""

    widths: list[float]
    rank: list[int]
    above: list[list[tuple[int, float]]] = field(default_factory=list)  # neighbors with the weight of the link
    below: list[list[tuple[int, float]]] = field(default_factory=list)

    def link(self, upper: int, lower: int, weight: float) -> None:
        self.below[upper].append((lower, weight))
        self.above[lower].append((upper, weight))


def layered(widths: Sequence[float], edges: Sequence[Edge], is_input: Sequence[bool]) -> Placement:
    """Places boxes of these widths; an input is placed next to its first reader, in any row."""
    rank = _ranks(len(widths), edges, is_input)
    mesh = _Mesh(list(widths), rank, [[] for _ in widths], [[] for _ in widths])
    bends, chains = _bent(mesh, edges, is_input)
    rows: list[list[int]] = [[] for _ in range(max(rank, default=-1) + 1)]
    for vertex, row in enumerate(rank):
        rows[row].append(vertex)
    rows = _ordered(mesh, rows)
    return Placement(rank, _positions(mesh, rows, chains), bends, rows)


def _ranks(count: int, edges: Sequence[Edge], is_input: Sequence[bool]) -> list[int]:
    """Rows by longest path from the top; boxes then move closer to their readers if no edge gets longer."""
    sources: list[list[int]] = [[] for _ in range(count)]
    readers: list[list[int]] = [[] for _ in range(count)]
    for edge in edges:
        sources[edge.target].append(edge.origin)
        readers[edge.origin].append(edge.target)
    order = list(TopologicalSorter(dict(enumerate(sources))).static_order())
    rank = [0] * count
    for vertex in order:
        rank[vertex] = 1 + max((rank[source] for source in sources[vertex]), default=-1)
    for vertex in reversed(order):
        made = [source for source in sources[vertex] if not is_input[source]]
        alone = all(len(readers[source]) == 1 for source in made)
        if readers[vertex] and len(made) < len(readers[vertex]) + alone:
            rank[vertex] = min(rank[reader] for reader in readers[vertex]) - 1
    return rank


def _bent(
    mesh: _Mesh, edges: Sequence[Edge], is_input: Sequence[bool]
) -> tuple[dict[Edge, list[int]], list[list[int]]]:
    """Links edges from row to row, with new bends in the rows they pass; shortest edges first, while bends last."""
    chains: dict[tuple[int, bool], list[int]] = {}
    found: dict[Edge, list[int]] = {}
    rank = mesh.rank
    for edge in sorted(edges, key=lambda edge: rank[edge.target] - rank[edge.origin]):
        chain = chains.setdefault((edge.origin, edge.stopped), [])
        passed = rank[edge.target] - rank[edge.origin] - 1
        if len(rank) + passed - len(chain) > len(is_input) + _BENDS:
            found[edge] = []
            continue
        while len(chain) < passed:
            before = chain[-1] if chain else edge.origin
            chain.append(len(rank))
            mesh.widths.append(BEND)
            rank.append(rank[before] + 1)
            mesh.above.append([])
            mesh.below.append([])
            mesh.link(before, chain[-1], 0.01 if len(chain) > 1 else 0.002)
        # An edge to the next box pulls; an input or an edge from afar yields.
        weight = 0.002 if passed else 0.005 if is_input[edge.origin] else 1.0
        mesh.link(chain[passed - 1] if passed else edge.origin, edge.target, weight)
        found[edge] = chain[:passed]
    return found, [chain for chain in chains.values() if chain]


def _ordered(mesh: _Mesh, rows: list[list[int]]) -> list[list[int]]:
    """The order with the fewest crossings among those found by sweeping down and up."""
    place = [0.0] * len(mesh.rank)
    _number(rows, place)
    best, fewest = rows, _crossings(mesh, rows, place)
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        downwards = sweep % 2 == 0
        rows = [list(row) for row in rows]
        for row in rows if downwards else reversed(rows):
            near = mesh.above if downwards else mesh.below
            mean = {v: sum(place[n] for n, _ in near[v]) / len(near[v]) if near[v] else place[v] for v in row}
            row.sort(key=mean.__getitem__)
            _number([row], place)
        crossings = _crossings(mesh, rows, place)
        if crossings < fewest:
            best, fewest = rows, crossings
    return best


def _number(rows: list[list[int]], place: list[float]) -> None:
    for row in rows:
        for position, vertex in enumerate(row):
            place[vertex] = float(position)


def _crossings(mesh: _Mesh, rows: list[list[int]], place: list[float]) -> int:
    """The number of crossing links: inversions among their lower ends, in the order of their upper ends."""
    total = 0
    for row in rows:
        seen: list[float] = []
        for vertex in row:
            for end in sorted(place[lower] for lower, _ in mesh.below[vertex]):
                total += len(seen) - bisect_right(seen, end)
                insort(seen, end)
    return total


def _positions(mesh: _Mesh, rows: list[list[int]], chains: list[list[int]]) -> list[float]:
    """Centers: each row in turn moves as close to its neighbors as its order and the gaps allow."""
    x = [0.0] * len(mesh.rank)
    for row in rows:
        _settle(mesh, row, x, [0.0] * len(row), [1.0] * len(row))
    both = [up + down for up, down in zip(mesh.above, mesh.below, strict=True)]
    for near, ordered in [(mesh.above, rows), (mesh.below, rows[::-1])] * 3 + [(both, rows), (both, rows[::-1])] * 2:
        for row in ordered:
            weights = [sum(weight for _, weight in near[v]) for v in row]
            wants = [
                sum(x[n] * weight for n, weight in near[v]) / weight if weight else x[v]
                for v, weight in zip(row, weights, strict=True)
            ]
            _settle(mesh, row, x, wants, [weight or 0.001 for weight in weights])
    _straighten(mesh, rows, chains, x)
    left = min((x[v] - mesh.widths[v] / 2 for v in range(len(x))), default=0.0)
    return [center - left for center in x]


def _settle(mesh: _Mesh, row: list[int], x: list[float], wants: list[float], weights: list[float]) -> None:
    gaps = [(mesh.widths[left] + mesh.widths[right]) / 2 + GAP for left, right in pairwise(row)]
    for vertex, center in zip(row, spread(wants, weights, gaps), strict=True):
        x[vertex] = center


def spread(wants: Sequence[float], weights: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Positions nearest to `wants` (weighted squares) that keep order and gaps: colliding boxes move as one block.

    Example:
        >>> spread([0.0, 0.0, 50.0], [1, 1, 1], [10, 10])
        [-5.0, 5.0, 50.0]
    """
    offsets = [0.0, *accumulate(gaps)]
    blocks: list[tuple[float, float, int]] = []  # desired position of its first member, weight, members
    for want, weight, offset in zip(wants, weights, offsets, strict=False):
        at, total, members = want - offset, weight, 1
        while blocks and blocks[-1][0] > at:
            last, heavy, more = blocks.pop()
            at, total, members = (at * total + last * heavy) / (total + heavy), total + heavy, members + more
        blocks.append((at, total, members))
    starts = [at for at, _, members in blocks for _ in range(members)]
    return [start + offset for start, offset in zip(starts, offsets, strict=False)]


def _straighten(mesh: _Mesh, rows: list[list[int]], chains: list[list[int]], x: list[float]) -> None:
    """Aligns the bends of an edge, as many in a row as their neighbors leave room for."""
    beside = {
        bend: (left, right)
        for row in rows
        for left, bend, right in zip([None, *row[:-1]], row, [*row[1:], None], strict=True)
    }
    for chain in sorted(chains, key=len) * 2:
        run: list[int] = []
        low, high = -inf, inf
        for bend in [*chain, None]:
            least, most = (-inf, inf) if bend is None else _room(mesh, beside[bend], x)
            if bend is None or max(low, least) > min(high, most):
                middle = sum(x[v] for v in run) / len(run)
                for v in run:
                    x[v] = min(max(middle, low), high)
                run, low, high = [], -inf, inf
            if bend is not None:
                run.append(bend)
                low, high = max(low, least), min(high, most)


def _room(mesh: _Mesh, beside: tuple[int | None, int | None], x: list[float]) -> tuple[float, float]:
    """The range of positions for a bend, given its neighbors' current positions."""
    left, right = beside
    reach = BEND / 2 + GAP / 2
    return (
        -inf if left is None else x[left] + mesh.widths[left] / 2 + reach,
        inf if right is None else x[right] - mesh.widths[right] / 2 - reach,
    )
