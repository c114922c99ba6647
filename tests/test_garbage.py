"""Full collections are deferred, not forgotten, and only where nobody else decides."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator

import pytest

from stepgraph.system.garbage import NEVER, FullCollectionsDeferred


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def threshold() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 5)
    gc.collect()
    yield gc.get_threshold()
    gc.set_threshold(*before)


def test_only_full_collections_are_deferred(threshold: tuple[int, int, int]) -> None:
    with FullCollectionsDeferred():
        assert gc.get_threshold() == (*threshold[:2], NEVER)
    assert gc.get_threshold() == threshold


def survivors(collections: int) -> list[list[int]]:
    """Creates objects that stay, until Python has collected middle-aged objects so often."""
    found, until = list[list[int]](), gc.get_count()[2] + collections
    while gc.get_count()[2] < until:
        found.append([])
    return found


def test_a_full_collection_that_became_due_comes_once_as_many_objects_were_created_again(
    threshold: tuple[int, int, int],
) -> None:
    with FullCollectionsDeferred():
        kept = survivors(20)
    assert gc.get_threshold() == (*threshold[:2], 40)
    kept += survivors(19)
    before = gc.get_stats()[2]["collections"]
    while gc.get_stats()[2]["collections"] == before and len(kept) < 10_000_000:
        kept.append([])
    assert gc.get_stats()[2]["collections"] == before + 1 and gc.get_threshold() == threshold


def test_blocks_one_after_another_put_it_off_once(threshold: tuple[int, int, int]) -> None:
    kept = list[list[int]]()
    for rounds in range(2):
        with FullCollectionsDeferred():
            kept += survivors(20 + rounds)
    assert gc.get_threshold() == threshold


def test_what_somebody_sets_while_one_is_put_off_stays() -> None:
    with FullCollectionsDeferred():
        kept = survivors(20)
    gc.set_threshold(500, 5, 3)
    with FullCollectionsDeferred():
        assert gc.get_threshold() == (500, 5, NEVER)
    del kept
    gc.collect()
    assert gc.get_threshold() == (500, 5, 3)


def test_garbage_is_collected_when_somebody_asks() -> None:
    old = Cycle()
    gc.collect()
    found = weakref.ref(old)
    with FullCollectionsDeferred():
        del old
        gc.collect()
        assert found() is None


def test_the_last_of_several_threads_restores(threshold: tuple[int, int, int]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with FullCollectionsDeferred():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=work)
    with FullCollectionsDeferred():
        thread.start()
        inside.wait(10)
    assert gc.get_threshold()[2] == NEVER
    leave.set()
    thread.join()
    assert gc.get_threshold() == threshold


def test_what_somebody_sets_meanwhile_stays() -> None:
    with FullCollectionsDeferred():
        gc.set_threshold(500, 5, 3)
    assert gc.get_threshold() == (500, 5, 3)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_collects_as_before(threshold: tuple[int, int, int]) -> None:
    with FullCollectionsDeferred():
        child = os.fork()
        if child == 0:
            right = gc.get_threshold() == threshold
            with FullCollectionsDeferred():
                right = right and gc.get_threshold()[2] == NEVER
            os._exit(0 if right and gc.get_threshold() == threshold else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
