"""What ranks tell each other about where they are, and in which order, with a store in memory."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from stepgraph.runtime import heartbeat
from stepgraph.runtime.heartbeat import Heartbeat, Place

EXCHANGE = 5  # the number of the one that fails
Others = dict[int, dict[str, Any]]  # what they say, by rank


class Store:
    """A store in which other ranks say something new each time they are looked at; it notes what happens.

    Args:
        others: what they say first, by rank.
        changes: what they say when this rank has looked so often.
        lasts: how often this rank can look before the store goes.
    """

    def __init__(self, others: Others, changes: dict[int, Callable[[Others], None]] | None = None, lasts: int = 10**6):
        self.others, self.changes, self.lasts = others, changes or {}, lasts
        self.kept, self.noted, self.looks = dist.HashStore(), [], 0

    def set(self, key: str, value: str) -> None:
        self.noted.append("gave up" if json.loads(value)["has_failed"] else "came")
        self.kept.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        rank = int(key.rpartition("/")[2])
        if rank == min(self.others):
            self.look()
        self.others[rank]["beat"] += 1
        return json.dumps(self.others[rank]).encode()

    def look(self) -> None:
        self.looks += 1
        if self.looks > self.lasts:
            raise RuntimeError("the store has gone")
        self.noted.append("looked")
        if self.looks in self.changes:
            self.changes[self.looks](self.others)


def other(number: int, **changes: Any) -> dict[str, Any]:
    return {"step": 2, "number": number, "what": "losses", "waiting": True, "beat": 0, "line": "a.py:1", **changes}


@pytest.fixture
def hearts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, Store], Heartbeat]]:
    """Creates a rank of three; its thread, which says something now and then, has ended."""
    monkeypatch.setattr(heartbeat, "BEAT", 5.0)  # a busy machine does not use up the patience
    made: list[Heartbeat] = []

    def create(rank: int, store: Store) -> Heartbeat:
        made.append(Heartbeat(rank, 3, store, Place(step=2, number=EXCHANGE)))  # type: ignore[arg-type]
        made[-1]._stop.set()
        made[-1]._thread.join()
        store.noted.clear()
        return made[-1]

    yield create
    for one in made:
        one.has_failed = True  # so that it waits for nobody
        one.stop()


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_says_that_it_has_given_up_after_it_has_looked(rank: int, hearts: Any) -> None:
    store = Store({1: other(EXCHANGE - 1), 2 - rank: other(EXCHANGE, has_failed=True)})
    found = hearts(rank, store).missing(EXCHANGE)
    looked = store.noted[: store.noted.index("gave up")]
    assert list(found) == [1] and looked == ["came", "looked", "looked"]  # twice: the second shows that it still runs


def test_the_first_rank_stays_until_others_have_looked(hearts: Any) -> None:
    def fails(others: Others) -> None:
        others[2]["has_failed"] = True

    store = Store({1: other(EXCHANGE - 1), 2: other(EXCHANGE)}, {6: fails})
    assert list(hearts(0, store).missing(EXCHANGE)) == [1]
    assert store.looks == 6


def test_other_ranks_wait_only_for_what_they_ask(hearts: Any) -> None:
    store = Store({0: other(EXCHANGE), 1: other(EXCHANGE - 1)})
    assert list(hearts(2, store).missing(EXCHANGE)) == [1]
    assert store.noted == ["came", "looked", "looked", "gave up"]


@pytest.mark.parametrize(("lasts", "named"), [(0, []), (1, [1]), (2, [1]), (3, [1])])
def test_what_was_read_before_the_store_went_counts(lasts: int, named: list[int], hearts: Any) -> None:
    heart = hearts(0, Store({1: other(EXCHANGE - 1), 2: other(EXCHANGE)}, lasts=lasts))
    assert list(heart.missing(EXCHANGE)) == named and heart.has_failed
