"""Values of tensors on their way to a device, while the program does something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from stepgraph.device import Device
from stepgraph.system import background
from stepgraph.tensors.tensor import Array, Tensor

SENT = {"cuda"}  # where copies take time without Python's lock
Arrivals = Callable[[], list[Array]]


def sent(tensors: Sequence[Tensor], device: Device) -> Arrivals:
    """Starts to copy values to a device; the function that it returns waits for them, and raises what went wrong."""
    future = Future[list[Array]]()

    def work() -> None:
        try:
            # In the modes of a new thread. Whoever waits for this may hold the settings of the process.
            future.set_result([tensor.on(device) for tensor in tensors])
        except BaseException as error:
            future.set_exception(error)

    if device.torch.type not in SENT:
        return lambda: [tensor.on(device) for tensor in tensors]
    background.do("stepgraph arrivals", work)
    return future.result
