"""Where ranks find each other: a store of keys and values, under a name that only this start of them all has.

torchrun keeps one store for all its restarts. Addresses of processes that have died stay there, and a rank that reads
one before its owner has written a new one cannot connect. The number of restarts is no safe name: each machine counts
its own. So the ranks agree on one: each shows a number that nobody else has, the first rank offers a name for the
numbers it sees, and starts with it as soon as every rank has confirmed that its own number is among them.
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

PAUSE = 0.01  # seconds between two looks
ROOT = "stepgraph/start"
LOOPBACK = ("127.0.0.1", "localhost")


def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The store that this start of all ranks has to itself, the number of this rank, and how many there are."""
    store, rank, size = _store(timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    name = _first(store, size, deadline) if rank == 0 else _other(store, rank, deadline)
    return dist.PrefixStore(f"{ROOT}/{name}", store), rank, size


def _store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The store that the environment names.

    If the first rank serves it to this machine alone, it listens on no other address; PyTorch would listen on all.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or address not in LOOPBACK:
        return next(iter(dist.rendezvous("env://", timeout=timeout)))
    listening = socket.create_server((LOOPBACK[0], port)).detach() if rank == 0 else None
    return dist.TCPStore(LOOPBACK[0], port, size, rank == 0, timeout, master_listen_fd=listening), rank, size


def _first(store: dist.Store, size: int, deadline: float) -> str:
    """Offers names until all other ranks have confirmed the same one."""
    numbers: list[str | None] = []
    name = uuid4().hex
    while True:
        now = [_read(store, f"number/{rank}") for rank in range(1, size)]
        if now != numbers and None not in now:  # one of them may be a rank that has died
            numbers, name = now, uuid4().hex
            store.set(f"{ROOT}/offer", json.dumps([name, numbers]))
        confirmed = [_read(store, f"confirmed/{rank}") for rank in range(1, size)]
        if confirmed == [name] * (size - 1):
            store.set(f"{ROOT}/go", name)
            return name
        _pause(deadline, [rank for rank, one in enumerate(confirmed, start=1) if one != name])


def _other(store: dist.Store, rank: int, deadline: float) -> str:
    """Shows a number until the first rank has offered a name for it, and all have confirmed that."""
    number = uuid4().hex
    store.set(f"{ROOT}/number/{rank}", number)
    confirmed = None
    while True:
        name, numbers = json.loads(_read(store, "offer") or "[null, []]")
        if name != confirmed and numbers[rank - 1 : rank] == [number]:
            store.set(f"{ROOT}/confirmed/{rank}", name)
            confirmed = name
        if confirmed is not None and _read(store, "go") == confirmed:
            return confirmed
        _pause(deadline, [0])


def _read(store: dist.Store, key: str) -> str | None:
    return store.get(f"{ROOT}/{key}").decode() if store.check([f"{ROOT}/{key}"]) else None


def _pause(deadline: float, missing: list[int]) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(f"no sign of rank {', '.join(map(str, missing))}")
    time.sleep(PAUSE)
