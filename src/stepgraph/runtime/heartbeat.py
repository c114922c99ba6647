"""Where every rank is: each says so twice a second, and reads what the others say when an exchange fails.

Communication libraries only report that time is up. Ranks make their exchanges in the same order, so the one that has
made fewer than the others is the one they wait for. A thread writes the number to the store in which ranks have found
each other; an exchange itself only counts, and nothing is read before one fails.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

import torch.distributed as dist

from stepgraph.system.stacks import line_of

logger = logging.getLogger("stepgraph")
BEAT = 0.5  # seconds between two messages of a rank; more with hundreds of ranks, which share one store
RANKS_PER_SECOND = 400  # messages that the store gets at most
_OWN = ("waited", "is_running", "is_updating", "compared", "settled")  # of a place: nothing for others
PATIENCE = 4  # beats after which a rank without a new message does not answer


@dataclass
class Place:
    """Where this rank is.

    Args:
        step: the update it works on, or has finished, from 1.
        number: the exchanges it has started.
        what: the last of them.
        waiting: whether it waits for that one.
        waited: seconds it has waited for other ranks.
        is_running: whether a run goes on, in which ranks greet each other before each update.
        is_updating: whether the run makes an update, in front of which ranks have greeted each other.
        compared: how often it has compared its program with those of others.
        settled: the exchanges it had started when it last took a program that all have compared.
    """

    step: int = 0
    number: int = 0
    what: str = "nothing"
    waiting: bool = False
    waited: float = 0.0
    is_running: bool = False
    is_updating: bool = False
    compared: int = 0
    settled: int = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a run, which may be inside another one."""
        before, self.is_running = self.is_running, True
        try:
            yield
        finally:
            self.is_running = before

    def is_silent_since(self, number: int) -> bool:
        """Whether it has exchanged nothing since then, so that others wait to hear from it.

        Having compiled again together, they are about to make the call for which they have.
        """
        return self.number in (number, self.settled)

    def start(self, what: str) -> int:
        """Counts an exchange; returns its number."""
        self.number, self.what = self.number + 1, what
        return self.number


@dataclass(frozen=True)
class Message:
    """What a rank says of itself.

    Args:
        beat: the number of the message.
        line: the line of the user's program that its main thread executes.
        has_failed: whether it has given up waiting, and has looked at what others say.
        has_left: whether it has ended.
    """

    step: int = 0
    number: int = 0
    what: str = "nothing"
    waiting: bool = False
    beat: int = 0
    line: str = ""
    has_failed: bool = False
    has_left: bool = False

    @property
    def text(self) -> str:
        """Where the rank is, in words."""
        if self.has_left:
            return f"its program has ended after step {self.step}"
        if self.waiting:
            return f"it exchanges {self.what} in step {self.step}"
        return f"it runs {self.line} in step {self.step}; its last exchange was {self.what}"


@dataclass
class Heartbeat:
    """Tells the other ranks where this one is, and finds those that have not come as far.

    Args:
        rank: the number of this process.
        size: the number of processes.
        store: that of the process group; a connection of its own, since a thread uses it.
        place: where this rank is.
        alarm: seconds without a new exchange after which the thread logs which ranks are missing; None if an exchange
            raises an error by itself. One on a GPU does not: it is waited for there, not in this program.
    """

    rank: int
    size: int
    store: dist.Store
    place: Place
    alarm: float | None = None
    has_failed: bool = False
    has_left: bool = False
    _beat: int = 0
    _is_cut_off: bool = False
    _heard: dict[int, Message] = field(default_factory=dict)  # what others said when an exchange had failed
    _stop: threading.Event = field(default_factory=threading.Event)
    _writing: threading.Lock = field(default_factory=threading.Lock)  # a store is used by one thread at a time

    def __post_init__(self) -> None:
        self.pause = max(BEAT, self.size / RANKS_PER_SECOND)
        self._main = threading.main_thread().ident or 0
        self._say()
        self._thread = threading.Thread(target=self._repeat, name="stepgraph heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Says that this rank has ended. The first one, which others may reach the store through, waits for them."""
        self.has_left = True
        self._stop.set()
        self._thread.join(timeout=self.pause)
        if self._is_cut_off:
            return
        try:
            self._say()
            if self.rank == 0 and not self.has_failed:
                self._await(lambda found: all(one.has_left for one in found.values()))
        except RuntimeError:  # the store has gone: there is nobody left to tell
            return

    def missing(self, number: int) -> dict[int, str]:
        """The ranks that have not come to an exchange, with where they are; after it has failed on this one."""
        found = self._heard = {}
        beats: dict[int, int] = {}

        def is_settled(now: Mapping[int, Message]) -> bool:
            found.update(now)
            for rank, one in now.items():
                beats.setdefault(rank, one.beat)
            absent = [one for one in now.items() if _is_absent(one[1], number)]
            return bool(absent) and all(one.has_left or one.beat > beats[rank] for rank, one in absent)

        try:
            self._say()
            self._await(is_settled)
            self._give_up(number)
        except RuntimeError:  # the store has gone with a rank; what was read before counts
            self.has_failed = True
        absent = {rank: one for rank, one in found.items() if _is_absent(one, number)}
        silent = {rank: one for rank, one in found.items() if one.beat == beats[rank] and not one.has_left}
        return {
            rank: f"it does not answer; when last heard, {one.text}" if rank in silent else one.text
            for rank, one in (absent or silent).items()
        }

    def elsewhere(self, number: int, what: str) -> dict[int, str]:
        """The ranks that have come as far and exchange something else, with what; where none is missing."""
        return {rank: one.what for rank, one in self._heard.items() if one.number >= number and one.what != what}

    def _give_up(self, number: int) -> None:
        """Says that this rank has failed, after it has looked at what others say.

        The first rank, which others may reach the store through, lets those that have come to the exchange look, too.
        """
        self.has_failed = True
        self._say()
        if self.rank == 0:
            self._await(lambda now: all(one.has_failed for one in now.values() if not _is_absent(one, number)))

    def _await(self, is_settled: Any) -> None:
        """Reads what others say until that settles it, for at most a few beats."""
        deadline = time.monotonic() + PATIENCE * self.pause
        while not is_settled(self._read()) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _repeat(self) -> None:
        last, since = self._progress, time.monotonic()
        try:
            while not self._stop.wait(self.pause):
                self._say()
                if self._progress != last:
                    last, since = self._progress, time.monotonic()
                elif self.alarm is not None and time.monotonic() - since > self.alarm:
                    self._raise_alarm()
                    since = inf  # once for each exchange
        except RuntimeError:  # the store has gone; an exchange that needs the others will say so
            self._is_cut_off = True

    @property
    def _progress(self) -> tuple[int, int]:
        """How far this rank has come. Exchanges that a GPU replays are not counted, updates are."""
        return self.place.step, self.place.number

    def _raise_alarm(self) -> None:
        others, mine = self._read(), self._progress
        found = {rank: one for rank, one in others.items() if (one.step, one.number) < mine or _has_ended(one)}
        for rank, one in found.items():
            where = f"rank {rank} did not come to exchange {self.place.what} in step {self.place.step}"
            logger.error("rank %d of %d: %s: %s", self.rank, self.size, where, one.text)

    def _say(self) -> None:
        with self._writing:
            self._beat += 1
            place = {name: one for name, one in asdict(self.place).items() if name not in _OWN}
            flags = {"has_failed": self.has_failed, "has_left": self.has_left}
            message = {**place, **flags, "beat": self._beat, "line": line_of(self._main)}
            self.store.set(f"stepgraph/{self.rank}", json.dumps(message))

    def _read(self) -> dict[int, Message]:
        """What the other ranks have said last; nothing of a rank that has said nothing yet."""
        found = {}
        with self._writing:
            for rank in range(self.size):
                key = f"stepgraph/{rank}"
                if rank != self.rank and self.store.check([key]):
                    found[rank] = Message(**json.loads(self.store.get(key)))
        return found


def _is_absent(one: Message, number: int) -> bool:
    return one.number < number or _has_ended(one)


def _has_ended(one: Message) -> bool:
    return one.has_left and not one.has_failed
