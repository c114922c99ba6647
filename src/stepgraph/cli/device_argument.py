"""Devices on the command line: a name, then settings, joined by colons.

    cpu   gpu   gpu:1   any   cuda:0   mps   xpu
    cpu:deterministic   gpu:bfloat16   cuda:1:float16:fused

Without settings, a graph is compiled with its saved settings. Any settings replace them all; `default` sets none.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepgraph.device import Device

NAMES = ("cpu", "gpu", "any", "cuda", "mps", "xpu")
# What a setting decides, and how; at most one of each kind.
SETTINGS: dict[str, tuple[str, Any]] = {
    "default": ("options", "NONE"),
    "deterministic": ("options", "DETERMINISTIC"),
    "fused": ("options", "FUSE_LAYERS"),
    "unfused": ("options", "DISABLE_LAYER_FUSION"),
    "bfloat16": ("compute_type", "bfloat16"),
    "float16": ("compute_type", "float16"),
    "tf32": ("tf32", True),
    "no-tf32": ("tf32", False),
}
SYNTAX = """\
devices:
  cpu, gpu, any, cuda, mps or xpu; a number names one of several: gpu:1
  Settings follow the device: gpu:bfloat16:fused. Without any, a saved
  graph is compiled with its saved settings.
  default             the defaults of compile
  deterministic       PyTorch's own kernels, nothing chosen or fused
  fused, unfused      with PyTorch's compiler, or without
  bfloat16, float16   mixed precision
  tf32, no-tf32       whether a GPU may multiply float32 matrices in TF32
"""


@dataclass(frozen=True)
class DeviceArgument:
    """A device and how to compile for it, as written on the command line."""

    text: str
    name: str
    index: int | None = None
    settings: tuple[str, ...] = ()

    @property
    def compilation(self) -> dict[str, Any]:
        """Keyword arguments of `compile`; none if nothing was set."""
        from stepgraph.types import GraphCompilationOptions

        found = dict(SETTINGS[one] for one in self.settings)
        if found:
            found["options"] = GraphCompilationOptions[found.get("options", "NONE")]
        return found

    def device(self) -> Device:
        """The device; raises an error if this machine does not have it."""
        import torch

        from stepgraph import Device, DeviceError, DeviceType

        if self.name in ("cpu", "any"):
            return Device.cpu() if self.name == "cpu" else Device.any()
        every = Device.of(DeviceType.GPU, selects_multiple_compute_devices=True)
        gpus = () if every is None else every.gpu_devices
        number = self.index or 0
        if self.name == "gpu" and number < len(gpus):
            return Device.with_gpus([gpus[number]])
        if self.name != "gpu" and torch.device(self.name, number) in gpus:
            return Device.with_gpus([torch.device(self.name, number)])
        raise DeviceError(
            f"device {self.text}",
            "this machine has no such device that PyTorch can use",
            here=", ".join(["cpu", *map(str, gpus)]),
            fix="use one of these; `stepgraph devices` shows what is missing",
        )


def parse(text: str) -> DeviceArgument:
    """One device, as `argparse` reads it."""
    name, *rest = text.split(":")
    if name not in NAMES:
        raise argparse.ArgumentTypeError(f"{name!r} is not a device: use one of {', '.join(NAMES)}")
    index = int(rest.pop(0)) if rest and rest[0].isdecimal() else None
    if index is not None and name in ("cpu", "any"):
        raise argparse.ArgumentTypeError(f"{text!r}: {name} has no number")
    decided: dict[str, str] = {}
    for setting in rest:
        if setting not in SETTINGS:
            raise argparse.ArgumentTypeError(f"{setting!r} in {text!r} is not a setting: use {', '.join(SETTINGS)}")
        kind = SETTINGS[setting][0]
        if kind in decided:
            raise argparse.ArgumentTypeError(f"{text!r}: {decided[kind]} and {setting} cannot be combined")
        decided[kind] = setting
    return DeviceArgument(text, name, index, tuple(decided.values()))


def parse_several(text: str) -> list[DeviceArgument]:
    """Two or more devices separated by commas, as `argparse` reads them."""
    found = [parse(one.strip()) for one in text.split(",")]
    if len(found) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} names one device, but a comparison needs two: cpu,gpu")
    return found
