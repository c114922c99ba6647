"""The processes that train together: joined as torchrun says, left when the program ends.

Without torchrun there is one process, and nothing is exchanged. Arrays travel as bytes, so that every type can.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from stepgraph.compiler.ranks import collectives
from stepgraph.device import Device
from stepgraph.errors import DeviceError, ExecutionError, StateError, reason
from stepgraph.runtime.heartbeat import Heartbeat, Place
from stepgraph.runtime.meeting import meet
from stepgraph.runtime.rank_calls import RankCall, Told, disagreement, note_told
from stepgraph.runtime.waits import Waits
from stepgraph.system import torch_private, torchrun

logger = logging.getLogger("stepgraph")
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
JOINING = 300.0  # seconds for all ranks to start, which takes longer than an exchange
ALARM = 0.9  # of the timeout: then PyTorch's watchdog ends a process that waits for a GPU
STORE_SECONDS = 5.0  # after which a store that has gone is given up
ALWAYS_EXCHANGES = False  # whether a single rank that torchrun started runs collectives, too, for tests
LATE = 5.0  # seconds after which a rank says by itself what the others have not come to hear
_HOST = torch.device("cpu")
Waiting = Callable[[], torch.Tensor]  # for what a collective brings; it has been started


@dataclass(frozen=True)
class World:
    """The ranks that train together, as one of them sees them.

    Args:
        rank: the number of this process, from 0.
        size: the number of processes.
        device: where arrays are exchanged.
        group: PyTorch's name for all of them.
        place: where this rank is.
        heartbeat: where the others are.
        waits: how long a GPU waits for the others; None if this program itself waits.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _HOST
    group: str = ""
    place: Place = field(default_factory=Place, compare=False)
    heartbeat: Heartbeat | None = field(default=None, compare=False)
    waits: Waits | None = field(default=None, compare=False)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to exchange anything with."""
        return not self.group

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that shows progress and writes files."""
        return self.rank == 0

    def gather(self, array: torch.Tensor, what: str) -> Waiting:
        """The arrays of all ranks, which have one shape, as `[rank, ...]`."""
        if self.is_alone:
            return lambda: array[None]
        sent = _bytes(array)
        shape, dtype = (self.size, *array.shape), array.dtype
        wait = self._start(what, "all_gather_into_tensor", sent, self.size)
        return lambda: wait().view(dtype).view(shape)

    def trade(self, slices: Sequence[torch.Tensor], counts: Sequence[int], what: str) -> Waiting:
        """Sends a flat array to each rank, and receives one of `counts` numbers from each, joined in order.

        Args:
            slices: what each rank gets, all of one type.
            counts: how many numbers each rank sends to this one.
            what: what it is, for errors.
        """
        if self.is_alone:
            return lambda: slices[0]
        dtype = slices[0].dtype
        given, taken = ([count * dtype.itemsize for count in all] for all in ([len(one) for one in slices], counts))
        wait = self._start(what, "all_to_all_single", _bytes(torch.cat([*slices])), taken, given)
        return lambda: wait().view(dtype)

    def scatter_sum(self, array: torch.Tensor, what: str) -> Waiting:
        """This rank's part, all of one size, of the sum of all ranks, in the order of the communication library."""
        return self._start(what, "reduce_scatter_tensor", array, "sum", self.size)

    def share(self, array: torch.Tensor, what: str) -> torch.Tensor:
        """The array of the first rank."""
        if self.is_alone:
            return array
        return self._start(what, "broadcast", _bytes(array), 0)().view(array.dtype).view(array.shape)

    def gather_numbers(self, numbers: Sequence[float], what: str) -> list[list[float]]:
        """A few numbers of each rank, by rank."""
        if self.is_alone:
            return [[*numbers]]
        sent = torch.tensor([*numbers], dtype=torch.float64, device=self.device)
        return self.gather(sent, what)().tolist()

    def gather_texts(self, text: str, what: str) -> list[str]:
        """A text of each rank, by rank."""
        mine = text.encode()
        longest = self.most(len(mine), f"lengths of {what}")
        sent = torch.tensor([*mine.ljust(longest, b"\0")], dtype=torch.uint8, device=self.device)
        return [bytes(one).rstrip(b"\0").decode() for one in self.gather(sent, what)().tolist()]

    def most(self, number: int, what: str) -> int:
        """The greatest of the numbers of all ranks."""
        return int(max(one for (one,) in self.gather_numbers([number], what)))

    def any(self, flag: bool, what: str) -> bool:
        """Whether a flag is set on any rank."""
        return bool(self.most(flag, what))

    def greet(self, told: Told, number: float = 0) -> list[float]:
        """What each rank tells in the same call of a run; if one makes another call, all raise an error.

        Args:
            told: what this rank does.
            number: what it tells.
        """
        what = "whether to stop" if told[0] == RankCall.STEP_OF_FIT else RankCall(told[0]).exchanged
        found = self.gather_numbers([*told, number], what)
        calls = [(int(call), int(detail), int(switched)) for call, detail, switched, _ in found]
        graphs = [one for _, _, one in calls]
        error = disagreement(calls, f"rank {self.rank} of {self.size}", str, graphs)
        if error is not None:
            note_told(error)
            raise error
        return [one[-1] for one in found]

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """Around a run: if this rank fails, the others hear of it where they greet it, instead of waiting.

        They have heard of what came with an exchange, and of what `Shards.tell_failure` has told.
        """
        try:
            yield
        except Exception as error:
            if not self.is_alone and note_told(error):
                with self.telling(error):
                    self.greet((RankCall.FAILURE, 0, 0))
            raise

    @contextmanager
    def telling(self, error: Exception) -> Iterator[None]:
        """Around telling the others of an error; says it here if they come late, since they may never come."""
        text = "rank %d of %d waits to tell the other ranks of its error: %s"
        late = threading.Timer(LATE, logger.error, (text, self.rank, self.size, error))
        late.daemon = True
        late.start()
        try:
            with suppress(ExecutionError):  # whoever hears of it raises an error
                yield
        finally:
            late.cancel()

    def start(self, what: str, name: str, array: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, Waiting]:
        """Starts a collective of PyTorch by its name; returns its result, and what waits for it."""
        collectives = torch_private.functional_collectives
        number = self.place.start(what)
        with self.explained(what, number):
            if name == "all_gather_into_tensor" and array.device.type == "cpu":
                started = self._gathering(array)
            else:
                started = getattr(collectives, name)(array, *settings, self.group)

        def wait() -> torch.Tensor:
            with self.explained(what, number):
                return collectives.wait_tensor(started)

        return started, wait

    def _gathering(self, array: torch.Tensor) -> torch.Tensor:
        """Starts to gather with Gloo, whose two threads note without a lock what they have completed.

        A name of more than 15 letters takes memory, which both may free. Only the operator without an array for the
        result has such a name: it is called "ALLGATHER_COALESCED".
        """
        out = array.new_empty(self.size * len(array), *array.shape[1:])
        return torch_private.functional_collectives.all_gather_into_tensor_out(array, self.size, self.group, out=out)

    def _start(self, what: str, name: str, array: torch.Tensor, *settings: Any) -> Waiting:
        return self.start(what, name, array, *settings)[1]

    @contextmanager
    def explained(self, what: str, number: int) -> Iterator[None]:
        """Around a part of an exchange: measures how long it waits; an error names the ranks that are missing.

        Args:
            what: what is exchanged.
            number: what `place.start` has returned for it.
        """
        began, self.place.waiting = time.perf_counter(), True
        try:
            yield
        except RuntimeError as error:
            failed = self._failed(what, number, time.perf_counter() - began, error)
            note_told(failed)  # nobody can hear of it
            raise failed from error
        finally:
            self.place.waiting = False
            if self.waits is None:
                self.place.waited += time.perf_counter() - began

    def measured(self, what: str) -> AbstractContextManager[None]:
        """Around waiting for the others in front of an update, if a GPU does it."""
        return nullcontext() if self.waits is None else self.waits.around(what)

    def count_waits(self) -> None:
        """Adds what the GPU has waited in the last update, which must have passed the waits."""
        found = None if self.waits is None else self.waits.next()
        if found is not None:
            self.place.waited += found

    def _failed(self, what: str, number: int, seconds: float, error: RuntimeError) -> ExecutionError:
        missing = {} if self.heartbeat is None else self.heartbeat.missing(number)
        where, step = f"rank {self.rank} of {self.size}", self.place.step
        facts = {"waited": f"{seconds:.1f} s", "reported": reason(error)}
        apart = {} if self.heartbeat is None or missing else self.heartbeat.elsewhere(number, what)
        if apart:
            others = ", ".join(f"rank {rank} exchanges {one}" for rank, one in apart.items())
            problem = f"this rank exchanges {what} in step {step}, and meanwhile {others}"
            return ExecutionError(where, problem, **facts, fix="make the same calls in the same order on every rank")
        if not missing:
            problem = f"the other ranks could not be reached to exchange {what} in step {step}"
            return ExecutionError(where, problem, **facts, fix="see what the other ranks report")
        names = " and ".join(f"rank {rank}" for rank in missing)
        problem = f"{names} did not come to exchange {what} in step {step}"
        found = {f"rank_{rank}": text for rank, text in missing.items()}
        fix = f"look at the output of {names}; if that is only slow, raise Parallel(timeout=...)"
        return ExecutionError(where, problem, **found, **facts, fix=fix)


ALONE = World()


def joined(device: torch.device, timeout: float) -> World:
    """The ranks that torchrun started, or this process alone. Joins them when it is first asked.

    Args:
        device: where graphs run.
        timeout: seconds after which a rank stops waiting for the others.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if not torchrun.has_started_several() and not (ALWAYS_EXCHANGES and "RANK" in os.environ):
            return ALONE
        _join(device, timeout)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    if (size == 1 and not ALWAYS_EXCHANGES) or group is None:
        return ALONE
    group.set_timeout(timedelta(seconds=timeout))
    beating = _beating(group, rank, size)
    beating.alarm = ALARM * timeout if device.type == "cuda" else None
    waits = _waits if device.type == "cuda" else None
    found = World(rank, size, device, group.group_name, beating.place, beating, waits)
    collectives.connect(found.group, found)
    return found


def own_device(device: Device, is_parallel: bool) -> Device:
    """The device of this process; says how to use all GPUs of one that has several."""
    remark = unused_gpus(device, is_parallel)
    if remark is not None:
        logger.warning("%s", remark)
    return own_gpu(device) if is_parallel else device


def own_gpu(device: Device) -> Device:
    """The GPU for this process, where torchrun started several on a machine and all ask for the first, or for all."""
    index, several = int(os.environ.get("LOCAL_RANK", "0")), device.gpu_devices
    if len(several) > 1:
        return Device(device.type, (several[index % len(several)],))
    if not device.is_cuda or device.torch.index != 0 or index >= torch.cuda.device_count():
        return device
    return Device(device.type, (torch.device("cuda", index),))


def unused_gpus(device: Device, is_parallel: bool) -> str | None:
    """What to say of a device with several GPUs, of which one process uses the first; None if all are used."""
    count, several = len(device.gpu_devices), torchrun.has_started_several()
    if count < 2 or (is_parallel and several):
        return None
    found = f"the device has {count} GPUs, but a process uses one: this one trains on {device.torch}"
    steps = [] if is_parallel else [f"compile with parallel=stepgraph.Parallel(shards={count})"]
    steps += [] if several else [f"start the program with: {torchrun.command(count)}"]
    return f"{found}. To use all of them, {', and '.join(steps)}"


def _join(device: torch.device, timeout: float) -> None:
    if device.type not in BACKENDS:
        raise DeviceError("compile", f"ranks cannot exchange arrays of '{device}'", fix='use "cpu" or "cuda"')
    missing = [name for name in torchrun.NAMES if name not in os.environ]
    if missing or not dist.is_available():
        problem = f"{', '.join(missing)} is not set" if missing else "this PyTorch has no torch.distributed"
        raise StateError("compile", f"the other ranks cannot be found: {problem}", fix="start it with torchrun")
    patience = timedelta(seconds=max(timeout, JOINING))
    settings: dict[str, Any] = {"timeout": patience}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        settings["device_id"] = device
    try:
        with _on_loopback():
            store, rank, size = meet(patience)
            dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=size, **settings)
    except (RuntimeError, ValueError, OSError) as error:
        raise ExecutionError("compile", f"the other ranks cannot be reached: {reason(error)}") from error
    _left_at_exit.append(dist.group.WORLD)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Lets ranks that are all on this machine listen on no other address, unless the environment says otherwise."""
    local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    interface = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    names = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if name not in os.environ]
    if not local or interface is None:
        yield
        return
    os.environ |= dict.fromkeys(names, interface)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


_hearts: dict[Any, Heartbeat] = {}  # by process group: there is one
_left_at_exit: list[Any] = []  # the process group, unless the program has made it itself
_waits = Waits()  # of all graphs: one update follows another


def _beating(group: Any, rank: int, size: int) -> Heartbeat:
    """What tells where this rank is, one per process group."""
    if group not in _hearts:
        _hearts.clear()
        store = group.get_group_store().clone()
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        _hearts[group] = Heartbeat(rank, size, store, Place())
        atexit.register(leave)
    return _hearts[group]


class Releasable(Protocol):
    """Something that holds captured collectives."""

    def release(self) -> None:
        """Releases them."""


_captured: WeakSet[Releasable] = WeakSet()


def release_before_leaving(one: Releasable) -> None:
    """Lets captured collectives be released before the group they belong to, while they exist."""
    _captured.add(one)


def leave() -> None:
    """Tells the other ranks that this one ends, and leaves them; done by itself when a program ends."""
    atexit.unregister(leave)
    for heart in _hearts.values():
        heart.stop()
    for one in [*_captured]:
        one.release()
    if _left_at_exit and dist.is_initialized() and dist.group.WORLD is _left_at_exit[-1]:
        dist.destroy_process_group()
    _hearts.clear()
    _left_at_exit.clear()


def _bytes(array: torch.Tensor) -> torch.Tensor:
    return array.contiguous().view(-1).view(torch.uint8)
