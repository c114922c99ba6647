"""Devices: the processor a graph is compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from stepgraph.errors import DataTypeError, DeviceError
from stepgraph.types import DeviceType

TorchDevice = torch.device
_KINDS = {"gpu": DeviceType.GPU, "any": DeviceType.ANY}


@dataclass(frozen=True)
class Device:
    """One processor, or several GPUs (a graph runs on the first of them).

    Devices that are the same processor are equal, however they were requested: without a GPU, `any()` is `cpu()`.

    Example:
        >>> Device.cpu().actual_device_type.name
        'CPU'
    """

    type: DeviceType = field(compare=False)
    torch_devices: tuple[TorchDevice, ...]

    @classmethod
    def cpu(cls) -> Device:
        """The CPU."""
        return cls(DeviceType.CPU, (torch.device("cpu"),))

    @classmethod
    def gpu(cls) -> Device | None:
        """The first GPU (CUDA, ROCm, Metal, XPU), or None if there is none."""
        devices = _accelerators()
        return cls(DeviceType.GPU, devices[:1]) if devices else None

    @classmethod
    def any(cls) -> Device:
        """The device that trains fastest here: a GPU if there is one, otherwise the CPU."""
        return cls(DeviceType.ANY, (_accelerators() or (torch.device("cpu"),))[:1])

    @classmethod
    def ane(cls) -> Device | None:
        """Apple's Neural Engine: always None, as on a machine without one."""
        return None

    @classmethod
    def of(
        cls, kind: DeviceType | str | TorchDevice, *, selects_multiple_compute_devices: bool = False
    ) -> Device | None:
        """A device by its type or name; None if this machine does not have it.

        Names are PyTorch's (`"cpu"`, `"cuda"`, `"cuda:1"`), and `"gpu"` and `"any"` for these types.
        """
        if isinstance(kind, str) and kind in _KINDS:
            kind = _KINDS[kind]
        if isinstance(kind, str | TorchDevice):
            named = _named(kind, ())
            if named.type == "cpu":
                return cls.cpu()
            return cls(DeviceType.GPU, (named,)) if named in _accelerators() else None
        if not isinstance(kind, DeviceType):
            raise DataTypeError(
                "Device", f"{kind!r} is not a kind of device", fix='use DeviceType, or a name such as "cuda:1"'
            )
        if kind is DeviceType.CPU:
            return cls.cpu()
        chosen = {DeviceType.GPU: cls.gpu, DeviceType.ANY: cls.any, DeviceType.ANE: cls.ane}[kind]()
        if chosen is not None and selects_multiple_compute_devices and chosen.gpu_devices:
            return cls(kind, _accelerators())
        return chosen

    @classmethod
    def with_gpus(cls, gpus: Sequence[str | int | TorchDevice]) -> Device:
        """Exactly these GPUs."""
        if not isinstance(gpus, Sequence) or isinstance(gpus, str):
            raise DataTypeError("Device", f"{gpus!r} is not a list of GPUs", fix='use a list: [0, 1] or ["cuda:1"]')
        present = _accelerators()
        wanted = tuple(_named(gpu, present) for gpu in gpus)
        if not wanted or any(gpu not in present for gpu in wanted):
            here = ", ".join(map(str, present)) or "no GPU"
            raise DeviceError(
                "Device",
                f"{', '.join(map(str, gpus)) or 'no GPU'} was requested, but this machine has {here}",
                fix="use Device.any()",
            )
        return cls(DeviceType.GPU, wanted)

    @cached_property
    def torch(self) -> TorchDevice:
        """The device of the arrays of a graph compiled for this device; needed in every call, so cached."""
        return self.torch_devices[0]

    @cached_property
    def is_cuda(self) -> bool:
        """Whether it works asynchronously, in streams; needed in every call, so cached."""
        return self.torch.type == "cuda"

    @property
    def actual_device_type(self) -> DeviceType:
        """The type that `any` resolved to."""
        return DeviceType.CPU if self.torch.type == "cpu" else DeviceType.GPU

    @property
    def gpu_devices(self) -> tuple[TorchDevice, ...]:
        """The GPUs of this device; empty for the CPU."""
        return tuple(device for device in self.torch_devices if device.type != "cpu")

    def __str__(self) -> str:
        if self.torch.type == "cuda":
            return f"{self.torch} ({torch.cuda.get_device_name(self.torch)})"
        threads = torch.get_num_threads()
        cpu = f"cpu ({threads} thread{'s' if threads > 1 else ''})"
        return cpu if self.torch.type == "cpu" else str(self.torch)


def _accelerators() -> tuple[TorchDevice, ...]:
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        return ()
    return tuple(torch.device(kind.type, index) for index in range(torch.accelerator.device_count()))


def _named(gpu: str | int | TorchDevice, present: tuple[TorchDevice, ...]) -> TorchDevice:
    try:
        named = torch.device(present[0].type if present else "cuda", gpu) if isinstance(gpu, int) else torch.device(gpu)
    except (RuntimeError, TypeError):
        raise DataTypeError("Device", f"{gpu!r} is not a device", fix='use a name such as "cpu" or "cuda:1"') from None
    return named if named.type == "cpu" else torch.device(named.type, named.index or 0)
