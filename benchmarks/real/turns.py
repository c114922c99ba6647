"""Contenders as processes: they get ready, one at a time or several at once, and then take turns."""

import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.real.worker import MARK

LONG = 120.0  # seconds for what takes seconds: importing, some steps
TURN_SECONDS, FEWEST_STEPS, MOST_STEPS = 0.5, 3, 50
CACHES = ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


class Failed(Exception):
    """A contender could not do what it was asked for."""


@dataclass(frozen=True)
class Task:
    """What all contenders are to do.

    Args:
        model: its name.
        device: `cpu` or `cuda`.
        small: whether the small model of that name is meant.
        batch: another batch size than the model's own.
        losses: the number of losses to record.
        patience: seconds after which a contender that is not ready is given up.
    """

    model: str
    device: str
    small: bool
    batch: int | None
    losses: int
    patience: float


class Who(NamedTuple):
    """A contender of a model."""

    model: str
    contender: str


class Process:
    """A contender in a new process, with caches in a folder of its own.

    Args:
        task: what to do.
        contender: its name.
        caches: the folder; empty, or that of an earlier process.
        cores: CPU cores it may use; all if None.
    """

    def __init__(self, task: Task, contender: str, caches: Path, cores: Sequence[int] | None = None) -> None:
        self.task, self.contender = task, contender
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (until the process ends)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.real.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | surroundings(caches, cores),
        )
        if cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(self._process.pid, cores)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, within: float, /, **request: Any) -> dict[str, Any]:
        """The answer to a request, within some seconds.

        Raises:
            Failed: if the contender says so, ends, or does not answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Failed(self._last_words()) from error
        until = time.monotonic() + within
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise Failed(f"no answer within {within:.0f} s") from None
            if line is None:
                raise Failed(self._last_words())
            if line.startswith(MARK):
                found = json.loads(line.removeprefix(MARK))
                if "failed" in found:
                    raise Failed(found["failed"])
                return found

    def load(self) -> None:
        """Imports, weights and a batch."""
        task = self.task
        who = {"model": task.model, "contender": self.contender, "device": task.device}
        self.ask(LONG, **who, small=task.small, batch=task.batch)

    def begin(self) -> dict[str, Any]:
        """Everything until steps have their final form."""
        task = self.task
        found = self.ask(task.patience, do="start")
        return found | self.ask(task.patience + LONG, do="settle", seconds=task.patience)

    def prepare(self) -> dict[str, Any]:
        """Everything but taking turns."""
        self.load()
        found = {"where": self.ask(LONG, do="where"), **self.begin(), **self.ask(LONG, do="memory")}
        return found | self.ask(LONG + self.task.losses, do="losses", count=self.task.losses)

    def end(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._reader.join(LONG)
        with self._process:  # closes its pipes and waits
            self.log.close()

    def _last_words(self) -> str:
        self._process.wait()
        self.log.seek(0)
        lines = [line for line in self.log.read().splitlines() if line.strip()]
        return f"ended with {self._process.returncode}: {lines[-1][:200] if lines else 'no message'}"


def prepared(
    wanted: Mapping[Who, tuple[Task, Path]], said: Callable[[str], None]
) -> dict[Who, tuple[Process | None, dict[str, Any]]]:
    """Processes that are ready, with what they say; None, with the reason, for those that failed.

    Several get ready at the same time, each with its share of the cores.

    Args:
        wanted: models and contenders, each with what to do and the folder for its caches.
        said: told when one is ready.
    """
    shares = _shares(len(wanted))

    def one(who: Who, cores: Sequence[int]) -> tuple[Process | None, dict[str, Any]]:
        task, caches = wanted[who]
        process = Process(task, who.contender, caches, cores)
        try:
            row = process.prepare()
        except Failed as error:
            process.end()
            said(f"{who.model}, {who.contender}: {error}")
            return None, {"cores": len(cores), "failed": str(error)}
        said(f"{who.model}, {who.contender}: {in_short(row)}")
        return process, {"cores": len(cores), **row}

    with ThreadPoolExecutor(len(wanted)) as pool:
        return dict(zip(wanted, pool.map(one, wanted, shares), strict=True))


def ready_again(wanted: Mapping[Who, tuple[Task, Path]], times: int) -> dict[Who, dict[str, Any]]:
    """The times of getting ready in other processes with the caches of the first ones, all at the same time.

    Of several times, the middle one counts; all are in `each`.
    """
    runs = [_ready_again(wanted) for _ in range(times)]
    return {who: middle([run[who] for run in runs]) for who in wanted}


def middle(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row whose time is in the middle; one that failed counts as the slowest."""
    in_order = sorted(rows, key=lambda row: row.get("ready", float("inf")))
    return {**in_order[len(rows) // 2], "each": [row.get("ready") for row in rows]}


def _ready_again(wanted: Mapping[Who, tuple[Task, Path]]) -> dict[Who, dict[str, Any]]:
    def one(who: Who, cores: Sequence[int]) -> dict[str, Any]:
        task, caches = wanted[who]
        process = Process(task, who.contender, caches, cores)
        try:
            process.load()
            return process.begin()
        except Failed as error:
            return {"failed": str(error)}
        finally:
            process.end()

    if not wanted:
        return {}
    with ThreadPoolExecutor(len(wanted)) as pool:
        return dict(zip(wanted, pool.map(one, wanted, _shares(len(wanted))), strict=True))


def surroundings(caches: Path, cores: Sequence[int] | None) -> dict[str, str]:
    """What is new in the environment of a contender: its caches and, if it has a share of the cores, its threads.

    PyTorch does not count the cores that a process may use everywhere; two threads on one core wait for each other.
    """
    found = {name: str(caches / name.lower()) for name in CACHES}
    shares = cores is not None and len(cores) < len(_cores())
    return found | ({"OMP_NUM_THREADS": str(len(cores or ()))} if shares else {})


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def _shares(count: int) -> list[list[int]]:
    """The cores of each of some processes."""
    known = _cores()
    share = max(1, len(known) // count)
    return [[known[(i * share + j) % len(known)] for j in range(share)] for i in range(count)]


def in_short(row: Mapping[str, Any]) -> str:
    """What is known of a contender before it takes turns, for a run that is ended early."""
    words = [f"first step after {row['first_step']:.1f} s", f"ready after {row['ready']:.1f} s"]
    words += [] if row["settled"] else ["not in its final form"]
    if row["peak"]:
        sizes = row["peak"]["allocated"], row["peak"]["reserved"], row["kept"]
        words.append("peak {:.2f} GiB of {:.2f} reserved, {:.2f} kept".format(*(size / 2**30 for size in sizes)))
    words += [f"plan {row['plan'] / 2**30:.2f} GiB"] if "plan" in row else []
    return ", ".join([*words, f"loss {row['losses'][0]:.4f} to {row['losses'][-1]:.4f}"])


def rounds(
    processes: Mapping[str, Process], count: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of a step in each round, in which every process has a turn; and why some could not go on.

    Args:
        processes: who takes turns; all of them take as many steps as take the first about half a second.
        count: rounds at most.
        seconds: when no further round begins.
    """
    alive, failed, shuffled = dict(processes), dict[str, str](), random.Random(0)

    def one(steps: int) -> dict[str, float]:
        found = {}
        for name in shuffled.sample(list(alive), len(alive)):  # so that nobody always follows the same one
            try:
                found[name] = alive[name].ask(LONG, do="turn", count=steps)["seconds"]
            except Failed as error:
                failed[name] = str(error)
                del alive[name]
        return found

    first = one(FEWEST_STEPS)
    steps = max(
        FEWEST_STEPS,
        min(MOST_STEPS, round(TURN_SECONDS / next((first[name] for name in processes if name in first), 1.0))),
    )
    found, until = list[dict[str, float]](), time.monotonic() + seconds
    while alive and len(found) < count and (not found or time.monotonic() < until):
        found.append(one(steps))
    return {name: [times[name] for times in found] for name in alive}, failed
