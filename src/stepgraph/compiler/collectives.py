"""What ranks exchange, as operators of a program.

The walk records what a rank does alone: `of_all_ranks` has zeros for the numbers of others, `updated_` does nothing.
A recorded program thus runs on a single rank, for inspection. The pass in `exchange.py` replaces them with operators
that communicate. These find the ranks by the name of their group, under which `connect` has registered them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from stepgraph.system import torch_private

Arrays = Sequence[torch.Tensor]


class Connection(Protocol):
    """Starts collectives of PyTorch by name, and waits for what they bring."""

    def start(self, what: str, name: str, array: torch.Tensor, *settings: Any) -> torch.Tensor:
        """Starts a collective; its result must be waited for."""

    def wait(self, what: str, started: torch.Tensor) -> torch.Tensor:
        """The result."""


_connections: dict[str, Connection] = {}


def connect(group: str, connection: Connection) -> None:
    """Lets operators reach a group of ranks by its name."""
    _connections[group] = connection


_library = torch.library.Library("stepgraph", "FRAGMENT")
_ANYWHERE = "CompositeExplicitAutograd"

# Numbers of all ranks: `counts` are how many each rank has of each item, rank by rank. The result has item by item,
# and in each what the ranks have, so that it does not depend on how they share the items.

_library.define("of_all_ranks(Tensor own, int rank, int size, int[] counts) -> Tensor")
_library.define("from_all_ranks(Tensor own, int rank, int size, int[] counts, str group, str what) -> Tensor")


@torch.library.impl(_library, "of_all_ranks", _ANYWHERE)
def _of_all_ranks(own: torch.Tensor, rank: int, size: int, counts: Sequence[int]) -> torch.Tensor:
    """The numbers of this rank in their places, and zeros."""
    most = _most(counts, size)
    padded = own.new_zeros(size, most)
    padded[rank, : len(own)] = own
    return padded.view(-1)[_places(tuple(counts), size, own.device)]


@torch.library.impl(_library, "from_all_ranks", _ANYWHERE)
def _from_all_ranks(
    own: torch.Tensor, rank: int, size: int, counts: Sequence[int], group: str, what: str
) -> torch.Tensor:
    """The numbers of all ranks."""
    padded, ranks = F.pad(own, (0, _most(counts, size) - len(own))), _connections[group]
    started = ranks.start(what, "all_gather_into_tensor", as_bytes(padded), size)
    return ranks.wait(what, started).view(own.dtype)[_places(tuple(counts), size, own.device)]


@torch.library.register_fake("stepgraph::of_all_ranks", lib=_library)
def _(own: torch.Tensor, rank: int, size: int, counts: Sequence[int]) -> torch.Tensor:
    return own.new_empty(sum(counts))


@torch.library.register_fake("stepgraph::from_all_ranks", lib=_library)
def _(own: torch.Tensor, rank: int, size: int, counts: Sequence[int], group: str, what: str) -> torch.Tensor:
    return own.new_empty(sum(counts))


def _most(counts: Sequence[int], size: int) -> int:
    items = len(counts) // size
    return max(sum(counts[rank * items : (rank + 1) * items]) for rank in range(size))


@lru_cache(maxsize=64)
def _places(counts: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """Where the numbers are that `from_all_ranks` returns, if each rank's are padded to the most of any."""
    items, most = len(counts) // size, _most(counts, size)
    by_rank = torch.tensor(counts).view(size, items)
    starts = by_rank.cumsum(1) - by_rank + most * torch.arange(size)[:, None]
    pairs = zip(starts.T.reshape(-1).tolist(), by_rank.T.reshape(-1).tolist(), strict=True)
    found = [torch.arange(start, start + count) for start, count in pairs if count]
    return (torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)).to(device)


# Parameters of which each rank has updated a slice

_library.define("updated_(Tensor(a!)[] parameters) -> ()")
_library.define(
    "start_gather(Tensor[] parameters, int[] starts, int[] stops, int most, int size, str group, str what) -> Tensor"
)
_library.define(
    "finish_gather_(Tensor(a!)[] parameters, Tensor started, int[] bounds, int rank, int size, str group, str what) "
    "-> ()"
)


@torch.library.impl(_library, "updated_", _ANYWHERE)
def _updated_(parameters: Arrays) -> None:
    """Marks where the slices of parameters have been updated."""


@torch.library.impl(_library, "start_gather", _ANYWHERE)
def _start_gather(
    parameters: Arrays, starts: Sequence[int], stops: Sequence[int], most: int, size: int, group: str, what: str
) -> torch.Tensor:
    """Starts to send this rank's slices of parameters, which are of one type, to all others."""
    sent, place = parameters[0].new_empty(most), 0
    for parameter, start, stop in zip(parameters, starts, stops, strict=True):
        sent[place : place + stop - start] = parameter.view(-1)[start:stop]
        place += stop - start
    sent[place:] = 0
    return _connections[group].start(what, "all_gather_into_tensor", as_bytes(sent), size)


@torch.library.impl(_library, "finish_gather_", _ANYWHERE)
def _finish_gather_(
    parameters: Arrays, started: torch.Tensor, bounds: Sequence[int], rank: int, size: int, group: str, what: str
) -> None:
    """Writes what other ranks have sent; `bounds` are their slices as starts and stops, parameter by parameter."""
    gathered = _connections[group].wait(what, started).view(parameters[0].dtype).view(size, -1)
    places, to, of = [0] * size, [], []
    for index, parameter in enumerate(parameters):
        flat = parameter.view(-1)
        for other in range(size):
            start, stop = bounds[2 * (index * size + other) :][:2]
            if stop > start and other != rank:
                to.append(flat[start:stop])
                of.append(gathered[other, places[other] : places[other] + stop - start])
            places[other] += stop - start
    if to:
        torch_private.foreach_copy_(to, of)


@torch.library.register_fake("stepgraph::updated_", lib=_library)
def _(*_: object) -> None:
    return None


@torch.library.register_fake("stepgraph::start_gather", lib=_library)
def _(parameters: Arrays, starts: object, stops: object, most: int, size: int, group: str, what: str) -> torch.Tensor:
    return parameters[0].new_empty(size * most * parameters[0].dtype.itemsize, dtype=torch.uint8)


@torch.library.register_fake("stepgraph::finish_gather_", lib=_library)
def _(*_: object) -> None:
    return None


of_all_ranks = torch.ops.stepgraph.of_all_ranks.default
from_all_ranks = torch.ops.stepgraph.from_all_ranks.default
updated_ = torch.ops.stepgraph.updated_.default
start_gather = torch.ops.stepgraph.start_gather.default
finish_gather_ = torch.ops.stepgraph.finish_gather_.default


def as_bytes(array: torch.Tensor) -> torch.Tensor:
    """A contiguous array as bytes, which every backend can send."""
    return array.contiguous().view(-1).view(torch.uint8)
