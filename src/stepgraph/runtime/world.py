"""The processes that train together: joined as torchrun says, left when the program ends.

Without torchrun there is one process, and nothing is exchanged. Arrays travel as bytes, so that every type can.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from stepgraph.compiler import collectives
from stepgraph.device import Device
from stepgraph.errors import DeviceError, ExecutionError, StateError, reason
from stepgraph.system import torch_private

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
ALWAYS_EXCHANGES = False  # whether a single rank that torchrun started runs collectives, too, for tests
_HOST = torch.device("cpu")
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets these
Waiting = Callable[[], torch.Tensor]  # for what a collective brings; it has been started


@dataclass(frozen=True)
class World:
    """The ranks that train together, as one of them sees them.

    Args:
        rank: the number of this process, from 0.
        size: the number of processes.
        device: where arrays are exchanged.
        group: PyTorch's name for all of them.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = _HOST
    group: str = ""

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

    def any(self, flag: bool, what: str) -> bool:
        """Whether a flag is set on any rank."""
        if self.is_alone:
            return flag
        return bool(self.gather(torch.tensor([flag], device=self.device), what)().any())

    def start(self, what: str, name: str, array: torch.Tensor, *settings: Any) -> tuple[torch.Tensor, Waiting]:
        """Starts a collective of PyTorch by its name; returns its result, and what waits for it."""
        collectives = torch_private.functional_collectives
        with self._explained(what):
            started = getattr(collectives, name)(array, *settings, self.group)

        def wait() -> torch.Tensor:
            with self._explained(what):
                return collectives.wait_tensor(started)

        return started, wait

    def _start(self, what: str, name: str, array: torch.Tensor, *settings: Any) -> Waiting:
        return self.start(what, name, array, *settings)[1]

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Raises an error that names this rank and what it was exchanging."""
        try:
            yield
        except RuntimeError as error:
            raise ExecutionError(
                f"rank {self.rank} of {self.size}",
                f"the other ranks could not be reached to exchange {what}: {reason(error)}",
                fix="see what the other ranks report; raise Parallel(timeout=...) if one of them is only slow",
            ) from error


ALONE = World()


def joined(device: torch.device, timeout: float) -> World:
    """The ranks that torchrun started, or this process alone. Joins them when it is first asked.

    Args:
        device: where graphs run.
        timeout: seconds after which a rank stops waiting for the others.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if (int(os.environ.get("WORLD_SIZE", "1")) == 1 and not ALWAYS_EXCHANGES) or "RANK" not in os.environ:
            return ALONE
        _join(device, timeout)
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    if (size == 1 and not ALWAYS_EXCHANGES) or group is None:
        return ALONE
    found = World(rank, size, device, group.group_name)
    collectives.connect(found.group, found)
    return found


def own_gpu(device: Device) -> Device:
    """The GPU for this process, where torchrun started several on a machine and all ask for the first one."""
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if not device.is_cuda or device.torch.index != 0 or index >= torch.cuda.device_count():
        return device
    return Device(device.type, (torch.device("cuda", index),))


def _join(device: torch.device, timeout: float) -> None:
    if device.type not in BACKENDS:
        raise DeviceError("compile", f"ranks cannot exchange arrays of '{device}'", fix='use "cpu" or "cuda"')
    missing = [name for name in NAMES if name not in os.environ]
    if missing or not dist.is_available():
        problem = f"{', '.join(missing)} is not set" if missing else "this PyTorch has no torch.distributed"
        raise StateError("compile", f"the other ranks cannot be found: {problem}", fix="start it with torchrun")
    settings: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        settings["device_id"] = device
    try:
        with _on_loopback():
            dist.init_process_group(BACKENDS[device.type], timeout=timedelta(seconds=timeout), **settings)
    except (RuntimeError, ValueError) as error:
        raise ExecutionError("compile", f"the other ranks cannot be reached: {reason(error)}") from error
    atexit.register(_leave)


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


class Releasable(Protocol):
    """Something that holds captured collectives."""

    def release(self) -> None:
        """Releases them."""


_captured: WeakSet[Releasable] = WeakSet()


def release_before_leaving(one: Releasable) -> None:
    """Lets captured collectives be released before the group they belong to, while they exist."""
    _captured.add(one)


def _leave() -> None:
    for one in [*_captured]:
        one.release()
    if dist.is_initialized():
        dist.destroy_process_group()


def _bytes(array: torch.Tensor) -> torch.Tensor:
    return array.contiguous().view(-1).view(torch.uint8)
