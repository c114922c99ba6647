"""Facts about the program and the machine for later readers of a run. No names of people or hosts."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stepgraph.device import Device
from stepgraph.errors import working_directory
from stepgraph.optimizers import Optimizer, ParameterGroup, RegularizationType
from stepgraph.system.surroundings import Precision

_SECRET = re.compile(r"(?i)(token|password|passwd|secret|credential|api[-_]?key|auth)")
HIDDEN = "…"


def environment(device: Device) -> dict[str, Any]:
    """Versions, device, threads and processor."""
    kind = device.torch.type
    found = {
        "stepgraph": sys.modules["stepgraph"].__version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device.torch)
        found |= {
            "gpu memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "cuda": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": "products {}, cudnn {}".format(*Precision.of(None).tf32),
        }
    return found


def command(folder: Path) -> dict[str, Any]:
    """How the program was started, with shortened paths and without values that look like secrets.

    `directory` is where it was started, relative to the run folder, so that it stays valid when both move together.
    """
    given = getattr(sys, "orig_argv", sys.argv)
    return {
        "arguments": [_shorter(one) for one in _without_secrets(given)],
        "directory": _directory(folder),
    }


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The explicit settings of `fit`, without defaults and paths."""
    shown = {name: _plain(value) for name, value in given.items() if value is not None and not isinstance(value, Path)}
    return {name: value for name, value in shown.items() if value != ""}


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, Optimizer):
        return _optimizer(value)
    # A function would show its address, which means nothing to a reader.
    return getattr(value, "__qualname__", None) or repr(value)


def _optimizer(optimizer: Optimizer) -> str:
    """Its hyperparameters, without disabled clipping and regularization."""
    off = {"time_step"}
    if not optimizer.applies_gradient_clipping:
        off |= {"gradient_clip_max", "gradient_clip_min", "maximum_clipping_norm", "custom_global_norm"}
    if optimizer.penalty is RegularizationType.NONE and not optimizer.decouples_decay:
        off.add("regularization_scale")
    numbers = (f"{name}={getattr(optimizer, name):g}" for name in optimizer.live if name not in off)
    clipping = [f"clipping={optimizer.gradient_clipping_type.name}"] if optimizer.applies_gradient_clipping else []
    groups = [f"groups=[{'; '.join(_group(group) for group in optimizer.groups)}]"] if optimizer.groups else []
    return f"{type(optimizer).__name__}({', '.join([*numbers, *clipping, *groups])})"


def _group(group: ParameterGroup) -> str:
    return ": ".join([group.text, ", ".join(group.changes)])


def _without_secrets(given: list[str]) -> list[str]:
    shown: list[str] = []
    hides_next = False
    for one in given:
        name, equals, _ = one.partition("=")
        is_secret = name.startswith("-") and _SECRET.search(name) is not None
        if hides_next and not one.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{name}={HIDDEN}" if is_secret and equals else one)
        hides_next = is_secret and not equals
    return shown


def _shorter(one: str) -> str:
    """Paths below the working directory become relative to it, those below the home directory start with `~`."""
    path = Path(one)
    if not path.is_absolute():
        return one
    if one == (sys.orig_argv or [""])[0]:
        return path.name  # the interpreter; the environment records which one
    for base, name in ((working_directory(), ""), (_home(), "~/")):
        if base is not None and path.is_relative_to(base):
            return name + path.relative_to(base).as_posix()
    return one


def _directory(folder: Path) -> str:
    """The working directory relative to a folder; empty if there is no relative path."""
    here = working_directory()
    if here is None or here.drive != folder.resolve().drive:
        return ""
    return os.path.relpath(here, folder.resolve())


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # neither HOME nor the account defines it
        return None


def _processor() -> str:
    """The name of the processor, if the system provides it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if named:
            return f"{named[1].strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()
