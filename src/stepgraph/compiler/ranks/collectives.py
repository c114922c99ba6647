"""What ranks exchange, as operators of a program.

The walk records what a rank does alone: `of_all_ranks` has zeros for the numbers of others, `updated_` does nothing.
A recorded program thus runs on a single rank, for inspection. The pass in `exchange.py` replaces them with operators
that communicate. These find the ranks by the name of their group, under which `connect` has registered them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from stepgraph.compiler.ranks import news
from stepgraph.compiler.ranks.shards import TreeSum
from stepgraph.errors import ExecutionError
from stepgraph.system import torch_private

Arrays = Sequence[torch.Tensor]
Waiting = Callable[[], torch.Tensor]


class Connection(Protocol):
    """Starts collectives of PyTorch by name."""

    def start(self, what: str, name: str, array: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, Waiting]:
        """Starts a collective; returns its result, and what waits for it."""

    def measured(self, what: str) -> AbstractContextManager[None]:
        """Around waiting for a collective, whose time a GPU measures."""


class _Line:
    """The collectives that operators have started with a group."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.count, self.is_broken = connection, 0, False
        self._pending: dict[int, tuple[torch.Tensor, Waiting, str]] = {}

    def start(self, what: str, name: str, array: torch.Tensor, *settings: Any) -> torch.Tensor:
        """Starts a collective, whose result `finish` waits for."""
        with self._watched():
            started, wait = self.connection.start(what, name, array, *settings)
        self.count += 1
        self._pending[torch_private.identity(started.untyped_storage())] = started, wait, what
        return started

    def finish(self, started: torch.Tensor) -> None:
        """Waits for the result of a collective."""
        _, wait, _ = self._pending.pop(torch_private.identity(started.untyped_storage()))
        with self._watched():
            wait()

    def finish_measured(self, started: torch.Tensor) -> None:
        """The same in front of an update, where ranks wait for the slowest one."""
        *_, what = self._pending[torch_private.identity(started.untyped_storage())]
        with self.connection.measured(what):
            self.finish(started)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Notes that the other ranks cannot be reached."""
        try:
            yield
        except ExecutionError:
            self.is_broken = True
            self._pending.clear()
            raise

    def finish_all(self) -> None:
        """Waits for everything that was started, because the operators that would do so do not run."""
        while self._pending:
            self._pending.popitem()[1][1]()

    def forget(self) -> None:
        """Forgets what was started, because it was only recorded."""
        self._pending.clear()


_lines: dict[str, _Line] = {}


def connect(group: str, connection: Connection) -> None:
    """Lets operators reach a group of ranks by its name."""
    if group not in _lines or _lines[group].connection is not connection:
        _lines[group] = _Line(connection)


def started(group: str) -> int:
    """How many collectives operators have started with a group so far."""
    return _lines[group].count


def is_broken(group: str) -> bool:
    """Whether the ranks of a group can no longer reach each other."""
    return _lines[group].is_broken


def finish_all(group: str) -> None:
    """Waits for the collectives that a part has started which could not run to its end."""
    _lines[group].finish_all()


def forget(group: str) -> None:
    """Forgets the collectives of a capture that could not be completed: none of them has begun."""
    _lines[group].forget()


_library = torch.library.Library("stepgraph", "FRAGMENT")
_ANYWHERE = "CompositeExplicitAutograd"

# Numbers of all ranks: `places` are, rank by rank, where the numbers of each item begin in the result and where they
# end. A rank has the numbers of its items one after another. The result does not depend on how ranks share the items.

_library.define("of_all_ranks(Tensor own, int rank, int size, int[] places) -> Tensor")
_library.define("from_all_ranks(Tensor own, int rank, int size, int[] places, str group, str what) -> Tensor")


@torch.library.impl(_library, "of_all_ranks", _ANYWHERE)
def _of_all_ranks(own: torch.Tensor, rank: int, size: int, places: Sequence[int]) -> torch.Tensor:
    """The numbers of this rank in their places, and zeros."""
    padded = own.new_zeros(size, _most(places, size))
    padded[rank, : len(own)] = own
    return padded.view(-1)[_sources(tuple(places), size, own.device)]


@torch.library.impl(_library, "from_all_ranks", _ANYWHERE)
def _from_all_ranks(
    own: torch.Tensor, rank: int, size: int, places: Sequence[int], group: str, what: str
) -> torch.Tensor:
    """The numbers of all ranks."""
    padded, ranks = F.pad(own, (0, _most(places, size) - len(own))), _lines[group]
    found = ranks.start(what, "all_gather_into_tensor", as_bytes(padded), size)
    ranks.finish(found)
    return found.view(own.dtype)[_sources(tuple(places), size, own.device)]


@torch.library.register_fake("stepgraph::of_all_ranks", lib=_library)
def _(own: torch.Tensor, rank: int, size: int, places: Sequence[int]) -> torch.Tensor:
    return own.new_empty(sum(places[1::2]) - sum(places[::2]))


@torch.library.register_fake("stepgraph::from_all_ranks", lib=_library)
def _(own: torch.Tensor, rank: int, size: int, places: Sequence[int], group: str, what: str) -> torch.Tensor:
    return own.new_empty(sum(places[1::2]) - sum(places[::2]))


def _most(places: Sequence[int], size: int) -> int:
    """The most numbers that a rank has."""
    each = torch.tensor(places).view(size, -1, 2)
    return int((each[..., 1] - each[..., 0]).sum(1).max())


@lru_cache(maxsize=64)
def _sources(places: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """Where each number of the result is among those of all ranks, if each rank's are padded to the most of any."""
    most, width = _most(places, size), len(places) // size
    sources, targets = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for rank in range(size):
        own, place = places[rank * width : (rank + 1) * width], rank * most
        for start, stop in zip(own[::2], own[1::2], strict=True):
            targets.append(torch.arange(start, stop))
            sources.append(torch.arange(place, place + stop - start))
            place += stop - start
    found = torch.cat(sources)
    return found[torch.cat(targets).argsort()].to(device)


# Parameters of which each rank has updated a slice. Two ranks on CPUs swap theirs: Gloo gathers in memory of its own,
# and copies what it has gathered.

_library.define("updated_(Tensor(a!)[] parameters) -> ()")
_library.define(
    "start_gather(Tensor[] parameters, int[] starts, int[] stops, int most, int rank, int size, str group, str what) "
    "-> Tensor"
)
_library.define(
    "finish_gather_(Tensor(a!)[] parameters, Tensor started, Tensor? agreed, int[] bounds, int rank, int size, "
    "str group) -> ()"
)


@torch.library.impl(_library, "updated_", _ANYWHERE)
def _updated_(parameters: Arrays) -> None:
    """Marks where the slices of parameters have been updated."""


@torch.library.impl(_library, "start_gather", _ANYWHERE)
def _start_gather(
    parameters: Arrays,
    starts: Sequence[int],
    stops: Sequence[int],
    most: int,
    rank: int,
    size: int,
    group: str,
    what: str,
) -> torch.Tensor:
    """Starts to send this rank's slices of parameters, which are of one type, to all others."""
    ranges = zip(parameters, starts, stops, strict=True)
    own = [parameter.view(-1)[start:stop] for parameter, start, stop in ranges if stop > start]
    missing = most - sum(map(len, own))
    sent = torch.cat([*own, parameters[0].new_zeros(missing)] if missing else own)
    own_bytes = as_bytes(sent)
    if swaps(sent.device, size):
        counts = [len(own_bytes) * (other != rank) for other in range(size)]
        return _lines[group].start(what, "all_to_all_single", own_bytes, counts, counts)
    return _lines[group].start(what, "all_gather_into_tensor", own_bytes, size)


def swaps(device: torch.device, size: int) -> bool:
    """Whether ranks receive only what others have updated."""
    return device.type == "cpu" and size == 2


@torch.library.impl(_library, "finish_gather_", _ANYWHERE)
def _finish_gather_(
    parameters: Arrays,
    started: torch.Tensor,
    agreed: torch.Tensor | None,
    bounds: Sequence[int],
    rank: int,
    size: int,
    group: str,
) -> None:
    """Writes what other ranks have sent; `bounds` are their slices as starts and stops, parameter by parameter.

    An update that the device refuses writes nothing: a rank may have other numbers, which is why it is refused.
    """
    _lines[group].finish(started)
    swapped = swaps(started.device, size)
    gathered = started.view(parameters[0].dtype).view(1 if swapped else size, -1)
    places, to, of = [0] * size, [], []
    for index, parameter in enumerate(parameters):
        flat = parameter.view(-1)
        for other in range(size):
            start, stop = bounds[2 * (index * size + other) :][:2]
            if stop > start and other != rank:
                to.append(flat[start:stop])
                of.append(gathered[0 if swapped else other, places[other] : places[other] + stop - start])
            places[other] += stop - start
    if agreed is not None:
        for kept, new in zip(to, of, strict=True):
            torch.where(agreed, new, kept, out=kept)
    elif to:
        torch_private.foreach_copy_(to, of)


@torch.library.register_fake("stepgraph::updated_", lib=_library)
def _(*_: object) -> None:
    return None


@torch.library.register_fake("stepgraph::start_gather", lib=_library)
def _(parameters: Arrays, starts: object, stops: object, most: int, rank: int, size: int, *_: str) -> torch.Tensor:
    parts = 1 if swaps(parameters[0].device, size) else size
    return parameters[0].new_empty(parts * most * parameters[0].dtype.itemsize, dtype=torch.uint8)


@torch.library.register_fake("stepgraph::finish_gather_", lib=_library)
def _(*_: object) -> None:
    return None


# Gradients: buckets are packed rank by rank, each rank receives its part of all partial sums and adds them

_library.define("pack(Tensor[] gradients, int[] bounds) -> Tensor")
_library.define("by_rank(Tensor[] sums, int[] sizes) -> Tensor")
_library.define("start_trade(Tensor sent, int[] taken, int[] given, int rank, str group, str what) -> Tensor")
_library.define("start_scatter(Tensor sum, int[] sizes, str group, str what) -> Tensor")
_library.define("finish_scatter(Tensor(a!) started, int size, str group) -> Tensor")
_library.define(
    "finish_trade(Tensor(a!) received, Tensor[] kept, int[] edges, int rank, int[] levels, int[] indices, int count, "
    "ScalarType type, str group) -> Tensor"
)


@torch.library.impl(_library, "pack", _ANYWHERE)
def _pack(gradients: Arrays, bounds: Sequence[int]) -> torch.Tensor:
    """Slices of gradients as one array; `bounds` are their starts and stops, rank by rank."""
    flat, count = [one.reshape(-1) for one in gradients], len(gradients)
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    return torch.cat([flat[place % count][start:stop] for place, (start, stop) in enumerate(pairs)])


@torch.library.impl(_library, "by_rank", _ANYWHERE)
def _by_rank(sums: Arrays, sizes: Sequence[int]) -> torch.Tensor:
    """The parts of several sums, those for the first rank in front."""
    split = [one.split([*sizes]) for one in sums]
    return torch.cat([one[rank] for rank in range(len(sizes)) for one in split])


@torch.library.impl(_library, "start_trade", _ANYWHERE)
def _start_trade(
    sent: torch.Tensor, taken: Sequence[int], given: Sequence[int], rank: int, group: str, what: str
) -> torch.Tensor:
    """Starts to send each rank its part of an array, and to receive others; both are counted in bytes.

    Two ranks that swap keep their own parts, of which Gloo would make a copy.
    """
    bytes_sent = as_bytes(sent)
    if swaps(sent.device, len(given)):
        start = sum(given[:rank])
        bytes_sent = bytes_sent[start + given[rank] :] if rank == 0 else bytes_sent[:start]
        taken, given = _of_others(taken, rank), _of_others(given, rank)
    return _lines[group].start(what, "all_to_all_single", bytes_sent, [*taken], [*given])


def _of_others(counts: Sequence[int], rank: int) -> list[int]:
    return [0 if other == rank else count for other, count in enumerate(counts)]


@torch.library.impl(_library, "start_scatter", _ANYWHERE)
def _start_scatter(sum: torch.Tensor, sizes: Sequence[int], group: str, what: str) -> torch.Tensor:
    """Starts to add the arrays of all ranks, of which each receives its part, padded to the longest."""
    most = max(sizes)
    padded = torch.cat([F.pad(part, (0, most - len(part))) for part in sum.split([*sizes])])
    return _lines[group].start(what, "reduce_scatter_tensor", padded, "sum", len(sizes))


@torch.library.impl(_library, "finish_scatter", _ANYWHERE)
def _finish_scatter(started: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Waits for this rank's part of a sum."""
    _lines[group].finish_measured(started)
    return started[:size].clone()


@torch.library.impl(_library, "finish_trade", _ANYWHERE)
def _finish_trade(
    received: torch.Tensor,
    kept: Arrays,
    edges: Sequence[int],
    rank: int,
    levels: Sequence[int],
    indices: Sequence[int],
    count: int,
    dtype: torch.dtype,
    group: str,
) -> torch.Tensor:
    """Waits for this rank's part of all partial sums, nodes of the tree over `count` shards, and adds them.

    `kept` has what the rank has not sent, its part of its own sums; `edges` are its starts and stops, array by array.
    """
    _lines[group].finish_measured(received)
    others = received.view(dtype)
    own = [one.reshape(-1)[start:stop] for one, start, stop in zip(kept, edges[::2], edges[1::2], strict=True)]
    if own and len(levels) == 2:  # whatever the tree, they are added once
        return _added(own, others)
    parts = _parts(torch.cat(own) if own else others[:0], others, rank, len(levels))
    if len(levels) == 2:
        return parts[0] + parts[1]
    found = TreeSum(count)
    for node, part in zip(zip(levels, indices, strict=True), parts, strict=True):
        found.add(node, [part])
    return found.total[0].clone()


def _added(own: Arrays, others: torch.Tensor) -> torch.Tensor:
    """The sum of two arrays, one of them in pieces."""
    found, sizes = torch.empty_like(others), [len(one) for one in own]
    for total, one, other in zip(found.split(sizes), own, others.split(sizes), strict=True):
        torch.add(one, other, out=total)
    return found


def _parts(own: torch.Tensor, others: torch.Tensor, rank: int, count: int) -> Arrays:
    """This rank's part of each of some sums, in the order of the ranks that have added them; may be overwritten."""
    size = (len(others) + len(own)) // count
    if not size:  # this rank has nothing of the bucket
        return [others] * count
    both = (own, others) if rank == 0 else (others, own)
    return [part for one in both if len(one) for part in one.split(size)]


@torch.library.register_fake("stepgraph::pack", lib=_library)
def _(gradients: Arrays, bounds: Sequence[int]) -> torch.Tensor:
    return gradients[0].new_empty(sum(bounds[1::2]) - sum(bounds[::2]))


@torch.library.register_fake("stepgraph::by_rank", lib=_library)
def _(sums: Arrays, sizes: object) -> torch.Tensor:
    return sums[0].new_empty(sum(one.numel() for one in sums))


@torch.library.register_fake("stepgraph::start_trade", lib=_library)
def _(sent: torch.Tensor, taken: Sequence[int], given: Sequence[int], rank: int, group: str, what: str) -> torch.Tensor:
    counts = _of_others(taken, rank) if swaps(sent.device, len(given)) else taken
    return sent.new_empty(sum(counts), dtype=torch.uint8)


@torch.library.register_fake("stepgraph::start_scatter", lib=_library)
def _(sum: torch.Tensor, sizes: Sequence[int], group: str, what: str) -> torch.Tensor:
    return sum.new_empty(max(sizes))


@torch.library.register_fake("stepgraph::finish_scatter", lib=_library)
def _(started: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return started.new_empty(size)


@torch.library.register_fake("stepgraph::finish_trade", lib=_library)
def _(
    received: torch.Tensor,
    kept: Arrays,
    edges: Sequence[int],
    rank: int,
    levels: Sequence[int],
    indices: object,
    count: int,
    dtype: torch.dtype,
    group: str,
) -> torch.Tensor:
    own = sum(edges[1::2]) - sum(edges[::2])
    return received.new_empty((received.numel() // dtype.itemsize + own) // len(levels), dtype=dtype)


# News about a shard: they leave with its gradients, and are waited for with them

_library.define(
    "start_news(Tensor own, Tensor[] losses, Tensor[] statistics, Tensor[] notes, int rows, int[] met, int[] order, "
    "int size, str group, str what) -> Tensor"
)
_library.define("finish_news(Tensor(a!) started, int[] shape, str group) -> Tensor")
_library.define("agreed(Tensor heard) -> Tensor")


@torch.library.impl(_library, "start_news", _ANYWHERE)
def _start_news(
    own: torch.Tensor,
    losses: Arrays,
    statistics: Arrays,
    notes: Arrays,
    rows: int,
    met: Sequence[int],
    order: Sequence[int],
    size: int,
    group: str,
    what: str,
) -> torch.Tensor:
    """Starts to tell the others the partial sums of this rank with its last shard.

    `own` has a header, the sums of earlier shards, and the shares of this one in its losses. `notes` are those about
    indices, if there are any. `met` are the sums that it is added to, `order` the sums that are left then, -1 for the
    new one.
    """
    new = news.weighted(losses, statistics, own[-1, : len(losses)], rows)
    earlier, told = own[1:-1, : len(new)], own[:-1].clone()
    for place in met:
        new = earlier[place] + new
    for target, place in enumerate(order, start=1):
        told[target, : len(new)] = new if place < 0 else earlier[place]
    for one in notes:
        news.tell_notes_(told[0], one)
    return _lines[group].start(what, "all_gather_into_tensor", as_bytes(told), size)


@torch.library.impl(_library, "finish_news", _ANYWHERE)
def _finish_news(started: torch.Tensor, shape: Sequence[int], group: str) -> torch.Tensor:
    """Waits for what all ranks tell, as `[rank, ...]`."""
    _lines[group].finish_measured(started)
    return started.view(news.DTYPE).view([*shape]).clone()


@torch.library.impl(_library, "agreed", _ANYWHERE)
def _agreed(heard: torch.Tensor) -> torch.Tensor:
    """Whether all ranks can make the update."""
    return news.agreed(heard)


@torch.library.register_fake("stepgraph::start_news", lib=_library)
def _(own: torch.Tensor, *rest: Any) -> torch.Tensor:
    return own.new_empty(rest[6] * own[:-1].nbytes, dtype=torch.uint8)


@torch.library.register_fake("stepgraph::finish_news", lib=_library)
def _(started: torch.Tensor, shape: Sequence[int], group: str) -> torch.Tensor:
    return started.new_empty([*shape], dtype=news.DTYPE)


@torch.library.register_fake("stepgraph::agreed", lib=_library)
def _(heard: torch.Tensor) -> torch.Tensor:
    return heard.new_empty(1, dtype=torch.bool)


start_news = torch.ops.stepgraph.start_news.default
finish_news = torch.ops.stepgraph.finish_news.default
agreed = torch.ops.stepgraph.agreed.default
pack = torch.ops.stepgraph.pack.default
by_rank = torch.ops.stepgraph.by_rank.default
start_trade = torch.ops.stepgraph.start_trade.default
start_scatter = torch.ops.stepgraph.start_scatter.default
finish_scatter = torch.ops.stepgraph.finish_scatter.default
finish_trade = torch.ops.stepgraph.finish_trade.default
of_all_ranks = torch.ops.stepgraph.of_all_ranks.default
from_all_ranks = torch.ops.stepgraph.from_all_ranks.default
updated_ = torch.ops.stepgraph.updated_.default
start_gather = torch.ops.stepgraph.start_gather.default
finish_gather_ = torch.ops.stepgraph.finish_gather_.default


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """A contiguous array as bytes, which every backend can send."""
    return array.contiguous().view(-1).view(torch.uint8)
