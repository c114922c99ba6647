"""Devices as the command line spells them: a name, then settings, joined by colons.

    cpu   gpu   gpu:1   any   cuda:0   mps   xpu
    cpu:deterministic   gpu:bfloat16   cuda:1:float16:fused

Without settings a graph is compiled as it was when it was saved. With settings these alone count; `default` is none.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepgraph.device import Device

NAMES = ("cpu", "gpu", "any", "cuda", "mps", "xpu")
# What a setting decides, and how; of each kind there can be one.
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
  Settings stand behind the device: gpu:bfloat16:fused. Without any, a saved
  graph is compiled as it was when it was saved.
  default             what compile does when it is asked for nothing
  deterministic       PyTorch's own kernels, nothing chosen or fused
  fused, unfused      with PyTorch's compiler, or without
  bfloat16, float16   mixed precision
  tf32, no-tf32       whether a GPU may multiply float32 matrices with TF32
"""


@dataclass(frozen=True)
class Place:
    """A device and how to compile for it, as it was spelled."""

    text: str
    name: str
    index: int | None = None
    settings: tuple[str, ...] = ()

    @property
    def compilation(self) -> dict[str, Any]:
        """Keyword arguments of `compile`; none at all where nothing was set."""
        from stepgraph.types import GraphCompilationOptions

        found = dict(SETTINGS[one] for one in self.settings)
        if found:
            found["options"] = GraphCompilationOptions[found.get("options", "NONE")]
        return found

    def device(self) -> Device:
        """The device; an error where this machine has none such."""
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
            fix="use one of these; `stepgraph devices` tells what is missing",
        )


def place(text: str) -> Place:
    """One device, as `argparse` reads it."""
    name, *rest = text.split(":")
    if name not in NAMES:
        raise argparse.ArgumentTypeError(f"{name!r} is no device: use one of {', '.join(NAMES)}")
    index = int(rest.pop(0)) if rest and rest[0].isdecimal() else None
    if index is not None and name in ("cpu", "any"):
        raise argparse.ArgumentTypeError(f"{text!r}: {name} has no number")
    decided: dict[str, str] = {}
    for setting in rest:
        if setting not in SETTINGS:
            raise argparse.ArgumentTypeError(f"{setting!r} in {text!r} is no setting: use {', '.join(SETTINGS)}")
        kind = SETTINGS[setting][0]
        if kind in decided:
            raise argparse.ArgumentTypeError(f"{text!r}: {decided[kind]} and {setting} cannot both be")
        decided[kind] = setting
    return Place(text, name, index, tuple(decided.values()))


def places(text: str) -> list[Place]:
    """Two or more devices with commas between them, as `argparse` reads them."""
    found = [place(one.strip()) for one in text.split(",")]
    if len(found) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} names one device, two are needed to compare: cpu,gpu")
    return found
